# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin: the engine plans the KV cache of the real model with vLLM's own functions, then serves the tiny one.

vLLM loads plugins in every one of its processes. In the engine's, `get_kv_cache_configs` is given the real model's
layers and what its GPUs have left; it refuses what does not fit, with vLLM's words, and what it finds is what the log
and /metrics say. Only then does it run again, for the layers that exist.
"""

from __future__ import annotations

import copy
import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

# Memory for the tiny model's KV cache: enough for one request of 262,144 tokens; pages are touched only when used.
TINY_KV_BYTES = 2**30
# What attention on the L4 (Triton) starts from; the CPU's is 128.
BLOCK_SIZE = 16


def real_specs(repository: str, tensor_parallel_size: int, kv_cache_dtype: str) -> dict[str, Any]:
    """KV cache specs of the real model's layers on one rank."""
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, get_kv_quant_mode

    from vllm_edge_lab import physics

    architecture = physics.ARCHITECTURES[physics.model_of(repository).family]
    name = physics.kv_dtype(repository, kv_cache_dtype)
    common = {
        "block_size": BLOCK_SIZE,
        "dtype": STR_DTYPE_TO_TORCH_DTYPE.get(name, torch.bfloat16),
        "kv_quant_mode": get_kv_quant_mode(name),
    }
    specs: dict[str, Any] = {}
    for index, kind in enumerate(architecture.kv_layers):
        layer = f"model.layers.{index}.self_attn.attn"
        if kind == "s":
            specs[layer] = SlidingWindowSpec(
                num_kv_heads=max(1, architecture.kv_heads_sliding // tensor_parallel_size),
                head_size=architecture.head_dim_sliding,
                sliding_window=architecture.sliding_window,
                **common,
            )
        else:
            specs[layer] = FullAttentionSpec(
                num_kv_heads=max(1, architecture.kv_heads_full // tensor_parallel_size),
                head_size=architecture.head_dim_full,
                **common,
            )
    return specs


def real_config(vllm_config: Any) -> Any:
    """The engine's configuration as it would be on a GPU: copies, so that the CPU engine keeps its own."""
    config = copy.copy(vllm_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.cache_config.block_size = BLOCK_SIZE
    config.cache_config.kv_cache_layout = "LBNHC"
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.async_scheduling = True
    config.device_config = SimpleNamespace(device_type="cuda")
    return config


class RealKVCache:
    """vLLM's two functions about the KV cache, each asked about the real model first."""

    def __init__(self, utils: ModuleType, planning: ModuleType) -> None:
        self.utils, self.planning = utils, planning
        self.plan = planning.get_kv_cache_configs
        self.report = utils.update_kv_cache_capacity
        self.real: tuple[Any, Any] | None = None

    def get_kv_cache_configs(
        self, vllm_config: Any, kv_cache_specs: list[Any], available: list[int], *groups: Any
    ) -> list[Any]:
        """`groups` are those of the layers, which since 0.33 are found before."""
        from vllm_edge_lab.command import repository_of

        repository = repository_of(vllm_config.model_config.model)
        ranks = vllm_config.parallel_config.tensor_parallel_size
        config = real_config(vllm_config)
        specs = [real_specs(repository, ranks, vllm_config.cache_config.cache_dtype) for _ in kv_cache_specs]
        of_real = [self.planning.get_global_kv_cache_groups(config, specs)] if groups else []
        configs = self.plan(config, specs, available, *of_real)
        # --max-model-len auto: what fits was found out on the copy, and is no longer a question.
        if vllm_config.model_config.original_max_model_len == -1:
            vllm_config.model_config.max_model_len = config.model_config.max_model_len
            vllm_config.model_config.original_max_model_len = config.model_config.max_model_len
        self.real = config, self.utils.generate_scheduler_kv_cache_config(configs)
        tiny = [TINY_KV_BYTES for _ in available]
        return self.plan(vllm_config, kv_cache_specs, tiny, *groups)  # type: ignore[no-any-return]

    def update_kv_cache_capacity(self, vllm_config: Any, kv_cache_config: Any) -> None:
        if self.real is None:
            self.report(vllm_config, kv_cache_config)
            return
        config, real = self.real
        self.report(config, real)
        vllm_config.cache_config.num_gpu_blocks = real.num_blocks
        vllm_config.cache_config.kv_cache_size_tokens = config.cache_config.kv_cache_size_tokens
        vllm_config.cache_config.kv_cache_max_concurrency = config.cache_config.kv_cache_max_concurrency


def count_gpus(parallel_config: type) -> None:
    """vLLM's check of the world size against the GPUs, which its CPU build leaves out."""
    checked = parallel_config.__post_init__  # type: ignore[attr-defined]

    def post_init(self: Any) -> None:
        from vllm_edge_lab import gpus

        checked(self)
        count = len(gpus.visible_gpus())
        if self.world_size > count:
            raise ValueError(
                f"World size ({self.world_size}) is larger than the number of "
                f"available GPUs ({count}) in this node. If this is "
                "intentional and you are using:\n"
                "- ray, set '--distributed-executor-backend ray'.\n"
                "- multiprocessing, set '--nnodes' appropriately."
            )

    parallel_config.__post_init__ = post_init  # type: ignore[attr-defined]


def register() -> None:
    from vllm.config import ParallelConfig
    from vllm.v1.core import kv_cache_utils

    from vllm_edge_lab import gpus

    try:  # since 0.33
        planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
    except ImportError:
        planning = kv_cache_utils

    if not gpus.visible_gpus():
        return
    if not hasattr(ParallelConfig, "vllm_edge_lab"):
        ParallelConfig.vllm_edge_lab = True
        count_gpus(ParallelConfig)
    if isinstance(getattr(planning.get_kv_cache_configs, "__self__", None), RealKVCache):
        return
    real = RealKVCache(kv_cache_utils, planning)
    # The engine's module may have imported the names already.
    for module in (planning, kv_cache_utils, sys.modules.get("vllm.v1.engine.core")):
        if module is not None:
            vars(module)["get_kv_cache_configs"] = real.get_kv_cache_configs
            vars(module)["update_kv_cache_capacity"] = real.update_kv_cache_capacity
