# SPDX-License-Identifier: Apache-2.0
"""The tensors of a checkpoint: what each is for, and how vLLM distributes it over the ranks of tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ..contract import Component, Model, Sharding, Tensor
from .headers import FactsError

_TOWERS = (
    "vision_tower",
    "vision_model",
    "visual",
    "audio_tower",
    "embed_vision",
    "embed_audio",
    "multi_modal_projector",
    "image_newline",
    "vision_embedder",
)
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
VALUES = ("weight", "weight_packed", "qweight")
_SUFFIX = re.compile(
    rf"\.(?P<leaf>{'|'.join(VALUES)}|{'|'.join(sorted(SCALES))}|weight_shape|weight_g_idx|g_idx|bias)$"
)
_NOT_LOADED = re.compile(r"^t2d$|(rotary_emb\.inv_freq|\.weight_shape|masked_bias)$|embed_(vision|audio)\.embedding\.")

# Patterns for what is left of a name without the model's prefix, the layer and the leaf.
_RULES: tuple[tuple[re.Pattern[str], str, Sharding], ...] = tuple(
    (re.compile(pattern), kind, sharding)
    for pattern, kind, sharding in (
        (r"embed_tokens(_per_layer)?$|lm_head$", "embeddings", Sharding.VOCABULARY),
        (r"self_attn\.[kv]_proj$", "attention", Sharding.KV_HEADS),
        (r"self_attn\.([qo]_proj|sinks|(q|kv)_b_proj)$", "attention", Sharding.SHARDED),
        (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)$", "attention", Sharding.REPLICATED),
        (r"self_attn\.indexer\.(wq_b|wk|weights_proj)$", "attention", Sharding.REPLICATED),
        (r"mamba\.group\.", "attention", Sharding.REPLICATED),
        (r"mamba\.(in_proj|conv1d|A_log|D|dt_bias|norm|out_proj)$", "attention", Sharding.SHARDED),
        (r"linear_attn\.(in_proj_(qkvz|qkv|z|ba|b|a)|conv1d|A_log|dt_bias|out_proj)$", "attention", Sharding.SHARDED),
        (r"self_attn\.[kv]_(proj\.[kv]_)?scale$|self_attn\.q_scale$", "other", Sharding.REPLICATED),
        (r"(mlp|feed_forward)\.(shared_experts?\.)?(gate|up|down|gate_up)_proj$", "mlp", Sharding.SHARDED),
        (
            r"(^|\.)experts(\.\*)?\.((gate|up|down|gate_up)_proj(_blocks|_scales|_bias)?|w[123])$",
            "experts",
            Sharding.EXPERTS,
        ),
        (r"mlp\.fc[12]_latent_proj$", "mlp", Sharding.REPLICATED),
        (r"(mlp|block_sparse_moe)\.gate$|router(\.|$)|shared_expert_gate$", "router", Sharding.REPLICATED),
        (r"e_score_correction_bias$", "router", Sharding.REPLICATED),
        # Of drafters: torch's own Linear in deepseek_mtp.py, ReplicatedLinear in llama_eagle3.py, ColumnParallelLinear
        # in qwen3_5_mtp.py.
        (r"eh_proj$|^fc$|^d2t$", "other", Sharding.REPLICATED),
        (r"^mtp_fc$", "other", Sharding.SHARDED),
        (r"^(e|h)norm$|pre_fc_norm_(hidden|embedding)$|^fc_norm\.\*$", "norms", Sharding.REPLICATED),
        (r"per_layer_(input_gate|projection)$", "other", Sharding.REPLICATED),
        (r"per_layer_model_projection$", "other", Sharding.SHARDED),
        (r"(^|\.|_)(layer)?norm(_\d)?$|layer_scalar$", "norms", Sharding.REPLICATED),
    )
)
ROW_PARALLEL = re.compile(r"(o|down|out)_proj$|fc2$|experts\.\*\.w2$")


def build_components(
    model: Model, towers: Sharding, tied: bool, unknown: Sharding | None = None
) -> Iterator[Component]:
    """Yield what each tensor is for and how it is distributed.

    Args:
        towers: how the vision and audio towers are distributed.
        tied: whether the head is the table of embeddings.
        unknown: how tensors that no rule knows are distributed; None refuses them by FactsError.
    """
    for tensor in model.facts.tensors:
        for single in _split_qkv(model, tensor):
            for part in _split_by_kv_heads(model, single):
                yield _classify_tensor(model, towers, part, tied, unknown)


def _split_qkv(model: Model, tensor: Tensor) -> Iterator[Tensor]:
    """Split a tensor of Q, K and V (Phi), because ranks have a part of Q, and at least one head of K and V; and what
    Mamba2's only group has of a tensor from the rest, because each rank has all of it (mamba_mixer2.py)."""
    layers = tensor.layers
    whole = next((layer.state.whole for layer in model.layers if layer.state), 0)
    if whole and re.search(r"\.mamba\.(in_proj|conv1d)\.", tensor.name) and max(tensor.shape, default=1) > 1:
        rows, *rest = tensor.shape
        yield replace(tensor, shape=(rows - whole, *rest))
        yield replace(tensor, name=tensor.name.replace(".mamba.", ".mamba.group."), shape=(whole, *rest))
        return
    if layers is None or ".self_attn.qkv_proj." not in tensor.name or max(tensor.shape, default=1) == 1:
        yield tensor
        return
    # AutoAWQ and GPTQ store the outputs in columns.
    axis = 1 if tensor.name.endswith((".qweight", ".qzeros", ".scales")) else 0
    heads = {"q": model.query_heads, "k": model.layers[layers[0]].kv_heads, "v": model.layers[layers[0]].kv_heads}
    for part, count in heads.items():
        shape = list(tensor.shape)
        shape[axis] = shape[axis] * count // sum(heads.values())
        yield replace(tensor, name=tensor.name.replace(".qkv_proj.", f".{part}_proj."), shape=tuple(shape))


