# SPDX-License-Identifier: Apache-2.0
"""The KV cache as vLLM lays it out: what its own code answered for Gemma 4, and what holds for every model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import checkpoints
import published
import pytest
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Attention, DecoderLayer, Quantization
from ansible.module_utils.vllm_edge.planning.memory import kv_cache
from kv_models import ORACLE, full, model, needed, sliding

GIB = 2**30
MODELOPT_FP8 = Quantization("modelopt_fp4", 4, 16, "fp8")
COMPRESSED_FP8 = Quantization("compressed-tensors", 8, None, "fp8")
LLAMA = model([full(index, 8, 128) for index in range(32)])
HYBRID = model([full(index, 4, 64) if index % 6 == 5 else sliding(index, 4, 64, 512) for index in range(24)])
QWEN = published.families.interpret(published.facts("Qwen/Qwen3.5-4B"))
NEMOTRON = published.families.interpret(published.facts(published.NEMOTRON))
RELEASES = [f"0.{minor}.0" for minor in range(19, 34)]


# -- vLLM's own answers


@pytest.mark.parametrize("release", ["0.19.0", "0.33.0"])
@pytest.mark.parametrize("case", ORACLE["cases"], ids=lambda case: case["id"])
def test_gemma4_as_vllm_computed_it(case: Mapping[str, Any], release: str) -> None:
    expected = case["releases"][release]
    arguments = Arguments(**case["arguments"], max_num_batched_tokens=2048, block_size=16)
    found = kv_cache.capacity(checkpoints.model(case["model"]), arguments, case["available_bytes"], release)
    if "error" in expected:
        told = re.search(r"([\d.]+) GiB KV cache is needed.*maximum model length is (\d+)", expected["message"])
        assert told and found.needed_bytes > found.available_bytes
        # vLLM cuts its GiB off after two digits, the message gives one where the second is 0.
        assert f"{found.needed_bytes // (GIB / 100) / 100:g}" == f"{float(told[1]):g}"
        assert found.max_context_tokens == int(told[2])
        return
    assert (found.blocks, found.tokens) == (expected["num_blocks"], expected["tokens"])
    assert round(found.max_concurrency, 3) == expected["max_concurrency"]
    for kind, attention in (("sliding", Attention.SLIDING), ("full", Attention.FULL)):
        groups = [group for group in found.groups if group.attention is attention]
        assert len(groups) == case["groups"][kind]["groups"]
        each = {(group.layers, group.block_size_tokens, group.page_bytes) for group in groups}
        assert each == {tuple(case["groups"][kind][key] for key in ("layers_per_group", "block_size", "page_bytes"))}


# -- what the numbers mean


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(1000, 63), (8192 + 2048, 640), (100_000, 8192 // 16 + 2048 * 2 // 16), (17, 2)]
)
def test_a_request_holds_a_chunk_and_the_batches_in_flight(tokens: int, blocks: int) -> None:
    """Llama 4: no block more, because a chunk begins at the start of one; vLLM overlaps two batches."""
    kinds = [Attention.FULL if index % 4 == 3 else Attention.CHUNKED for index in range(48)]
    layers = [
        DecoderLayer(index, kind, 8, 128, 8192 if kind is Attention.CHUNKED else None)
        for index, kind in enumerate(kinds)
    ]
    asked = Arguments(max_model_len=tokens, max_num_batched_tokens=2048)
    groups = kv_cache.capacity(model(layers, maximum=1_048_576), asked, 8 * GIB, "0.32.0").groups
    assert [group.blocks_per_request for group in groups if group.attention is Attention.CHUNKED] == [blocks] * 3


@pytest.mark.parametrize(
    ("ranks", "dtype", "expected"),
    [(1, "auto", 65536), (2, "bfloat16", 32768), (8, "auto", 8192), (16, "auto", 8192), (1, "fp8_e5m2", 32768)],
)
def test_page_size_by_ranks_and_dtype(ranks: int, dtype: str, expected: int) -> None:
    """KV heads are replicated where there are fewer of them than ranks."""
    arguments = Arguments(tensor_parallel_size=ranks, kv_cache_dtype=dtype)
    assert kv_cache.capacity(LLAMA, arguments, GIB, "0.33.0").groups[0].page_bytes == expected


def test_groups_are_as_large_as_the_larger_kind_where_that_is_not_much_larger() -> None:
    def layers(sliding_layers: int) -> list[int]:
        built = [sliding(index, 2, 64, 128) for index in range(sliding_layers)]
        built += [full(index, 2, 64) for index in range(sliding_layers, sliding_layers + 10)]
        return [group.layers for group in kv_cache.capacity(model(built), Arguments(), GIB, "0.19.0").groups]

    assert layers(14) == [14, 10]
    # From half as many more on, the rarer kind decides, and layers are dealt in turn.
    assert layers(15) == [8, 7, 10]
    assert layers(20) == [10, 10, 10]


def test_a_pipeline_has_the_groups_of_the_whole_model_and_the_blocks_of_its_poorest_rank() -> None:
    arguments = Arguments(pipeline_parallel_size=2, max_model_len=4096)
    whole = kv_cache.groups(HYBRID, arguments, "0.33.0")
    assert [group.layers for group in whole][:2] == [(0, 6, 12, 18), (1, 7, 13, 19)]
    even = kv_cache.capacity(HYBRID, arguments, GIB, "0.33.0")
    assert [group.layers for group in even.groups] == [2] * 6
    poor = kv_cache.capacity(HYBRID, arguments, [GIB, GIB // 2], "0.33.0")
    assert poor.available_bytes == GIB // 2 and poor.blocks == even.blocks // 2
    assert poor == kv_cache.capacity(HYBRID, arguments, GIB // 2, "0.33.0")


def test_the_rank_with_the_fewest_blocks_decides_whether_a_request_fits() -> None:
    uneven = model([full(index, 8, 128) for index in range(3)])
    arguments = Arguments(pipeline_parallel_size=2, max_model_len=160)
    page = 2 * 16 * 8 * 128 * 2
    # Two layers on the first rank, one on the second; ten blocks for a request and the null block.
    assert needed(uneven, arguments, "0.33.0") == 11 * 2 * page
    fits = kv_cache.capacity(uneven, arguments, [20 * 2 * page, 11 * page], "0.33.0")
    assert fits.blocks == 11 and fits.needed_bytes == fits.available_bytes == 11 * page
    refused = kv_cache.capacity(uneven, arguments, [20 * 2 * page, 11 * page - 1], "0.33.0")
    assert refused.needed_bytes > refused.available_bytes and refused.max_context_tokens == 144


@pytest.mark.parametrize(
    "layers, ranks, expected",
    [(35, 2, [18, 17]), (26, 4, [6, 7, 7, 6]), (62, 4, [15, 16, 16, 15]), (7, 4, [2, 2, 2, 1]), (5, 1, [5])],
)
def test_layers_of_a_pipeline_rank(layers: int, ranks: int, expected: list[int]) -> None:
    made = model([full(index, 8, 128) for index in range(layers)])
    arguments = Arguments(pipeline_parallel_size=ranks)
    parts = [kv_cache.select_layers(made, arguments, rank) for rank in range(ranks)]
    assert [len(part) for part in parts] == expected
    assert [layer for part in parts for layer in part] == list(range(layers))


STATES = """\
0.19.0 64 bfloat16 - no 1 528
0.20.0 64 bfloat16 - no 1 576
0.27.0 - bfloat16 - no 1 528
0.28.0 - bfloat16 - no 2 528
0.33.0 - bfloat16 no no 1 528
0.26.0 - fp8 yes no 2 1056
0.32.0 - bfloat16 - yes 2 528
0.33.0 - bfloat16 - yes 3 576
0.33.0 - bfloat16 no yes 1 528
"""
"""Of Qwen3.5-4B, whose state has 2,146,304 bytes for each layer and a token 4,096 of KV cache: release, block_size,
dtype, enable_prefix_caching, FlashInfer's kernel, states of a request, tokens of a block."""


