# SPDX-License-Identifier: Apache-2.0
"""Verdicts and figures against what was measured on the reference host, and what an operator makes of a plan.

Rows of the reference that were used to find a constant are marked; that they agree proves only that one set of
constants does for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.planning import feasibility, planner
from ansible.module_utils.vllm_edge.planning.contract import Arguments, EnginePlan, Quantization, Verdict
from ansible.module_utils.vllm_edge.planning.fixes import TEXT_ONLY
from ansible.module_utils.vllm_edge.planning.memory import overhead
from ansible.module_utils.vllm_edge.planning.memory import vllm_versions as versions
from checkpoints import BF16_TP4, DEFAULT, GIB, L4, MIB, NVFP4_TP2, REFERENCE, engine, model, plan, plan_of


def plan_beside(wanted: Mapping[str, Any], free_mib: int, version: str) -> EnginePlan:
    """On one GPU of which others leave so much."""
    gpu = dataclasses.replace(L4, free_bytes=free_mib * MIB)
    return planner.plan("profile", [wanted], {"e2b": model("e2b")}, [gpu], version).engines[0]


# -- the rows of measured.md: verdict, reason, fix


E4B, E2B = (engine(name, gpu_memory_utilization=0.90) for name in ("e4b", "e2b"))
BF16_PP2 = engine("31b-bf16", pipeline_parallel_size=2, gpu_memory_utilization=0.90)
GRAPHS = BF16_TP4 | {"max_num_seqs": None, "enforce_eager": False}


@pytest.mark.parametrize(
    ("wanted", "verdict", "reason", "fix"),
    [
        (
            BF16_PP2,
            Verdict.OOM_WEIGHTS,
            "Weights need 31.5",
            "tensor_parallel_size: 4, pipeline_parallel_size: 1, gpus: [0, 1, 2, 3]",
        ),
        (
            engine("31b-nvfp4", gpu_memory_utilization=0.90),
            Verdict.OOM_WEIGHTS,
            "Weights need 31.03 GiB on GPU 0, which has 22.03 GiB",
            "tensor_parallel_size: 2, gpus: [0, 1]",
        ),
        (
            engine("31b-nvfp4", pipeline_parallel_size=2, gpu_memory_utilization=0.90),
            Verdict.UNSUPPORTED_ENGINE,
            "crashes in vLLM 0.19, whose IntermediateTensors lacks what gemma4.py calls (vllm-project/vllm#40786)",
            "tensor_parallel_size: 2, pipeline_parallel_size: 1",
        ),
        *[(wanted, Verdict.FITS, "stay free", "") for wanted in (NVFP4_TP2, BF16_TP4, E4B, E2B)],
        (
            GRAPHS,
            Verdict.OOM_WARMUP,
            "GPU 0 would hold 22.12 GiB: CUDA graphs (1.47 GiB) and the CUDA context (0.38 GiB) come on top",
            "max_num_seqs: 128",
        ),
        (GRAPHS | {"gpu_memory_utilization": 0.90}, Verdict.FITS, "stay free", ""),
    ],
)
def test_verdicts_of_the_reference(wanted: Mapping[str, Any], verdict: Verdict, reason: str, fix: str) -> None:
    found = plan_of(wanted)
    assert (found.verdict, found.fix) == (verdict, fix), found.reason
    assert reason in found.reason
    # What would come after the weights is told, too.
    assert wanted is not BF16_PP2 or any("crashes in vLLM 0.19" in sentence for sentence in found.advice)


# -- figures


def test_eager_experts_are_slow() -> None:
    graphs, eager = (plan_of(engine("26b-nvfp4", 2, enforce_eager=eager), DEFAULT) for eager in (False, True))
    assert graphs.decode_tok_s and eager.decode_tok_s and eager.decode_tok_s.mid < graphs.decode_tok_s.mid / 3
    assert any("enforce_eager costs a mixture of experts" in sentence for sentence in eager.advice)


# -- refusals


def test_no_kv_cache_is_left() -> None:
    found = plan_of(engine("26b-nvfp4", kv_cache_dtype="fp8", gpu_memory_utilization=0.78, max_num_seqs=8))
    assert found.verdict is Verdict.NO_KV
    assert "weights take 17.95 GiB and activations 0.30 GiB, which leaves no KV cache on GPU 0" in found.reason
    assert found.fix == "gpu_memory_utilization: 0.85"
    assert plan_of(engine("31b-w4a16", 2, gpu_memory_utilization=0.50)).fix == "gpu_memory_utilization: 0.65"


def test_one_request_does_not_fit() -> None:
    tight = engine("31b-nvfp4", 2, kv_cache_dtype="bfloat16", gpu_memory_utilization=0.97, enforce_eager=True)
    tight |= {"max_model_len": 262_144, "max_num_seqs": 8}
    found = plan_of(tight)
    assert found.verdict is Verdict.KV_BELOW_MAX_MODEL_LEN
    assert "One request of max_model_len 262,144 needs 11.18 GiB of KV cache in bfloat16, and 4.80 GiB" in found.reason
    assert [fix.settings for fix in found.fixes] == [
        {"kv_cache_dtype": "fp8", "limit_mm_per_prompt": TEXT_ONLY},
        {"tensor_parallel_size": 4, "gpus": [0, 1, 2, 3]},
        {"max_model_len": 94208},
    ]
    small = engine("26b-nvfp4", kv_cache_dtype="fp8", gpu_memory_utilization=0.83, max_num_seqs=8)
    assert plan_of(small).verdict is Verdict.KV_BELOW_MAX_MODEL_LEN
    assert plan_of(small).fix == "gpu_memory_utilization: 0.85"


LONG = engine("31b-bf16", 4, max_model_len=131_072)


def test_every_change_that_keeps_the_context_is_named_before_a_shorter_one() -> None:
    found = plan_of(LONG, DEFAULT)
    assert found.verdict is Verdict.KV_BELOW_MAX_MODEL_LEN
    assert {fix.change: fix.costs for fix in found.fixes} == {
        "max_num_seqs: 128": ("at most 128 instead of 256 requests at once",),
        "kv_cache_dtype: fp8": ("quality: small, not measured here",),
        "limit_mm_per_prompt: {image: 0, video: 0, audio: 0}": ("no images, videos or audio",),
        "enforce_eager: true": ("14.5 instead of 15.4 tok/s",),
        "max_model_len: 79872": ("79,872 instead of 131,072 tokens of context",),
    }
    assert found.fix == found.fixes[0].change and found.fixes[-1].change == "max_model_len: 79872"


UNFIT: list[tuple[dict[str, Any], str, int, list[str]]] = [
    # Two changes where one does not help, or costs less than the cheapest single one.
    (LONG | {"max_model_len": 262_144}, DEFAULT, 4, ["max_num_seqs kv_cache_dtype", "max_model_len"]),
    (GRAPHS | {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 * GIB}, REFERENCE, 4, ["kv_cache_memory_bytes"]),
    (BF16_TP4 | {"kv_cache_memory_bytes": 2 * GIB, "max_model_len": 131_072}, REFERENCE, 4, ["kv_cache_memory_bytes"]),
    # All of them, on more GPUs too.
    (LONG | {"tensor_parallel_size": 2, "gpus": [0, 1]}, DEFAULT, 4, ["tensor_parallel_size gpus max_num_seqs"]),
    (engine("31b-bf16"), DEFAULT, 2, ["tensor_parallel_size gpus"]),
    (engine("26b-nvfp4", 1, max_model_len=262_144, kv_cache_dtype="bfloat16"), DEFAULT, 1, ["max_model_len"]),
    # What vLLM refuses, and then does not fit.
    (engine("26b-nvfp4", max_model_len=300_000, kv_cache_dtype="bfloat16"), DEFAULT, 1, ["max_model_len"]),
    (engine("31b-nvfp4", 2, dtype="float32"), DEFAULT, 2, ["dtype"]),
    (engine("31b-bf16", pipeline_parallel_size=4), REFERENCE, 4, ["tensor_parallel_size pipeline_parallel_size"]),
]


@pytest.mark.parametrize(("wanted", "version", "gpus", "kinds"), UNFIT)
def test_a_change_that_is_followed_fits_and_a_milder_one_does_not(
    wanted: dict[str, Any], version: str, gpus: int, kinds: list[str]
) -> None:
    found = plan_of(wanted, version, gpus)
    assert {" ".join(fix.settings) for fix in found.fixes} >= set(kinds), found.fixes
    for fix in found.fixes:
        there = max([gpus - 1, *fix.settings.get("gpus", ())]) + 1
        followed = plan_of(wanted | fix.settings, version, there)
        assert followed.verdict is Verdict.FITS, fix
        assert (followed.max_model_len, followed.max_concurrency) == (fix.max_model_len, fix.max_concurrency)
        for name, milder in (("max_num_seqs", 2), ("max_num_batched_tokens", 2), ("max_model_len", 1)):
            if name in fix.settings and len(fix.settings) == 1:
                more = fix.settings[name] * milder + (1024 if milder == 1 else 0)
                assert plan_of(wanted | {name: more}, version, there).verdict is not Verdict.FITS, fix


def test_whole_experts_where_their_parts_have_a_shape_that_no_kernel_takes() -> None:
    """Over four GPUs, integers of gpt-oss's 2,880 would be 720, which no group of 32 divides."""
    found = dataclasses.replace(published.first_layers("openai/gpt-oss-20b"), quantization=Quantization("awq", 4, 32))
    (planned,) = planner.plan("p", [engine("x", 4)], {"x": found}, [L4] * 4, DEFAULT).engines
    assert planned.verdict is Verdict.UNSUPPORTED_SHAPE
    assert [fix.change for fix in planned.fixes] == [
        *("extra_args: [--enable-expert-parallel]", "tensor_parallel_size: 2, gpus: [0, 1]")
    ]


