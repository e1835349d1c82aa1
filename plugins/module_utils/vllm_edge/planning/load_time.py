# SPDX-License-Identifier: Apache-2.0
"""Seconds that an engine takes to load, from the start of its container to the first answer of /health.

`plan_load` knows only the checkpoint and the arguments, and goes into engine.json; `expect_load` adds what a host
knows, each time it is asked: the read rate of its disk, and the engine's earlier loads there. So engine.json stays as
it is when the host learns.

The constants are few and wide. Four loads of the reference host are all that was measured (31B bf16 over four GPUs,
eager, 120 s; 31B NVFP4 over two 170 to 180 s; E4B 150 s; E2B 90 s), without phases, disk or page cache. The plan
says 120, 152, 133 and 127 s for them: two of its constants were fitted to them, so that proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from ..engine.config import EngineConfig
from ..engine.loads import Load, read_loads
from ..engine.startup import WORDS, Phase
from ..engine.state import EngineState
from ..paths import HostPaths
from ..weights.read_rate import find_rate
from .checkpoint.model_facts import checkpoint_bytes
from .contract import Arguments, LoadTime, Model, Seconds, Uncertain

START_S = Uncertain(
    30,
    12,
    180,
    "container, imports, CUDA and NCCL, and the API server. From the container to the engine's configuration 16 s "
    "(vllm-project/vllm#44881); 25 of 59 s that no line of the log names (vllm-project/vllm#20264). High: 150 s and "
    "30 s for NCCL of a cold boot (mitchross/talos-argocd-proxmox#1848)",
)
COMPILED_S = Uncertain(
    85,
    20,
    390,
    "fitted: torch.compile, profiling, warm-up and CUDA graphs. Low: 7.5 s and 17 s of a small model with a compile "
    "cache (vllm-project/vllm#20264). High: 166, 131 and 90 s of the cold boot; 43 and 210 s of another (#44881)",
)
EAGER_S = Uncertain(20, 4, 60, "profiling and warm-up with enforce_eager; 4 s of Llama 3 8B (vllm-project/vllm#11005)")
ANY_RATE = Uncertain(
    0.9e9,
    0.15e9,
    6.6e9,
    "fitted: bytes of the checkpoint per second where the disk was not measured. Low: one hard disk. High: 65 GB in "
    "9.86 s, GPT-OSS 120B from the page cache (EuroEval/EuroEval#1120)",
)
REACHED = Uncertain(
    0.7,
    0.3,
    1.0,
    "share of the disk's sequential read rate that a load reaches: an assumption, since vLLM maps the files and the "
    "kernel reads ahead in small pieces. The loads of a host replace it",
)
REPEATS = Uncertain(1.0, 0.7, 1.5, "how far a load may be from the earlier ones with the same inputs: an assumption")
RESEMBLES = Uncertain(1.0, 0.4, 2.5, "the same for loads of the model in the same image with other arguments")
GRACE_S = 15.0
"""Added to the highest of earlier loads, since a busy host delays short loads most."""


@dataclass(frozen=True)
class Expected(Seconds):
    """The seconds that the next load of an engine will take on this host."""

    basis: str
    """From what it follows, as text for people."""


def plan_load(model: Model, arguments: Arguments) -> LoadTime | None:
    """Return the time of a load from a disk that nobody measured; None if the files' sizes are not known."""
    read_bytes = checkpoint_bytes(model.facts)
    read_bytes += checkpoint_bytes(model.drafter.facts) if model.drafter else 0
    if not read_bytes:
        return None
    work = START_S + (EAGER_S if arguments.enforce_eager else COMPILED_S)
    other = Seconds(work.low, work.value, work.high)
    return LoadTime(**vars(_add_reading(other, read_bytes, ANY_RATE)), read_bytes=read_bytes, other=other)


def _add_reading(other: Seconds, read_bytes: float, rate: Uncertain) -> Seconds:
    found = (
        other.low + read_bytes / rate.high,
        other.mid + read_bytes / rate.value,
        other.high + read_bytes / rate.low,
    )
    return Seconds(*map(math.ceil, found))


def expect(config: EngineConfig, loads: Sequence[Load], disk_bytes_per_s: float | None) -> Expected | None:
    """Return how long the next load of an engine will take; None if its plan has no time and it was never loaded.

    Args:
        disk_bytes_per_s: what the disk of its weights delivers to a sequential reader; None if that is not known
    """
    planned = _plan_with_disk(config.plan or {}, disk_bytes_per_s)
    same = [load for load in loads if load.input_hash == config.input_hash]
    image = config.image_id or config.image
    alike = [
        load for load in loads if (load.model, load.revision, load.image) == (config.model, config.revision, image)
    ]
    for found, spread, what in ((same, REPEATS, "loads"), (alike, RESEMBLES, "loads with other arguments")):
        if found:
            seconds = [load.seconds for load in found]
            high = max(seconds) * spread.high + GRACE_S
            if planned is not None and all(load.cached is not False for load in found):
                # Nobody has seen yet how long it takes from the disk, as after a boot.
                high = max(high, planned.high)
            basis = f"{len(found)} earlier {what if len(found) > 1 else what.replace('loads', 'load')}"
            return Expected(math.floor(min(seconds) * spread.low), round(median(seconds)), math.ceil(high), basis)
    return planned