@pytest.mark.parametrize("case", STATES.splitlines())
def test_a_block_is_as_large_as_the_state_of_linear_attention(case: str) -> None:
    release, size, dtype, prefixes, flashinfer, states, block = case.split()
    arguments = Arguments(
        max_model_len=2000,
        kv_cache_dtype=dtype,
        block_size=None if size == "-" else int(size),
        enable_prefix_caching=None if prefixes == "-" else prefixes == "yes",
        flashinfer_states=flashinfer == "yes",
    )
    *linear, attention = kv_cache.capacity(QWEN, arguments, GIB, release).groups
    assert {group.attention for group in linear} == {Attention.LINEAR} and len(linear) == 3
    assert {group.blocks_per_request for group in linear} == {int(states)}
    assert attention.block_size_tokens == int(block)
    assert attention.blocks_per_request == -(-2000 // int(block))
    assert len({group.page_bytes for group in (*linear, attention)}) == 1


def test_ranks_and_options_divide_the_state() -> None:
    state = next(layer.state for layer in QWEN.layers if layer.state)
    for arguments, expected in (
        (Arguments(), 2_146_304),
        (Arguments(tensor_parallel_size=4), 2_146_304 // 4),
        (Arguments(mamba_ssm_cache_dtype="float16"), 32 * 128 * 128 * 2 + 3 * 8192 * 2),
        (Arguments(mamba_cache_dtype="float32"), 2_146_304 + 3 * 8192 * 2),
    ):
        assert kv_cache.compute_state_bytes(state, QWEN, arguments) == expected


@pytest.mark.parametrize(
    ("release", "prefixes", "states", "block"),
    [("0.19.0", None, 1, 2096), ("0.27.0", True, 121, 2176), ("0.28.0", None, 2, 2096), ("0.32.0", None, 3, 2096)],
)
def test_what_mamba2_keeps_of_a_long_request(release: str, prefixes: bool | None, states: int, block: int) -> None:
    """Up to 0.27 the states of all blocks, which are multiples of its chunk of 128 tokens; as vLLM's own code says."""
    arguments = Arguments(max_model_len=262144, enable_prefix_caching=prefixes, max_num_batched_tokens=512)
    attention, *mamba = sorted(
        kv_cache.capacity(NEMOTRON, arguments, 8 * GIB, release).groups, key=lambda group: group.attention
    )
    assert (attention.layers, [group.layers for group in mamba]) == (6, [6, 6, 6, 5])
    assert {group.blocks_per_request for group in mamba} == {states}
    assert (attention.block_size_tokens, attention.page_bytes) == (block, block * 1024)


def test_each_rank_has_the_only_group_of_mamba2() -> None:
    one = published.families.interpret(published.facts("Nemotron-3-Nano, one group", 8))
    state = next(layer.state for layer in one.layers if layer.state)
    for ranks in (1, 4):
        row, recurrent = 4096 // ranks + 2 * 128, 64 * 64 * 128 // ranks
        found = kv_cache.compute_state_bytes(state, one, Arguments(tensor_parallel_size=ranks))
        assert found == 3 * row * 2 + recurrent * 4


def test_a_batch_has_to_hold_a_block_of_cached_prefixes_up_to_0_26() -> None:
    arguments = Arguments(max_model_len=4096, enable_prefix_caching=True, max_num_batched_tokens=256)
    with pytest.raises(kv_cache.UnsupportedKvCache, match=r"block of 528 tokens.*'max_num_batched_tokens: 528'"):
        kv_cache.capacity(QWEN, arguments, GIB, "0.26.0")
    assert kv_cache.capacity(QWEN, arguments, GIB, "0.27.0").blocks
    assert kv_cache.capacity(QWEN, replace(arguments, enable_prefix_caching=False), GIB, "0.26.0").blocks


def test_a_larger_block_size() -> None:
    arguments = Arguments(block_size=32, max_model_len=4096)
    sizes = {
        release: sorted({group.block_size_tokens for group in found.groups})
        for release in RELEASES
        for found in [kv_cache.capacity(checkpoints.model("31b-bf16"), arguments, 4 * GIB, release)]
    }
    # The block of sliding layers began at 16 in some releases, whatever was asked for.
    assert {release for release, found in sizes.items() if found == [16, 32]} == {f"0.{x}.0" for x in range(25, 30)}
    assert {tuple(found) for found in sizes.values()} == {(16, 32), (32, 64)}


def test_an_odd_page_is_padded_or_refused() -> None:
    odd = model([full(0, 2, 192), sliding(1, 2, 128, 512)])
    with pytest.raises(kv_cache.UnsupportedKvCache, match="pages of 16384 and 24576 bytes"):
        kv_cache.capacity(odd, Arguments(), GIB, "0.23.0")
    found = kv_cache.capacity(odd, Arguments(), GIB, "0.24.0")
    assert [(group.page_bytes, group.block_size_tokens) for group in found.groups] == [(24576, 16), (24576, 16)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (Arguments(block_size=24), "block_size 24 is not a multiple of 16"),
        (Arguments(kv_cache_dtype="nvfp4"), "dtype nvfp4"),
        (Arguments(pipeline_parallel_size=36), "pipeline_parallel_size 36"),
        (Arguments(pipeline_parallel_size=2), "no layer of pipeline rank 1 has a KV cache of its own"),
    ],
)
def test_what_vllm_makes_no_cache_for(arguments: Arguments, message: str) -> None:
    with pytest.raises(kv_cache.UnsupportedKvCache, match=message):
        kv_cache.capacity(checkpoints.model("e2b"), arguments, GIB, "0.33.0")


# -- the check for one request


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("length", [1, 100, 4096, 32768])
def test_exactly_the_needed_bytes_are_enough(release: str, length: int) -> None:
    for made in (LLAMA, HYBRID, checkpoints.model("e4b")):
        arguments = Arguments(max_model_len=length)
        least = needed(made, arguments, release)
        enough = kv_cache.capacity(made, arguments, least, release)
        assert enough.needed_bytes == least
        assert enough.max_context_tokens >= length and enough.max_concurrency >= 1
        less = kv_cache.capacity(made, arguments, least - 1, release)
        assert less.max_context_tokens < length


def test_the_longest_request_is_at_most_the_models_own() -> None:
    assert kv_cache.capacity(LLAMA, Arguments(), 100 * GIB, "0.33.0").max_context_tokens == 131072
    assert kv_cache.capacity(LLAMA, Arguments(max_model_len=64), GIB, "0.19.0").max_context_tokens == 8192


@pytest.mark.parametrize("available", [-5 * GIB, -1, 0, 1])
def test_no_memory_is_an_answer(available: int) -> None:
    found = kv_cache.capacity(HYBRID, Arguments(), available, "0.33.0")
    assert (found.blocks, found.tokens, found.max_concurrency, found.max_context_tokens) == (0, 0, 0, 0)
    assert found.available_bytes == available < found.needed_bytes


# -- dtype


@pytest.mark.parametrize(
    "quantization, given, release, expected",
    [
        (None, "auto", "0.19.0", "bfloat16"),
        (None, "fp8", "0.19.0", "fp8"),
        (MODELOPT_FP8, "auto", "0.19.0", "fp8"),
        (MODELOPT_FP8, "auto", "0.33.0", "fp8"),
        (MODELOPT_FP8, "bfloat16", "0.19.0", "bfloat16"),
        (COMPRESSED_FP8, "auto", "0.33.0", "fp8"),
        (COMPRESSED_FP8, "bfloat16", "0.21.0", "fp8"),
        (COMPRESSED_FP8, "bfloat16", "0.22.0", "bfloat16"),
        (replace(MODELOPT_FP8, kv_cache_dtype="nvfp4"), "auto", "0.19.0", "bfloat16"),
        (replace(MODELOPT_FP8, kv_cache_dtype="nvfp4"), "auto", "0.20.0", "nvfp4"),
    ],
)
def test_resolved_dtype(quantization: Quantization | None, given: str, release: str, expected: str) -> None:
    made = LLAMA if quantization is None else replace(LLAMA, quantization=quantization)
    assert kv_cache.resolve_dtype(made, Arguments(kv_cache_dtype=given), release) == expected
