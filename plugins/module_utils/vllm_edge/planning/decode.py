# SPDX-License-Identifier: Apache-2.0
"""Estimates of the decoding speed, of one sequence at short context and of several requests at once, from the bytes
that each GPU reads in one step.

One constant was fitted to a mixture of experts, because there is one public measurement of one with a known checkpoint,
GPU and batch: EXPERTS_S. The same source has three more batch sizes, which the estimate for several requests meets
within 15 % without any further constant (tests/unit/planning/test_decode.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from .contract import Arguments, Attention, Decode, DecodeTogether, Model, RankWeights, Uncertain
from .memory.kv_cache import ELEMENT_BYTES, WINDOWED, compute_state_bytes

REACHED_BANDWIDTH = Uncertain(
    0.85,
    0.70,
    0.93,
    "fitted: 31B bf16 over 4 GPUs (14.8 tok/s, eager), 31B NVFP4 over 2 (15.1) and E4B (19 to 26) on the reference "
    "host, after what follows is taken off",
)
ALL_REDUCE_S = Uncertain(
    30e-6, 25e-6, 35e-6, "NCCL between GPUs without NVLink or P2P, by latency alone: a token's payload is about 10 KB"
)
ALL_REDUCES_PER_LAYER = 2
"""One after o_proj and one after down_proj, which are both row-parallel."""
FIXED_S = Uncertain(1e-3, 0.5e-3, 2e-3, "scheduling, sampling and launches of a dense model with CUDA graphs")
EXPERTS_S = Uncertain(
    3.7e-3,
    2e-3,
    12e-3,
    "routing, sorting and launches of the experts with CUDA graphs: what is left of 1/127 s on an RTX 5090 (1,792 "
    "GB/s) after reading and FIXED_S, by the model card of FusenAI/gemma-4-26B-A4B-it-NVFP4 (vLLM 0.19, one request). "
    "Lowest: 196 tok/s of an AWQ checkpoint on the same GPU; highest: 29.8 tok/s at 4k tokens on a GB10, vLLM 0.20.1",
)
EAGER_S = Uncertain(4e-3, 3e-3, 6e-3, "launches without CUDA graphs on the dense 31B")
EAGER_EXPERTS_S = Uncertain(
    48e-3, 20e-3, 60e-3, "launches without CUDA graphs on a mixture of experts: 18 instead of 127 tok/s on an RTX 5090"
)

TOGETHER_REQUESTS = 8
"""Of the estimate for several requests, unless max_num_seqs or the KV cache allows fewer: the same number for all
engines, so that they can be compared. Two for each of the usual roles."""
TOGETHER_CONTEXT_TOKENS = 1024
"""Context of each of them."""


def estimate(
    model: Model, arguments: Arguments, ranks: Sequence[RankWeights], bandwidth: float | None
) -> Decode | None:
    """Estimate tokens per second of one sequence.

    Args:
        ranks: those of a pipeline, which work one after the other; none if the weights are not known.
        bandwidth: of each GPU's memory, in bytes per second; None if it is not known. Then there is no estimate.
    """
    if not ranks or not bandwidth:
        return None
    read = sum(rank.read_bytes_per_token for rank in ranks)
    low, mid, high = _estimate_rates(model, arguments, read, bandwidth)
    return Decode(low=low, mid=mid, high=high, ceiling=bandwidth / read)


def estimate_together(
    model: Model,
    arguments: Arguments,
    ranks: Sequence[RankWeights],
    bandwidth: float | None,
    kv_cache_dtype: str,
    most_requests: int,
    context_tokens: int = TOGETHER_CONTEXT_TOKENS,
    wanted_requests: int = TOGETHER_REQUESTS,
) -> DecodeTogether | None:
    """Estimate tokens per second of all requests together if several are decoded at once.

    A step reads the dense weights once, the experts that at least one of its tokens is routed to (as if the router
    chose evenly), and the KV cache of each request. A pipeline is counted as if one batch were in flight, so more is
    possible. Arithmetic is not counted, so the estimate is for tens of requests, not for hundreds.

    Args:
        ranks, bandwidth: as those of `estimate`.
        most_requests: how many the engine may run at once. If it is fewer than `wanted_requests`, it counts.
        context_tokens: tokens that each request has in the KV cache.

    Returns:
        The estimate; None for fewer than two requests.
    """
    requests = min(wanted_requests, most_requests)
    if requests < 2 or not ranks or not bandwidth:
        return None
    read = _count_weights(model, ranks, requests)
    read += requests * _count_kv_bytes(model, arguments, kv_cache_dtype, context_tokens)
    low, mid, high = (requests * rate for rate in _estimate_rates(model, arguments, read, bandwidth))
    return DecodeTogether(requests, context_tokens, low, mid, high)


def estimate_speculative(
    model: Model, arguments: Arguments, ranks: Sequence[RankWeights], bandwidth: float, drafts: int
) -> tuple[float, float]:
    """Estimate the least and the most tokens per second of one sequence with speculative decoding.

    A step yields one token if no draft is accepted, and `drafts` + 1 if all are (v1/sample/rejection_sampler.py). It
    reads the weights once, of experts as many as that many requests do, and the drafter with a head once for each
    draft.
    """
    low, _, high = _estimate_rates(model, arguments, _count_weights(model, ranks, drafts + 1), bandwidth)
    drafting = 0.0
    if model.drafter:
        head = model.drafter.vocabulary * model.hidden_size * 2 // arguments.tensor_parallel_size
        drafting = drafts * ((ranks[-1].drafter_read_bytes + head) / bandwidth + FIXED_S.value)
    return 1 / (1 / low + drafting), (drafts + 1) / (1 / high + drafting)


def _count_weights(model: Model, ranks: Sequence[RankWeights], tokens: int) -> int:
    """Return the bytes of weights that a step with so many tokens reads."""
    one = model.experts_per_token / model.experts if model.experts else 0
    experts = sum(rank.by_kind.get("experts", 0) for rank in ranks)
    return sum(rank.read_bytes_per_token for rank in ranks) + round(experts * (1 - (1 - one) ** tokens - one))


def _estimate_rates(model: Model, arguments: Arguments, read: int, bandwidth: float) -> tuple[float, float, float]:
    """Return steps per second, low, mid and high, of an engine that reads so many bytes in a step."""
    reduces = ALL_REDUCES_PER_LAYER * len(model.layers) if arguments.tensor_parallel_size > 1 else 0
    fixed = FIXED_S + EXPERTS_S if model.experts else FIXED_S
    if arguments.enforce_eager:
        fixed += EAGER_EXPERTS_S if model.experts else EAGER_S

    def rate(reached: float, reduce_s: float, fixed_s: float) -> float:
        return 1 / (read / (bandwidth * reached) + reduces * reduce_s + fixed_s)

    return (
        rate(REACHED_BANDWIDTH.low, ALL_REDUCE_S.high, fixed.high),
        rate(REACHED_BANDWIDTH.value, ALL_REDUCE_S.value, fixed.value),
        rate(REACHED_BANDWIDTH.high, ALL_REDUCE_S.low, fixed.low),
    )


def _count_kv_bytes(model: Model, arguments: Arguments, kv_cache_dtype: str, tokens: int) -> int:
    """Return the bytes of the KV cache that one rank of each stage reads to decode a token of one request.

    Layers that share another's cache read it as well; a state of linear attention is read and written.
    """
    size = arguments.tensor_parallel_size
    states = (2 * compute_state_bytes(layer.state, model, arguments) for layer in model.layers if layer.state)
    return sum(states) + sum(
        (1 if layer.attention is Attention.LATENT else 2)
        * max(1, layer.kv_heads // size)
        * layer.head_size
        * ELEMENT_BYTES.get(kv_cache_dtype, 2)
        * (min(tokens, layer.window_tokens or tokens) if layer.attention in WINDOWED else tokens)
        for layer in model.layers
    )
