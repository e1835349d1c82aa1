# SPDX-License-Identifier: Apache-2.0
"""The input and output types of the planner.

Sizes are bytes (`_bytes`) or tokens (`_tokens`), per GPU wherever it is about a rank. Terms are vLLM's.

    checkpoint -> Facts        model_facts: config.json and safetensors headers, from files or recorded
    Facts      -> Model        families: layers, heads, what is sharded; of an unknown architecture, upper bounds
    Model      -> RankWeights  weights: bytes on each rank, by component
    Model      -> KvCapacity   kv_cache: groups, blocks, tokens, as the release of vLLM counts them
    all        -> Plan         planner: overhead, graphs, feasibility, verdict, decode estimate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..gpu.models import GPU_MODELS, GpuModel


class Verdict(StrEnum):
    """What will happen when an engine starts. The members are in the order in which vLLM itself finds out."""

    UNSUPPORTED_ENGINE = "unsupported_engine"
    """This release of vLLM cannot run this architecture, precision or parallelism."""
    UNSUPPORTED_SHAPE = "unsupported_shape"
    """A shape cannot be divided as a kernel or the parallelism requires."""
    NOT_FREE = "not_free"
    """Less memory is free on the GPU than the engine requests at its start."""
    OOM_WEIGHTS = "oom_weights"
    NO_KV = "no_kv"
    """The weights fit, but leave no memory for the KV cache, or with linear attention too little for the states of
    max_num_seqs sequences."""
    KV_BELOW_MAX_MODEL_LEN = "kv_below_max_model_len"
    """The KV cache cannot hold one request of max_model_len tokens."""
    OOM_WARMUP = "oom_warmup"
    """CUDA graphs and the sampler's warm-up need memory beyond the budget, and it is not there."""
    CANNOT_SAY = "cannot_say"
    """An argument of the engine changes its memory in a way that the plan does not count. The reason names it."""
    FITS = "fits"


class UnknownArchitecture(ValueError):
    """The planner does not know the architecture of a checkpoint, and cannot bound its memory. The message names it and
    the known ones."""


@dataclass(frozen=True)
class Tensor:
    """All tensors of one name pattern, dtype and shape, as safetensors headers list them."""

    name: str
    """Numbers between dots are replaced by `*`: `model.language_model.layers.*.mlp.down_proj.weight`."""
    dtype: str
    """As safetensors names it: `BF16`, `F8_E4M3`, `U8`, `I32`, ..."""
    shape: tuple[int, ...]
    layers: tuple[int, ...] | None = None
    """The numbers of the decoder layers that have it; None for tensors outside of decoder layers (embeddings,
    towers)."""
    count: int = 1
    """How many there are in each of `layers`, or in all if there are no layers: experts of a layer, layers of a
    tower."""

    @property
    def total(self) -> int:
        return self.count * (1 if self.layers is None else len(self.layers))


@dataclass(frozen=True)
class Facts:
    """What is known about a checkpoint from its files."""

    repo: str
    revision: str
    """The commit; empty if the files do not say."""
    config: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """`quantization_config` of config.json, or hf_quant_config.json if only that exists; empty if there is neither."""
    source: str = "files"
    """`files`, or `recorded: <from where, when>`."""
    pooling: bool = False
    """Whether it has modules.json of Sentence Transformers, with which vLLM serves it as an embedding model (`--runner
    pooling`), whatever its architecture is (get_pooling_config, 0.32.0 transformers_utils/config.py)."""


class Attention(StrEnum):
    """The kinds of attention, as config.json names them."""

    FULL = "full_attention"
    SLIDING = "sliding_attention"
    CHUNKED = "chunked_attention"
    """Within chunks of a fixed number of tokens (Llama 4)."""
    LATENT = "latent_attention"
    """MLA (DeepSeek): the cache has one vector for each token, the same on every rank. config.json has no such name."""
    LINEAR = "linear_attention"
    """The cache has a state of fixed size for each request, whatever its length (Qwen3.5; Mamba2)."""
    NONE = "none"
    """A layer of experts or of an MLP alone, without a cache (NemotronH)."""


