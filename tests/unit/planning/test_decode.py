# SPDX-License-Identifier: Apache-2.0
"""Estimates of the decoding speed, compared with public measurements of a mixture of experts."""

from __future__ import annotations

import pytest
from ansible.module_utils.vllm_edge.gpu.models import GPU_MODELS
from ansible.module_utils.vllm_edge.planning import decode, planner
from ansible.module_utils.vllm_edge.planning.contract import DecodeTogether
from ansible.module_utils.vllm_edge.planning.memory import weights
from checkpoints import DEFAULT, FUSENAI, REFERENCE, engine, model, plan_of

RTX_5090, GB10, L4 = (GPU_MODELS[f"NVIDIA {name}"].bandwidth_bytes_per_s for name in ("GeForce RTX 5090", "GB10", "L4"))


def together(name: str, gpu: float, requests: int, context: int = 256, size: int = 1) -> DecodeTogether:
    chosen, arguments = model(name), planner.arguments_of(engine(name, size))
    ranks = weights.per_rank(chosen, arguments, REFERENCE)
    found = decode.estimate_together(chosen, arguments, ranks, gpu, "bfloat16", requests, context, requests)
    assert found is not None
    return found


def alone(name: str, gpu: float) -> float:
    chosen, arguments = model(name), planner.arguments_of(engine(name))
    found = decode.estimate(chosen, arguments, weights.per_rank(chosen, arguments, REFERENCE), gpu)
    return found.mid if found else 0.0


@pytest.mark.parametrize(("requests", "measured"), [(4, 383), (16, 1221), (32, 2071)])
def test_several_requests_to_experts(requests: int, measured: float) -> None:
    """The card's other batch sizes, to which nothing was fitted. Its 2,059 tok/s at 128 are not bound by reading."""
    assert together(FUSENAI, RTX_5090, requests).mid == pytest.approx(measured, rel=0.15)


def test_one_request_to_experts() -> None:
    # Its card says 127 tok/s at batch 1, to which a constant was fitted.
    assert alone(FUSENAI, RTX_5090) == pytest.approx(127, rel=0.02)
    # 16 requests on a GB10 with nvidia/Gemma-4-26B-A4B-NVFP4 make about 300 tok/s together; its own test says 52 for
    # one request to a checkpoint whose attention has 4 bits too, which reads a third less.
    assert 29.8 < alone("26b-nvfp4", GB10) < 52


def test_dense_weights_are_read_once_for_all_requests_and_experts_as_often_as_they_are_hit() -> None:
    gpu = L4
    one, eight = alone("e4b", gpu), together("e4b", gpu, 8)
    assert eight.requests == 8
    assert 7 * one < eight.mid < 8 * one
    assert eight.low < eight.mid < eight.high
    assert together("26b-nvfp4", gpu, 8).mid < 0.7 * 8 * alone("26b-nvfp4", gpu)


def test_the_kv_cache_of_each_request_is_read() -> None:
    gpu = L4
    short, long, longer = (together("31b-w4a16", gpu, 8, tokens, size=4).mid for tokens in (16, 1024, 16384))
    assert short > 1.05 * long > 1.1 * longer
    # Only full attention reads more than its window: 10 of 60 layers with 4 KV heads of 512, one of them on each rank.
    read = 8 * 10 * 2 * 512 * 2 * (16384 - 1024)
    assert 8 / longer - 8 / long == pytest.approx(read / (300e9 * decode.REACHED_BANDWIDTH.value), rel=0.01)


@pytest.mark.parametrize(
    ("settings", "requests"),
    [({}, 8), ({"max_num_seqs": 3}, 3), ({"max_num_seqs": 1}, None), ({"kv_cache_memory_bytes": 2**28}, 4)],
)
def test_no_more_requests_than_the_engine_takes(settings: dict[str, int], requests: int | None) -> None:
    found = plan_of(engine("e4b", **settings), DEFAULT)
    assert found.decode_tok_s is not None
    assert (found.decode_together_tok_s.requests if found.decode_together_tok_s else None) == requests