def _split_by_kv_heads(model: Model, tensor: Tensor) -> Iterator[Tensor]:
    """Split K and V by their number of KV heads: tensors of one shape may be sharded differently."""
    if tensor.layers is None or not re.search(r"self_attn\.[kv]_proj\.", tensor.name):
        yield tensor
        return
    for heads in sorted({model.layers[layer].kv_heads for layer in tensor.layers}):
        yield replace(tensor, layers=tuple(layer for layer in tensor.layers if model.layers[layer].kv_heads == heads))


def _classify_tensor(model: Model, towers: Sharding, tensor: Tensor, tied: bool, unknown: Sharding | None) -> Component:
    if _NOT_LOADED.search(tensor.name):
        return Component(tensor, "other", Sharding.NOT_LOADED, read_per_token=0.0)
    if any(tower in tensor.name.split(".") for tower in _TOWERS):
        sharding = _shard_tower(tensor, model.hidden_size) if towers is Sharding.SHARDED else towers
        return Component(tensor, "towers", sharding, read_per_token=0.0)
    path, leaf = split_name(tensor.name)
    kind, sharding = next((rule[1:] for rule in _RULES if rule[0].search(path)), ("", Sharding.NOT_LOADED))
    if not kind and unknown:
        return Component(tensor, "other", unknown)
    if not kind:
        raise FactsError(
            f"{model.facts.repo}: {tensor.name} {list(tensor.shape)} is not a weight that the planner knows of a "
            f"{model.architecture}, so it cannot say how the weight is distributed over the GPUs."
        )
    if kind == "embeddings" and tensor.shape not in ((), (1,)):
        return _classify_embedding(tensor, path, tied)
    said = model.facts.quantization
    if leaf in ("g_idx", "weight_g_idx") and said.get("desc_act", said.get("quant_method") != "auto-round") is False:
        # Marlin replaces it by an empty tensor (quantization/utils/marlin_utils.py, marlin_make_empty_g_idx).
        return Component(tensor, kind, Sharding.NOT_LOADED, read_per_token=0.0)
    if sharding is not Sharding.REPLICATED and _is_whole(path, leaf, tensor):
        sharding = Sharding.REPLICATED
    if kind == "experts":
        read = model.experts_per_token / model.experts if model.experts else 1.0
        return Component(tensor, kind, sharding, read_per_token=read)
    if kind == "router":
        wide = model.router_float32 or path.endswith("e_score_correction_bias")
        return Component(tensor, kind, sharding, float32=wide)
    if path.endswith("linear_attn.in_proj_qkv") and tensor.shape in ((), (1,)):
        tensor = replace(tensor, count=3)  # vLLM has a scale for each of Q, K and V.
    if path == "mamba.in_proj" and tensor.shape in ((), (1,)):
        tensor = replace(tensor, count=5)  # and one for each of gate, inputs, B, C and dt
    if path.endswith(("self_attn.indexer.k_norm", "linear_attn.A_log", "mamba.A_log")):
        return Component(tensor, kind, sharding, float32=True)
    if path in ("self_attn.q_norm", "self_attn.k_norm") and tensor.layers:
        # Of all heads together (MiniMax), not of each.
        layer = model.layers[tensor.layers[0]]
        if tensor.shape[0] > layer.head_size:
            sharding = Sharding.SHARDED if path.endswith("q_norm") else Sharding.KV_HEADS
    heads = None
    if sharding is Sharding.KV_HEADS:
        heads = model.layers[tensor.layers[0]].kv_heads if tensor.layers else None
    return Component(tensor, kind, sharding, heads)


