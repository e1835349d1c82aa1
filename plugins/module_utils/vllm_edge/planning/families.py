# SPDX-License-Identifier: Apache-2.0
"""Interpretation of a checkpoint, Facts -> Model, for the model families that the planner knows.

Each rule follows what vLLM does with that family. A file that is named without a path is in
`vllm/model_executor/models/`, in releases 0.19 to 0.33. An architecture, a quantization or a weight that is not known
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from .contract import (
    Attention,
    Component,
    DecoderLayer,
    Facts,
    Model,
    Quantization,
    Sharding,
    Tensor,
    UnknownArchitecture,
)
from .model_facts import FactsError

CONFIG_KEYS = frozenset(
    {
        "_sliding_window_pattern",
        "attention_k_eq_v",
        "decoder_sparse_step",
        "dtype",
        "global_head_dim",
        "head_dim",
        "hidden_size",
        "hidden_size_per_layer_input",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_only_layers",
        "moe_intermediate_size",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_global_key_value_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_kv_shared_layers",
        "num_local_experts",
        "per_layer_config",
        "rope_parameters",
        "rope_scaling",
        "sliding_window",
        "sliding_window_pattern",
        "tie_word_embeddings",
        "top_k_experts",
        "torch_dtype",
        "use_bidirectional_attention",
        "use_double_wide_mlp",
        "use_sliding_window",
        "vocab_size",
    }
)
"""The keys of config.json that the planner reads, at its top and in its text_config. Recorded facts contain no
others."""


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


_Layers = Callable[[_Config], tuple[DecoderLayer, ...]]


@dataclass(frozen=True)
class _Family:
    """One model family: how its layers are derived from config.json, and its defaults."""

    name: str
    layers: _Layers
    defaults: Mapping[str, Any]
    """Defaults of config.json keys, from the family's configuration class in transformers 5.16."""
    towers: Sharding = Sharding.NOT_LOADED
    """How the vision and audio towers are distributed, if the architecture has any."""


def _read_window(config: _Config) -> int | None:
    """Return the sliding window of the whole model, or None.

    Qwen's counts only if use_sliding_window is set; 0 means none (`ModelConfig.__post_init__`, vllm/config/model.py).
    """
    if config.get("use_sliding_window") is False:
        return None
    return config.get("sliding_window") or None


def _build_uniform_layers(config: _Config, by_type: bool = True) -> tuple[DecoderLayer, ...]:
    """Return layers that differ at most in their attention type.

    If there are no layer_types, or all are the same, sliding_window applies to every layer (`is_interleaved` in
    vllm/engine/arg_utils.py). With mixed types llama.py follows the type (`by_type`), and Qwen's files refuse.
    """
    window, types = _read_window(config), config.get("layer_types") or []
    mixed = len(set(types)) > 1
    if mixed and not by_type and window:
        raise FactsError(f"{config.repo}: a sliding window for some of its layers is what vLLM does not run.")

    def layer(index: int) -> DecoderLayer:
        sliding = bool(window) and (not mixed or types[index] == Attention.SLIDING)
        kind = Attention.SLIDING if sliding else Attention.FULL
        return DecoderLayer(index, kind, config.kv_heads, config.head_size, window if sliding else None)

    return tuple(layer(index) for index in config.layers)


def _build_qwen_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return Qwen3's layers: sliding from max_window_layers on (`Qwen3Config`). Its MoE has no layer_types at all."""
    if config.get("layer_types") is None and config.get("max_window_layers") is not None and _read_window(config):
        first = config["max_window_layers"]
        types = [Attention.FULL if index < first else Attention.SLIDING for index in config.layers]
        config = replace(config, values={**config.values, "layer_types": types})
    return _build_uniform_layers(config, by_type=False)


