# SPDX-License-Identifier: Apache-2.0
"""The planner's entry point: whether the engines of a profile will start on their GPUs, and what each takes there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..gpu.models import known
from . import decode, feasibility, overhead
from .contract import Arguments, EnginePlan, Gpu, GpuPlan, KvCapacity, Model, Plan, RankWeights, Uncertain, Verdict
from .kv_cache import UnsupportedKvCache, capacity, resolve_dtype
from .overhead import GIB, MIB
from .vllm_versions import Behaviour, behaviour, max_model_len, max_num_batched_tokens, max_num_seqs
from .weights import per_rank

MARGIN_MIB = 512
TOLERANCE_MIB = 300
CONTEXT_STEP_TOKENS = 1024
"""A suggested context is a multiple of this."""
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)

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


@dataclass(frozen=True)
class _Engine:
    """An engine of the inventory, converted to the planner's types."""

    name: str
    arguments: Arguments
    slots: tuple[int, ...]
    model: Model
    extra_args: tuple[str, ...]
    tool_call_parser: str
    observed: Mapping[str, int]
    kv_cache_dtype: str
    margin_bytes: int
    others: frozenset[int] = frozenset()
    """Slots of the profile's other engines."""


@dataclass(frozen=True)
class _Rank:
    """What one pipeline rank takes besides its KV cache, in bytes, with the ranges."""

    loaded: RankWeights
    weights: Uncertain
    overhead: Uncertain
    context: Uncertain
    graphs: Uncertain
    graphs_kept: Uncertain
    """What the release keeps out of its budget for graphs."""
    warm_up_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return sum(_round_bytes(part) for part in (self.weights, self.overhead, self.context, self.graphs))

    @property
    def highest_bytes(self) -> int:
        return math.ceil(sum(part.high for part in (self.weights, self.overhead, self.context, self.graphs)))


@dataclass(frozen=True)
class _Outcome:
    """The result for one engine before it is described."""

    verdict: Verdict
    reason: str
    fix: str
    gpus: tuple[GpuPlan, ...]
    kv: KvCapacity | None
    ranks: tuple[_Rank, ...]
    later: tuple[feasibility.Finding, ...] = ()
    """What would keep it from running even if it fitted."""
    kv_cache_memory_bytes: int | None = None
    """The KV cache that each GPU is given; None if the engine's share of the GPU decides."""


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
        engine = _parse_engine(described, models, gpus, given, vllm_version, margin_mib * MIB)
        engine = replace(engine, others=frozenset(others))
        outcome = _judge_engine(engine, gpus, free, release)
        found = _described(engine, outcome, gpus, free, release)
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
    return Arguments(**chosen)


# ---- one engine --------------------------------------------------------------------------------------------------


def _parse_engine(
    engine: Mapping[str, Any],
    models: Mapping[str, Model],
    gpus: Sequence[Gpu],
    observations: Mapping[str, Any],
    version: str,
    margin_bytes: int,
) -> _Engine:
    """Convert an engine of the inventory. Raises PlanError and ObservationError."""
    name = str(engine.get("name", ""))
    where = f"serving_engines.{name}"
    if engine.get("model") not in models:
        raise PlanError(f"{where}.model: {engine.get('model')!r} is none of the models ({', '.join(sorted(models))}).")
    arguments = arguments_of(engine)
    slots = tuple(engine.get("gpus") or ())
    if beyond := [slot for slot in slots if not 0 <= slot < len(gpus)]:
        raise PlanError(f"{where}.gpus: slot {beyond[0]} is not there; slots are 0 to {len(gpus) - 1}.")
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    if len(slots) != ranks:
        raise PlanError(
            f"{where}.gpus: {len(slots)} GPUs for tensor_parallel_size x pipeline_parallel_size = {ranks}; "
            f"give one for each."
        )
    model = models[str(engine["model"])]
    return _Engine(
        name,
        arguments,
        slots,
        model,
        tuple(str(word) for word in engine.get("extra_args") or ()),
        str(engine.get("tool_call_parser") or ""),
        overhead.observed(observations, name),
        resolve_dtype(model, arguments, version),
        margin_bytes,
    )


