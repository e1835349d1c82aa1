# SPDX-License-Identifier: Apache-2.0
"""Arguments that change the memory of an engine and that the plan does not count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.inventory.engine_arguments import find_option
from ansible.module_utils.vllm_edge.planning import planner, unmodeled_arguments
from ansible.module_utils.vllm_edge.planning.contract import Gpu, Verdict
from ansible.module_utils.vllm_edge.planning.memory import overhead
from checkpoints import DEFAULT, GIB, L4, MIB, engine, model, plan, plan_of

FLASH_ATTENTION = ["--attention-backend=FLASH_ATTN"]


@pytest.mark.parametrize(
    "words",
    [
        ["--quantization", "fp8"],
        ["-q=bitsandbytes"],
        ["--enable-tower-connector-lora"],
        ["--cpu-offload-gb=4"],
        ["--offload_group_size", "2"],
        ["--speculative-config", '{"model": "x", "num_speculative_tokens": 2}'],
        ["-sc.model=x"],
        ["--kv-transfer-config={}x"],
        ["--kv-offloading-size", "8"],
        ["--decode-context-parallel-size=2"],
        ["--hf-overrides", '{"max_position_embeddings": 99}'],
        ["--mamba-block-size=1024"],
        ["--mm-processor-kwargs.max_pixels=1000000"],
        ["--compilation-config", '{"mode": 0, "cudagraph_mode": "NONE"}'],
        ["-cc.cudagraph_mode=SOME"],
        # vLLM refuses these for a model with heads of 512 elements.
        ["--attention-backend", "FLASH_ATTN"],
        ["--attention-backend=FLASHINFER"],
        ["--no-disable-sliding-window", "--disable-hybrid-kv-cache-manager"],
    ],
)
def test_the_plan_never_says_that_it_fits(words: list[str]) -> None:
    found = plan_of(engine("e2b", extra_args=words), DEFAULT)
    assert found.verdict is Verdict.CANNOT_SAY
    named = words[-1] if words[0].startswith("--no-") else words[0].partition("=")[0].partition(".")[0]
    assert named in found.reason and "it would fit" in found.reason
    assert found.fix.startswith("extra_args without ") and named in found.fix
    # vLLM measures it itself, and the budget is the GPU.
    assert found.settings == {"vram_budget_mib": L4.cuda_total_bytes // MIB}


@pytest.mark.parametrize(
    ("wanted", "verdict"),
    [
        # More memory makes it only worse; less may help; another model may be anything.
        (engine("31b-bf16", extra_args=["--enable-dbo"]), Verdict.OOM_WEIGHTS),
        (engine("31b-bf16", extra_args=["--quantization=fp8"]), Verdict.CANNOT_SAY),
        (engine("31b-bf16", extra_args=["--cpu-offload-gb=50"]), Verdict.CANNOT_SAY),
        (engine("31b-bf16", 3, extra_args=["--quantization=fp8"]), Verdict.UNSUPPORTED_SHAPE),
        (engine("e2b", max_model_len=300_000, extra_args=["--hf-overrides={}x"]), Verdict.CANNOT_SAY),
        (engine("e2b", extra_env={"VLLM_PP_LAYER_PARTITION": "1,2"}), Verdict.CANNOT_SAY),
        # What is refused before, or whatever it changes.
        (engine("31b-bf16", extra_args=["--num-gpu-blocks-override=9"]), Verdict.OOM_WEIGHTS),
        (engine("31b-bf16", extra_args=["--runner=pooling"]), Verdict.OOM_WEIGHTS),
        (engine("e2b", gpu_memory_utilization=0.999, extra_args=["--quantization=fp8"]), Verdict.NOT_FREE),
        (engine("e2b", extra_args=["--optimization-level", "0"]), Verdict.CANNOT_SAY),
        (engine("e2b", kv_cache_dtype="turboquant_k8v4"), Verdict.CANNOT_SAY),
        # Adapters are counted.
        (engine("e2b", extra_args=["--enable-lora", "--max-loras=4"]), Verdict.FITS),
        (engine("e2b", extra_args=["--enable-lora", "--max-loras=8", "--max-lora-rank", "512"]), Verdict.OOM_WEIGHTS),
        # These change nothing.
        (engine("e2b", extra_args=["--runner", "generate", "--optimization-level=2"]), Verdict.FITS),
        (engine("e2b", extra_args=["--cpu-offload-gb", "0"]), Verdict.FITS),
        (engine("e2b", extra_args=["--no-enable-lora", "--decode-context-parallel-size", "1"]), Verdict.FITS),
        (engine("e2b", extra_args=["--offload-backend=auto", "--max-loras", "4", "--seed=1"]), Verdict.FITS),
        (engine("31b-nvfp4", 4, extra_args=["--quantization", "modelopt_fp4"]), Verdict.FITS),
        (engine("31b-nvfp4", 4, extra_args=["-q", "modelopt"]), Verdict.FITS),
        (engine("31b-w4a16", 4, extra_args=["--quantization=compressed-tensors"]), Verdict.FITS),
        (engine("e2b", extra_args=["-O3", "--attention-backend=TRITON_ATTN"]), Verdict.FITS),
        (engine("e2b", extra_args=["--mm-encoder-tp-mode", "data"]), Verdict.FITS),
        (engine("31b-nvfp4", 4, extra_args=["--mm-encoder-tp-mode", "data"]), Verdict.CANNOT_SAY),
        (engine("Qwen/Qwen3-8B", extra_args=FLASH_ATTENTION), Verdict.FITS),
        (engine("Qwen/Qwen3-8B", kv_cache_dtype="fp8", extra_args=FLASH_ATTENTION), Verdict.CANNOT_SAY),
    ],
)
def test_what_it_may_change(wanted: dict[str, Any], verdict: Verdict) -> None:
    found = plan_of(wanted, DEFAULT)
    assert found.verdict is verdict, found.reason


@pytest.mark.parametrize(
    ("words", "graphs", "largest"),
    [
        (["--max-cudagraph-capture-size", "4"], 6, 4),
        (["--cudagraph-capture-sizes", "1", "8", "2"], 5, 8),
        (["-cc", '{"cudagraph_capture_sizes": [1, 2, 64], "cudagraph_mode": "FULL_DECODE_ONLY"}'], 2, 2),
        (["--compilation-config.cudagraph_mode=piecewise"], 4, 8),
        (["-cc.cudagraph_mode=NONE"], 0, 0),
        ([], 7, 8),
    ],
)
def test_graphs_are_counted_as_asked_for(words: list[str], graphs: int, largest: int) -> None:
    """With max_num_seqs 4 vLLM captures 1, 2, 4 and 8, and the first three for decoding alone (0.24.0)."""
    wanted = engine("Qwen/Qwen3-8B", max_num_seqs=4, gpu_memory_utilization=0.9, extra_args=words)
    (found,) = plan_of(wanted, "0.24.0").gpus
    pool = overhead.GRAPH_POOL_BYTES_PER_TOKEN_AND_HIDDEN.value * largest * 4096
    assert found.graphs_bytes == round(pool + overhead.GRAPH_BYTES_PER_LAYER.value * graphs * 36)


def test_a_measurement_counts_it() -> None:
    """Except what changes the KV cache, of which nothing is measured."""
    seen = {"engine": {"weights_bytes": 12 * GIB, "overhead_bytes": GIB, "graphs_bytes": GIB}}
    for word, verdict in {"--enable-dbo": Verdict.FITS, "--speculative-config={}x": Verdict.CANNOT_SAY}.items():
        assert plan_of(engine("e2b", extra_args=[word]), DEFAULT, observations=seen).verdict is verdict


@pytest.mark.parametrize(
    ("pooling", "words", "generates"),
    [(False, [], True), (True, [], False), (True, ["--runner=generate"], True), (False, ["--convert=embed"], False)],
)
def test_what_pools_has_no_tokens_per_second(pooling: bool, words: list[str], generates: bool) -> None:
    """Qwen3-Embedding is a Qwen3ForCausalLM with modules.json."""
    embedding = replace(model("e2b"), facts=replace(model("e2b").facts, pooling=pooling))
    wanted = engine("e2b", extra_args=words)
    (found,) = planner.plan("p", [wanted], {"e2b": embedding}, [L4], DEFAULT).engines
    assert found.verdict is (Verdict.FITS if generates else Verdict.CANNOT_SAY)
    assert (found.decode_tok_s is not None, found.decode_together_tok_s is not None) == (generates, generates)
    if pooling and not generates:
        assert "modules.json of the checkpoint" in found.reason and found.fix == "extra_args: [--runner, generate]"


def test_the_verdict_of_a_profile_is_the_worst() -> None:
    unsure = engine("e2b", gpus=[1], extra_args=["--enable-dbo"])
    sure = engine("e2b", gpus=[2]) | {"name": "sure"}
    assert plan(unsure, sure, version=DEFAULT).verdict is Verdict.CANNOT_SAY
    assert plan(unsure, engine("31b-bf16") | {"name": "large"}, version=DEFAULT).verdict is Verdict.OOM_WEIGHTS


@pytest.mark.parametrize(
    "words", [["--enable-lora"], ["--spec-tokens=2", "-sc.method=mtp"], ["--mamba-cache-mode", "align"]]
)
def test_what_is_not_counted_of_nemotron(words: list[str]) -> None:
    nemotron = published.families.interpret(published.facts(published.NEMOTRON))
    wanted = engine("nano", extra_args=words, gpu_memory_utilization=0.9)
    (found,) = planner.plan("p", [wanted], {"nano": nemotron}, [Gpu("NVIDIA H200", 140 * GIB)], DEFAULT).engines
    assert found.verdict is Verdict.CANNOT_SAY and words[0].partition("=")[0] in found.reason, found.reason
    assert "a NemotronHForCausalLM" in found.reason or "-sc.method=mtp" not in words


def test_every_name_is_an_option_of_the_recorded_release() -> None:
    names = unmodeled_arguments._ARGUMENTS
    assert [name for name in names if (found := find_option(name)) is None or found.name != name] == []