def test_a_change_that_the_release_refuses_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(wanted: feasibility.Engine) -> Iterator[feasibility.Finding]:
        if wanted.kv_cache_dtype == "fp8":
            yield feasibility.Finding("no FP8", "")

    monkeypatch.setattr(feasibility, "RULES", (*feasibility.RULES, refuse))
    assert [fix.change.partition(":")[0] for fix in plan_of(LONG, DEFAULT).fixes] == [
        *("max_num_seqs", "limit_mm_per_prompt", "enforce_eager", "max_model_len")
    ]


def test_memory_of_others_and_of_the_engines_own_context() -> None:
    for free_mib, *expected in ((20_600, Verdict.FITS, ""), (20_400, Verdict.NOT_FREE, "gpu_memory_utilization: 0.89")):
        found = plan_beside(E2B, free_mib, REFERENCE)
        assert [found.verdict, found.fix] == expected, found.reason
        assert found.gpus[0].free_bytes == free_mib * MIB - found.gpus[0].total_bytes
    busy = [dataclasses.replace(L4, free_bytes=8192 * MIB), L4]
    (beside,) = planner.plan("profile", [engine("e2b", max_num_seqs=8)], {"e2b": model("e2b")}, busy, REFERENCE).engines
    assert beside.verdict in (Verdict.NOT_FREE, Verdict.OOM_WEIGHTS) and (beside.fix, beside.fixes[0].costs) == (
        "gpus: [1]",
        (),
    )
    assert plan_of(engine("e2b", gpu_memory_utilization=0.995)).verdict is Verdict.NOT_FREE
    alone, shared = (plan_beside(engine("e2b"), free_mib, DEFAULT) for free_mib in (22_563, 22_563 - 4096))
    assert alone.settings["kv_cache_memory_bytes"] - shared.settings["kv_cache_memory_bytes"] == 4096 * MIB