def _read_layer_types(config: _Config) -> list[str]:
    """Return Gemma's layer_types: every sixth layer has full attention, unless config.json says otherwise."""
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    types = config.get("layer_types") or [
        Attention.SLIDING if (index + 1) % pattern else Attention.FULL for index in config.layers
    ]
    unknown = set(types) - set(Attention)
    if unknown or len(types) != len(config.layers):
        raise FactsError(
            f"{config.repo}: layer_types in config.json has {len(types)} entries {sorted(set(types))} for "
            f"{len(config.layers)} layers; the planner knows {' and '.join(Attention)}."
        )
    return list(types)


def _build_gemma3_layers(config: _Config) -> tuple[DecoderLayer, ...]:
    def layer(index: int, kind: str) -> DecoderLayer:
        window = config["sliding_window"] if kind == Attention.SLIDING else None
        return DecoderLayer(index, Attention(kind), config.kv_heads, config.head_size, window)

    return tuple(layer(index, kind) for index, kind in enumerate(_read_layer_types(config)))


def _gemma4(config: _Config) -> tuple[DecoderLayer, ...]:
    """Return Gemma 4's layers.

    Full attention has its own head size and, with attention_k_eq_v, its own number of KV heads. The last layer is
    always full. The last num_kv_shared_layers read the cache of the last layer of their type before them.
    """
    types = _read_layer_types(config)
    types[-1] = Attention.FULL
    own = len(types) - (config.get("num_kv_shared_layers") or 0)
    # From 5.16 on transformers writes per layer what was global_head_dim and num_global_key_value_heads before.
    overrides = {int(index): values for index, values in (config.get("per_layer_config") or {}).items()}
    full: dict[str, Any] = {"head_dim": config.get("global_head_dim")}
    if config.get("attention_k_eq_v"):
        full["num_key_value_heads"] = config.get("num_global_key_value_heads")

    def layer(index: int, kind: str) -> DecoderLayer:
        special = full if kind == Attention.FULL else {}
        special = overrides.get(index, {}) if overrides else special
        target = None
        if index >= own:
            earlier = [other for other in range(own) if types[other] == kind]
            target = earlier[-1] if earlier else None
        return DecoderLayer(
            index,
            Attention(kind),
            special.get("num_key_value_heads") or config.kv_heads,
            special.get("head_dim") or config.head_size,
            config["sliding_window"] if kind == Attention.SLIDING else None,
            target,
        )

    return tuple(layer(index, kind) for index, kind in enumerate(types))


_GEMMA3 = {
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
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_MISTRAL = {"sliding_window": 4096, "max_position_embeddings": 131072}
_QWEN3 = {"head_dim": 128, "use_sliding_window": False, "max_window_layers": 28}
_QWEN3_MOE = {"use_sliding_window": False, "decoder_sparse_step": 1}

FAMILIES: Mapping[str, _Family] = {
    # gemma4_mm.py builds transformers' own towers, replicated on every rank; gemma3_mm.py builds vLLM's SigLIP, which
    # is sharded.
    "Gemma4ForConditionalGeneration": _Family("gemma4", _gemma4, _GEMMA4, Sharding.REPLICATED),
    "Gemma4ForCausalLM": _Family("gemma4", _gemma4, _GEMMA4),
    "Gemma3ForConditionalGeneration": _Family("gemma3", _build_gemma3_layers, _GEMMA3, Sharding.SHARDED),
    "Gemma3ForCausalLM": _Family("gemma3", _build_gemma3_layers, _GEMMA3),
    "LlamaForCausalLM": _Family("llama3", _build_uniform_layers, {}),
    "MistralForCausalLM": _Family("mistral", _build_uniform_layers, _MISTRAL),
    "Qwen3ForCausalLM": _Family("qwen3", _build_qwen_layers, _QWEN3),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", _build_qwen_layers, _QWEN3_MOE),
}


def interpret(facts: Facts) -> Model:
    """Interpret a checkpoint.

    Raises:
        UnknownArchitecture: if the architecture is not in FAMILIES.
        FactsError: if config.json lacks something or contradicts the tensors, or if a quantization or weight is
            unknown.
    """
    architecture = next(iter(facts.config.get("architectures") or ["(none)"]))
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnknownArchitecture(
            f"{facts.repo} is a {architecture}, which the planner does not know; it knows {', '.join(FAMILIES)}."
        )
    text = facts.config.get("text_config") or {}
    said = {key: value for key, value in text.items() if value is not None or key not in facts.config}
    config = _Config(facts.repo, {**facts.config, **said}, family.defaults)
    layers = family.layers(config)
    # When transformers itself writes Qwen's config.json, the key is num_local_experts.
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    per_token = (config.get("top_k_experts") or config.get("num_experts_per_tok") or 0) if experts else 0
    sizes, rows = _list_rope_caches(config, layers)
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
        quantization=_read_quantization(facts),
        intermediate_sizes=_list_intermediate_sizes(config, experts),
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate_size=(config.get("moe_intermediate_size") or 0) if experts else 0,
        rope_cache_sizes=sizes,
        per_layer_embedding_size=config.get("hidden_size_per_layer_input") or 0,
        multimodal=family.towers is not Sharding.NOT_LOADED,
        rope_cache_rows=rows,
    )
    _check(model)
    tied = bool(config.get("tie_word_embeddings"))
    components = list(_build_components(model, family, tied))
    if not tied and not any(component.tensor.name.endswith("lm_head.weight") for component in components):
        raise FactsError(
            f"{facts.repo}: config.json says that tie_word_embeddings is false, and there is no lm_head.weight. "
            "Fetch its weights again."
        )
    if config.get("attention_k_eq_v"):
        components += _copy_k_to_v(model, components)
    return replace(model, components=tuple(components))


