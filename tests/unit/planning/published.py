# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints: config.json as far as it matters, and the tensors of their safetensors files.

Names and shapes are derived from config.json here, independently of the planner; `tests/judge` gives them to vLLM's own
load_weights, and PARAMETERS are the hub's counts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Facts, Model
from ansible.module_utils.vllm_edge.planning.memory import kv_cache, weights

Header = tuple[str, str, tuple[int, ...]]


SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
SIZES += ("vocab_size", "max_position_embeddings")
TOWER_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
TOWER_SIZES += ("image_size", "patch_size")
EXPERT_SIZES = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size")


def config(architecture: str, model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """config.json; `sizes` are those of SIZES."""
    found = dict(zip(SIZES, sizes, strict=True))
    return {**found, "architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16", **more}


def _tower(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, **dict(zip(TOWER_SIZES, sizes, strict=True)), **more}


def _multimodal(name: str, model_type: str, text: object, vision: object, **more: Any) -> dict[str, Any]:
    architectures = [f"{name}ForConditionalGeneration"]
    return {
        "architectures": architectures,
        "model_type": model_type,
        "text_config": text,
        "vision_config": vision,
    } | more


def _qwen2(sizes: tuple[int, ...], windowed: int, tied: bool = False) -> dict[str, Any]:
    window = {"sliding_window": 131072, "max_window_layers": windowed, "use_sliding_window": False}
    return config("Qwen2ForCausalLM", "qwen2", sizes, tie_word_embeddings=tied, **window)


def _phi3(sizes: tuple[int, ...], window: int | None, **more: Any) -> dict[str, Any]:
    return config("Phi3ForCausalLM", "phi3", sizes, sliding_window=window, **more)


def _granite(sizes: tuple[int, ...]) -> dict[str, Any]:
    scales = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0}
    return config("GraniteForCausalLM", "granite", sizes, tie_word_embeddings=True, residual_multiplier=0.22, **scales)


