# SPDX-License-Identifier: Apache-2.0
"""The words of the planner: what it is told and what it answers.

Sizes are bytes (`_bytes`) or tokens (`_tokens`), per GPU wherever a rank is spoken of. Terms are vLLM's.

    checkpoint -> Facts        model_facts: config.json and safetensors headers, from files or recorded
    Facts      -> Model        families: layers, heads, what is sharded; an unknown architecture is refused
    Model      -> RankWeights  weights: bytes on each rank, by component
    Model      -> KvCapacity   kv_cache: groups, blocks, tokens, as the release of vLLM counts them
    all        -> Plan         planner: overhead, graphs, feasibility, verdict, decode estimate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What will come of starting an engine. Members are in the order in which vLLM itself would find out."""

    UNSUPPORTED_ENGINE = "unsupported_engine"
    """This release of vLLM cannot run this architecture, precision or parallelism."""
    UNSUPPORTED_SHAPE = "unsupported_shape"
    """A shape does not divide as a kernel or the parallelism needs it."""
    NOT_FREE = "not_free"
    """Less is free on the GPU than the engine asks for at its start."""
    OOM_WEIGHTS = "oom_weights"
    NO_KV = "no_kv"
    """Weights fit, and leave no memory for the KV cache."""
    KV_BELOW_MAX_MODEL_LEN = "kv_below_max_model_len"
    """The KV cache does not hold one request of max_model_len tokens."""
    OOM_WARMUP = "oom_warmup"
    """CUDA graphs and the sampler's warm-up come on top of the budget and do not fit."""
    FITS = "fits"


class UnknownArchitecture(ValueError):
    """A checkpoint whose architecture the planner does not know; it is never guessed. The message names it and those
    that are known."""


# ---- a checkpoint ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """Tensors of one name, dtype and shape, as safetensors headers have them."""

    name: str
    """Numbers between dots are `*`: `model.language_model.layers.*.mlp.down_proj.weight`."""
    dtype: str
    """In safetensors' words: `BF16`, `F8_E4M3`, `U8`, `I32`, ..."""
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    """Numbers of the decoder layers that have it; None where it is no decoder layer's (embeddings, towers)."""
    count: int = 1
    """How many there are, in each of `layers` or, without layers, in all: experts of a layer, layers of a tower."""


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of itself."""

    repo: str
    revision: str
    """Commit, or empty where the files do not tell."""
    config: Mapping[str, Any]
    """config.json, as it is."""
    tensors: tuple[Tensor, ...]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of config.json, or hf_quant_config.json where only that exists; empty without."""
    source: str = "files"
    """`files`, or `recorded: <from where, when>`."""


class Attention(StrEnum):
    FULL = "full_attention"
    SLIDING = "sliding_attention"


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer, as far as its KV cache is concerned."""

    index: int
    attention: Attention
    kv_heads: int
    """Of the whole model, before tensor parallelism."""
    head_size: int
    window_tokens: int | None = None
    """Of sliding attention."""
    shares_with: int | None = None
    """The layer whose KV cache it reads; it has none of its own then."""


class Sharding(StrEnum):
    """What becomes of a tensor on each rank of tensor parallelism."""

    SHARDED = "sharded"
    """Divided by the size, along rows or columns."""
    REPLICATED = "replicated"
    KV_HEADS = "kv_heads"
    """Divided by heads, of which each rank has at least one."""
    VOCABULARY = "vocabulary"
    """Divided by rows, after these are padded as vLLM does."""
    EXPERTS = "experts"
    """As SHARDED, or whole experts on each rank where expert parallelism is on."""
    NOT_LOADED = "not_loaded"
    """In the file and not on the GPU: a tied head, a scale that is folded away."""


@dataclass(frozen=True)
class Component:
    """A tensor, classed."""

    tensor: Tensor
    kind: str
    """Row of a plan: `embeddings`, `attention`, `mlp`, `experts`, `router`, `norms`, `towers`, `other`."""
    sharding: Sharding
    kv_heads: int | None = None
    """Of KV_HEADS."""
    read_per_token: float = 1.0
    """Which part of it one decoded token of one sequence reads: 1 for dense weights, top-k of all for experts, one row
    for embeddings, 0 for towers."""


@dataclass(frozen=True)
class Quantization:
    method: str
    """As vLLM names it: `none`, `modelopt_fp4`, `modelopt`, `compressed-tensors`, `fp8`, `awq`, `gptq`."""
    weight_bits: int
    group_size: int | None = None
    """Weights that share one scale; None for one scale per channel or tensor."""
    kv_cache_dtype: str | None = None
    """What `kv_cache_dtype: auto` becomes by the checkpoint's own words (`fp8`); None where it says nothing."""


