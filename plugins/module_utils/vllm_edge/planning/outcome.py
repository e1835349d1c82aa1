# SPDX-License-Identifier: Apache-2.0
"""What happens when one engine starts as it is written: what it takes of each GPU, and the first check that fails."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from . import feasibility
from .checkpoint import generic
from .contract import Arguments, Fix, Gpu, GpuPlan, KvCapacity, RankWeights, Uncertain, Verdict
from .feasibility import Engine
from .memory import overhead
from .memory.kv_cache import (
    DEFAULT_BLOCK_TOKENS,
    UncountedKvCache,
    UnsupportedKvCache,
    capacity,
    takes_flashinfer,
)
from .memory.overhead import GIB, MIB
from .memory.vllm_versions import counts_graphs, encodes, uses_second_runner
from .memory.weights import per_rank

End = Literal["least", "planned", "most"]
Refusal = tuple[Verdict, str]
"""A verdict and its reason."""


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
    warm_up: Uncertain
    """What the sampler's warm-up, after the graphs, needs beyond what the profile found for it."""
    warm_up_bytes: int

    @property
    def parts(self) -> tuple[Uncertain, ...]:
        return self.weights, self.overhead, self.context, self.graphs, self.warm_up

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
    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True)
class _Place:
    """One GPU of an engine, before it is judged. Sizes are bytes."""

    slot: int
    rank: Rank
    free: int
    requested: int
    """What vLLM requires to be free before it begins, whatever it will take."""
    left: int
    """What is left for the KV cache."""


def compute_outcome(engine: Engine, end: End = "planned") -> Outcome:
    """Return the outcome of an engine as it is written, without looking for a fix that fits.

    Args:
        end: what a generic model takes: the least, the most, or as planned, which is the most, except that what vLLM
            measures of an encoder is left in the KV cache.
    """
    findings = feasibility.findings(engine)
    unknown = bool(findings) and findings[0].verdict is Verdict.CANNOT_SAY
    if findings and not findings[0].after_load and not unknown:
        return _refuse(findings[0])
    ranks = _compute_ranks(engine, end)
    pinned = engine.arguments.kv_cache_memory_bytes
    if pinned is None and engine.arguments.gpu_memory_utilization is None:
        pinned = derive_kv_cache_bytes(engine, ranks)
    outcome = replace(_judge_memory(engine, ranks, pinned), ranks=ranks, kv_cache_memory_bytes=pinned)
    if unknown and outcome.verdict is not Verdict.FITS:
        return outcome
    if findings and outcome.verdict not in (Verdict.NOT_FREE, Verdict.OOM_WEIGHTS):
        first = _refuse(findings[0])
        reason = f"{first.reason} Apart from that it would fit: {outcome.reason}" if unknown else first.reason
        return replace(outcome, verdict=first.verdict, reason=reason, fix=first.fix)
    return replace(outcome, later=tuple(findings))


def _refuse(finding: feasibility.Finding) -> Outcome:
    return Outcome(finding.verdict, to_sentence(finding.reason), finding.fix)


def compute_encoder_bytes(engine: Engine) -> int:
    """Return the most that encoders of an architecture take that the planner does not know; 0 for text only, or if it
    was measured."""
    known = engine.arguments.language_model_only or "overhead_bytes" in engine.observed
    if known or not engine.model.generic or not engine.model.multimodal:
        return 0
    return generic.bound_encoder(engine.model, engine.max_num_batched_tokens, engine.max_model_len)


