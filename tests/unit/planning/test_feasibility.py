# SPDX-License-Identifier: Apache-2.0
"""What decides apart from memory whether an engine runs, and advice."""

from __future__ import annotations

import dataclasses
from typing import Any

import published
import pytest
from ansible.module_utils.vllm_edge.planning import feasibility
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Facts, Model, Quantization, Tensor, Verdict
from ansible.module_utils.vllm_edge.planning.memory.vllm_versions import behaviour
from checkpoints import DEFAULT, FUSENAI, L4, model

QWEN3_VL, GPT_OSS = "Qwen/Qwen3-VL-30B-A3B-Instruct", "openai/gpt-oss-20b"
INT8 = "Qwen2.5-7B-Instruct, INT8 by channel"

MINISTRAL, BAICHUAN, EXAONE = (
    {"architecture": f"{name}ForCausalLM"} for name in ("Ministral3", "Baichuan", "ExaoneMoE")
)
AWQ_TP4 = {"tensor_parallel_size": 4, "quantization": Quantization("awq", 4, 32)}
MODELOPT_FP8 = {"quantization": Quantization("modelopt", 8)}
W4A8, MXFP4, MXFP8 = (
    {"quantization": Quantization("compressed-tensors", 4, 128, None, frozenset({scheme}))}
    for scheme in ("W4A8 FP8", "MXFP4", "MXFP8")
)
ORDERED = {"quantization": Quantization("gptq", 4, 32), "facts": Facts("", "", {}, (), {"desc_act": True})}
OF_MODELOPT = {"quantization": Quantization("modelopt_mxfp8", 8, 32)}
IN_STAGES = {"gpu": "NVIDIA H100 PCIe", "pipeline_parallel_size": 2}
LORA = {"enable_lora": True}
EXPERTS = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