@dataclass(frozen=True)
class Model:
    """A checkpoint that is understood."""

    facts: Facts
    architecture: str
    family: str
    """`gemma4`, `gemma3`, `llama3`, `qwen3`, `qwen3_moe`, `mistral`."""
    dtype: str
    """In vLLM's words, `bfloat16`."""
    hidden_size: int
    vocabulary: int
    query_heads: int
    max_position_embeddings: int
    layers: tuple[DecoderLayer, ...]
    components: tuple[Component, ...]
    quantization: Quantization
    intermediate_sizes: tuple[int, ...]
    """Of the dense MLP, each that occurs."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    rope_cache_sizes: tuple[int, ...] = ()
    """Rotary dimensions of each cos/sin cache that vLLM keeps for the model; each has max_position_embeddings rows,
    unless `rope_cache_rows` says otherwise."""
    per_layer_embedding_size: int = 0
    """Gemma 4's E models: width of what each layer gets of its own embedding table; 0 without."""
    multimodal: bool = False
    rope_cache_rows: tuple[int, ...] = ()
    """Rows of each cache of `rope_cache_sizes`: more than max_position_embeddings where RoPE is scaled."""


# ---- an engine and its GPUs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    """What of `vllm serve` moves memory. None: not given, the release's own default holds."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    enforce_eager: bool = False
    enable_expert_parallel: bool = False
    language_model_only: bool = False
    async_scheduling: bool | None = None


@dataclass(frozen=True)
class Gpu:
    name: str
    """NVML's, e.g. `NVIDIA L4`."""
    cuda_total_bytes: int
    """What CUDA has of it: NVML's total minus reserved."""
    free_bytes: int | None = None
    """Free now; None where nobody has looked."""


@dataclass(frozen=True)
class Uncertain:
    """A figure with where it comes from."""

    value: float
    low: float
    high: float
    source: str
    fitted: bool = False
    """True where the reference's own measurements were used to find it; what agrees with those proves nothing."""


# ---- the answer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankWeights:
    """Bytes on one rank. `by_kind` adds up to `bytes`."""

    pipeline_rank: int
    bytes: int
    by_kind: Mapping[str, int]
    read_bytes_per_token: int
    """What one decoded token of one sequence reads of them."""


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one block table."""

    attention: Attention
    layers: int
    block_size_tokens: int
    page_bytes: int
    blocks_per_request: int
    """Of max_model_len tokens."""


@dataclass(frozen=True)
class KvCapacity:
    """What vLLM makes of so many bytes for the KV cache of one rank."""

    available_bytes: int
    groups: tuple[KvGroup, ...]
    blocks: int
    tokens: int
    """As the release prints them: `GPU KV cache size`."""
    max_concurrency: float
    """Requests of max_model_len tokens."""
    needed_bytes: int
    """For one request of max_model_len tokens; vLLM refuses to start with less."""
    max_context_tokens: int
    """The longest request that fits, at most the model's own maximum: vLLM's `estimated maximum model length`."""
    used_bytes: int
    """Of the available ones; the rest is less than a block of every group."""


@dataclass(frozen=True)
class GpuPlan:
    """One engine on one GPU. `total_bytes` is what NVML will show of it."""

    slot: int
    weights_bytes: int
    overhead_bytes: int
    """Activations at their peak and what CUDA, NCCL and the allocator keep inside of vLLM's own accounting."""
    context_bytes: int
    """The CUDA context and NCCL's buffers, taken before vLLM begins to count."""
    graphs_bytes: int
    kv_cache_bytes: int
    warm_up_bytes: int
    """What the sampler's warm-up needs for a moment, after the graphs: of overhead_bytes, whose peak it was before."""
    total_bytes: int
    free_bytes: int
    """Of the GPU's CUDA total after start-up; negative where it does not fit."""


@dataclass(frozen=True)
class Decode:
    """Tokens per second of one sequence at short context; an estimate, always."""

    low: float
    mid: float
    high: float
    ceiling: float
    """Bandwidth over bytes read: nothing is faster."""


@dataclass(frozen=True)
class EnginePlan:
    engine: str
    verdict: Verdict
    reason: str
    """One sentence with the number that decides."""
    fix: str
    """The nearest setting that fits, spelled as in group_vars; empty where it fits or nothing would."""
    kv_cache_dtype: str
    kv_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    max_context: int
    decode_tok_s: Decode | None
    gpus: tuple[GpuPlan, ...]
    kv_groups: tuple[KvGroup, ...] = ()
    advice: tuple[str, ...] = ()
    """What is right but could be better, each with its reference."""
    facts_source: str = ""
    derived_kv_cache_memory_bytes: int = 0
    """What leaves plan_margin_mib free on each of its GPUs, or would."""
    settings: Mapping[str, float | int] = field(default_factory=dict)
    """What the plan adds to the engine as it is written down, under the keys of serving_engines:
    `kv_cache_memory_bytes`, `gpu_memory_utilization`, `vram_budget_mib`."""
    pinned: bool = False
    """Whether its KV cache is so many bytes, its own or derived ones, and not what is left of a share of the GPU."""
    observed: tuple[str, ...] = ()
    """Figures that are an operator's own (plan_observations), by the name of the GpuPlan's field."""


@dataclass(frozen=True)
class Plan:
    profile: str
    vllm_version: str
    engines: tuple[EnginePlan, ...]
    """In the order in which they were given."""
    budgets_mib: Mapping[int, int]
    """By slot: the sum of the engines' budgets, each what the engine states, else its total, rounded up, and the
    tolerance; 0 for a GPU without an engine."""

    @property
    def verdict(self) -> Verdict:
        """The first that is not `fits`."""
        return next((engine.verdict for engine in self.engines if engine.verdict is not Verdict.FITS), Verdict.FITS)
