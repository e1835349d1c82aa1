# SPDX-License-Identifier: Apache-2.0
"""Inside an image with vLLM: what vLLM's own functions make of the configurations on standard input.

Reads a JSON list, prints {"version": ..., "answers": [...]}, in the same order. Layers become vLLM's KVCacheSpec by its
own attention layer, are cut into pipeline ranks, grouped, checked and turned into blocks by its own functions; what
stands here are only the few attributes of a VllmConfig that they read. Nothing is imported from this project.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
# Releases up to 0.23 import them for files and grammars that nothing here has.
for absent in ("gguf", "gguf.constants", "gguf.quants", "diskcache"):
    sys.modules.setdefault(absent, mock.MagicMock(__spec__=ModuleSpec(absent, None), __path__=[]))

import torch
import vllm
import vllm.model_executor.models as models
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba import abstract
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.models import config as verifiers
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.models.nemotron_h import NemotronHForCausalLM
from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM
from vllm.platforms import Platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype, resolve_kv_cache_dtype_string
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import SlidingWindowSpec, UniformTypeKVCacheSpecs

try:  # vLLM 0.33 moved its planning there.
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:
    planning = kv_cache_utils


EXPORTS = hasattr(abstract, "get_mamba_prefill_checkpoint_alignment")
"""Whether FlashInfer's kernel for linear attention keeps states from inside a prompt: since 0.33."""