def _judge_engine(engine: _Engine, gpus: Sequence[Gpu], free: Sequence[int], release: Behaviour) -> _Outcome:
    """Return the outcome and, if it does not fit, the nearest setting that does."""
    outcome = _compute_outcome(engine, gpus, free, release)
    if outcome.verdict is Verdict.FITS:
        return outcome
    return replace(outcome, fix=_find_nearest_fix(engine, gpus, free, release, outcome) or outcome.fix)


def _compute_outcome(engine: _Engine, gpus: Sequence[Gpu], free: Sequence[int], release: Behaviour) -> _Outcome:
    """Return the outcome of an engine as it is written, without looking for a fix that fits."""
    found = feasibility.findings(_build_case(engine, gpus, release))
    for finding in found:
        if not finding.after_load:
            return _refused(finding)
    ranks = _ranks(engine, release)
    pinned = _choose_kv_cache_bytes(engine, free, ranks)
    verdict, reason, kv, gpu_plans = _memory(engine, ranks, gpus, free, release, pinned)
    if found and verdict not in (Verdict.NOT_FREE, Verdict.OOM_WEIGHTS):
        return replace(_refused(found[0]), gpus=gpu_plans, kv=kv, ranks=ranks, kv_cache_memory_bytes=pinned)
    return _Outcome(verdict, reason, "", gpu_plans, kv, ranks, tuple(found), pinned)


def _refused(finding: feasibility.Finding) -> _Outcome:
    return _Outcome(finding.verdict, _to_sentence(finding.reason), finding.fix, (), None, ())


def _ranks(engine: _Engine, release: Behaviour) -> tuple[_Rank, ...]:
    """Return what each pipeline rank takes besides its KV cache."""
    model, arguments = engine.model, engine.arguments
    sequences = max_num_seqs(model, arguments, release.version)
    tokens = max_num_batched_tokens(model, arguments, release.version)
    rows = min(sequences, tokens)
    weights = per_rank(model, arguments, release.version)
    ranks = []
    for rank in weights:
        samples = rank.pipeline_rank == len(weights) - 1
        graphs = overhead.graphs(model, arguments, sequences, tokens, in_budget=release.graphs_in_budget)
        kept = overhead.NOTHING
        if release.graphs_in_budget and "graphs_bytes" in engine.observed:
            kept = _seen(engine, "graphs_bytes", graphs)
        elif release.graphs_in_budget:
            kept = overhead.scaled(graphs, overhead.GRAPH_ESTIMATE_RATIO.value)
        activations = overhead.activations(model, rows, samples=samples)
        ranks.append(
            _Rank(
                loaded=rank,
                weights=_seen(engine, "weights_bytes", overhead.plus(overhead.ALLOCATOR_BYTES, rank.bytes)),
                overhead=_seen(engine, "overhead_bytes", activations),
                context=_seen(engine, "context_bytes", overhead.context(len(engine.slots))),
                graphs=_seen(engine, "graphs_bytes", graphs),
                graphs_kept=kept,
                warm_up_bytes=_round_bytes(overhead.sampler(model, rows)) if samples else 0,
            )
        )
    return tuple(ranks)


def _seen(engine: _Engine, name: str, predicted: Uncertain) -> Uncertain:
    """Return what the operator observed, otherwise the prediction."""
    if name not in engine.observed:
        return predicted
    value = float(engine.observed[name])
    return Uncertain(value, value, value, f"observed: plan_observations.{engine.name}.{name}")


