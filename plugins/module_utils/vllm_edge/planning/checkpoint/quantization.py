# SPDX-License-Identifier: Apache-2.0
"""The quantization of a checkpoint, from quantization_config or hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...text import shown
from ..contract import Facts, Quantization
from .headers import FactsError

FOUR_BITS = frozenset({"NVFP4", "W4A16_NVFP4"})
"""Of ModelOpt, stored alike; the second does not quantize activations."""


def read_quantization(facts: Facts) -> Quantization:
    """Return vLLM's name of the method, its bits, and what it makes of the KV cache.

    For modelopt, `kv_cache_dtype: auto` follows the checkpoint (`get_kv_cache_quant_algo_string`,
    vllm/utils/torch_utils.py); for compressed-tensors too (`Attention.__init__`,
    vllm/model_executor/layers/attention/attention.py). Raises FactsError if the planner does not know the method.
    """
    config = facts.quantization
    if not config:
        return Quantization("none", 16)
    # hf_quant_config.json names only its producer and has no quant_method.
    producer = (config.get("producer") or {}).get("name")
    method = str(config.get("quant_method") or producer or "").lower()
    family = "modelopt" if method.startswith("modelopt") else method
    found = READERS[family](method, config) if family in READERS else None
    if found is None:
        algorithm = (config.get("quantization") or config).get("quant_algo")
        # bitsandbytes wrote none at first (`load_in_4bit`).
        name = f"modelopt {str(algorithm or '').upper()}" if family == "modelopt" else method or "without quant_method"
        raise FactsError(
            f"{facts.repo}: the planner does not know the quantization '{name}'; it knows modelopt (NVFP4, FP8, both), "
            "compressed-tensors, fp8, mxfp4, awq and gptq."
        )
    for what, value, most in (("bits", found.weight_bits, 64), ("group size", found.group_size or 1, 2**20)):
        if type(value) is not int or not 1 <= value <= most:
            raise FactsError(f"{facts.repo}: the {what} of its quantization is {shown(value)}, which is not possible.")
    return found


def read_scheme(repo: str, quantization: Mapping[str, Any]) -> tuple[int, int | None]:
    found = read_quantization(Facts(repo, "", {}, (), quantization))
    return found.weight_bits, found.group_size


def _read_modelopt(method: str, config: Mapping[str, Any]) -> Quantization | None:
    inner = config.get("quantization") or config
    algorithm = str(inner.get("quant_algo") or "").upper()
    kv_cache = _read_modelopt_kv_cache(config, inner)
    if algorithm in FOUR_BITS:
        return Quantization("modelopt_fp4", 4, _read_group_size(inner, 16), kv_cache)
    if algorithm == "MIXED_PRECISION":
        used = list_modelopt_algorithms(config)
        four = bool(used & FOUR_BITS)
        known = used and used <= FOUR_BITS | {"FP8"}
        return Quantization("modelopt_mixed", 4 if four else 8, 16 if four else None, kv_cache) if known else None
    return Quantization("modelopt", 8, None, kv_cache) if algorithm.startswith("FP8") else None


def list_modelopt_algorithms(config: Mapping[str, Any]) -> set[str]:
    """Return ModelOpt's names of what it made of the layers, in capitals; of one for all, that."""
    inner = config.get("quantization") or config
    layers = (inner.get("quantized_layers") or {}).values()
    return {str(how.get("quant_algo") or "").upper() for how in layers or [inner]}


def _read_compressed_tensors(method: str, config: Mapping[str, Any]) -> Quantization | None:
    weights = [group["weights"] for group in (config.get("config_groups") or {}).values() if group.get("weights")]
    if not weights:
        return None
    scheme = min(weights, key=lambda weight: weight.get("num_bits") or 16)
    kv_cache = "fp8" if config.get("kv_cache_scheme") else None
    return Quantization(method, scheme.get("num_bits") or 16, scheme.get("group_size"), kv_cache)


def _read_fp8(method: str, config: Mapping[str, Any]) -> Quantization:
    block = config.get("weight_block_size")
    return Quantization(method, 8, block[1] if block else None)


def _read_integers(method: str, config: Mapping[str, Any]) -> Quantization | None:
    bits = config.get("bits") or config.get("w_bit")
    return Quantization(method, int(bits), _read_group_size(config) or config.get("q_group_size")) if bits else None


READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Quantization | None]] = {
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": _read_fp8,
    "mxfp4": lambda method, config: Quantization(method, 4, 32),
    "awq": _read_integers,
    "gptq": _read_integers,
}


def _read_group_size(config: Mapping[str, Any], default: int | None = None) -> int | None:
    """Return the group size, also from the nested form of compressed-tensors; -1 means one scale per channel."""
    value = config.get("group_size")
    for group in (config.get("config_groups") or {}).values():
        value = value or (group.get("weights") or {}).get("group_size")
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
