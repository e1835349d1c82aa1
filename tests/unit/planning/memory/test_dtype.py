# SPDX-License-Identifier: Apache-2.0
"""The dtype of an engine: what it does to weights, KV cache and activations, and what vLLM refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning import planner
from ansible.module_utils.vllm_edge.planning.contract import EnginePlan, Gpu, Verdict
from checkpoints import DEFAULT, L4, MIB, engine, model, plan_of

LARGE = Gpu("NVIDIA L40S", 47_000 * MIB)
T4 = Gpu("Tesla T4", 14_900 * MIB)


def planned(gpu: Gpu, name: str, **more: Any) -> EnginePlan:
    wanted = engine(name, **more)
    return planner.plan("profile", [wanted], {name: model(name)}, [gpu], DEFAULT).engines[0]


@pytest.mark.parametrize("more", [{"dtype": "float32"}, {"dtype": "float"}, {"extra_args": ["--dtype", "float32"]}])
def test_float32_has_twice_the_bytes(more: dict[str, Any]) -> None:
    usual, wide = planned(LARGE, "e2b"), planned(LARGE, "e2b", **more)
    # The allocator's 0.06 GiB stay.
    rounding = round(0.06 * 1024) * MIB
    ratio = (wide.gpus[0].weights_bytes - rounding) / (usual.gpus[0].weights_bytes - rounding)
    assert ratio == pytest.approx(2, abs=0.01)
    assert wide.kv_cache_dtype == "float32"
    assert [group.page_bytes for group in wide.kv_groups] == [2 * group.page_bytes for group in usual.kv_groups]
    assert wide.gpus[0].overhead_bytes > usual.gpus[0].overhead_bytes
    assert wide.gpus[0].graphs_bytes > usual.gpus[0].graphs_bytes


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "half"])
def test_two_bytes_are_two_bytes(dtype: str) -> None:
    plain = plan_of(engine("e2b"), DEFAULT)
    found = plan_of(engine("e2b", dtype=dtype), DEFAULT)
    assert (found.verdict, found.gpus) == (Verdict.FITS, plain.gpus)
    assert found.kv_cache_dtype == {"half": "float16", "float16": "float16"}.get(dtype, "bfloat16")


def test_auto_takes_what_the_gpu_can() -> None:
    """vLLM falls back with a warning, so nothing is refused."""
    assert planned(T4, "e2b").verdict is Verdict.FITS
    assert planned(T4, "e2b").kv_cache_dtype == "float16"
    assert planned(T4, "google/gemma-3-27b-it").kv_cache_dtype == "float32"


@pytest.mark.parametrize(
    ("gpu", "name", "dtype", "said", "fix"),
    [
        (T4, "e2b", "bfloat16", "needs compute capability 8.0", "dtype: float16"),
        (T4, "google/gemma-3-27b-it", "bfloat16", "needs compute capability 8.0", "dtype: float32"),
        (L4, "google/gemma-3-27b-it", "float16", "refuses dtype float16 for gemma3", "dtype: bfloat16"),
        (L4, "31b-nvfp4", "float32", "modelopt_fp4 does not compute in dtype float32", "dtype: bfloat16"),
    ],
)
def test_what_vllm_refuses_is_refused_with_a_dtype_that_works(
    gpu: Gpu, name: str, dtype: str, said: str, fix: str
) -> None:
    found = planned(gpu, name, dtype=dtype)
    assert found.verdict is Verdict.UNSUPPORTED_ENGINE
    assert said in found.reason and found.fix.startswith(fix)
    followed = planned(dataclasses.replace(gpu, cuda_total_bytes=200_000 * MIB), name, dtype=fix.split(": ")[1])
    assert followed.verdict is Verdict.FITS, followed.reason


def test_a_value_that_the_plan_cannot_read_is_refused() -> None:
    for given, said in {
        "--block-size=16k": "is not a whole number above 0; write one, such as 16",
        "--max-model-len=auto": "is for vLLM to resolve when it starts; write the tokens, or leave it out",
        "--max-num-batched-tokens=25.6K": "is not a whole number above 0; write one, such as 32768, 32k",
        "--gpu-memory-utilization=95": "is no share of the GPU's memory, which is above 0 and at most 1; write 0.95",
        "--limit-mm-per-prompt=0": "is no JSON object of numbers",
    }.items():
        with pytest.raises(planner.PlanError) as refused:
            plan_of(engine("e2b", extra_args=[given]))
        assert str(refused.value).startswith(f"serving_engines.engine.extra_args: '{given}' {said}")
    with pytest.raises(planner.PlanError, match=r"serving_engines\.engine\.max_num_seqs: 0 is not a whole number"):
        plan_of(engine("e2b", max_num_seqs=0))


def test_numbers_are_read_with_the_units_of_vllm() -> None:
    """0.32.0 utils/argparse_utils.py, human_readable_int: its own examples and the other units."""
    for text, tokens in {"1k": 1000, "1K": 1024, "25.6k": 25600, "4096": 4096, "2M": 2 * 2**20, "1g": 10**9}.items():
        assert planner.arguments_of({"extra_args": ["--max-model-len", text]}).max_model_len == tokens
        assert planner.arguments_of({"max_model_len": text}).max_model_len == tokens
    text_only = ["--limit-mm-per-prompt.image", "0", "--limit-mm-per-prompt.video=0"]
    limits = {"limit_mm_per_prompt": {"audio": 0}}
    assert planner.arguments_of({"extra_args": text_only, **limits}).language_model_only
    assert not planner.arguments_of({"extra_args": text_only[:2], **limits}).language_model_only
