# SPDX-License-Identifier: Apache-2.0
"""The longest request that vLLM accepts for a model, and the length that it takes if the engine states none.

The rules are those of `_get_and_verify_max_len` in config/model.py of vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..contract import Attention, Model

ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""The environment variable with which vLLM only warns."""
NOT_SCALED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})
"""Types of RoPE whose factor is part of max_position_embeddings already."""
YARN_SCALED_BEFORE = (0, 32)
"""Earlier releases may multiply original_max_position_embeddings with the factor of YaRN; which one was the last was
not examined, so before 0.32 the larger of both is the limit."""


def derive_limit(model: Model, release: tuple[int, int] = YARN_SCALED_BEFORE) -> int:
    """Return the tokens above which vLLM refuses max_model_len."""
    # The config of Gemma 3 is scaled already.
    parameters = [] if model.family == "gemma3" else list(_iterate_rope(_read_config(model)))
    factor = 1.0
    for rope in parameters:
        if _read_type(rope) not in NOT_SCALED:
            factor = float(rope.get("factor") or factor)
    limits = [int(model.max_position_embeddings * factor)]
    if release < YARN_SCALED_BEFORE:
        limits += [
            int(rope["original_max_position_embeddings"] * rope["factor"])
            for rope in parameters
            if _read_type(rope) == "yarn" and rope.get("original_max_position_embeddings") and rope.get("factor")
        ]
    return max(limits)


def derive_default(model: Model) -> int:
    """Return max_model_len of an engine that states none: the limit, or with LongRoPE the length before scaling."""
    config = _read_config(model)
    if any(_read_type(rope) == "longrope" for rope in _iterate_rope(config)):
        return int(config.get("original_max_position_embeddings") or derive_limit(model))
    return derive_limit(model)


def is_longer_allowed(environment: Mapping[str, Any]) -> bool:
    return str(environment.get(ALLOW_LONGER, "0")).strip().lower() in ("1", "true")


def _read_config(model: Model) -> Mapping[str, Any]:
    return {**model.facts.config, **(model.facts.config.get("text_config") or {})}


def _iterate_rope(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_kind = [given[kind] for kind in Attention if isinstance(given.get(kind), Mapping)]
    yield from by_kind or ([given] if given else [])


def _read_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
