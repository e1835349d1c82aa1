# SPDX-License-Identifier: Apache-2.0
"""Search for the nearest setting with which an engine that does not fit would fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .contract import Verdict
from .feasibility import Engine
from .memory.vllm_versions import derive_limit, is_longer_allowed
from .outcome import Outcome, compute_outcome, derive_kv_cache_bytes

CONTEXT_STEP_TOKENS = 1024
"""A suggested context is a multiple of this."""
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


def find_nearest_fix(engine: Engine, outcome: Outcome) -> str:
    """Return the first change with which the engine fits, in the order in which an operator loses least."""
    limit = derive_limit(engine.model, engine.release.number)
    if (engine.arguments.max_model_len or 0) > limit and not is_longer_allowed(engine.environment):
        return _find_allowed_context(engine, limit)
    for change, changed in _list_changes(engine, outcome):
        if compute_outcome(changed).verdict is Verdict.FITS:
            return change
    return ""


def _find_allowed_context(engine: Engine, limit: int) -> str:
    """Return the longest max_model_len that the model allows and, if possible, the GPUs hold; empty if the engine
    would not fit with it either."""
    allowed = _replace_arguments(engine, max_model_len=limit)
    outcome = compute_outcome(allowed)
    if outcome.verdict is Verdict.FITS:
        return f"max_model_len: {limit}"
    shorter = _find_shorter_context(outcome)
    fits = shorter and compute_outcome(_replace_arguments(engine, max_model_len=shorter)).verdict is Verdict.FITS
    return f"max_model_len: {shorter}" if fits else ""


def _list_changes(engine: Engine, outcome: Outcome) -> Iterator[tuple[str, Engine]]:
    """Yield changes of an engine and what they are called, in that order."""
    arguments, verdict = engine.arguments, outcome.verdict
    # If the KV cache and what is beside it are not the problem, only other GPUs or a smaller share can help.
    memory_is_short = verdict in (Verdict.NO_KV, Verdict.KV_BELOW_MAX_MODEL_LEN, Verdict.OOM_WARMUP)
    if verdict is Verdict.NOT_FREE and arguments.gpu_memory_utilization is not None:
        yield from _list_smaller_shares(engine, outcome)
    shorter = _find_shorter_context(outcome)
    if shorter and shorter * 2 >= engine.max_model_len:
        yield f"max_model_len: {shorter}", _replace_arguments(engine, max_model_len=shorter)
    if arguments.kv_cache_memory_bytes is not None and outcome.ranks:
        derived = derive_kv_cache_bytes(engine, outcome.ranks)
        yield f"kv_cache_memory_bytes: {derived}", _replace_arguments(engine, kv_cache_memory_bytes=derived)
    if memory_is_short:
        yield from _list_larger_shares(engine)
        for fewer in (128, 64, 32, 16, 8, 4, 2, 1):
            if fewer < engine.max_num_seqs:
                yield f"max_num_seqs: {fewer}", _replace_arguments(engine, max_num_seqs=fewer)
    yield from _list_other_sizes(engine)
    if memory_is_short and not arguments.enforce_eager:
        yield "enforce_eager: true", _replace_arguments(engine, enforce_eager=True)
    if shorter:
        yield f"max_model_len: {shorter}", _replace_arguments(engine, max_model_len=shorter)


def _find_shorter_context(outcome: Outcome) -> int:
    """Return the longest max_model_len that fits; 0 if a shorter one would not help."""
    if outcome.kv is None or outcome.verdict is not Verdict.KV_BELOW_MAX_MODEL_LEN:
        return 0
    longest = outcome.kv.max_context_tokens
    return longest // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS or longest


def _list_smaller_shares(engine: Engine, outcome: Outcome) -> Iterator[tuple[str, Engine]]:
    """Yield the largest share of the GPU that is free."""
    context = max((rank.context.bytes for rank in outcome.ranks), default=0)
    share = min((engine.free[slot] - context) / engine.gpus[slot].cuda_total_bytes for slot in engine.slots)
    hundredths = math.floor(share * 100)
    if hundredths > 0:
        yield (
            f"gpu_memory_utilization: {hundredths / 100:.2f}",
            _replace_arguments(engine, gpu_memory_utilization=hundredths / 100),
        )


def _list_larger_shares(engine: Engine) -> Iterator[tuple[str, Engine]]:
    """Yield shares from the stated one up to one that leaves the margin free on every GPU."""
    now = engine.arguments.gpu_memory_utilization
    if now is None:
        return
    largest = min(
        (engine.free[slot] - engine.margin_bytes) / engine.gpus[slot].cuda_total_bytes for slot in engine.slots
    )
    for hundredths in range(math.floor(now * 100) + 1, math.floor(largest * 100) + 1):
        share = hundredths / 100
        yield f"gpu_memory_utilization: {share:.2f}", _replace_arguments(engine, gpu_memory_utilization=share)


def _list_other_sizes(engine: Engine) -> Iterator[tuple[str, Engine]]:
    """Yield the same engine with tensor parallelism alone: as many GPUs as now, then more, then fewer."""
    now = engine.arguments
    stages = now.pipeline_parallel_size
    had = now.tensor_parallel_size * stages
    larger = [size for size in TENSOR_PARALLEL_SIZES if size > had or (size == had and stages > 1)]
    smaller = [size for size in reversed(TENSOR_PARALLEL_SIZES) if size < had]
    others = sorted(
        set(range(len(engine.free))) - {*engine.slots, *engine.others}, key=lambda slot: (-engine.free[slot], slot)
    )
    for size in (*larger, *smaller):
        slots = tuple(sorted((*engine.slots, *others)[:size]))
        if len(slots) < size:
            continue
        changed = _replace_arguments(engine, tensor_parallel_size=size, pipeline_parallel_size=1)
        pipeline = ", pipeline_parallel_size: 1" if stages > 1 else ""
        moved = f", gpus: [{', '.join(map(str, slots))}]" if slots != tuple(sorted(engine.slots)) else ""
        yield f"tensor_parallel_size: {size}{pipeline}{moved}", replace(changed, slots=slots)


def _replace_arguments(engine: Engine, **changed: Any) -> Engine:
    return replace(engine, arguments=replace(engine.arguments, **changed))
