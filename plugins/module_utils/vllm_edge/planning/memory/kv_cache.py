# SPDX-License-Identifier: Apache-2.0
"""What vLLM makes of the memory for the KV cache: groups of layers, blocks, tokens.

Every layer has pages; a page holds the keys and values of one block of tokens. Layers with the same kind of attention
share a block table and form a group. All groups take their blocks from one pool: a block is one page for each layer of
a group. Therefore all pages have the same size, and groups have the same number of layers as far as possible.

The arithmetic is that of vLLM's v1/core/kv_cache_utils.py (0.19.0; from 0.33.0 v1/core/kv_cache_planning.py) and
v1/kv_cache_interface.py; differences between releases are in `vllm_versions`. A drafter's layers are layers of the
last pipeline rank like the others (0.19.0 v1/spec_decode/eagle.py:1246, load_model, registers them after the model's);
the tokens that it looks ahead count in neither the check for one request nor the concurrency that vLLM prints. Context
parallelism and KV connectors occur in no plan and are not covered.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..contract import Arguments, Attention, DecoderLayer, KvCapacity, KvGroup, Model, State
from .vllm_versions import (
    DTYPE_BYTES,
    Behaviour,
    behaviour,
    caches_prefixes,
    count_batches_in_flight,
    derive_limit,
    keeps_checkpoints,
    max_model_len,
    max_num_batched_tokens,
)

# Source: 0.33.0 utils/torch_utils.py:40
ELEMENT_BYTES = {
    "float32": 4,
    "float": 4,
    "float16": 2,
    "half": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_ds_mla": 1,
}
DS_MLA, DS_MLA_BYTES = "fp8_ds_mla", 656
"""DeepSeek's FP8 format of a latent KV cache, and its bytes for each token: 512 in FP8, four scales and 64 in bfloat16
(0.33.0 v1/attention/backends/mla/flashmla_sparse.py:79)."""
WINDOWED = frozenset({Attention.SLIDING, Attention.CHUNKED})
"""The kinds of attention of which a request holds no more than a part of its tokens."""
DEFAULT_BLOCK_TOKENS = 16
"""0.19.0 config/cache.py:34. FlashAttention, FlashInfer and Triton accept it and its multiples."""
FLASHMLA_BLOCK_TOKENS = 64
"""0.19.0 v1/attention/backends/mla/flashmla.py. On Hopper it takes latent attention with a KV cache in FP8, which
FlashAttention, the first choice there, does not; Triton, the only one on Ampere and Ada, accepts multiples of 16."""
FLASHINFER_MLA_BLOCK_TOKENS = 32
"""The smaller of the two that it supports, which v1/attention/backend.py (get_preferred_block_size) takes: 0.19.0
v1/attention/backends/mla/flashinfer_mla.py:50, the same in 0.33.0. It is the first choice on B200 and B300."""
LATENT_DTYPES = frozenset({"bfloat16", "float16", "half", "fp8", "fp8_e4m3"})
"""Of a KV cache of latent attention (0.19.0 v1/attention/backends/mla/triton_mla.py, flashmla.py)."""
CHECKPOINT_TOKENS = 64
"""A block is a multiple of it where the kernel for linear attention keeps states from inside a prompt
(FLASHINFER_GDN_CHECKPOINT_ALIGNMENT, 0.33.0 v1/attention/backends/gdn_attn.py:34)."""
FLASHINFER_HEAD_SIZES = frozenset({64, 128, 256})
"""0.19.0 v1/attention/backends/flashinfer.py:390; later releases add that of Gemma 4."""
WITHOUT_FLASHINFER = frozenset({"gemma3", "gemma4", "gpt_oss"})
"""Families that Triton runs instead: images in both directions (0.19.0 config/model.py:1200, which the Gemma 3 for text
has not), heads of two sizes (model_executor/models/config.py:103), sinks (flashinfer.py:399)."""
FEW_MORE_LAYERS = 1.5
"""If the largest kind has less than this many times the layers of the smallest kind, groups are as large as the largest
kind."""


class UnsupportedKvCache(ValueError):
    """This release of vLLM cannot make a KV cache for the model with these arguments. The arguments are why, and what
    to set if anything helps."""


class UncountedKvCache(UnsupportedKvCache):
    """vLLM may make one, and the plan does not count it."""


@dataclass(frozen=True)
class Spec:
    """The cache of one layer on one rank. vLLM treats layers with equal specs alike."""

    attention: Attention
    window_tokens: int | None
    kv_heads: int
    head_size: int
    element_bytes: int
    block_tokens: int
    padded_page_bytes: int = 0
    index_bytes: int = 0
    """Of a token in the cache of the layer's indexer, which is a layer of its own in vLLM, in the same group."""
    states: int = 0
    """Of linear attention: how many a request holds, each in a block."""

    @property
    def page_bytes(self) -> int:
        # Latent attention has one vector for keys and values (0.32.0 v1/kv_cache_interface.py:686).
        vectors = 1 if self.attention is Attention.LATENT else 2
        keys_and_values = vectors * self.kv_heads * self.head_size * self.element_bytes
        return self.padded_page_bytes or self.block_tokens * (keys_and_values + self.index_bytes)

    def blocks(self, request_tokens: int, in_flight_tokens: int) -> int:
        """Return the number of blocks that a request holds at most.

        A request with sliding attention holds its window and the tokens that are being computed, and one block more
        because a window need not begin at the start of a block (0.19.0 kv_cache_interface.py:252). One with chunked
        attention holds its chunk instead, which begins at the start of a block (0.32.0 kv_cache_interface.py:814).

        Args:
            in_flight_tokens: tokens of all batches that are computed at once.
        """
        if self.states:
            return self.states
        if self.window_tokens is None:
            return _divide_up(request_tokens, self.block_tokens)
        if self.attention is Attention.CHUNKED:
            return _divide_up(min(self.window_tokens + in_flight_tokens, request_tokens), self.block_tokens)
        return _divide_up(min(self.window_tokens - 1 + in_flight_tokens, request_tokens), self.block_tokens) + 1


