# SPDX-License-Identifier: Apache-2.0
"""Models as far as their KV cache is concerned, without checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.vllm_edge.planning.contract import Attention, DecoderLayer, Facts, Model, Quantization

ORACLE: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "kv_oracle.yaml").read_text())
UNQUANTIZED = Quantization("none", 16)


def full(index: int, kv_heads: int, head_size: int) -> DecoderLayer:
    return DecoderLayer(index, Attention.FULL, kv_heads, head_size)


def sliding(index: int, kv_heads: int, head_size: int, window_tokens: int) -> DecoderLayer:
    return DecoderLayer(index, Attention.SLIDING, kv_heads, head_size, window_tokens)


def model(
    layers: Sequence[DecoderLayer],
    *,
    family: str = "llama3",
    quantization: Quantization = UNQUANTIZED,
    experts: int = 0,
    maximum: int = 131072,
    multimodal: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Model:
    return Model(
        facts=Facts("example/model", "", config or {}, ()),
        architecture="ExampleForCausalLM",
        family=family,
        dtype="bfloat16",
        hidden_size=4096,
        vocabulary=128256,
        query_heads=32,
        max_position_embeddings=maximum,
        layers=tuple(layers),
        components=(),
        quantization=quantization,
        intermediate_sizes=(14336,),
        experts=experts,
        multimodal=multimodal,
    )


def gemma4_layers(facts: Mapping[str, Any]) -> list[DecoderLayer]:
    """The layers of a model of the oracle."""
    pattern = facts["layer_pattern"]
    own = len(pattern) - facts["num_kv_shared_layers"]
    heads = facts["num_key_value_heads"]
    layers = []
    for index, kind in enumerate(pattern):
        # A layer without its own cache reads that of the last one of its kind that has one.
        shared = pattern.rindex(kind, 0, own) if index >= own else None
        if kind == "F":
            layer = full(index, facts["num_global_key_value_heads"] or heads, facts["global_head_dim"])
        else:
            layer = sliding(index, heads, facts["head_dim"], facts["sliding_window"])
        layers.append(replace(layer, shares_with=shared))
    return layers


def gemma4(name: str, quantization: Quantization = UNQUANTIZED) -> Model:
    """`gemma-4-31B-it` and its sisters."""
    facts = ORACLE["models"][name]
    return model(
        gemma4_layers(facts),
        family="gemma4",
        quantization=quantization,
        experts=facts["num_experts"] or 0,
        maximum=facts["max_position_embeddings"],
        multimodal=True,
        config={"text_config": {"use_bidirectional_attention": facts["use_bidirectional_attention"]}},
    )
