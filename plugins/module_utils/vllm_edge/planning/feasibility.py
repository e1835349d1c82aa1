# SPDX-License-Identifier: Apache-2.0
"""Rules that decide, apart from memory, whether an engine can run: releases, shapes, GPUs. Also advice, and a warning.

RULES is the table of rules. A rule looks at one engine and yields findings, each with its source. A rule that depends
on the GPU yields nothing if that GPU is not known. The warning is about GPUs of which little is left for requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..engine.config import EngineConfig
from ..engine.state import EngineState
from .checkpoint.model_classes import ADDED, GONE
from .checkpoint.model_facts import ranges
from .checkpoint.quantization import list_modelopt_algorithms
from .contract import Arguments, EnginePlan, Gpu, Model, Verdict
from .memory.kv_cache import supports_flashinfer
from .memory.overhead import MIB, count_encoder_tokens, encode
from .memory.vllm_versions import (
    ALLOW_LONGER,
    ALSO_FLOAT32,
    BFLOAT16_SINCE,
    WITHOUT_FLOAT16,
    Behaviour,
    behaviour,
    count_whole_item_tokens,
    derive_limit,
    encodes,
    is_longer_allowed,
    list_supported,
    max_model_len,
    max_num_batched_tokens,
    max_num_seqs,
)

PIPELINE_FIXED = (0, 21)
"""Gemma 4 with pipeline parallelism: vLLM 0.19.0 and 0.20.0 call `IntermediateTensors.get`
(model_executor/models/gemma4.py:883 and :1320), which that class lacks. 0.21.0 does not (:1313), since
vllm-project/vllm#40786."""
QWEN3_VL_PIPELINE_SINCE = (0, 22)
"""Qwen3-VL with pipeline parallelism: from 0.19 to 0.21 its second stage ends with `AttributeError:
'Qwen3MoeLLMForCausalLM' object has no attribute 'start_layer'` (0.21.0 model_executor/models/qwen3_vl_moe.py:457), the
dense one's likewise."""
INDEXER_PIPELINE_FAILS, INDEXER_PIPELINE_SINCE = (0, 20), (0, 23)
"""`KeyError: 'model.layers.3.self_attn.indexer.wk_weights_proj.weight'` (0.20.0 model_executor/models/deepseek_v2.py,
_try_load_fp8_indexer_wk); 0.23.0 passes over layers of another stage (:765)."""
DRAFTERS_SINCE, SHORT_OPTIONS_SINCE = (0, 21), (0, 22)
"""The first source with model_executor/models/gemma4_mtp.py, vllm-project/vllm#41745; and 0.22.0
engine/arg_utils.py:1463."""
TILE_PADDING_SINCE = (0, 25)
"""vLLM 0.25.1 pads what does not fill Marlin's tiles (quantization/utils/marlin_utils.py:220, :333), 0.21.0 does not.
The releases between were not examined; padding is assumed from 0.25 on."""
MARLIN_INPUT, MARLIN_INPUT_FP4, MARLIN_EXPERTS = 128, 64, 64
"""Divisors that Marlin requires: of the inputs of linear layers with integer weights (0.19.0 marlin_utils.py:27), of
those in FP4, where the kernel alone decides (csrc/quantization/marlin/marlin.cuh:31), and of the intermediate size of
an expert (marlin_utils.py)."""
FP4_UNITS_SINCE = (10, 0)
"""Compute capability (0.33.0 model_executor/kernels/linear/nvfp4/flashinfer.py:204)."""
PACKED_DTYPES = ("U8", "I32", "F4")
"""Dtypes in which safetensors holds weights of fewer than 8 bits."""
INDEXER_ON_12_SINCE = (0, 24)
"""0.24.0 platforms/cuda.py, FLASHINFER_MLA_SPARSE_SM120."""
LEAST_CAPABILITY = (7, 5)
"""What a GPU has at least whose compute capability is not known: vLLM's images with CUDA 13 have nothing for older ones
(0.19.0 and 0.32.0 CMakeLists.txt, CUDA_SUPPORTED_ARCHS)."""
MIN_CAPABILITIES: Mapping[str, tuple[tuple[int, int], str]] = {
    "modelopt": ((8, 9), "modelopt.py"),
    "modelopt_fp4": ((7, 5), "modelopt.py"),
    "modelopt_mixed": ((8, 9), "modelopt.py"),
    "modelopt_mxfp8": ((8, 0), "modelopt.py"),
    "mxfp4": ((8, 0), "mxfp4.py"),
    "fp8": ((7, 5), "fp8.py"),
    "awq": ((7, 5), "auto_awq.py"),
    "compressed-tensors": ((7, 0), "compressed_tensors/compressed_tensors.py"),
    "gptq": ((6, 0), "auto_gptq.py"),
}
"""The compute capability that vLLM asks for by quantization, and the file: 0.33.0 modelopt.py:450 and :773,
mxfp4.py:72, fp8.py:147, auto_awq.py:234, auto_gptq.py:183; the same from 0.19.0 on, except for the next."""
SCHEME_CAPABILITIES = {"MXFP4": (8, 0), "W4A8 FP8": (9, 0)}
"""Of schemes of compressed-tensors (`get_min_capability` in compressed_tensors/schemes, the same from 0.19.0 to
0.33.0); the others need 7.5. FP8 below 8.9 and FP4 below 10.0 are multiplied in 16 bits through Marlin."""
CUTLASS_INT8 = "CutlassInt8ScaledMMLinearKernel"
"""The first of vLLM's kernels for INT8 takes every GPU (0.19.0 to 0.33.0 model_executor/kernels/linear/scaled_mm/
cutlass.py, is_supported), and csrc/.../cutlass/c3x/scaled_mm_helper.hpp refuses INT8 from SM 100 on."""
SCHEMES_SINCE = {"MXFP8": (0, 20)}
MODELOPT_FP8_ON_AMPERE_SINCE = (0, 27)
"""0.26.0 modelopt.py:413 asks for 8.9, 0.27.0 modelopt.py:408 for 8.0."""
ORDERED_UNTIL = (0, 30)
MODELOPT_MXFP8_FAILS = (0, 24)
MODELOPT_MXFP8_ON_AMPERE_SINCE = (0, 20)
"""0.19.0 modelopt.py:1503 asks for 10.0."""
LORA_SINCE: Mapping[str, tuple[tuple[int, int], str]] = {
    "Gemma4ForConditionalGeneration": ((0, 20), "gemma4_mm.py"),
    "LlavaNextForConditionalGeneration": ((0, 29), "llava_next.py"),
}
"""The first release whose class of the architecture takes adapters (SupportsLoRA); the other ones do from 0.19 on."""
LORA_WITH_EXPERTS_SINCE, LORA_WITH_QUERY_RANK_SINCE = (0, 21), (0, 20)
"""Adapters with expert parallelism (0.20.0 lora/layers/fused_moe.py:35), and of DeepSeek whose queries are compressed:
0.19.0 ends with `Module ... fused_qkv_a_proj must be a BaseLayerWithLoRA instance` (lora/model_manager.py)."""
MODELOPT_MIXED_ON_TURING_SINCE = (0, 24)
W4A16_NVFP4_SINCE, W4A16_NVFP4_MIXED_SINCE, MIXED_HEAD_SINCE = (0, 21), (0, 22), (0, 23)
"""Of ModelOpt: QUANT_ALGOS, and get_quant_method of ModelOptMixedPrecisionConfig (modelopt.py)."""
STATE_CAPABILITY = "the GPU's compute capability (gpu_compute_capability, --compute-capability)"
FEW_ENOUGH_REQUESTS = 2.0
LONG_CONTEXT_TOKENS = 40_000
MANY_SEQUENCES = 128