@dataclass(frozen=True)
class Group:
    """Layers that share a block table, by number. If their pages differ, it is the only group."""

    layers: tuple[int, ...]
    specs: tuple[Spec, ...]

    def on(self, layers: range) -> tuple[Spec, ...]:
        return tuple(spec for layer, spec in zip(self.layers, self.specs, strict=True) if layer in layers)

    def blocks(self, request_tokens: int, in_flight_tokens: int) -> int:
        return self.specs[0].blocks(request_tokens, in_flight_tokens)


def resolve_dtype(model: Model, arguments: Arguments, version: str) -> str:
    """Return the dtype of the KV cache as vLLM names it: `bfloat16`, `fp8`.

    `auto` is what the checkpoint's quantization says, otherwise the model's own dtype. Source: 0.33.0
    utils/torch_utils.py (resolve_kv_cache_dtype_string) and model_executor/layers/attention/attention.py:287.
    """
    if arguments.ds_mla:
        return DS_MLA
    release = behaviour(version)
    checkpoint = model.quantization.kv_cache_dtype
    if checkpoint and checkpoint.startswith("nvfp4") and not release.nvfp4_kv_cache:
        checkpoint = None
    overrides = release.scheme_overrides_dtype and model.quantization.method == "compressed-tensors"
    if arguments.kv_cache_dtype != "auto" and not (checkpoint and overrides):
        return arguments.kv_cache_dtype
    return checkpoint or model.dtype


