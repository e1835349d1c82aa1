# SPDX-License-Identifier: Apache-2.0
"""Interpretation of a checkpoint, Facts -> Model, for the model families that the planner knows.

Each rule follows what vLLM does with that family. A file that is named without a path is in
`vllm/model_executor/models/`, in releases 0.19 to 0.33. An architecture, a quantization or a weight that is not known
is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...text import printable, shown
from ..contract import (
    Attention,
    Component,
    DecoderLayer,
    Encoder,
    Facts,
    Latent,
    Model,
    Sharding,
    State,
    Tensor,
    UnknownArchitecture,
)
from .components import build_components, copy_k_to_v, cut_encoder, name_mixer, split_drafting
from .config_keys import CONFIG_KEYS, check_config
from .generic import count_layers, describe_generic, find_unbounded, has_towers, is_kv_cache_exact, widen_for_groups
from .headers import FactsError
from .inferred import EXPERT_KEYS
from .quantization import read_quantization


@dataclass(frozen=True)
class _Config:
    """The part of config.json about the language model, with the defaults of its family."""

    repo: str
    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise FactsError(f"{self.repo}: config.json lacks {key}. Fetch it again, or complete it.")
        return value

    def get(self, key: str) -> Any:
        # Only these keys are recorded, so another one would be missing if there are no files.
        assert key in CONFIG_KEYS, key
        return self.values.get(key, self.defaults.get(key))

    @property
    def head_size(self) -> int:
        return int(self.get("head_dim") or self["hidden_size"] // self["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.get("num_key_value_heads") or self["num_attention_heads"])

    @property
    def layers(self) -> range:
        return range(self["num_hidden_layers"])


@dataclass(frozen=True)
class _Family:
    """One model family: how its layers are derived from config.json, and its defaults."""

    name: str
    layers: Callable[[_Config], tuple[DecoderLayer, ...]]
    defaults: Mapping[str, Any]
    """Defaults of config.json keys, from the family's configuration class in transformers 5.16."""
    towers: Sharding = Sharding.NOT_LOADED
    """How the vision and audio towers are distributed, if the architecture has any."""
    every_stage: bool = False
    """Whether the model file builds embeddings, head and last norm on every stage of the pipeline. llama.py, qwen2.py
    and granite.py build them where they are used."""
    ropes: int = 1
    """Sets of RoPE parameters: Gemma's sliding layers have another base than its full ones, NemotronH has none."""
    rope_float32: bool = False
    """Whether the RoPE caches are in float32 whatever the model's dtype is."""
    tower_ropes: tuple[tuple[int, int], ...] = ()
    """Rotary dimension and rows of the RoPE caches of the tower."""
    expert_size: str = "moe_intermediate_size"
    """The key of an expert's intermediate size. If it is intermediate_size, no layer has a dense MLP."""
    router_float32: bool = False
    """Whether the router is in float32 whatever the model's dtype is."""

    @property
    def qwen_tower(self) -> bool:
        """Whether it has the tower of qwen2_5_vl.py or qwen3_vl.py (also in qwen3_5.py)."""
        return self.name.startswith("qwen") and self.towers is Sharding.SHARDED


def _read_window(config: _Config) -> int | None:
    """Return the sliding window of the whole model, or None.

    Qwen's counts only if use_sliding_window is set; 0 means none (`ModelConfig.__post_init__`, vllm/config/model.py).
    """
    if config.get("use_sliding_window") is False:
        return None
    return config.get("sliding_window") or None


def _build_layers(config: _Config, kinds: Iterable[str], window: int | None) -> tuple[DecoderLayer, ...]:
    """Return layers of these kinds of attention; the window is that of all but full attention."""
    heads, size = config.kv_heads, config.head_size
    return tuple(
        DecoderLayer(index, Attention(kind), heads, size, None if kind == Attention.FULL else window)
        for index, kind in enumerate(kinds)
    )


def _build_uniform_layers(config: _Config, by_type: bool = True) -> tuple[DecoderLayer, ...]:
    """Return layers that differ at most in their attention type.

    If there are no layer_types, or all are sliding, sliding_window applies to every layer. If all are full, it did so
    up to 0.26 (`is_interleaved`, engine/arg_utils.py:1562 of 0.19.0) and does not since 0.27 (engine/arg_utils.py:1939
    of 0.27.0). With mixed types llama.py follows the type (`by_type`), and Qwen's files refuse.
    """
    window, types = _read_window(config), config.get("layer_types") or []
    mixed = len(set(types)) > 1
    if mixed and not by_type and window:
        raise FactsError(f"{config.repo}: vLLM does not run this family with a sliding window for only some layers.")
    if window and set(types) == {Attention.FULL}:
        raise FactsError(
            f"{config.repo}: config.json has sliding_window {window}, and only {Attention.FULL} in layer_types. "
            "Releases of vLLM differ in which of them counts. Set sliding_window to null, or take layer_types away."
        )
    sliding = (window and (not mixed or types[index] == Attention.SLIDING) for index in config.layers)
    return _build_layers(config, (Attention.SLIDING if each else Attention.FULL for each in sliding), window)