_MIXERS = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"^model\.embeddings\."), "model.embed_tokens."),
    (re.compile(r"\.norm_f\."), ".norm."),
    (re.compile(r"\.mixer\.(?=[qkvo]_proj\.)"), ".self_attn."),
    (re.compile(r"\.mixer\.(?=(in_proj|conv1d|A_log|D|dt_bias|norm|out_proj)(\.|$))"), ".mamba."),
    (re.compile(r"\.mixer\."), ".mlp."),
)


def name_mixer(name: str) -> str:
    """Return the name of a tensor of NemotronH as other families have it."""
    for pattern, usual in _MIXERS:
        name = pattern.sub(usual, name)
    return name


def split_name(name: str) -> tuple[str, str]:
    path = re.sub(r"^(?:(?:model|language_model)\.)*(?:layers\.\*\.)?", "", name)
    suffix = _SUFFIX.search(path)
    return (path[: suffix.start()], suffix["leaf"]) if suffix else (path, "")


def has_rule(name: str) -> bool:
    """Return whether a known family has such a tensor."""
    path = split_name(name)[0]
    return _NOT_LOADED.search(name) is not None or any(rule.search(path) for rule, _, _ in _RULES)


def _classify_embedding(tensor: Tensor, path: str, tied: bool) -> Component:
    head = path.endswith("lm_head")
    if head and tied:
        return Component(tensor, "embeddings", Sharding.NOT_LOADED, read_per_token=0.0)
    # A head, which a tied table is too, is read as a whole for each token; any other table, one row.
    whole = head or (tied and path.endswith("embed_tokens"))
    return Component(tensor, "embeddings", Sharding.VOCABULARY, read_per_token=1.0 if whole else 1.0 / tensor.shape[0])


def _is_whole(path: str, leaf: str, tensor: Tensor) -> bool:
    """Return whether each rank keeps all of a tensor of a sharded linear layer.

    That is a scale of the whole weight and, for a row-parallel layer, its bias and the scales of its output channels.
    """
    if not tensor.shape or tensor.shape == (1,):
        return True
    if leaf in ("g_idx", "weight_g_idx"):
        return not ROW_PARALLEL.search(path)
    per_channel = leaf == "bias" or (leaf in SCALES and (len(tensor.shape) == 1 or tensor.shape[1] == 1))
    return per_channel and bool(ROW_PARALLEL.search(path))


