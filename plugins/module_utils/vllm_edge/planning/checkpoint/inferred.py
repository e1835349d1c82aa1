# SPDX-License-Identifier: Apache-2.0
"""Tensors of a checkpoint of which only config.json and the safetensors index are at hand.

The index has the names and the total size. Shapes and dtypes follow from config.json and from how each quantization
stores a linear layer. What no rule knows (encoders of images and audio) shares what is left of the total size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..contract import Facts, Tensor
from .components import name_mixer
from .headers import INDEX, FactsError, Header, compute_bytes
from .quantization import read_quantization

APPROXIMATE = "approximate: "
"""Begins `Facts.source` of facts that were inferred."""
MAX_ERROR = 0.10
"""The part by which the inferred size may differ from the index; above it, the rules do not describe the checkpoint."""

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_PATH = re.compile(
    r"^(?:(?:model|language_model)\.)*(?:layers\.(?P<layer>\d{1,5})\.)?(?P<path>.*?)(?:\.(?P<leaf>[a-z_0-9]+))?$"
)
_SCALARS = frozenset(
    {"weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale", "k_scale", "v_scale"}
)
_OWN_SIZE = (
    *("q_norm", "k_norm", "per_layer_projection_norm", "q_a_layernorm", "kv_a_layernorm", "linear_attn.norm"),
    "mamba.norm",
)
"""Norms whose size is not the hidden size."""
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The keys of config.json of the number of experts of a layer."""
Shape = tuple[int, ...]


def is_approximate(source: str) -> bool:
    return source.removeprefix("recorded: ").startswith(APPROXIMATE)


def infer_headers(
    repo: str,
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    names: Sequence[str],
    total_bytes: int | None,
) -> tuple[list[Header], str]:
    """Return the tensors of a checkpoint, and a sentence about how exact they are.

    Args:
        names: the keys of the index's weight_map.
        total_bytes: metadata.total_size of the index, if it has one.

    Raises:
        FactsError: if too little is known, or if the result differs too much from total_bytes.
    """
    sizes = _Sizes(repo, config, quantization, frozenset(names))
    inferred = {name: sizes.infer(name) for name in names}
    headers: list[Header] = [(name, *found) for name, found in inferred.items() if found]
    unknown = [name for name, found in inferred.items() if not found]
    known = sum(compute_bytes(Tensor("", dtype, tuple(shape))) for _, dtype, shape in headers)
    if total_bytes is None:
        if unknown:
            raise FactsError(
                f"{repo}: {INDEX} has no metadata.total_size, and the shape of {unknown[0][:200]} does not follow from "
                "config.json. Fetch the weights too, or read the facts from the hub."
            )
        return headers, f"{known / 1e9:.1f} GB by config.json; {INDEX} has no size to compare"
    rest = total_bytes - known
    if abs(rest) > total_bytes * (1.0 if unknown and rest > 0 else MAX_ERROR) or (not headers and unknown):
        raise FactsError(
            f"{repo}: its tensors have {known / 1e9:.1f} GB by config.json and {total_bytes / 1e9:.1f} GB by {INDEX}, "
            "so its shapes cannot be inferred. Fetch the weights too, or read the facts from the hub."
        )
    if not unknown:
        return headers, f"{known / 1e9:.1f} GB by config.json, {total_bytes / 1e9:.1f} GB by {INDEX}"
    share = max(rest, 0) // len(unknown)
    headers += [(name, "U8", (share,)) for name in unknown]
    return headers, (
        f"the shapes of {len(unknown)} of {len(names)} tensors ({max(rest, 0) / 1e9:.1f} of "
        f"{total_bytes / 1e9:.1f} GB) do not follow from config.json"
    )


