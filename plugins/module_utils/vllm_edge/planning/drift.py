# SPDX-License-Identifier: Apache-2.0
"""The plan against what was measured: what of a plan goes to the host, and how far vLLM and NVML are from it.

What is compared, per component: weights, CUDA graphs and the KV cache as vLLM's own lines tell them, on its first rank;
its tokens, from the same lines, and its blocks, from /metrics; and per GPU what NVML shows of our engines. Activations
and the CUDA context are in no line of vLLM's by themselves: they are in the GPU's total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..engine.config import EngineConfig
from ..engine.startup import Phase
from ..engine.state import EngineState
from .contract import EnginePlan, GpuPlan

MIB = 2**20
GIB_MIB = 1024
OnDrift = Literal["ignore", "warn", "fail"]
ON_DRIFT: tuple[OnDrift, ...] = ("ignore", "warn", "fail")

TOLERANCES: Mapping[str, float] = {
    # The tensors agree with published loads within 0.02 GiB; what the allocator adds may be 0.14 GiB more than the 0.06
    # of the plan (overhead.ALLOCATOR_BYTES).
    "weights_mib": 160,
    # Fitted from few logs, which disagree by more than half a GiB for the small models; see overhead.py.
    "graphs_mib": 768,
    # Pinned, it is what was asked for, in hundredths of a GiB; else it carries every error of the other components.
    "kv_cache_mib": 16,
    # The same blocks; a release that counts otherwise is a mistake of the plan.
    "kv_cache_tokens": 0,
    "kv_blocks": 0,
    # As much as a measurement may be above the plan before the budget says so.
    "total_mib": 300,
}
"""How far each component may be from the plan, either way; operators change them in plan_drift_tolerances."""
SHARE_TOLERANCE_MIB = 300
"""For the KV cache of an engine with a share of the GPU, gpu_memory_utilization, beside those of weights and graphs."""
LOGGED: Mapping[str, tuple[str, float]] = {
    "weights_mib": ("model_gib", GIB_MIB),
    "graphs_mib": ("graphs_gib", GIB_MIB),
    "kv_cache_mib": ("kv_cache_gib", GIB_MIB),
    "kv_cache_tokens": ("kv_cache_tokens", 1),
    "kv_blocks": ("kv_blocks", 1),
}
"""Component by the name of vLLM's figure (progress.py, metrics.py), and what makes it the component's unit."""
COUNTED = frozenset({"kv_cache_tokens", "kv_blocks"})
"""Of the whole engine, and no MiB; all others are of one GPU."""


@dataclass(frozen=True)
class Row:
    """One component of an engine, or the total of a GPU."""

    what: str
    """Name of the engine, or UUID of the GPU."""
    component: str
    """A key of TOLERANCES."""
    planned: float
    measured: float | None
    """None where nobody told."""
    tolerance: float

    @property
    def within(self) -> bool | None:
        return None if self.measured is None else abs(self.measured - self.planned) <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "within": self.within}


def tolerances(given: Mapping[str, Any], tolerance_mib: int) -> dict[str, float]:
    """plan_drift_tolerances over the defaults, total_mib being plan_tolerance_mib. Raises ValueError."""
    found = {**TOLERANCES, "total_mib": float(tolerance_mib)}
    for name, value in given.items():
        if name not in TOLERANCES:
            raise ValueError(f"plan_drift_tolerances: {name!r} is none of {', '.join(TOLERANCES)}.")
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ValueError(
                f"plan_drift_tolerances.{name}: {value!r} is not a number from 0; the default is {found[name]:g}."
            )
        found[name] = float(value)
    return found


def expectation(plan: EnginePlan, vllm_version: str, limits: Mapping[str, float], on_drift: OnDrift) -> dict[str, Any]:
    """What of an engine's plan goes into its engine.json: whole MiB, one entry for each of its GPUs in their order."""
    # What is not known of the graphs is not known of the total; that the total is not too much, its budget says.
    graphs_mib = max((gpu.graphs_bytes for gpu in plan.gpus), default=0) / MIB
    share = {"total_mib": limits["total_mib"] + math.ceil(min(limits["graphs_mib"], graphs_mib))}
    cache_mib = min((gpu.kv_cache_bytes for gpu in plan.gpus), default=0) / MIB
    if not plan.pinned and cache_mib:
        # What is left of a share carries the errors of all the other components, and tokens follow from the bytes.
        errors = limits["weights_mib"] + limits["graphs_mib"] + SHARE_TOLERANCE_MIB
        share["kv_cache_mib"] = max(limits["kv_cache_mib"], errors)
        for name, planned in (("kv_cache_tokens", plan.kv_cache_tokens), ("kv_blocks", plan.kv_blocks)):
            share[name] = math.ceil(planned * share["kv_cache_mib"] / cache_mib)
    return {
        "vllm_version": vllm_version,
        "verdict": plan.verdict.value,
        "reason": plan.reason,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "kv_blocks": plan.kv_blocks,
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_concurrency": round(plan.max_concurrency, 2),
        "gpus": [_mib(gpu) for gpu in plan.gpus],
        "tolerances": {**limits, **share},
        "on_drift": on_drift,
    }


