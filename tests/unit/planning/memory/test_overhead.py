# SPDX-License-Identifier: Apache-2.0
"""Estimates of activations, CUDA context and CUDA graphs, against what logs say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.planning import decode, planner
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Gpu
from ansible.module_utils.vllm_edge.planning.memory import overhead, weights
from ansible.module_utils.vllm_edge.planning.memory import vllm_versions as versions
from checkpoints import DEFAULT, GIB, MIB, NVFP4_TP2, engine, model

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("sequences", "piecewise", "full", "largest"),
    [(256, 51, 35, 512), (128, 35, 19, 256), (32, 11, 7, 64), (8, 5, 4, 16)],
)
def test_captured_sizes_are_as_logs_say(sequences: int, piecewise: int, full: int, largest: int) -> None:
    sizes = overhead.list_captured_sizes(sequences, 2048)
    assert (len(sizes), sum(size <= sequences for size in sizes), max(sizes)) == (piecewise, full, largest)


@pytest.mark.parametrize(
    ("wanted", "gib", "allowed"),
    [
        pytest.param(NVFP4_TP2, 1.47, 0.01, id="31B over two GPUs, the reference's log, fitted"),
        pytest.param(engine("e4b"), 0.71, 0.05, id="E4B, vLLM 0.22.1, a log that nothing was fitted to"),
    ],
)
def test_graphs(wanted: Mapping[str, Any], gib: float, allowed: float) -> None:
    arguments = planner.arguments_of(wanted)
    found = overhead.graphs(model(wanted["model"]), arguments, 256, 2048, all_seen=True)
    assert found.value / GIB == pytest.approx(gib, rel=allowed)
    assert found.low <= found.value <= found.high
    eager = dataclasses.replace(arguments, enforce_eager=True)
    assert overhead.graphs(model(wanted["model"]), eager, 256, 2048, all_seen=True).value == 0


def test_graphs_of_batches_with_adapters_come_on_top() -> None:
    """Of one number of adapters; with specialize_active_lora of 1, 2, 4, 5 of them."""
    found = [
        overhead.graphs(model("e2b"), Arguments(**given), 256, 2048, all_seen=True).value / MIB
        for given in ({}, {"enable_lora": True}, {"enable_lora": True, "specialize_active_lora": True, "max_loras": 4})
    ]
    once = (found[1] - found[0]) / overhead.GRAPH_BYTES_WITH_LORA.value
    assert 0.5 * found[0] < once < found[0] and found[2] - found[0] == pytest.approx(4 * (found[1] - found[0]))


def test_the_sampler_grows_with_rows_and_vocabulary() -> None:
    chosen = model("31b-bf16")
    assert overhead.activations(chosen, Arguments(), 0).value / GIB == pytest.approx(0.27)
    assert overhead.sampler(chosen, 256).value / GIB == pytest.approx(0.875)
    half = dataclasses.replace(chosen, vocabulary=chosen.vocabulary // 2)
    assert overhead.sampler(half, 256).value / GIB == pytest.approx(0.4375)


@pytest.mark.parametrize(
    ("name", "ranks", "copies", "per_logit"),
    [
        pytest.param("Qwen/Qwen3-8B", 1, False, 2, id="only the logits"),
        pytest.param("Qwen/Qwen3-8B", 2, False, 5, id="gathered, and in order"),
        pytest.param("Qwen/Qwen3-8B", 4, True, 6, id="and a copy in fp32"),
        pytest.param("31b-bf16", 1, False, 4, id="capped"),
    ],
)
def test_the_second_runner_profiles_fewer_bytes_per_logit(name: str, ranks: int, copies: bool, per_logit: int) -> None:
    chosen = model(name)
    found = overhead.profile_logits(chosen, 1024, ranks, copies=copies)
    assert found.value == found.high == per_logit * 1024 * chosen.vocabulary < overhead.sampler(chosen, 1024).low


def test_more_ranks_nvlink_and_other_gpus_widen_the_context() -> None:
    for ranks, mib in ((1, 200), (2, 263.7), (4, 391)):
        assert overhead.context(ranks).value / MIB == pytest.approx(mib, abs=0.1)
    fitted, other = overhead.context(2), overhead.context(2, "NVIDIA L40S")
    linked = overhead.context(2, "NVIDIA H100", True)
    assert fitted.value == other.value and fitted.high < other.high < linked.high
    assert (linked.value - fitted.value) / MIB == 64
    assert overhead.context(1, "NVIDIA H100", True) == overhead.context(1, "NVIDIA H100")
    assert {round(overhead.context(1, name).value / MIB) for name in overhead.HOPPER} == {527}


def test_the_allocators_constant_is_for_models_that_have_it() -> None:
    for name, text_only, mib in (("e4b", False, 61.4), ("e4b", True, 61.4), ("Qwen/Qwen3-8B", False, 0)):
        found = overhead.allocator(model(name), text_only=text_only)
        assert found.value / MIB == pytest.approx(mib, abs=0.1)
        assert found.low <= found.value <= found.high


@pytest.mark.parametrize(
    ("release", "gpu", "gib", "sequences", "tokens"),
    [
        (DEFAULT, "NVIDIA L4", 22, None, None),
        (DEFAULT, H100, 79, 1024, 8192),
        (DEFAULT, "", 79, 1024, 8192),
        (DEFAULT, "NVIDIA A100-SXM4-80GB", 79, None, None),
        (DEFAULT, "NVIDIA GB10", 121, None, None),
        ("0.32.0", "NVIDIA Thor", 122, None, None),  # log 53530895476 of 0.19: 33.42 requests at a batch of 2,048
        ("0.33.0", "NVIDIA Thor", 122, 1024, 8192),
        (DEFAULT, "NVIDIA B200", 178, 1024, 16384),
        ("0.28.0", "NVIDIA B200", 178, 1024, 16384),
        ("0.27.1", "NVIDIA B200", 178, 1024, 8192),
    ],
)
def test_defaults_of_vllm_by_gpu(release: str, gpu: str, gib: int, sequences: int | None, tokens: int | None) -> None:
    stated = (11, 0) if "Thor" in gpu else None
    found = versions.set_gpu_defaults(Arguments(), Gpu(gpu, gib * GIB, stated_capability=stated), release)
    assert (found.default_max_num_seqs, found.default_max_num_batched_tokens) == (sequences, tokens)
    llama = model("meta-llama/Llama-3.1-8B-Instruct")
    assert versions.max_num_seqs(llama, found, DEFAULT) == (sequences or 256)
    assert versions.max_num_batched_tokens(llama, found, DEFAULT) == (tokens or 2048)
    asked = dataclasses.replace(found, max_num_seqs=4, max_num_batched_tokens=512)
    assert versions.max_num_seqs(llama, asked, DEFAULT) == 4
    assert versions.max_num_batched_tokens(llama, asked, DEFAULT) == 512


@pytest.mark.parametrize(
    ("gpu", "count", "more", "said"),
    [
        ("NVIDIA L4", 1, {}, ""),
        ("NVIDIA L4", 1, {"max_num_batched_tokens": 8192}, "has max_num_batched_tokens 8,192;"),
        (H100, 2, {}, f"has {H100}, NVLink, max_num_seqs 1,024, max_num_batched_tokens 8,192;"),
        ("", 1, {"max_num_seqs": 8, "max_num_batched_tokens": 2496}, "has a GPU whose name is not known;"),
    ],
)
def test_what_lies_outside_of_the_fitted_runs_is_said_in_mib(
    gpu: str, count: int, more: dict[str, Any], said: str
) -> None:
    host = [Gpu(gpu, (44 if "L4" in gpu else 79) * GIB)] * count
    wanted = engine("31b-nvfp4", count, **more)
    found = planner.plan("profile", [wanted], {"31b-nvfp4": model("31b-nvfp4")}, host, DEFAULT).engines[0]
    sentences = [sentence for sentence in found.advice if "what is beside the KV cache is uncertain" in sentence]
    assert len(sentences) == bool(said)
    less, most = found.uncertainty_mib
    assert 0 < less < most
    if said:
        assert said in sentences[0] and f"by {less:,} MiB less to {most:,} MiB more per GPU" in sentences[0]


def test_larger_batches_need_larger_activations() -> None:
    chosen = model("31b-bf16")
    small, large = (overhead.activations(chosen, Arguments(tensor_parallel_size=2), tokens) for tokens in (2048, 8192))
    # 8,192 tokens x 2 bytes x (hidden states, residual, output of the encoder, and three inputs of half of an MLP).
    added = 8192 * 2 * (3 * 5376 + 3 * 21504 / 2) - overhead.FITTED_LAYER_BYTES
    assert large.value - small.value == pytest.approx(added)
    assert large.high - large.value > small.high - small.value


VL3, VL7, VL8 = "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-VL-8B-Instruct"


@pytest.mark.parametrize(
    ("repo", "ranks", "elements"),
    [(VL3, 1, 17579), (VL3, 4, 9024), ("Qwen/Qwen3-VL-4B-Instruct", 1, 15808), (VL8, 1, 18504), (VL8, 4, 12744)],
)
def test_an_encoder_takes_what_vllms_own_takes(repo: str, ranks: int, elements: int) -> None:
    """Elements of each patch that were alive at once when vLLM's towers of 0.19.0 and 0.33.0 ran on the CPU, with one
    output in place of each of CUDA's kernels for attention and RoPE."""
    found = published.first_layers(repo)
    run, kept = overhead.encode(found, Arguments(tensor_parallel_size=ranks), 2**18)
    assert (run.value - 0.27 * GIB + overhead.FITTED_LAYER_BYTES) / 2**20 / 2 == pytest.approx(elements, abs=8)
    assert kept == 2**18 * 2 * found.hidden_size * (1 if "2.5" in repo else 4)
    data = Arguments(tensor_parallel_size=4, mm_encoder_tp_mode="data")
    whole, copied = (weights.per_rank(found, each, "0.26.0")[0].by_kind["towers"] for each in (Arguments(), data))
    assert whole == copied and (ranks > 1 or overhead.encode(found, data, 2**18) == (run, kept))