class _Sizes:
    """The sizes in config.json, and the shapes that follow from them."""

    def __init__(
        self, repo: str, config: Mapping[str, Any], quantization: Mapping[str, Any], names: frozenset[str]
    ) -> None:
        text = config.get("text_config")
        self._config = {**config, **(text if isinstance(text, Mapping) else {})}
        self._repo, self._names = repo, names
        self._quantization = read_quantization(Facts(repo, "", {}, (), quantization))
        dtype = str(self._config.get("dtype") or self._config.get("torch_dtype") or config.get("torch_dtype") or "")
        self._dtype = _DTYPES.get(dtype, "BF16")
        self._hidden = self._read("hidden_size")
        self._heads = self._read("num_attention_heads")

    def _read(self, *keys: str) -> int:
        for key in keys:
            value = self._config.get(key)
            if type(value) is int and 0 < value < 2**40:
                return value
        raise FactsError(f"{self._repo}: config.json has no {keys[0]}, so shapes cannot be inferred from it.")

    def _read_head(self, layer: int) -> tuple[int, int]:
        """Return head size and number of KV heads of a layer; Gemma 4 has others for full attention."""
        config = self._config
        size, kv = config.get("head_dim") or self._hidden // self._heads, config.get("num_key_value_heads")
        types = config.get("layer_types") or []
        special = (config.get("per_layer_config") or {}).get(str(layer), {})
        if not special and layer < len(types) and types[layer] == "full_attention":
            special = {"head_dim": config.get("global_head_dim")}
            if config.get("attention_k_eq_v"):
                special["num_key_value_heads"] = config.get("num_global_key_value_heads")
        return int(special.get("head_dim") or size), int(special.get("num_key_value_heads") or kv or self._heads)

    def _find_linear(self, path: str, layer: int) -> Shape | None:
        part = path.rsplit(".", 1)[-1]
        head, kv = self._read_head(layer)
        hidden, queries = self._hidden, self._heads * head
        gated = self._config.get("attn_output_gate", "linear_conv_kernel_dim" in self._config)
        attention: dict[str, Shape] = {
            "q_proj": (2 * queries if gated else queries, hidden),
            "k_proj": (kv * head, hidden),
            "v_proj": (kv * head, hidden),
            "o_proj": (hidden, queries),
            "qkv_proj": (queries + 2 * kv * head, hidden),
            "q_norm": (head,),
            "k_norm": (head,),
        }
        if self._config.get("kv_lora_rank"):
            attention = self._list_latent()
        if "self_attn." in path:
            return attention.get(part)
        if "linear_attn." in path:
            return self._list_linear().get(part)
        if "mamba." in path:
            return self._list_mamba().get(part)
        if part.endswith("_latent_proj"):
            latent = self._read("moe_latent_size")
            return (latent, hidden) if part.startswith("fc1") else (hidden, latent)
        if part in ("embed_tokens", "lm_head"):
            return self._read("vocab_size"), hidden
        if part == "eh_proj" or path == "mtp.fc":  # multi-token prediction
            return hidden, 2 * hidden
        if "per_layer" in part:  # Gemma 4's E models
            width = self._read("hidden_size_per_layer_input")
            every = width * self._read("num_hidden_layers")
            tables: dict[str, Shape] = {
                "embed_tokens_per_layer": (self._read("vocab_size"), every),
                "per_layer_model_projection": (every, hidden),
                "per_layer_input_gate": (width, hidden),
                "per_layer_projection": (hidden, width),
                "per_layer_projection_norm": (width,),
            }
            return tables.get(part)
        if "experts" in path and "shared" not in path:
            size = self._read("moe_intermediate_size", "intermediate_size")
            experts = () if re.search(r"experts\.\d+\.", path) else (self._read(*EXPERT_KEYS),)
            hidden = self._config.get("moe_latent_size") or hidden
        elif part == "shared_expert_gate":
            return 1, hidden
        elif re.search(r"(^|\.)(gate|router|router\.proj)$", path):
            return self._read(*EXPERT_KEYS), hidden
        elif "shared_experts." in path:  # DeepSeek and NemotronH
            size = self._read("moe_shared_expert_intermediate_size", "moe_intermediate_size")
            size, experts = size * self._read("n_shared_experts"), ()
        else:
            dense = ("intermediate_size_mlp",) if path.startswith("feed_forward.") else ()  # Llama 4
            keys = ("shared_expert_intermediate_size",) if "shared_expert." in path else dense
            size, experts = self._read(*keys, "intermediate_size"), ()
            shared = self._config.get("num_kv_shared_layers") or 0
            if self._config.get("use_double_wide_mlp") and layer >= self._read("num_hidden_layers") - shared:
                size *= 2
        mlp = {
            **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (size, hidden)),
            **dict.fromkeys(("down_proj", "w2"), (hidden, size)),
            "gate_up_proj": (2 * size, hidden),
        }
        return (*experts, *mlp[part]) if part in mlp else None

    def _list_linear(self) -> dict[str, Shape]:
        heads, keys = self._read("linear_num_value_heads"), self._read("linear_num_key_heads")
        size, keys = self._read("linear_value_head_dim"), keys * self._read("linear_key_head_dim")
        values = heads * size
        rows = {"qkv": 2 * keys + values, "z": values, "qkvz": 2 * (keys + values), "a": heads, "b": heads}
        return {
            **{f"in_proj_{part}": (count, self._hidden) for part, count in {**rows, "ba": 2 * heads}.items()},
            "conv1d": (rows["qkv"], 1, self._read("linear_conv_kernel_dim")),
            "out_proj": (self._hidden, values),
            "norm": (size,),
            **dict.fromkeys(("A_log", "dt_bias"), (heads,)),
        }

    def _list_mamba(self) -> dict[str, Shape]:
        heads, groups = self._read("mamba_num_heads"), 2 * self._read("n_groups") * self._read("ssm_state_size")
        inner = heads * self._read("mamba_head_dim")
        return {
            "in_proj": (2 * inner + groups + heads, self._hidden),
            "conv1d": (inner + groups, 1, self._read("conv_kernel")),
            "out_proj": (self._hidden, inner),
            "norm": (inner,),
            **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        }

    def _list_latent(self) -> dict[str, Shape]:
        rank, rope, value = (self._read(key) for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
        key = self._read("qk_nope_head_dim")
        queries = self._heads * (key + rope)
        found: dict[str, Shape] = {
            "q_proj": (queries, self._hidden),
            "kv_a_proj_with_mqa": (rank + rope, self._hidden),
            "kv_a_layernorm": (rank,),
            "kv_b_proj": (self._heads * (key + value), rank),
            "o_proj": (self._hidden, self._heads * value),
        }
        if self._config.get("q_lora_rank"):
            width = self._read("q_lora_rank")
            found |= {"q_a_proj": (width, self._hidden), "q_a_layernorm": (width,), "q_b_proj": (queries, width)}
        return found

    def infer(self, name: str) -> tuple[str, Shape] | None:
        """Return dtype and shape of a tensor; None if no rule knows it."""
        match = _PATH.match(name_mixer(name) if self._config.get("mamba_num_heads") else name)
        if match is None or "tower" in name or "vis" in name or "audio" in name or "projector" in name:
            return None
        path, leaf = match["path"], match["leaf"] or ""
        if leaf.endswith(("_proj", "dt_bias")):  # experts in one tensor, and dt_bias, have no leaf of their own
            path, leaf = f"{path}.{leaf}", "weight"
        if leaf in ("layer_scalar", *_SCALARS):
            return (self._dtype if leaf == "layer_scalar" else "F32"), (1,)
        if leaf == "e_score_correction_bias":
            return "F32", (self._read(*EXPERT_KEYS),)
        if re.search(r"norm(_\d|_hidden|_embedding)?$", path) and not path.endswith(_OWN_SIZE):
            return self._dtype, (self._hidden,)
        linear = self._find_linear(path, int(match["layer"] or 0))
        if linear is None:
            return None
        if len(linear) == 1 or leaf == "bias":
            return self._dtype, linear[:2] if len(linear) > 2 and linear[1] > 1 else linear[:1]
        base = name.removesuffix(f".{leaf}")
        return self._infer_stored(base, leaf, linear)

    def _infer_stored(self, base: str, leaf: str, linear: Shape) -> tuple[str, Shape] | None:
        """Return how a quantization stores a linear layer, by the leaf of the name and those beside it."""
        *front, rows, columns = linear
        bits, group = self._quantization.weight_bits, self._quantization.group_size
        four = bits == 4 and any(f"{base}.{one}" in self._names for one in ("weight_scale_2", "weight_global_scale"))
        width = group or columns
        stored: dict[str, tuple[str, Shape]] = {
            "weight": (self._dtype, (rows, columns)),
            "weight_packed": ("I32", (rows, columns * bits // 32)),
            "weight_scale": (self._dtype, (rows, math.ceil(columns / width))),
            "weight_scale_inv": ("F32", (math.ceil(rows / 128), math.ceil(columns / 128))),
            "weight_shape": ("I64", (2,)),
            "qweight": ("I32", (rows * bits // 32, columns)),  # as many bytes in the order of AWQ
            "scales": ("F16", (math.ceil(columns / width), rows)),
            "qzeros": ("I32", (math.ceil(columns / width), rows * bits // 32)),
            "g_idx": ("I32", (columns,)),
        }
        if four:
            stored |= dict.fromkeys(("weight", "weight_packed"), ("U8", (rows, columns // 2)))
            stored["weight_scale"] = ("F8_E4M3", (rows, math.ceil(columns / 16)))
        elif bits == 8 and any(f"{base}.{one}" in self._names for one in ("weight_scale", "weight_scale_inv")):
            stored["weight"] = ("F8_E4M3", (rows, columns))
        if leaf not in stored:
            return None
        dtype, shape = stored[leaf]
        return dtype, (*front, *shape)