def test_two_engines_on_one_gpu() -> None:
    first, second = (engine("e2b", gpu_memory_utilization=0.6) | {"name": name} for name in ("first", "second"))
    refused = plan(first, second, gpus=1)
    assert [each.verdict for each in refused.engines] == [Verdict.FITS, Verdict.NOT_FREE]
    assert refused.verdict is Verdict.NOT_FREE

    small = {"gpu_memory_utilization": 0.48, "max_num_seqs": 8}
    shared = plan(first | small, second | small, gpus=2, tolerance_mib=100)
    assert shared.verdict is Verdict.FITS
    totals = [each.gpus[0].total_bytes for each in shared.engines]
    assert shared.engines[1].gpus[0].free_bytes == L4.cuda_total_bytes - sum(totals)
    assert shared.budgets_mib == {0: sum(-(-total // MIB) + 100 for total in totals), 1: 0}


def test_a_fix_takes_no_gpu_of_another_engine() -> None:
    large, small = engine("31b-nvfp4", gpus=[1]), engine("e2b", gpus=[2]) | {"name": "small"}
    assert plan(large, small).engines[0].fix == "tensor_parallel_size: 2, gpus: [0, 1]"
    assert plan(large, small, gpus=3).engines[0].fix.endswith("gpus: [0, 1]")
    (fix,) = plan(large, small | {"gpus": [0]}, gpus=2).engines[0].fixes
    assert (fix.change, fix.costs) == ("tensor_parallel_size: 2, gpus: [1, 2]", ("1 more NVIDIA L4 than there are",))


def test_a_kv_cache_that_is_larger_than_the_gpu() -> None:
    wanted = BF16_TP4 | {"kv_cache_memory_bytes": 8 * GIB}
    found = plan_of(wanted)
    assert found.verdict is Verdict.NO_KV
    assert "kv_cache_memory_bytes is 8.00 GiB, and weights leave 5.80 GiB of GPU 0" in found.reason
    assert found.fix == f"kv_cache_memory_bytes: {found.derived_kv_cache_memory_bytes}"
    assert plan_of(wanted | {"kv_cache_memory_bytes": found.derived_kv_cache_memory_bytes}).verdict is Verdict.FITS


# -- engines of which the plan says how much KV cache they get


@pytest.mark.parametrize("version", [REFERENCE, DEFAULT])
@pytest.mark.parametrize("wanted", [engine("31b-nvfp4", 2), engine("31b-bf16", 4, max_num_seqs=8), engine("e2b")])
def test_an_engine_that_sets_no_share_is_pinned_so_that_the_margin_stays_free(
    wanted: Mapping[str, Any], version: str
) -> None:
    found = plan_of(wanted, version, margin_mib=700)
    assert found.verdict is Verdict.FITS, found.reason
    pinned = found.settings["kv_cache_memory_bytes"]
    assert {gpu.kv_cache_bytes for gpu in found.gpus} == {pinned}
    assert 700 <= min(gpu.free_bytes for gpu in found.gpus) / MIB < 701
    # vLLM's own look at the free memory asks for all of it, and for no more than an empty GPU has.
    share = found.settings["gpu_memory_utilization"]
    needs = max(gpu.total_bytes - gpu.context_bytes for gpu in found.gpus)
    assert 0 <= needs - share * L4.cuda_total_bytes < L4.cuda_total_bytes / 1000
    assert found.settings["vram_budget_mib"] == -(-max(gpu.total_bytes for gpu in found.gpus) // MIB) + 300
    # What the plan adds is what it has planned: written down, it is the same engine.
    again = plan_of({**wanted, "kv_cache_memory_bytes": pinned}, version)
    assert (again.verdict, again.gpus, again.kv_blocks) == (found.verdict, found.gpus, found.kv_blocks)
    assert set(again.settings) == {"gpu_memory_utilization", "vram_budget_mib"}


def test_what_an_engine_says_itself_stays() -> None:
    found = plan(engine("31b-nvfp4", 2, gpu_memory_utilization=0.90, vram_budget_mib=21_000), gpus=2)
    assert found.engines[0].settings == {}
    assert found.budgets_mib == {0: 21_000, 1: 21_000}


def test_weights_that_leave_the_margin_but_no_kv_cache() -> None:
    found = plan_of(engine("e4b", max_num_seqs=8), margin_mib=6700)
    assert found.verdict is Verdict.NO_KV
    assert "and plan_margin_mib 6700 is kept free, which leaves no KV cache" in found.reason
    assert "kv_cache_memory_bytes" not in found.settings
    assert found.fixes[-1].change == "tensor_parallel_size: 2, gpus: [0, 1]"


# -- releases, observations, derived sizes


def test_graphs_are_in_the_budget_since_020() -> None:
    older, newer = (plan_of(NVFP4_TP2, version).gpus[0] for version in (REFERENCE, "0.20.0"))
    kept = older.kv_cache_bytes - newer.kv_cache_bytes
    assert kept / GIB == pytest.approx(1.47 * 1.16, rel=0.01)
    assert newer.total_bytes < older.total_bytes - GIB


def test_a_pipeline_samples_on_its_last_rank() -> None:
    found = plan_of(engine("31b-nvfp4", pipeline_parallel_size=2, max_num_seqs=16), DEFAULT)
    first, last = found.gpus
    assert found.verdict is Verdict.FITS, "not with 0.19"
    assert first.warm_up_bytes == 0 < last.warm_up_bytes
    assert last.overhead_bytes - first.overhead_bytes == last.warm_up_bytes


def test_observations_take_the_place_of_predictions() -> None:
    seen = {"weights_bytes": 17 * GIB, "overhead_bytes": GIB, "context_bytes": 300 * MIB, "graphs_bytes": 2 * GIB}
    found = plan_of(NVFP4_TP2, observations={"engine": seen, "another": {"weights_bytes": 1}})
    gpu = found.gpus[0]
    assert {name: getattr(gpu, name) for name in seen} == seen
    assert found.observed == ("context_bytes", "graphs_bytes", "overhead_bytes", "weights_bytes")
    assert found.verdict is Verdict.OOM_WARMUP
    # What vLLM logged as available: requested minus what was observed.
    assert gpu.kv_cache_bytes == -(-L4.cuda_total_bytes * 9 // 10) - 18 * GIB


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": {"weight_bytes": 1}}, "plan_observations.engine.weight_bytes is not a component"),
        ({"engine": {"weights_bytes": "16 GiB"}}, "is not a number of bytes"),
        ({"engine": 5}, "is not a mapping"),
    ],
)
def test_observations_that_cannot_be_used(given: dict[str, Any], said: str) -> None:
    with pytest.raises(overhead.ObservationError, match=said):
        plan_of(NVFP4_TP2, observations=given)


COUNTED = {"image": 0, "video": {"count": 0}, "audio": 0}


def test_an_engine_for_text_only_has_the_memory_of_the_encoders_for_its_kv_cache() -> None:
    """With the tokens of a batch stated, since text only also makes the default smaller."""
    wanted = {**NVFP4_TP2, "max_num_batched_tokens": 2496, "gpu_memory_utilization": 0.95}
    limits: tuple[dict[str, Any], ...] = ({}, {"limit_mm_per_prompt": COUNTED})
    all_of_it, text = (plan_of({**wanted, **more}, DEFAULT).gpus[0] for more in limits)
    assert (all_of_it.weights_bytes - text.weights_bytes) / MIB == pytest.approx(1098, abs=1)
    assert all_of_it.overhead_bytes - text.overhead_bytes == 2496 * 5376 * 2
    assert (text.context_bytes, text.graphs_bytes) == (all_of_it.context_bytes, all_of_it.graphs_bytes)
    assert text.total_bytes == all_of_it.total_bytes, "the share decides the total"
    assert plan_of({**NVFP4_TP2, "max_model_len": 8192}, DEFAULT).verdict is Verdict.KV_BELOW_MAX_MODEL_LEN
    text_only = {**NVFP4_TP2, "max_model_len": 8192, "limit_mm_per_prompt": COUNTED}
    assert plan_of(text_only, DEFAULT).verdict is Verdict.FITS


@pytest.mark.parametrize(
    ("name", "without", "text_only"),
    [
        ("Qwen/Qwen3.5-4B", {"image", "video"}, True),
        ("Qwen/Qwen3.5-4B", {"video"}, False),
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", {"image"}, True),
        ("31b-bf16", {"image", "video"}, True),
        ("e4b", {"image", "video"}, False),
    ],
)
def test_without_all_that_a_checkpoint_takes_it_is_for_text_only(name: str, without: set[str], text_only: bool) -> None:
    found = published.first_layers(name) if name in published.CONFIGS else model(name)
    asked = planner.arguments_of({"extra_args": [f"--limit-mm-per-prompt.{each}=0" for each in without]})
    assert planner.resolve(found, asked, [L4], DEFAULT)[1].language_model_only is text_only


def test_an_image_of_another_size_in_the_profile_is_not_counted() -> None:
    models = {"x": published.first_layers("Qwen/Qwen3.5-4B")}
    for limit, verdict in (({"count": 1}, Verdict.FITS), ({"count": 1, "width": 512}, Verdict.CANNOT_SAY)):
        wanted = engine("x", max_model_len=8192, limit_mm_per_prompt={"image": limit, "video": 0})
        (found,) = planner.plan("p", [wanted], models, [L4], DEFAULT).engines
        assert found.verdict is verdict and (verdict is Verdict.FITS or "a size in limit_mm_per_prompt" in found.reason)


@pytest.mark.parametrize("limits", [None, {}, {"image": 0}, {**COUNTED, "video": 1}, "image=0"])
def test_a_modality_that_is_left_keeps_the_encoders(limits: Any) -> None:
    assert not planner.arguments_of({"limit_mm_per_prompt": limits}).language_model_only
    assert planner.arguments_of({"limit_mm_per_prompt": COUNTED}).language_model_only


def test_what_is_uncertain_is_told_where_it_decides() -> None:
    assert any("highest of the uncertain figures" in sentence for sentence in plan_of(NVFP4_TP2).advice)
    assert not any("highest of the uncertain figures" in sentence for sentence in plan_of(BF16_TP4).advice)


PINNED = {"gpu_memory_utilization": None}


@pytest.mark.parametrize(
    ("gpu", "ranks", "more", "named"),
    [
        ("NVIDIA GeForce RTX 4090", 1, {}, {"compile_cache": 1014}),
        ("NVIDIA GeForce RTX 4090", 1, {"enforce_eager": True}, {}),
        ("NVIDIA GeForce RTX 4090", 1, PINNED, {}),
        ("NVIDIA GeForce RTX 4090", 2, PINNED, {"pcie": 1352}),
        ("NVIDIA GB10", 1, PINNED, {"shared_memory": 14439}),
        ("NVIDIA L4", 2, PINNED, {}),
        ("NVIDIA H100 80GB HBM3", 2, PINNED, {}),
    ],
)
def test_what_may_be_missing_is_named(gpu: str, ranks: int, more: dict[str, Any], named: dict[str, int]) -> None:
    host = [dataclasses.replace(L4, name=gpu)] * ranks
    wanted = engine("Qwen/Qwen3-8B", ranks, gpu_memory_utilization=0.92) | more
    found = planner.plan("any", [wanted], {"Qwen/Qwen3-8B": model("Qwen/Qwen3-8B")}, host, DEFAULT).engines[0]
    assert found.free_uncertainty_mib == named


def test_a_warning_tells_where_what_may_be_missing_decides() -> None:
    for length, warned in ((4096, False), (24576, True)):
        found = plan_of(engine("Qwen/Qwen3-8B", gpu_memory_utilization=0.92, max_model_len=length), DEFAULT)
        assert found.verdict is Verdict.FITS
        told = [sentence for sentence in found.advice if "1,014 MiB while vLLM compiles" in sentence]
        assert bool(told) is warned and all("smaller max_model_len" in sentence for sentence in told)


def test_variables_that_choose_the_model_runner_and_its_estimate_are_planned() -> None:
    """E4B of 0.27 runs in the second one, with its graphs beside the share; in 0.32 that keeps them inside."""
    wanted = engine("e4b", gpu_memory_utilization=0.9)
    for release, name in {"0.27.0": "VLLM_USE_V2_MODEL_RUNNER", "0.32.0": versions.SWITCHES["estimate_graphs"]}.items():
        unset, off = (plan_of(wanted | {"extra_env": env}, release).gpus[0] for env in ({}, {name: "0"}))
        assert (unset.kv_cache_bytes > off.kv_cache_bytes) is (release == "0.27.0")
        assert (unset.free_bytes < off.free_bytes) is (release == "0.27.0")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (engine("e2b") | {"model": "e3b"}, "serving_engines.engine.model: 'e3b' is not a known model"),
        (engine("e2b") | {"gpus": [4]}, r"serving_engines.engine.gpus: slot 4 does not exist; slots are 0 to 3"),
        (engine("e2b") | {"gpus": [0, 1]}, "2 GPUs for tensor_parallel_size x pipeline_parallel_size = 1"),
    ],
)
def test_what_cannot_be_planned(wanted: Mapping[str, Any], said: str) -> None:
    with pytest.raises(planner.PlanError, match=said):
        planner.plan("profile", [wanted], {"e2b": model("e2b")}, [L4] * 4, REFERENCE)


def test_extra_arguments_that_move_memory_are_read() -> None:
    words = ["--block-size", "32", "--enable-expert-parallel", "--no-async-scheduling", "--port=1"]
    found = planner.arguments_of({"name": "x", "max_num_seqs": 4, "gpus": [0], "extra_args": words})
    assert found == Arguments(max_num_seqs=4, block_size=32, enable_expert_parallel=True, async_scheduling=False)