def _compute_ranks(engine: Engine, end: End) -> tuple[Rank, ...]:
    model, arguments, release = engine.model, engine.arguments, engine.release
    measured = arguments.gpu_memory_utilization is not None or arguments.kv_cache_memory_bytes is not None
    encoder = compute_encoder_bytes(engine) if end == "most" or (end == "planned" and not measured) else 0
    sequences, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    rows = min(sequences, tokens)
    second = uses_second_runner(model, arguments, release.version)
    seen = second or release.graphs_in_budget or engine.gpu.name != overhead.FITTED_GPU
    graphs = overhead.graphs(model, arguments, sequences, tokens, all_seen=seen)
    capability, backend = engine.gpu.compute_capability, arguments.attention_backend
    flashinfer = takes_flashinfer(model, engine.kv_cache_dtype, capability, backend)
    workspace = overhead.FLASHINFER_BYTES * flashinfer
    kept = graphs * 0
    if counts_graphs(model, arguments, release.version):
        # Without graphs of attention, as with drafts, FlashInfer takes it after that.
        at_once = arguments.captures_attention and not arguments.drafts
        estimated = graphs * overhead.GRAPH_ESTIMATE_RATIO.value + workspace * at_once
        kept = _replace_observed(engine, "graphs_bytes", estimated)
    graphs += workspace
    weights = per_rank(model, arguments, release.version)
    block_tokens = arguments.block_size or arguments.default_block_size or DEFAULT_BLOCK_TOKENS
    expanded = overhead.count_latent_workspace_tokens(engine.max_model_len, sequences, block_tokens)
    latent, gathered = overhead.compute_latent_context(model, expanded, arguments.tensor_parallel_size)
    context = overhead.context(len(engine.slots), engine.gpu.name, engine.has_nvlink) + gathered
    activations = overhead.activations(model, arguments, tokens) + latent
    activations += overhead.compute_index_workspace(model, arguments, engine.max_model_len, tokens)
    items = overhead.count_encoder_tokens(model, arguments, engine.max_model_len, tokens)
    run, outputs = overhead.encode(model, arguments, items if encodes(model, arguments, release.version) else 0)
    warm_up = profiled = overhead.sampler(model, rows)
    if drafts := arguments.drafts:
        in_parts = release.number >= overhead.VERIFIES_IN_PARTS_SINCE
        warm_up = profiled = overhead.sampler_with_drafts(
            model, drafts, sequences, tokens, second=second, in_parts=in_parts
        )
    if second:
        copies = release.second_runner_copies_logits
        profiled = overhead.profile_logits(model, rows, arguments.tensor_parallel_size, copies=copies)
    ranks = []
    for rank in weights:
        # Only the last rank of a pipeline samples (0.19.0 v1/worker/gpu_model_runner.py:5785).
        samples = rank.pipeline_rank == len(weights) - 1
        loaded = overhead.allocator(model, text_only=arguments.language_model_only) + rank.bytes
        if model.drafter and model.drafter.family == "eagle3":
            # vLLM shares its table of embeddings if all values are those of the model's own.
            loaded = replace(loaded, low=loaded.low - rank.by_kind.get("drafter_embeddings", 0))
        if model.generic:
            whole = per_rank(model, Arguments(), release.version)[0]
            loaded = generic.bound_weights(loaded.high, whole.bytes, len(engine.slots))
            loaded = replace(loaded, value=loaded.low) if end == "least" else loaded
        ranks.append(
            Rank(
                loaded=rank,
                weights=_replace_observed(engine, "weights_bytes", loaded),
                overhead=_replace_observed(
                    engine, "overhead_bytes", (activations + encoder + outputs + profiled * samples).raise_to(run)
                ),
                context=_replace_observed(engine, "context_bytes", context),
                graphs=_replace_observed(engine, "graphs_bytes", graphs),
                graphs_kept=kept,
                # NVML's figure, from which context_bytes is observed, has the warm-up in it.
                warm_up=(warm_up + profiled * -1) * (samples and "context_bytes" not in engine.observed),
                warm_up_bytes=warm_up.bytes * samples,
            )
        )
    return tuple(ranks)


def _replace_observed(engine: Engine, name: str, predicted: Uncertain) -> Uncertain:
    if name not in engine.observed:
        return predicted
    value = float(engine.observed[name])
    return Uncertain(value, value, value)


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


def _judge_memory(engine: Engine, ranks: Sequence[Rank], pinned: int | None) -> Outcome:
    """Determine verdict, reason, KV cache and GPU plans. The checks have the order of vLLM: free memory, weights,
    KV cache, warm-up.

    Args:
        pinned: the KV cache of each GPU; None if the share of the GPU decides.
    """
    share, version = engine.arguments.gpu_memory_utilization, engine.release.version
    places = []
    for slot, number in engine.places:
        rank = ranks[number]
        requested = compute_requested_bytes(share, rank, engine.gpus[slot], pinned)
        left = requested - rank.weights.bytes - rank.overhead.bytes - rank.graphs_kept.bytes
        places.append(_Place(slot, rank, engine.free[slot], requested, left if pinned is None else pinned))
    by_stage = [min(place.left for place in places if place.rank is rank) for rank in ranks]
    gpu_plans = tuple(
        _build_gpu_plan(place, max(by_stage[number], 0))
        for place, (_, number) in zip(places, engine.places, strict=True)
    )
    if refusal := _check_free_memory(places, share) or _check_weights(places):
        return Outcome(*refusal, "", gpu_plans)
    try:
        kv = capacity(engine.model, engine.arguments, by_stage, version)
    except UnsupportedKvCache as error:
        why, fix = (*error.args, "")[:2]
        if isinstance(error, UncountedKvCache):
            return Outcome(Verdict.CANNOT_SAY, to_sentence(why), fix, gpu_plans)
        return Outcome(Verdict.UNSUPPORTED_ENGINE, to_sentence(f"vLLM {version}: {why}"), fix, gpu_plans)
    worst = min(gpu_plans, key=lambda placed: placed.free_bytes)
    refusal = _check_room_for_kv_cache(engine, places, pinned) or _check_longest_request(engine, kv)
    refusal = refusal or _check_states(engine, kv) or _check_warm_up(worst)
    fits = Verdict.FITS, to_sentence(f"{worst.free_bytes // MIB:,} MiB stay free on GPU {worst.slot}")
    return Outcome(*(refusal or fits), "", gpu_plans, kv)


