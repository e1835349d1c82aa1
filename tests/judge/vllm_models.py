# SPDX-License-Identifier: Apache-2.0
"""Inside an image with vLLM: what vLLM's own model classes make of checkpoints on standard input.

Reads a JSON list of {"config": config.json, "headers": [[name, dtype, shape], ...], "tensor_parallel_size": n,
"pipeline_rank": null, 0 or 1, "expert_parallel": false or true}, prints {"version": ..., "answers": [...]}, in the same
order. vLLM builds each model on the meta device, where tensors have a shape and no memory, as rank 0 of n, of all
layers or of one stage of a pipeline of two; then its own load_weights gets the tensors of the checkpoint. What stands
here is only the group of ranks, which needs no second process. Nothing is imported from this project.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.update({"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"})
# Releases up to 0.23 import it for a file format that nothing here has.
for absent in ("gguf", "gguf.constants", "gguf.quants", "diskcache"):
    sys.modules.setdefault(absent, mock.MagicMock(__spec__=ModuleSpec(absent, None), __path__=[]))

import torch
import vllm
from vllm.config import CacheConfig, LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import parallel_state
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA, FusedMoEWithLoRA
from vllm.model_executor.layers import mla, quantization, rotary_embedding
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.model_executor.models.interfaces import supports_lora
from vllm.platforms import current_platform

if int(vllm.__version__.split(".")[1]) >= 33:
    # As with CUDA; here it lacks Triton. It decides on which stages of a pipeline towers are.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8, "I32": torch.int32}
DTYPES |= {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I64": torch.int64, "BOOL": torch.bool}


def inspect_here(lazy: Any) -> Any:
    """Inspects a model class in this process; vLLM starts another one, which imports everything again."""
    return registry._ModelInfo.from_model_cls(lazy.load_model_cls())


registry._LazyRegisteredModel.inspect_model_cls = inspect_here
# The image has no torchvision; it is imported with image processors, which no weight depends on.
for absent in ("", ".io", ".transforms", ".transforms.v2", ".transforms.v2.functional"):
    stand_in = mock.MagicMock(__spec__=ModuleSpec(f"torchvision{absent}", None), __path__=[])
    sys.modules.setdefault(f"torchvision{absent}", stand_in)


class OfAnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


class Experts(metaclass=OfAnyName):
    """In place of the class that computes experts."""


GPU = SimpleNamespace(is_cpu=lambda: False, is_xpu=lambda: False, is_cuda=lambda: True)


def use_gpu_kernels(module: Any) -> None:
    """Gives a module the kernels of a GPU of Ada's generation, of which none runs; the CPU has few."""
    for name, function in list(vars(module).items()):
        if re.fullmatch(r"(init|choose|select)_\w+_linear_(kernel|backend)", name):
            kernel = mock.MagicMock(__name__="judge")
            setattr(module, name, lambda *_, kernel=kernel, **__: kernel)
        if not re.fullmatch(r"select_\w+_moe_backend", name):
            continue
        for key, kind in function.__globals__.items():
            of = key.lower().removesuffix("moebackend")
            if of != key.lower() and of != "unquantized" and of in name.replace("_", ""):
                wanted = "TRITON" if of in ("fp8", "int8") else "MARLIN"
                chosen = getattr(kind, wanted, next(iter(kind)))
                setattr(module, name, lambda *_, chosen=chosen, **__: (chosen, Experts))
    if ".inc" in module.__name__:
        module.current_platform = GPU


type(current_platform).num_compute_units = classmethod(lambda *_: 1)
for info in pkgutil.walk_packages(quantization.__path__, f"{quantization.__name__}."):
    try:
        use_gpu_kernels(importlib.import_module(info.name))
    except ImportError:
        continue