class Backend(AttentionBackend):
    """As FlashAttention and Triton on CUDA: pages of any multiple of 16 tokens, as dense as they can be."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_name() -> str:
        return "JUDGE"

    @classmethod
    def is_mla(cls) -> bool:
        return False


class Config(SimpleNamespace):
    """The VllmConfig of an engine on CUDA, as far as the KV cache is concerned."""

    max_in_flight_tokens = getattr(VllmConfig, "max_in_flight_tokens", None)
    max_concurrent_batches = getattr(VllmConfig, "max_concurrent_batches", None)


def layout() -> Any:
    """The one that vLLM takes where no backend asks for another; None before it had them."""
    try:
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts
    except ImportError:
        return None
    return get_supported_kv_cache_layouts([])[0]


def config_of(given: dict[str, Any]) -> Config:
    full = next(layer for layer in given["layers"] if layer["kv_heads"])
    sizes = SimpleNamespace(**(given["linear"] or {}))
    heads = SimpleNamespace(
        use_mla=False,
        get_total_num_kv_heads=lambda: full["kv_heads"],
        model_arch_config=SimpleNamespace(total_num_kv_heads=full["kv_heads"]),
    )
    return Config(
        model_config=SimpleNamespace(
            max_model_len=given["max_model_len"],
            original_max_model_len=given["max_model_len"],
            dtype=torch.bfloat16,
            use_mla=False,
            supports_kv_cache_grouping=False,
            model="judge",
            architecture="judge",
            supports_mamba_prefix_caching=has_mamba2(given),
            get_mamba_chunk_size=lambda: sizes.chunk_size,
            **dict.fromkeys(("hf_config", "hf_text_config"), sizes),
            get_num_kv_heads=lambda parallel: ModelConfig.get_num_kv_heads(heads, parallel),
            get_head_size=lambda: full["head_size"],
        ),
        cache_config=SimpleNamespace(
            block_size=given["block_size"],
            cache_dtype=given["kv_cache_dtype"],
            num_gpu_blocks_override=None,
            skip_page_size_padded=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=layout,
            enable_prefix_caching=given["enable_prefix_caching"],
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=given["mamba_ssm_cache_dtype"],
            mamba_cache_mode="none",
            **dict.fromkeys(("mamba_block_size", "mamba_page_size_padded"), None),
            **dict.fromkeys(("calculate_kv_scales", "user_specified_mamba_block_size"), False),
            **dict.fromkeys(("use_kda_recoverssm", "use_replayssm"), False),
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=given["max_num_batched_tokens"],
            async_scheduling=given["async_scheduling"],
            disable_hybrid_kv_cache_manager=False,
            enable_chunked_prefill=True,
            disable_chunked_mm_input=False,
            long_prefill_token_threshold=0,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=given["tensor_parallel_size"],
            pipeline_parallel_size=given["pipeline_parallel_size"],
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        device_config=SimpleNamespace(device_type="cuda"),
        # Of layers for multi-token prediction; what they read further is asked for below.
        speculative_config=mock.MagicMock(method="mtp", num_speculative_tokens=given["drafts"])
        if given["drafts"]
        else None,
        kv_transfer_config=None,
        num_prefill_lookahead_tokens=1 if given["drafts"] else 0,
        num_speculative_tokens=given["drafts"],
        # Asks for Triton, which this image has not and every CUDA image has.
        use_v2_model_runner=True,
    )


def has_mamba2(given: dict[str, Any]) -> bool:
    return "mamba_num_heads" in (given["linear"] or {})


def model_class(given: dict[str, Any]) -> Any:
    return NemotronHForCausalLM if has_mamba2(given) else Qwen3NextForCausalLM


def align_block(given: dict[str, Any], config: Config) -> None:
    """Raises the block to the size of the state of linear attention, and pads the state, as vLLM does."""
    mamba2, found = has_mamba2(given), (model_class(given), "")
    of = verifiers.NemotronHForCausalLMConfig if mamba2 else verifiers.Qwen3_5ForConditionalGenerationConfig
    of.verify_and_update_config(config)
    resolve = mock.patch.object(models.ModelRegistry, "resolve_model_cls", lambda *_, **__: found)
    if not hasattr(Platform, "_align_hybrid_block_size"):  # before 0.20
        with resolve, mock.patch.object(verifiers, "ModelRegistry", models.ModelRegistry, create=True):
            verifiers.HybridAttentionMambaModelConfig.verify_and_update_config(config)
        return
    verifiers.HybridAttentionMambaModelConfig.verify_and_update_config(config)
    exported = 64 if given["flashinfer_states"] and not mamba2 else None
    with (
        resolve,
        mock.patch("vllm.config.vllm.set_current_vllm_config", lambda _: nullcontext()),
        mock.patch.object(Platform, "_find_non_ssm_backends", lambda _: [Backend], create=True),
        mock.patch.object(abstract, "get_mamba_prefill_checkpoint_alignment", lambda _: exported, create=not EXPORTS),
    ):
        Platform._align_hybrid_block_size(config, Backend)


def state_of(given: dict[str, Any], config: Config) -> Any:
    found = model_class(given)
    state = {
        "get_state_shape": lambda *_: found.get_mamba_state_shape_from_config(config),
        "get_state_dtype": lambda *_: found.get_mamba_state_dtype_from_config(config),
    }
    if has_mamba2(given):
        return object.__new__(type("Judged", (MambaMixer2,), state)).get_kv_cache_spec(config)
    layer = SimpleNamespace(**state, mamba_type="gdn_attention", is_kv_cache_tp_replicated=False)
    spec = abstract.MambaBase.get_kv_cache_spec(layer, config)
    # QwenGatedDeltaNetAttention.get_kv_cache_spec, which only a GPU with FlashInfer reaches.
    exported = given["flashinfer_states"] and spec.mamba_cache_mode == "align" and EXPORTS
    return replace(spec, num_prefill_checkpoint_blocks=1) if exported else spec


def spec_of(layer: dict[str, Any], given: dict[str, Any], config: Config, indexer: bool = False) -> Any:
    if layer["state"]:
        return state_of(given, config)
    heads = SimpleNamespace(
        use_mla=False,
        get_total_num_kv_heads=lambda: layer["kv_heads"],
        model_arch_config=SimpleNamespace(total_num_kv_heads=layer["kv_heads"]),
    )
    dtype = given["kv_cache_dtype"]
    attention = SimpleNamespace(
        attn_type=AttentionType.DECODER,
        attn_backend=Backend,
        kv_cache_dtype=dtype,
        kv_cache_torch_dtype=kv_cache_dtype_str_to_dtype(dtype, config.model_config),
        sliding_window=layer["window"],
        attention_chunk_size=layer["chunk"],
        num_kv_heads=ModelConfig.get_num_kv_heads(heads, config.parallel_config),
        head_size=layer["head_size"],
        head_size_v=layer["head_size"],
        indexer=layer["index_bytes"] or None,
        non_causal_multi_token_decode=False,
        topk_buffer_width=None,
        _uses_flat_kv_cache=lambda: False,
    )
    kind = MLAAttention if layer["latent"] else ChunkedLocalAttention if layer["chunk"] else Attention
    if indexer:
        # Its own layer in vLLM, with bytes as elements.
        attention = SimpleNamespace(cache_config=config.cache_config, head_dim=layer["index_bytes"], dtype=torch.uint8)
        kind = DeepseekV32IndexerCache
    spec = kind.get_kv_cache_spec(attention, config)
    if hasattr(spec, "indexes_kv_by_block_stride"):
        # From 0.24 to 0.28 the runner asks the backend (v1/worker/gpu_model_runner.py:7498 of 0.24.0), and the stride
        # order of FlashAttention says so (v1/attention/backends/flash_attn.py:160).
        spec = replace(spec, indexes_kv_by_block_stride=True)
    return spec


def workers(given: dict[str, Any], config: Config) -> list[dict[str, Any]]:
    """The specs of each pipeline rank; the ranks of tensor parallelism are alike."""
    ranks = given["pipeline_parallel_size"]
    result = []
    for rank in range(ranks):
        first, end = get_pp_indices(len(given["layers"]), rank, ranks)
        own = [layer for layer in given["layers"][first:end] if layer["own_cache"]]
        specs = {}
        for layer in own:
            if layer["index_bytes"]:
                specs[f"{layer['index']}.indexer"] = spec_of(layer, given, config, indexer=True)
            specs[str(layer["index"])] = spec_of(layer, given, config)
        result.append(specs)
    return result


class Checks:
    """Stands before vLLM's check for one request: lets it speak, and the planning go on after a refusal."""

    def __init__(self, config: Config, given: dict[str, Any]) -> None:
        self.config, self.given = config, given
        self.found: list[dict[str, Any]] = []
        self.check = planning._check_enough_kv_cache_memory

    def __call__(self, available: int, needed: Any, length: int, estimate: Any) -> None:
        refusal = ""
        try:
            self.check(available, needed, length, estimate)
        except ValueError as error:
            refusal = str(error)
        self.config.model_config.max_model_len = self.given["model_maximum"]
        longest = estimate(available) if available > 0 else 0
        self.config.model_config.max_model_len = length
        self.found.append({"available": available, "needed": needed(), "refusal": refusal, "longest": longest})