def _build_gpu_plan(place: _Place, kv_cache_bytes: int) -> GpuPlan:
    rank, total = place.rank, place.rank.fixed_bytes + kv_cache_bytes
    return GpuPlan(
        slot=place.slot,
        weights_bytes=rank.weights.bytes,
        overhead_bytes=rank.overhead.bytes + rank.warm_up.bytes,
        context_bytes=rank.context.bytes,
        graphs_bytes=rank.graphs.bytes,
        kv_cache_bytes=kv_cache_bytes,
        warm_up_bytes=min(rank.warm_up_bytes, rank.overhead.bytes + rank.warm_up.bytes),
        total_bytes=total,
        free_bytes=place.free - total,
    )


def _check_free_memory(places: Iterable[_Place], share: float | None) -> Refusal | None:
    for place in places:
        begins = place.free - place.rank.context.bytes
        if begins < place.requested:
            asked = "the engine needs" if share is None else f"gpu_memory_utilization {share:g} asks for"
            what = f"{asked} {_gib(place.requested)} on GPU {place.slot}, which has {_gib(begins)} free"
            return Verdict.NOT_FREE, _describe_shortage(what, place.requested - begins)
    return None


def _check_weights(places: Iterable[_Place]) -> Refusal | None:
    for place in places:
        weights, context = place.rank.weights.bytes, place.rank.context.bytes
        if weights + context > place.free:
            what = (
                f"weights need {_gib(weights)} on GPU {place.slot}, which has {_gib(place.free)}, "
                f"{mib(context)} of them for the CUDA context"
            )
            return Verdict.OOM_WEIGHTS, _describe_shortage(what, weights + context - place.free)
    return None


def _check_room_for_kv_cache(engine: Engine, places: Sequence[_Place], pinned: int | None) -> Refusal | None:
    """Check that weights, activations and graphs leave a KV cache, and room for one of a given size."""
    if pinned == 0:
        worst = max(places, key=lambda place: place.rank.fixed_bytes - place.free)
        weights, fixed = worst.rank.weights.bytes, worst.rank.fixed_bytes
        what = (
            f"weights take {_gib(weights)} of the {_gib(worst.free)} of GPU {worst.slot}, activations, "
            f"context and CUDA graphs {_gib(fixed - weights)}, and plan_margin_mib "
            f"{engine.margin_bytes // MIB} is kept free, which leaves no KV cache"
        )
        return Verdict.NO_KV, _describe_shortage(what, fixed + engine.margin_bytes - worst.free)
    if pinned is not None:
        for place in places:
            room = place.free - place.rank.weights.bytes - place.rank.context.bytes
            if pinned > room:
                what = f"kv_cache_memory_bytes is {_gib(pinned)}, and weights leave {_gib(room)} of GPU {place.slot}"
                return Verdict.NO_KV, _describe_shortage(what, pinned - room)
        return None
    worst = min(places, key=lambda place: place.left)
    if worst.left > 0:
        return None
    graphs = f", CUDA graphs {_gib(worst.rank.graphs_kept.bytes)}" if worst.rank.graphs_kept.value else ""
    what = (
        f"of {_gib(worst.requested)} (gpu_memory_utilization {engine.arguments.gpu_memory_utilization or 0:g}) "
        f"weights take {_gib(worst.rank.weights.bytes)} and activations {_gib(worst.rank.overhead.bytes)}{graphs}, "
        f"which leaves no KV cache on GPU {worst.slot}"
    )
    return Verdict.NO_KV, _describe_shortage(what, -worst.left)


def _check_longest_request(engine: Engine, kv: KvCapacity) -> Refusal | None:
    if kv.needed_bytes <= kv.available_bytes:
        return None
    what = (
        f"one request of max_model_len {engine.max_model_len:,} needs {_gib(kv.needed_bytes)} "
        f"of KV cache in {engine.kv_cache_dtype}, and {_gib(kv.available_bytes)} are left"
    )
    return Verdict.KV_BELOW_MAX_MODEL_LEN, _describe_shortage(what, kv.needed_bytes - kv.available_bytes)


def _check_states(engine: Engine, kv: KvCapacity) -> Refusal | None:
    """Check that each sequence of a captured batch has a block for its state (0.20.0 config/compilation.py:1421)."""
    limited = engine.model.hybrid and engine.release.blocks_limit_sequences and engine.arguments.captures_attention
    if not limited or engine.max_num_seqs <= kv.blocks:
        return None
    return Verdict.NO_KV, to_sentence(
        f"max_num_seqs {engine.max_num_seqs:,} is more than the {kv.blocks:,} blocks of the KV cache; where layers "
        f"have linear attention or Mamba each sequence needs one for its state when vLLM captures CUDA graphs"
    )


def _check_warm_up(worst: GpuPlan) -> Refusal | None:
    if worst.free_bytes >= 0:
        return None
    what = (
        f"GPU {worst.slot} would hold {_gib(worst.total_bytes)}: CUDA graphs ({_gib(worst.graphs_bytes)}) and the "
        f"CUDA context ({_gib(worst.context_bytes)}) come on top of the budget, and the sampler's warm-up fails"
    )
    return Verdict.OOM_WARMUP, _describe_shortage(what, -worst.free_bytes)


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
