# SPDX-License-Identifier: Apache-2.0
"""What happens when one engine starts as it is written: what it takes of each GPU, and the first check that fails."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..gpu.models import GPU_MODELS
from . import feasibility
from .checkpoint import generic
from .contract import Arguments, Gpu, GpuPlan, KvCapacity, Model, RankWeights, Uncertain, Verdict
from .memory import overhead
from .memory.kv_cache import DEFAULT_BLOCK_TOKENS, UnsupportedKvCache, capacity
from .memory.overhead import GIB, MIB
from .memory.vllm_versions import Behaviour, max_model_len, max_num_batched_tokens, max_num_seqs
from .memory.weights import per_rank

Refusal = tuple[Verdict, str]
"""A verdict and its reason."""


@dataclass(frozen=True)
class Engine:
    """An engine of the inventory in the planner's types, and the GPUs as it finds them when it starts."""

    name: str
    arguments: Arguments
    slots: tuple[int, ...]
    model: Model
    extra_args: tuple[str, ...]
    tool_call_parser: str
    environment: Mapping[str, Any]
    """extra_env."""
    observed: Mapping[str, int]
    kv_cache_dtype: str
    margin_bytes: int
    others: frozenset[int]
    """Slots of the profile's other engines."""
    gpus: Sequence[Gpu]
    """All GPUs of the host, by slot."""
    free: Sequence[int]
    """Bytes that are free on each GPU, by slot."""
    release: Behaviour

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(slot, number // self.arguments.tensor_parallel_size) for number, slot in enumerate(self.slots)]

    @property
    def has_nvlink(self) -> bool:
        gpu_model = GPU_MODELS.get(self.gpus[self.slots[0]].name)
        return len(self.slots) > 1 and gpu_model is not None and gpu_model.nvlink

    def build_case(self) -> feasibility.Case:
        gpu = self.gpus[self.slots[0]]
        return feasibility.Case(
            self.model,
            self.arguments,
            feasibility.parse_release(self.release.version),
            gpu,
            GPU_MODELS.get(gpu.name),
            self.kv_cache_dtype,
            self.extra_args,
            self.tool_call_parser,
            self.environment,
        )


@dataclass(frozen=True)
class Rank:
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
    def parts(self) -> tuple[Uncertain, ...]:
        return self.weights, self.overhead, self.context, self.graphs

    @property
    def fixed_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class Outcome:
    """The result for one engine before it is described."""

    verdict: Verdict
    reason: str
    fix: str
    gpus: tuple[GpuPlan, ...] = ()
    kv: KvCapacity | None = None
    ranks: tuple[Rank, ...] = ()
    later: tuple[feasibility.Finding, ...] = ()
    """What would keep it from running even if it fitted."""
    kv_cache_memory_bytes: int | None = None
    """The KV cache that each GPU is given; None if the engine's share of the GPU decides."""


@dataclass(frozen=True)
class _Layout:
    """The memory of an engine on its GPUs, before it is judged."""

    engine: Engine
    places: Sequence[tuple[int, Rank]]
    requested: Mapping[int, int]
    """What vLLM requires to be free before it begins, whatever it will take, by slot."""
    left: Mapping[int, int]
    """What is left for the KV cache, by slot."""
    pinned: int | None
    """The KV cache of each GPU, if it is fixed."""
    gpu_plans: tuple[GpuPlan, ...]


def compute_outcome(engine: Engine) -> Outcome:
    """Return the outcome of an engine as it is written, without looking for a fix that fits."""
    findings = feasibility.findings(engine.build_case())
    for finding in findings:
        if not finding.after_load:
            return _refuse(finding)
    ranks = _compute_ranks(engine)
    pinned = _choose_kv_cache_bytes(engine, ranks)
    outcome = replace(_judge_memory(engine, ranks, pinned), ranks=ranks, kv_cache_memory_bytes=pinned)
    if findings and outcome.verdict not in (Verdict.NOT_FREE, Verdict.OOM_WEIGHTS):
        first = _refuse(findings[0])
        return replace(outcome, verdict=first.verdict, reason=first.reason, fix=first.fix)
    return replace(outcome, later=tuple(findings))


def _refuse(finding: feasibility.Finding) -> Outcome:
    return Outcome(finding.verdict, to_sentence(finding.reason), finding.fix)


def _compute_ranks(engine: Engine) -> tuple[Rank, ...]:
    model, arguments, release = engine.model, engine.arguments, engine.release
    sequences = max_num_seqs(model, arguments, release.version)
    tokens = max_num_batched_tokens(model, arguments, release.version)
    rows = min(sequences, tokens)
    graphs = overhead.graphs(model, arguments, sequences, tokens, in_budget=release.graphs_in_budget)
    kept = overhead.NOTHING
    if release.graphs_in_budget:
        kept = _replace_observed(engine, "graphs_bytes", overhead.scaled(graphs, overhead.GRAPH_ESTIMATE_RATIO.value))
    weights = per_rank(model, arguments, release.version)
    gpu = engine.gpus[engine.slots[0]]
    block_tokens = arguments.block_size or arguments.default_block_size or DEFAULT_BLOCK_TOKENS
    expanded = overhead.count_latent_workspace_tokens(max_model_len(model, arguments), sequences, block_tokens)
    context = overhead.context(len(engine.slots), gpu.name, engine.has_nvlink)
    context = overhead.plus(context, overhead.compute_latent_workspace(model, expanded))
    ranks = []
    for rank in weights:
        samples = rank.pipeline_rank == len(weights) - 1
        text_only = arguments.language_model_only
        loaded = overhead.plus(overhead.allocator(model, text_only=text_only), rank.bytes)
        if model.generic:
            whole = per_rank(model, Arguments(), release.version)[0]
            loaded = generic.bound_weights(loaded.high, whole.bytes, len(engine.slots))
        activations = overhead.activations(
            model,
            rows,
            samples=samples,
            text_only=text_only,
            tokens=tokens,
            tensor_parallel_size=arguments.tensor_parallel_size,
        )
        latent = overhead.compute_latent_context(model, expanded, arguments.tensor_parallel_size)
        activations = overhead.plus(activations, latent)
        ranks.append(
            Rank(
                loaded=rank,
                weights=_replace_observed(engine, "weights_bytes", loaded),
                overhead=_replace_observed(engine, "overhead_bytes", activations),
                context=_replace_observed(engine, "context_bytes", context),
                graphs=_replace_observed(engine, "graphs_bytes", graphs),
                graphs_kept=kept,
                warm_up_bytes=overhead.sampler(model, rows).bytes if samples else 0,
            )
        )
    return tuple(ranks)


def _replace_observed(engine: Engine, name: str, predicted: Uncertain) -> Uncertain:
    if name not in engine.observed:
        return predicted
    value = float(engine.observed[name])
    return Uncertain(value, value, value, f"observed: plan_observations.{engine.name}.{name}")


def compute_requested_bytes(share: float | None, rank: Rank, gpu: Gpu, pinned: int | None) -> int:
    """Return the bytes that must be free when vLLM begins: its share of the GPU, otherwise what it will need."""
    if share is not None:
        return math.ceil(gpu.cuda_total_bytes * share)
    context = rank.context.bytes
    return min(rank.fixed_bytes - context + (pinned or 0), gpu.cuda_total_bytes - context)


def derive_kv_cache_bytes(engine: Engine, ranks: Sequence[Rank]) -> int:
    """Return the KV cache, in whole MiB, that leaves the margin free on each GPU."""
    if not ranks:
        return 0
    left = min(engine.free[slot] - ranks[number].fixed_bytes for slot, number in engine.places)
    return max(left - engine.margin_bytes, 0) // MIB * MIB


def _choose_kv_cache_bytes(engine: Engine, ranks: Sequence[Rank]) -> int | None:
    """Return the bytes of KV cache on each GPU, or None if the share of the GPU decides.

    They are the engine's own setting or, if it has no share either, what leaves the margin free.
    """
    if engine.arguments.kv_cache_memory_bytes is not None or engine.arguments.gpu_memory_utilization is not None:
        return engine.arguments.kv_cache_memory_bytes
    return derive_kv_cache_bytes(engine, ranks)


def _judge_memory(engine: Engine, ranks: Sequence[Rank], pinned: int | None) -> Outcome:
    """Determine verdict, reason, KV cache and GPU plans. The checks have the order of vLLM: free memory, weights,
    KV cache, warm-up."""
    share, version = engine.arguments.gpu_memory_utilization, engine.release.version
    places = [(slot, ranks[number]) for slot, number in engine.places]
    requested = {slot: compute_requested_bytes(share, rank, engine.gpus[slot], pinned) for slot, rank in places}
    left = {
        slot: requested[slot] - rank.weights.bytes - rank.overhead.bytes - rank.graphs_kept.bytes
        if pinned is None
        else pinned
        for slot, rank in places
    }
    by_stage = [min(left[slot] for slot, number in engine.places if number == stage) for stage in range(len(ranks))]
    gpu_plans = tuple(
        _build_gpu_plan(slot, ranks[number], max(by_stage[number], 0), engine.free[slot])
        for slot, number in engine.places
    )
    layout = _Layout(engine, places, requested, left, pinned, gpu_plans)
    if refusal := _check_free_memory(layout) or _check_weights(layout):
        return Outcome(*refusal, "", gpu_plans)
    try:
        kv = capacity(engine.model, engine.arguments, by_stage, version)
    except UnsupportedKvCache as error:
        return Outcome(Verdict.UNSUPPORTED_ENGINE, to_sentence(f"vLLM {version}: {error}"), "", gpu_plans)
    refusal = _check_room_for_kv_cache(layout) or _check_longest_request(engine, kv) or _check_warm_up(gpu_plans)
    worst = _find_worst(gpu_plans)
    fits = Verdict.FITS, to_sentence(f"{worst.free_bytes // MIB:,} MiB stay free on GPU {worst.slot}")
    return Outcome(*(refusal or fits), "", gpu_plans, kv)


def _build_gpu_plan(slot: int, rank: Rank, kv_cache_bytes: int, free: int) -> GpuPlan:
    total = rank.fixed_bytes + kv_cache_bytes
    return GpuPlan(
        slot=slot,
        weights_bytes=rank.weights.bytes,
        overhead_bytes=rank.overhead.bytes,
        context_bytes=rank.context.bytes,
        graphs_bytes=rank.graphs.bytes,
        kv_cache_bytes=kv_cache_bytes,
        warm_up_bytes=min(rank.warm_up_bytes, rank.overhead.bytes),
        total_bytes=total,
        free_bytes=free - total,
    )


def _check_free_memory(layout: _Layout) -> Refusal | None:
    share = layout.engine.arguments.gpu_memory_utilization
    for slot, rank in layout.places:
        begins, requested = layout.engine.free[slot] - rank.context.bytes, layout.requested[slot]
        if begins < requested:
            asked = "the engine needs" if share is None else f"gpu_memory_utilization {share:g} asks for"
            what = f"{asked} {_gib(requested)} on GPU {slot}, which has {_gib(begins)} free"
            return Verdict.NOT_FREE, _describe_shortage(what, requested - begins)
    return None


def _check_weights(layout: _Layout) -> Refusal | None:
    for slot, rank in layout.places:
        needs, free = rank.weights.bytes + rank.context.bytes, layout.engine.free[slot]
        if needs > free:
            what = (
                f"weights need {_gib(rank.weights.bytes)} on GPU {slot}, which has {_gib(free)}, "
                f"{mib(rank.context.bytes)} of them for the CUDA context"
            )
            return Verdict.OOM_WEIGHTS, _describe_shortage(what, needs - free)
    return None


def _check_room_for_kv_cache(layout: _Layout) -> Refusal | None:
    """Check that weights, activations and graphs leave a KV cache, and room for one of a given size."""
    engine, free, pinned = layout.engine, layout.engine.free, layout.pinned
    if pinned == 0:
        slot, rank = max(layout.places, key=lambda place: place[1].fixed_bytes - free[place[0]])
        what = (
            f"weights take {_gib(rank.weights.bytes)} of the {_gib(free[slot])} of GPU {slot}, activations, "
            f"context and CUDA graphs {_gib(rank.fixed_bytes - rank.weights.bytes)}, and plan_margin_mib "
            f"{engine.margin_bytes // MIB} is kept free, which leaves no KV cache"
        )
        return Verdict.NO_KV, _describe_shortage(what, rank.fixed_bytes + engine.margin_bytes - free[slot])
    if pinned is not None:
        for slot, rank in layout.places:
            room = free[slot] - rank.weights.bytes - rank.context.bytes
            if pinned > room:
                what = f"kv_cache_memory_bytes is {_gib(pinned)}, and weights leave {_gib(room)} of GPU {slot}"
                return Verdict.NO_KV, _describe_shortage(what, pinned - room)
        return None
    slot, rank = min(layout.places, key=lambda place: layout.left[place[0]])
    if layout.left[slot] > 0:
        return None
    graphs = f", CUDA graphs {_gib(rank.graphs_kept.bytes)}" if rank.graphs_kept.value else ""
    what = (
        f"of {_gib(layout.requested[slot])} (gpu_memory_utilization {engine.arguments.gpu_memory_utilization or 0:g}) "
        f"weights take {_gib(rank.weights.bytes)} and activations {_gib(rank.overhead.bytes)}{graphs}, which leaves no "
        f"KV cache on GPU {slot}"
    )
    return Verdict.NO_KV, _describe_shortage(what, -layout.left[slot])


def _check_longest_request(engine: Engine, kv: KvCapacity) -> Refusal | None:
    if kv.needed_bytes <= kv.available_bytes:
        return None
    what = (
        f"one request of max_model_len {max_model_len(engine.model, engine.arguments):,} needs {_gib(kv.needed_bytes)} "
        f"of KV cache in {engine.kv_cache_dtype}, and {_gib(kv.available_bytes)} are left"
    )
    return Verdict.KV_BELOW_MAX_MODEL_LEN, _describe_shortage(what, kv.needed_bytes - kv.available_bytes)


def _check_warm_up(gpu_plans: Sequence[GpuPlan]) -> Refusal | None:
    worst = _find_worst(gpu_plans)
    if worst.free_bytes >= 0:
        return None
    what = (
        f"GPU {worst.slot} would hold {_gib(worst.total_bytes)}: CUDA graphs ({_gib(worst.graphs_bytes)}) and the "
        f"CUDA context ({_gib(worst.context_bytes)}) come on top of the budget, and the sampler's warm-up fails"
    )
    return Verdict.OOM_WARMUP, _describe_shortage(what, -worst.free_bytes)


def _find_worst(gpu_plans: Sequence[GpuPlan]) -> GpuPlan:
    return min(gpu_plans, key=lambda placed: placed.free_bytes)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def mib(size: int) -> str:
    return f"{math.ceil(size / MIB):,} MiB"


def _describe_shortage(what: str, missing: int) -> str:
    return to_sentence(f"{what}: {mib(missing) if missing < GIB else _gib(missing)} too little")


def to_sentence(words: str) -> str:
    """Add a full stop and a capital, unless the text begins with vLLM or the name of a variable."""
    first = words.split(" ", 1)[0]
    return (words if "_" in first or first == "vLLM" else words[0].upper() + words[1:]) + "."
