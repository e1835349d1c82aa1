# SPDX-License-Identifier: Apache-2.0
"""Latent attention (MLA): DeepSeek V2, V3, R1 and Kimi K2. test_published.py compares their weights with vLLM's."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import checkpoints
import kv_models
import published
import pytest
from ansible.module_utils.vllm_edge.planning import planner
from ansible.module_utils.vllm_edge.planning.checkpoint import families
from ansible.module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ansible.module_utils.vllm_edge.planning.contract import Arguments, EnginePlan, Gpu, Verdict
from ansible.module_utils.vllm_edge.planning.memory import kv_cache, overhead, weights

LITE, V3 = "deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-ai/DeepSeek-V3"
V32 = "deepseek-ai/DeepSeek-V3.2"
GIB = 2**30
H100 = Gpu("NVIDIA H100 80GB HBM3", 79 * GIB)
H200 = Gpu("NVIDIA H200", 139 * GIB)


def plan(repo: str, gpus: list[Gpu], release: str = "0.32.0", **engine: Any) -> EnginePlan:
    given = {"name": "e", "model": "m", "gpus": list(range(len(gpus))), "tensor_parallel_size": len(gpus), **engine}
    model = families.interpret(published.facts(repo, 0 if repo == LITE else 5))
    return planner.plan("p", [given], {"m": model}, gpus, release).engines[0]


def test_the_cache_is_what_public_logs_say() -> None:
    """vllm-project/vllm pull request 20665: V2-Lite on four L4, two stages of two, 12.13 GiB on the first and 11.33 GiB
    on the second. Issue 15871: 0.95 GiB for 32,768 tokens."""
    lite = families.interpret(published.facts(LITE))
    arguments = Arguments(tensor_parallel_size=2, pipeline_parallel_size=2, max_model_len=1024)
    printed = (12.13, 11.33)
    most, least = (
        kv_cache.capacity(lite, arguments, [round((gib + off) * GIB) for gib in printed], "0.19.0")
        for off in (0.005, -0.005)
    )
    assert least.tokens <= 807_792 <= most.tokens and most.tokens - least.tokens < 700
    assert 807_792 % 16 == 0 and most.groups[0].layers == 14
    alone = Arguments(max_model_len=32768)
    assert f"{kv_models.needed(lite, alone, '0.19.0') / GIB:.2f}" == "0.95"


B200 = Gpu("NVIDIA B200", 178 * GIB, stated_capability=(10, 0))
RTX = Gpu("NVIDIA RTX PRO 6000", 95 * GIB, stated_capability=(12, 0))


@pytest.mark.parametrize(
    ("repo", "gpu", "dtype", "block", "token"),
    [
        *((LITE, gpu, "fp8", block, 576) for gpu, block in ((checkpoints.L4, 16), (H100, 64), (H200, 64))),
        (LITE, H100, "auto", 16, 1152),
        *((V32, gpu, "auto", 64, 132 + token) for gpu, token in ((H200, 1152), (B200, 1152), (RTX, 656))),
        *((V32, gpu, "fp8", 64, 132 + token) for gpu, token in ((H200, 656), (B200, 576))),
    ],
)
def test_the_gpu_decides_on_block_and_layout(repo: str, gpu: Gpu, dtype: str, block: int, token: int) -> None:
    """Bytes of a token: vLLM's layouts by GPU, and for an indexer 128 elements in FP8 with a scale."""
    found = plan(repo, [gpu] * 2, max_model_len=4096, kv_cache_dtype=dtype)
    assert found.verdict is Verdict.FITS, found.reason
    assert [(group.block_size_tokens, group.page_bytes) for group in found.kv_groups] == [(block, block * token)]
    none = plan(LITE, [gpu, gpu], max_model_len=4096, kv_cache_dtype="fp8_e5m2")
    assert none.verdict is Verdict.UNSUPPORTED_ENGINE and "latent attention (MLA)" in none.reason


def test_an_indexer_needs_hopper_or_newer_and_workspace() -> None:
    refused = plan(V32, [Gpu("NVIDIA A100-SXM4-80GB", 79 * GIB)] * 2, max_model_len=4096)
    assert refused.verdict is Verdict.UNSUPPORTED_ENGINE and "indexer needs compute capability 9.0" in refused.reason
    assert plan(V32, [H200] * 2, max_model_len=4096, kv_cache_dtype="fp8_e4m3").fix == "kv_cache_dtype: fp8"
    old = plan(V32, [RTX] * 2, max_model_len=4096, release="0.23.0")
    assert "0.24.0 or newer" in old.fix
    long, short = (plan(V32, [H200] * 2, max_model_len=length).gpus[0] for length in (160 * 1024, 120 * 1024))
    assert long.overhead_bytes - short.overhead_bytes == 40 * 40 * 1024 * 132


def test_context_that_is_expanded_counts_as_activation_and_its_buffer_beside_the_share() -> None:
    """V2-Lite has 16 heads of 128 + 128 elements; the buffer has 576 for each of 64 Ki tokens."""
    short, long = (plan(LITE, [checkpoints.L4] * 2, max_model_len=length).gpus[0] for length in (2048, 8192))
    assert overhead.count_latent_workspace_tokens(2048, 256, 16) == 16384
    assert overhead.count_latent_workspace_tokens(8192, 256, 16) == 65536
    assert overhead.count_latent_workspace_tokens(163840, 256, 16) == 65536
    more = 65536 - 16384
    assert long.overhead_bytes - short.overhead_bytes == more * 8 * 256 * 2
    assert long.context_bytes - short.context_bytes == more * 576 * 2


def test_quantized_keys_and_values_are_kept_twice() -> None:
    """V3 in FP8: vLLM decodes with kv_b_proj in bfloat16, 128 heads of 256 by 512 in each layer."""
    first = families.interpret(published.facts(V3, 5))
    for ranks in (1, 8):
        found = weights.per_rank(first, Arguments(tensor_parallel_size=ranks), "0.32.0")[0].by_kind["buffers"]
        assert found == 5 * 128 * 256 * 512 * 2 // ranks
    lite = families.interpret(published.facts(LITE, 5))
    assert "buffers" not in weights.per_rank(lite, Arguments(), "0.32.0")[0].by_kind


def test_rope_is_wider_in_eager_mode() -> None:
    lite = families.interpret(published.facts(LITE, 2))
    plain, eager = (
        weights.per_rank(lite, Arguments(enforce_eager=on), "0.32.0")[0].by_kind["rope_caches"] for on in (False, True)
    )
    assert (plain, eager) == (163840 * 64 * 2, 163840 * 64 * 4)


@pytest.mark.parametrize(("key", "value"), [("index_topk", 2048), ("moe_layer_freq", 2)])
def test_another_kind_of_deepseek_is_refused(key: str, value: int) -> None:
    facts = published.facts(V3, 4)
    with pytest.raises(
        FactsError, match=rf"{key} in config\.json is {value}, .*Take DeepSeek V2, V3, V3\.2, R1 or Kimi K2"
    ):
        families.interpret(replace(facts, config={**facts.config, key: value}))
    short = {name: given for name, given in facts.config.items() if name != "kv_lora_rank"}
    with pytest.raises(FactsError, match=re.escape("config.json lacks kv_lora_rank")):
        families.interpret(replace(facts, config=short))
