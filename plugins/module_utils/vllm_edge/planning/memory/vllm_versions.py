# SPDX-License-Identifier: Apache-2.0
"""Differences between releases of vLLM, as far as they affect memory on a GPU.

CHANGES is the table: what each release changed, and the line of vLLM's sources that shows it. `behaviour` combines the
rows up to a release. Every release from 0.19.0 to 0.33.0 was examined, patch releases too, so a row gives exactly the
release that made a change. `make vllm-release` reads some fields of Behaviour from the sources of a release and says
which differ. A newer release is planned like the last of them, and `describe_fallback` says so. After the table come
the rules of vLLM 0.32.0 for `dtype` and `max_model_len`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...inventory.vllm_changes import apply_change
from ..contract import Arguments, Attention, Gpu, Model


class UnknownVersion(ValueError):
    """It is not known how this release of vLLM uses memory."""


@dataclass(frozen=True)
class Behaviour:
    """How one release uses memory; the defaults are those of FIRST."""

    version: str
    number: tuple[int, int]
    """Its major and minor number."""
    graphs_in_budget: bool = False
    """The first model runner's estimate for CUDA graphs is subtracted from the budget; otherwise graphs need memory
    beyond it (0.19.0 envs.py:1655, VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS)."""
    second_runner: str = ""
    """The architectures that run in vLLM's second model runner (`use_v2_model_runner`, config/vllm.py). `dense` stands
    for all without experts, `all` for all; with `unquantized` only checkpoints that are not quantized count."""
    first_runner_options: str = ""
    """Options with which (some of them with a certain value) an engine stays in the first model runner, as keys
    (`_get_v2_model_runner_unsupported_features`, config/vllm.py); not those of unmodeled_arguments."""
    first_runner_methods: str = ""
    """Methods of speculative decoding with which an engine stays in the first model runner, of those that the plan
    counts."""
    second_runner_estimates: bool = False
    """The second model runner estimates CUDA graphs too (v1/worker/gpu/model_runner.py, profile_cudagraph_memory)."""
    second_runner_encodes: bool = False
    """The second model runner's profile runs the encoder of images and videos (v1/worker/gpu/model_runner.py)."""
    second_runner_copies_logits: bool = True
    """The second model runner's profile samples with a copy of the logits in fp32 (v1/worker/gpu/sample/sampler.py,
    apply_sampling_params)."""
    largest_gpu_tokens: int = 8192
    """The default of max_num_batched_tokens on a GPU from LARGEST_GPU_GIB on."""
    asks_cuda_for_memory: bool = False
    """vLLM asks CUDA for the memory of a GPU of which NVML does not know it, as of all that share the CPU's."""
    tokens_by_concurrency: bool = False
    """The log line `GPU KV cache size` has maximum concurrency * max_model_len tokens; otherwise blocks // groups *
    smallest block (0.19.0 v1/core/kv_cache_utils.py:1287)."""
    batch_holds_multimodal_item: bool = False
    """The default of max_num_batched_tokens is raised to what the largest image or video of the model needs."""
    text_only_needs_no_item: bool = False
    """It is not raised if language_model_only switches images and videos off."""
    batches_widen_window: bool = False
    """A sliding request holds the tokens of every batch in flight, not only of one."""
    null_block_reserved: bool = False
    """The block that is never handed out counts in the check for one request of max_model_len tokens."""
    pads_pages: bool = False
    """A page that does not divide the largest one is padded; otherwise vLLM refuses to start."""
    sliding_block_tokens: int | None = None
    """Block size of sliding layers before pages are made equal; None if it is that of full attention."""
    scheme_overrides_dtype: bool = True
    """A kv_cache_scheme of compressed-tensors also replaces an explicit kv_cache_dtype (0.19.0
    model_executor/layers/attention/attention.py:230)."""
    prefix_caching: bool = False
    """Prefix caching is on by default with linear attention too."""
    aligns_to_block: bool = False
    """The block with linear attention is a multiple of block_size, otherwise of 16."""
    batch_holds_block: bool = True
    """With linear attention and prefix caching a batch has to hold a block."""
    keeps_checkpoints: bool = False
    """FlashInfer's kernel for linear attention keeps states from inside a prompt, if prefixes are cached."""
    keeps_all_states: bool = True
    """If prefixes are cached, Mamba2 keeps the state of every block (mamba_cache_mode `all`, otherwise `align`)."""
    mamba2_checkpoints: bool = False
    """The kernels of Mamba2 keep states from inside a prompt, if prefixes are cached."""
    blocks_limit_sequences: bool = False
    """With linear attention and CUDA graphs vLLM refuses to start with more sequences than blocks; otherwise it
    captures smaller batches only (0.19.0 config/compilation.py:1282)."""
    nvfp4_kv_cache: bool = False
    """ModelOpt's `nvfp4` in a checkpoint becomes an NVFP4 KV cache; otherwise it is ignored."""


