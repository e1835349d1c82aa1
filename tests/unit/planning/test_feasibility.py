# SPDX-License-Identifier: Apache-2.0
"""What decides apart from memory whether an engine runs, and advice."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gpu.models import GPU_MODELS
from ansible.module_utils.vllm_edge.planning import feasibility
from ansible.module_utils.vllm_edge.planning.contract import Arguments
from checkpoints import DEFAULT, L4, model


def case(name: str, version: str = DEFAULT, gpu: str = "NVIDIA L4", **more: Any) -> feasibility.Case:
    arguments = {key: more.pop(key) for key in list(more) if key in {f.name for f in dataclasses.fields(Arguments)}}
    return feasibility.Case(
        model(name),
        Arguments(**arguments),
        feasibility.parse_release(version),
        dataclasses.replace(L4, name=gpu),
        GPU_MODELS.get(gpu),
        more.pop("kv_cache", "bfloat16"),
        **more,
    )


@pytest.mark.parametrize(
    ("looked_at", "said"),
    [
        (("31b-bf16", {"version": "0.20.2", "pipeline_parallel_size": 2}), "#40786"),
        (("31b-bf16", {"version": "0.20.2", "extra_args": ("--speculative-config={}",)}), "#41745"),
        (("31b-fp8", {"gpu": "NVIDIA A10", "kv_cache": "fp8"}), "FP8 KV cache needs compute capability 8.9"),
        (("31b-bf16", {"gpu": "Tesla T4"}), "bfloat16 needs compute capability 8.0"),
        (("26b-bf16", {"tensor_parallel_size": 3}), "neither divides the other"),
    ],
)
def test_what_memory_does_not_decide(looked_at: tuple[str, dict[str, Any]], said: str) -> None:
    name, more = looked_at
    assert any(said in finding.reason for finding in feasibility.findings(case(name, **more)))


@pytest.mark.parametrize(
    "looked_at",
    [
        ("31b-bf16", {"version": "0.21.0", "pipeline_parallel_size": 2}),
        ("31b-bf16", {"version": "0.21.0", "extra_args": ("--speculative-config={}",)}),
        ("31b-nvfp4", {"version": "0.19.0", "tensor_parallel_size": 4, "kv_cache": "fp8"}),
        ("31b-w4a16", {"version": "0.19.0", "tensor_parallel_size": 4}),
        # 2112 is 33 x 64: what Marlin takes in FP4, and would not in integers.
        ("26b-nvfp4", {"version": "0.19.0"}),
        ("31b-bf16", {"gpu": "GPU nobody has written down", "kv_cache": "fp8"}),
    ],
)
def test_what_runs_is_not_refused(looked_at: tuple[str, dict[str, Any]]) -> None:
    name, more = looked_at
    assert feasibility.findings(case(name, **more)) == []


@pytest.mark.parametrize(
    ("looked_at", "said"),
    [
        (("31b-nvfp4", {}), "has no FP4 units"),
        (("31b-bf16", {"tensor_parallel_size": 4}), "custom all-reduce is off for 4 GPUs"),
        (("26b-bf16", {}), "all 128 experts are in memory, of which a token reads 8"),
        (("31b-bf16", {"enforce_eager": True}), "warm-up was seen to fail"),
        (("31b-bf16", {"extra_args": ("--speculative-config", "{}"), "tool_call_parser": "gemma4"}), "tool calls"),
        (("e4b", {"pipeline_parallel_size": 2}), "per-layer embeddings"),
    ],
)
def test_advice(looked_at: tuple[str, dict[str, Any]], said: str) -> None:
    name, more = looked_at
    assert any(said in sentence for sentence in feasibility.advice(case(name, **more)))


def test_advice_is_for_those_whom_it_concerns() -> None:
    assert feasibility.advice(case("e2b")) == []
    assert feasibility.advice(case("31b-bf16", tensor_parallel_size=2)) == []
    assert feasibility.advice(case("31b-bf16", enforce_eager=True, max_num_seqs=8)) == []