def _memory(
    engine: _Engine,
    ranks: Sequence[_Rank],
    gpus: Sequence[Gpu],
    free: Sequence[int],
    release: Behaviour,
    pinned: int | None,
) -> tuple[Verdict, str, KvCapacity | None, tuple[GpuPlan, ...]]:
    """Determine verdict, reason, KV cache and GPU plans in the order of vLLM: free memory, weights, KV cache,
    warm-up."""
    arguments, version = engine.arguments, release.version
    share = arguments.gpu_memory_utilization
    places = [(slot, ranks[number // arguments.tensor_parallel_size]) for number, slot in enumerate(engine.slots)]
    # What vLLM requires to be free before it begins, whatever it will take.
    requested = {slot: _compute_requested_bytes(share, rank, gpus[slot], pinned) for slot, rank in places}
    left = {
        slot: pinned
        if pinned is not None
        else requested[slot] - _round_bytes(rank.weights) - _round_bytes(rank.overhead) - _round_bytes(rank.graphs_kept)
        for slot, rank in places
    }
    by_stage = [min(left[slot] for slot, placed in places if placed is rank) for rank in ranks]
    stages = {id(rank): available for rank, available in zip(ranks, by_stage, strict=True)}
    gpu_plans = tuple(_build_gpu_plan(slot, rank, max(stages[id(rank)], 0), free[slot]) for slot, rank in places)

    for slot, rank in places:
        begins = free[slot] - _round_bytes(rank.context)
        if begins < requested[slot]:
            asked = "the engine needs" if share is None else f"gpu_memory_utilization {share:g} asks for"
            said = f"{asked} {_gib(requested[slot])} on GPU {slot}, which has {_gib(begins)} free"
            return Verdict.NOT_FREE, _describe_shortage(said, requested[slot] - begins), None, gpu_plans
    for slot, rank in places:
        needs = _round_bytes(rank.weights) + _round_bytes(rank.context)
        if needs > free[slot]:
            said = (
                f"weights need {_gib(_round_bytes(rank.weights))} on GPU {slot}, which has {_gib(free[slot])}, "
                f"{_mib(_round_bytes(rank.context))} of them for the CUDA context"
            )
            return Verdict.OOM_WEIGHTS, _describe_shortage(said, needs - free[slot]), None, gpu_plans
    try:
        kv = capacity(engine.model, arguments, by_stage, version)
    except UnsupportedKvCache as error:
        return Verdict.UNSUPPORTED_ENGINE, _to_sentence(f"vLLM {version}: {error}"), None, gpu_plans
    slot, rank = min(places, key=lambda place: left[place[0]])
    if pinned == 0:
        slot, rank = max(places, key=lambda place: place[1].fixed_bytes - free[place[0]])
        short = rank.fixed_bytes + engine.margin_bytes - free[slot]
        said = (
            f"weights take {_gib(_round_bytes(rank.weights))} of the {_gib(free[slot])} of GPU {slot}, activations, "
            f"context and CUDA graphs {_gib(rank.fixed_bytes - _round_bytes(rank.weights))}, and plan_margin_mib "
            f"{engine.margin_bytes // MIB} is kept free, which leaves no KV cache"
        )
        return Verdict.NO_KV, _describe_shortage(said, short), kv, gpu_plans
    if pinned is not None:
        for slot, rank in places:
            room = free[slot] - _round_bytes(rank.weights) - _round_bytes(rank.context)
            if pinned > room:
                said = f"kv_cache_memory_bytes is {_gib(pinned)}, and weights leave {_gib(room)} of GPU {slot}"
                return Verdict.NO_KV, _describe_shortage(said, pinned - room), kv, gpu_plans
    elif left[slot] <= 0:
        graphs = f", CUDA graphs {_gib(_round_bytes(rank.graphs_kept))}" if rank.graphs_kept.value else ""
        said = (
            f"of {_gib(requested[slot])} (gpu_memory_utilization {share or 0:g}) weights take "
            f"{_gib(_round_bytes(rank.weights))} and activations {_gib(_round_bytes(rank.overhead))}{graphs}, which "
            f"leaves no KV cache on GPU {slot}"
        )
        return Verdict.NO_KV, _describe_shortage(said, -left[slot]), kv, gpu_plans
    if kv.needed_bytes > kv.available_bytes:
        said = (
            f"one request of max_model_len {max_model_len(engine.model, arguments):,} needs {_gib(kv.needed_bytes)} of "
            f"KV cache in {engine.kv_cache_dtype}, and {_gib(kv.available_bytes)} are left"
        )
        return (
            Verdict.KV_BELOW_MAX_MODEL_LEN,
            _describe_shortage(said, kv.needed_bytes - kv.available_bytes),
            kv,
            gpu_plans,
        )
    worst = min(gpu_plans, key=lambda placed: placed.free_bytes)
    if worst.free_bytes < 0:
        said = (
            f"GPU {worst.slot} would hold {_gib(worst.total_bytes)}: CUDA graphs ({_gib(worst.graphs_bytes)}) and the "
            f"CUDA context ({_gib(worst.context_bytes)}) come on top of the budget, and the sampler's warm-up fails"
        )
        return Verdict.OOM_WARMUP, _describe_shortage(said, -worst.free_bytes), kv, gpu_plans
    said = f"{worst.free_bytes // MIB:,} MiB stay free on GPU {worst.slot}"
    return Verdict.FITS, _to_sentence(said), kv, gpu_plans


def _build_gpu_plan(slot: int, rank: _Rank, kv_cache_bytes: int, free: int) -> GpuPlan:
    total = rank.fixed_bytes + kv_cache_bytes
    return GpuPlan(
        slot=slot,
        weights_bytes=_round_bytes(rank.weights),
        overhead_bytes=_round_bytes(rank.overhead),
        context_bytes=_round_bytes(rank.context),
        graphs_bytes=_round_bytes(rank.graphs),
        kv_cache_bytes=kv_cache_bytes,
        warm_up_bytes=min(rank.warm_up_bytes, _round_bytes(rank.overhead)),
        total_bytes=total,
        free_bytes=free - total,
    )


def _compute_requested_bytes(share: float | None, rank: _Rank, gpu: Gpu, pinned: int | None) -> int:
    """Return the bytes that must be free when vLLM begins: its share of the GPU, otherwise what it will need."""
    if share is not None:
        return math.ceil(gpu.cuda_total_bytes * share)
    context = _round_bytes(rank.context)
    return min(rank.fixed_bytes - context + (pinned or 0), gpu.cuda_total_bytes - context)


def _choose_kv_cache_bytes(engine: _Engine, free: Sequence[int], ranks: Sequence[_Rank]) -> int | None:
    """Return the bytes of KV cache on each GPU, or None if the share of the GPU decides.

    They are the engine's own setting or, if it has no share either, what leaves the margin free.
    """
    if engine.arguments.kv_cache_memory_bytes is not None or engine.arguments.gpu_memory_utilization is not None:
        return engine.arguments.kv_cache_memory_bytes
    return _derive_kv_cache_bytes(engine, free, ranks)


def _derive_settings(engine: _Engine, outcome: _Outcome, gpus: Sequence[Gpu]) -> dict[str, float | int]:
    """Return what the plan adds to the engine's own arguments.

    vLLM checks that gpu_memory_utilization of the GPU is free even if the size of the KV cache is given
    (vllm/v1/worker/utils.py, request_memory). The share that the engine needs, in thousandths, makes it check just
    that.
    """
    pinned = outcome.kv_cache_memory_bytes
    if not pinned or engine.arguments.gpu_memory_utilization is not None:
        return {}
    size = engine.arguments.tensor_parallel_size
    share = max(
        _compute_requested_bytes(None, outcome.ranks[number // size], gpus[slot], pinned) / gpus[slot].cuda_total_bytes
        for number, slot in enumerate(engine.slots)
    )
    given = {} if engine.arguments.kv_cache_memory_bytes is not None else {"kv_cache_memory_bytes": pinned}
    return {**given, "gpu_memory_utilization": math.floor(share * 1000) / 1000}


def _compute_budget_mib(outcome: _Outcome, gpus: Sequence[Gpu], tolerance_mib: int) -> int:
    """Return the MiB that NVML may show of the engine on each GPU: at most what there is, 0 if nothing is known."""
    most = max((min(gpu.total_bytes, gpus[gpu.slot].cuda_total_bytes) for gpu in outcome.gpus), default=0)
    return math.ceil(most / MIB) + tolerance_mib if most else 0


def _derive_kv_cache_bytes(engine: _Engine, free: Sequence[int], ranks: Sequence[_Rank]) -> int:
    """Return the KV cache, in whole MiB, that leaves the margin free on each GPU."""
    if not ranks:
        return 0
    size = engine.arguments.tensor_parallel_size
    left = min(free[slot] - ranks[number // size].fixed_bytes for number, slot in enumerate(engine.slots))
    return max(left - engine.margin_bytes, 0) // MIB * MIB


# ---- the nearest setting that fits -------------------------------------------------------------------------------


def _find_nearest_fix(
    engine: _Engine, gpus: Sequence[Gpu], free: Sequence[int], release: Behaviour, outcome: _Outcome
) -> str:
    """Return the first change with which the engine fits, in the order in which an operator loses least."""
    for said, changed in _list_changes(engine, gpus, free, release, outcome):
        if _compute_outcome(changed, gpus, free, release).verdict is Verdict.FITS:
            return said
    return ""


def _list_changes(
    engine: _Engine, gpus: Sequence[Gpu], free: Sequence[int], release: Behaviour, outcome: _Outcome
) -> Iterator[tuple[str, _Engine]]:
    """Yield changes of an engine and what they are called, in that order."""
    arguments, verdict = engine.arguments, outcome.verdict
    # If the KV cache and what is beside it are not the problem, only other GPUs or a smaller share can help.
    memory_is_short = verdict in (Verdict.NO_KV, Verdict.KV_BELOW_MAX_MODEL_LEN, Verdict.OOM_WARMUP)
    if verdict is Verdict.NOT_FREE and arguments.gpu_memory_utilization is not None:
        yield from _list_smaller_shares(engine, gpus, free, outcome.ranks)
    shorter = _find_shorter_context(engine, outcome)
    if shorter and shorter * 2 >= max_model_len(engine.model, arguments):
        yield f"max_model_len: {shorter}", _replace_arguments(engine, max_model_len=shorter)
    if arguments.kv_cache_memory_bytes is not None and outcome.ranks:
        derived = _derive_kv_cache_bytes(engine, free, outcome.ranks)
        yield f"kv_cache_memory_bytes: {derived}", _replace_arguments(engine, kv_cache_memory_bytes=derived)
    if memory_is_short:
        yield from _list_larger_shares(engine, gpus, free)
        sequences = max_num_seqs(engine.model, arguments, release.version)
        for fewer in (128, 64, 32, 16, 8, 4, 2, 1):
            if fewer < sequences:
                yield f"max_num_seqs: {fewer}", _replace_arguments(engine, max_num_seqs=fewer)
    yield from _list_other_sizes(engine, free)
    if memory_is_short and not arguments.enforce_eager:
        yield "enforce_eager: true", _replace_arguments(engine, enforce_eager=True)
    if shorter:
        yield f"max_model_len: {shorter}", _replace_arguments(engine, max_model_len=shorter)


def _find_shorter_context(engine: _Engine, outcome: _Outcome) -> int:
    """Return the longest max_model_len that fits, in whole steps if possible; 0 if a shorter one would not help."""
    if outcome.kv is None or outcome.verdict is not Verdict.KV_BELOW_MAX_MODEL_LEN:
        return 0
    longest = outcome.kv.max_context_tokens
    return longest // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS or longest


def _list_smaller_shares(
    engine: _Engine, gpus: Sequence[Gpu], free: Sequence[int], ranks: Sequence[_Rank]
) -> Iterator[tuple[str, _Engine]]:
    """Yield the largest share of the GPU that is free."""
    context = max((_round_bytes(rank.context) for rank in ranks), default=0)
    share = min((free[slot] - context) / gpus[slot].cuda_total_bytes for slot in engine.slots)
    hundredths = math.floor(share * 100)
    if hundredths > 0:
        yield (
            f"gpu_memory_utilization: {hundredths / 100:.2f}",
            _replace_arguments(engine, gpu_memory_utilization=hundredths / 100),
        )


def _list_larger_shares(engine: _Engine, gpus: Sequence[Gpu], free: Sequence[int]) -> Iterator[tuple[str, _Engine]]:
    """Yield shares from the stated one up to one that leaves the margin free on every GPU."""
    now = engine.arguments.gpu_memory_utilization
    if now is None:
        return
    largest = min((free[slot] - engine.margin_bytes) / gpus[slot].cuda_total_bytes for slot in engine.slots)
    for hundredths in range(math.floor(now * 100) + 1, math.floor(largest * 100) + 1):
        share = hundredths / 100
        yield f"gpu_memory_utilization: {share:.2f}", _replace_arguments(engine, gpu_memory_utilization=share)


def _list_other_sizes(engine: _Engine, free: Sequence[int]) -> Iterator[tuple[str, _Engine]]:
    """Yield the same engine with tensor parallelism alone: as many GPUs as now, then more, then fewer."""
    now = engine.arguments
    stages = now.pipeline_parallel_size
    had = now.tensor_parallel_size * stages
    larger = [size for size in TENSOR_PARALLEL_SIZES if size > had or (size == had and stages > 1)]
    smaller = [size for size in reversed(TENSOR_PARALLEL_SIZES) if size < had]
    others = sorted(set(range(len(free))) - {*engine.slots, *engine.others}, key=lambda slot: (-free[slot], slot))
    for size in (*larger, *smaller):
        slots = tuple(sorted((*engine.slots, *others)[:size]))
        if len(slots) < size:
            continue
        changed = _replace_arguments(engine, tensor_parallel_size=size, pipeline_parallel_size=1)
        pipeline = ", pipeline_parallel_size: 1" if stages > 1 else ""
        moved = f", gpus: [{', '.join(map(str, slots))}]" if slots != tuple(sorted(engine.slots)) else ""
        yield f"tensor_parallel_size: {size}{pipeline}{moved}", replace(changed, slots=slots)


def _replace_arguments(engine: _Engine, **changed: Any) -> _Engine:
    return replace(engine, arguments=replace(engine.arguments, **changed))


# ---- the answer --------------------------------------------------------------------------------------------------


def _build_case(engine: _Engine, gpus: Sequence[Gpu], release: Behaviour) -> feasibility.Case:
    gpu = gpus[engine.slots[0]]
    return feasibility.Case(
        engine.model,
        engine.arguments,
        feasibility.parse_release(release.version),
        gpu,
        known(gpu.name),
        engine.kv_cache_dtype,
        engine.extra_args,
        engine.tool_call_parser,
    )


def _described(
    engine: _Engine, outcome: _Outcome, gpus: Sequence[Gpu], free: Sequence[int], release: Behaviour
) -> EnginePlan:
    """Build the plan of an engine from its outcome."""
    kv, fits = outcome.kv, outcome.verdict is Verdict.FITS
    gpu_model = known(gpus[engine.slots[0]].name)
    advice = [_to_sentence(finding.reason)[:-1] for finding in outcome.later] + feasibility.advice(
        _build_case(engine, gpus, release)
    )
    if fits and kv is not None:
        advice += feasibility.advise_on_context(max_model_len(engine.model, engine.arguments), kv.max_concurrency)
        advice += _check_highest(engine, outcome, free)
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
        derived_kv_cache_memory_bytes=_derive_kv_cache_bytes(engine, free, outcome.ranks),
        settings=_derive_settings(engine, outcome, gpus),
        pinned=outcome.kv_cache_memory_bytes is not None,
        observed=tuple(sorted(engine.observed)),
    )


def _check_highest(engine: _Engine, outcome: _Outcome, free: Sequence[int]) -> list[str]:
    """Return advice if the engine would not fit with every uncertain figure at its highest."""
    pinned = outcome.kv_cache_memory_bytes is not None
    size = engine.arguments.tensor_parallel_size
    short = 0
    for number, placed in enumerate(outcome.gpus):
        rank = outcome.ranks[number // size]
        # vLLM takes what it counts itself out of its share, which only makes the KV cache smaller.
        counted = [] if pinned else [rank.weights, rank.overhead, *([rank.graphs] if rank.graphs_kept.value else [])]
        parts = [rank.weights, rank.overhead, rank.context, rank.graphs]
        more = sum(part.high - part.value for part in parts if part not in counted)
        short = max(short, math.ceil(more) - placed.free_bytes)
    if short <= 0:
        return []
    return [
        f"with the highest of the uncertain figures it would be {_mib(short)} too much: observe the first start, and "
        f"state it in plan_observations"
    ]


def _round_bytes(figure: Uncertain) -> int:
    return round(figure.value)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _mib(size: int) -> str:
    return f"{math.ceil(size / MIB):,} MiB"


def _describe_shortage(said: str, missing: int) -> str:
    """Return a reason with how much is missing, in MiB if that is less than a GiB."""
    return _to_sentence(f"{said}: {_mib(missing) if missing < GIB else _gib(missing)} too little")


def _to_sentence(words: str) -> str:
    """Add a full stop and a capital, unless the text begins with vLLM or the name of a variable."""
    first = words.split(" ", 1)[0]
    return (words if "_" in first or first == "vLLM" else words[0].upper() + words[1:]) + "."