def tokens_of(config: Config, made: list[Any]) -> tuple[int, float]:
    concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, made[0])
    if capacity := getattr(kv_cache_utils, "get_kv_cache_capacity", None):
        return capacity(config, kv_cache_utils.generate_scheduler_kv_cache_config(made))
    # Before 0.22 the number is in the log alone.
    with mock.patch.object(kv_cache_utils.logger, "info_once", create=True) as told:
        kv_cache_utils._report_kv_cache_config(config, made[0])
    printed = next(call.args[1] for call in told.call_args_list if "KV cache size" in call.args[0])
    return int(printed.replace(",", "")), concurrency


def group_of(group: Any, config: Config) -> dict[str, Any]:
    spec = group.kv_cache_spec
    first = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    layers = [int(name) for name in group.layer_names if name.isdecimal()]
    indexed = len(layers) < len(group.layer_names)
    return {
        "layers": layers,
        "sliding": isinstance(first, SlidingWindowSpec),
        "block_size": spec.block_size,
        # Pages of all layers together, if they differ.
        "page_bytes": spec.page_size_bytes // (len(layers) if indexed else 1),
        "blocks_per_request": -(-spec.max_memory_usage_bytes(config) // spec.page_size_bytes),
    }


def answer(given: dict[str, Any]) -> dict[str, Any]:
    if "quantization_config" in given:
        model = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=given["quantization_config"]))
        return {"kv_cache_dtype": resolve_kv_cache_dtype_string("auto", model)}
    config = config_of(given)
    checks = Checks(config, given)
    if given["linear"]:
        align_block(given, config)
    specs = workers(given, config)
    try:
        with mock.patch.object(planning, "_check_enough_kv_cache_memory", checks):
            more = {}
            if find_groups := getattr(planning, "get_global_kv_cache_groups", None):
                more["global_kv_cache_groups"] = find_groups(config, specs)
            made = planning.get_kv_cache_configs(config, specs, given["available_bytes"], **more)
        tokens, concurrency = tokens_of(config, made)
        if given["linear"]:  # v1/engine/core.py
            config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in made[0].kv_cache_groups)
            VllmConfig.validate_block_size(config)
    except (AssertionError, NotImplementedError, ValueError, ZeroDivisionError) as error:
        if isinstance(error, ZeroDivisionError) and any(check["refusal"] for check in checks.found):
            return {"refused": [check["refusal"] for check in checks.found]}  # up to 0.28, after a check that refused
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "groups": [[group_of(group, config) for group in each.kv_cache_groups] for each in made],
        "blocks": sorted({each.num_blocks for each in made}),
        "tokens": tokens,
        "concurrency": concurrency,
        "checks": checks.found,
        "in_flight_tokens": getattr(config, "max_in_flight_tokens", None) or given["max_num_batched_tokens"],
    }


def main() -> None:
    logging.disable(logging.CRITICAL)
    given = json.load(sys.stdin)
    json.dump({"version": vllm.__version__, "answers": [answer(each) for each in given]}, sys.stdout)


if __name__ == "__main__":
    main()