@dataclass(frozen=True)
class Change:
    since: tuple[int, ...]
    sets: Mapping[str, Any]
    """Fields of Behaviour and their new values; of a text the words that come, and with `-` in front those that go."""
    source: str
    """File and line under vllm/ in the release that made the change."""


LARGE_GPU_GIB, LARGEST_GPU_GIB = 70, 160
DEFAULT_MAX_NUM_SEQS, DEFAULT_MAX_NUM_BATCHED_TOKENS = 256, 2048
"""Of an API server on a GPU below LARGE_GPU_GIB (engine/arg_utils.py:2064-2072, the same until 0.33.0)."""
FIRST = (0, 19)
LAST = (0, 33)
CHANGES = (
    Change((0, 20), {"graphs_in_budget": True}, "envs.py:1725"),
    Change((0, 20), {"nvfp4_kv_cache": True}, "utils/torch_utils.py:64"),
    Change((0, 20), {"aligns_to_block": True}, "platforms/interface.py (_align_hybrid_block_size)"),
    Change((0, 20), {"blocks_limit_sequences": True}, "config/compilation.py:1421"),
    Change((0, 20, 1), {"tokens_by_concurrency": True}, "v1/core/kv_cache_utils.py:1706"),
    Change((0, 22), {"batch_holds_multimodal_item": True}, "engine/arg_utils.py:2528"),
    Change((0, 22), {"scheme_overrides_dtype": False}, "model_executor/layers/attention/attention.py:238"),
    Change((0, 22), {"second_runner": "unquantized Qwen3ForCausalLM"}, "config/vllm.py:69,493,518"),
    Change(
        (0, 22),
        {
            "first_runner_options": "ec_transfer_config enable_dbo enable_prompt_embeds enable_return_routed_experts "
            "kv_sharing_fast_prefill logits_processors logprobs_mode reasoning_config"
        },
        "config/vllm.py:1977",
    ),
    Change(
        (0, 22),
        {"first_runner_methods": "draft_model ngram suffix"},
        "config/vllm.py (_get_v2_model_runner_unsupported_features)",
    ),
    Change((0, 23), {"second_runner": "LlamaForCausalLM MistralForCausalLM"}, "config/vllm.py:69,544"),
    Change((0, 23), {"first_runner_options": "-reasoning_config mamba_cache_mode"}, "config/vllm.py:1982"),
    # FlashAttention, FlashInfer and Triton all lay out their cache so that this applies.
    Change((0, 24), {"pads_pages": True}, "v1/core/kv_cache_utils.py (unify_kv_cache_spec_page_size)"),
    Change(
        (0, 24),
        {"second_runner": "-unquantized DeepseekV2ForCausalLM GraniteMoeForCausalLM Qwen2MoeForCausalLM"},
        "config/vllm.py:68,550",
    ),
    Change((0, 24), {"first_runner_options": "enable_elastic_ep"}, "config/vllm.py:1994"),
    Change(
        (0, 25),
        {"second_runner": "dense -LlamaForCausalLM -MistralForCausalLM -Qwen3ForCausalLM"},
        "config/vllm.py:68,557",
    ),
    Change((0, 25), {"first_runner_options": "-mamba_cache_mode"}, "config/vllm.py:2042"),
    # 16 tokens are the smallest block size of those three.
    Change((0, 25), {"sliding_block_tokens": 16}, "model_executor/layers/attention/attention.py:95"),
    Change(
        (0, 26),
        {"batches_widen_window": True},
        "config/vllm.py:512,525 (max_concurrent_batches, max_in_flight_tokens) and :605",
    ),
    Change(
        (0, 26),
        {"second_runner": "InklingForCausalLM InklingForConditionalGeneration LongcatFlashNgramForCausalLM"},
        "config/vllm.py:68",
    ),
    Change((0, 26), {"first_runner_options": "-logprobs_mode"}, "config/vllm.py:2127"),
    Change((0, 26), {"second_runner_copies_logits": False}, "v1/worker/gpu/sample/sampler.py (apply_sampling_params)"),
    Change((0, 27), {"batch_holds_block": False}, "config/vllm.py (validate_block_size)"),
    Change((0, 27), {"second_runner": "KimiK3ForConditionalGeneration"}, "config/vllm.py:69"),
    Change((0, 27), {"text_only_needs_no_item": True}, "config/model.py:813"),
    Change((0, 27), {"second_runner_encodes": True}, "v1/worker/gpu/model_runner.py:715"),
    Change((0, 28), {"second_runner": "DeepseekV4ForCausalLM"}, "config/vllm.py:69"),
    Change(
        (0, 28),
        {"first_runner_options": "-ec_transfer_config -enable_return_routed_experts"},
        "config/vllm.py:2369",
    ),
    Change((0, 28), {"prefix_caching": True}, "engine/arg_utils.py:2650"),
    Change((0, 28), {"keeps_all_states": False}, "model_executor/models/config.py:604"),
    Change((0, 28), {"largest_gpu_tokens": 16384}, "engine/arg_utils.py:2582"),
    Change(
        (0, 29),
        {
            "second_runner": "all -dense -DeepseekV2ForCausalLM -DeepseekV4ForCausalLM -GraniteMoeForCausalLM "
            "-InklingForCausalLM -InklingForConditionalGeneration -KimiK3ForConditionalGeneration "
            "-LongcatFlashNgramForCausalLM -Qwen2MoeForCausalLM"
        },
        "config/vllm.py:645",
    ),
    Change((0, 29), {"first_runner_options": "-enable_prompt_embeds"}, "config/vllm.py:2539"),
    Change((0, 29), {"second_runner_estimates": True}, "v1/worker/gpu/model_runner.py:896"),
    Change((0, 29), {"null_block_reserved": True}, "v1/core/kv_cache_utils.py:2316"),
    Change((0, 30), {"sliding_block_tokens": None}, "model_executor/layers/attention/attention.py:648"),
    Change(
        (0, 30),
        {"first_runner_options": "-enable_dbo -kv_sharing_fast_prefill mamba_cache_mode"},
        "config/vllm.py:2815",
    ),
    Change((0, 31), {"first_runner_options": "-logits_processors"}, "config/vllm.py:3051"),
    Change((0, 31), {"first_runner_methods": "-draft_model"}, "config/vllm.py (the same function)"),
    Change((0, 32), {"first_runner_methods": "-ngram"}, "config/vllm.py (the same function)"),
    Change((0, 32), {"first_runner_options": "-enable_elastic_ep -mamba_cache_mode"}, "config/vllm.py:2914"),
    Change((0, 32), {"mamba2_checkpoints": True}, "model_executor/layers/mamba/mamba_mixer2.py (get_kv_cache_spec)"),
    Change((0, 33), {"asks_cuda_for_memory": True}, "platforms/cuda.py:809"),
    Change((0, 33), {"keeps_checkpoints": True}, "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:692"),
)
SWITCHES = {
    "second_runner": "VLLM_USE_V2_MODEL_RUNNER",
    "estimate_graphs": "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS",
}
"""Fields of Arguments and the variables of extra_env, 0 or 1, that decide them."""
# 32 frames of 70 soft tokens, each with a begin, an end and 6 tokens of time stamp. This is more than any image or
# audio of Gemma 4 (0.22.0 model_executor/models/gemma4_mm.py:86 and get_mm_max_tokens_per_item, the same until 0.33.0).
GEMMA4_VIDEO_TOKENS = 32 * (70 + 2 + 6)