_TOWER_LINEAR = re.compile(
    r"(encoder|transformer|vision_model\.model)\.layers\.\*\.(self_attn|mlp|attention|feed_forward)\.(\w+_proj|fc\d)$"
    r"|multi_modal_projector\.linear_\d$|vision_adapter\.mlp\.fc\d$|patch_embedding\.linear$"
    r"|^(model\.)?visual\..*\.(attn\.(qkv|proj)|linear_fc\d|mlp\.((gate|up|down)_proj|\*))$"
)


def _shard_tower(tensor: Tensor, hidden_size: int) -> Sharding:
    """Return how a tensor of SigLIP (siglip.py), Pixtral (pixtral.py), CLIP (clip.py), Qwen's (qwen2_5_vl.py,
    qwen3_vl.py) or Llama's tower (mllama4.py) is distributed: linear layers of its transformer, of the projector of
    mistral3.py and of the mergers of Qwen and Llama are sharded; embeddings, norms, the merger of patches of
    mistral3.py and the projector of gemma3_mm.py are not."""
    path, _, leaf = tensor.name.rpartition(".")
    if not _TOWER_LINEAR.search(path):
        return Sharding.REPLICATED
    column = not re.search(r"((o|out|down)_proj|attn\.proj|fc2|linear_2)$", path)
    # Of the layers of Qwen2.5's merger, whose numbers are not in their names here, the second one's outputs are hidden
    # states of the language model.
    column = column and not (path.endswith(".mlp.*") and tensor.shape == (hidden_size,))
    return Sharding.SHARDED if leaf == "weight" or column else Sharding.REPLICATED


def cut_encoder(components: list[Component], feature_layer: int | list[int]) -> Iterator[Component]:
    """Yield components without what vLLM does not build of LLaVA's encoder: the layers after the one whose output the
    language model gets, and the last norm (init_vision_tower_for_llava, llava.py; get_layer_index, utils.py).

    Args:
        feature_layer: number of that layer, or of several, counted from 1, or negative and counted from the end.
    """
    wanted = feature_layer if isinstance(feature_layer, list) else [feature_layer]
    for component in components:
        tensor = component.tensor
        if component.kind == "towers" and ".encoder.layers.*." in tensor.name:
            built = max(tensor.count + layer + 1 if layer < 0 else layer for layer in wanted)
            yield replace(component, tensor=replace(tensor, count=min(max(built, 0), tensor.count)))
        elif component.kind == "towers" and ".post_layernorm." in tensor.name:
            yield replace(component, sharding=Sharding.NOT_LOADED)
        else:
            yield component


def split_drafting(tensors: tuple[Tensor, ...], layers: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the tensors of a model, and those of its layers for multi-token prediction, numbered from 0.

    The latter are the decoder layers after those that config.json counts (`num_nextn_predict_layers`), which
    deepseek_v2.py does not load (get_spec_layer_idx_from_weight_name), or the tensors `mtp.*` (qwen3_5_mtp.py), here
    renamed to be alike.
    """
    kept, drafting = [], []
    for tensor in tensors:
        if mtp := re.match(r"(?:model\.)?mtp\.", tensor.name):
            rest = tensor.name[mtp.end() :]
            inner = rest.startswith("layers.")
            name = f"model.{rest}" if inner else f"mtp_{rest}"
            drafting.append(replace(tensor, name=name, layers=(0,) if inner else None))
            continue
        if mine := tuple(layer for layer in tensor.layers or () if layer < layers):
            kept.append(replace(tensor, layers=mine))
        elif tensor.layers is None:
            kept.append(tensor)
        if beyond := tuple(layer - layers for layer in tensor.layers or () if layer >= layers):
            drafting.append(replace(tensor, layers=beyond))
    return tuple(kept), tuple(drafting)


def copy_k_to_v(components: list[Component]) -> Iterator[Component]:
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
