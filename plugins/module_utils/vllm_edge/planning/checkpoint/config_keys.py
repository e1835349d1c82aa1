# SPDX-License-Identifier: Apache-2.0
"""The keys of config.json that the planner reads, and what their values must be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...text import shown
from .headers import LARGEST, FactsError

MAX_LAYERS = 10_000


class Form(NamedTuple):
    words: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: int) -> Form:
    return Form(f"a whole number from {least} to {most:,}", lambda value: type(value) is int and least <= value <= most)


def _list_of(kind: type, words: str) -> Form:
    def fits(value: Any) -> bool:
        whole = isinstance(value, list) and len(value) <= MAX_LAYERS
        return whole and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)

    return Form(f"a list of at most {MAX_LAYERS:,} {words}", fits)


def _is_bounded(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) <= MAX_LAYERS and all(map(_is_bounded, value.values()))
    return not isinstance(value, int | float) or 0 <= value <= LARGEST


def _is_pattern(value: Any) -> bool:
    # EXAONE's are letters; its config.json has layer_types too, which decide.
    return re.fullmatch("[LG]{1,100}", value) is not None if isinstance(value, str) else _whole(0, LARGEST).fits(value)


def _is_feature_layer(value: Any) -> bool:
    layers = value if isinstance(value, list) and value else [value]
    return all(type(layer) is int and abs(layer) <= MAX_LAYERS for layer in layers)


CONFIG_KEYS: Mapping[str, Form] = {
    **dict.fromkeys(
        ("hidden_size", "max_position_embeddings", "num_attention_heads", "vocab_size"), _whole(1, LARGEST)
    ),
    "num_hidden_layers": _whole(1, MAX_LAYERS),
    **dict.fromkeys(("max_window_layers", "num_kv_shared_layers"), _whole(0, MAX_LAYERS)),
    **dict.fromkeys(
        (
            *("_sliding_window_pattern", "attention_chunk_size", "decoder_sparse_step", "first_k_dense_replace"),
            *("global_head_dim", "head_dim", "hidden_size_per_layer_input", "index_head_dim", "index_topk"),
            "interleave_moe_layer_step",
            *("intermediate_size", "intermediate_size_mlp", "kv_lora_rank", "moe_intermediate_size", "moe_layer_freq"),
            *("full_attention_interval", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
            *("linear_num_value_heads", "linear_value_head_dim"),
            *("n_routed_experts", "n_shared_experts", "no_rope_layer_interval", "num_experts", "num_experts_per_tok"),
            *("chunk_size", "conv_kernel", "mamba_head_dim", "mamba_num_heads", "moe_latent_size", "n_groups"),
            *("moe_shared_expert_intermediate_size", "ssm_state_size"),
            *("num_global_key_value_heads", "num_key_value_heads", "num_local_experts"),
            *("original_max_position_embeddings", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim"),
            *("shared_expert_intermediate_size", "sliding_window", "top_k_experts", "v_head_dim"),
        ),
        _whole(0, LARGEST),
    ),
    **dict.fromkeys(
        ("attention_k_eq_v", "is_causal", "tie_word_embeddings", "use_double_wide_mlp", "use_sliding_window"),
        Form("true or false", lambda value: isinstance(value, bool)),
    ),
    **dict.fromkeys(
        ("dtype", "hybrid_override_pattern", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "torch_dtype"),
        Form(
            f"a text of at most {MAX_LAYERS:,} characters",
            lambda value: isinstance(value, str) and len(value) <= MAX_LAYERS,
        ),
    ),
    **dict.fromkeys(("layer_types", "layers_block_type"), _list_of(str, "texts")),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers"), _list_of(int, "whole numbers")),
    **dict.fromkeys(
        ("per_layer_config", "rope_parameters", "rope_scaling"),
        Form(
            f"an object of texts, objects and numbers from 0 to {LARGEST:,}",
            lambda value: isinstance(value, dict) and _is_bounded(value),
        ),
    ),
    "partial_rotary_factor": Form(
        "a number above 0, at most 1", lambda value: type(value) in (int, float) and 0 < value <= 1
    ),
    "sliding_window_pattern": Form("a whole number, or L and G", _is_pattern),
    "use_bidirectional_attention": Form("any value", lambda value: True),
    "vision_feature_layer": Form("the number of a layer, or a list of them", _is_feature_layer),
}
"""At the top of config.json and in its text_config. Recorded facts contain no others."""


def check_config(repo: str, config: Mapping[str, Any]) -> None:
    """Raise FactsError if a value of config.json has another type than the planner reads, or no sensible size."""
    for where, values in (("", config), ("text_config.", config.get("text_config") or {})):
        for key in sorted(CONFIG_KEYS.keys() & values.keys()):
            value, form = values[key], CONFIG_KEYS[key]
            if value is not None and not form.fits(value):
                raise FactsError(
                    f"{repo}: {where}{key} in config.json is {shown(value)}; {form.words} is expected. Fetch it again, "
                    "or take the model from another repository."
                )
