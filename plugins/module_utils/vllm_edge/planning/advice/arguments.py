# SPDX-License-Identifier: Apache-2.0
"""The arguments that an engine is given for the advice, and the operator's observations of similar engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import overhead
from .model import MAX_NUM_SEQS, Host, Shape


def build_arguments(model: str, shape: Shape, kv_cache_dtype: str, max_model_len: int) -> dict[str, Any]:
    """Return an engine as in serving_engines, without what depends on the host.

    Args:
        model: key of vllm_models.
        kv_cache_dtype: as written in the inventory; `auto` is left out.
        max_model_len: tokens.
    """
    stages = {"pipeline_parallel_size": shape.pipeline_parallel_size} if shape.pipeline_parallel_size > 1 else {}
    return {
        "model": model,
        "tensor_parallel_size": shape.tensor_parallel_size,
        **stages,
        "max_model_len": max_model_len,
        "max_num_seqs": MAX_NUM_SEQS,
        **({} if kv_cache_dtype == "auto" else {"kv_cache_dtype": kv_cache_dtype}),
    }


def match_observed(engine: Mapping[str, Any], host: Host) -> tuple[str, dict[str, int]]:
    """Find observations of an engine of the inventory that is like this one.

    Weights and the CUDA context are the same if model and parallelism are; activations and graphs only if the batch is
    the same too.

    Returns:
        The name of that engine and the figures that apply, or an empty name and no figures.

    Raises:
        ObservationError: if an observation cannot be used.
    """
    for name, known in host.engines.items():
        figures = overhead.observed(host.observations, name)
        if not figures or any(known.get(key, 1) != engine.get(key, 1) for key in SAME_WEIGHTS):
            continue
        if any(known.get(key) != engine.get(key) for key in SAME_BATCH) or known.get("enforce_eager"):
            figures = {key: value for key, value in figures.items() if key in ("weights_bytes", "context_bytes")}
        if figures:
            return name, figures
    return "", {}


SAME_WEIGHTS = ("model", "tensor_parallel_size", "pipeline_parallel_size")
SAME_BATCH = ("max_num_seqs", "max_num_batched_tokens")
