# SPDX-License-Identifier: Apache-2.0
"""The generic plan of an architecture that the planner does not know.

Its weights and its KV cache are upper bounds. Every tensor of the checkpoint counts, in the model's dtype. A tensor
whose name occurs in a known family is distributed as there, any other one is on every GPU. Every layer has full
attention. An engine that fits with them fits. Of one that does not, the plan says so only if it would not fit with the
least that the weights can take; otherwise it cannot say (`unmodeled_arguments.judge_generic`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..contract import Quantization, Tensor, Uncertain
from .inferred import APPROXIMATE

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
_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_UNBOUNDED = (
    # Layers that keep a state for each request.
    (
        r"\.(A_log|ssm\w*|mamba\w*|mixer|conv1d|short_conv|linear_attn|rwkv|time_mix\w*|rg_lru|lru)(\.|$)",
        "state-space or linear attention",
    ),
    (r"(^|\.)(encoder_attn|cross_attn|crossattention|EncDecAttention)\.", "an encoder"),
    # vLLM takes activations for up to 65,536 tokens of context at once, and copies of kv_b_proj (mla_attention.py).
    (r"\.kv_(a|b)_proj(_\w+)?\.", "latent attention (MLA)"),
    (r"attn(_\d|\.\*)\.", "several attentions"),
)
"""Names of tensors whose layers need memory beyond a KV cache of all layers, and what these layers are."""
_TOWERS = re.compile(r"vis(ion|ual)|image|audio|speech|video|tower")
_OUTPUTS = re.compile(r"[._](?P<part>k_proj|v_proj|qkv_proj|query_key_value|c_attn|Wqkv|wqkv|qkv)\.weight$")


def find_unbounded(config: Mapping[str, Any], tensors: Sequence[Tensor], quantization: Quantization) -> str:
    """Return why the memory of a model of an unknown architecture has no upper bound, in words; empty if it has one.

    Args:
        config: config.json, with its text_config in place of the keys that both have.
    """
    for key in _NEEDED:
        if config.get(key) is None:
            return f"config.json lacks {key}"
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    experts = any("experts" in tensor.name for tensor in tensors)
    if quantization.method == "mxfp4" or (
        experts and quantization.weight_bits == 4 and not config.get("moe_intermediate_size")
    ):
        return f"kernels pad experts in {quantization.method}, and by how much is not known"
    for tensor in tensors:
        for pattern, what in _UNBOUNDED:
            if re.search(pattern, tensor.name):
                return f"{tensor.name[:200]} belongs to {what}, whose memory is not that of a KV cache of all layers"
        found = _OUTPUTS.search(tensor.name)
        if found and tensor.layers and len(tensor.shape) == 2:
            most = (kv_heads if found["part"] in ("k_proj", "v_proj") else heads + 2 * kv_heads) * size
            if min(tensor.shape) > most:
                return f"{tensor.name[:200]} has {min(tensor.shape)} outputs, and config.json says {most}"
    return ""


def has_towers(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.layers is None and _TOWERS.search(tensor.name) for tensor in tensors)


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