VERSION = re.compile(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(?:[-.+]?[a-z].*)?")


@functools.cache
def behaviour(version: str) -> Behaviour:
    """Return how a release of vLLM uses memory; releases after LAST behave as LAST. Raises UnknownVersion if it is no
    release, or one before FIRST.

    Args:
        version: as vLLM names itself: `0.19.0`, also with a build suffix, such as `0.32.0+cpu`.
    """
    release = _parse_release(version)
    if release is None or release < FIRST:
        known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}, and newer ones are planned like the last of them"
        raise UnknownVersion(f"how vLLM {version} uses memory is not known; known are the releases {known}")
    result = Behaviour(version, release[:2])
    for change in CHANGES:
        if change.since <= release:
            result = replace(
                result, **{name: apply_change(getattr(result, name), to) for name, to in change.sets.items()}
            )
    return result


@functools.cache
def list_first_runner_options() -> frozenset[str]:
    """Return the keys of options that some release runs in its first model runner only."""
    said = (str(change.sets.get("first_runner_options", "")) for change in CHANGES)
    return frozenset(word for words in said for word in words.split() if word[0] != "-")


def set_gpu_defaults(arguments: Arguments, gpu: Gpu, version: str) -> Arguments:
    """Return the arguments with the defaults of vLLM's API server on a large GPU.

    An A100 counts as a smaller one (0.32.0 engine/arg_utils.py:2894, get_batch_defaults). So does a GB10 (0.33.0
    engine/arg_utils.py:2963), and a Thor as long as vLLM does not learn its memory. vLLM compares NVML's total, of
    which CUDA has all but 1 to 3 GiB: no GPU lies between.
    """
    name, gib = gpu.name.lower(), gpu.cuda_total_bytes / 2**30
    thor = gpu.compute_capability == (11, 0) and not behaviour(version).asks_cuda_for_memory
    if "gb10" in name or thor or gib < LARGE_GPU_GIB or (gib < LARGEST_GPU_GIB and "a100" in name):
        return arguments
    tokens = behaviour(version).largest_gpu_tokens if gib >= LARGEST_GPU_GIB else 8192
    return replace(arguments, default_max_num_seqs=1024, default_max_num_batched_tokens=tokens)