def _build_qwen_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return Qwen3's layers: sliding from max_window_layers on (`Qwen3Config`). Its MoE has no layer_types at all."""
    if config.get("layer_types") is None and config.get("max_window_layers") is not None and _read_window(config):
        first = config["max_window_layers"]
        types = [Attention.FULL if index < first else Attention.SLIDING for index in config.layers]
        config = replace(config, values={**config.values, "layer_types": types})
    return _build_uniform_layers(config, by_type=False)


def _read_layer_types(config: _Config) -> list[str]:
    """Return layer_types: each layer whose number is a multiple of the pattern has full attention, unless config.json
    says otherwise."""
    pattern = config.get("sliding_window_pattern") or config["_sliding_window_pattern"]
    types = config.get("layer_types") or [
        Attention.SLIDING if (index + 1) % pattern else Attention.FULL for index in config.layers
    ]
    known = (Attention.FULL, Attention.SLIDING)
    if set(types) - set(known) or len(types) != len(config.layers):
        raise FactsError(
            f"{config.repo}: layer_types in config.json has {len(types)} entries {sorted(set(types))} for "
            f"{len(config.layers)} layers; the planner knows {' and '.join(known)}."
        )
    return list(types)


def _build_patterned_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return layers of which each has the attention that layer_types or the pattern says."""
    types = _read_layer_types(config)
    return _build_layers(config, types, config["sliding_window"] if Attention.SLIDING in types else None)


def _build_exaone_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    # The small model has no window, and only full attention.
    return _build_patterned_layers(config) if config.get("sliding_window") else _build_uniform_layers(config)


def _build_llama4_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return Llama 4's layers: each fourth has no RoPE and full attention, the others attend within chunks."""
    chunk, interval = config.get("attention_chunk_size"), config["no_rope_layer_interval"]
    ropes = config.get("no_rope_layers") or [(index + 1) % interval for index in config.layers]
    if len(ropes) < len(config.layers):
        raise FactsError(
            f"{config.repo}: no_rope_layers in config.json has {len(ropes)} entries for {len(config.layers)} layers. "
            "Fetch it again."
        )
    chunked = (chunk and ropes[index] for index in config.layers)
    return _build_layers(config, (Attention.CHUNKED if each else Attention.FULL for each in chunked), chunk)


def _build_latent_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return DeepSeek's layers: the KV cache has the compressed vector and the shared part of the key. Those of V3.2
    have an indexer too."""
    most_indexed = math.inf if "index_topk" in config.defaults else 0
    for key, most in (("moe_layer_freq", 1), ("index_topk", most_indexed)):
        if (config.get(key) or 0) > most:
            raise FactsError(
                f"{config.repo}: {key} in config.json is {shown(config.get(key))}, a kind of DeepSeek that the planner "
                "does not know. Take DeepSeek V2, V3, V3.2, R1 or Kimi K2, or start it without a plan "
                "(-e plan_override=true)."
            )
    size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    return tuple(DecoderLayer(index, Attention.LATENT, 1, size) for index in config.layers)


def _read_latent(config: _Config) -> Latent:
    """Return the sizes of latent attention. The indexer keeps a byte for each element of its key, and four more for
    each 128 (DeepseekV32IndexerCache, deepseek_v2.py)."""
    head_size, index = config["qk_nope_head_dim"] + config["v_head_dim"], 0
    if config.get("index_topk"):
        index = config["index_head_dim"] + config["index_head_dim"] // 128 * 4
    return Latent(config["kv_lora_rank"], config["qk_rope_head_dim"], head_size, index)


def _build_hybrid_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return the layers of Qwen3-Next and Qwen3.5: linear attention, except for each fourth."""
    interval, linear = config["full_attention_interval"], Attention.LINEAR
    types = config.get("layer_types") or [
        linear if (index + 1) % interval else Attention.FULL for index in config.layers
    ]
    if len(types) != len(config.layers) or set(types) != {Attention.FULL, linear}:
        raise FactsError(
            f"{config.repo}: layer_types in config.json has {len(types)} entries {sorted(set(types))} for "
            f"{len(config.layers)} layers; the planner knows {Attention.FULL} and {linear}, each in some of them."
        )
    keys = config["linear_key_head_dim"] * config["linear_num_key_heads"]
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    # QwenGatedDeltaNetAttention (layers/mamba/gdn/qwen_gdn_linear_attn.py).
    state = State(
        2 * keys + values,
        config["linear_conv_kernel_dim"] - 1,
        values * config["linear_key_head_dim"],
        config.get("mamba_ssm_dtype"),
    )
    return tuple(
        DecoderLayer(index, Attention.LINEAR, 0, 0, state=state)
        if kind == linear
        else DecoderLayer(index, Attention.FULL, config.kv_heads, config.head_size)
        for index, kind in enumerate(types)
    )


_KINDS = {
    **dict.fromkeys(("M", "mamba", Attention.LINEAR), Attention.LINEAR),
    **dict.fromkeys(("*", "attention", Attention.FULL), Attention.FULL),
    **dict.fromkeys(("E", "moe", "-", "mlp"), Attention.NONE),
}
"""What config.json calls the layers of NemotronH (NemotronHConfig of transformers 5.16)."""


