# SPDX-License-Identifier: Apache-2.0
"""Models as far as their KV cache is concerned, without checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.vllm_edge.planning.contract import Attention, DecoderLayer, Facts, Model, Quantization

ORACLE: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "kv_oracle.yaml").read_text())


def full(index: int, kv_heads: int, head_size: int) -> DecoderLayer:
    return DecoderLayer(index, Attention.FULL, kv_heads, head_size)


def sliding(index: int, kv_heads: int, head_size: int, window_tokens: int) -> DecoderLayer:
    return DecoderLayer(index, Attention.SLIDING, kv_heads, head_size, window_tokens)


def model(layers: Sequence[DecoderLayer], *, family: str = "llama3", maximum: int = 131072) -> Model:
    return Model(
        facts=Facts("example/model", "", {}, ()),
        architecture="ExampleForCausalLM",
        family=family,
        dtype="bfloat16",
        hidden_size=4096,
        vocabulary=128256,
        query_heads=32,
        max_position_embeddings=maximum,
        layers=tuple(layers),
        components=(),
        quantization=Quantization("none", 16),
        intermediate_sizes=(14336,),
    )
