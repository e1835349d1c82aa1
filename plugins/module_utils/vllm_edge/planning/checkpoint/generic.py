# SPDX-License-Identifier: Apache-2.0
"""The generic plan of an architecture that the planner does not know.

Its weights and its KV cache are upper bounds. Every tensor of the checkpoint counts, in the model's dtype. A tensor
whose name occurs in a known family is distributed as there, any other one is on every GPU. Every layer has full
attention. An engine that fits with them fits. Of one that does not, the plan says so only if it would not fit with the
least that the weights can take; otherwise it cannot say (`unmodeled_arguments.judge_generic`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..contract import Attention, Model, Quantization, Tensor, Uncertain
from .components import has_rule, split_name
from .config_keys import CONFIG_KEYS
from .inferred import APPROXIMATE, EXPERT_KEYS

LARGEST_IMAGE_TOKENS = 16 * 1024
"""Tokens of the largest image: an assumption, because it is in no config.json. Processors of transformers 5.19 have up
to a quarter of it (models/kimi_k25/image_processing_kimi_k25.py: 16,384 patches, four to a token)."""
PATCHES_PER_TOKEN = 16
"""The most patches that a token is merged from, unless vision_config has spatial_merge_size: an assumption."""
LIVE_TENSORS, OUTPUT_TENSORS = 4, 4
"""How many tensors of its widest layer an encoder has at once for each patch, and of the language model's hidden size
for each token: assumptions. A layer of Qwen3-VL's encoder has 2.6 of the former, its output four of the latter
(0.32.0 model_executor/models/qwen3_vl.py, deepstack)."""
LEAST_OF_WEIGHTS = 0.9
"""The least that vLLM loads, as a part of the tensors divided by the number of GPUs: an assumption, because layers for
speculative decoding are in some checkpoints and not loaded. Published checkpoints of known families have 0.97."""
MOST_OF_WEIGHTS = 1.02
"""The upper bound as a multiple of the tensors, for buffers and padding of which only the model file knows. Published
checkpoints of known families need up to 0.7 % (tests/unit/planning/checkpoint/test_generic.py)."""
GROUPS = 3 / 2
"""By how much more a KV cache may take in which layers with and without a window are grouped: groups have equally many
layers, so that some have unused pages (kv_cache.FEW_MORE_LAYERS)."""

_MARK = f"{APPROXIMATE}generic, "
_NEEDED = "num_hidden_layers hidden_size num_attention_heads vocab_size max_position_embeddings model_type"
"""Without model_type, config.json or its record is not whole."""
_OF_ONE_FAMILY = """
chunk_size conv_kernel full_attention_interval hidden_size_per_layer_input hybrid_override_pattern index_head_dim
index_topk intermediate_size_mlp kv_lora_rank layers_block_type linear_conv_kernel_dim linear_key_head_dim
linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_head_dim mamba_num_heads mamba_ssm_cache_dtype
mamba_ssm_dtype moe_latent_size moe_shared_expert_intermediate_size n_groups q_lora_rank qk_nope_head_dim
qk_rope_head_dim ssm_state_size v_head_dim
"""
"""Keys that the planner reads of one family only."""
# In the configuration classes of transformers 5.19 (models/*/configuration_*.py, configuration_utils.py): what tokens
# mean, how a model is initialized and trained, and factors of what it computes.
_WITHOUT_MEMORY = """
_name_or_path architectures attention_bias attention_multiplier attention_out_bias attn_bias audio_config auto_map
chunk_size_feed_forward clip_qkv compression_config embedding_initializer_range embedding_multiplier hidden_act
hidden_activation id2label initializer_range label2id lm_head_bias logit_scale logits_scaling mlp_bias mlp_layer_types
model_type moe_norm_min multimodal_projector_bias n_group norm_topk_prob num_labels num_mtp_layers
num_nextn_predict_layers num_shared_experts output_router_logits pretraining_tp problem_type projector_hidden_act
qk_layernorm qkv_bias quantization_config query_pre_attn_scalar residual_multiplier return_dict rope_interleave
rope_local_base_freq rope_theta route_scale routed_scaling_factor router_scaling_factor scoring_func
spatial_merge_size swiglu_alpha swiglu_limit text_config topk_group topk_method transformers_version use_bias
use_cache use_parallel_residual use_qk_norm use_qkv_bias vision_config z_loss_coefficient
"""
_WITHOUT_MEMORY_TOO = re.compile(
    r"(_token_ids?|_token_index|dropout\w*|_pdrop|_eps|epsilon|_aux_loss_coef|_softcapping|_noise)$"
)
_PARTS = re.compile(
    r"(^|\.)(self_attn|self_attention|attn|attention)\.((q|k|v|o|qkv|out|c)_proj|dense|query|key|value|query_key_value"
    r"|c_attn|w?qkv|Wqkv|W_pack|w[qkvo]|sinks)$"
    r"|(^|\.)(mlp|feed_forward|ffn|block_sparse_moe|shared_mlp|shared_experts?)\."
    r"|(^|[._])(layer_?)?norms?\d?(_\w+)?$|(^|\.)ln_\w+$|(^|\.)(enorm|hnorm|eh_proj|shared_head\.head)$"
    r"|(^|\.)(wte|wpe|tok_embeddings|word_embeddings|embed_in|embed_out|output|output_layer)$|rotary_emb\.inv_freq$"
)
"""Tensors of attention, MLP, norms and embeddings that are not in the rules of a known family, also of layers for
speculative decoding; their names without the layer and the leaf."""
_EXPLAINED = (
    (
        r"\.(A_log|ssm\w*|mamba\w*|mixer|conv1d|short_conv|linear_attn|rwkv|time_mix\w*|rg_lru|lru)(\.|$)",
        "state-space or linear attention",
    ),
    (r"(^|\.)(encoder_attn|cross_attn|crossattention|EncDecAttention)\.", "an encoder"),
    # vLLM takes activations for up to 65,536 tokens of context at once, and copies of kv_b_proj (mla_attention.py).
    (r"\.kv_(a|b)_proj(_\w+)?\.", "latent attention (MLA)"),
    (r"\.(indexer|compressor)\.", "attention with an indexer or a compressor"),
    (r"attn(_\d|\.\*)\.", "several attentions"),
)
"""What some of the other tensors are."""
_TOWERS = re.compile(r"vis(ion|ual)|image|audio|speech|video|tower|projector|connector|aligner|resampler|perceiver")
_OUTPUTS = re.compile(
    r"[._](?P<part>k_proj|key|wk|(?P<value>v_proj|value|wv)|(?P<fused>qkv_proj|query_key_value|c_attn|w?qkv|Wqkv|W_pack))"
    r"\.(?P<leaf>weight|weight_packed|scales)$"
)
"""Keys and values. What AWQ and GPTQ pack has scales of as many outputs."""
_SMALLER = ("attention_chunk_size", "num_kv_shared_layers", "sliding_window_pattern")
"""Keys of config.json with which a KV cache may be smaller, besides those of a window for the whole model."""


def find_unbounded(config: Mapping[str, Any], tensors: Sequence[Tensor], quantization: Quantization) -> str:
    """Return why the memory of a model of an unknown architecture has no upper bound, in words; empty if it has one.

    It has one if nothing is unknown: every key of config.json that is set, and every tensor beside the towers.

    Args:
        config: config.json, with its text_config in place of the keys that both have.
    """
    for key in _NEEDED.split():
        if config.get(key) is None:
            return f"config.json lacks {key}" + (" (record it again)" if key == "model_type" else "")
    known = (CONFIG_KEYS.keys() - _OF_ONE_FAMILY.split()).union(_WITHOUT_MEMORY.split())
    keys = sorted(key for key, value in config.items() if value and key not in known)
    if keys := [key for key in keys if not _WITHOUT_MEMORY_TOO.search(key)]:
        return f"{_name_some(keys)} in config.json may change the memory in a way that the planner does not know"
    if kinds := set(config.get("layer_types") or ()) - {Attention.FULL, Attention.SLIDING, Attention.CHUNKED}:
        return f"layer_types in config.json has {_name_some(sorted(kinds))}, whose memory the planner does not know"
    experts = any("experts" in tensor.name and not is_tower(tensor) for tensor in tensors)
    for either in (EXPERT_KEYS, ("num_experts_per_tok", "top_k_experts")):
        if experts and not any(map(config.get, either)):
            return f"config.json lacks {' or '.join(either)}"
    if quantization.method == "mxfp4" or (
        experts and quantization.weight_bits == 4 and not config.get("moe_intermediate_size")
    ):
        return f"kernels pad experts in {quantization.method}, and by how much is not known"
    unknown = [tensor.name for tensor in tensors if not is_tower(tensor) and not _is_accounted(tensor.name)]
    for name in unknown:
        for pattern, what in _EXPLAINED:
            if re.search(pattern, name):
                return f"{name[:200]} belongs to {what}, whose memory is not that of a KV cache of all layers"
    if unknown:
        return f"what {_name_some(unknown)} {'is' if len(unknown) == 1 else 'are'} for, the planner does not know"
    return _check_keys_and_values(config, tensors)


def _is_accounted(name: str) -> bool:
    unlike = any(re.search(pattern, name) for pattern, _ in _EXPLAINED)
    return not unlike and (has_rule(name) or _PARTS.search(split_name(name)[0]) is not None)


def _list_outputs(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool, int, int]]:
    """Yield the tensors of keys and values, whether they have keys, their outputs, and how many config.json says."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    for tensor in tensors:
        found = None if is_tower(tensor) else _OUTPUTS.search(tensor.name)
        if found and len(tensor.shape) == 2:
            # GPT-2, and quantizers into integers beside what they pack, store the outputs in columns.
            outputs = max(tensor.shape) if found["part"] == "c_attn" else tensor.shape[found["leaf"] == "scales"]
            most = (heads + 2 * kv_heads if found["fused"] else kv_heads) * size
            yield tensor, not found["value"], outputs, most