def choose_block_size(model: Model, kv_cache_dtype: str, compute_capability: tuple[int, int] | None) -> int | None:
    """Return the tokens of a block that vLLM chooses for an attention backend; None for its default.

    Source: the priorities in platforms/cuda.py (_get_backend_priorities), the same in 0.19.0 to 0.33.0 for what counts
    here: Triton, which takes the default, is the only one on Ampere and Ada, and the first on Blackwell RTX (12.x).
    """
    if model.latent and model.latent.index_bytes:
        return FLASHMLA_BLOCK_TOKENS  # of the indexer (v1/attention/backends/mla/indexer.py)
    if not model.latent or compute_capability is None:
        return None
    if compute_capability[0] == 10:
        return FLASHINFER_MLA_BLOCK_TOKENS
    return FLASHMLA_BLOCK_TOKENS if compute_capability[0] == 9 and kv_cache_dtype.startswith("fp8") else None


def supports_flashinfer(model: Model) -> bool:
    """Return whether FlashInfer runs the model's attention on every GPU from Ampere on; it has FP8 on all of them."""
    attention = {(layer.attention, layer.head_size) for layer in model.layers if not layer.state}
    return (
        not model.generic
        and model.latent is None
        and (model.family not in WITHOUT_FLASHINFER or model.architecture == "Gemma3ForCausalLM")
        and all(kind is not Attention.CHUNKED and size in FLASHINFER_HEAD_SIZES for kind, size in attention)
    )


def takes_flashinfer(
    model: Model, kv_cache_dtype: str, compute_capability: tuple[int, int] | None, backend: str
) -> bool:
    """Return whether vLLM takes FlashInfer for a model's attention: first on B200 and B300, elsewhere for a KV cache in
    FP8, which FlashAttention has on Hopper only (platforms/cuda.py, _get_backend_priorities; 0.19.0 to 0.33.0).

    Args:
        backend: attention_backend of the engine.
    """
    if backend.lower() != "auto":
        return backend.upper() == "FLASHINFER"
    if compute_capability is None or compute_capability < (8, 0) or not supports_flashinfer(model):
        return False
    return compute_capability[0] == 10 or (compute_capability[0] != 9 and kv_cache_dtype.startswith("fp8"))


def keeps_ds_mla(model: Model, kv_cache_dtype: str, compute_capability: tuple[int, int] | None) -> bool:
    """Return whether the KV cache of a model with an indexer is in DS_MLA: in FP8 on Hopper, where FlashMLA is the only
    backend for it, and on Blackwell RTX, whose backend has no other; B200 and B300 have the usual FP8
    (0.33.0 model_executor/layers/attention/mla_attention.py:360, platforms/cuda.py)."""
    if not model.latent or not model.latent.index_bytes:
        return False
    major = (compute_capability or (0, 0))[0]
    return kv_cache_dtype == DS_MLA or (major == 9 and kv_cache_dtype.startswith("fp8")) or major == 12


def pipeline_stages(layers: int, stages: int) -> tuple[range, ...]:
    """Return the layers of each stage of the pipeline.

    The remainder of the division goes to the stages before the last, the later ones first. Source: 0.19.0
    distributed/utils.py:95 (get_pp_indices), without VLLM_PP_LAYER_PARTITION.
    """
    each, rest = divmod(layers, stages)
    sizes = [each + (1 if stages - 1 - rest <= stage < stages - 1 else 0) for stage in range(stages)]
    starts = [sum(sizes[:stage]) for stage in range(stages)]
    return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))


def select_layers(model: Model, arguments: Arguments, pipeline_rank: int) -> range:
    """Return the decoder layers of a pipeline rank. Raises UnsupportedKvCache if it has none."""
    ranks, layers = arguments.pipeline_parallel_size, len(model.layers)
    if not 1 <= ranks <= layers:
        raise UnsupportedKvCache(f"pipeline_parallel_size {ranks} does not divide {layers} layers")
    found = pipeline_stages(layers, ranks)[pipeline_rank]
    drafting = len(model.drafter.layers) if model.drafter and found.stop == layers else 0
    return range(found.start, found.stop + drafting)