def compare(
    engines: Iterable[tuple[str, Sequence[str], Mapping[str, Any] | None, Mapping[str, Any]]],
    gpus: Sequence[Mapping[str, Any]],
) -> list[Row]:
    """Every component of engines that have a plan, then the GPUs that only such engines use.

    `engines` are name, UUIDs of its GPUs, the expectation in its engine.json, and vLLM's own figures; `gpus` are rows
    of vram_budget.
    """
    rows: list[Row] = []
    planned: dict[str, float] = {}
    tolerated: dict[str, float] = {}
    unplanned: set[str] = set()
    for name, uuids, expected, logged in engines:
        parts = list((expected or {}).get("gpus") or [])
        if expected is None or len(parts) != len(uuids):
            unplanned.update(uuids)
            continue
        limits = expected["tolerances"]
        first = {**parts[0], **{component: expected[component] for component in COUNTED}}
        for component, (figure, factor) in LOGGED.items():
            limit = float(limits.get(component, TOLERANCES[component]))
            if component == "graphs_mib" and not first[component] and figure not in logged:
                continue  # enforce_eager: there are none, and no line says so
            value = logged.get(figure)
            measured = None if value is None else float(value) * factor
            rows.append(Row(name, component, float(first[component]), measured, limit))
        for uuid, part in zip(uuids, parts, strict=True):
            planned[uuid] = planned.get(uuid, 0.0) + float(part["total_mib"])
            tolerated[uuid] = tolerated.get(uuid, 0.0) + float(limits["total_mib"])
    seen = {str(gpu["uuid"]): gpu for gpu in gpus}
    for uuid, total in planned.items():
        if uuid in unplanned:
            continue
        value = (seen.get(uuid) or {}).get("engine_mib")
        rows.append(Row(uuid, "total_mib", total, None if value is None else float(value), tolerated[uuid]))
    return rows


def of_engines(
    configs: Iterable[EngineConfig], states: Mapping[str, EngineState | None], gpus: Sequence[Mapping[str, Any]]
) -> list[Row]:
    """The same, from the host's own files. What an engine logged counts where that was the engine that is wanted, and
    what is measured of a GPU where no engine of it is known to be away."""
    engines = [(config, states.get(config.engine)) for config in configs]
    whole = (Phase.SERVING, Phase.UNHEALTHY)
    away = {uuid for config, state in engines if state and state.phase not in whole for uuid in config.gpus}
    return compare(
        (
            (
                config.engine,
                config.gpus,
                config.plan,
                state.log_facts if state is not None and state.input_hash == config.input_hash else {},
            )
            for config, state in engines
        ),
        [gpu for gpu in gpus if gpu["uuid"] not in away],
    )


def wanted(configs: Iterable[EngineConfig]) -> OnDrift:
    """plan_drift of a generation, which all of its planned engines carry; `ignore` where none was planned."""
    return next((config.plan["on_drift"] for config in configs if config.plan), "ignore")


def sentences(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is outside its tolerance, one sentence each."""
    found = []
    for row in rows:
        if row["within"] is not False:
            continue
        unit = "" if row["component"] in COUNTED else " MiB"
        measured, planned = row["measured"], row["planned"]
        what = f"{COMPONENTS[row['component']]} of {row['what']}"
        found.append(
            f"Plan and measurement differ: {what} {measured:,.0f}{unit}, planned {planned:,.0f} "
            f"({measured - planned:+,.0f}, tolerated {row['tolerance']:,.0f}). Where it stays so, state what was "
            "measured in plan_observations; plan_drift and plan_drift_tolerances say what becomes of it."
        )
    return found


def _mib(gpu: GpuPlan) -> dict[str, int]:
    names = ("weights", "overhead", "context", "graphs", "kv_cache", "total")
    return {f"{name}_mib": round(getattr(gpu, f"{name}_bytes") / MIB) for name in names}


COMPONENTS = {
    "weights_mib": "weights",
    "graphs_mib": "CUDA graphs",
    "kv_cache_mib": "KV cache",
    "kv_cache_tokens": "KV cache, tokens",
    "kv_blocks": "KV cache, blocks",
    "total_mib": "NVML",
}
"""In MiB, but for tokens and blocks: vLLM's own figures of an engine, and what NVML shows of our engines on a GPU."""