def _read_dtype(config: _Config) -> str:
    """Return the dtype that vLLM computes in: float32 becomes bfloat16 (`_resolve_auto_dtype`,
    vllm/config/model.py)."""
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    if not dtype:
        raise FactsError(f"{config.repo}: config.json lacks dtype (or torch_dtype). Fetch it again, or complete it.")
    return "bfloat16" if dtype == "float32" else dtype


def _list_intermediate_sizes(config: _Config, experts: int) -> tuple[int, ...]:
    """Return the sizes of the dense MLPs. Gemma 4 has one beside its experts; a layer of Qwen3 MoE has one or the
    other."""
    base = config.get("intermediate_size") or 0
    if experts and config.get("decoder_sparse_step"):
        step, dense = config["decoder_sparse_step"], set(config.get("mlp_only_layers") or [])
        some = any(index in dense or (index + 1) % step for index in config.layers)
        return (base,) if some else ()
    doubled = config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers")
    return (base, 2 * base) if doubled else (base,)


def _list_rope_caches(config: _Config, layers: tuple[DecoderLayer, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return rotary dimension and rows of each cos/sin cache.

    `get_rope` keeps one cache for each head size and set of parameters. `linear` has factor times as many rows, `yarn`
    factor times the original positions (vllm/model_executor/layers/rotary_embedding/).
    """
    given: Mapping[str, Any] = config.get("rope_parameters") or {}
    legacy: Mapping[str, Any] = config.get("rope_scaling") or {}
    positions = config["max_position_embeddings"]
    split = config.get("layer_types") is not None and any(kind in given for kind in Attention)
    # Gemma uses another base for sliding layers than for full ones, even if config.json does not say so.
    split = split or {layer.attention for layer in layers} == set(Attention)
    caches: dict[tuple[str, int], tuple[int, int]] = {}
    for layer in layers:
        kind = layer.attention if split else Attention.FULL
        parameters = given.get(kind, given if not any(key in given for key in Attention) else {})
        if not given and kind is Attention.FULL:
            parameters = legacy
        rope = str(parameters.get("rope_type") or parameters.get("type") or "default")
        # `proportional` also stores the dimensions that it does not rotate (gemma4_rope.py).
        part = 1.0 if rope == "proportional" else float(parameters.get("partial_rotary_factor") or 1.0)
        rows = positions
        if rope == "linear":
            rows = int(positions * _read_scaling(config, parameters, "factor"))
        elif rope == "yarn":
            original = _read_scaling(config, parameters, "original_max_position_embeddings")
            rows = int(original * _read_scaling(config, parameters, "factor"))
        caches[kind, layer.head_size] = (int(layer.head_size * part), rows)
    return tuple(size for size, _ in caches.values()), tuple(rows for _, rows in caches.values())


def _read_scaling(config: _Config, parameters: Mapping[str, Any], key: str) -> float:
    if parameters.get(key) is None:
        raise FactsError(f"{config.repo}: config.json scales RoPE without {key}. Fetch it again, or complete it.")
    return float(parameters[key])


# ---- quantization ------------------------------------------------------------------------------------------------


def _read_quantization(facts: Facts) -> Quantization:
    """Return vLLM's name of the method, its bits, and what it makes of the KV cache.

    For modelopt, `kv_cache_dtype: auto` follows the checkpoint (`get_kv_cache_quant_algo_string`,
    vllm/utils/torch_utils.py); for compressed-tensors too (`Attention.__init__`,
    vllm/model_executor/layers/attention/attention.py).
    """
    config = facts.quantization
    if not config:
        return Quantization("none", 16)
    inner = config.get("quantization") or config
    # hf_quant_config.json names only its producer and has no quant_method.
    producer = (config.get("producer") or {}).get("name")
    method = str(config.get("quant_method") or producer or "").lower()
    if method.startswith("modelopt"):
        algorithm = str(inner.get("quant_algo") or "").upper()
        kv_cache = _read_modelopt_kv_cache(config, inner)
        if algorithm == "NVFP4":
            return Quantization("modelopt_fp4", 4, _read_group_size(inner, "group_size", 16), kv_cache)
        if algorithm.startswith("FP8"):
            return Quantization("modelopt", 8, None, kv_cache)
        method = f"modelopt {algorithm}"
    elif method == "compressed-tensors":
        weights = [group["weights"] for group in (config.get("config_groups") or {}).values() if group.get("weights")]
        if weights:
            scheme = min(weights, key=lambda weight: weight.get("num_bits") or 16)
            kv_cache = "fp8" if config.get("kv_cache_scheme") else None
            return Quantization(method, scheme.get("num_bits") or 16, scheme.get("group_size"), kv_cache)
    elif method == "fp8":
        block = config.get("weight_block_size")
        return Quantization(method, 8, block[1] if block else None)
    elif method in ("awq", "gptq"):
        bits = config.get("bits") or config.get("w_bit")
        if bits:
            return Quantization(
                method, int(bits), _read_group_size(config, "group_size", None) or config.get("q_group_size")
            )
    raise FactsError(
        f"{facts.repo}: the planner does not know the quantization '{method}'; it knows modelopt (NVFP4, FP8), "
        "compressed-tensors, fp8, awq and gptq."
    )


def _read_group_size(config: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """Return the group size, also from the nested form of compressed-tensors; -1 means one scale per channel."""
    value = config.get(key)
    for group in (config.get("config_groups") or {}).values():
        value = value or (group.get("weights") or {}).get(key)
    value = value or default
    return None if value in (None, -1) else int(value)


def _read_modelopt_kv_cache(config: Mapping[str, Any], inner: Mapping[str, Any]) -> str | None:
    """Return `fp8` if ModelOpt quantized the KV cache to FP8, otherwise None."""
    said: Any = None
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        said = said or inner.get(key) or config.get(key)
    if isinstance(said, Mapping):
        eight = said.get("type") == "float" and said.get("num_bits") == 8 and said.get("dynamic") is False
        return "fp8" if eight else None
    return "fp8" if isinstance(said, str) and said.lower() == "fp8" else None


# ---- tensors -----------------------------------------------------------------------------------------------------

_TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "multi_modal_projector", "vision_embedder")
SCALES = frozenset(
    {
        "weight_scale",
        "weight_scale_2",
        "weight_scale_inv",
        "weight_global_scale",
        "weight_zero_point",
        "input_scale",
        "input_global_scale",
        "scales",
        "qzeros",
    }
)
"""Tensors that quantizers store beside a weight, under the name of its layer."""
_VALUES = "weight|weight_packed|qweight"
_SUFFIX = re.compile(rf"\.(?P<leaf>{_VALUES}|{'|'.join(sorted(SCALES))}|weight_shape|weight_g_idx|g_idx|bias)$")
_NOT_LOADED = re.compile(r"(rotary_emb\.inv_freq|\.weight_shape|masked_bias)$|embed_(vision|audio)\.embedding\.")

# Patterns for what is left of a name without the model's prefix, the layer and the leaf.
_RULES: tuple[tuple[re.Pattern[str], str, Sharding], ...] = tuple(
    (re.compile(pattern), kind, sharding)
    for pattern, kind, sharding in (
        (r"embed_tokens(_per_layer)?$|lm_head$", "embeddings", Sharding.VOCABULARY),
        (r"self_attn\.[kv]_proj$", "attention", Sharding.KV_HEADS),
        (r"self_attn\.[qo]_proj$", "attention", Sharding.SHARDED),
        (r"self_attn\.[kv]_(proj\.[kv]_)?scale$|self_attn\.q_scale$", "other", Sharding.REPLICATED),
        (r"mlp\.(gate|up|down)_proj$", "mlp", Sharding.SHARDED),
        (r"(mlp\.|moe\.)?experts(\.\*)?\.(gate|up|down|gate_up)_proj$", "experts", Sharding.EXPERTS),
        (r"mlp\.gate$|router(\.|$)", "router", Sharding.REPLICATED),
        (r"per_layer_(input_gate|projection)$", "other", Sharding.REPLICATED),
        (r"per_layer_model_projection$", "other", Sharding.SHARDED),
        (r"(^|\.|_)(layer)?norm(_\d)?$|layer_scalar$", "norms", Sharding.REPLICATED),
    )
)
_ROW_PARALLEL = re.compile(r"(o|down|out)_proj$|fc2$")


def _build_components(model: Model, family: _Family, tied: bool) -> Iterator[Component]:
    for tensor in model.facts.tensors:
        for part in _split_by_kv_heads(model, tensor):
            yield _classify_tensor(model, family, part, tied)


def _split_by_kv_heads(model: Model, tensor: Tensor) -> Iterator[Tensor]:
    """Split K and V by their number of KV heads: tensors of one shape may be sharded differently."""
    if tensor.layers is None or not re.search(r"self_attn\.[kv]_proj\.", tensor.name):
        yield tensor
        return
    for heads in sorted({model.layers[layer].kv_heads for layer in tensor.layers}):
        yield replace(tensor, layers=tuple(layer for layer in tensor.layers if model.layers[layer].kv_heads == heads))


def _classify_tensor(model: Model, family: _Family, tensor: Tensor, tied: bool) -> Component:
    """Determine what a tensor is for and how it is distributed. Raises FactsError if it is unknown."""
    if _NOT_LOADED.search(tensor.name):
        return Component(tensor, "other", Sharding.NOT_LOADED, read_per_token=0.0)
    if any(tower in tensor.name.split(".") for tower in _TOWERS):
        sharding = family.towers
        if sharding is Sharding.SHARDED:
            sharding = _shard_siglip(tensor)
        return Component(tensor, "towers", sharding, read_per_token=0.0)
    path = re.sub(r"^(?:(?:model|language_model)\.)*(?:layers\.\*\.)?", "", tensor.name)
    suffix = _SUFFIX.search(path)
    leaf = suffix["leaf"] if suffix else ""
    path = path[: suffix.start()] if suffix else path
    kind, sharding = next((rule[1:] for rule in _RULES if rule[0].search(path)), ("", Sharding.NOT_LOADED))
    if not kind:
        raise FactsError(
            f"{model.facts.repo}: {tensor.name} {list(tensor.shape)} is no weight that the planner knows of a "
            f"{model.architecture}. Its place on the GPUs cannot be foreseen."
        )
    if kind == "embeddings":
        head = path.endswith("lm_head")
        if head and tied:
            return Component(tensor, kind, Sharding.NOT_LOADED, read_per_token=0.0)
        # A head, which a tied table is too, is read as a whole for each token; any other table, one row.
        whole = head or (tied and path.endswith("embed_tokens"))
        return Component(tensor, kind, sharding, read_per_token=1.0 if whole else 1.0 / tensor.shape[0])
    if kind == "experts":
        read = model.experts_per_token / model.experts if model.experts else 1.0
        return Component(tensor, kind, _shard_experts(path, leaf, tensor), read_per_token=read)
    if sharding in (Sharding.SHARDED, Sharding.KV_HEADS) and _is_whole(path, leaf, tensor):
        sharding = Sharding.REPLICATED
    heads = None
    if sharding is Sharding.KV_HEADS:
        heads = model.layers[tensor.layers[0]].kv_heads if tensor.layers else None
    return Component(tensor, kind, sharding, heads)


def _is_whole(path: str, leaf: str, tensor: Tensor) -> bool:
    """Return whether each rank keeps all of a tensor of a sharded linear layer.

    That is a scale of the whole weight and, for a row-parallel layer, its bias and the scales of its output channels.
    """
    if not tensor.shape or tensor.shape == (1,):
        return True
    if leaf in ("g_idx", "weight_g_idx"):
        return not _ROW_PARALLEL.search(path)
    per_channel = leaf == "bias" or (leaf in SCALES and (len(tensor.shape) == 1 or tensor.shape[1] == 1))
    return per_channel and bool(_ROW_PARALLEL.search(path))


def _shard_experts(path: str, leaf: str, tensor: Tensor) -> Sharding:
    return Sharding.REPLICATED if _is_whole(path, leaf, tensor) else Sharding.EXPERTS


def _shard_siglip(tensor: Tensor) -> Sharding:
    """Return how a tensor of SigLIP is distributed: siglip.py shards linear layers, not embeddings and norms.

    The projector of gemma3_mm.py is not sharded either.
    """
    path = tensor.name.rsplit(".", 1)[0]
    if tensor.name.endswith(".weight") and re.search(r"encoder\.layers\.\*\.(self_attn\.\w+_proj|mlp\.fc\d)$", path):
        return Sharding.SHARDED
    if re.search(r"encoder\.layers\.\*\.(self_attn\.[qkv]_proj|mlp\.fc1)$", path):
        return Sharding.SHARDED
    return Sharding.REPLICATED


def _copy_k_to_v(model: Model, components: list[Component]) -> Iterator[Component]:
    """Yield the V projections that vLLM fills with a copy of K.

    With attention_k_eq_v the full layers of Gemma 4 have no V in the file, and vLLM loads K into both places.
    """
    has_v = {
        layer for c in components if re.search(r"self_attn\.v_proj\.", c.tensor.name) for layer in c.tensor.layers or ()
    }
    for component in components:
        if not re.search(r"self_attn\.k_proj\.", component.tensor.name):
            continue
        missing = tuple(layer for layer in component.tensor.layers or () if layer not in has_v)
        if missing:
            name = component.tensor.name.replace(".k_proj.", ".v_proj.")
            yield replace(component, tensor=replace(component.tensor, name=name, layers=missing))


def _check(model: Model) -> None:
    """Check that config.json and the tensors are of the same model. Raises FactsError."""
    repo = model.facts.repo
    seen = {layer for tensor in model.facts.tensors for layer in tensor.layers or ()}
    if seen != set(range(len(model.layers))):
        raise FactsError(
            f"{repo}: config.json says {len(model.layers)} layers, the tensors are of {len(seen)}. Fetch both again."
        )
    for tensor in model.facts.tensors:
        leaf = tensor.name.rsplit(".", 1)[-1]
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