@dataclass(frozen=True)
class State:
    """What a layer with linear attention or Mamba2 keeps of a request, in elements."""

    convolution: int
    """Of one row of the convolution's input; vLLM keeps `rows` of them in the model's dtype."""
    rows: int
    recurrent: int
    """Of all heads; ranks of tensor parallelism share them, and the row above, evenly."""
    dtype: str | None
    """Of the recurrent part; None if it is the model's."""
    whole: int = 0
    """Of the row above what each rank has beside its part: the only group of Mamba2."""
    chunk_tokens: int = 0
    """Of Mamba2: where vLLM keeps the states of all blocks, a block is a multiple of it. 0 for linear attention."""


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer, as far as its KV cache is concerned."""

    index: int
    attention: Attention
    kv_heads: int
    """Of the whole model, before tensor parallelism; 1 for latent attention."""
    head_size: int
    """Elements of a key or value; for latent attention of the one vector of a token."""
    window_tokens: int | None = None
    """The window of sliding attention, or the chunk of chunked attention."""
    shares_with: int | None = None
    """The layer whose KV cache this layer reads; it has none of its own then."""
    state: State | None = None
    """For linear attention and Mamba2 only, which have no KV heads."""


class Sharding(StrEnum):
    """How a tensor is distributed over the ranks of tensor parallelism."""

    SHARDED = "sharded"
    """Divided by the size, along rows or columns."""
    REPLICATED = "replicated"
    KV_HEADS = "kv_heads"
    """Divided by heads; each rank has at least one."""
    VOCABULARY = "vocabulary"
    """Divided by rows, after padding them as vLLM does."""
    EXPERTS = "experts"
    """As SHARDED, or whole experts on each rank with expert parallelism."""
    NOT_LOADED = "not_loaded"
    """In the file and not on the GPU: a tied head, a scale that is folded away."""


@dataclass(frozen=True)
class Component:
    tensor: Tensor
    kind: str
    """The row of a plan that it counts in: `embeddings`, `attention`, `mlp`, `experts`, `router`, `norms`, `towers`,
    `other`."""
    sharding: Sharding
    kv_heads: int | None = None
    """Number of KV heads, if `sharding` is KV_HEADS."""
    read_per_token: float = 1.0
    """The fraction of it that is read to decode one token of one sequence: 1 for dense weights, top-k of all for
    experts, one row for embeddings, 0 for towers."""
    float32: bool = False
    """Whether vLLM keeps it in float32, and not in the model's dtype."""


@dataclass(frozen=True)
class Quantization:
    method: str
    """As vLLM names it: `none`, `modelopt_fp4`, `modelopt`, `compressed-tensors`, `fp8`, `awq`, `gptq`, ..."""
    weight_bits: int
    group_size: int | None = None
    """Number of weights that share one scale; None if there is one scale per channel or tensor."""
    kv_cache_dtype: str | None = None
    """What `kv_cache_dtype: auto` becomes according to the checkpoint (`fp8`); None if it does not say."""
    schemes: frozenset[str] = frozenset()
    """Of compressed-tensors, as quantization.SCHEMES names them."""


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention, in elements."""

    rank: int
    """Of the compressed keys and values."""
    rope_size: int
    """Of the part of the key with RoPE, which all heads share. It and `rank` are the vector in the KV cache."""
    head_size: int
    """Of what one head gets back from the compressed vector: the rest of its key, and its value."""
    index_bytes: int = 0
    """Bytes of a token in the cache that the indexer of a layer has (DeepSeek V3.2); 0 without one."""


@dataclass(frozen=True)
class Encoder:
    """Qwen's vision tower, as far as one run of it takes memory."""

    hidden_size: int
    intermediate_size: int
    gated: bool
    """Whether its MLP has a gate (Qwen2.5-VL)."""
    fixed_size: int
    """Elements of a patch that live throughout: its pixels, cos and sin of RoPE, and the embedding of its position if
    it has one."""
    deepstack: int
    """Layers whose outputs the language model gets besides the last one's."""
    pixels_per_token: int
    """Of the four patches that become one token."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding, as --speculative-config asks for it."""

    method: str
    """As vLLM resolves it: `mtp`, `eagle3`, `draft_model`, `ngram`, ...; empty if it cannot be read."""
    tokens: int
    """num_speculative_tokens, drafted for each token that is certain."""
    draft: str = ""
    """The repository or directory of the draft; empty if it has none, or is the model's own."""
    ranks: int = 0
    """draft_tensor_parallel_size; 0 if not given."""
    uncounted: str = ""
    """Why the plan does not count it; empty if it does."""