class LatentAttention(torch.nn.Module):
    """In place of vLLM's MLAAttention, which before 0.28 looks for a backend that no CPU has, and has no weights beside
    those that it is given."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.head_size = given["kv_lora_rank"] + given["qk_rope_head_dim"]
        self.kv_b_proj = given["kv_b_proj"]


mla.MLAAttention = LatentAttention
# The norm of linear attention is made on the device of the platform.
current_platform.current_device = lambda: "meta"
try:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as gdn

    if int(vllm.__version__.split(".")[1]) == 22:  # whose AWQ has a class of its own for a CPU
        gdn.AWQMarlinConfig = importlib.import_module(f"{quantization.__name__}.cpu_wna16").CPUAWQConfig
    on_any = gdn.QwenGatedDeltaNetAttention.maybe_disable_tp

    def on_cuda(*given: Any) -> Any:
        with mock.patch.object(type(current_platform), "is_cuda", lambda _: True):
            return on_any(*given)

    gdn.QwenGatedDeltaNetAttention.maybe_disable_tp = on_cuda
except ImportError:
    pass  # since 0.22
# Activation functions that older releases look up when they build a layer, and that the CPU build does not have.
for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_quick", "relu_squared"):
    if not hasattr(torch.ops._C, name):
        setattr(torch.ops._C, name, mock.MagicMock())


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        with torch.device("cpu"):
            return function(*given, **named)

    return call


# Which expert is on which rank has values, and not only a shape.
for module in ("expert_map_manager", "layer"):  # since 0.28, and before
    try:
        found = importlib.import_module(f"vllm.model_executor.layers.fused_moe.{module}")
        found.determine_expert_map = on_cpu(found.determine_expert_map)
    except (AttributeError, ImportError):
        continue


# Elsewhere experts without a gate are refused.
ALIKE = type("Alike", (type(current_platform),), {"is_cuda_alike": lambda _: True})()
for module in ("config", "layer"):  # since 0.20, and before
    importlib.import_module(f"vllm.model_executor.layers.fused_moe.{module}").current_platform = ALIKE
unquantized = importlib.import_module("vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method")
select_gated = unquantized.select_unquantized_moe_backend


def select_unquantized(moe_config: Any, **more: Any) -> Any:
    if moe_config.is_act_and_mul or more:  # 0.19 has no kernels to choose from
        return select_gated(moe_config=moe_config, **more)
    return unquantized.UnquantizedMoeBackend.TRITON, Experts


unquantized.select_unquantized_moe_backend = select_unquantized


def wrap_experts(self: Any, base_layer: Any) -> None:
    """What FusedMoEWithLoRA's constructor keeps, without a kernel, of which the CPU has none."""
    torch.nn.Module.__init__(self)
    self.base_layer, self.moe_config = base_layer, base_layer.moe_config
    if not isinstance(getattr(type(self), "_shared_experts", None), property):
        self._shared_experts = getattr(base_layer, "_shared_experts", None)
    self.tp_size = base_layer.moe_config.moe_parallel_config.tp_size
    self.device, self._w13_slices = torch.device("meta"), 2
    self.enable_moe_shared_loras = False


FusedMoEWithLoRA.__init__ = wrap_experts
FusedMoEWithLoRA.set_mapping = lambda *_: None
model_manager.get_punica_wrapper = lambda *_, **__: mock.MagicMock()


def count_lora(model: Any, engine: VllmConfig) -> list[int | str]:
    """The bytes of two adapters of rank 16 beside the model, as they are and with fully_sharded_loras; or an error."""
    config, found = engine.model_config, []
    try:
        for sharded in (False, True):
            lora = LoRAConfig(max_lora_rank=16, max_loras=2, fully_sharded_loras=sharded)
            lora.verify_with_model_config(config)
            with set_current_vllm_config(engine), torch.device("meta"):
                if not sharded:
                    assert supports_lora(model), "no LoRA"
                    given = (model, 8, 64, 0, lora, torch.device("meta"), engine)
                    manager = model_manager.LoRAModelManager(*given)
                for module in manager.modules.values():
                    module.create_lora_weights(2, lora, config.hf_config)
            held: dict[int, Any] = {}
            for module in model.modules():
                for name, value in vars(module).items() if isinstance(module, BaseLayerWithLoRA) else ():
                    # Lists are of parts of others.
                    if name.endswith(("lora_a_stacked", "lora_b_stacked")) and not isinstance(value, list):
                        held |= {id(each): each for each in (value if isinstance(value, tuple) else (value,))}
            found.append(size_of(held.values()))
    except Exception as error:  # What vLLM raises is the answer.
        found.append(f"{type(error).__name__}: {str(error)[:160]}")
    return found


def group(size: int, rank: int = 0) -> Any:
    ranks = {"rank": rank, "rank_in_group": rank, "local_rank": rank, "first_rank": 0, "ranks": list(range(size))}
    ends = {"is_first_rank": rank == 0, "is_last_rank": rank == size - 1, "last_rank": size - 1}
    processes = SimpleNamespace(size=lambda: size, rank=lambda: 0)
    names = {"device_group": processes, "cpu_group": processes, "unique_name": "judge"}
    return SimpleNamespace(world_size=size, **names, **ranks, **ends)