def _plan_with_disk(plan: Mapping[str, Any], disk_bytes_per_s: float | None) -> Expected | None:
    band = plan.get("load_s")
    if not band:
        return None
    if disk_bytes_per_s is None:
        return Expected(band["low"], band["mid"], band["high"], "the plan; the disk's read rate is not known")
    # The page cache may hold the files, so the fastest load does not depend on the disk.
    fastest = max(ANY_RATE.high, disk_bytes_per_s * REACHED.high)
    rate = Uncertain(disk_bytes_per_s * REACHED.value, disk_bytes_per_s * REACHED.low, fastest, "the disk's read rate")
    found = _add_reading(Seconds(**plan["load_other_s"]), plan["load_read_bytes"], rate)
    basis = f"the plan, and {disk_bytes_per_s / 1e9:.1f} GB/s from the disk"
    return Expected(found.low, found.mid, found.high, basis)


def find_slow_load(
    config: EngineConfig, load: Load, earlier: Sequence[Load], disk_bytes_per_s: float | None
) -> str | None:
    """Return a sentence if a load took longer than expected, which says in which phase; else None."""
    expected = expect(config, earlier, disk_bytes_per_s)
    if expected is None or load.seconds <= expected.high:
        return None
    where = "".join(f": {words}" for words in _describe_longest(load, earlier))
    return (
        f"Engine {config.engine} took {load.seconds:.0f} s to load, and {expected.low:.0f} to {expected.high:.0f} s "
        f"were expected ({expected.basis}){where}. 'journalctl -u {config.unit}' shows what it did meanwhile."
    )


def _describe_longest(load: Load, earlier: Sequence[Load]) -> Iterator[str]:
    """Yield the phase that lengthened the load most, if the phases are known."""
    if not load.phases:
        return
    known = [each.phases for each in earlier if each.phases]
    usual = {phase: median(each.get(phase, 0.0) for each in known) for phase in load.phases} if known else {}
    phase = max(load.phases, key=lambda name: load.phases[name] - usual.get(name, 0.0))
    words = WORDS[Phase(phase)] if phase in list(Phase) else phase
    more = f", usually {usual[phase]:.0f} s" if phase in usual else ""
    yield f"most of it was '{words}' with {load.phases[phase]:.0f} s{more}"


def find_disk_rate(paths: HostPaths, config: EngineConfig, until: str = "9") -> float | None:
    """Return what the disk of an engine's weights delivers to a sequential reader, in bytes per second.

    Loads of any engine whose weights are in the same directory tell most; otherwise what was measured counts. None if
    neither is known. Loads that ended at `until` or later do not count.
    """
    directory = Path(config.weights_path).parent
    rates = [
        rate
        for path in sorted((paths.state / "engines").glob("*.loads.json"))
        for load in read_loads(path)
        if Path(load.weights_path).parent == directory and load.at < until
        if (rate := load.disk_bytes_per_s) is not None
    ]
    if rates:
        return median(rates) / REACHED.value
    found = find_rate(paths.read_rates, Path(config.weights_path)) if config.weights_path else None
    return found.bytes_per_s if found else None


def expect_load(paths: HostPaths, config: EngineConfig) -> Expected | None:
    try:
        return expect(config, read_loads(paths.engine_loads(config.engine)), find_disk_rate(paths, config))
    except PermissionError:
        planned = expect(config, [], None)
        return planned and replace(planned, basis="the plan; only root can read earlier loads and the disk's read rate")


def warn_of_load(paths: HostPaths, config: EngineConfig, state: EngineState | None) -> str | None:
    """Return a sentence if the load of the container that runs took longer than was expected before it; else None."""
    try:
        loads = read_loads(paths.engine_loads(config.engine))
        if state is None or state.load_seconds is None or state.input_hash != config.input_hash or not loads:
            return None
        last = loads[-1]
        if (last.input_hash, last.seconds) != (config.input_hash, state.load_seconds):
            return None
        return find_slow_load(config, last, loads[:-1], find_disk_rate(paths, config, last.at))
    except PermissionError:
        return None


def longest_load_s(paths: HostPaths, configs: Iterable[EngineConfig]) -> float:
    return max((found.high for config in configs if (found := expect_load(paths, config)) is not None), default=0.0)
