# SPDX-License-Identifier: Apache-2.0
"""Runs inside the engine image: writes checkpoints of the released sizes whose files hold headers and no weights.

OUT/<owner>/<name>/ gets config.json and safetensors files with true headers; their data is a hole, so that a file has
its true length and takes a few KiB of disk. Shapes are those that transformers makes on the meta device of the sizes
below; names are those of the released files, quantized ones as modelopt and compressed-tensors write them and vLLM's
loaders read them. The released config.json and headers were not read.

    python3 real_shapes.py OUT [REPOSITORY...]
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

Shape = tuple[int, ...]
Tensors = dict[str, tuple[str, Shape]]
"""By name: dtype in safetensors' words, and shape."""

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
BITS = {"BF16": 16, "F32": 32, "I64": 64, "I32": 32, "U8": 8, "F8_E4M3": 8}
SHARD_BYTES = 50 * 10**9
"""What save_pretrained puts into one file (`max_shard_size` of transformers 5)."""


# ---- sizes -------------------------------------------------------------------------------------------------------

LARGE_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
LARGE = {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}
SMALL = {"num_attention_heads": 8, "hidden_size_per_layer_input": 256, "final_logit_softcapping": 30.0}
AUDIO = {"use_clipped_linears": False}


def gemma4(text: dict[str, Any], vision: dict[str, Any], audio: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"text_config": text, "vision_config": vision, "audio_config": audio}


GEMMA_4 = {
    "31B": gemma4(
        {
            **LARGE,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 60,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
        },
        LARGE_VISION,
    ),
    "26B-A4B": gemma4(
        {
            **LARGE,
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 30,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
        LARGE_VISION,
    ),
    "E4B": gemma4(
        {
            **SMALL,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
        },
        {},
        AUDIO,
    ),
    "E2B": gemma4(
        {
            **SMALL,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "use_double_wide_mlp": True,
            "num_hidden_layers": 35,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "layer_types": ["full_attention" if (index + 1) % 5 == 0 else "sliding_attention" for index in range(35)],
        },
        {},
        AUDIO,
    ),
}
# The released QAT checkpoint has a head of its own beside the table of embeddings: a loader of another project names it
# among the tensors (jundot/omlx, issue 1775), the 23.3 GB of its file are larger by just that table, and so is what
# vLLM logs for its sister E2B (8.02 GiB where 7.28 follow with a tied head).
QAT_31B = {
    **GEMMA_4["31B"],
    "text_config": {**GEMMA_4["31B"]["text_config"], "tie_word_embeddings": False},
    "tie_word_embeddings": False,
}
GEMMA_3_27B = {
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
LLAMA_3_1_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "rope_theta": 1000000.0,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "rope_theta": 1000000.0,
}
MISTRAL_7B_V0_3 = {"vocab_size": 32768, "max_position_embeddings": 32768, "sliding_window": None, "rope_theta": 1e6}

# ---- quantization ------------------------------------------------------------------------------------------------

TOWERS = ["lm_head", "model.embed_vision*", "model.vision_tower*"]
# Of Gemma 4's 31B only the MLP, of its 26B also the experts; which else of the 26B stays as it is was not to be seen.
NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
            "weights": {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "ignore": [*TOWERS, "model.language_model.layers.*.self_attn*", "model.language_model.layers.*.router*"],
    "producer": {"name": "modelopt", "version": "0.37.0"},
}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": TOWERS,
}
FP8_DYNAMIC = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        }
    },
    "ignore": [*TOWERS, "model.language_model.layers.*.router*"],
}


def nvfp4(module: str, out: int, width: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{module}.weight", "U8", (out, width // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (out, width // 16)
    yield f"{module}.weight_scale_2", "F32", ()
    yield f"{module}.input_scale", "F32", ()


def w4a16(module: str, out: int, width: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{module}.weight_packed", "I32", (out, width // 8)
    yield f"{module}.weight_scale", "BF16", (out, width // 32)
    yield f"{module}.weight_shape", "I64", (2,)


def fp8(module: str, out: int, width: int) -> Iterator[tuple[str, str, Shape]]:
    yield f"{module}.weight", "F8_E4M3", (out, width)
    yield f"{module}.weight_scale", "BF16", (out, 1)


Quantize = Callable[[str, int, int], Iterator[tuple[str, str, Shape]]]
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], tuple[dict[str, Any], Quantize] | None]] = {
    **{f"google/gemma-4-{size}-it": ("Gemma4ForConditionalGeneration", GEMMA_4[size], None) for size in GEMMA_4},
    "nvidia/Gemma-4-31B-IT-NVFP4": ("Gemma4ForConditionalGeneration", GEMMA_4["31B"], (NVFP4, nvfp4)),
    "nvidia/Gemma-4-26B-A4B-NVFP4": ("Gemma4ForConditionalGeneration", GEMMA_4["26B-A4B"], (NVFP4, nvfp4)),
    "google/gemma-4-31B-it-qat-w4a16-ct": ("Gemma4ForConditionalGeneration", QAT_31B, (W4A16, w4a16)),
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": ("Gemma4ForConditionalGeneration", GEMMA_4["31B"], (FP8_DYNAMIC, fp8)),
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic": (
        "Gemma4ForConditionalGeneration",
        GEMMA_4["26B-A4B"],
        (FP8_DYNAMIC, fp8),
    ),
    "google/gemma-3-27b-it": ("Gemma3ForConditionalGeneration", GEMMA_3_27B, None),
    "meta-llama/Llama-3.1-8B-Instruct": ("LlamaForCausalLM", LLAMA_3_1_8B, None),
    "Qwen/Qwen3-8B": ("Qwen3ForCausalLM", QWEN3_8B, None),
    "Qwen/Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", QWEN3_30B_A3B, None),
    "mistralai/Mistral-7B-Instruct-v0.3": ("MistralForCausalLM", MISTRAL_7B_V0_3, None),
}

