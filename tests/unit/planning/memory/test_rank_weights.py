# SPDX-License-Identifier: Apache-2.0
"""Bytes of the weights on each rank, against a model of vLLM 0.19's `Model loading took N GiB` that was made apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.planning.checkpoint import families
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Model, RankWeights, Sharding
from ansible.module_utils.vllm_edge.planning.memory import weights
from checkpoints import GIB, model, recorded

HEAD_GIB = 262_144 * 5_376 * 2 / GIB
"""Of the checkpoint whose head is not tied, in addition to what was modelled."""
LOAD_GIB = {
    "google/gemma-4-31B-it": (58.83, 30.14, 15.80),
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": (31.45, 16.45, 8.95),
    "nvidia/Gemma-4-31B-IT-NVFP4": (30.97, 16.21, 8.83),
    "google/gemma-4-31B-it-qat-w4a16-ct": (19.47 + HEAD_GIB, 10.46 + HEAD_GIB / 2, 5.96 + HEAD_GIB / 4),
    "google/gemma-4-26B-A4B-it": (48.47, 24.97, 13.23),
    "nvidia/Gemma-4-26B-A4B-NVFP4": (17.89, 9.68, 5.58),
    "google/gemma-4-E4B-it": (15.12, 8.17, 4.76),
    "google/gemma-4-E2B-it": (9.76, 5.49, 3.36),
}
"""GiB on one GPU with 1, 2 and 4 of them. Scales of channels are not in it."""

STREAM_GB = {
    "google/gemma-4-31B-it": (61.61, 30.81, 15.41),
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": (32.22, 16.11, 8.06),
    "nvidia/Gemma-4-31B-IT-NVFP4": (31.70, 15.85, 7.93),
    "google/gemma-4-31B-it-qat-w4a16-ct": (19.36, 9.68, 4.84),
    "google/gemma-4-26B-A4B-it": (7.67, 3.85, 1.95),
    "nvidia/Gemma-4-26B-A4B-NVFP4": (5.62, 2.82, 1.44),
    "google/gemma-4-E4B-it": (9.40, 4.75, 2.50),
    "google/gemma-4-E2B-it": (4.60, 2.36, 1.24),
}
"""Bytes that one GPU reads for one token, in 1e9."""


def ranks(found: Model, version: str = "0.19.0", **arguments: Any) -> tuple[RankWeights, ...]:
    return weights.per_rank(found, Arguments(**arguments), version)


def one(found: Model, version: str = "0.19.0", **arguments: Any) -> RankWeights:
    (rank,) = ranks(found, version, **arguments)
    return rank


# -- what is on a GPU


@pytest.mark.parametrize("repo", LOAD_GIB)
def test_load_and_what_a_token_reads_are_as_modelled(repo: str) -> None:
    for size, loaded, read in zip((1, 2, 4), LOAD_GIB[repo], STREAM_GB[repo], strict=True):
        found = one(model(repo), tensor_parallel_size=size)
        assert found.bytes / GIB == pytest.approx(loaded, abs=0.02), size
        # Scales of channels are read too.
        assert found.read_bytes_per_token / 1e9 == pytest.approx(read, abs=0.03 if "FP8" in repo else 0.011), size


def test_weights_are_kept_in_the_models_dtype_and_scales_in_theirs() -> None:
    facts = recorded("nvidia/Gemma-4-31B-IT-NVFP4")
    wide = tuple(replace(tensor, dtype="F32") if tensor.dtype == "BF16" else tensor for tensor in facts.tensors)
    assert one(families.interpret(replace(facts, tensors=wide))).bytes == one(families.interpret(facts)).bytes


def test_per_layer_embeddings_of_a_batch_have_a_buffer() -> None:
    found = model("google/gemma-4-E4B-it")
    assert one(found).by_kind["buffers"] == 2048 * 42 * 256 * 2
    assert one(found, max_num_batched_tokens=8192).by_kind["buffers"] == 8192 * 42 * 256 * 2
    assert "buffers" not in one(model("google/gemma-4-31B-it")).by_kind


# -- releases


def test_layers_that_share_a_cache_have_no_k_and_v_from_0_30_on() -> None:
    found = model("google/gemma-4-E4B-it")
    before, after = (one(found, version).by_kind["attention"] for version in ("0.28.0", "0.30.0"))
    assert before - after == (15 * 2 * 512 + 3 * 2 * 1024) * 2560 * 2
    assert one(model("google/gemma-4-31B-it"), "0.30.0") == one(model("google/gemma-4-31B-it"), "0.28.0")


# -- pipeline parallelism


def test_a_tied_table_is_on_both_ends_and_read_on_the_last() -> None:
    facts = recorded("Qwen/Qwen3-8B")
    tied = families.interpret(replace(facts, config={**facts.config, "tie_word_embeddings": True}))
    assert any(part.sharding is Sharding.NOT_LOADED for part in tied.components)
    first, middle, last = ranks(tied, pipeline_parallel_size=3)
    table = 2 * 151936 * 4096
    assert [rank.by_kind.get("embeddings", 0) for rank in (first, middle, last)] == [table, 0, table]
    norms = last.by_kind["norms"] - middle.by_kind["norms"]
    assert last.read_bytes_per_token - middle.read_bytes_per_token == table + norms
    assert first.read_bytes_per_token == middle.read_bytes_per_token


def test_the_reference_runs_that_ran_out_of_memory() -> None:
    """NVFP4 over two stages needs about 17.6 GiB."""
    first, _ = ranks(model("nvidia/Gemma-4-31B-IT-NVFP4"), pipeline_parallel_size=2)
    assert first.bytes / GIB == pytest.approx(17.55, abs=0.05)
    # Every layer is on one of three stages.
    stages, found = ranks(model("31b-bf16"), pipeline_parallel_size=3), one(model("31b-bf16")).by_kind
    for kind in ("attention", "mlp"):
        assert sum(stage.by_kind[kind] for stage in stages) == found[kind]


@pytest.mark.parametrize(
    ("settings", "release", "part"),
    [
        ({"tensor_parallel_size": 1}, "0.32.0", 704),
        ({"tensor_parallel_size": 2}, "0.32.0", 384),
        ({"tensor_parallel_size": 4}, "0.32.0", 192),
        ({"tensor_parallel_size": 2}, "0.19.0", 352),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "0.32.0", 352),
    ],
)
def test_four_bit_experts_are_padded_to_the_tile_of_marlin(settings: dict[str, Any], release: str, part: int) -> None:
    """0.32.0 model_executor/layers/quantization/utils/marlin_utils_fp4.py:358-381."""
    whole = 30 * 128 * 3 * 2816 * 704 * 9 / 16
    (rank,) = weights.per_rank(model("nvidia/Gemma-4-26B-A4B-NVFP4"), Arguments(**settings), release)
    assert rank.by_kind["experts"] == pytest.approx(whole * part / 704, rel=1e-4)
    assert rank.read_bytes_per_token > rank.by_kind["experts"] / 16
    (fp8,) = weights.per_rank(model("RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic"), Arguments(**settings), release)
    ranks_of_tp = settings["tensor_parallel_size"]
    # One float32 for each row: of gate and up a share, of down all; of whole experts on a rank, theirs.
    rows_of_down = 2816 / ranks_of_tp if "enable_expert_parallel" in settings else 2816
    scales = 30 * 128 * 4 * (2 * 704 / ranks_of_tp + rows_of_down)
    assert fp8.by_kind["experts"] == pytest.approx(whole * 16 / 9 / ranks_of_tp + scales, rel=1e-4)


def test_experts_without_a_gate_are_padded_by_flashinfer() -> None:
    """In FP4 it is counted where the GPU has units for it; otherwise the plan names what it does not know."""
    fp4, bf16 = (families.interpret(published.facts(name)) for name in ("Nemotron-3-Nano, NVFP4", published.NEMOTRON))
    for ranks, ada, blackwell in ((1, 1856, 1920), (2, 960, 1024)):
        marlin, flashinfer = (
            weights.per_rank(fp4, Arguments(tensor_parallel_size=ranks, fp4_units=units), "0.33.0")[0]
            for units in (False, True)
        )
        assert flashinfer.by_kind["experts"] / marlin.by_kind["experts"] == pytest.approx(blackwell / ada, abs=1e-6)
        given = fp4, Arguments(tensor_parallel_size=ranks, fp4_units=True), (0, 33), flashinfer
        assert weights.bound_expert_padding(*given, (12, 0)) == 0
        more = flashinfer.by_kind["experts"] * (2816 - 2688) / 2688
        assert weights.bound_expert_padding(*given, (10, 0)) == pytest.approx(more, rel=1e-6)
    held = weights.per_rank(bf16, Arguments(), "0.33.0")[0]
    found = [weights.bound_expert_padding(bf16, Arguments(), (0, 33), held, gpu) for gpu in ((8, 9), (9, 0), (10, 0))]
    assert found[:2] == [0, 0] and found[2] / held.by_kind["experts"] == pytest.approx(64 / 1856, rel=1e-6)
