# SPDX-License-Identifier: Apache-2.0
"""Models as far as their KV cache is concerned, without checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.vllm_edge.planning.contract import (
    Arguments,
    Attention,
    DecoderLayer,
    Facts,
    Model,
    Quantization,
)
from ansible.module_utils.vllm_edge.planning.memory import kv_cache

ORACLE: Mapping[str, Any] = yaml.safe_load((Path(__file__).parent / "kv_oracle.yaml").read_text())


def full(index: int, kv_heads: int, head_size: int) -> DecoderLayer:
    return DecoderLayer(index, Attention.FULL, kv_heads, head_size)


def sliding(index: int, kv_heads: int, head_size: int, window_tokens: int) -> DecoderLayer:
    return DecoderLayer(index, Attention.SLIDING, kv_heads, head_size, window_tokens)


def needed(model: Model, arguments: Arguments, version: str) -> int:
    """The least bytes of KV cache with which vLLM starts, on the rank that needs most."""
    return kv_cache.capacity(model, arguments, 2**60, version).needed_bytes


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