@dataclass(frozen=True)
class Model:
    """A checkpoint that has been interpreted."""

    facts: Facts
    architecture: str
    family: str
    """The name in a row of families.FAMILIES: `gemma4`, `llama3`, ..."""
    dtype: str
    """As vLLM names it, for example `bfloat16`."""
    hidden_size: int
    vocabulary: int
    query_heads: int
    max_position_embeddings: int
    layers: tuple[DecoderLayer, ...]
    components: tuple[Component, ...]
    quantization: Quantization
    intermediate_sizes: tuple[int, ...]
    """Every size that occurs among the dense MLPs."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    rope_caches: tuple[tuple[int, int], ...] = ()
    """Rotary dimension and rows of each cos/sin cache that vLLM keeps for the model."""
    per_layer_embedding_size: int = 0
    """Gemma 4's E models: width of the embedding that each layer gets from its own table; 0 for other models."""
    multimodal: bool = False
    embeddings_on_every_stage: bool = False
    """Whether each stage of a pipeline has embeddings, head and last norm, used there or not."""
    rope_float32: bool = False
    """Whether the RoPE caches are in float32, and not in the model's dtype."""
    router_float32: bool = False
    """Whether the router is in float32, and not in the model's dtype."""
    generic: bool = False
    """Whether the planner does not know the architecture: weights and KV cache are upper bounds then."""
    kv_cache_exact: bool = True
    """Whether the KV cache takes no less than what is planned; for `generic` only."""
    latent: Latent | None = None
    """If the attention of all layers is latent."""
    encoder: Encoder | None = None
    """If it has Qwen's tower."""
    drafting: tuple[Tensor, ...] = ()
    """Tensors of layers for multi-token prediction, which the model itself does not load; `facts` lacks them."""
    drafter: Model | None = None
    """What drafts tokens for it, without what both share: layers for multi-token prediction, or a checkpoint of its
    own."""

    @property
    def hybrid(self) -> bool:
        """Whether some layers have linear attention or Mamba2."""
        return any(layer.state for layer in self.layers)

    @property
    def gated(self) -> bool:
        """Whether its experts have a gate. Without one, neither adapters nor drafters are counted."""
        return self.family != "nemotron_h"


@dataclass(frozen=True)
class Arguments:
    """The options of `vllm serve` that affect memory. None means not given: the default of the release applies."""

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
    enable_prefix_caching: bool | None = None
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    dtype: str = "auto"
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    lora_dtype: str = "auto"
    fully_sharded_loras: bool = False
    specialize_active_lora: bool = False
    default_max_num_seqs: int | None = None
    """vLLM's default on the engine's GPU, no option; None for a GPU below 70 GiB. The next field too."""
    default_max_num_batched_tokens: int | None = None
    attention_backend: str = "auto"
    moe_backend: str = "auto"
    mm_encoder_tp_mode: str = "weights"
    max_cudagraph_capture_size: int | None = None
    cudagraph_capture_sizes: tuple[int, ...] = ()
    """Tokens of the batches for which graphs are captured; empty for vLLM's own choice. The next field is another key
    of compilation_config."""
    cudagraph_mode: str = ""
    max_pixels: int | None = None
    """Of an image, from mm_processor_kwargs; None if the checkpoint decides."""
    without: frozenset[str] = frozenset()
    """Modalities of which limit_mm_per_prompt allows none."""
    sizes_items: bool = False
    """Whether limit_mm_per_prompt says how large the items of vLLM's profile are."""
    first_runner_options: frozenset[str] = frozenset()
    """The keys of its options that some release runs in its first model runner only."""
    second_runner: bool | None = None
    """VLLM_USE_V2_MODEL_RUNNER of extra_env; None if release, model and options decide."""
    estimate_graphs: bool | None = None
    """VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS of extra_env; None for the default of the release."""
    ds_mla: bool = False
    """Whether the attention backend of the GPU keeps the KV cache in DeepSeek's own FP8 format, no option."""
    speculation: Speculation | None = None
    default_block_size: int | None = None
    """Tokens of a block that the attention backend of the GPU wants, no option; None for vLLM's default."""
    flashinfer_states: bool = False
    """Whether vLLM takes FlashInfer's kernel for linear attention on the GPU, no option."""
    fp4_units: bool = False
    """Whether the GPU computes in FP4, no option."""

    @property
    def captures_attention(self) -> bool:
        """Whether CUDA graphs have attention in them."""
        return not self.enforce_eager and self.cudagraph_mode not in ("NONE", "PIECEWISE")

    @property
    def drafts(self) -> int:
        """Tokens that are drafted for each that is certain; 0 also where the plan does not count it."""
        return self.speculation.tokens if self.speculation else 0


