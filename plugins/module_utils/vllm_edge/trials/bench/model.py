# SPDX-License-Identifier: Apache-2.0
"""The records of the benchmark: one file of JSON lines for each run, in /var/lib/vllm-edge/bench/.

The first line is the run, with everything that is needed to repeat it. Each measurement is a line, and the last line
says how the run ended. A file without that last line is of a run that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ...paths import HostPaths
from ...system.files import make_directories, name_errors, prune
from ...system.long_run import list_records
from ...system.records import read_record

KEPT_RUNS = 50
MODE = 0o640

Through = Literal["engine", "gateway"]
Verdict = Literal["passed", "findings", "interrupted"]
Case = Literal["warm-up", "protocol", "sweep", "long-context", "shared-prefix", "soak"]


@dataclass(frozen=True)
class EngineRecord:
    model: str
    repo: str
    revision: str
    precision: str
    tensor_parallel_size: int
    served_names: tuple[str, ...]
    gpus: tuple[str, ...]
    """UUIDs."""
    slots: tuple[int, ...]
    arguments: tuple[str, ...]
    """Its line of `docker create`, without secrets."""
    input_hash: str
    weights_digest: str | None
    """Hash over the model's files; None if their record cannot be read."""
    max_model_len: int | None = None
    plan: Mapping[str, Any] | None = None
    """`plan` of its engine.json, with `decode_tok_s`."""
    load_seconds: float | None = None
    load_phases: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Run:
    run: str
    """Its name, which is that of its file: time of the start, and profile."""
    at: str
    host: str
    profile: str
    generation: int
    image: str
    image_id: str
    vllm: str
    driver: str | None
    engines: Mapping[str, EngineRecord]
    note: str = ""
    """`serving_note` of the inventory."""
    gateway: bool = False
    """Whether a gateway is in front of the engines."""
    cases: tuple[str, ...] = ()
    asked_by: str = ""
    kind: str = "run"
    schema: int = 1


@dataclass(frozen=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class GpuFigures:
    """One GPU during a measurement. A figure is None if NVML does not give it."""

    slot: int | None
    uuid: str
    vram_before_mib: int | None = None
    vram_peak_mib: int | None = None
    vram_after_mib: int | None = None
    power_w_mean: float | None = None
    power_w_max: float | None = None
    joules: float | None = None
    sm_clock_mhz_min: int | None = None
    sm_clock_mhz_max: int | None = None
    temperature_c_max: int | None = None
    throttle: tuple[str, ...] = ()
    """Reasons for which NVML said that the clocks were lowered; idling is none."""


@dataclass(frozen=True)
class Measurement:
    """One call of `vllm bench serve`. A figure is None if it could not be read."""

    at: str
    engine: str
    """If the gateway shares the requests among several engines, the first one."""
    served_name: str
    through: Through
    case: Case
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    completed: int
    failed: int
    seconds: float
    tok_s: float
    """Output tokens of all requests by the seconds of the measurement."""
    decode_tok_s: float | None = None
    """Output tokens of one request per second after its first token: 1000 by the median milliseconds per token."""
    ttft_ms: Percentiles | None = None
    """Time to the first token."""
    itl_ms: Percentiles | None = None
    """Time between two tokens."""
    e2e_ms: Percentiles | None = None
    """Time of a whole request."""
    kv_use_peak: float | None = None
    """Largest share of the KV cache in use, from 0 to 1."""
    preemptions: int | None = None
    prefix_hits: int | None = None
    """Prompt tokens that were found in the prefix cache, of `prefix_queries`."""
    prefix_queries: int | None = None
    other_requests: int | None = None
    """Requests of other clients that the engine finished meanwhile."""
    gpus: tuple[GpuFigures, ...] = ()
    joules_per_token: float | None = None
    """Energy of the GPUs of all `engines` by output token."""
    error: str = ""
    """Why there are no figures; empty if there are."""
    with_engines: tuple[str, ...] = ()
    """The other engines of the name. Totals and GPUs are of all; `kv_use_peak` is the mean of their shares."""
    kind: str = "measurement"

    @property
    def engines(self) -> tuple[str, ...]:
        return (self.engine, *self.with_engines)

    @property
    def label(self) -> str:
        return " + ".join(self.engines)


@dataclass(frozen=True)
class Finding:
    what: str
    """Its kind, such as `below-plan`."""
    severity: Literal["warn", "fail"]
    engine: str
    """Several with ` + ` between them."""
    case: str
    text: str
    """One sentence with the figures."""


@dataclass(frozen=True)
class End:
    at: str
    seconds: float
    verdict: Verdict
    error: str = ""
    findings: tuple[Finding, ...] = ()
    kind: str = "end"


@dataclass(frozen=True)
class Recorded:
    run: Run
    measurements: tuple[Measurement, ...] = ()
    end: End | None = None
    """None if the run was killed, or still runs."""


def add_record(path: Path, record: Run | Measurement | End) -> None:
    """Append a record to the file of a run; it is on the disk before the next one is measured. Raises OSError."""
    make_directories(path.parent, 0o750)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, MODE)
    with name_errors(path), os.fdopen(handle, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record), ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def parse_run(text: str) -> Recorded:
    """Parse the file of a run. Raises ValueError if it is none."""
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not lines or lines[0].get("kind") != "run":
        raise ValueError("its first line is not a run")
    ends = [read_record(End, line) for line in lines if line.get("kind") == "end"]
    measured = tuple(read_record(Measurement, line) for line in lines if line.get("kind") == "measurement")
    return Recorded(read_record(Run, lines[0]), measured, ends[0] if ends else None)


def list_files(paths: HostPaths) -> list[Path]:
    return list_records(paths.bench, "*.jsonl")


def read_runs(files: Sequence[Path]) -> list[Recorded]:
    found = []
    for path in files:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            found.append(parse_run(path.read_text(encoding="utf-8")))
    return found


def prune_runs(paths: HostPaths, newest: Path) -> None:
    prune(list_files(paths), KEPT_RUNS, newest)