def groups(model: Model, arguments: Arguments, version: str) -> tuple[Group, ...]:
    """Return the groups of the layers that have a KV cache of their own, for the whole model.

    Each pipeline rank has its layers of each group. Source: 0.19.0 v1/core/kv_cache_utils.py:1222.

    Raises UnsupportedKvCache if there is no such layer, or the release cannot group them.
    """
    release = behaviour(version)
    drafting = model.drafter.layers if model.drafter else ()
    specs = {
        index: _spec(layer, model, arguments, release)
        for index, layer in enumerate((*model.layers, *drafting))
        if layer.shares_with is None and layer.attention is not Attention.NONE
    }
    if not specs:
        raise UnsupportedKvCache("no layer of the model has a KV cache")
    if len({(spec.attention, spec.window_tokens, spec.block_tokens) for spec in specs.values()}) == 1:
        return (Group(tuple(specs), tuple(specs.values())),)
    return _group_by_kind(_equalize_pages(specs, release))


def capacity(model: Model, arguments: Arguments, available_bytes: int | Sequence[int], version: str) -> KvCapacity:
    """Return what vLLM makes of a number of bytes for the KV cache.

    Every rank gets as many blocks as the one with the fewest. Bytes and groups in the result are those of that rank,
    which is also the first to be short of memory. The result is also given if vLLM would refuse to start: needed_bytes
    is more than available_bytes then. Source: 0.19.0 v1/core/kv_cache_utils.py:1508.

    Args:
        available_bytes: for every rank, or one number for each pipeline rank.

    Raises UnsupportedKvCache if the release makes no KV cache for the model.
    """
    ranks = _ranks(model, arguments, version)
    available = [available_bytes] * len(ranks) if isinstance(available_bytes, int) else available_bytes
    request_tokens = max_model_len(model, arguments)
    limit = max(derive_limit(model), request_tokens)
    in_rank = [max(size, 0) // rank.block_bytes for rank, size in zip(ranks, available, strict=True)]
    blocks = min(in_rank)
    fewest = in_rank.index(blocks)
    rank = ranks[fewest]
    concurrency = blocks / rank.request_blocks(request_tokens)
    if behaviour(version).tokens_by_concurrency:
        tokens = int(concurrency * request_tokens)
    else:
        tokens = blocks // len(rank.groups) * min(group.specs[0].block_tokens for group in rank.groups)
    return KvCapacity(
        available_bytes=available[fewest],
        groups=rank.described(request_tokens),
        blocks=blocks,
        tokens=tokens,
        max_concurrency=concurrency,
        needed_bytes=rank.needed_bytes(request_tokens),
        max_context_tokens=min(each.longest_request(size, limit) for each, size in zip(ranks, available, strict=True)),
    )


def count_requests(model: Model, arguments: Arguments, version: str, blocks: int, tokens: int) -> float:
    """Return how many requests of so many tokens a number of blocks holds. Raises UnsupportedKvCache."""
    return blocks / _ranks(model, arguments, version)[0].request_blocks(tokens)


@dataclass(frozen=True)
class _Rank:
    """The groups of the whole model as one pipeline rank holds them."""

    groups: tuple[Group, ...]
    layers: range
    block_bytes: int
    """Bytes of one block of the pool: one page for each layer of the largest group."""
    in_flight_tokens: int
    reserved_blocks: int

    def request_blocks(self, tokens: int) -> int:
        # Every group counts, also one without a layer on this rank: block tables are those of the whole model.
        return sum(group.blocks(tokens, self.in_flight_tokens) for group in self.groups)

    def needed_bytes(self, tokens: int) -> int:
        return (self.request_blocks(tokens) + self.reserved_blocks) * self.block_bytes

    def longest_request(self, available_bytes: int, limit_tokens: int) -> int:
        """Return vLLM's estimated maximum model length, by the same search (0.19.0 kv_cache_utils.py:1370)."""
        lengths = range(1, limit_tokens + 1)
        return bisect.bisect_right(lengths, available_bytes, key=self.needed_bytes)

    def described(self, request_tokens: int) -> tuple[KvGroup, ...]:
        result = []
        for group in self.groups:
            first, here = group.specs[0], group.on(self.layers)
            equal = len({spec.page_bytes for spec in group.specs}) == 1
            page = first.page_bytes if equal else sum(spec.page_bytes for spec in here)
            blocks = group.blocks(request_tokens, self.in_flight_tokens)
            result.append(KvGroup(first.attention, len(here), first.block_tokens, page, blocks))
        return tuple(result)


def _ranks(model: Model, arguments: Arguments, version: str) -> tuple[_Rank, ...]:
    """Return every pipeline rank. Raises UnsupportedKvCache if one has no KV cache."""
    in_flight = count_batches_in_flight(model, arguments, version) * max_num_batched_tokens(model, arguments, version)
    reserved = 1 if behaviour(version).null_block_reserved else 0
    of_model = groups(model, arguments, version)
    result = []
    for number in range(arguments.pipeline_parallel_size):
        layers = select_layers(model, arguments, number)
        block_bytes = max(sum(spec.page_bytes for spec in group.on(layers)) for group in of_model)
        if block_bytes == 0:
            raise UnsupportedKvCache(f"no layer of pipeline rank {number} has a KV cache of its own")
        result.append(_Rank(of_model, layers, block_bytes, in_flight, reserved))
    return tuple(result)


def _spec(layer: DecoderLayer, model: Model, arguments: Arguments, release: Behaviour) -> Spec:
    """Return the cache of one layer on one rank. Raises UnsupportedKvCache."""
    block = arguments.block_size or arguments.default_block_size or DEFAULT_BLOCK_TOKENS
    if block % DEFAULT_BLOCK_TOKENS:
        raise UnsupportedKvCache(f"block_size {block} is not a multiple of {DEFAULT_BLOCK_TOKENS}")
    dtype = resolve_dtype(model, arguments, release.version)
    if dtype not in ELEMENT_BYTES:
        raise UncountedKvCache(f"the plan does not count a KV cache of dtype {dtype}", "kv_cache_dtype: auto")
    if layer.attention is Attention.LATENT and dtype not in LATENT_DTYPES and not arguments.ds_mla:
        raise UnsupportedKvCache(f"no backend for latent attention (MLA) has a KV cache of dtype {dtype}")
    block, state_page = _align_block(block, model, arguments, dtype, release)
    if layer.state:
        kept, mamba = caches_prefixes(arguments, release), layer.state.chunk_tokens > 0
        if mamba and kept and release.keeps_all_states:
            return Spec(layer.attention, None, 0, 0, 0, block, state_page)
        checkpoints = release.mamba2_checkpoints if mamba else keeps_checkpoints(arguments, release)
        states = (2 + checkpoints if kept else 1) + arguments.drafts
        tokens = block if kept else max_model_len(model, arguments)
        return Spec(layer.attention, None, 0, 0, 0, tokens, state_page, states=states)
    sliding = layer.attention is Attention.SLIDING
    return Spec(
        attention=layer.attention,
        window_tokens=layer.window_tokens if layer.attention in WINDOWED else None,
        kv_heads=max(1, layer.kv_heads // arguments.tensor_parallel_size),
        head_size=DS_MLA_BYTES if dtype == DS_MLA else layer.head_size,
        element_bytes=ELEMENT_BYTES[dtype],
        index_bytes=model.latent.index_bytes if model.latent else 0,
        block_tokens=(release.sliding_block_tokens or block) if sliding else block,
    )


def compute_state_bytes(state: State, model: Model, arguments: Arguments) -> int:
    """Return the bytes that a layer with linear attention or Mamba2 keeps of a request on one rank.

    Source: gated_delta_net_state_shape, mamba2_state_shape and _mamba_state_dtype, 0.19.0
    model_executor/layers/mamba/mamba_utils.py:177, :128 and :56; Qwen3_5ForConditionalGenerationConfig and
    NemotronHForCausalLMConfig, model_executor/models/config.py:663 and :483. The same in 0.33.0.
    """
    said = arguments.mamba_cache_dtype
    dtype = model.dtype if said == "auto" else said
    said = arguments.mamba_ssm_cache_dtype
    recurrent = (state.dtype or dtype) if said == "auto" else said
    ranks = arguments.tensor_parallel_size
    row = state.convolution // ranks + state.whole
    elements = row * (state.rows + arguments.drafts), state.recurrent // ranks
    return sum(count * DTYPE_BYTES.get(kind, 4) for count, kind in zip(elements, (dtype, recurrent), strict=True))


def _align_block(
    block: int, model: Model, arguments: Arguments, kv_cache_dtype: str, release: Behaviour
) -> tuple[int, int]:
    """Return the tokens of a block of full attention, and the bytes of its page, 0 without linear attention.

    With linear attention the block is raised until its page is as large as the state, which is padded to it. Source:
    HybridAttentionMambaModelConfig, 0.19.0 model_executor/models/config.py:156; since 0.20.0 _align_hybrid_block_size,
    platforms/interface.py. Raises UnsupportedKvCache.
    """
    states = {layer.state for layer in model.layers if layer.state}
    if not states:
        return block, 0
    full = next(layer for layer in model.layers if layer.kv_heads)
    heads = max(1, full.kv_heads // arguments.tensor_parallel_size)
    token_bytes = 2 * heads * full.head_size * ELEMENT_BYTES[kv_cache_dtype]
    multiple = block if release.aligns_to_block else DEFAULT_BLOCK_TOKENS
    chunk, kept = max(state.chunk_tokens for state in states), caches_prefixes(arguments, release)
    kept_all = chunk > 0 and kept and release.keeps_all_states
    if kept_all:
        multiple = math.lcm(multiple, chunk)
    elif not chunk and keeps_checkpoints(arguments, release):
        multiple = math.lcm(multiple, CHECKPOINT_TOKENS)
    largest = max(compute_state_bytes(state, model, arguments) for state in states)
    block = max(block, multiple * _divide_up(largest, multiple * token_bytes))
    batch = max_num_batched_tokens(model, arguments, release.version)
    if release.batch_holds_block and kept and not kept_all and block > batch:
        raise UnsupportedKvCache(
            f"with prefix caching a block of {block:,} tokens, as large as the state of linear attention, has to fit "
            f"into max_num_batched_tokens {batch:,}; it need not with --no-enable-prefix-caching",
            f"max_num_batched_tokens: {block}",
        )
    return block, block * token_bytes


def _equalize_pages(specs: Mapping[int, Spec], release: Behaviour) -> dict[int, Spec]:
    """Make all pages as large as the largest: smaller pages hold more tokens, or are padded (0.19.0
    kv_cache_utils.py:914).

    Raises UnsupportedKvCache if a page does not divide the largest one and the release does not pad.
    """
    largest = max(spec.page_bytes for spec in specs.values())
    result = {}
    for layer, spec in specs.items():
        times, rest = divmod(largest, spec.page_bytes)
        if rest and not release.pads_pages:
            raise UnsupportedKvCache(
                f"pages of {spec.page_bytes} and {largest} bytes cannot be made equal by vLLM {release.version}"
            )
        longer = replace(spec, block_tokens=spec.block_tokens * times)
        result[layer] = replace(spec, padded_page_bytes=largest) if rest else longer
    return result


def _group_by_kind(specs: Mapping[int, Spec]) -> tuple[Group, ...]:
    """Return groups of equally many layers, from specs with equal pages (0.19.0 kv_cache_utils.py:959).

    A group is as large as the rarest kind of layer. The layers of a kind are distributed to its groups in turn, so that
    each pipeline rank has about as many of each group.
    """
    kinds: dict[Spec, list[int]] = {}
    for layer, spec in specs.items():
        kinds.setdefault(spec, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < min(counts) * FEW_MORE_LAYERS else min(counts)
    result = []
    for spec, layers in kinds.items():
        number = _divide_up(len(layers), size)
        dealt = [tuple(layers[first::number]) for first in range(number)]
        result += [Group(each, (spec,) * len(each)) for each in dealt]
    return tuple(result)


def _divide_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