def _build_mamba_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return NemotronH's layers, of which each is Mamba2, attention, experts or an MLP (nemotron_h.py)."""
    names = config.get("layers_block_type") or list(config["hybrid_override_pattern"])
    kinds = [_KINDS[name] for name in names if name in _KINDS]
    if not {Attention.LINEAR, Attention.FULL} <= set(kinds) or len(kinds) < len(names):
        raise FactsError(
            f"{config.repo}: config.json has layers {sorted(set(names))}; the planner knows {', '.join(_KINDS)}, and "
            "models with both Mamba and attention."
        )
    inner = config["mamba_num_heads"] * config["mamba_head_dim"]
    shared = 2 * config["n_groups"] * config["ssm_state_size"]  # B and C of each group
    single = config["n_groups"] == 1
    state = State(
        inner if single else inner + shared,
        config["conv_kernel"] - 1,
        inner * config["ssm_state_size"],
        config["mamba_ssm_cache_dtype"],
        shared if single else 0,
        config["chunk_size"],
    )
    full = DecoderLayer(0, Attention.FULL, config.kv_heads, config.head_size)
    of_kind = {Attention.FULL: full, Attention.LINEAR: DecoderLayer(0, Attention.LINEAR, 0, 0, state=state)}
    none = DecoderLayer(0, Attention.NONE, 0, 0)
    return tuple(replace(of_kind.get(kind, none), index=index) for index, kind in enumerate(kinds))


def _build_generic_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return layers with full attention, whose KV cache is at least as large as that of any other attention."""
    size = widen_for_groups(config.get("layer_types"), _read_window(config), config.head_size)
    return tuple(DecoderLayer(index, Attention.FULL, config.kv_heads, size) for index in config.layers)


def _gemma4(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return Gemma 4's layers.

    Full attention has its own head size and, with attention_k_eq_v, its own number of KV heads. The last layer is
    always full. The last num_kv_shared_layers read the cache of the last layer of their type before them.
    """
    types = _read_layer_types(config)
    types[-1] = Attention.FULL
    own = max(0, len(types) - (config.get("num_kv_shared_layers") or 0))
    last = {kind: index for index, kind in enumerate(types[:own])}
    # From 5.16 on transformers writes per layer what was global_head_dim and num_global_key_value_heads before.
    overrides = {int(index): values for index, values in (config.get("per_layer_config") or {}).items()}
    full: dict[str, Any] = {"head_dim": config.get("global_head_dim")}
    if config.get("attention_k_eq_v"):
        full["num_key_value_heads"] = config.get("num_global_key_value_heads")

    def layer(index: int, kind: str) -> DecoderLayer:
        special = full if kind == Attention.FULL else {}
        special = overrides.get(index, {}) if overrides else special
        target = last.get(kind) if index >= own else None
        return DecoderLayer(
            index,
            Attention(kind),
            special.get("num_key_value_heads") or config.kv_heads,
            special.get("head_dim") or config.head_size,
            config["sliding_window"] if kind == Attention.SLIDING else None,
            target,
        )

    return tuple(layer(index, kind) for index, kind in enumerate(types))