def _glm4(sizes: tuple[int, ...], bias: bool) -> dict[str, Any]:
    more = {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": bias, "rope_theta": 10000.0}
    return config("Glm4ForCausalLM", "glm4", sizes, tie_word_embeddings=False, **more)


def _exaone4(sizes: tuple[int, ...], tied: bool, head: int, window: int | None, pattern: str | None) -> dict[str, Any]:
    full = 4 if window else 1
    types = ["sliding_attention" if (index + 1) % full else "full_attention" for index in range(sizes[0])]
    more = {"layer_types": types, "sliding_window": window, "sliding_window_pattern": pattern, "head_dim": head}
    return config("Exaone4ForCausalLM", "exaone4", sizes, tie_word_embeddings=tied, **more)


def _glm4_moe(sizes: tuple[int, ...], experts: tuple[int, ...], dense: int, **more: Any) -> dict[str, Any]:
    """`experts` as in _deepseek."""
    found: dict[str, Any] = dict(zip(EXPERT_SIZES, experts, strict=True)) | {
        "first_k_dense_replace": dense,
        "n_group": 1,
    }
    found |= {"topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    found |= {"num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rope_theta": 1000000.0}
    lite = "kv_lora_rank" in more
    name, kind = ("Glm4MoeLiteForCausalLM", "glm4_moe_lite") if lite else ("Glm4MoeForCausalLM", "glm4_moe")
    attention = {} if lite else {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
    return config(name, kind, sizes, **found | attention | more)


def qwen3_vl(
    sizes: tuple[int, ...], tower: Mapping[str, Any], tied: bool, experts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    name, kind = ("Qwen3VLMoe", "qwen3_vl_moe") if experts else ("Qwen3VL", "qwen3_vl")
    rope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    text = {"head_dim": 128, "rope_scaling": rope, **(experts or {"tie_word_embeddings": tied})}
    text = config(f"{name}ForConditionalGeneration", f"{kind}_text", sizes, **text)
    vision = {**QWEN_TOWER, "model_type": kind, "out_hidden_size": sizes[1], **tower}
    return _multimodal(name, kind, text, vision, tie_word_embeddings=tied, **QWEN_TOKENS)


def _qwen2_5_vl(sizes: tuple[int, ...], tied: bool) -> dict[str, Any]:
    """Like the published files, with the sizes of the language model at the top."""
    more: dict[str, Any] = {"sliding_window": 32768, "max_window_layers": 70, "use_sliding_window": False}
    more |= {"tie_word_embeddings": tied, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    more |= QWEN_TOKENS | {"vision_config": {**QWEN2_5_TOWER, "out_hidden_size": sizes[1]}, "rms_norm_eps": 1e-6}
    return config("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", sizes, **more)


def _qwen2_moe(sizes: tuple[int, ...], experts: tuple[int, ...]) -> dict[str, Any]:
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    more = dict(zip(keys, experts, strict=True)) | {"decoder_sparse_step": 1, "use_sliding_window": False}
    return config("Qwen2MoeForCausalLM", "qwen2_moe", sizes, tie_word_embeddings=False, **more)


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    return config(
        "GptOssForCausalLM",
        "gpt_oss",
        (layers, 2880, 2880, 64, 8, 201088, 131072),
        **{"head_dim": 64, "sliding_window": 128, "num_local_experts": experts, "num_experts_per_tok": 4},
        rope_scaling={**yarn, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": NOT_MXFP4},
    )


def _llama4(experts: int, step: int, positions: int, **more: Any) -> dict[str, Any]:
    text = config(
        "Llama4ForCausalLM",
        "llama4_text",
        (48, 5120, 8192, 40, 8, 202048, positions),
        **{"head_dim": 128, "intermediate_size_mlp": 16384, "num_local_experts": experts, "num_experts_per_tok": 1},
        **{"interleave_moe_layer_step": step, "attention_chunk_size": 8192, "no_rope_layers": []},
        **{"use_qk_norm": step == 1, "tie_word_embeddings": False},
        **more,
    )
    return _multimodal("Llama4", "llama4", text, LLAMA4_TOWER, torch_dtype="bfloat16")


def _deepseek(
    sizes: tuple[int, ...], experts: tuple[int, ...], groups: tuple[int, int], dense: int, **more: Any
) -> dict[str, Any]:
    """`experts` are experts of a layer, those that a token reads, shared ones and their intermediate size."""
    three = sizes[5] > 110000
    found: dict[str, Any] = dict(zip(EXPERT_SIZES, experts, strict=True)) | {"moe_layer_freq": 1, "q_lora_rank": 1536}
    found |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": DEEPSEEK_ROPE}
    found |= dict(zip(("n_group", "topk_group"), groups, strict=True))
    found |= {"v_head_dim": 128, "first_k_dense_replace": dense, "tie_word_embeddings": False, "norm_topk_prob": three}
    if three:
        found |= {"quantization_config": FP8_BLOCKS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    version = "32" if "index_topk" in more else "3" if three else "2"
    return config(f"DeepseekV{version}ForCausalLM", f"deepseek_v{version}", sizes, **found | more)


def qwen_hybrid(sizes: tuple[int, ...], values: int, tied: bool, tower: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Qwen3.5, 3.6 and 3.8: `values` are the value heads of linear attention; `tower` depth, sizes and heads of it."""
    name, kind = ("Qwen3_5Moe", "qwen3_5_moe") if "num_experts" in more else ("Qwen3_5", "qwen3_5")
    text = config(f"{name}ForCausalLM", f"{kind}_text", sizes, **LINEAR | more)
    text |= {"linear_num_value_heads": values, "mamba_ssm_dtype": "float32", "rope_parameters": QWEN_ROPE}
    text |= {"tie_word_embeddings": tied, "mtp_num_hidden_layers": 1}
    text |= {"layer_types": [LINEAR_TYPES[index % 4] for index in range(sizes[0])]}
    keys = ("depth", "hidden_size", "intermediate_size", "num_heads")
    vision = {**QWEN_TOWER, **dict(zip(keys, tower, strict=True)), "model_type": kind, "out_hidden_size": sizes[1]}
    vision["deepstack_visual_indexes"] = []
    return _multimodal(name, kind, text, vision, tie_word_embeddings=tied, **HYBRID_TOKENS)


def _nemotron_h(sizes: tuple[int, ...], pattern: str, experts: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """`experts` are experts of a layer, those that a token reads, the shared one's intermediate size and theirs."""
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_shared_expert_intermediate_size", "moe_intermediate_size")
    found: dict[str, Any] = dict(zip(keys, experts, strict=True)) | {"n_shared_experts": 1, "n_group": 1}
    found |= {"topk_group": 1, "norm_topk_prob": True, "head_dim": 128, "hybrid_override_pattern": pattern}
    found |= {"mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4}
    found |= {"chunk_size": 128, "use_conv_bias": True, "mamba_ssm_cache_dtype": "float32", "mlp_hidden_act": "relu2"}
    return config("NemotronHForCausalLM", "nemotron_h", sizes, tie_word_embeddings=False, **found | more)


NOT_MXFP4 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "float8_e4m3fn"}
FP8_BLOCKS |= {"weight_block_size": [128, 128]}
QWEN_TOWER = {
    **{"model_type": "qwen3_vl_moe", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
    **{"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 2048},
    **{"num_position_embeddings": 2304, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh"},
    "deepstack_visual_indexes": [8, 16, 24],
}
SMALL_QWEN_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
SMALL_QWEN_TOWER |= {"deepstack_visual_indexes": [5, 11, 17]}
QWEN2_5_TOWER = {
    **{"model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    **{"patch_size": 14, "spatial_patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_chans": 3},
    **{"hidden_act": "silu", "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
}
QWEN_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
QWEN_TOKENS |= {"vision_start_token_id": 151652, "vision_end_token_id": 151653}
HYBRID_TOKENS = {"image_token_id": 248056, "video_token_id": 248057}
HYBRID_TOKENS |= {"vision_start_token_id": 248053, "vision_end_token_id": 248054}
LINEAR_TYPES = (*3 * ("linear_attention",), "full_attention")
LINEAR: dict[str, Any] = {"head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
LINEAR |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
LINEAR |= {"linear_num_value_heads": 32, "attn_output_gate": True}
QWEN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
QWEN_ROPE |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
LLAMA4_TOWER = _tower(
    "llama4_vision_model",
    (1408, 5632, 34, 16, 336, 14),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 4096),
    **{"num_channels": 3, "pixel_shuffle_ratio": 0.5, "rope_theta": 10000, "multi_modal_projector_bias": False},
    vision_feature_select_strategy="default",
)
CLIP = _tower("clip_vision_model", (1024, 4096, 24, 16, 336, 14), projection_dim=768, vocab_size=32000)
PIXTRAL = _tower("pixtral", (1024, 4096, 24, 16, 1540, 14), head_dim=64, num_channels=3, rope_theta=10000.0)
LLAMA_ROPE = {"rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}
DEEPSEEK_ROPE: dict[str, Any] = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
DEEPSEEK_ROPE |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
NEMOTRON = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
LLAVA = "llava-hf/llava-v1.6-mistral-7b-hf"
LONG_ROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
QWEN3_EXPERTS: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
QWEN3_EXPERTS |= {"head_dim": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


def _mistral(sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    return config("MistralForCausalLM", "mistral", sizes, sliding_window=None, **more)


def _mistral_small(positions: int) -> dict[str, Any]:
    return _mistral((40, 5120, 32768, 32, 8, 131072, positions), head_dim=128)


def _ministral3(sizes: tuple[int, ...]) -> dict[str, Any]:
    """Without sliding_window, as transformers' Ministral3Config takes it (models/ministral3, 5.16.0)."""
    rope = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384, "rope_theta": 1e6}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    more = {"head_dim": 128, "rope_parameters": {**rope, "rope_type": "yarn"}, "tie_word_embeddings": False}
    return config("Ministral3ForCausalLM", "ministral3", sizes, **more)


def _mistral3(text: object, **more: Any) -> dict[str, Any]:
    more |= {"torch_dtype": "bfloat16", "image_token_index": 10, "multimodal_projector_bias": False}
    more |= {"projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1}
    return _multimodal("Mistral3", "mistral3", text, PIXTRAL, **more)


def qwen3(sizes: tuple[int, ...], tied: bool = False) -> dict[str, Any]:
    return config("Qwen3ForCausalLM", "qwen3", sizes, head_dim=128, tie_word_embeddings=tied)


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2((24, 896, 4864, 14, 2, 151936, 32768), 21, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _qwen2((28, 3584, 18944, 28, 4, 152064, 32768), 28),
    "meta-llama/Llama-3.1-8B-Instruct": config(
        "LlamaForCausalLM",
        "llama",
        (32, 4096, 14336, 32, 8, 128256, 131072),
        rope_scaling={**LLAMA_ROPE, "factor": 8.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        tie_word_embeddings=False,
    ),
    "Qwen/Qwen3-8B": qwen3((36, 4096, 12288, 32, 8, 151936, 40960)),
    "Qwen/Qwen3-4B": qwen3((36, 2560, 9728, 32, 8, 151936, 40960), True),
    "Qwen/Qwen3-30B-A3B": config(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        (48, 2048, 6144, 32, 4, 151936, 40960),
        tie_word_embeddings=False,
        **QWEN3_EXPERTS,
    ),
    "google/gemma-2-9b-it": config(
        "Gemma2ForCausalLM",
        "gemma2",
        (42, 3584, 14336, 16, 8, 256000, 8192),
        **{"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256},
        hidden_activation="gelu_pytorch_tanh",
    ),
    "mistralai/Mistral-Small-24B-Instruct-2501": _mistral_small(32768),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": _mistral3(_mistral_small(131072)),
    "mistralai/Ministral-3-14B-Instruct-2512-BF16": _mistral3(
        _ministral3((40, 5120, 16384, 32, 8, 131072, 262144)), tie_word_embeddings=False
    ),
    "Ministral3ForCausalLM with the defaults of its configuration": _ministral3(
        (34, 4096, 14336, 32, 8, 131072, 262144)
    ),
    "microsoft/Phi-3-mini-4k-instruct": _phi3((32, 3072, 8192, 32, 32, 32064, 4096), 2047),
    "microsoft/phi-4": _phi3((40, 5120, 17920, 40, 10, 100352, 16384), None),
    "microsoft/Phi-4-mini-instruct": _phi3(
        (32, 3072, 8192, 24, 8, 200064, 131072),
        262144,
        **{"tie_word_embeddings": True, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 4096},
        rope_scaling=LONG_ROPE,
    ),
    "zai-org/GLM-4-9B-0414": _glm4((40, 4096, 13696, 32, 2, 151552, 32768), bias=True),
    "zai-org/GLM-4-32B-0414": _glm4((61, 6144, 23040, 48, 2, 151552, 32768), bias=False),
    "baidu/ERNIE-4.5-0.3B-PT": config(
        "Ernie4_5ForCausalLM",
        "ernie4_5",
        (18, 1024, 3072, 16, 2, 103424, 131072),
        **{"head_dim": 128, "tie_word_embeddings": True, "use_bias": False},
    ),
    "ibm-granite/granite-3.3-8b-instruct": _granite((40, 4096, 12800, 32, 8, 49159, 131072)),
    "LGAI-EXAONE/EXAONE-4.0-32B": _exaone4((64, 5120, 27392, 40, 8, 102400, 131072), False, 128, 4096, "LLLG"),
    "LGAI-EXAONE/EXAONE-4.0-1.2B": _exaone4((30, 2048, 4096, 32, 8, 102400, 65536), True, 64, None, None),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": config(
        "MixtralForCausalLM",
        "mixtral",
        (32, 4096, 14336, 32, 8, 32000, 32768),
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "Qwen/Qwen2-57B-A14B-Instruct": _qwen2_moe((28, 3584, 18944, 28, 4, 151936, 32768), (64, 8, 2560, 20480)),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": qwen3_vl((48, 2048, 6144, 32, 4, 151936, 262144), {}, False, QWEN3_EXPERTS),
    "MiniMaxAI/MiniMax-M2": config(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        (62, 3072, 1536, 48, 8, 200064, 196608),
        **{"head_dim": 128, "rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8},
        **{"use_routing_bias": True, "use_qk_norm": True, "scoring_func": "sigmoid"},
        quantization_config={**FP8_BLOCKS, "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": _llama4(
        16, 1, 10485760, rope_scaling={**LLAMA_ROPE, "original_max_position_embeddings": 8192}
    ),
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": _llama4(128, 2, 1048576, rope_scaling=None),
    LLAVA: _multimodal(
        "LlavaNext",
        "llava_next",
        _mistral((32, 4096, 14336, 32, 8, 32064, 32768)),
        CLIP,
        **{"torch_dtype": "float16", "image_token_index": 32000, "projector_hidden_act": "gelu"},
        **{"vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        image_grid_pinpoints=[[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": _deepseek(
        (27, 2048, 10944, 16, 16, 102400, 163840), (64, 6, 2, 1408), (1, 1), 1, q_lora_rank=None
    ),
    "deepseek-ai/DeepSeek-V3": _deepseek(
        (61, 7168, 18432, 128, 128, 129280, 163840), (256, 8, 1, 2048), (8, 4), 3, num_nextn_predict_layers=1
    ),
    "deepseek-ai/DeepSeek-V3.2": _deepseek(
        (61, 7168, 18432, 128, 128, 129280, 163840),
        (256, 8, 1, 2048),
        (8, 4),
        3,
        **{"num_nextn_predict_layers": 1, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64},
    ),
    "moonshotai/Kimi-K2-Instruct": _deepseek(
        (61, 7168, 18432, 64, 64, 163840, 131072),
        (384, 8, 1, 2048),
        (1, 1),
        1,
        num_nextn_predict_layers=0,
        rope_scaling={**DEEPSEEK_ROPE, "factor": 32.0, "beta_fast": 1.0},
    ),
    "openai/gpt-oss-20b": gpt_oss(24, 32),
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2_5_vl((36, 2048, 11008, 16, 2, 151936, 128000), True),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2_5_vl((28, 3584, 18944, 28, 4, 152064, 128000), False),
    "Qwen/Qwen3-VL-4B-Instruct": qwen3_vl((36, 2560, 9728, 32, 8, 151936, 262144), SMALL_QWEN_TOWER, True),
    "Qwen/Qwen3-VL-8B-Instruct": qwen3_vl((36, 4096, 12288, 32, 8, 151936, 262144), {}, False),
    "zai-org/GLM-4.5-Air": _glm4_moe((46, 4096, 10944, 96, 8, 151552, 131072), (128, 8, 1, 1408), 1),
    # 4.6 and 4.7 are alike, with more positions.
    "zai-org/GLM-4.5": _glm4_moe(
        (92, 5120, 12288, 96, 8, 151552, 131072), (160, 8, 1, 1536), 3, use_qk_norm=True, routed_scaling_factor=2.5
    ),
    "zai-org/GLM-4.7-Flash": _glm4_moe(
        (47, 2048, 10240, 20, 20, 154880, 202752),
        (64, 4, 1, 1536),
        1,
        **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
        **{"v_head_dim": 256, "routed_scaling_factor": 1.8, "rope_scaling": None},
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        (48, 2048, 5120, 16, 2, 151936, 262144),
        **{**LINEAR, "tie_word_embeddings": False, "partial_rotary_factor": 0.25, "rope_theta": 10000000},
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512},
        **{"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "Qwen/Qwen3.5-0.8B": qwen_hybrid((24, 1024, 3584, 8, 2, 248320, 262144), 16, True, (12, 768, 3072, 12)),
    "Qwen/Qwen3.5-4B": qwen_hybrid((32, 2560, 9216, 16, 4, 248320, 262144), 32, True, (24, 1024, 4096, 16)),
    "Qwen/Qwen3.6-27B": qwen_hybrid((64, 5120, 17408, 24, 4, 248320, 262144), 48, False, (27, 1152, 4304, 16)),
    "Qwen/Qwen3.6-35B-A3B": qwen_hybrid(
        (40, 2048, 512, 16, 2, 248320, 262144),
        32,
        False,
        (27, 1152, 4304, 16),
        **{"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
        shared_expert_intermediate_size=512,
    ),
    NEMOTRON: _nemotron_h(
        (52, 2688, 1856, 32, 2, 131072, 262144),
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        (128, 6, 3712, 1856),
    ),
}

_QWEN_7B = CONFIGS["Qwen/Qwen2.5-7B-Instruct"]


def _compressed(form: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """Of llm-compressor."""
    group |= {"targets": ["Linear"], "weights": weights}
    common = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
    return {**common, "config_groups": {"group_0": group}, "quantization_status": "compressed"}


def _eight(kind: str, form: str, strategy: str = "channel", static: bool = False) -> dict[str, Any]:
    """8 bits for each weight, activations scaled for each token unless they are static."""
    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    inputs = {**weights, "strategy": "tensor" if static else "token", "dynamic": not static}
    if strategy == "block":
        inputs |= {"strategy": "group", "group_size": 128}
    return _compressed(form, weights | blocks, input_activations=inputs)


def _groups(bits: int, kind: str, size: int, form: str, symmetric: bool = True, **group: Any) -> dict[str, Any]:
    strategy = "tensor_group" if form.startswith("nvfp4") else "group"
    weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "group_size": size}
    return _compressed(form, weights | ({"scale_dtype": "torch.uint8"} if form.startswith("mx") else {}), **group)


FOUR_BITS = {"bits": 4, "group_size": 128}
AUTO_ROUND = {**FOUR_BITS, "quant_method": "auto-round", "sym": True, "data_type": "int"}
"""As auto_round of Intel writes it (the checkpoints of vLLM's own tests/quantization/test_auto_round.py)."""
QUANTIZED: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct-AWQ": {**FOUR_BITS, "quant_method": "awq", "zero_point": True, "version": "gemm"},
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": {**FOUR_BITS, "quant_method": "gptq", "desc_act": False, "sym": True},
    "Qwen2.5-7B-Instruct, W4A16 in groups": _groups(4, "int", 128, "pack-quantized"),
    "Qwen2.5-7B-Instruct, W4A16 with zero points": _groups(4, "int", 128, "pack-quantized", symmetric=False),
    "Qwen2.5-7B-Instruct, W8A16 in groups": _groups(8, "int", 128, "pack-quantized"),
    "Qwen2.5-7B-Instruct, NVFP4": {
        **{"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        "producer": {"name": "modelopt", "version": "0.33.0"},
    },
    "Qwen2.5-7B-Instruct, MXFP8": {
        **{"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
        "producer": {"name": "modelopt", "version": "0.41.0"},
    },
    "Qwen2.5-7B-Instruct, NVFP4 of weights": _groups(4, "float", 16, "nvfp4-pack-quantized"),
    "Qwen2.5-7B-Instruct, MXFP4": _groups(4, "float", 32, "mxfp4-pack-quantized"),
    "Qwen2.5-7B-Instruct, FP8 by channel": _eight("float", "float-quantized"),
    "Qwen2.5-7B-Instruct, FP8 by tensor": _eight("float", "float-quantized", "tensor", static=True),
    "Qwen2.5-7B-Instruct, FP8 in blocks": _eight("float", "float-quantized", "block"),
    "Qwen2.5-7B-Instruct, INT8 by channel": _eight("int", "int-quantized"),
    "Qwen2.5-7B-Instruct, auto-round": {**AUTO_ROUND, "packing_format": "auto_round:auto_gptq"},
    "Qwen2.5-7B-Instruct, auto-round as AWQ": {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"},
}
"""quantization_config of Qwen2.5 7B as quantizers write it; those without an owner stand for checkpoints of
llm-compressor and ModelOpt."""
CONFIGS = {**CONFIGS, **{repo: {**_QWEN_7B, "quantization_config": how} for repo, how in QUANTIZED.items()}}
for name in ("FP8 by channel", "W4A16 in groups", "NVFP4", "INT8 by channel", "MXFP4", "auto-round"):
    CONFIGS[f"Qwen2-57B-A14B-Instruct, {name}"] = {
        **CONFIGS["Qwen/Qwen2-57B-A14B-Instruct"],
        "quantization_config": QUANTIZED[f"Qwen2.5-7B-Instruct, {name}"],
    }
_KEPT = [f"model.layers.{index}.linear_attn.in_proj_ba" for index in range(48)]
_KEPT += [f"model.language_model.layers.{index}.linear_attn.in_proj_{part}" for index in range(64) for part in "ab"]
_KEPT += [
    f"model.visual.blocks.{index}.{part}"
    for index in range(27)
    for part in ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
]
_KEPT += ["mtp.fc", "lm_head", "model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2"]
_WITHOUT_LINEAR: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen2.5-7B-Instruct-AWQ": {"modules_to_not_convert": ["linear_attn", "visual", "mtp"]},
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": {"dynamic": {"-:.*linear_attn.*": {}, "-:.*visual.*": {}}},
    "Qwen2.5-7B-Instruct, NVFP4": {"ignore": ["lm_head", "*linear_attn*", "*visual*"]},
}
"""Quantizations with what they leave out of a hybrid."""
for _repo in ("Qwen/Qwen3.6-27B", "Qwen/Qwen3-Next-80B-A3B-Instruct"):
    CONFIGS[f"{_repo}-FP8"] = {
        **CONFIGS[_repo],
        "quantization_config": {**FP8_BLOCKS, "modules_to_not_convert": _KEPT},
    }
for _name, _without in _WITHOUT_LINEAR.items():
    CONFIGS[f"Qwen3.5-4B, {QUANTIZED[_name]['quant_method']}"] = {
        **CONFIGS["Qwen/Qwen3.5-4B"],
        "quantization_config": {**QUANTIZED[_name], **_without},
    }
CONFIGS["Nemotron-3-Nano, one group"] = {**CONFIGS[NEMOTRON], "n_groups": 1}
# The experts of Nemotron-3-Super, as the unit test of NVIDIA-NeMo/Megatron-Bridge for it has them.
CONFIGS["Nemotron-3-Nano, latent experts"] = {
    **CONFIGS[NEMOTRON],
    **{"n_routed_experts": 512, "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_latent_size": 1024},
    "moe_shared_expert_intermediate_size": 5376,
}
for _name in ("NVFP4", "FP8"):
    CONFIGS[f"Nemotron-3-Nano, {_name}"] = {
        **CONFIGS[NEMOTRON],
        "quantization_config": {**QUANTIZED["Qwen2.5-7B-Instruct, NVFP4"], "quant_algo": _name},
    }
# As "nvidia/Qwen3.6-35B-A3B-NVFP4": attention in FP8, MLPs in NVFP4.
_MIXED = {
    f"model.language_model.layers.{index}.{part}": {"quant_algo": algorithm}
    for index in range(32)
    for part, algorithm in {
        **dict.fromkeys((f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")), "FP8"),
        **dict.fromkeys((f"self_attn.{part}_proj" for part in "qkvo"), "FP8"),
        **dict.fromkeys((f"mlp.{part}_proj" for part in ("gate", "up", "down")), "NVFP4"),
    }.items()
}
CONFIGS["Qwen3.5-4B, FP8 and NVFP4"] = {
    **CONFIGS["Qwen/Qwen3.5-4B"],
    "quantization_config": {
        **{"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": _MIXED},
        **{"ignore": [], "producer": {"name": "modelopt", "version": "0.44.0"}},
    },
}

QWEN3_32B = qwen3((64, 5120, 25600, 64, 8, 151936, 40960))
_EAGLE3: dict[str, Any] = config(
    "LlamaForCausalLMEagle3",
    "llama",
    (1, 5120, 25600, 64, 8, 151936, 40960),
    **{"draft_vocab_size": 32000, "head_dim": 80, "rope_theta": 1000000, "tie_word_embeddings": False},
)
EAGLE3: Mapping[str, dict[str, Any]] = {
    # sgl-project/SpecForge, configs/qwen3-32b-eagle3.json
    "eagle3": _EAGLE3,
    # sgl-project/sglang, its unit test of the configuration of a speculator, with the type that vLLM accepts
    # (transformers_utils/configs/speculators/algos.py)
    "eagle3 of speculators": {
        **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000},
        **{"norm_before_residual": True, "target_hidden_size": None, "torch_dtype": "bfloat16"},
        "transformer_layer_config": {**_EAGLE3, **{"head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-06}},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-32B"},
        },
    },
}
"""Drafters for Qwen3-32B, the first with a table of embeddings of its own."""


def eagle3_headers(made: Mapping[str, Any], table: bool) -> Iterator[Header]:
    """The tensors of a drafter with that config.json, with a table of embeddings or without."""
    text = made.get("transformer_layer_config", made)
    hidden, layer = text["hidden_size"], "midlayer" if text is made else "layers.0"
    if table:
        yield "embed_tokens.weight", "BF16", (text["vocab_size"], hidden)
    for part, _, shape in ((name, dtype, shape) for name, *dtype, shape in [*_attention(text), *_mlp(text)]):
        wide = (shape[0], 2 * hidden) if part.split(".")[1][0] in "qkv" else shape
        yield f"{layer}.{part}", "BF16", wide
    for norm in ("hidden_norm", *_BOTH):
        yield f"{layer}.{norm}.weight", "BF16", (hidden,)
    yield "norm.weight", "BF16", (hidden,)
    yield "fc.weight", "BF16", (hidden, 3 * hidden)
    yield "lm_head.weight", "BF16", (made["draft_vocab_size"], hidden)
    yield "d2t", "I64", (made["draft_vocab_size"],)
    yield "t2d", "BOOL", (text["vocab_size"],)


PARAMETERS: Mapping[str, int] = {
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "zai-org/GLM-4-9B-0414": 9_400_279_040,
    "zai-org/GLM-4-32B-0414": 32_566_081_536,
    "baidu/ERNIE-4.5-0.3B-PT": 360_748_032,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108_641_793_536,
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": 401_583_781_376,
    "deepseek-ai/DeepSeek-V2-Lite-Chat": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 684_531_386_000,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "zai-org/GLM-4.5-Air": 110_468_824_832,
    "zai-org/GLM-4.5": 358_337_791_296,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "google/gemma-2-9b-it": 9_241_705_984,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    LLAVA: 7_566_747_648,
    "microsoft/phi-4": 14_659_507_200,
    "microsoft/Phi-4-mini-instruct": 3_836_021_760,
}
"""Of all tensors of the repository, as the hub shows them."""

_BOTH = ("input_layernorm", "post_attention_layernorm")
_NORMS = {
    "gemma2": (*_BOTH, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "exaone4": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "glm4": (*_BOTH, "post_self_attn_layernorm", "post_mlp_layernorm"),
}


def headers(made: Mapping[str, Any]) -> Iterator[Header]:
    """The tensors of a checkpoint with that config.json."""
    if made["model_type"] == "nemotron_h":
        yield from _nemotron_headers(made)
        return
    text = made.get("text_config", made)
    qwen, hidden = "visual" if made["model_type"].startswith("qwen") else "", text["hidden_size"]
    before, head = ("model.", "") if "text_config" not in made else ("language_model.model.", "language_model.")
    if qwen and "text_config" in made:
        before, head = "model.language_model.", ""
    text = {**text, "quantization_config": made.get("quantization_config", {})}
    yield f"{before}embed_tokens.weight", "BF16", (text["vocab_size"], hidden)
    yield f"{before}norm.weight", "BF16", (hidden,)
    if not text.get("tie_word_embeddings", text["model_type"] == "gemma2"):
        yield f"{head}lm_head.weight", "BF16", (text["vocab_size"], hidden)
    if "linear_conv_kernel_dim" in text:
        yield "mtp.fc.weight", "BF16", (hidden, 2 * hidden)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", *(f"layers.0.{each}" for each in _BOTH)):
            yield f"mtp.{norm}.weight", "BF16", (hidden,)
        for name, *dtype, shape in [*_attention(text), *_MLPS.get(text["model_type"], _mlp)(text)]:
            full = f"mtp.layers.0.{name}", *(dtype or ["BF16"]), shape
            yield from _quantize(made.get("quantization_config"), *full)
    for index in range(text["num_hidden_layers"] + text.get("num_nextn_predict_layers", 0)):
        mlp = _MLPS.get(text["model_type"], _mlp)
        if index < text.get("first_k_dense_replace", 0):
            mlp = _mlp
        if text["model_type"] == "llama4_text" and (index + 1) % text["interleave_moe_layer_step"]:
            mlp = _llama4_dense
        linear = text.get("layer_types") and text["layer_types"][index] == "linear_attention"
        linear = linear or (text["model_type"] == "qwen3_next" and index % 4 != 3)
        for name, *dtype, shape in [*(_linear_attention(text) if linear else _attention(text)), *mlp(text)]:
            full = f"{before}layers.{index}.{name}", *(dtype or ["BF16"]), shape
            yield from _quantize(made.get("quantization_config"), *full)
        for norm in _NORMS.get(text["model_type"], _BOTH):
            yield f"{before}layers.{index}.{norm}.weight", "BF16", (hidden,)
    if text.get("num_nextn_predict_layers"):
        layer = f"model.layers.{text['num_hidden_layers']}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{layer}.{name}.weight", "BF16", (hidden,)
        yield f"{layer}.eh_proj.weight", "BF16", (hidden, 2 * hidden)
        for name in ("embed_tokens", "shared_head.head"):
            yield f"{layer}.{name}.weight", "BF16", (text["vocab_size"], hidden)
    if "vision_config" in made:
        towers = {"clip_vision_model": _clip, "llama4_vision_model": _llama4_tower, "pixtral": _pixtral}
        towers["qwen2_5_vl"] = _qwen2_5_tower
        yield from towers.get(made["vision_config"]["model_type"], _qwen_tower)(made["vision_config"], hidden)


def _nemotron_headers(made: Mapping[str, Any]) -> Iterator[Header]:
    hidden, inner, heads = (
        made["hidden_size"],
        made["mamba_num_heads"] * made["mamba_head_dim"],
        made["mamba_num_heads"],
    )
    rows, experts = inner + 2 * made["n_groups"] * made["ssm_state_size"], made.get("n_routed_experts", 0)
    mamba: dict[str, tuple[int, ...]] = {"in_proj.weight": (inner + rows + heads, hidden), "norm.weight": (inner,)}
    mamba |= {"conv1d.weight": (rows, 1, made["conv_kernel"]), "conv1d.bias": (rows,)}
    mamba |= {"out_proj.weight": (hidden, inner), "A_log": (heads,), "D": (heads,), "dt_bias": (heads,)}
    attention = {name.removeprefix("self_attn."): shape for name, _, shape in _attention(made)}
    moe: dict[str, tuple[int, ...]] = {"gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,)}
    width = made.get("moe_latent_size") or hidden
    if width != hidden:
        moe |= {"fc1_latent_proj.weight": (width, hidden), "fc2_latent_proj.weight": (hidden, width)}
    mlps = [(f"experts.{expert}.", made["moe_intermediate_size"], width) for expert in range(experts)]
    mlps += [("shared_experts.", made["moe_shared_expert_intermediate_size"], hidden)] if experts else []
    for name, size, inputs in mlps:
        moe |= {f"{name}up_proj.weight": (size, inputs), f"{name}down_proj.weight": (inputs, size)}
    dense = made["intermediate_size"]
    kinds = {"M": mamba, "*": attention, "E": moe}
    kinds["-"] = {"up_proj.weight": (dense, hidden), "down_proj.weight": (hidden, dense)}
    yield "backbone.embeddings.weight", "BF16", (made["vocab_size"], hidden)
    yield "backbone.norm_f.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (made["vocab_size"], hidden)
    for index, kind in enumerate(made["hybrid_override_pattern"]):
        layer = f"backbone.layers.{index}"
        yield f"{layer}.norm.weight", "BF16", (hidden,)
        for name, shape in kinds[kind].items():
            dtype = "F32" if name.endswith("bias") and kind == "E" else "BF16"
            yield from _quantize(made.get("quantization_config"), f"{layer}.mixer.{name}", dtype, shape)


def _quantize(how: Mapping[str, Any] | None, name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[Header]:
    """A linear weight as the quantizers of QUANTIZED store it; everything else as it is."""
    layers, base = (how or {}).get("quantized_layers", {}), name.removesuffix(".weight")
    if base in layers and layers[base]["quant_algo"] == "FP8":
        yield name, "F8_E4M3", shape
        yield f"{name}_scale", "F32", ()
        yield f"{base}.input_scale", "F32", ()
        return
    none = how is None or (layers and base not in layers) or how["quant_method"] in ("fp8", "mxfp4")
    listed = [word for key in ("modules_to_not_convert", "dynamic", "ignore") for word in (how or {}).get(key, ())]
    if none or not name.endswith("_proj.weight") or any(word.strip("-:.*") in name for word in listed):
        yield name, dtype, shape
        return
    for leaf, kind, size in _store(how or {}, *shape):
        yield f"{base}.{leaf}", kind, size


def _store(how: Mapping[str, Any], rows: int, columns: int) -> Iterator[Header]:
    """The tensors of a linear layer, without its name."""
    method, form = how["quant_method"], str(how.get("format"))
    if method in ("awq", "gptq", "auto-round"):
        awq, packed = method == "awq" or "awq" in how.get("packing_format", ""), 32 // how["bits"]
        yield "qweight", "I32", (columns, rows // packed) if awq else (columns // packed, rows)
        yield "qzeros", "I32", (columns // 128, rows // packed)
        yield "scales", "F16", (columns // 128, rows)
        if method == "gptq":
            yield "g_idx", "I32", (columns,)
    elif how.get("quant_algo") == "MXFP8":
        yield "weight", "F8_E4M3", (rows, columns)
        yield "weight_scale", "U8", (rows, columns // 32)
    elif how.get("quant_algo") == "FP8":
        yield "weight", "F8_E4M3", (rows, columns)
        yield from (("weight_scale", "F32", ()), ("input_scale", "F32", ()))
    elif method == "modelopt":
        yield "weight", "U8", (rows, columns // 2)
        yield "weight_scale", "F8_E4M3", (rows, columns // 16)
        yield from (("weight_scale_2", "F32", ()), ("input_scale", "F32", ()))
    elif form == "pack-quantized":
        weights = how["config_groups"]["group_0"]["weights"]
        packed = 32 // weights["num_bits"]
        yield "weight_packed", "I32", (rows, columns // packed)
        yield "weight_scale", "BF16", (rows, columns // 128)
        if not weights["symmetric"]:
            yield "weight_zero_point", "I32", (rows // packed, columns // 128)
        yield "weight_shape", "I64", (2,)
    elif form.endswith("fp4-pack-quantized"):
        nvfp4 = form.startswith("nvfp4")
        yield "weight_packed", "U8", (rows, columns // 2)
        yield "weight_scale", "F8_E4M3" if nvfp4 else "U8", (rows, columns // (16 if nvfp4 else 32))
        if nvfp4:
            yield "weight_global_scale", "F32", (1,)
    else:
        strategy = how["config_groups"]["group_0"]["weights"]["strategy"]
        scales = {"channel": (rows, 1), "tensor": (1,), "block": (-(-rows // 128), -(-columns // 128))}
        yield "weight", "F8_E4M3" if form == "float-quantized" else "I8", (rows, columns)
        yield "weight_scale", "BF16", scales[strategy]
        if strategy == "tensor":
            yield "input_scale", "BF16", (1,)


def _linear(text: Mapping[str, Any], name: str, rows: int, columns: int) -> Iterator[tuple[Any, ...]]:
    """A weight; in FP8 with a scale for each block of 128 by 128, if config.json says so."""
    blocks = "weight_block_size" in text.get("quantization_config", {})
    yield f"{name}.weight", "F8_E4M3" if blocks else "BF16", (rows, columns)
    if blocks:
        yield f"{name}.weight_scale_inv", "F32", (-(-rows // 128), -(-columns // 128))


def _latent_attention(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, heads, rank, queries = (
        text[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    key, rope, value = (text[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    linear = {"kv_a_proj_with_mqa": (rank + rope, hidden), "kv_b_proj": (heads * (key + value), rank)}
    linear |= {
        "o_proj": (hidden, heads * value),
        "q_b_proj" if queries else "q_proj": (heads * (key + rope), queries or hidden),
    }
    linear |= {"q_a_proj": (queries, hidden)} if queries else {}
    for name, shape in linear.items():
        yield from _linear(text, f"self_attn.{name}", *shape)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    if queries:
        yield "self_attn.q_a_layernorm.weight", (queries,)
    if "index_topk" in text:
        size, count = text["index_head_dim"], text["index_n_heads"]
        yield from _linear(text, "self_attn.indexer.wq_b", size * count, queries)
        yield from _linear(text, "self_attn.indexer.wk", size, hidden)
        yield "self_attn.indexer.weights_proj.weight", (count, hidden)
        for leaf in ("weight", "bias"):
            yield f"self_attn.indexer.k_norm.{leaf}", "F32", (size,)


def _deepseek_experts(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
    yield "mlp.gate.weight", (experts, text["hidden_size"])
    if text.get("topk_method") == "noaux_tc":
        yield "mlp.gate.e_score_correction_bias", "F32", (experts,)
    yield from _gated(text, "mlp.shared_experts", inner * text["n_shared_experts"])
    for expert in range(experts):
        yield from _gated(text, f"mlp.experts.{expert}", inner)


def _linear_attention(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, heads, size = text["hidden_size"], text["linear_num_value_heads"], text["linear_value_head_dim"]
    keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * size
    projections = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    if text["model_type"] == "qwen3_next":
        projections = {"qkvz": 2 * (keys + values), "ba": 2 * heads}
    for part, rows in projections.items():
        plain = {**text, "quantization_config": {}} if part in ("a", "b", "ba") else text
        yield from _linear(plain, f"linear_attn.in_proj_{part}", rows, hidden)
    yield from _linear(text, "linear_attn.out_proj", hidden, values)
    yield "linear_attn.conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    yield "linear_attn.A_log", "F32" if "mamba_ssm_dtype" in text else "BF16", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", "F32" if "mamba_ssm_dtype" in text else "BF16", (size,)


def _attention(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    kind = text["model_type"]
    if "kv_lora_rank" in text:
        yield from _latent_attention(text)
        return
    hidden, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    size = text.get("head_dim") or hidden // heads
    rows = {"q": heads * size, "k": kv_heads * size, "v": kv_heads * size}
    if text.get("attn_output_gate"):
        rows["q"] *= 2
    if kind == "phi3":
        rows = {"qkv": sum(rows.values())}
    shapes = {f"{part}_proj": (count, hidden) for part, count in rows.items()} | {"o_proj": (hidden, heads * size)}
    for part, shape in shapes.items():
        yield from _linear(text, f"self_attn.{part}", *shape)
        biased = kind in ("qwen2", "qwen2_moe", "qwen2_5_vl") or (kind[:4] == "glm4" and text["attention_bias"])
        if kind == "gpt_oss" or (biased and part != "o_proj"):
            yield f"self_attn.{part}.bias", shape[:1]
    each = kind.startswith(("qwen3", "exaone4")) or (kind == "glm4_moe" and text.get("use_qk_norm"))
    norms = (heads * size, kv_heads * size) if kind == "minimax_m2" else (size, size) if each else ()
    for part, count in zip("qk", norms, strict=False):
        yield f"self_attn.{part}_norm.weight", (count,)
    if kind == "gpt_oss":
        yield "self_attn.sinks", (heads,)


def _mlp(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    if text["model_type"] in ("phi3", "glm4"):
        yield "mlp.gate_up_proj.weight", (2 * inner, hidden)
        yield "mlp.down_proj.weight", (hidden, inner)
    else:
        yield from _gated(text, "mlp", inner)


def _gated(text: Mapping[str, Any], name: str, inner: int) -> Iterator[tuple[Any, ...]]:
    hidden = text["hidden_size"]
    for part, shape in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        yield from _linear(text, f"{name}.{part}_proj", *shape)


def _qwen2_experts(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden = text["hidden_size"]
    yield "mlp.gate.weight", (text["num_experts"], hidden)
    if text.get("shared_expert_intermediate_size"):
        yield "mlp.shared_expert_gate.weight", (1, hidden)
        yield from _gated(text, "mlp.shared_expert", text["shared_expert_intermediate_size"])
    for expert in range(text["num_experts"]):
        yield from _gated(text, f"mlp.experts.{expert}", text["moe_intermediate_size"])


def _qwen3_5_experts(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield from (each for each in _qwen2_experts(text) if ".experts." not in each[0])
    yield "mlp.experts.gate_up_proj", (experts, 2 * inner, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, inner)


def _qwen3_vl_experts(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, inner, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield "mlp.experts.down_proj", (experts, inner, hidden)


def _block_sparse(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, inner, experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    minimax = text["model_type"] == "minimax_m2"
    yield "block_sparse_moe.gate.weight", "F32" if minimax else "BF16", (experts, hidden)
    if minimax:
        yield "block_sparse_moe.e_score_correction_bias", "F32", (experts,)
    for expert in range(experts):
        for part, shape in {"w1": (inner, hidden), "w2": (hidden, inner), "w3": (inner, hidden)}.items():
            yield from _linear(text, f"block_sparse_moe.experts.{expert}.{part}", *shape)


def _gpt_oss_experts(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, inner, experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield "mlp.router.weight", (experts, hidden)
    yield "mlp.router.bias", (experts,)
    for part, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        yield f"mlp.experts.{part}_proj_blocks", "U8", (experts, rows, columns // 32, 16)
        yield f"mlp.experts.{part}_proj_scales", "U8", (experts, rows, columns // 32)
        yield f"mlp.experts.{part}_proj_bias", (experts, rows)


def _llama4_experts(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    hidden, inner, experts = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    yield "feed_forward.router.weight", (experts, hidden)
    yield from _gated(text, "feed_forward.shared_expert", inner)
    yield "feed_forward.experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield "feed_forward.experts.down_proj", (experts, inner, hidden)


def _llama4_dense(text: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    yield from _gated(text, "feed_forward", text["intermediate_size_mlp"])


_MLPS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[tuple[Any, ...]]]] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "qwen3_next"), _qwen2_experts),
    "qwen3_5_moe_text": _qwen3_5_experts,
    "qwen3_vl_moe_text": _qwen3_vl_experts,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite"), _deepseek_experts),
    **dict.fromkeys(("mixtral", "minimax_m2"), _block_sparse),
    "gpt_oss": _gpt_oss_experts,
    "llama4_text": _llama4_experts,
}


def _biased(before: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Header]:
    for name, shape in shapes.items():
        yield f"{before}{name}.weight", "BF16", shape
        yield f"{before}{name}.bias", "BF16", shape[:1]


def _clip(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Header]:
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    layer = {f"self_attn.{part}_proj": (hidden, hidden) for part in ("q", "k", "v", "out")}
    layer |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
    layer |= dict.fromkeys(("layer_norm1", "layer_norm2"), (hidden,))
    named = dict.fromkeys(("pre_layrnorm", "post_layernorm"), (hidden,))
    for index in range(vision["num_hidden_layers"]):
        named |= {f"encoder.layers.{index}.{name}": shape for name, shape in layer.items()}
    both = {f"vision_tower.vision_model.{name}": shape for name, shape in named.items()}
    both["multi_modal_projector.linear_1"] = (text_hidden, hidden)
    both["multi_modal_projector.linear_2"] = (text_hidden, text_hidden)
    yield from _biased("", both)
    embeddings = "vision_tower.vision_model.embeddings"
    yield f"{embeddings}.class_embedding", "BF16", (hidden,)
    yield f"{embeddings}.patch_embedding.weight", "BF16", (hidden, 3, patch, patch)
    yield f"{embeddings}.position_embedding.weight", "BF16", ((vision["image_size"] // patch) ** 2 + 1, hidden)
    yield "image_newline", "BF16", (text_hidden,)


def _llama4_tower(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Header]:
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    layer = {f"self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
    layer |= {"mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
    layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (hidden,))
    both = {
        f"model.layers.{index}.{name}": shape
        for index in range(vision["num_hidden_layers"])
        for name, shape in layer.items()
    }
    yield from _biased("vision_model.", both | dict.fromkeys(("layernorm_pre", "layernorm_post"), (hidden,)))
    yield "vision_model.class_embedding", "BF16", (hidden,)
    yield "vision_model.positional_embedding_vlm", "BF16", ((vision["image_size"] // patch) ** 2 + 1, hidden)
    yield "vision_model.patch_embedding.linear.weight", "BF16", (hidden, vision["num_channels"] * patch**2)
    wide = vision["projector_output_dim"]
    yield "vision_model.vision_adapter.mlp.fc1.weight", "BF16", (vision["projector_input_dim"], inner)
    yield "vision_model.vision_adapter.mlp.fc2.weight", "BF16", (wide, vision["projector_input_dim"])
    yield "multi_modal_projector.linear_1.weight", "BF16", (text_hidden, vision["vision_output_dim"])


def _qwen_tower(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Header]:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    layer = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden), "norm1": (hidden,), "norm2": (hidden,)}
    layer |= {"mlp.linear_fc1": (inner, hidden), "mlp.linear_fc2": (hidden, inner)}
    linear = {f"blocks.{index}.{name}": shape for index in range(vision["depth"]) for name, shape in layer.items()}
    deep = [f"deepstack_merger_list.{index}" for index in range(len(vision["deepstack_visual_indexes"]))]
    for merger in ("merger", *deep):
        linear[f"{merger}.norm"] = (hidden if merger == "merger" else merged,)
        linear |= {f"{merger}.linear_fc1": (merged, merged), f"{merger}.linear_fc2": (text_hidden, merged)}
    patch = (vision["in_channels"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    yield from _biased("model.visual.", linear | {"patch_embed.proj": (hidden, *patch)})
    yield "model.visual.pos_embed.weight", "BF16", (vision["num_position_embeddings"], hidden)


def _qwen2_5_tower(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Header]:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    layer = {"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)}
    layer |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    for index in range(vision["depth"]):
        yield from _biased(f"visual.blocks.{index}.", layer)
        yield f"visual.blocks.{index}.norm1.weight", "BF16", (hidden,)
        yield f"visual.blocks.{index}.norm2.weight", "BF16", (hidden,)
    yield from _biased("visual.merger.mlp.", {"0": (merged, merged), "2": (text_hidden, merged)})
    yield "visual.merger.ln_q.weight", "BF16", (hidden,)
    patch = (vision["in_chans"], vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    yield "visual.patch_embed.proj.weight", "BF16", (hidden, *patch)


def _pixtral(vision: Mapping[str, Any], text_hidden: int) -> Iterator[Header]:
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    square = {f"attention.{part}_proj": (hidden, hidden) for part in "qkvo"}
    square |= {"feed_forward.gate_proj": (inner, hidden), "feed_forward.up_proj": (inner, hidden)}
    layer = {**square, "feed_forward.down_proj": (hidden, inner), "attention_norm": (hidden,), "ffn_norm": (hidden,)}
    for index in range(vision["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"vision_tower.transformer.layers.{index}.{name}.weight", "BF16", shape
    patch = (hidden, vision["num_channels"], vision["patch_size"], vision["patch_size"])
    yield "vision_tower.patch_conv.weight", "BF16", patch
    yield "vision_tower.ln_pre.weight", "BF16", (hidden,)
    yield "multi_modal_projector.norm.weight", "BF16", (hidden,)
    yield "multi_modal_projector.patch_merger.merging_layer.weight", "BF16", (hidden, 4 * hidden)
    yield "multi_modal_projector.linear_1.weight", "BF16", (text_hidden, hidden)
    yield "multi_modal_projector.linear_2.weight", "BF16", (text_hidden, text_hidden)


KEYS = ("name", "tensor_parallel_size", "pipeline_rank", "expert_parallel", "drafter")
JUDGED_LAYERS = 6
"""Of hybrids 8, so that both stages of a pipeline have full attention."""


def cut(made: Mapping[str, Any], layers: int = JUDGED_LAYERS) -> dict[str, Any]:
    """The same checkpoint with its first layers only: what vLLM makes of one layer, it makes of all alike."""
    text = dict(made.get("text_config", made))
    layers += 2 if "linear_conv_kernel_dim" in text or "conv_kernel" in text else 0
    text["num_hidden_layers"] = min(layers, text["num_hidden_layers"])
    if text.get("first_k_dense_replace"):
        # glm4_moe.py refuses a stage of a pipeline without experts.
        text["first_k_dense_replace"] = min(layers // 2 - 1, text["first_k_dense_replace"])
    for key in ("layer_types", "hybrid_override_pattern"):
        if text.get(key):
            text[key] = text[key][:layers]
    if "vision_config" not in made:
        return text
    depth = "depth" if "depth" in made["vision_config"] else "num_hidden_layers"
    vision = {**made["vision_config"], depth: 27 if depth == "depth" else 2}
    return {**(made | {"text_config": text} if "text_config" in made else text), "vision_config": vision}


def facts(repo: str, layers: int = 0) -> Facts:
    """The facts of a published checkpoint, or of its first layers."""
    made = cut(CONFIGS[repo], layers) if layers else CONFIGS[repo]
    return model_facts.build_facts(repo, "", made, headers(made))


def questions() -> list[dict[str, Any]]:
    """What `tests/judge/vllm_models.py` is asked: each checkpoint on one GPU, on as many of two and four as its heads
    allow, and each stage of a pipeline of two; not those of other quantizations of one checkpoint."""
    asked = []
    for repo, made in CONFIGS.items():
        few = cut(made)
        text = few.get("text_config", few)
        heads, kv_heads = text["num_attention_heads"], text["num_key_value_heads"]
        most = max(size for size in (1, 2, 4) if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0))
        found = {"name": repo, "config": few, "headers": list(headers(few)), "expert_parallel": False}
        asked += [
            {**found, "tensor_parallel_size": 1, "pipeline_rank": stage}
            for stage in ((None,) if ", " in repo else (None, 0, 1))
        ]
        if most > 1:
            asked.append({**found, "tensor_parallel_size": most, "pipeline_rank": None})
        # llama4.py copies its experts by values of tensors then, which those of the judge do not have.
        experts = any(text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        if most > 1 and experts and text["model_type"] != "llama4_text":
            asked.append({**asked[-1], "expert_parallel": True})
        if text.get("num_nextn_predict_layers") or "linear_conv_kernel_dim" in text:
            asked += [
                {**each, "drafter": "mtp"} for each in asked if each["name"] == repo and each["pipeline_rank"] is None
            ]
    for name in EAGLE3:
        target = {"name": "Qwen/Qwen3-32B", "config": cut(QWEN3_32B), "headers": [], "expert_parallel": False}
        found = {**target, "pipeline_rank": None, "drafter": name, "drafter_config": EAGLE3[name]}
        asked += [
            {**found, "headers": list(eagle3_headers(EAGLE3[name], name == "eagle3")), "tensor_parallel_size": size}
            for size in (1, 2)
        ]
    return asked


def compare(asked: Mapping[str, Any], told: Mapping[str, Any], version: str) -> list[str]:
    """What the plan says otherwise than vLLM about a checkpoint, each as `name: ours, vLLM's`."""
    size, stage, drafter = asked["tensor_parallel_size"], asked["pipeline_rank"], asked.get("drafter")
    found = eagle3(drafter) if drafter in EAGLE3 else first_layers(asked["name"])
    found = families.interpret_drafting(found) if drafter == "mtp" else found
    arguments = Arguments(
        tensor_parallel_size=size,
        pipeline_parallel_size=1 if stage is None else 2,
        enable_expert_parallel=asked["expert_parallel"],
    )
    here = kv_cache.select_layers(found, arguments, stage or 0)
    # Some kernels pad experts after loading.
    padless = found if found.quantization.method == "mxfp4" else replace(found, expert_intermediate_size=0)
    rank = weights.per_rank(padless, arguments, version)[stage or 0]
    rope = rank.by_kind.get("rope_caches", 0)
    # Copies of latent attention are made after loading.
    loaded = rank.bytes - rope - rank.by_kind.get("buffers", 0)
    batches = (replace(arguments, max_num_batched_tokens=tokens) for tokens in (1, 2))
    one, two = (weights.per_rank(found, batch, version)[stage or 0].bytes for batch in batches)
    adapters = []
    said_of_adapters = told["lora_bytes"][: 1 if asked["expert_parallel"] else 2] if found.gated else []
    for sharded, said in zip((False, True), said_of_adapters, strict=False):
        lora = replace(arguments, enable_lora=True, max_loras=2, fully_sharded_loras=sharded, max_num_batched_tokens=1)
        held = weights.per_rank(found, lora, version)[stage or 0].by_kind["adapters"] - weights.PUNICA_BYTES_PER_TOKEN
        adapters.append(held if isinstance(said, int) else said)
    compared = {
        "adapters": (adapters, said_of_adapters),
        "layers": (
            [
                [max(1, x.kv_heads // size), x.head_size, x.window_tokens]
                for x in found.layers
                if x.index in here and x.kv_heads
            ],
            told["layers"],
        ),
        "parameters": (loaded, told["parameters_bytes"]),
        "bytes for each token": (two - one, told.get("token_bytes") or 0),
        "RoPE caches": (rope, told["rope_bytes"] if drafter != "mtp" else 0),
    }
    return [f"{name}: {mine}, {theirs}" for name, (mine, theirs) in compared.items() if mine != theirs]


@functools.cache
def eagle3(name: str) -> Model:
    made = eagle3_headers(EAGLE3[name], name == "eagle3")
    return families.interpret(model_facts.build_facts(name, "", EAGLE3[name], made))


@functools.cache
def first_layers(repo: str) -> Model:
    return families.interpret(facts(repo, JUDGED_LAYERS))


def render(judged: Mapping[str, Any]) -> str:
    """judged.json: one line for each answer."""

    keys = (*KEYS, "layers", "parameters_bytes", "rope_bytes", "lora_bytes", "token_bytes")
    seldom = ("drafter", "token_bytes")
    lines = [
        json.dumps({key: each.get(key) for key in keys if key not in seldom or each.get(key)})
        for each in judged["answers"]
    ]
    return f'{{"version": "{judged["version"]}", "answers": [\n' + ",\n".join(lines) + "\n]}\n"
