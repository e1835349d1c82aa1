# SPDX-License-Identifier: Apache-2.0
"""The warning about GPUs of which little is left for requests: memory_threshold_percent.

It compares what a GPU holds besides KV caches (weights, activations, CUDA context and graphs, and in measurements the
memory of others) with the memory of the GPU that CUDA can use. The KV cache is left out because vLLM takes nearly all
of the rest for it at its start: the memory in use is always about the same, whatever the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..engine.config import EngineConfig
from ..engine.state import EngineState
from .contract import EnginePlan, Gpu

THRESHOLD_PERCENT = 85
MIB = 2**20


def check_threshold(percent: int) -> int:
    """Return memory_threshold_percent. Raises ValueError if it is not from 1 to 100."""
    if not 1 <= percent <= 100:
        raise ValueError(
            f"memory_threshold_percent: {percent} is no share of a GPU's memory in percent; write 1 to 100, where 100 "
            f"never warns."
        )
    return percent


def warn_of_plan(engines: Iterable[EnginePlan], gpus: Sequence[Gpu], experts: Iterable[str], percent: int) -> list[str]:
    """Return one sentence for each GPU on which the planned engines hold more than the threshold besides KV caches.

    Args:
        experts: the names of the engines whose model is a mixture of experts.
        percent: memory_threshold_percent.
    """
    held = dict.fromkeys(range(len(gpus)), 0)
    names: dict[int, list[str]] = {slot: [] for slot in held}
    for engine in engines:
        for part in engine.gpus:
            held[part.slot] += part.total_bytes - part.kv_cache_bytes
            names[part.slot].append(engine.engine)
    mixtures, found = set(experts), []
    for slot, size in held.items():
        words = _describe(f"GPU {slot}", size / MIB, gpus[slot].cuda_total_bytes / MIB, percent, "will hold")
        if words and mixtures & set(names[slot]):
            words += (
                " A mixture of experts keeps every expert in memory, whatever a token reads: fewer bits or more GPUs "
                "make it smaller, a shorter context does not."
            )
        found += [words] if words else []
    return found


def warn_of_measurement(
    configs: Iterable[EngineConfig], states: Mapping[str, EngineState | None], gpus: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return one sentence for each GPU that holds more than the threshold besides the KV caches of its engines.

    The size of a KV cache is what vLLM logged, otherwise what the plan gave it; a GPU with an engine of which neither
    is known is not judged. The threshold is the one of the engines' plans.

    Args:
        configs: the configurations of the engines.
        states: the supervisor's record by engine, or None.
        gpus: rows of the VRAM evaluation.
    """
    caches: dict[str, float | None] = {}
    percent = THRESHOLD_PERCENT
    for config in configs:
        percent = int((config.plan or {}).get("memory_threshold_percent", percent))
        for uuid, cache in zip(config.gpus, _list_caches_mib(config, states.get(config.engine)), strict=True):
            before = caches.get(uuid, 0.0)
            caches[uuid] = None if before is None or cache is None else before + cache
    found = []
    for gpu in gpus:
        cache, total = caches.get(str(gpu["uuid"])), float(gpu["total_mib"]) - float(gpu.get("reserved_mib") or 0)
        if cache is not None:
            found.append(_describe(f"GPU {gpu['index']}", float(gpu["used_mib"]) - cache, total, percent, "holds"))
    return [words for words in found if words]


def _list_caches_mib(config: EngineConfig, state: EngineState | None) -> list[float | None]:
    """Return the KV cache of an engine on each of its GPUs; None if it is not known."""
    logged = state.log_facts.get("kv_cache_gib") if state and state.input_hash == config.input_hash else None
    if logged is not None:
        return [float(logged) * 1024] * len(config.gpus)
    planned = [float(part["kv_cache_mib"]) for part in (config.plan or {}).get("gpus") or []]
    return [*planned] if len(planned) == len(config.gpus) else [None] * len(config.gpus)


def _describe(gpu: str, held_mib: float, total_mib: float, percent: int, verb: str) -> str:
    """Return the sentence about one GPU; empty if it is below the threshold."""
    if total_mib <= 0 or held_mib * 100 <= percent * total_mib:
        return ""
    return (
        f"{gpu} {verb} {held_mib:,.0f} of {total_mib:,.0f} MiB ({held_mib * 100 / total_mib:.0f} %) besides KV caches, "
        f"more than memory_threshold_percent {percent}: little is left for requests."
    )