@dataclass(frozen=True)
class Engine:
    """An engine of the inventory in the planner's types, and the GPUs as it finds them when it starts."""

    name: str
    arguments: Arguments
    slots: tuple[int, ...]
    model: Model
    extra_args: tuple[str, ...]
    tool_call_parser: str
    environment: Mapping[str, Any]
    """extra_env."""
    observed: Mapping[str, int]
    kv_cache_dtype: str
    margin_bytes: int
    others: frozenset[int]
    """Slots of the profile's other engines."""
    gpus: Sequence[Gpu]
    """All GPUs of the host, by slot."""
    free: Sequence[int]
    """Bytes that are free on each GPU, by slot."""
    release: Behaviour

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(slot, number // self.arguments.tensor_parallel_size) for number, slot in enumerate(self.slots)]

    @property
    def vllm(self) -> tuple[int, int]:
        return self.release.number

    @property
    def max_num_seqs(self) -> int:
        return max_num_seqs(self.model, self.arguments, self.release.version)

    @property
    def max_num_batched_tokens(self) -> int:
        return max_num_batched_tokens(self.model, self.arguments, self.release.version)

    @property
    def max_model_len(self) -> int:
        return max_model_len(self.model, self.arguments)

    @property
    def gpu(self) -> Gpu:
        """Of the engine's GPUs the one that can do least, and before all one of which that is not known."""
        return find_weakest(self.gpus[slot] for slot in self.slots)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Of its slowest GPU; None if that of one of them is not known."""
        found = [self.gpus[slot].bandwidth_bytes_per_s for slot in self.slots]
        return min(filter(None, found)) if all(found) else None

    @property
    def has_nvlink(self) -> bool:
        models = [self.gpus[slot].model for slot in self.slots]
        return len(models) > 1 and all(model is not None and model.nvlink for model in models)


def find_weakest(gpus: Iterable[Gpu]) -> Gpu:
    return min(gpus, key=lambda gpu: gpu.compute_capability or (0, 0))


@dataclass(frozen=True)
class Finding:
    reason: str
    fix: str
    verdict: Verdict = Verdict.UNSUPPORTED_ENGINE
    after_load: bool = False
    """True if vLLM finds out only after it has loaded the weights; an engine that does not fit fails before that."""


Rule = Callable[[Engine], Iterator[Finding]]


def _require(engine: Engine, since: tuple[int, int], lacks: str, otherwise: str = "") -> Iterator[Finding]:
    """Yield what an earlier release than the first that can do it lacks, and another way out than a newer one."""
    if engine.vllm < since:
        fix = f"vllm_image_base with vLLM {_said(since)}.0 or newer{otherwise}"
        yield Finding(f"vLLM {_said(engine.vllm)} {lacks}", fix)


def findings(engine: Engine) -> list[Finding]:
    """Return what keeps the engine from running, in the order in which vLLM finds out; last what is not known."""
    order = list(Verdict)
    found = [finding for rule in RULES for finding in rule(engine)]
    unknown = Verdict.CANNOT_SAY
    return sorted(found, key=lambda each: (each.verdict is unknown, each.after_load, order.index(each.verdict)))


def _check_model_class(engine: Engine) -> Iterator[Finding]:
    name = engine.model.architecture
    if engine.model.family == "eagle3":
        names = name.endswith("Speculator")  # 0.33.0 transformers_utils/config.py, maybe_override_with_speculators
        yield Finding(
            f"{name} drafts tokens for another model"
            + (", which vLLM then serves, and which the plan does not look up" if names else ", and answers nothing"),
            "the model that it drafts for, with this one as --speculative-config.model",
            Verdict.CANNOT_SAY if names else Verdict.UNSUPPORTED_ENGINE,
        )
    events = sorted(
        (behaviour(release).number, has)
        for has, table in ((True, ADDED), (False, GONE))
        for release, names in table.items()
        if name in names.split()
    )
    before, after = ([each for each in events if (each[0] <= engine.vllm) is past] for past in (True, False))
    if before[-1][1] if before else not after or not after[0][1]:
        return
    came, went = _said(after[0][0]) if after else "", _said(before[-1][0]) if before else ""
    fix = f"vllm_image_base with vLLM {came}.0 or newer" if came else f"vllm_image_base with vLLM before {went}.0"
    told = f"the release that has it is {came}.0" if came else f"it was removed in {went}.0"
    yield Finding(
        f"vLLM {_said(engine.vllm)} does not know {name}; {told} (vLLM model_executor/models/registry.py)",
        fix,
    )


def _check_modelopt(engine: Engine) -> Iterator[Finding]:
    method, facts = engine.model.quantization.method, engine.model.facts
    if not method.startswith("modelopt_"):
        return
    mixed, needs = method == "modelopt_mixed", []
    if "W4A16_NVFP4" in list_modelopt_algorithms(facts.quantization):
        needs.append((W4A16_NVFP4_MIXED_SINCE if mixed else W4A16_NVFP4_SINCE, "W4A16_NVFP4"))
    if mixed and any("lm_head.weight_scale" in tensor.name for tensor in facts.tensors):
        needs.append((MIXED_HEAD_SINCE, "MIXED_PRECISION with a quantized lm_head"))
    for since, what in needs:
        file = "vLLM model_executor/layers/quantization/modelopt.py"
        yield from _require(
            engine, since, f"does not know ModelOpt's {what}, which came with {_said(since)}.0 ({file})"
        )


def _check_pipeline(engine: Engine) -> Iterator[Finding]:
    stages, family = engine.arguments.pipeline_parallel_size, engine.model.family
    fixed, name, why = (0, 0), "", ""
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        fixed, name = QWEN3_VL_PIPELINE_SINCE, "Qwen3-VL"
        why = f"whose {family}.py asks its language model for start_layer, which that lacks"
    elif any("indexer.wk.weight_scale_inv" in tensor.name for tensor in engine.model.facts.tensors):
        fixed, name = INDEXER_PIPELINE_SINCE if engine.vllm >= INDEXER_PIPELINE_FAILS else fixed, "DeepSeek V3.2 in FP8"
        why = "which looks on each stage for the indexers of all layers (deepseek_v2.py, _try_load_fp8_indexer_wk)"
    elif family == "gemma4":
        fixed, name = PIPELINE_FIXED, "Gemma 4"
        why = "whose IntermediateTensors lacks what gemma4.py calls (vllm-project/vllm#40786)"
    if stages > 1 and engine.vllm < fixed:
        yield Finding(
            f"{name} over pipeline_parallel_size {stages} crashes in vLLM {_said(engine.vllm)}, {why}",
            f"vllm_image_base with vLLM {_said(fixed)}.0 or newer, or tensor_parallel_size in place of "
            f"pipeline_parallel_size",
            after_load=family == "gemma4",
        )


def _check_drafters(engine: Engine) -> Iterator[Finding]:
    if engine.model.family == "gemma4" and _is_speculative(engine) and engine.vllm < DRAFTERS_SINCE:
        yield Finding(
            f"vLLM {_said(engine.vllm)} has no drafters for Gemma 4; they came with 0.21.0 (vllm-project/vllm#41745)",
            "extra_args without --speculative-config, or vllm_image_base with vLLM 0.21.0 or newer",
        )
    short = next((word for word in engine.extra_args if word.startswith("--spec-")), "")
    if short and engine.vllm < SHORT_OPTIONS_SINCE:
        yield Finding(
            f"vLLM {_said(engine.vllm)} has no {short.partition('=')[0]}, which came with 0.22.0 (vLLM "
            f"engine/arg_utils.py)",
            "--speculative-config in its place",
        )


def _check_lora(engine: Engine) -> Iterator[Finding]:
    model, arguments, release = engine.model, engine.arguments, engine.vllm
    since, where = LORA_SINCE.get(model.architecture, ((0, 0), ""))
    if model.latent and any(".q_a_proj." in part.tensor.name for part in model.components):
        since, where = LORA_WITH_QUERY_RANK_SINCE, "deepseek_v2.py, fused_qkv_a_proj"
    whole = arguments.enable_expert_parallel and model.experts
    if whole and max(since, release) < LORA_WITH_EXPERTS_SINCE:
        since, where = LORA_WITH_EXPERTS_SINCE, "fused_moe, with enable_expert_parallel"
    if arguments.enable_lora:
        lacks = f"takes no adapters for {model.architecture} ({where})"
        yield from _require(engine, since, lacks, ", or extra_args without --enable-lora")
    if arguments.enable_lora and whole and arguments.fully_sharded_loras:
        yield Finding(
            "adapters of experts are not divided with fully_sharded_loras and enable_expert_parallel together (vLLM "
            "lora/layers/fused_moe.py, _verify_ep_fs)",
            "extra_args without --fully-sharded-loras",
        )


def _check_max_model_len(engine: Engine) -> Iterator[Finding]:
    limit, wanted = derive_limit(engine.model, engine.vllm), engine.arguments.max_model_len or 0
    if wanted > limit and not is_longer_allowed(engine.environment):
        yield Finding(
            f"max_model_len {wanted:,} is more than the {limit:,} tokens that vLLM derives from "
            f"max_position_embeddings {engine.model.max_position_embeddings:,} of the model and its RoPE (vLLM "
            f"config/model.py, _get_and_verify_max_len)",
            f"max_model_len: {limit}",
        )


def _check_batch(engine: Engine) -> Iterator[Finding]:
    arguments, sequences = engine.arguments, engine.max_num_seqs
    item = count_whole_item_tokens(engine.model, arguments, engine.release.version)
    least, why = max(
        (sequences, f"max_num_seqs {sequences:,} (vLLM config/scheduler.py, verify_max_model_len)"),
        (item, f"the {item:,} tokens of a video, which has to be whole (vLLM v1/core/encoder_cache_manager.py)"),
    )
    if arguments.max_num_batched_tokens is not None and arguments.max_num_batched_tokens < least:
        yield Finding(
            f"max_num_batched_tokens {arguments.max_num_batched_tokens:,} is less than {why}",
            f"max_num_batched_tokens: {least}",
        )


def _check_capability(engine: Engine) -> Iterator[Finding]:
    """Yield what the GPU cannot compute; if its compute capability is not known, what some GPUs cannot."""
    has, name = engine.gpu.compute_capability, engine.gpu.name
    for what, needs, source, fix in _list_needs(engine):
        if has is None and needs > LEAST_CAPABILITY:
            yield Finding(
                f"{what} needs compute capability {_said(needs)}, and that of {name or 'the GPU'} is not known "
                f"({source})",
                f"{STATE_CAPABILITY}{f', or {fix}' if fix else ''}",
                Verdict.CANNOT_SAY,
            )
        if has is not None and has < needs:
            yield Finding(f"{what} needs compute capability {_said(needs)} and {name} has {_said(has)} ({source})", fix)


def _list_needs(engine: Engine) -> Iterator[tuple[str, tuple[int, int], str, str]]:
    """Yield what needs which compute capability, where that is written, and what does not need it."""
    model, method, has = engine.model, engine.model.quantization.method, engine.gpu.compute_capability
    if method in MIN_CAPABILITIES:
        least, file = MIN_CAPABILITIES[method]
        least = (10, 0) if method == "modelopt_mxfp8" and engine.vllm < MODELOPT_MXFP8_ON_AMPERE_SINCE else least
        if method == "modelopt_mixed" and engine.vllm >= MODELOPT_MIXED_ON_TURING_SINCE:
            least = (7, 5)
        least = (8, 0) if method == "modelopt" and engine.vllm >= MODELOPT_FP8_ON_AMPERE_SINCE else least
        source = f"vLLM model_executor/layers/quantization/{file}, get_min_capability"
        yield f"the quantization {method}", least, source, ""
    if model.latent and model.latent.index_bytes:
        yield "attention with an indexer", (9, 0), "vLLM platforms/cuda.py, FLASHMLA_SPARSE", ""
    for scheme in sorted(model.quantization.schemes):
        needs = SCHEME_CAPABILITIES.get(scheme, LEAST_CAPABILITY)
        yield f"the scheme {scheme} of {method}", needs, "vLLM quantization/compressed_tensors/schemes", ""
    source = "vLLM platforms/cuda.py, check_if_supports_dtype"
    other_dtype_is_alike = engine.arguments.dtype == "auto" and model.family not in WITHOUT_FLOAT16
    if model.dtype == "bfloat16" and not (has is None and other_dtype_is_alike):
        yield "bfloat16", BFLOAT16_SINCE, source, _suggest_dtype(engine, has or LEAST_CAPABILITY)
    if engine.kv_cache_dtype.startswith("fp8"):
        # vLLM has no KV cache named float32: that is `auto`, unless the checkpoint makes FP8 of it.
        other = model.dtype if model.dtype != "float32" else "auto"
        least, source = (8, 9), "Triton has no fp8e4nv below it"
        if supports_flashinfer(model) and engine.arguments.attention_backend.upper() in ("AUTO", "FLASHINFER"):
            least, source = (8, 0), "vLLM v1/attention/backends/flashinfer.py, supports_compute_capability"
        yield "an FP8 KV cache", least, source, f"kv_cache_dtype: {other}"


def _check_indexer(engine: Engine) -> Iterator[Finding]:
    """Yield why no attention backend of the GPU takes a model with an indexer (platforms/cuda.py)."""
    has, latent = engine.gpu.compute_capability, engine.model.latent
    if has is None or latent is None or not latent.index_bytes:
        return
    if has[0] == 12:
        what = f"attention with an indexer for compute capability {_said(has)}, which {engine.gpu.name} has"
        yield from _require(engine, INDEXER_ON_12_SINCE, f"has no {what} (platforms/cuda.py)")
    if has[0] == 9 and engine.arguments.kv_cache_dtype == "fp8_e4m3":
        yield Finding("attention with an indexer has no KV cache of dtype fp8_e4m3 on Hopper", "kv_cache_dtype: fp8")


def _check_schemes(engine: Engine) -> Iterator[Finding]:
    has, said, found = engine.gpu.compute_capability, engine.model.facts.quantization, engine.model.quantization
    groups = said["config_groups"].values() if found.schemes and "config_groups" in said else ()
    orders = [(group.get("weights") or {}).get("actorder") for group in groups]
    orders += ["group"] if found.method == "gptq" and found.group_size and said.get("desc_act") else []
    if engine.vllm >= ORDERED_UNTIL and not {"group", "dynamic"}.isdisjoint(orders):
        yield Finding(
            f"vLLM {_said(engine.vllm)} takes no weights in groups that are ordered by activations (desc_act, "
            f"actorder; vLLM quantization/utils/gptq_utils.py, compressed_tensors.py)",
            f"vllm_image_base with vLLM before {_said(ORDERED_UNTIL)}.0",
        )
    if found.method == "modelopt_mxfp8" and engine.vllm == MODELOPT_MXFP8_FAILS:
        yield Finding(
            f"vLLM {_said(engine.vllm)} refuses MXFP8 of ModelOpt: 'Quantization method mxfp8 is an override' (vLLM "
            f"config/model.py:1029, whose list of overrides lacks it)",
            "vllm_image_base with vLLM 0.23.0, or with 0.25.0 or newer",
        )
    for scheme in sorted(found.schemes):
        lacks = f"does not know the scheme {scheme} of compressed-tensors (compressed_tensors/compressed_tensors.py)"
        yield from _require(engine, SCHEMES_SINCE.get(scheme, engine.vllm), lacks)
        if scheme == "W4A8 FP8" and has and has > SCHEME_CAPABILITIES[scheme]:
            yield Finding(
                f"the scheme {scheme} of compressed-tensors has kernels for compute capability 9.0 only, and "
                f"{engine.gpu.name} has {_said(has)} (vLLM compressed_tensors.py, _is_fp8_w4a8_sm90)",
                "",
            )
    linear = any(part.tensor.dtype == "I8" and part.kind != "experts" for part in engine.model.components)
    allowed = CUTLASS_INT8 not in str(engine.environment.get("VLLM_DISABLED_KERNELS", "")).split(",")
    if "W8A8 INT8" in found.schemes and linear and allowed and has and has >= FP4_UNITS_SINCE:
        yield Finding(
            f"vLLM multiplies INT8 with {CUTLASS_INT8}, which fails from compute capability 10.0 on, and "
            f"{engine.gpu.name} has {_said(has)} (vllm-project/vllm#54311); without it vLLM takes Triton's",
            f"extra_env: {{VLLM_DISABLED_KERNELS: {CUTLASS_INT8}}}",
            after_load=True,
        )


def _check_dtype(engine: Engine) -> Iterator[Finding]:
    dtype, method = engine.model.dtype, engine.model.quantization.method
    if dtype == "float16" and engine.model.family in WITHOUT_FLOAT16:
        yield Finding(
            f"vLLM refuses dtype float16 for {engine.model.family}, which is numerically unstable in it (vLLM "
            f"config/model.py, _check_valid_dtype)",
            _suggest_dtype(engine, engine.gpu.compute_capability),
        )
    if dtype == "float32" and method not in ALSO_FLOAT32:
        yield Finding(
            f"the quantization {method} does not compute in dtype float32 (vLLM config/vllm.py, "
            f"_get_quantization_config)",
            _suggest_dtype(engine, engine.gpu.compute_capability),
        )


def _suggest_dtype(engine: Engine, capability: tuple[int, int] | None) -> str:
    supported = list_supported(engine.model, capability)
    return f"dtype: {supported[0]}" if supported else ""


def _check_divisibility(engine: Engine) -> Iterator[Finding]:
    size, model = engine.arguments.tensor_parallel_size, engine.model
    kv_heads = sorted({layer.kv_heads for layer in model.layers})
    uneven = [heads for heads in kv_heads if heads % size and size % heads]
    whole_experts, config = engine.arguments.enable_expert_parallel, model.facts.config if model.hybrid else {}
    groups = config.get("n_groups") or 0  # a single one is copied to each rank
    parts = [
        ("query heads", (model.query_heads,)),
        ("intermediate size", model.intermediate_sizes),
        ("intermediate size of an expert", (model.expert_intermediate_size,) if not whole_experts else ()),
        ("number of Mamba heads", (config.get("mamba_num_heads") or 0,)),
        ("number of Mamba groups", (groups if groups > 1 else 0,)),
    ]
    for what, values in parts:
        for value in values:
            if value % size:
                yield _build_misfit(
                    engine, f"{what} {value} is not divisible by tensor_parallel_size {size}", "config/model.py"
                )
    if uneven:
        yield _build_misfit(
            engine,
            f"KV heads {uneven[0]} and tensor_parallel_size {size}: neither divides the other",
            "model_executor/models, the assertion in each attention",
        )


# Of each kind of layer: what it is called, and the function that checks the shape.
MARLIN_LINEAR = ("Marlin", "model_executor/layers/quantization/utils/marlin_utils.py, check_marlin_supports_shape")
MARLIN_MOE = (
    "Marlin's MoE",
    "model_executor/layers/quantization/utils/marlin_utils.py, check_moe_marlin_supports_layer; "
    "vllm-project/vllm#39595",
)


def _check_marlin(engine: Engine) -> Iterator[Finding]:
    """Yield findings for 4-bit weights, which run through Marlin: FP4 only on GPUs without FP4 units."""
    quantization, size = engine.model.quantization, engine.arguments.tensor_parallel_size
    has = engine.gpu.compute_capability
    # MXFP4 is padded to what its kernel divides (fused_moe/oracle/mxfp4.py).
    if (
        quantization.weight_bits != 4
        or quantization.method == "mxfp4"
        or (has and has >= FP4_UNITS_SINCE and _is_fp4(engine.model))
    ):
        return
    unknown = has is None and _is_fp4(engine.model)
    group = max(quantization.group_size or 1, 1)
    pads = engine.vllm >= TILE_PADDING_SINCE
    for what, whole, tile, (kernel, where) in _list_inputs(engine):
        part, rest = divmod(whole, size)
        if rest == 0 and (part % group or (not pads and part % tile)):
            rule = f"groups of {group}" if pads else f"{max(tile, group)}"
            reason = f"{what} over tensor_parallel_size {size} is {part}, which {kernel} cannot divide by {rule}"
            found = _build_misfit(engine, reason, where)
            if unknown:
                reason = f"{found.reason}, which only a GPU of compute capability {_said(FP4_UNITS_SINCE)} does without"
                found = Finding(reason, STATE_CAPABILITY, Verdict.CANNOT_SAY)
            yield found


def _list_inputs(engine: Engine) -> Iterator[tuple[str, int, int, tuple[str, str]]]:
    """Yield name, size, tile and kernel of the inputs of packed layers that tensor parallelism divides."""
    model = engine.model
    packed = {part.kind for part in model.components if part.tensor.dtype in PACKED_DTYPES}
    tile = MARLIN_INPUT_FP4 if _is_fp4(model) else MARLIN_INPUT
    if "mlp" in packed:
        for size in model.intermediate_sizes:
            yield f"intermediate size {size}", size, tile, MARLIN_LINEAR
    if "attention" in packed:
        for size in sorted({layer.head_size * model.query_heads for layer in model.layers}):
            yield f"size of all query heads {size}", size, tile, MARLIN_LINEAR
    if "experts" in packed and not engine.arguments.enable_expert_parallel:
        size = model.expert_intermediate_size
        yield f"intermediate size {size} of an expert", size, MARLIN_EXPERTS, MARLIN_MOE


def _build_misfit(engine: Engine, reason: str, where: str) -> Finding:
    return Finding(f"{reason} (vLLM {_said(engine.vllm)} {where})", "", Verdict.UNSUPPORTED_SHAPE)


RULES: Sequence[Rule] = (
    _check_model_class,
    _check_modelopt,
    _check_pipeline,
    _check_drafters,
    _check_lora,
    _check_max_model_len,
    _check_batch,
    _check_dtype,
    _check_capability,
    _check_indexer,
    _check_schemes,
    _check_divisibility,
    _check_marlin,
)


def list_advice(engine: Engine) -> Iterator[str]:
    """Yield what could be better, or what to know of the engine, apart from its memory."""
    model, arguments, gpu = engine.model, engine.arguments, engine.gpu
    has, size, limit = gpu.compute_capability, arguments.tensor_parallel_size, derive_limit(model, engine.vllm)
    if model.per_layer_embedding_size and arguments.pipeline_parallel_size > 1:
        yield (
            "a pipeline of a model with per-layer embeddings was questioned in the review of vllm-project/vllm#40786; "
            "try it before you rely on it"
        )
    items = count_encoder_tokens(model, arguments, engine.max_model_len, engine.max_num_batched_tokens)
    if items and not encodes(model, arguments, engine.release.version):
        yield (
            f"vLLM {_said(engine.vllm)} does not measure the encoder of this model: images and videos of the largest "
            f"size take up to {encode(model, arguments, items)[0].bytes // MIB:,} MiB outside of its share; leave them "
            f"free, or make them smaller with --mm-processor-kwargs.max_pixels"
        )
    if (arguments.max_model_len or 0) > limit:
        yield (
            f"{ALLOW_LONGER} lets requests be longer than the {limit:,} tokens of the model; what lies beyond them may "
            f"come out as noise, or end the engine (vLLM config/model.py, _get_and_verify_max_len)"
        )
    if has is None:
        yield (
            f"the compute capability of {gpu.name or 'the GPU'} is not known, so it counts as one that computes in "
            f"bfloat16, and whether it has FP4 units is left open; set {STATE_CAPABILITY}"
        )
    if said := describe_unconfirmed(gpu):
        yield said
    if has and has < FP4_UNITS_SINCE and _is_fp4(model):
        yield (
            f"{gpu.name} has no FP4 units: the weights stay in FP4 and are multiplied in bf16 through Marlin, "
            f"which saves memory and reading, no arithmetic (vLLM quantization/utils/marlin_utils_fp4.py)"
        )
    if size > 2 and gpu.model and not gpu.model.nvlink:
        yield (
            f"vLLM's custom all-reduce is off for {size} GPUs without NVLink, NCCL takes its place (vLLM 0.19.0 "
            f"distributed/device_communicators/custom_all_reduce.py:153)"
        )
    if arguments.enforce_eager and model.experts:
        yield "enforce_eager costs a mixture of experts most of its speed: 18 instead of 127 tok/s on an RTX 5090"
    fills = arguments.kv_cache_memory_bytes is None and (arguments.max_num_seqs or 256) >= MANY_SEQUENCES
    if arguments.enforce_eager and engine.vllm >= (0, 20) and fills:
        yield (
            "enforce_eager leaves nothing out of the budget for graphs since vLLM 0.20, so the KV cache takes it all, "
            "and the sampler's warm-up was seen to fail on an L4 with 256 sequences; set max_num_seqs to what is needed"
        )
    if _is_speculative(engine) and engine.tool_call_parser:
        yield "see first that tool calls come through speculative decoding whole"
    if model.experts:
        yield (
            f"all {model.experts} experts are in memory, of which a token reads {model.experts_per_token}: "
            f"plan on the whole size"
        )


def describe_unconfirmed(gpu: Gpu) -> str:
    """Return a sentence on the bandwidth of a card for which no source was found; empty for others."""
    if gpu.model is None or gpu.model.bandwidth_is_confirmed or gpu.stated_bandwidth_bytes_per_s:
        return ""
    return (
        f"the memory bandwidth of {gpu.name}, {gpu.model.bandwidth_bytes_per_s / 1e9:,.0f} GB/s, is unconfirmed, and "
        f"so is its speed; its data sheet has it (gpu_bandwidth_gb_s, --gpu-bandwidth)"
    )


def advise_on_context(max_model_len: int, max_concurrency: float) -> list[str]:
    """Return advice about the length of a request.

    The rule "at most 30,000 to 40,000 tokens on GPUs under 40 GB", which is found elsewhere, is not used: memory
    decides, and a sliding window keeps most layers small.
    """
    if max_concurrency < FEW_ENOUGH_REQUESTS:
        return [
            f"the KV cache holds {max_concurrency:.1f} requests of max_model_len {max_model_len:,}: a second one of "
            f"that length waits; lower max_model_len, or expect it"
        ]
    if max_model_len > LONG_CONTEXT_TOKENS:
        return [
            f"memory holds {max_concurrency:.1f} requests of {max_model_len:,} tokens, but a prompt of that length "
            f"takes its time before the first token; measure it"
        ]
    return []


def _is_speculative(engine: Engine) -> bool:
    return any(re.match(r"(--speculative[-_]config|-sc)\b", item) for item in engine.extra_args)


def _is_fp4(model: Model) -> bool:
    return (model.quantization.method.startswith("modelopt_") and model.quantization.weight_bits == 4) or (
        not model.quantization.schemes.isdisjoint(("NVFP4", "MXFP4"))
    )


def _said(numbers: tuple[int, int]) -> str:
    return f"{numbers[0]}.{numbers[1]}"


THRESHOLD_PERCENT = 85
"""The default of memory_threshold_percent: how much of the memory that CUDA can use a GPU may hold besides KV caches,
in weights, activations, CUDA context and graphs, and in measurements the memory of others. KV caches are left out
because vLLM takes nearly all of the rest for them when it starts: the memory in use is always about the same."""


def check_threshold(percent: int) -> int:
    """Return memory_threshold_percent. Raises ValueError if it is not from 1 to 100."""
    if not 1 <= percent <= 100:
        raise ValueError(
            f"memory_threshold_percent: {percent} is no share of a GPU's memory in percent; write 1 to 100, where 100 "
            f"never warns."
        )
    return percent


def warn_of_plan(engines: Iterable[EnginePlan], gpus: Sequence[Gpu], experts: Sequence[str], percent: int) -> list[str]:
    """Return a sentence for GPUs on which the planned engines hold more than the threshold besides KV caches; GPUs that
    hold the same share one. An engine that does not start holds nothing.

    `experts` are the names of the engines whose model is a mixture of experts.
    """
    held, mixtures, found = [0] * len(gpus), set(), []
    for engine in engines:
        for part in engine.gpus if engine.verdict in (Verdict.FITS, Verdict.CANNOT_SAY) else ():
            if part.total_bytes > gpus[part.slot].cuda_total_bytes:
                continue
            held[part.slot] += part.total_bytes - part.kv_cache_bytes
            mixtures |= {part.slot} if engine.engine in experts else set()
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for slot, size in enumerate(held):
        alike.setdefault((size, gpus[slot].cuda_total_bytes, slot in mixtures), []).append(slot)
    for (size, total, mixture), slots in alike.items():
        verb = "will each hold" if len(slots) > 1 else "will hold"
        words = _describe(f"GPU {ranges(slots)}", size / MIB, total / MIB, percent, verb)
        if words and mixture:
            words += (
                " A mixture of experts keeps every expert in memory, whatever a token reads: fewer bits or more GPUs "
                "make it smaller, a shorter context does not."
            )
        found += [words] if words else []
    return found


def warn_of_measurement(
    configs: Iterable[EngineConfig], states: Mapping[str, EngineState | None], gpus: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Return one sentence for each GPU that holds more than the threshold besides the KV caches of its engines.

    The size of a KV cache is what vLLM logged, otherwise what the plan gave it; a GPU with an engine of which neither
    is known is not judged. The threshold is the one of the engines' plans; `gpus` are rows of the VRAM evaluation.
    """
    caches: dict[str, float | None] = {}
    percent = THRESHOLD_PERCENT
    for config in configs:
        percent = int((config.plan or {}).get("memory_threshold_percent", percent))
        for uuid, cache in zip(config.gpus, _list_caches_mib(config, states.get(config.engine)), strict=True):
            before = caches.get(uuid, 0.0)
            caches[uuid] = None if before is None or cache is None else before + cache
    found = []
    for gpu in gpus:
        cache, total = caches.get(str(gpu["uuid"])), float(gpu["total_mib"]) - float(gpu.get("reserved_mib") or 0)
        if cache is not None:
            found.append(_describe(f"GPU {gpu['index']}", float(gpu["used_mib"]) - cache, total, percent, "holds"))
    return [words for words in found if words]


def _list_caches_mib(config: EngineConfig, state: EngineState | None) -> list[float | None]:
    """Return the KV cache of an engine on each of its GPUs; None if it is not known."""
    logged = state.log_facts.get("kv_cache_gib") if state and state.input_hash == config.input_hash else None
    if logged is not None:
        return [float(logged) * 1024] * len(config.gpus)
    planned = [float(part["kv_cache_mib"]) for part in (config.plan or {}).get("gpus") or []]
    return [*planned] if len(planned) == len(config.gpus) else [None] * len(config.gpus)


def _describe(gpu: str, held_mib: float, total_mib: float, percent: int, verb: str) -> str:
    if total_mib <= 0 or held_mib * 100 <= percent * total_mib:
        return ""
    return (
        f"{gpu} {verb} {held_mib:,.0f} of {total_mib:,.0f} MiB ({held_mib * 100 / total_mib:.0f} %) besides KV caches, "
        f"more than memory_threshold_percent {percent}: little is left for requests."
    )