# ---- making ------------------------------------------------------------------------------------------------------


def state(architecture: str, config: Any) -> Tensors:
    """Names as in released files, without a tied head."""
    with torch.device("meta"):
        model = getattr(transformers, architecture)._from_config(config, dtype=torch.bfloat16)
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    if config.tie_word_embeddings:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("lm_head.weight")}
    return {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def with_shared_kv(tensors: Tensors, text: Any) -> Tensors:
    """Gemma 4: released files have K and V of layers that share another's cache, transformers 5.16 makes none."""
    own = text.num_hidden_layers - text.num_kv_shared_layers
    for index in range(own, text.num_hidden_layers):
        kinds = text.layer_types
        like = next(other for other in range(own) if kinds[other] == kinds[index])
        for leaf in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            source = f"model.language_model.layers.{like}.self_attn.{leaf}"
            tensors[f"model.language_model.layers.{index}.self_attn.{leaf}"] = tensors[source]
    return tensors


def quantized(tensors: Tensors, scheme: dict[str, Any], quantize: Quantize) -> Tensors:
    """Linear layers of the decoder that are not ignored, each expert by itself, as quantizers leave them."""
    result: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        layer, _, rest = name.partition(".experts.")
        modules = [(name.removesuffix(".weight"), shape)]
        if rest in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if rest == "gate_up_proj" else (rest,)
            one = (shape[1] // len(parts), shape[2])
            modules = [(f"{layer}.experts.{n}.{part}", one) for n in range(shape[0]) for part in parts]
        is_linear = ".layers." in name and ".language_model." in name and len(shape) >= 2
        if not is_linear or any(fnmatch.fnmatch(name, pattern) for pattern in scheme["ignore"]):
            result[name] = (dtype, shape)
            continue
        for module, (out, width) in modules:
            for new, new_dtype, new_shape in quantize(module, out, width):
                result[new] = (new_dtype, new_shape)
    if scheme.get("kv_cache_scheme"):
        for name in tensors:
            for letter in "kv":
                if name.endswith(f".self_attn.{letter}_proj.weight"):
                    result[name.removesuffix("weight") + f"{letter}_scale"] = ("F32", ())
    return result


def released_config(architecture: str, given: dict[str, Any], config: Any) -> dict[str, Any]:
    """config.json with the keys that released ones have: per_layer_config and num_local_experts are newer."""
    document: dict[str, Any] = json.loads(config.to_json_string(use_diff=True))
    text = document.get("text_config", document)
    if architecture == "Gemma4ForConditionalGeneration":
        text.pop("per_layer_config", None)
        text["global_head_dim"] = 512
        text["num_global_key_value_heads"] = given["text_config"].get("num_global_key_value_heads")
        text["tie_word_embeddings"] = document["tie_word_embeddings"] = config.tie_word_embeddings
    if architecture == "Qwen3MoeForCausalLM":
        document["num_experts"] = document.pop("num_local_experts")
    document.pop("_name_or_path", None)
    return {"architectures": [architecture], **document}


def make(
    architecture: str, given: dict[str, Any], quantization: tuple[dict[str, Any], Quantize] | None, to: Path
) -> int:
    kind = getattr(transformers, architecture).config_class
    config = kind(**json.loads(json.dumps(given)))
    config.dtype = torch.bfloat16
    tensors = state(architecture, config)
    if architecture.startswith("Gemma4"):
        tensors = with_shared_kv(tensors, config.text_config)
    if architecture.startswith("Gemma3"):
        # transformers 5.16 no longer has a level that the released names have.
        tensors = {
            name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in tensors.items()
        }
    document = released_config(architecture, given, config)
    if quantization:
        scheme, quantize = quantization
        tensors = quantized(tensors, scheme, quantize)
        document["quantization_config"] = scheme
    to.mkdir(parents=True, exist_ok=True)
    (to / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    write(tensors, to)
    return sum(math.prod(shape) for _, shape in tensors.values())


def size_of(dtype: str, shape: Shape) -> int:
    return math.prod(shape) * BITS[dtype] // 8


def write(tensors: Tensors, to: Path) -> None:
    """One file, or an index and files of at most SHARD_BYTES of data."""
    shards: list[Tensors] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        if shards[-1] and filled + size_of(dtype, shape) > SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = (dtype, shape)
        filled += size_of(dtype, shape)
    names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(size_of(*entry) for entry in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (to / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    for name, shard in zip(names, shards, strict=True):
        write_headers(to / name, shard)


def write_headers(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + size_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + end)


def main() -> None:
    out, chosen = Path(sys.argv[1]), sys.argv[2:] or list(CHECKPOINTS)
    for repository in chosen:
        count = make(*CHECKPOINTS[repository], out / repository)
        print(f"[shapes] {repository}: {count:,} elements", flush=True)


if __name__ == "__main__":
    main()