_GEMMA2 = {
    "vocab_size": 256000,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "_sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    "_sliding_window_pattern": 6,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_GEMMA4 = {
    "_sliding_window_pattern": 6,
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_ERNIE = {"head_dim": 128, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_GLM4 = {"head_dim": 128, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5}
_GPT_OSS = {
    "vocab_size": 201088,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "sliding_window": 128,
    "_sliding_window_pattern": 2,
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}
_LLAMA4 = {
    "vocab_size": 202048,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
# Those of LlamaConfig; config.json names only what differs, whether the language model is a Llama or a Mistral.
_LLAVA_NEXT = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "max_position_embeddings": 2048,
    "vision_feature_layer": -2,
}
_MIXTRAL = {"vocab_size": 32000, "max_position_embeddings": 131072}
_MISTRAL = {"sliding_window": 4096, "max_position_embeddings": 131072}
# Of Ministral3Config, and of the language model that Mistral3Config makes itself: no window. So it is in Mistral's own
# format, which vLLM prefers to config.json, if it says nothing (0.33.0 transformers_utils/config.py:893).
_MISTRAL3 = {"vocab_size": 131072, "head_dim": 128, "max_position_embeddings": 131072}
_MINISTRAL3 = {**_MISTRAL3, "max_position_embeddings": 262144}
_GLM4_MOE = {"max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1}
_GLM4_MOE_LITE = {"max_position_embeddings": 202752, "first_k_dense_replace": 1}
_QWEN2 = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_QWEN3 = {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28}
_QWEN2_MOE = {"use_sliding_window": False, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 5632}
_QWEN3_MOE = {"use_sliding_window": False, "decoder_sparse_step": 1}

_HYBRID = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "partial_rotary_factor": 0.25,
    "decoder_sparse_step": 1,
}
_DEEPSEEK = {"vocab_size": 102400, "moe_layer_freq": 1, "first_k_dense_replace": 0}

FAMILIES: Mapping[str, _Family] = {
    # gemma4_mm.py builds transformers' own towers, replicated on every rank; gemma3_mm.py builds vLLM's SigLIP and
    # mistral3.py its Pixtral, which are sharded.
    "Gemma4ForConditionalGeneration": _Family("gemma4", _gemma4, _GEMMA4, Sharding.REPLICATED, True, 2),
    # Without towers: patches of pixels are projected (0.23.0 model_executor/models/gemma4_unified.py).
    "Gemma4UnifiedForConditionalGeneration": _Family("gemma4", _gemma4, _GEMMA4, Sharding.REPLICATED, True, 2),
    "Gemma4ForCausalLM": _Family("gemma4", _gemma4, _GEMMA4, every_stage=True, ropes=2),
    "Gemma3ForConditionalGeneration": _Family(
        "gemma3", _build_patterned_layers, _GEMMA3, Sharding.SHARDED, every_stage=True, ropes=2
    ),
    "Gemma3ForCausalLM": _Family("gemma3", _build_patterned_layers, _GEMMA3, every_stage=True, ropes=2),
    "Gemma2ForCausalLM": _Family("gemma2", _build_patterned_layers, _GEMMA2, every_stage=True),
    "LlamaForCausalLM": _Family("llama3", _build_uniform_layers, {}),
    "MistralForCausalLM": _Family("mistral", _build_uniform_layers, _MISTRAL),
    "Mistral3ForConditionalGeneration": _Family("mistral3", _build_uniform_layers, _MISTRAL3, Sharding.SHARDED),
    "Ministral3ForCausalLM": _Family("ministral3", _build_uniform_layers, _MINISTRAL3),
    "Phi3ForCausalLM": _Family("phi3", _build_uniform_layers, {"max_position_embeddings": 4096}),
    "Glm4ForCausalLM": _Family("glm4", _build_uniform_layers, _GLM4),
    "Ernie4_5ForCausalLM": _Family("ernie4_5", _build_uniform_layers, _ERNIE),
    "GraniteForCausalLM": _Family("granite", _build_uniform_layers, {}),
    "Exaone4ForCausalLM": _Family("exaone4", _build_exaone_layers, {"sliding_window_pattern": 4}),
    "Qwen2ForCausalLM": _Family("qwen2", _build_qwen_layers, _QWEN2),
    "Qwen3ForCausalLM": _Family("qwen3", _build_qwen_layers, _QWEN3),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", _build_qwen_layers, _QWEN3_MOE, every_stage=True),
    "Qwen2_5_VLForConditionalGeneration": _Family("qwen2_5_vl", _build_qwen_layers, _QWEN2, Sharding.SHARDED),
    "Qwen3VLForConditionalGeneration": _Family("qwen3_vl", _build_uniform_layers, {"head_dim": 128}, Sharding.SHARDED),
    "Qwen3VLMoeForConditionalGeneration": _Family(
        "qwen3_vl_moe", _build_uniform_layers, {"decoder_sparse_step": 1}, Sharding.SHARDED, every_stage=True
    ),
    "Qwen2MoeForCausalLM": _Family("qwen2_moe", _build_qwen_layers, _QWEN2_MOE, every_stage=True),
    "MixtralForCausalLM": _Family(
        "mixtral", _build_uniform_layers, _MIXTRAL, every_stage=True, expert_size="intermediate_size"
    ),
    "MiniMaxM2ForCausalLM": _Family(
        "minimax_m2", _build_uniform_layers, {}, expert_size="intermediate_size", router_float32=True
    ),
    "LlavaNextForConditionalGeneration": _Family("llava_next", _build_uniform_layers, _LLAVA_NEXT, Sharding.SHARDED),
    "Llama4ForCausalLM": _Family("llama4", _build_llama4_layers, _LLAMA4, expert_size="intermediate_size"),
    "Llama4ForConditionalGeneration": _Family(
        "llama4",
        _build_llama4_layers,
        _LLAMA4,
        Sharding.SHARDED,
        expert_size="intermediate_size",
        tower_ropes=(
            (176, 577),
        ),  # mllama4.py: 44 complex numbers of 8 bytes for each of 24 x 24 patches and one class
    ),
    "Glm4MoeForCausalLM": _Family("glm4_moe", _build_uniform_layers, _GLM4_MOE, router_float32=True),
    "Glm4MoeLiteForCausalLM": _Family("glm4_moe_lite", _build_latent_layers, _GLM4_MOE_LITE, router_float32=True),
    # deepseek_v2.py runs V2, V3, R1 and Kimi K2.
    "DeepseekV2ForCausalLM": _Family("deepseek", _build_latent_layers, _DEEPSEEK),
    "DeepseekV3ForCausalLM": _Family("deepseek", _build_latent_layers, _DEEPSEEK),
    "DeepseekV32ForCausalLM": _Family(
        "deepseek_v32", _build_latent_layers, _DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128}
    ),
    # llama_eagle3.py, the drafter of another model.
    **dict.fromkeys(
        ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"),
        _Family("eagle3", _build_uniform_layers, {"max_position_embeddings": 2048}),
    ),
    "Qwen3NextForCausalLM": _Family("qwen3_next", _build_hybrid_layers, _HYBRID, every_stage=True),
    # Qwen3.5, 3.6 and 3.8; qwen3_5.py has no dense layers among those with experts.
    "Qwen3_5ForCausalLM": _Family("qwen3_5", _build_hybrid_layers, _HYBRID, every_stage=True),
    "Qwen3_5MoeForCausalLM": _Family("qwen3_5_moe", _build_hybrid_layers, _HYBRID, every_stage=True),
    "Qwen3_5ForConditionalGeneration": _Family("qwen3_5", _build_hybrid_layers, _HYBRID, Sharding.SHARDED, True),
    "Qwen3_5MoeForConditionalGeneration": _Family("qwen3_5_moe", _build_hybrid_layers, _HYBRID, Sharding.SHARDED, True),
    # On Hopper, B200 and B300 its router stays in the model's dtype, 15 MiB less for Nano
    # (fused_moe/router/gate_linear.py, 0.19.0 to 0.33.0).
    "NemotronHForCausalLM": _Family(
        "nemotron_h",
        _build_mamba_layers,
        {"head_dim": 128, "chunk_size": 128},
        every_stage=True,
        ropes=0,
        router_float32=True,
    ),
    "GptOssForCausalLM": _Family(
        "gpt_oss",
        _build_patterned_layers,
        _GPT_OSS,
        every_stage=True,
        rope_float32=True,
        expert_size="intermediate_size",
    ),
}
"""One row for each architecture that the planner knows. Another one is a row here and cases in
tests/unit/planning/published.py."""
_PLAN_NEEDS = {
    "GlmMoeDsaForCausalLM": "which of its layers have an indexer (indexer_types), whose cache others read",
    "DeepseekV4ForCausalLM": "the caches of its compressed tokens, of the window and of the indexer, by GPU",
    "KimiLinearForCausalLM": "the state that its linear attention keeps for each request beside latent attention",
    "GraniteMoeHybridForCausalLM": "the state that its Mamba layers keep for each request beside the KV cache",
    "NemotronHPuzzleForCausalLM": "the sizes of each of its layers (block_configs), and so of their state",
    **dict.fromkeys(
        ("BambaForCausalLM", "FalconH1ForCausalLM", "Zamba2ForCausalLM"),
        "the state of its Mamba2 layers, whose sizes config.json names otherwise than NemotronH",
    ),
    **dict.fromkeys(
        ("JambaForCausalLM", "Plamo2ForCausalLM"), "the state of its Mamba layers, of another form than that of Mamba2"
    ),
}
"""What the planner would have to count of architectures that are asked for and that it refuses."""
_DRAFTING = re.compile(r"^(model\.)?mtp\.|\.eh_proj\.")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_BOTH_WAYS = {"is_causal": False, "use_bidirectional_attention": True}
GENERIC = _Family("generic", _build_generic_layers, {}, Sharding.REPLICATED, every_stage=True, rope_float32=True)
"""For an architecture without a row. Its RoPE cache is counted in float32, the largest that it can be."""


def interpret(facts: Facts, layers: Callable[[_Config], tuple[DecoderLayer, ...]] | None = None) -> Model:
    """Interpret a checkpoint.

    Args:
        layers: how its layers are derived from config.json, in place of the family's way.

    Raises:
        UnknownArchitecture: if the architecture is not in FAMILIES, and its memory cannot be bounded either.
        FactsError: if config.json contradicts the tensors, or something in it or them is missing or unknown.
    """
    try:
        return _interpret(facts, layers)
    except (FactsError, UnknownArchitecture):
        raise
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        # What `check_config` does not name: the quantization and the scaling of RoPE have many forms.
        raise FactsError(
            f"{facts.repo}: config.json has a value that the planner cannot read ({str(error)[:200]!r}). Fetch it "
            "again."
        ) from error


def warn_of_code(facts: Facts) -> str:
    """Return a warning, as a sentence, about a checkpoint that brings its own Python code; empty if it has none."""
    if not facts.config.get("auto_map"):
        return ""
    return (
        f"{facts.repo}: auto_map in config.json names Python code of the repository. vllm-edge fetches none and vLLM "
        "runs none without --trust-remote-code: choose a model that needs none."
    )


def _interpret(facts: Facts, build_layers: Callable[[_Config], tuple[DecoderLayer, ...]] | None) -> Model:
    architectures = facts.config.get("architectures") or ["(none)"]
    if not isinstance(architectures, list | tuple) or not isinstance(architectures[0], str):
        raise FactsError(f"{facts.repo}: architectures in config.json is {shown(architectures)}, no list of names.")
    architecture = architectures[0]
    family = FAMILIES.get(architecture, GENERIC)
    check_config(facts.repo, facts.config)
    text = facts.config.get("text_config") or facts.config.get("transformer_layer_config") or {}
    said = {key: value for key, value in text.items() if value is not None or key not in facts.config}
    config = _Config(facts.repo, {**facts.config, **said}, family.defaults)
    _check_generates(facts.repo, architecture, config, family)
    if family is GENERIC:
        facts, config = _bound_unknown(facts, config, architecture)
    layers = (build_layers or family.layers)(config)
    latent = _read_latent(config) if layers[0].attention is Attention.LATENT else None
    drafting: tuple[Tensor, ...] = ()
    if family is not GENERIC and (latent or any(_DRAFTING.search(tensor.name) for tensor in facts.tensors)):
        kept, drafting = split_drafting(facts.tensors, len(layers))
        facts = replace(facts, tensors=kept)
    if family.name == "eagle3":
        facts = replace(facts, tensors=tuple(_name_middle_layer(tensor) for tensor in facts.tensors))
    if family.name == "nemotron_h":
        facts = replace(facts, tensors=tuple(replace(each, name=name_mixer(each.name)) for each in facts.tensors))
    experts, per_token, expert_size = _read_experts(config, family)
    encoder = _read_encoder(facts) if family.qwen_tower and not build_layers else None
    tower_ropes = family.tower_ropes
    if encoder:
        # Qwen's tower rotates half of each of 16 heads; that of Qwen3.5-0.8B has 12.
        tower_ropes = ((encoder.hidden_size // (12 if encoder.hidden_size == 768 else 16) // 2, 8192),)
    model = Model(
        facts=facts,
        architecture=architecture,
        family=family.name,
        dtype=_read_dtype(config),
        hidden_size=config["hidden_size"],
        vocabulary=config["vocab_size"],
        query_heads=config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        layers=layers,
        components=(),
        quantization=read_quantization(facts),
        intermediate_sizes=_list_intermediate_sizes(config, experts, family),
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate_size=expert_size,
        # The indexer rotates otherwise than the attention.
        rope_caches=(*_list_rope_caches(config, layers, family.ropes), *tower_ropes)
        * (2 if latent and latent.index_bytes else 1),
        per_layer_embedding_size=config.get("hidden_size_per_layer_input") or 0,
        multimodal=has_towers(facts.tensors) if family is GENERIC else family.towers is not Sharding.NOT_LOADED,
        embeddings_on_every_stage=family.every_stage,
        rope_float32=family.rope_float32,
        router_float32=family.router_float32,
        generic=family is GENERIC,
        kv_cache_exact=family is not GENERIC or is_kv_cache_exact(config.values, facts.tensors, _read_window(config)),
        latent=latent,
        encoder=encoder,
        drafting=drafting,
    )
    tied = bool(config.get("tie_word_embeddings"))
    if family.name == "eagle3":
        tied = not any(tensor.name == "lm_head.weight" for tensor in facts.tensors)

    def copies(parts: list[Component]) -> list[Component]:
        return [*copy_k_to_v(parts)] if config.get("attention_k_eq_v") else []

    if model.generic:
        # What no rule knows is counted on every rank; so are towers, even where the engine takes only text.
        parts = [
            replace(part, kind=part.kind.replace("towers", "other"))
            for part in build_components(model, family.towers, tied, Sharding.REPLICATED)
        ]
        return replace(model, components=tuple(parts + copies(parts)))
    _check(model)
    components = list(build_components(model, family.towers, tied))
    if family.name == "llava_next":
        components = list(cut_encoder(components, config["vision_feature_layer"]))
    if not tied and not any(component.tensor.name.endswith("lm_head.weight") for component in components):
        raise FactsError(
            f"{facts.repo}: config.json says that tie_word_embeddings is false, and there is no lm_head.weight. "
            "Fetch its weights again."
        )
    return replace(model, components=tuple(components + copies(components)))


def _name_middle_layer(tensor: Tensor) -> Tensor:
    """Return a tensor of an EAGLE-3 drafter with the name that its one layer has in vLLM (llama_eagle3.py)."""
    if not tensor.name.startswith("midlayer."):
        return tensor
    return replace(tensor, name=tensor.name.replace("midlayer.", "layers.*."), layers=(0,))


def interpret_drafting(model: Model) -> Model:
    """Interpret the layers of a checkpoint for multi-token prediction as what vLLM builds of them.

    Embeddings, head and RoPE cache are the model's own (0.19.0 v1/spec_decode/eagle.py:1322-1456;
    v1/worker/gpu/spec_decode/eagle/utils.py). Raises FactsError if there are none, or a tensor is not known.
    """
    tensors = tuple(
        tensor for tensor in model.drafting if not re.search(r"(shared_head\.head|embed_tokens)\.weight$", tensor.name)
    )
    layers = {layer for tensor in tensors for layer in tensor.layers or ()}
    if not layers:
        raise FactsError(f"{model.facts.repo} has no layers for multi-token prediction")
    said = {"num_hidden_layers": len(layers), "first_k_dense_replace": 0, "tie_word_embeddings": True}
    text = model.facts.config.get("text_config") or {}
    config = {**model.facts.config, **said, **({"text_config": {**text, **said}} if text else {})}
    facts = replace(model.facts, config=config, tensors=tensors)
    all_full = (
        None if model.latent else lambda config: _build_layers(config, [Attention.FULL] * len(config.layers), None)
    )
    found = interpret(facts, all_full)
    return replace(found, rope_caches=(), multimodal=False)


def _check_generates(repo: str, architecture: str, config: _Config, family: _Family) -> None:
    """Raise UnknownArchitecture for a model that generates no tokens: vLLM takes the names of architectures that do by
    these endings (_SUFFIX_TO_DEFAULTS, 0.32.0 config/model.py), and two keys as attention in both directions, without
    a KV cache (llama.py, qwen2.py, config.py)."""
    said = [f"{key} {str(no).lower()}" for key, no in _BOTH_WAYS.items() if config.get(key) is no]
    if said:
        what = f"says {said[0]} in config.json"
    elif family is GENERIC and architecture != "(none)" and not architecture.endswith(_GENERATES):
        what = f"is a {printable(architecture[:100], '')}, which the planner does not know"
    else:
        return
    raise UnknownArchitecture(
        f"{repo} {what}: it plans models that generate text, whose architectures end in {', '.join(_GENERATES)}. "
        "Encoders, embedding models and rerankers have no tokens per second and mostly no KV cache. Start it without a "
        "plan (-e plan_override=true)."
    )


def _bound_unknown(facts: Facts, config: _Config, architecture: str) -> tuple[Facts, _Config]:
    """Return what is planned of an architecture without a row. Raises UnknownArchitecture if that has no bound."""
    found = find_unbounded(config.values, facts.tensors, read_quantization(facts))
    unbounded = "config.json names no architecture" if architecture == "(none)" else found
    name = printable(architecture[:100], "")
    if unbounded:
        needed = f". A plan of it needs {_PLAN_NEEDS[architecture]}" if architecture in _PLAN_NEEDS else ""
        raise UnknownArchitecture(
            f"{facts.repo} is a {name}, which the planner does not know, and a generic plan is not possible: "
            f"{unbounded}{needed}. Take a model of a family that it knows "
            f"({', '.join(sorted({family.name for family in FAMILIES.values()}))}), start it without a plan "
            "(-e plan_override=true), or add the architecture (CONTRIBUTING.md, Add a model)."
        )
    values = {**config.values, "num_hidden_layers": count_layers(config.values, facts.tensors)}
    return replace(facts, source=describe_generic(name, facts.source)), replace(config, values=values)


def _read_experts(config: _Config, family: _Family) -> tuple[int, int, int]:
    """Return how many experts there are, how many a token reads, and their intermediate size; 0 for dense models."""
    # When transformers itself writes Qwen's config.json, the key is num_local_experts.
    experts = next((found for key in EXPERT_KEYS if (found := config.get(key))), 0)
    if not experts:
        return 0, 0, 0
    per_token = config.get("top_k_experts") or config.get("num_experts_per_tok") or 0
    size = config.get(family.expert_size) or (config.get("intermediate_size") if family is GENERIC else 0)
    return experts, per_token, size or 0


def _read_dtype(config: _Config) -> str:
    """Return the dtype that vLLM computes in: float32 becomes bfloat16 (`_resolve_auto_dtype`,
    vllm/config/model.py)."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    if not dtype:
        raise FactsError(f"{config.repo}: config.json lacks dtype (or torch_dtype). Fetch it again, or complete it.")
    return "bfloat16" if dtype == "float32" else dtype


def _list_intermediate_sizes(config: _Config, experts: int, family: _Family) -> tuple[int, ...]:
    """Return the sizes of the dense MLPs. Gemma 4 has one beside its experts, Qwen2 MoE a shared expert; a layer of
    Qwen3 MoE has one or the other."""
    base, shared = config.get("intermediate_size") or 0, config.get("shared_expert_intermediate_size") or 0
    if config.get("n_routed_experts"):
        # DeepSeek: dense layers first, then layers with experts and shared ones.
        of_shared = config.get("moe_shared_expert_intermediate_size") or config["moe_intermediate_size"]
        shared = of_shared * (config.get("n_shared_experts") or 0)
        return tuple(size for size, there in ((base, config.get("first_k_dense_replace")), (shared, shared)) if there)
    if experts and family.expert_size == "intermediate_size":
        # Llama 4 has a shared expert of the same size, and dense layers between those with experts.
        dense = config.get("intermediate_size_mlp")
        alternates = (config.get("interleave_moe_layer_step") or 1) > 1
        return ((base, dense) if alternates else (base,)) if dense else ()
    if experts and config.get("decoder_sparse_step"):
        step, dense = config["decoder_sparse_step"], set(config.get("mlp_only_layers") or [])
        some = any(index in dense or (index + 1) % step for index in config.layers)
        return tuple(size for size, there in ((base, some), (shared, bool(shared))) if there)
    doubled = config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers")
    return (base, 2 * base) if doubled else (base,)


def _list_rope_caches(config: _Config, layers: tuple[DecoderLayer, ...], ropes: int) -> Iterable[tuple[int, int]]:
    """Return rotary dimension and rows of each cos/sin cache.

    `get_rope` keeps one cache for each head size and set of parameters. `linear` has factor times as many rows, `yarn`
    factor times the original positions, `longrope` both caches in one (vllm/model_executor/layers/rotary_embedding/).
    """
    if not ropes:
        return ()
    given: Mapping[str, Any] = config.get("rope_parameters") or {}
    legacy: Mapping[str, Any] = config.get("rope_scaling") or {}
    split = config.get("layer_types") is not None and any(kind in given for kind in Attention)
    # Gemma uses another base for sliding layers than for full ones, even if config.json does not say so.
    split = split or (ropes > 1 and len({layer.attention for layer in layers}) > 1)
    caches: dict[tuple[str, int], tuple[int, int]] = {}
    for layer in (layer for layer in layers if not layer.state):
        kind = layer.attention if split else Attention.FULL
        size = config["qk_rope_head_dim"] if layer.attention is Attention.LATENT else layer.head_size
        parameters = given.get(kind, given if not any(key in given for key in Attention) else {})
        if not given and kind is Attention.FULL:
            parameters = legacy
        caches[kind, size] = _size_rope_cache(config, parameters, size)
    return caches.values()


def _read_encoder(facts: Facts) -> Encoder:
    """Return Qwen's tower from its tensors, because records of facts have no vision_config. Raises FactsError."""
    found = {tensor.name.partition("visual.")[2]: tensor for tensor in facts.tensors if "visual." in tensor.name}
    gated = "blocks.*.mlp.gate_proj.bias" in found
    vision = facts.config.get("vision_config")
    sizes = dict(vision) if isinstance(vision, Mapping) else {}
    try:
        hidden, *pixels = found["patch_embed.proj.weight"].shape
        if not pixels:  # inferred
            patch = sizes["patch_size"]
            hidden, pixels = sizes["hidden_size"], [3, sizes.get("temporal_patch_size") or 2, patch, patch]
            inner = sizes["intermediate_size"]
        else:
            inner = found[f"blocks.*.mlp.{'gate_proj' if gated else 'linear_fc1'}.bias"].shape[0]
    except KeyError as error:
        raise FactsError(f"{facts.repo}: its vision tower lacks {error}. Fetch it again.") from error
    levels = found.get("deepstack_merger_list.*.norm.weight")
    fixed = math.prod(pixels) + (hidden // 8 if gated else hidden // 16)
    fixed += hidden if "pos_embed.weight" in found else 0
    return Encoder(hidden, inner, gated, fixed, levels.total if levels else 0, 4 * pixels[-1] ** 2)


def _size_rope_cache(config: _Config, parameters: Mapping[str, Any], head_size: int) -> tuple[int, int]:
    rope = str(parameters.get("rope_type") or parameters.get("type") or "default")
    # `proportional` also stores the dimensions that it does not rotate (gemma4_rope.py).
    part = float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    part = 1.0 if rope == "proportional" else part
    if config.get("rotary_dim") and part == 1.0:
        part = config["rotary_dim"] / head_size
    rows = config["max_position_embeddings"]
    if rope == "linear":
        rows = int(rows * _read_scaling(config, parameters, "factor"))
    elif rope in ("yarn", "deepseek_yarn"):
        original = _read_scaling(config, parameters, "original_max_position_embeddings")
        rows = int(original * _read_scaling(config, parameters, "factor"))
    elif rope in ("longrope", "su"):
        original = parameters.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        rows += int(original)
    return int(head_size * part), rows


def _read_scaling(config: _Config, parameters: Mapping[str, Any], key: str) -> float:
    if parameters.get(key) is None:
        raise FactsError(f"{config.repo}: config.json scales RoPE without {key}. Fetch it again, or complete it.")
    return float(parameters[key])


def _check(model: Model) -> None:
    """Raise FactsError if config.json and the tensors are not of the same model, and UnknownArchitecture if the tensors
    are of another one than the architecture's others."""
    repo = model.facts.repo
    seen = {layer for tensor in model.facts.tensors for layer in tensor.layers or ()}
    if seen != set(range(len(model.layers))):
        raise FactsError(
            f"{repo}: config.json says {len(model.layers)} layers, the tensors are of {len(seen)}. Fetch both again."
        )
    latent = model.latent
    others = {
        ".kv_a_proj_with_mqa.": ("latent attention (MLA)", latent, "DeepSeek, Kimi K2 and GLM-4.7-Flash"),
        ".indexer.": ("an indexer", latent and latent.index_bytes, "DeepSeek V3.2"),
        ".linear_attn.": ("linear attention", model.hybrid, "Qwen3-Next, Qwen3.5, 3.6 and 3.8"),
    }
    for tensor in model.facts.tensors:
        leaf = tensor.name.rsplit(".", 1)[-1]
        for part, (what, expected, known) in others.items():
            if part in tensor.name and not expected:
                raise UnknownArchitecture(
                    f"{repo} is a {model.architecture} with {what}: {tensor.name}. The planner knows that of {known} "
                    "only. Take one of these or a model without it, or start it without a plan (-e plan_override=true)."
                )
        if "self_attn.k_proj." in tensor.name and leaf in ("weight", "weight_packed"):
            for layer in (model.layers[index] for index in tensor.layers or ()):
                if tensor.shape[0] != layer.kv_heads * layer.head_size:
                    raise FactsError(
                        f"{repo}: config.json says {layer.kv_heads} KV heads of {layer.head_size} for layer "
                        f"{layer.index}, {tensor.name} has {tensor.shape[0]} rows. Fetch both again."
                    )
        if re.fullmatch(r"(?:(?:model|language_model)\.)*embed_tokens\.weight", tensor.name) and tensor.shape != (
            model.vocabulary,
            model.hidden_size,
        ):
            raise FactsError(
                f"{repo}: config.json says vocab_size {model.vocabulary} and hidden_size {model.hidden_size}, "
                f"{tensor.name} is {list(tensor.shape)}. Fetch both again."
            )
