# SPDX-License-Identifier: Apache-2.0
"""Comparison of the plan with measurements: what a plan tells the host to expect, and how far vLLM and NVML are from
it.

These components are compared: weights, CUDA graphs and the KV cache, as vLLM's own log lines report them on its first
rank; the tokens of the KV cache, from the same lines, and its blocks, from /metrics; and for each GPU what NVML shows
of the engines. No line of vLLM reports activations and the CUDA context alone: they are part of the GPU's total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

from ..engine.config import EngineConfig
from ..engine.reasons import ASKED
from ..engine.startup import Phase
from ..engine.state import EngineState
from .checkpoint.generic import is_generic
from .contract import EnginePlan, GpuPlan
from .feasibility import THRESHOLD_PERCENT
from .memory.overhead import MIB

OnDrift = Literal["ignore", "warn", "fail"]
ON_DRIFT: tuple[OnDrift, ...] = ("ignore", "warn", "fail")


class Component(NamedTuple):
    words: str
    """For people."""
    tolerance: float
    """How far it may be from the plan, in either direction. Operators change it with plan_drift_tolerances."""
    figure: str = ""
    """vLLM's own figure of it (engine/startup.py, engine/metrics.py); empty for what NVML shows."""
    counted: bool = False
    """Whether it is a count of the whole engine. All others are MiB on one GPU, which vLLM logs in GiB."""


COMPONENTS: Mapping[str, Component] = {
    # The tensors agree with published loads within 0.02 GiB. What the allocator adds may be 0.14 GiB more than the 0.06
    # of the plan (overhead.ALLOCATOR_BYTES).
    "weights_mib": Component("weights", 160, "model_gib"),
    # Fitted from few logs, which differ by more than half a GiB for the small models; see overhead.py.
    "graphs_mib": Component("CUDA graphs", 768, "graphs_gib"),
    # If pinned, it is what was requested, in hundredths of a GiB. Otherwise it has the errors of all other components.
    "kv_cache_mib": Component("KV cache", 16, "kv_cache_gib"),
    # These must be equal: if a release counts differently, that is a mistake of the plan.
    "kv_cache_tokens": Component("KV cache, tokens", 0, "kv_cache_tokens", counted=True),
    "kv_blocks": Component("KV cache, blocks", 0, "kv_blocks", counted=True),
    # As much as a measurement may exceed the plan before it exceeds the budget.
    "total_mib": Component("NVML", 300),
}
TOLERANCES: Mapping[str, float] = {name: component.tolerance for name, component in COMPONENTS.items()}
SHARE_TOLERANCE_MIB = 300
"""Tolerance of the KV cache of an engine with a share of the GPU (gpu_memory_utilization), in addition to those of
weights and graphs."""
GENERIC_TIMES = 100
"""How many times the planned tokens and blocks an engine of an unknown architecture may have: the plan counts full
attention in all layers, and a model whose layers have a window may have that many more."""


def tolerances(given: Mapping[str, Any], tolerance_mib: int) -> dict[str, float]:
    """Return plan_drift_tolerances merged into the defaults, of which plan_tolerance_mib is that of total_mib. Raises
    ValueError if a component is unknown, or a value is no number from 0."""
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


def expectation(
    plan: EnginePlan,
    vllm_version: str,
    limits: Mapping[str, float],
    on_drift: OnDrift,
    memory_threshold_percent: int = THRESHOLD_PERCENT,
) -> dict[str, Any]:
    """Return what goes from the plan of an engine into its engine.json: whole MiB, one entry for each of its GPUs in
    order. `limits` are tolerances by component."""
    # The error of the graphs is also an error of the total. Whether the total is too large is checked by the budget.
    graphs_mib = max((gpu.graphs_bytes for gpu in plan.gpus), default=0) / MIB
    share = {"total_mib": limits["total_mib"] + math.ceil(min(limits["graphs_mib"], graphs_mib))}
    cache_mib = min((gpu.kv_cache_bytes for gpu in plan.gpus), default=0) / MIB
    if not plan.pinned and cache_mib:
        # The KV cache gets the rest of the share, so it has the errors of all other components; its tokens follow from
        # its bytes.
        errors = limits["weights_mib"] + limits["graphs_mib"] + SHARE_TOLERANCE_MIB
        share["kv_cache_mib"] = max(limits["kv_cache_mib"], errors)
        for name, planned in (("kv_cache_tokens", plan.kv_cache_tokens), ("kv_blocks", plan.kv_blocks)):
            share[name] = math.ceil(planned * share["kv_cache_mib"] / cache_mib)
    if is_generic(plan.facts_source):
        for name in ("weights_mib", "total_mib", *(() if plan.pinned else ("kv_cache_mib",))):
            share[name] = share.get(name, limits[name]) + plan.uncertainty_mib[0]
        for name, planned in (("kv_cache_tokens", plan.kv_cache_tokens), ("kv_blocks", plan.kv_blocks)):
            share[name] = planned * GENERIC_TIMES
    inherited = {key: f"{ASKED}: {origin}" for origin, stated in plan.inherited.items() for key in stated}
    load: dict[str, Any] = {"load_s": None}
    if plan.load_s:
        band = asdict(plan.load_s)
        load = {"load_s": band, "load_other_s": band.pop("other"), "load_read_bytes": band.pop("read_bytes")}
    return {
        "vllm_version": vllm_version,
        "verdict": plan.verdict.value,
        "reason": plan.reason,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "kv_blocks": plan.kv_blocks,
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_concurrency": round(plan.max_concurrency, 2),
        "decode_tok_s": {name: round(speed, 1) for name, speed in asdict(plan.decode_tok_s).items()}
        if plan.decode_tok_s
        else None,
        "gpus": [_mib(gpu) for gpu in plan.gpus],
        **load,
        "tolerances": {**limits, **share},
        "on_drift": on_drift,
        "reasons": {**plan.reasons, **inherited},
        "memory_threshold_percent": memory_threshold_percent,
    }