@pytest.mark.parametrize(
    ("repo", "length", "batch", "arguments", "tokens"),
    [
        (VL7, 128000, 2048, {}, 114688),  # as a public log says
        (VL7, 32768, 2048, {}, 32768),
        (VL7, 4096, 2048, {}, 16384),
        (VL7, 128000, 2048, {"without": frozenset({"video"})}, 16384),
        (VL8, 4096, 2048, {}, 16384),
        (VL8, 4096, 2048, {"without": frozenset({"image"})}, 12288),
        (VL8, 4096, 2048, {"language_model_only": True}, 0),
        (VL8, 4096, 8192, {"max_pixels": 1003520}, 8 * 980),
        (VL8, 4096, 32768, {}, 32768),
        ("zai-org/GLM-4.5", 4096, 2048, {}, 0),
    ],
)
def test_the_profile_has_as_many_of_the_largest_items_as_fit(
    repo: str, length: int, batch: int, arguments: Mapping[str, Any], tokens: int
) -> None:
    found = published.first_layers(repo)
    assert overhead.count_encoder_tokens(found, Arguments(**arguments), length, batch) == tokens


def test_an_encoder_that_is_not_measured_is_said() -> None:
    """From 0.25 to 0.26 dense models with an encoder run in the second model runner, which does not measure it."""
    found, host = {VL8: published.first_layers(VL8)}, [Gpu("NVIDIA L4", 22 * GIB)]
    wanted = engine(VL8, gpu_memory_utilization=0.9, limit_mm_per_prompt={"image": 2, "video": {"count": 0}})
    plans = [planner.plan("vl", [wanted], found, host, number).engines[0] for number in ("0.24.0", "0.26.0", "0.27.0")]
    said = [any("does not measure the encoder" in advice for advice in each.advice) for each in plans]
    assert said == [False, True, False]
    assert plans[0].gpus[0].overhead_bytes > plans[1].gpus[0].overhead_bytes + GIB


def test_every_constant_says_where_it_is_from() -> None:
    figures = (vars(overhead) | vars(decode)).items()
    found = {name: each for name, each in figures if isinstance(each, overhead.Uncertain)}
    assert len(found) >= 12
    for name, figure in found.items():
        assert figure.low <= figure.value <= figure.high, name
        assert len(figure.source) > 40, name


@pytest.mark.parametrize(("name", "rows"), [("nvidia/Gemma-4-26B-A4B-NVFP4", 3), ("google/gemma-4-26B-A4B-it", 0)])
def test_cutlass_has_three_rows_more_for_each_expert_in_nvfp4(name: str, rows: int) -> None:
    known, backends = model(name), ("auto", "cutlass")
    fused, other = (overhead.activations(known, Arguments(moe_backend=each), 16_384).value for each in backends)
    assert other - fused == pytest.approx(16_384 * known.experts_per_token * rows * known.hidden_size * 2)