@dataclass(frozen=True)
class Gpu:
    name: str
    """As NVML names it, e.g. `NVIDIA L4`."""
    cuda_total_bytes: int
    """What CUDA can use: NVML's total minus what the driver reserves."""
    free_bytes: int | None = None
    """Free at the moment; None if that was not read."""
    stated_capability: tuple[int, int] | None = None
    """As NVML or an operator states it, for a model that the planner does not know, or knows wrongly."""
    stated_bandwidth_bytes_per_s: float | None = None

    @property
    def model(self) -> GpuModel | None:
        return GPU_MODELS.get(self.name)

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        return self.stated_capability or (self.model.compute_capability if self.model else None)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        return self.stated_bandwidth_bytes_per_s or (self.model.bandwidth_bytes_per_s if self.model else None)


@dataclass(frozen=True)
class Uncertain:
    value: float
    low: float
    high: float
    source: str = ""
    """Of a constant; empty for what is computed from constants. It begins with `fitted` if the figure was derived from
    measurements of the reference host: agreement with those proves nothing."""

    @property
    def bytes(self) -> int:
        return round(self.value)

    def __add__(self, other: Uncertain | int) -> Uncertain:
        """Return the sum; the ranges add up too."""
        if isinstance(other, int):
            other = Uncertain(other, other, other)
        return Uncertain(self.value + other.value, self.low + other.low, self.high + other.high)

    def raise_to(self, other: Uncertain) -> Uncertain:
        return Uncertain(max(self.value, other.value), max(self.low, other.low), max(self.high, other.high))

    def __mul__(self, factor: float | Uncertain) -> Uncertain:
        """Return the product; with an uncertain factor of its ends too."""
        if not isinstance(factor, Uncertain):
            factor = Uncertain(factor, factor, factor)
        return Uncertain(self.value * factor.value, self.low * factor.low, self.high * factor.high)


@dataclass(frozen=True)
class RankWeights:
    """The weights on one rank, in bytes. The values of `by_kind` add up to `bytes`."""

    pipeline_rank: int
    bytes: int
    by_kind: Mapping[str, int]
    read_bytes_per_token: int
    """How many of them are read to decode one token of one sequence."""
    drafter_read_bytes: int = 0
    """How many of the drafter's are read to draft one."""


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one block table."""

    attention: Attention
    layers: int
    block_size_tokens: int
    page_bytes: int
    blocks_per_request: int
    """For a request of max_model_len tokens."""


@dataclass(frozen=True)
class KvCapacity:
    """What vLLM makes of a number of bytes for the KV cache of one rank."""

    available_bytes: int
    groups: tuple[KvGroup, ...]
    blocks: int
    tokens: int
    """As the release prints it: `GPU KV cache size`."""
    max_concurrency: float
    """How many requests of max_model_len tokens fit at once."""
    needed_bytes: int
    """For one request of max_model_len tokens; vLLM refuses to start with less."""
    max_context_tokens: int
    """The longest request that fits, at most the model's own maximum: vLLM's `estimated maximum model length`."""


@dataclass(frozen=True)
class GpuPlan:
    """One engine on one GPU. `total_bytes` is what NVML will show for it."""

    slot: int
    weights_bytes: int
    overhead_bytes: int
    """The peak of activations, and what CUDA, NCCL and the allocator keep within vLLM's own accounting."""
    context_bytes: int
    """The CUDA context and NCCL's buffers, which are allocated before vLLM begins to count."""
    graphs_bytes: int
    kv_cache_bytes: int
    warm_up_bytes: int
    """What the sampler's warm-up needs for a moment, after the graphs. It is part of overhead_bytes, whose peak it was
    before."""
    total_bytes: int
    free_bytes: int
    """What is left of the GPU's CUDA total after the start; negative if the engine does not fit."""


@dataclass(frozen=True)
class Decode:
    """Tokens per second of one sequence at short context. This is always an estimate."""

    low: float
    mid: float
    high: float
    ceiling: float
    """Memory bandwidth divided by the bytes that a token reads: nothing can be faster."""