def uses_second_runner(model: Model, arguments: Arguments, version: str) -> bool:
    """Return whether an engine runs in vLLM's second model runner: by its environment, otherwise by release, model and
    options."""
    release = behaviour(version)
    if arguments.second_runner is not None:
        return arguments.second_runner
    words = set(release.second_runner.split())
    if arguments.first_runner_options & set(release.first_runner_options.split()):
        return False
    if arguments.speculation and arguments.speculation.method in release.first_runner_methods.split():
        return False
    if "unquantized" in words and model.quantization.method != "none":
        return False
    dense = "dense" in words and not (model.experts or model.hybrid)
    return "all" in words or model.architecture in words or dense


def caches_prefixes(arguments: Arguments, release: Behaviour) -> bool:
    """Return whether an engine with linear attention or Mamba2 keeps the states of prefixes (mamba_cache_mode `align`
    or `all`)."""
    return release.prefix_caching if arguments.enable_prefix_caching is None else arguments.enable_prefix_caching


def keeps_checkpoints(arguments: Arguments, release: Behaviour) -> bool:
    return release.keeps_checkpoints and arguments.flashinfer_states and caches_prefixes(arguments, release)


def counts_graphs(model: Model, arguments: Arguments, version: str) -> bool:
    """Return whether vLLM keeps what it estimates for CUDA graphs out of its share of the GPU."""
    release = behaviour(version)
    second = uses_second_runner(model, arguments, version)
    if second and not release.second_runner_estimates:
        return False
    return release.graphs_in_budget if arguments.estimate_graphs is None else arguments.estimate_graphs


def encodes(model: Model, arguments: Arguments, version: str) -> bool:
    """Return whether vLLM runs the encoder of images and videos when it measures what is left for the KV cache."""
    return behaviour(version).second_runner_encodes or not uses_second_runner(model, arguments, version)


def describe_fallback(version: str) -> str:
    """Return a sentence on the release by which an unexamined one is planned; empty if it was examined, or is none."""
    release = _parse_release(version)
    if release is None or release[:2] <= LAST:
        return ""
    return (
        f"Nobody has examined how vLLM {version} uses memory: this is a plan for {LAST[0]}.{LAST[1]}, the last release "
        f"that was examined. Figures may differ; playbooks/calibrate.yml measures them."
    )


