# SPDX-License-Identifier: Apache-2.0
"""The quantization of a checkpoint, from quantization_config or hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...text import printable, shown
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
    family = "modelopt" if method.startswith("modelopt") else method.removesuffix("_marlin")
    # bitsandbytes wrote no method at first (`load_in_4bit`).
    found = READERS[family](family, config) if family in READERS else method or "without quant_method"
    if isinstance(found, str):
        raise FactsError(
            f"{facts.repo}: the planner does not know the quantization '{printable(found[:120], '')}'; it knows "
            f"modelopt (NVFP4, FP8, both, MXFP8), compressed-tensors ({', '.join(SCHEMES)}), fp8, mxfp4, and awq, gptq "
            "and auto-round of 4 and 8 bits. Take such a checkpoint of the model."
        )
    for what, value, most in (("bits", found.weight_bits, 64), ("group size", found.group_size or 1, 2**20)):
        if type(value) is not int or not 1 <= value <= most:
            raise FactsError(f"{facts.repo}: the {what} of its quantization is {shown(value)}, which is not possible.")
    return found


def name_precision(dtype: str, quantization: Quantization) -> str:
    """Return the precision of weights as `precision` of vllm_models says it; of others the scheme or the method."""
    plain = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    methods = {"none": plain.get(dtype, dtype), "modelopt_fp4": "nvfp4", "modelopt": "fp8"}
    schemes = "+".join(sorted(quantization.schemes)).lower()
    return schemes or methods.get(quantization.method, quantization.method)


def _read_modelopt(method: str, config: Mapping[str, Any]) -> Quantization | str:
    inner = config.get("quantization") or config
    algorithm = str(inner.get("quant_algo") or "").upper()
    kv_cache = _read_modelopt_kv_cache(config, inner)
    if algorithm in FOUR_BITS:
        return Quantization("modelopt_fp4", 4, _read_group_size(inner, 16), kv_cache)
    if algorithm == "MXFP8":
        return Quantization("modelopt_mxfp8", 8, 32, kv_cache)
    if algorithm == "MIXED_PRECISION":
        used = list_modelopt_algorithms(config)
        bits, size = (4, 16) if used & FOUR_BITS else (8, None)
        if used and used <= FOUR_BITS | {"FP8"}:
            return Quantization("modelopt_mixed", bits, size, kv_cache)
        algorithm += f" of {', '.join(sorted(used)) or 'nothing'}"
    known = algorithm.startswith("FP8")
    return Quantization(method, 8, None, kv_cache) if known else f"{method} {algorithm}"


def list_modelopt_algorithms(config: Mapping[str, Any]) -> set[str]:
    """Return ModelOpt's names of what it made of the layers, in capitals; of one for all, that."""
    inner = config.get("quantization") or config
    layers = (inner.get("quantized_layers") or {}).values()
    return {str(how.get("quant_algo") or "").upper() for how in layers or [inner]}


SCHEMES = ("NVFP4", "MXFP4", "MXFP8", "FP8", "W8A8 INT8", "W4A16", "W8A16", "W4A8 FP8")
"""The schemes of compressed-tensors, as `name_scheme` names them, for which vLLM has a kernel on NVIDIA's GPUs. Not
known are those of Humming (integers of other sizes, W4A8 MXFP4 and INT8), which packs weights in another way."""


def name_scheme(group: Mapping[str, Any], common_format: Any) -> str:
    """Return the scheme of an entry of config_groups, in the order of `_get_scheme_from_parts` (compressed_tensors.py,
    0.19.0 to 0.33.0); a description if it is none of SCHEMES.

    Args:
        common_format: `format` of the whole, which an entry's own replaces.
    """
    weights, inputs = group["weights"], group.get("input_activations") or {}
    form, bits, kind = group.get("format") or common_format, weights.get("num_bits"), weights.get("type", "int")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    activations = inputs.get("num_bits", 16)
    in_channels = strategy in ("tensor", "channel")
    found = {
        "NVFP4": (kind, bits, strategy, size) == ("float", 4, "tensor_group", 16) and activations in (4, 16),
        "MXFP4": (kind, bits, strategy, size) == ("float", 4, "group", 32) and activations in (4, 16),
        "MXFP8": (kind, bits, strategy, size) == ("float", 8, "group", 32),
        "FP8": (kind, bits) == ("float", 8) and (in_channels or strategy == "block"),
        "W4A8 FP8": (kind, bits) == ("int", 4) and (inputs.get("type"), activations) == ("float", 8),
        "W8A8 INT8": (kind, bits, activations) == ("int", 8, 8) and in_channels and form != "pack-quantized",
        f"W{bits}A16": kind == "int" and bits in (4, 8) and not inputs and form == "pack-quantized",
    }
    name = "".join([name for name, fits in found.items() if fits][:1])
    return name or f"W{bits}A{activations} of {kind} by {strategy} in {form}"


def _read_compressed_tensors(method: str, config: Mapping[str, Any]) -> Quantization | str:
    groups = [group for group in (config.get("config_groups") or {}).values() if group.get("weights")]
    schemes = [name_scheme(group, config.get("format")) for group in groups]
    sparsity, cache = (config.get(key) or {} for key in ("sparsity_config", "kv_cache_scheme"))
    others = {
        "without weights": not groups,
        "with sparsity_config": bool(sparsity.get("targets")),
        "with transform_config": bool(config.get("transform_config")),
        f"with kv_cache_scheme {cache.get('type')}{cache.get('num_bits')}": bool(cache)
        and (cache.get("type"), cache.get("num_bits")) != ("float", 8),
        **dict.fromkeys(set(schemes) - set(SCHEMES), True),
    }
    if unknown := [what for what, there in others.items() if there]:
        return f"{method} {unknown[0]}"
    least = min((group["weights"] for group in groups), key=lambda weight: weight.get("num_bits") or 16)
    kv_cache = "fp8" if cache else None
    return Quantization(method, least["num_bits"], least.get("group_size"), kv_cache, frozenset(schemes))


def _read_integers(method: str, config: Mapping[str, Any]) -> Quantization | str:
    """Return GPTQ or AWQ. auto-round packs in the way of either, and vLLM gives its layers to them (inc.py of 0.19.0,
    inc/schemes/inc_wna16_linear.py of 0.33.0); 16-bit layers of extra_config are seen from the tensors."""
    bits = config.get("bits") or config.get("w_bit")
    name, kind = f"{method} of {bits} bits", method
    if method == "auto-round":
        packing, data = config.get("packing_format", "auto_round:auto_gptq"), config.get("data_type", "int")
        kind = "gptq" if "gptq" in f"{packing} {config.get('backend')}" else "awq" if "awq" in str(packing) else ""
        name += f", {data}, {packing}"
        layers = (config.get("extra_config") or {}).values()
        if data != "int" or not kind or {layer.get("bits", 16) for layer in layers} - {4, 8, 16, 32}:
            return name
    if kind == "gptq" and config.get("sym") is False:
        return f"{name}, asymmetric"
    if bits not in (4, 8):
        return name
    return Quantization(kind, bits, _read_group_size(config) or config.get("q_group_size"))


READERS: Mapping[str, Callable[[str, Mapping[str, Any]], Quantization | str]] = {
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
    "fp8": lambda method, config: Quantization(method, 8, (config.get("weight_block_size") or (None, None))[1]),
    "mxfp4": lambda method, config: Quantization(method, 4, 32),
    "awq": _read_integers,
    "gptq": _read_integers,
    "auto-round": _read_integers,
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