def build(given: dict[str, Any], directory: str) -> tuple[Any, VllmConfig]:
    """The model on the meta device, and the configuration, as rank 0 of all ranks of tensor parallelism."""
    size = given["tensor_parallel_size"]
    for name in ("_TP", "_EP", "_WORLD"):
        setattr(parallel_state, name, group(size))
    for name in ("_DP", "_PCP", "_DCP"):
        setattr(parallel_state, name, group(1))
    stage = given["pipeline_rank"]
    parallel_state._PP = group(1) if stage is None else group(2, stage)
    (Path(directory) / "config.json").write_text(json.dumps(given["config"]))
    # vLLM looks into the header of the weights for a head of its own.
    header = {name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]} for name, kind, shape in given["headers"]}
    raw = json.dumps(header).encode()
    (Path(directory) / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    config = ModelConfig(
        model=directory,
        tokenizer=directory,
        skip_tokenizer_init=True,
        dtype="auto",
        language_model_only=given.get("language_model_only", False),
    )
    if config.multimodal_config:
        config.multimodal_config.mm_device_do_normalize = False  # it would read what images are scaled by
    # As EngineArgs.create_engine_config does.
    types = getattr(config.hf_text_config, "layer_types", None) or ["sliding_attention"]
    window = config.get_sliding_window() if set(types) == {"sliding_attention"} else None
    cache = CacheConfig(block_size=32, sliding_window=window)
    engine = VllmConfig(model_config=config, cache_config=cache, load_config=LoadConfig())
    engine.parallel_config.tensor_parallel_size = size
    engine.parallel_config.enable_expert_parallel = given["expert_parallel"]
    engine.parallel_config.pipeline_parallel_size = parallel_state._PP.world_size
    rotary_embedding._ROPE_DICT.clear()
    torch.set_default_dtype(config.dtype)
    if given.get("drafter"):
        config = add_drafter(given, engine, directory)
    try:
        with set_current_vllm_config(engine), torch.device("meta"):
            model = initialize_model(engine, model_config=config)
            loaded = model.load_weights(
                (name, torch.empty(shape, dtype=DTYPES[dtype])) for name, dtype, shape in given["headers"]
            )
    finally:
        torch.set_default_dtype(torch.float32)
    model.judge_loaded = loaded
    return model, engine


def add_drafter(given: dict[str, Any], engine: VllmConfig, directory: str) -> ModelConfig:
    """Make the engine one that decodes speculatively; the configuration of its drafter."""
    if "drafter_config" in given:
        directory = f"{directory}/drafter"
        Path(directory).mkdir()
        (Path(directory) / "config.json").write_text(json.dumps(given["drafter_config"]))
    spec = SpeculativeConfig(
        method=given["drafter"].split()[0],
        model=directory,
        num_speculative_tokens=1,
        target_model_config=engine.model_config,
        target_parallel_config=engine.parallel_config,
    )
    engine.speculative_config = spec
    return spec.draft_model_config


def is_shared(model: Any, name: str) -> bool:
    """Whether a parameter of a drafter is replaced by that of its model after it is loaded (v1/spec_decode/eagle.py of
    0.19, llm_base_proposer.py later)."""
    what = (
        "embed_tokens" if ".embed_tokens." in name else "lm_head" if re.search("(lm_|shared_head.)head", name) else ""
    )
    return bool(what) and not getattr(model, f"has_own_{what}", False)


def size_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def answer(given: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            model, engine = build(given, directory)
        except Exception as error:  # What vLLM raises is the answer.
            return {"error": f"{type(error).__name__}: {str(error)[:600]}"}
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LatentAttention):
            index = int(next(part for part in name.split(".") if part.isdecimal()))
            layers[index] = [1, module.head_size, None]
        if isinstance(module, Attention):
            index = int(next(part for part in name.split(".") if part.isdecimal()))
            layers[index] = [
                module.num_kv_heads,
                module.head_size,
                getattr(module, "attention_chunk_size", None) or module.sliding_window,
            ]
    ropes = {id(rope): rope for rope in rotary_embedding._ROPE_DICT.values()}
    caches = [buffer for rope in ropes.values() for buffer in rope.buffers()]
    # BaseKVCacheMethod deletes its scales after loading (quantization/kv_cache.py); zero points are two bytes each.
    deleted = tuple(f".attn.{name}_{what}" for name in ("q", "k", "v", "prob") for what in ("scale", "zero_point"))
    # GPTQ's indices are replaced by empty tensors after loading, unless desc_act is set (marlin_make_empty_g_idx).
    ordered = (given["config"].get("quantization_config") or {}).get("desc_act")
    deleted += () if ordered else ("g_idx", "g_idx_sort_indices")
    deleted += ("weight_shape",)  # of W4A16: two numbers for each layer, which the plan leaves out
    # Of experts in GPTQ, if the checkpoint has none (quantization/auto_gptq.py).
    deleted += () if any(name.endswith("_bias") for name, *_ in given["headers"]) else (".w13_bias", ".w2_bias")
    parameters = {name: value for name, value in model.named_parameters() if not name.endswith(deleted)}
    if given.get("drafter"):
        parameters = {name: value for name, value in parameters.items() if not is_shared(model, name)}
    # From 0.25 to 0.31 load_weights names a part of the experts' layer otherwise than the layer itself does.
    reported = {name.replace(".routed_experts.", ".") for name in model.judge_loaded or parameters}
    batch = engine.scheduler_config.max_num_batched_tokens
    of_batch = {
        id(each): each
        for module in model.modules()
        for value in vars(module).values()
        for each in (value if isinstance(value, list) else (value,))
        if isinstance(each, torch.Tensor) and each.shape[:1] == (batch,)
    }
    return {
        "layers": [layers[index] for index in sorted(layers)],
        "parameters_bytes": size_of(parameters.values()),
        "token_bytes": size_of(of_batch.values()) // batch,
        "rope_bytes": size_of(caches),
        "not_loaded": sorted({name.replace(".routed_experts.", ".") for name in parameters} - reported)[:5],
        "max_model_len": engine.model_config.max_model_len,
        "lora_bytes": [] if given.get("drafter") else count_lora(model, engine),
    }


def main() -> None:
    logging.disable(logging.CRITICAL)
    given = json.load(sys.stdin)
    with mock.patch("sys.stdout", sys.stderr):
        answers = [answer(each) for each in given]
    json.dump({"version": vllm.__version__, "answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