def compare(
    configs: Iterable[EngineConfig], states: Mapping[str, EngineState | None], gpus: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Compare every component of this host's engines that have a plan, then the GPUs that only such engines use.

    What an engine logged counts only if it ran with the wanted inputs. What was measured on a GPU counts unless one of
    its engines is known not to run.

    Args:
        states: the supervisor's record by engine, or None.
        gpus: rows of the VRAM evaluation.

    Returns:
        Rows with `what`, the name of an engine or the UUID of a GPU, `component`, a key of TOLERANCES, `planned`,
        `measured`, `tolerance`, and whether it is `within`; `measured` and `within` are None if nothing reports it.
    """
    rows: list[dict[str, Any]] = []
    planned: dict[str, float] = {}
    tolerated: dict[str, float] = {}
    unplanned: set[str] = set()
    away: set[str] = set()
    for config in configs:
        state, expected = states.get(config.engine), config.plan
        if state and state.phase not in (Phase.SERVING, Phase.UNHEALTHY):
            away.update(config.gpus)
        if expected is None or len(expected["gpus"]) != len(config.gpus):
            unplanned.update(config.gpus)
            continue
        logged = state.log_facts if state is not None and state.input_hash == config.input_hash else {}
        rows += _compare_logged(config.engine, expected, logged)
        for uuid, part in zip(config.gpus, expected["gpus"], strict=True):
            planned[uuid] = planned.get(uuid, 0.0) + float(part["total_mib"])
            tolerated[uuid] = tolerated.get(uuid, 0.0) + float(expected["tolerances"]["total_mib"])
    seen = {str(gpu["uuid"]): gpu.get("engine_mib") for gpu in gpus if gpu["uuid"] not in away}
    return rows + [
        _build_row(uuid, "total_mib", total, seen.get(uuid), tolerated[uuid])
        for uuid, total in planned.items()
        if uuid not in unplanned
    ]


def _build_row(what: str, component: str, planned: float, measured: float | None, tolerance: float) -> dict[str, Any]:
    return {
        "what": what,
        "component": component,
        "planned": planned,
        "measured": None if measured is None else float(measured),
        "tolerance": tolerance,
        "within": None if measured is None else abs(measured - planned) <= tolerance,
    }


def _compare_logged(name: str, expected: Mapping[str, Any], logged: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the components that vLLM itself reports of an engine."""
    for key, component in COMPONENTS.items():
        if not component.figure:
            continue
        planned = float(expected[key] if component.counted else expected["gpus"][0][key])
        measured = logged.get(component.figure)
        if key == "graphs_mib" and not planned and component.figure not in logged:
            continue  # with enforce_eager there are no graphs, and no line says so
        if measured is not None and not component.counted:
            measured *= 1024
        limit = float(expected["tolerances"].get(key, component.tolerance))
        yield _build_row(name, key, planned, measured, limit)


def wanted(configs: Iterable[EngineConfig]) -> OnDrift:
    # All planned engines of a generation carry the same.
    return next((config.plan["on_drift"] for config in configs if config.plan), "ignore")


def sentences(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each row that is outside of its tolerance."""
    found = []
    for row in rows:
        if row["within"] is not False:
            continue
        measured, planned, component = row["measured"], row["planned"], COMPONENTS[row["component"]]
        unit = "" if component.counted else " MiB"
        what = f"{component.words} of {row['what']}"
        found.append(
            f"Plan and measurement differ: {what} {measured:,.0f}{unit}, planned {planned:,.0f} "
            f"({measured - planned:+,.0f}, tolerated {row['tolerance']:,.0f}). If this repeats, measure the "
            "engines with playbooks/calibrate.yml; plan_drift and plan_drift_tolerances decide what happens."
        )
    return found


def _mib(gpu: GpuPlan) -> dict[str, int]:
    names = ("weights", "overhead", "context", "graphs", "kv_cache", "total")
    return {f"{name}_mib": round(getattr(gpu, f"{name}_bytes") / MIB) for name in names}
