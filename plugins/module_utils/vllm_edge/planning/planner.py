# SPDX-License-Identifier: Apache-2.0
"""The planner's entry point: whether the engines of a profile will start on their GPUs, and what each takes there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..gpu.models import known
from . import decode, feasibility, overhead
from .contract import Arguments, EnginePlan, Gpu, Model, Plan, Verdict
from .fixes import find_nearest_fix
from .inferred import is_approximate
from .kv_cache import resolve_dtype
from .outcome import Engine, Outcome, compute_outcome, compute_requested_bytes, derive_kv_cache_bytes, mib, to_sentence
from .overhead import MIB
from .vllm_versions import Behaviour, behaviour, max_model_len

MARGIN_MIB = 512
TOLERANCE_MIB = 300

# Options of vLLM in extra_args that affect memory, with the field that they set; None if a value follows.
FLAGS: Mapping[str, tuple[str, Any]] = {
    "--enable-expert-parallel": ("enable_expert_parallel", True),
    "--language-model-only": ("language_model_only", True),
    "--async-scheduling": ("async_scheduling", True),
    "--no-async-scheduling": ("async_scheduling", False),
    "--block-size": ("block_size", None),
}


class PlanError(ValueError):
    """A profile that cannot be planned at all. The message names the engine, the variable and what would be right."""


def plan(
    profile_name: str,
    engines: Sequence[Mapping[str, Any]],
    models: Mapping[str, Model],
    gpus: Sequence[Gpu],
    vllm_version: str,
    *,
    observations: Mapping[str, Any] | None = None,
    margin_mib: int = MARGIN_MIB,
    tolerance_mib: int = TOLERANCE_MIB,
) -> Plan:
    """Plan a profile: what will happen when its engines start on these GPUs.

    Engines start in their order, so each finds the memory taken that those before it on the same GPU took. An engine
    that has neither gpu_memory_utilization nor kv_cache_memory_bytes is given the KV cache that leaves margin_mib free.

    Args:
        engines: as in serving_engines, each with its `name`.
        models: interpreted checkpoints, by key of vllm_models.
        gpus: the n-th is slot n.
        observations: plan_observations, what an operator measured of an engine, which replaces the prediction.
        margin_mib: plan_margin_mib.
        tolerance_mib: plan_tolerance_mib, which is added to each budget.

    Raises:
        PlanError: if an engine names an unknown model or slot, or the number of its GPUs is wrong.
        vllm_versions.UnknownVersion: if the release is not known.
        overhead.ObservationError: if an observation cannot be used.
    """
    release = behaviour(vllm_version)
    given = observations or {}
    free = [gpu.cuda_total_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in gpus]
    budgets = dict.fromkeys(range(len(gpus)), 0)
    plans = []
    for described in engines:
        others = (slot for other in engines if other is not described for slot in other.get("gpus") or ())
        engine = _parse_engine(described, frozenset(others), models, gpus, free, given, release, margin_mib * MIB)
        outcome = compute_outcome(engine)
        if outcome.verdict is not Verdict.FITS:
            outcome = replace(outcome, fix=find_nearest_fix(engine, outcome) or outcome.fix)
        found = _describe_engine(engine, outcome)
        budget = described.get("vram_budget_mib") or _compute_budget_mib(outcome, gpus, tolerance_mib)
        settings = {**found.settings, **({} if described.get("vram_budget_mib") else {"vram_budget_mib": budget})}
        plans.append(replace(found, settings=settings))
        for slot in engine.slots:
            budgets[slot] += budget
        for taken in outcome.gpus:
            free[taken.slot] -= taken.total_bytes
    return Plan(profile_name, vllm_version, tuple(plans), budgets)


def arguments_of(engine: Mapping[str, Any]) -> Arguments:
    """Return the keys and extra_args of an engine that affect memory."""
    names = {field.name for field in fields(Arguments)}
    chosen = {name: value for name, value in engine.items() if name in names and value is not None}
    words = [str(word) for word in engine.get("extra_args") or ()]
    for position, word in enumerate(words):
        option, _, glued = word.partition("=")
        if option in FLAGS:
            name, value = FLAGS[option]
            following = glued or (words[position + 1] if position + 1 < len(words) else "")
            chosen[name] = int(following) if value is None and following.isdigit() else value
    if takes_text_only(engine.get("limit_mm_per_prompt")):
        chosen["language_model_only"] = True
    return Arguments(**chosen)


def takes_text_only(limits: Any) -> bool:
    """Return whether limit_mm_per_prompt allows no image, no video and no audio, which is the same as
    language_model_only (0.32.0 config/multimodal.py:304). vLLM allows 999 of a modality that is not named.
    """
    counts = [limits.get(name, 999) if isinstance(limits, Mapping) else 999 for name in ("image", "video", "audio")]
    return not any(count.get("count", 999) if isinstance(count, Mapping) else count for count in counts)


def _parse_engine(
    engine: Mapping[str, Any],
    others: frozenset[int],
    models: Mapping[str, Model],
    gpus: Sequence[Gpu],
    free: Sequence[int],
    observations: Mapping[str, Any],
    release: Behaviour,
    margin_bytes: int,
) -> Engine:
    """Convert an engine of the inventory. Raises PlanError and ObservationError."""
    name = str(engine.get("name", ""))
    where = f"serving_engines.{name}"
    if engine.get("model") not in models:
        raise PlanError(f"{where}.model: {engine.get('model')!r} is not a known model ({', '.join(sorted(models))}).")
    arguments = arguments_of(engine)
    slots = tuple(engine.get("gpus") or ())
    if beyond := [slot for slot in slots if not 0 <= slot < len(gpus)]:
        raise PlanError(f"{where}.gpus: slot {beyond[0]} does not exist; slots are 0 to {len(gpus) - 1}.")
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if len(slots) != ranks:
        raise PlanError(
            f"{where}.gpus: {len(slots)} GPUs for tensor_parallel_size x pipeline_parallel_size = {ranks}; "
            f"give one for each."
        )
    model = models[str(engine["model"])]
    return Engine(
        name,
        arguments,
        slots,
        model,
        tuple(str(word) for word in engine.get("extra_args") or ()),
        str(engine.get("tool_call_parser") or ""),
        overhead.observed(observations, name),
        resolve_dtype(model, arguments, release.version),
        margin_bytes,
        others,
        gpus,
        tuple(free),
        release,
    )


def _derive_settings(engine: Engine, outcome: Outcome) -> dict[str, float | int]:
    """Return what the plan adds to the engine's own arguments.

    vLLM checks that gpu_memory_utilization of the GPU is free even if the size of the KV cache is given
    (vllm/v1/worker/utils.py, request_memory). The share that the engine needs, in thousandths, makes it check just
    that.
    """
    pinned = outcome.kv_cache_memory_bytes
    if not pinned or engine.arguments.gpu_memory_utilization is not None:
        return {}
    share = max(
        compute_requested_bytes(None, outcome.ranks[number], engine.gpus[slot], pinned)
        / engine.gpus[slot].cuda_total_bytes
        for slot, number in engine.places
    )
    given = {} if engine.arguments.kv_cache_memory_bytes is not None else {"kv_cache_memory_bytes": pinned}
    return {**given, "gpu_memory_utilization": math.floor(share * 1000) / 1000}


def _compute_budget_mib(outcome: Outcome, gpus: Sequence[Gpu], tolerance_mib: int) -> int:
    """Return the MiB that NVML may show of the engine on each GPU: at most what there is, 0 if nothing is known."""
    most = max((min(gpu.total_bytes, gpus[gpu.slot].cuda_total_bytes) for gpu in outcome.gpus), default=0)
    return math.ceil(most / MIB) + tolerance_mib if most else 0


def _describe_engine(engine: Engine, outcome: Outcome) -> EnginePlan:
    """Build the plan of an engine from its outcome."""
    kv, fits = outcome.kv, outcome.verdict is Verdict.FITS
    gpu_model = known(engine.gpus[engine.slots[0]].name)
    advice = [to_sentence(finding.reason)[:-1] for finding in outcome.later] + feasibility.advice(engine.build_case())
    if is_approximate(engine.model.facts.source):
        advice.insert(0, f"this plan is {engine.model.facts.source.removeprefix('recorded: ')}")
    if fits and kv is not None:
        advice += feasibility.advise_on_context(max_model_len(engine.model, engine.arguments), kv.max_concurrency)
        advice += _check_highest(engine, outcome)
    weights = tuple(rank.loaded for rank in outcome.ranks)
    return EnginePlan(
        engine=engine.name,
        verdict=outcome.verdict,
        reason=outcome.reason,
        fix=outcome.fix,
        kv_cache_dtype=engine.kv_cache_dtype,
        kv_blocks=kv.blocks if kv else 0,
        kv_cache_tokens=kv.tokens if kv else 0,
        max_concurrency=kv.max_concurrency if kv else 0.0,
        max_context=kv.max_context_tokens if kv else 0,
        decode_tok_s=decode.estimate(engine.model, engine.arguments, weights, gpu_model)
        if weights and gpu_model
        else None,
        gpus=outcome.gpus,
        kv_groups=kv.groups if kv else (),
        advice=tuple(advice),
        facts_source=engine.model.facts.source,
        derived_kv_cache_memory_bytes=derive_kv_cache_bytes(engine, outcome.ranks),
        settings=_derive_settings(engine, outcome),
        pinned=outcome.kv_cache_memory_bytes is not None,
        observed=tuple(sorted(engine.observed)),
        max_model_len=max_model_len(engine.model, engine.arguments),
    )


def _check_highest(engine: Engine, outcome: Outcome) -> list[str]:
    """Return advice if the engine would not fit with every uncertain figure at its highest."""
    pinned = outcome.kv_cache_memory_bytes is not None
    short = 0
    for placed, (_, number) in zip(outcome.gpus, engine.places, strict=True):
        rank = outcome.ranks[number]
        # vLLM takes what it counts itself out of its share, which only makes the KV cache smaller.
        counted = [] if pinned else [rank.weights, rank.overhead, *([rank.graphs] if rank.graphs_kept.value else [])]
        more = sum(part.high - part.value for part in rank.parts if part not in counted)
        short = max(short, math.ceil(more) - placed.free_bytes)
    if short <= 0:
        return []
    return [
        f"with the highest of the uncertain figures it would be {mib(short)} too much: measure the engine with "
        f"playbooks/calibrate.yml"
    ]
