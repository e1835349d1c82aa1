# SPDX-License-Identifier: Apache-2.0
"""Estimate of the decoding speed of one sequence at short context, from the bytes that each GPU reads per token."""

from __future__ import annotations

from collections.abc import Sequence

from ..gpu.models import GpuModel
from .contract import Arguments, Decode, Model, RankWeights, Uncertain

REACHED_BANDWIDTH = Uncertain(
    0.85,
    0.70,
    0.93,
    "31B bf16 over 4 GPUs (14.8 tok/s, eager), 31B NVFP4 over 2 (15.1) and E4B (19 to 26) on the reference host, after "
    "what follows is taken off",
    fitted=True,
)
ALL_REDUCE_S = Uncertain(
    30e-6, 25e-6, 35e-6, "NCCL between GPUs without NVLink or P2P, by latency alone: a token's payload is about 10 KB"
)
ALL_REDUCES_PER_LAYER = 2
"""One after o_proj and one after down_proj, which are both row-parallel."""
FIXED_S = Uncertain(1e-3, 0.5e-3, 2e-3, "scheduling, sampling and launches of a dense model with CUDA graphs")
EAGER_S = Uncertain(4e-3, 3e-3, 6e-3, "launches without CUDA graphs on the dense 31B")
EAGER_EXPERTS_S = Uncertain(
    48e-3, 20e-3, 60e-3, "launches without CUDA graphs on a mixture of experts: 18 instead of 127 tok/s on an RTX 5090"
)


def estimate(model: Model, arguments: Arguments, ranks: Sequence[RankWeights], gpu: GpuModel) -> Decode:
    """Estimate tokens per second.

    The ceiling is bandwidth divided by bytes read. Low, mid and high add communication, fixed work and the launches of
    eager mode; the constants above give their sources.

    Args:
        ranks: the ranks of the pipeline, which work one after the other.
    """
    read = sum(rank.read_bytes_per_token for rank in ranks)
    reduces = ALL_REDUCES_PER_LAYER * len(model.layers) if arguments.tensor_parallel_size > 1 else 0
    eager = EAGER_EXPERTS_S if model.experts else EAGER_S

    def rate(bandwidth: float, reduce_s: float, fixed_s: float, eager_s: float) -> float:
        seconds = read / (gpu.bandwidth_bytes_per_s * bandwidth) + reduces * reduce_s + fixed_s
        return 1 / (seconds + (eager_s if arguments.enforce_eager else 0))

    return Decode(
        low=rate(REACHED_BANDWIDTH.low, ALL_REDUCE_S.high, FIXED_S.high, eager.high),
        mid=rate(REACHED_BANDWIDTH.value, ALL_REDUCE_S.value, FIXED_S.value, eager.value),
        high=rate(REACHED_BANDWIDTH.high, ALL_REDUCE_S.low, FIXED_S.low, eager.low),
        ceiling=gpu.bandwidth_bytes_per_s / read,
    )