MIXED, HEAD = "Qwen3.5-4B, FP8 and NVFP4", Facts("", "", {}, (Tensor("lm_head.weight_scale", "F8_E4M3", (64, 4)),))
W4A16 = Facts("", "", {}, (), {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"})
GEMMA3_TEXT = {"architecture": "Gemma3ForCausalLM"}


def case(name: str, version: str = DEFAULT, gpu: str = "NVIDIA L4", **more: Any) -> feasibility.Engine:
    """An engine on one GPU, of which arguments and fields of the model differ."""
    arguments, changes = (
        {key: more[key] for key in more if key in {field.name for field in dataclasses.fields(kind)}}
        for kind in (Arguments, Model)
    )
    found = published.first_layers(name) if name in published.CONFIGS else model(name)
    return feasibility.Engine(
        name="engine",
        arguments=Arguments(**arguments),
        slots=(0,),
        model=dataclasses.replace(found, **changes),
        extra_args=more.get("extra_args", ()),
        tool_call_parser=more.get("tool_call_parser", ""),
        environment=more.get("environment", {}),
        observed={},
        kv_cache_dtype=more.get("kv_cache", "bfloat16"),
        margin_bytes=0,
        others=frozenset(),
        gpus=[dataclasses.replace(L4, name=gpu)],
        free=[L4.cuda_total_bytes],
        release=behaviour(version),
    )


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("31b-bf16", {"max_num_batched_tokens": 512, "max_num_seqs": 1024}, "less than the 2,496 tokens of a video"),
        ("31b-bf16", {"max_num_batched_tokens": 512, "without": frozenset({"video"})}, ""),
        ("e4b", {"max_num_batched_tokens": 512, "max_num_seqs": 1024}, "512 is less than max_num_seqs 1,024"),
        ("31b-bf16", {"version": "0.20.2", "pipeline_parallel_size": 2}, "#40786"),
        ("31b-bf16", {"version": "0.21.0", "pipeline_parallel_size": 2}, ""),
        ("31b-bf16", {"version": "0.20.2", "extra_args": ("--speculative-config={}",)}, "#41745"),
        ("31b-bf16", {"version": "0.21.0", "extra_args": ("--speculative-config={}",)}, ""),
        ("31b-fp8", {"gpu": "NVIDIA A10", "kv_cache": "fp8"}, "FP8 KV cache needs compute capability 8.9"),
        ("google/gemma-3-27b-it", {"gpu": "NVIDIA A10", "kv_cache": "fp8"}, "FP8 KV cache needs compute capability"),
        ("google/gemma-3-27b-it", GEMMA3_TEXT | {"gpu": "NVIDIA A10", "kv_cache": "fp8"}, ""),
        ("31b-bf16", {"gpu": "Tesla T4"}, "bfloat16 needs compute capability 8.0"),
        ("26b-bf16", {"tensor_parallel_size": 3}, "neither divides the other"),
        ("31b-nvfp4", {"version": "0.19.0", "tensor_parallel_size": 4, "kv_cache": "fp8"}, ""),
        # 2112 is 33 x 64: what Marlin takes in FP4, and would not in integers.
        (FUSENAI, {"version": "0.19.0"}, ""),
        ("31b-bf16", {"tensor_parallel_size": 3}, "query heads 32 is not divisible"),
        (published.NEMOTRON, {"tensor_parallel_size": 16}, "number of Mamba groups 8 is not divisible"),
        ("Nemotron-3-Nano, one group", {"tensor_parallel_size": 16}, ""),
        (MIXED, {"version": "0.23.0", "gpu": "NVIDIA A10"}, "modelopt_mixed needs compute capability 8.9"),
        (MIXED, {"version": "0.24.0", "gpu": "NVIDIA A10"}, ""),
        (MIXED, {"version": "0.22.0", "facts": HEAD}, "a quantized lm_head, which came with 0.23.0"),
        (MIXED, {"version": "0.23.0", "facts": HEAD}, ""),
        ("Qwen3.5-4B, modelopt", {"version": "0.20.0", "facts": W4A16}, "W4A16_NVFP4, which came with 0.21.0"),
        ("Qwen3.5-4B, modelopt", {"version": "0.21.0", "facts": W4A16}, ""),
        (FUSENAI, {"version": "0.19.0", "tensor_parallel_size": 2}, "intermediate size 2112 over tensor_p"),
        (FUSENAI, EXPERTS | {"version": "0.19.0"}, "is 1056, which Marlin"),
        # Later releases pad the tiles.
        ("26b-nvfp4", {"tensor_parallel_size": 2}, ""),
        # A card that nobody has written down: only what some cards cannot compute is open.
        ("31b-bf16", {"gpu": "X", "kv_cache": "fp8"}, "needs compute capability 8.9, and that of X is not known"),
        ("31b-bf16", {"gpu": "X"}, ""),
        ("google/gemma-3-27b-it", {"gpu": "X"}, "bfloat16 needs compute capability 8.0, and that of X is not known"),
        ("31b-nvfp4", {"gpu": "X"}, ""),
        ("26b-nvfp4", {"gpu": "X", "version": "0.19.0", "tensor_parallel_size": 2}, "10.0 does without"),
        (GPT_OSS, {"gpu": "X"}, "the quantization mxfp4 needs compute capability 8.0, and that of X"),
        (GPT_OSS, {"gpu": "Tesla T4"}, "the quantization mxfp4 needs compute capability 8.0 and Tesla T4 has 7.5"),
        (GPT_OSS, {"gpu": "NVIDIA GeForce RTX 3090"}, ""),
        ("31b-bf16", MODELOPT_FP8 | {"gpu": "NVIDIA A100-SXM4-40GB", "version": "0.26.0"}, "modelopt needs"),
        ("31b-bf16", MODELOPT_FP8 | {"gpu": "NVIDIA A100-SXM4-40GB", "version": "0.27.0"}, ""),
        ("31b-bf16", {"gpu": "NVIDIA A100-SXM4-40GB", "kv_cache": "fp8"}, "and NVIDIA A100-SXM4-40GB has 8.0"),
        # FlashInfer has it (two RTX 3090 with fp8_e4m3, public log 59875247307); Triton runs gpt-oss.
        (QWEN3_VL, {"gpu": "NVIDIA GeForce RTX 3090", "kv_cache": "fp8_e5m2"}, ""),
        (QWEN3_VL, {"gpu": "Tesla T4", "kv_cache": "fp8"}, "FP8 KV cache needs compute capability 8.0"),
        (GPT_OSS, {"gpu": "NVIDIA A100-SXM4-40GB", "kv_cache": "fp8"}, "FP8 KV cache needs compute capability 8.9"),
        ("31b-bf16", W4A8 | {"gpu": "NVIDIA L4"}, "scheme W4A8 FP8 of compressed-tensors needs compute capability 9.0"),
        ("31b-bf16", W4A8 | {"gpu": "NVIDIA H100 PCIe"}, ""),
        ("31b-bf16", W4A8 | {"gpu": "NVIDIA B200"}, "for compute capability 9.0 only, and NVIDIA B200 has 10.0"),
        (INT8, {"gpu": "NVIDIA H100 PCIe"}, ""),
        (INT8, {"gpu": "NVIDIA B200"}, "which fails from compute capability 10.0 on, and NVIDIA B200 has 10.0"),
        (INT8, {"gpu": "NVIDIA B200", "environment": {"VLLM_DISABLED_KERNELS": f"a,{feasibility.CUTLASS_INT8}"}}, ""),
        ("31b-bf16", MXFP4 | {"gpu": "Tesla T4"}, "scheme MXFP4 of compressed-tensors needs compute capability 8.0"),
        ("31b-bf16", MXFP8 | {"version": "0.19.0"}, "vLLM 0.19 does not know the scheme MXFP8"),
        ("31b-bf16", MXFP8 | {"version": "0.20.0"}, ""),
        ("31b-bf16", ORDERED | {"version": "0.29.0"}, ""),
        ("31b-bf16", ORDERED | {"version": "0.30.0"}, "takes no weights in groups that are ordered by activations"),
        ("31b-bf16", ORDERED | {"version": "0.30.0", "quantization": Quantization("gptq", 4)}, ""),
        ("31b-bf16", OF_MODELOPT | {"version": "0.23.0"}, ""),
        ("31b-bf16", OF_MODELOPT | {"version": "0.24.0"}, "vLLM 0.24 refuses MXFP8 of ModelOpt"),
        ("31b-bf16", OF_MODELOPT | {"version": "0.19.0"}, "modelopt_mxfp8 needs compute capability 10.0"),
        # FP4 units are for FP4: integers of 4 bits run through Marlin on Blackwell too.
        (GPT_OSS, AWQ_TP4 | {"gpu": "NVIDIA B200"}, "is 720, which Marlin"),
        ("26b-nvfp4", {"gpu": "NVIDIA B200", "version": "0.19.0", "tensor_parallel_size": 2}, ""),
        # MXFP4 over four GPUs: 2880 / 4 is no multiple of 32, and vLLM pads it, but no integers.
        (GPT_OSS, {"tensor_parallel_size": 4}, ""),
        (GPT_OSS, AWQ_TP4, "is 720, which Marlin"),
        (QWEN3_VL, {"version": "0.21.0", "pipeline_parallel_size": 2}, "start_layer"),
        (QWEN3_VL, {"version": "0.21.0"}, ""),
        (QWEN3_VL, {"version": "0.22.0", "pipeline_parallel_size": 2}, ""),
        ("deepseek-ai/DeepSeek-V3.2", IN_STAGES | {"version": "0.22.0"}, "the indexers of all layers"),
        ("deepseek-ai/DeepSeek-V3.2", IN_STAGES | {"version": "0.23.0"}, ""),
        # Architectures that a release does not have yet, no longer, or had not for a while.
        ("31b-bf16", MINISTRAL | {"version": "0.19.0"}, "does not know Ministral3ForCausalLM; the release that has it"),
        ("31b-bf16", MINISTRAL | {"version": "0.20.0"}, ""),
        ("31b-bf16", BAICHUAN | {"version": "0.24.0"}, ""),
        ("31b-bf16", BAICHUAN | {"version": "0.25.1"}, "vLLM 0.25 does not know Baichuan"),
        ("31b-bf16", BAICHUAN | {"version": "0.25.1"}, "it was removed in 0.25.0"),
        ("31b-bf16", EXAONE | {"version": "0.26.0"}, ""),
        ("31b-bf16", EXAONE | {"version": "0.27.0"}, "the release that has it is 0.32.0"),
        ("31b-bf16", EXAONE | {"version": "0.32.0"}, ""),
        (MIXED, {"version": "0.21.0", "extra_args": ("--spec-tokens=2",)}, "has no --spec-tokens"),
        (MIXED, {"version": "0.22.0", "extra_args": ("--spec-tokens=2",)}, ""),
        ("31b-bf16", LORA | {"version": "0.19.0"}, "takes no adapters for Gemma4ForConditionalGeneration (gemma4_mm"),
        ("31b-bf16", LORA | {"version": "0.20.0"}, ""),
        ("moonshotai/Kimi-K2-Instruct", LORA | {"version": "0.19.0"}, "takes no adapters for DeepseekV3ForCausalLM"),
        ("Qwen/Qwen3-30B-A3B", LORA | EXPERTS | {"version": "0.20.0"}, "with enable_expert_parallel"),
        ("Qwen/Qwen3-30B-A3B", LORA | EXPERTS | {"version": "0.21.0"}, ""),
        ("Qwen/Qwen3-30B-A3B", LORA | EXPERTS | {"fully_sharded_loras": True}, "_verify_ep_fs"),
    ],
)
def test_what_memory_does_not_decide(name: str, more: dict[str, Any], said: str) -> None:
    found = feasibility.findings(case(name, **more))
    assert bool(found) == bool(said) and (not said or any(said in finding.reason for finding in found))
    assert all(finding.fix for finding in found if "architecture" in more)
    assert all((finding.verdict is Verdict.CANNOT_SAY) == (more.get("gpu") == "X") for finding in found)