def _check_keys_and_values(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> str:
    """Return why the KV cache may be larger than one of all layers by config.json; empty if it is not."""
    attentions, layers = 0, count_layers(config, tensors)
    for tensor, keys, outputs, most in _list_outputs(config, tensors):
        if outputs > most:
            return f"{tensor.name[:200]} has {outputs} outputs, and config.json says {most}"
        attentions += tensor.total if keys else 0
    return "" if 0 < attentions <= layers else f"the tensors are of {attentions} attentions for {layers} layers"


def is_kv_cache_exact(config: Mapping[str, Any], tensors: Sequence[Tensor], window: int | None) -> bool:
    """Return whether the KV cache is as large as the upper bound: all layers have one, full attention, and keys and
    values of the sizes in config.json."""
    if window or set(config.get("layer_types") or ()) - {Attention.FULL} or any(map(config.get, _SMALLER)):
        return False
    found = [(tensor, keys) for tensor, keys, outputs, most in _list_outputs(config, tensors) if outputs == most]
    attentions = sum(tensor.total for tensor, keys in found if keys)
    return bool(attentions == config["num_hidden_layers"] == count_layers(config, tensors))


def count_layers(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> int:
    """Return the number of decoder layers, with those for speculative decoding that config.json does not count."""
    return max([int(config["num_hidden_layers"]), *(layer + 1 for tensor in tensors for layer in tensor.layers or ())])


def _name_some(names: Sequence[str]) -> str:
    return ", ".join(name[:200] for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def is_tower(tensor: Tensor) -> bool:
    return tensor.layers is None and _TOWERS.search(tensor.name) is not None


def has_towers(tensors: Sequence[Tensor]) -> bool:
    return any(map(is_tower, tensors))


def widen_for_groups(layer_types: Sequence[str] | None, window: int | None, head_size: int) -> int:
    return int(head_size * GROUPS) if window or len(set(layer_types or ())) > 1 else head_size


def is_generic(source: str) -> bool:
    return source.startswith(_MARK)


def describe_generic(architecture: str, source: str) -> str:
    before = source.removeprefix("recorded: ").removeprefix(APPROXIMATE)
    return (
        f"{_MARK}because the planner does not know {architecture}: weights and KV cache are upper "
        f"bounds from config.json and the tensors ({before}). For published checkpoints of other architectures such "
        f"weights were 1 to 11 % above what vLLM loads"
    )


def bound_weights(most_bytes: float, whole_bytes: float, gpus: int) -> Uncertain:
    """Return the weights on a GPU: the upper bound as the figure, and the least that they may be.

    Args:
        most_bytes: on one rank, with what no rule knows on each of them.
        whole_bytes: on a single GPU.
    """
    most = most_bytes * MOST_OF_WEIGHTS
    return Uncertain(most, whole_bytes / gpus * LEAST_OF_WEIGHTS, most)


def bound_encoder(model: Model, max_num_batched_tokens: int, max_model_len: int) -> int:
    """Return the most bytes that the encoders of images, videos and audio take for a batch and its outputs.

    vLLM encodes as many tokens at once as a batch has, or those of the largest item (compute_mm_encoder_budget, 0.32.0
    v1/core/encoder_cache_manager.py); a video or an audio file has no more than a request.
    """
    vision = model.facts.config.get("vision_config")
    merged = vision.get("spatial_merge_size") if isinstance(vision, Mapping) else None
    patches = merged**2 if type(merged) is int and 0 < merged < 100 else PATCHES_PER_TOKEN
    widths = (max(tensor.shape) for tensor in model.facts.tensors if is_tower(tensor) and ".*." in tensor.name)
    live = LIVE_TENSORS * max(widths, default=model.hidden_size)
    tokens = max(max_num_batched_tokens, max_model_len, LARGEST_IMAGE_TOKENS)
    return tokens * (patches * live + OUTPUT_TENSORS * model.hidden_size) * 2