def _parse_release(version: str) -> tuple[int, int, int] | None:
    found = VERSION.fullmatch(version)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


def max_model_len(model: Model, arguments: Arguments) -> int:
    return arguments.max_model_len or derive_default(model)


def max_num_batched_tokens(model: Model, arguments: Arguments, version: str) -> int:
    """Return the tokens of one batch, as vLLM's API server decides.

    Source: 0.33.0 engine/arg_utils.py:3190-3224, and the rows of CHANGES.
    """
    release = behaviour(version)
    if arguments.max_num_batched_tokens is not None:
        return arguments.max_num_batched_tokens
    tokens = arguments.default_max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    no_item = arguments.language_model_only and release.text_only_needs_no_item
    if release.batch_holds_multimodal_item and not no_item and _attends_to_whole_items(model):
        tokens = max(tokens, GEMMA4_VIDEO_TOKENS)
    sequences = arguments.max_num_seqs or arguments.default_max_num_seqs or DEFAULT_MAX_NUM_SEQS
    return min(tokens, sequences * max_model_len(model, arguments))


def count_whole_item_tokens(model: Model, arguments: Arguments, version: str) -> int:
    """Return the tokens of the largest image or video, if vLLM refuses to start with fewer in a batch; 0 otherwise.

    Source: 0.32.0 platforms/cuda.py:337, v1/core/encoder_cache_manager.py:346.
    """
    none = arguments.language_model_only or "video" in arguments.without
    whole = behaviour(version).batch_holds_multimodal_item and _attends_to_whole_items(model)
    return GEMMA4_VIDEO_TOKENS if whole and not none else 0


def max_num_seqs(model: Model, arguments: Arguments, version: str) -> int:
    """Return the sequences of one batch. Source: 0.33.0 engine/arg_utils.py:3232."""
    if arguments.max_num_seqs is not None:
        return arguments.max_num_seqs
    sequences = arguments.default_max_num_seqs or DEFAULT_MAX_NUM_SEQS
    return min(sequences, max_num_batched_tokens(model, arguments, version))


def count_batches_in_flight(model: Model, arguments: Arguments, version: str) -> int:
    """Return the number of batches whose tokens a request with sliding attention holds at once.

    Async scheduling is on unless it is switched off. With vLLM's own executor, one process per GPU, only speculative
    decoding by something else than a drafter switches it off, in the first model runner (0.33.0 config/vllm.py:1654);
    up to 0.27 a draft model too (0.26.0 config/vllm.py:1073). Source: 0.26.0 config/vllm.py:512.
    """
    release = behaviour(version)
    if not release.batches_widen_window:
        return 1
    stages = arguments.pipeline_parallel_size
    if arguments.async_scheduling is False:
        return stages
    if uses_second_runner(model, arguments, version):
        return stages + 1
    method = arguments.speculation.method if arguments.speculation else ""
    if method in ("ngram", "suffix") or (method == "draft_model" and release.number < (0, 28)):
        return stages
    return max(2, stages)


def _attends_to_whole_items(model: Model) -> bool:
    """Return whether the tokens of an image attend to each other in both directions, so that an image cannot be cut.

    Source: 0.22.0 transformers_utils/model_arch_config_convertor.py:528. Gemma 3 does too, but names no number of
    tokens, so that the default stays.
    """
    text = model.facts.config.get("text_config", model.facts.config)
    return model.multimodal and model.family == "gemma4" and text.get("use_bidirectional_attention") == "vision"


# The dtype in which vLLM keeps weights that are not quantized, computes, and keeps a KV cache of `auto`: rules of
# `_resolve_auto_dtype` and `_get_and_verify_dtype` in config/model.py, `supported_dtypes` in platforms/cuda.py, and
# `get_supported_act_dtypes` of each quantization.
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
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
        return DTYPE_ALIASES.get(requested, requested)
    supported = list_supported(model, capability)
    # For a quantized checkpoint the list may be empty on an old GPU; vLLM itself looks at the GPU alone and then fails.
    return model.dtype if model.dtype in supported or not supported else supported[0]


# The longest request that vLLM accepts for a model, and the length that it takes if the engine states none: rules of
# `_get_and_verify_max_len` in config/model.py.
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
