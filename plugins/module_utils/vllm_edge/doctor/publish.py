# SPDX-License-Identifier: Apache-2.0
"""Plan and measurement of a host's engines, in a form that can be published: `doctor --support-report FILE --publish`.

What may be in it is allowed one by one, and nothing else is: numbers, and words of lists that the project publishes
itself (names of GPUs, repositories whose facts it has recorded, vLLM's names of types). Whoever reads such a file
(`parse`) refuses it otherwise, and so does whoever writes one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..engine.config import load_engine
from ..engine.state import read_state
from ..facts.serving import load_configs
from ..gpu.models import GPU_MODELS
from ..paths import HostPaths
from ..planning import drift, planner
from ..planning.checkpoint import model_facts
from ..planning.contract import Arguments
from ..planning.memory.kv_cache import ELEMENT_BYTES
from ..system.records import read_record
from ..trials.bench.model import list_files, read_runs

NUMBERS = (
    *("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("gpu_memory_utilization", "kv_cache_memory_bytes", "enforce_eager"),
)
WORDS = ("kv_cache_dtype", "dtype")
MODALITIES = "limit_mm_per_prompt"
_MODALITIES = [some for count in (1, 2, 3) for some in itertools.combinations(("audio", "image", "video"), count)]
_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,3}")


@dataclass(frozen=True)
class Measured:
    """An engine. Memory is in MiB on one GPU, with the keys of `planning.drift.COMPONENTS`."""

    gpu: str
    """As NVML names it."""
    gpus: int
    vllm: str
    repo: str
    arguments: Mapping[str, Any]
    """Those of NUMBERS and WORDS that it was given, and the modalities of which it takes none."""
    measured: Mapping[str, float]
    memory_mib: int | None = None
    """NVML's total of one GPU; None for memory that the processor shares."""
    driver: str = ""
    planned: Mapping[str, float] = field(default_factory=dict)
    """By the program that started it."""
    tok_s: float | None = None
    """The most tokens per second of one request at a time."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """Why a figure (a key of `measured`, or tok_s) is outside of what the plan tolerates. Only its reader writes it."""


def parse(data: Mapping[str, Any]) -> Measured:
    """Read an engine of such a file. Raises ValueError if it has anything that is not allowed."""
    found = read_record(Measured, data)
    allowed: Mapping[str, Callable[[Any], bool]] = {
        **dict.fromkeys(NUMBERS, lambda value: isinstance(value, bool | int | float)),
        **dict.fromkeys(WORDS, lambda value: isinstance(value, str) and value in ELEMENT_BYTES),
        MODALITIES: lambda value: value in [dict.fromkeys(some, 0) for some in _MODALITIES],
    }
    wrong = {
        **{key: True for key in data.keys() - {item.name for item in fields(Measured)}},
        "gpu": found.gpu not in GPU_MODELS,
        "vllm": not _VERSION.fullmatch(found.vllm),
        "driver": bool(found.driver) and not _VERSION.fullmatch(found.driver),
        "repo": model_facts.recorded(found.repo) is None,
        "measured": not {*found.measured, *found.planned} <= drift.COMPONENTS.keys(),
        **{f"arguments.{key}": key not in allowed or not allowed[key](found.arguments[key]) for key in found.arguments},
    }
    if refused := sorted(key for key, is_wrong in wrong.items() if is_wrong):
        raise ValueError(f"{', '.join(refused)}: not in the lists of what is published")
    return found


def build(paths: HostPaths, boards: Sequence[Mapping[str, Any]], driver: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the engines of this host that can be published, and why others cannot, in sentences for its operator.

    Args:
        boards: rows of the VRAM evaluation.
        driver: the version of the loaded kernel module; empty if it is not known.
    """
    configs, left = load_configs(paths)
    states = {config.engine: read_state(paths.engine_state(config.engine)) for config in configs}
    rows = drift.compare(configs, states, boards)
    runs, found = read_runs(list_files(paths)), []
    for config in configs:
        cards = [board for board in boards if board["uuid"] in config.gpus]
        alone = not any({*config.gpus} & {*other.gpus} for other in configs if other is not config)
        of_engine = [row for row in rows if row["what"] == config.engine or (alone and row["what"] in config.gpus)]
        # Of several GPUs the one that has most counts, so it is last.
        seen = sorted((row for row in of_engine if row["measured"] is not None), key=lambda row: row["measured"])
        speeds = [
            one.tok_s
            for recorded in runs
            if (then := recorded.run.engines.get(config.engine)) and then.input_hash == config.input_hash
            for one in recorded.measurements
            if (one.engines, one.case, one.concurrency, one.error) == ((config.engine,), "protocol", 1, "")
        ]
        try:
            if len({(card["name"], card["total_mib"]) for card in cards}) != 1 or not config.plan or not seen:
                raise ValueError("it was not planned and measured, on GPUs of one kind")
            data = {
                "gpu": cards[0]["name"],
                "gpus": len(config.gpus),
                "memory_mib": cards[0]["total_mib"],
                "driver": driver,
                "vllm": config.plan["vllm_version"],
                "repo": config.repo,
                "arguments": _pick_arguments(load_engine(config.engine, paths).vllm_arguments),
                **{key: {row["component"]: row[key] for row in seen} for key in ("planned", "measured")},
                "tok_s": max(speeds, default=None),
            }
            parse(data)
            found.append(data)
        except ValueError as error:
            left.append(f"{config.engine} is left out: {str(error).rstrip('.')}.")
    return found, left


def _pick_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that may be published. Raises ValueError if the engine has others that its plan counts."""
    asked = planner.arguments_of({"extra_args": words})
    picked = {key: getattr(asked, key) for key in (*NUMBERS, *WORDS)}
    picked = {key: value for key, value in picked.items() if value != getattr(Arguments, key)}
    if asked.without:
        picked[MODALITIES] = dict.fromkeys(sorted(asked.without), 0)
    if planner.arguments_of(picked) != asked:
        raise ValueError("its plan counts options that are not in the lists of what is published")
    return picked
