# SPDX-License-Identifier: Apache-2.0
"""The dtype in which vLLM keeps weights that are not quantized, computes, and keeps a KV cache of `auto`.

The rules are those of vLLM 0.32.0: `_resolve_auto_dtype` and `_get_and_verify_dtype` in config/model.py,
`supported_dtypes` in platforms/cuda.py, and `get_supported_act_dtypes` of each quantization.
"""

from __future__ import annotations

from ..contract import Model

ALIASES = {"half": "float16", "float": "float32"}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
WITHOUT_FLOAT16 = frozenset({"gemma2", "gemma3"})
"""Families for which vLLM refuses float16 (`_FLOAT16_NOT_SUPPORTED_MODELS`, config/model.py)."""
ALSO_FLOAT32 = frozenset({"none", "compressed-tensors"})
"""Quantizations that also compute in float32; the others take float16 and bfloat16."""
BFLOAT16_SINCE = (8, 0)
"""Compute capability."""


def list_supported(model: Model, capability: tuple[int, int] | None) -> list[str]:
    """Return the dtypes in which a GPU can compute a model, vLLM's preferred one first.

    Args:
        capability: of the GPU; None if it is not known, which counts as a current one.
    """
    found = ["bfloat16"] if capability is None or capability >= BFLOAT16_SINCE else []
    found += [] if model.family in WITHOUT_FLOAT16 else ["float16"]
    return found + (["float32"] if model.quantization.method in ALSO_FLOAT32 else [])


def resolve_model_dtype(model: Model, requested: str, capability: tuple[int, int] | None) -> str:
    """Return the dtype that vLLM takes for the engine's `dtype`.

    `auto` is the dtype of the checkpoint, or the preferred one of the GPU if that cannot compute in it. Any other value
    is taken as it is; what cannot run in it is refused by the rules of `feasibility`.
    """
    if requested != "auto":
        return ALIASES.get(requested, requested)
    supported = list_supported(model, capability)
    # For a quantized checkpoint the list may be empty on an old GPU; vLLM itself looks at the GPU alone and then fails.
    return model.dtype if model.dtype in supported or not supported else supported[0]