def test_of_different_gpus_the_weakest_decides() -> None:
    """FP8 KV cache over an L40S and an A10, whichever is first; the slower one sets the speed."""
    gpus = [dataclasses.replace(L4, name=name) for name in ("NVIDIA L40S", "NVIDIA A10", "X")]
    over = dataclasses.replace(case("e4b", kv_cache="fp8"), gpus=gpus, free=[L4.cuda_total_bytes] * 3)
    for slots, said in (((0, 1), "NVIDIA A10 has 8.6"), ((1, 0), "NVIDIA A10 has 8.6"), ((0, 2), "that of X is not")):
        (finding,) = feasibility.findings(dataclasses.replace(over, slots=slots))
        assert said in finding.reason
    assert dataclasses.replace(over, slots=(0, 1)).bandwidth_bytes_per_s == 600e9
    assert dataclasses.replace(over, slots=(0, 2)).bandwidth_bytes_per_s is None


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("31b-nvfp4", {}, "has no FP4 units"),
        ("31b-bf16", {"tensor_parallel_size": 4}, "custom all-reduce is off for 4 GPUs"),
        ("31b-bf16", {"tensor_parallel_size": 2}, ""),
        ("26b-bf16", {}, "all 128 experts are in memory, of which a token reads 8"),
        ("31b-bf16", {"enforce_eager": True}, "warm-up was seen to fail"),
        ("31b-bf16", {"enforce_eager": True, "max_num_seqs": 8}, ""),
        ("31b-bf16", {"extra_args": ("--speculative-config", "{}"), "tool_call_parser": "gemma4"}, "tool calls"),
        ("e4b", {"pipeline_parallel_size": 2}, "per-layer embeddings"),
        ("e2b", {}, ""),
    ],
)
def test_advice_is_for_those_whom_it_concerns(name: str, more: dict[str, Any], said: str) -> None:
    found = [*feasibility.list_advice(case(name, **more))]
    assert bool(found) == bool(said) and (not said or any(said in sentence for sentence in found))