@dataclass(frozen=True)
class DecodeTogether:
    """Tokens per second of several requests at once, all of them added up. This is always an estimate."""

    requests: int
    context_tokens: int
    """Of each request."""
    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Seconds:
    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class LoadTime(Seconds):
    """Seconds of a load, from the start of the container to the first answer of /health. This is always an estimate."""

    read_bytes: int
    """Bytes of the checkpoint, which all ranks read."""
    other: Seconds
    """What a load takes besides reading them."""


@dataclass(frozen=True)
class Fix:
    """A change with which an engine fits, what it costs, and what the engine is like then."""

    change: str
    """Spelled as in group_vars."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The same as keys of serving_engines; empty if it is not planned."""
    costs: tuple[str, ...] = ()
    """What is lost, each in words; empty if nothing is."""
    max_model_len: int = 0
    max_concurrency: float = 0.0
    """Requests of max_model_len tokens."""
    decode_tok_s: float | None = None
    """Estimate for one sequence; None if the bandwidth of the GPU is not known."""


@dataclass(frozen=True)
class EnginePlan:
    engine: str
    verdict: Verdict
    reason: str
    """One sentence with the number that decides the verdict."""
    fix: str
    """The first of `fixes`, spelled as in group_vars; empty if the engine fits or nothing would help."""
    kv_cache_dtype: str
    kv_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    max_context: int
    decode_tok_s: Decode | None
    gpus: tuple[GpuPlan, ...]
    kv_groups: tuple[KvGroup, ...] = ()
    advice: tuple[str, ...] = ()
    """What works but could be better, each with a reference."""
    facts_source: str = ""
    derived_kv_cache_memory_bytes: int = 0
    """The size of the KV cache that leaves plan_margin_mib free on each of its GPUs, whether it is used or not."""
    settings: Mapping[str, float | int] = field(default_factory=dict)
    """What the plan adds to the engine's own settings, under the keys of serving_engines: `kv_cache_memory_bytes`,
    `gpu_memory_utilization`, `vram_budget_mib`."""
    pinned: bool = False
    """Whether the size of its KV cache is fixed, by its own setting or by the plan, and is not the rest of a share of
    the GPU."""
    decode_together_tok_s: DecodeTogether | None = None
    """None if the bandwidth of the GPU is not known, or the engine takes one request at a time."""
    uncertainty_mib: tuple[int, int] = (0, 0)
    """By how many MiB what is beside the KV cache may be less, and more, on the GPU on which that is most."""
    free_uncertainty_mib: Mapping[str, int] = field(default_factory=dict)
    """Up to how many MiB may be missing on each GPU for a reason that the plan cannot know, by its name
    (overhead.FREE_UNCERTAINTIES): of the KV cache if a share of the GPU decides, otherwise of what is free."""
    observed: tuple[str, ...] = ()
    """Figures that come from the operator (plan_observations), as fields of GpuPlan."""
    max_model_len: int = 0
    """The context of the engine in tokens, which max_concurrency is about; max_context is the longest that one request
    could have."""
    load_s: LoadTime | None = None
    """From a disk whose read rate is not known; None if the sizes of the files are not known either."""
    at_once: Mapping[int, float] = field(default_factory=dict)
    """How many requests of so many tokens the KV cache holds, at most max_num_seqs; without lengths above
    max_model_len."""
    fixes: tuple[Fix, ...] = ()
    """Changes with which it would fit, the cheapest first."""
    inherited: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Arguments that the engine has from its model, by the variable that states them."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why it has each argument, and what vLLM takes for those that it has not (engine/reasons.py)."""


@dataclass(frozen=True)
class Plan:
    profile: str
    vllm_version: str
    engines: tuple[EnginePlan, ...]
    """In the order in which they were given."""
    budgets_mib: Mapping[int, int]
    """Budget by slot: the sum over the engines of what each states, otherwise of its total, rounded up, plus the
    tolerance. 0 for a GPU without an engine."""
    memory_warnings: tuple[str, ...] = ()
    """One sentence for each GPU that holds more than memory_threshold_percent besides KV caches."""

    @property
    def verdict(self) -> Verdict:
        """The first verdict that is neither `fits` nor `cannot_say`; otherwise `cannot_say` if an engine has it."""
        found = [engine.verdict for engine in self.engines if engine.verdict is not Verdict.FITS]
        refused = [verdict for verdict in found if verdict is not Verdict.CANNOT_SAY]
        return (refused or found or list(Verdict)[-1:])[0]
