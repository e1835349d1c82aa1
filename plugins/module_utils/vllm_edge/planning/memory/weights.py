# SPDX-License-Identifier: Apache-2.0
"""Bytes of the weights on each rank, as vLLM allocates them and logs them as `Model loading took N GiB`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ..checkpoint.components import ROW_PARALLEL, SCALES, VALUES, split_name
from ..checkpoint.headers import DTYPE_BITS
from ..contract import Arguments, Component, Model, RankWeights, Sharding
from .kv_cache import pipeline_stages
from .vllm_versions import DTYPE_BYTES, behaviour, max_num_batched_tokens, uses_second_runner

VOCABULARY_PADDING = 64
"""Rows of an embedding table are padded to a multiple of this (DEFAULT_VOCAB_PADDING_SIZE,
vllm/model_executor/layers/vocab_parallel_embedding.py)."""

MARLIN_EXPERTS_TILE = 64
MARLIN_EXPERTS_PADDED_SINCE = (0, 25)
"""From this release on Marlin's experts have their intermediate size padded to a multiple of the tile (0.32.0
quantization/utils/marlin_utils_fp4.py:358-381, prepare_nvfp4_moe_layer_for_marlin; marlin_utils.py:329,
marlin_moe_padded_intermediate), and a token reads the padding too. Earlier ones refuse the shape. Other kernels for
4-bit experts pad as much or more, so this is counted on every GPU."""
UNGATED_TILE, TRTLLM_HIDDEN_TILE = 128, 256
"""FlashInfer's kernels pad the intermediate size of experts without a gate to a multiple of the first, and those of
TensorRT-LLM for FP4, which vLLM prefers on B200 and B300, the hidden size to one of the second. In FP4 all do the first
(0.19.0 quantization/utils/flashinfer_fp4_moe.py:251 and :274, 0.33.0:419 and :442), so it is counted on GPUs with FP4
units; in FP8 and in bfloat16 those of TensorRT-LLM alone do (flashinfer_utils.py:435,
fused_moe/oracle/unquantized.py)."""
SHARED_LAYERS_WITHOUT_KV = (0, 30)
"""From this release on a layer that shares another's KV cache has no K and V projection (gemma4.py of 0.30.0). Up to
0.28.0 it has both and uses neither."""
TOWERS_ON_FIRST_STAGE = (0, 33)
"""From this release on vLLM's second model runner builds towers on the first stage only (0.33.0
model_executor/models/interfaces.py:392)."""
INDEXER_KEYS_WIDE = (0, 20)
"""From this release on the keys of DeepSeek V3.2's indexer are not kept in FP8 (0.20.0 deepseek_v2.py,
wk_weights_proj)."""
DEEPSTACK_WITH_TOWER = (0, 28)
"""Before, the buffers for the outputs of Qwen3-VL's encoder are there without it too (0.28.0 qwen3_vl.py:1812)."""
MROPE_ROWS_ONCE = (0, 32)
"""The RoPE cache of the text model of Qwen2.5-VL, and up to 0.31 of Qwen3-VL and Qwen3.5, has four times the
positions (`MRotaryEmbedding`, model_executor/layers/rotary_embedding/mrope.py); those since 0.32 only if videos are
pruned (`mrope_positions_factor`, qwen3_vl.py), and no engine of a plan does that."""
GATES_WHOLE_SINCE = (0, 22)

MXFP4_TILE = (128, 256)
"""Multiples of the intermediate size on a rank and of the hidden size, to which Marlin pads experts in MXFP4. Of the
kernels for CUDA it pads most: on Hopper Triton's pads the first to 64 and the second not at all."""

EMBEDDINGS_WITH_LORA = frozenset(
    {"ernie4_5", "exaone4", "granite", "llama3", "llama4", "mixtral", "phi3"}
    | {"qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"}
)
"""Families of which an adapter may change the table of embeddings and the head (`embedding_modules` of the model's
class, the same from 0.19.0 to 0.33.0; of Qwen3.5 since 0.29.0, qwen3_5.py:313)."""
QWEN3_5_EMBEDDINGS_SINCE = (0, 29)
HEAD_IS_TABLE, HEAD_APART_SINCE = frozenset({"qwen3", "qwen3_vl"}), (0, 28)
"""Earlier releases make a tied head the table's own module (0.27.0 qwen3.py:299, qwen3_vl.py:1679), which gets the
buffers of a table under both names (0.27.0 lora/model_manager.py:432 lets lm_head pass). Since then it is a
ParallelLMHead, which VocabParallelEmbeddingWithLoRA does not take (0.28.0 qwen3.py:298)."""
FUSED_EXPERTS = frozenset(
    {"GptOssForCausalLM", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)
"""Architectures whose adapters have gate and up of an expert as one (`is_3d_moe_weight` of the class, in
model_executor/models/gpt_oss.py, qwen3_vl_moe.py and qwen3_5.py, 0.19.0 to 0.33.0)."""
LORA_ONCE_SINCE = (0, 22)
ROUTERS_TWICE = frozenset({"qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl_moe"})
GLM_ROUTERS_SINCE = (0, 31)
"""Before, the router of GLM-4.5 to 4.7 is torch's own Linear, which has no adapter (glm4_moe.py)."""
GPTQ_EXPERT_ZEROS_WHOLE_SINCE = (0, 27)
"""Earlier releases keep the zero points of GPTQ's experts in the model's dtype, of half the bytes (0.26.0
quantization/auto_gptq.py:586, 0.27.0:590). Those of linear layers count too, although Marlin needs none of symmetric
weights and frees them (kernels/linear/mixed_precision/marlin.py): 0.8 % of the weights; Machete keeps them."""
LORA_KINDS = frozenset({"attention", "mlp", "router", "other"})
PUNICA_BYTES_PER_TOKEN = 5 * 8 + 2 * 2 * 4
"""Indices of a batch's tokens into the adapters (0.33.0 lora/punica_wrapper/punica_base.py:133-147,
lora/ops/triton_ops/lora_kernel_metadata.py:53-59)."""

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_COPIED = tuple(f".kv_b_proj.{leaf}" for leaf in ("weight", "weight_packed", "qweight"))


@dataclass(frozen=True)
class _Stage:
    """One stage of the pipeline, and what decides what it holds."""

    model: Model
    layers: range
    release: tuple[int, int]
    towers: bool
    tied: bool
    """The table of embeddings is also the head."""

    @property
    def first(self) -> bool:
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        return self.layers.stop == len(self.model.layers)


def per_rank(model: Model, arguments: Arguments, version: str) -> tuple[RankWeights, ...]:
    """Return the weights of one rank of each stage of the pipeline. Ranks of tensor parallelism are alike.

    What drafts tokens counts too, on the last stage, but a token of the model does not read it. The result is up to
    about 0.2 GiB below what vLLM logs, because its allocator rounds up.
    """
    release = behaviour(version).number
    loaded = [component for component in model.components if component.sharding is not Sharding.NOT_LOADED]
    tied = not any(_is_head(component) for component in loaded)
    once = release >= TOWERS_ON_FIRST_STAGE and uses_second_runner(model, arguments, version)
    ranks: list[RankWeights] = []
    for layers in pipeline_stages(len(model.layers), arguments.pipeline_parallel_size):
        towers = not arguments.language_model_only and not (once and layers.start)
        stage = _Stage(model, layers, release, towers, tied)
        held: Counter[str] = Counter()
        read = Fraction(0)
        for component in loaded:
            whole = component.kind == "experts" and arguments.enable_expert_parallel
            copied = component.kind == "towers" and arguments.mm_encoder_tp_mode == "data"
            copied = copied or _is_whole_gate(component, stage)
            ranks_of_tensor = 1 if whole or copied else arguments.tensor_parallel_size
            size = _count(component, stage) * _compute_bytes_on_rank(component, model, ranks_of_tensor, release)
            if whole:
                # Whole experts with all their scales; the first ranks have those that remain (`determine_expert_map`,
                # model_executor/layers/fused_moe/expert_map_manager.py of 0.32).
                size = size * -(-model.experts // arguments.tensor_parallel_size) // model.experts
            if component.sharding is Sharding.EXPERTS:
                size = math.ceil(size * _compute_expert_padding(model, arguments, release))
            zeros = component.kind == "experts" and component.tensor.name.endswith(".qzeros")
            if zeros and model.quantization.method == "gptq" and release < GPTQ_EXPERT_ZEROS_WHOLE_SINCE:
                size //= 2
            held[component.kind] += size
            if _is_read(component, stage):
                read += size * Fraction(component.read_per_token)
        held["rope_caches"] += _compute_rope_bytes(model, arguments, release)
        held["buffers"] += _compute_batch_buffers(stage, max_num_batched_tokens(model, arguments, version))
        held["buffers"] += _compute_latent_copies(model, arguments.tensor_parallel_size, len(layers))
        if arguments.enable_lora and model.gated and not model.generic:
            held["adapters"] = _compute_lora_bytes(loaded, stage, arguments, version)
        drafter_read = 0
        if model.drafter and stage.last:
            alone = replace(arguments, pipeline_parallel_size=1, enable_lora=False)
            drafting = per_rank(model.drafter, alone, version)[0]
            drafter_read = drafting.read_bytes_per_token
            held["drafter_embeddings"] = drafting.by_kind.get("embeddings", 0)
            held["drafter"] = drafting.bytes - held["drafter_embeddings"]
        by_kind = {kind: size for kind, size in held.items() if size}
        ranks.append(RankWeights(len(ranks), sum(by_kind.values()), by_kind, round(read), drafter_read))
    return tuple(ranks)


def _is_head(component: Component) -> bool:
    return "lm_head." in component.tensor.name


def _count(component: Component, stage: _Stage) -> int:
    tensor = component.tensor
    if tensor.layers is None:
        return tensor.count if _is_on(component, stage) else 0
    here = [layer for layer in tensor.layers if layer in stage.layers]
    if stage.release >= SHARED_LAYERS_WITHOUT_KV and re.search(r"self_attn\.(k_proj|v_proj|k_norm)\.", tensor.name):
        here = [layer for layer in here if stage.model.layers[layer].shares_with is None]
    return tensor.count * len(here)


def _is_on(component: Component, stage: _Stage) -> bool:
    if component.kind == "towers":
        # LLaVA's row between the rows of an image belongs to the model itself.
        return stage.towers or component.tensor.name == "image_newline"
    table = component.kind == "embeddings" and not _is_head(component)
    if stage.model.embeddings_on_every_stage:
        # qwen3_5.py builds head and last norm where they are used, qwen3_next.py the norm only.
        head = stage.model.family == "qwen3_next" and _is_head(component)
        return table or head or stage.last or not stage.model.hybrid or stage.model.family == "nemotron_h"
    if table:
        return stage.first or (stage.tied and stage.last)
    return stage.last


def _is_whole_gate(component: Component, stage: _Stage) -> bool:
    """Return whether each rank has all of a gate of linear attention: Marlin takes no part so small (maybe_disable_tp,
    0.22.0 model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:616)."""
    marlin = stage.release >= GATES_WHOLE_SINCE and stage.model.quantization.method in ("awq", "gptq")
    return marlin and re.search(r"\.in_proj_[ab]\.", component.tensor.name) is not None


def _is_read(component: Component, stage: _Stage) -> bool:
    # Heads, and tables that serve as one, are read on the last stage, other tables on the first.
    if component.kind != "embeddings":
        return True
    return stage.last if component.read_per_token == 1.0 else stage.first


def _compute_bytes_on_rank(component: Component, model: Model, ranks: int, release: tuple[int, int]) -> int:
    shape, bits = component.tensor.shape, DTYPE_BITS[component.tensor.dtype]
    scale = component.tensor.name.rsplit(".", 1)[-1] in SCALES
    if ".indexer.wk." in component.tensor.name and release >= INDEXER_KEYS_WIDE:
        return 0 if scale else math.prod(shape) * DTYPE_BYTES.get(model.dtype, 2)
    if component.kind == "experts" and model.quantization.method == "mxfp4":
        return _compute_mxfp4_bytes(component, model, ranks)
    if component.tensor.dtype in _FLOATS and not scale:
        # A weight that is not quantized is kept in the model's dtype, whatever the file has.
        bits = 32 if component.float32 else 8 * DTYPE_BYTES.get(model.dtype, 2)
    elif component.tensor.dtype in _FLOATS and not model.quantization.schemes.isdisjoint(("FP8", "W8A8 INT8")):
        # vLLM keeps the scales of the weights in float32, whatever the file has
        # (model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_*.py).
        bits = 32
    elements = math.prod(shape)
    if component.sharding is Sharding.VOCABULARY:
        rows = -(-shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
        elements = rows * math.prod(shape[1:])
    part, whole = 1, ranks
    if component.sharding is Sharding.REPLICATED:
        whole = 1
    elif component.sharding is Sharding.KV_HEADS and component.kv_heads:
        part, whole = max(1, component.kv_heads // ranks), component.kv_heads
    # Whole numbers, because a plan computes this hundreds of times: Fraction takes half of its time.
    return -(-elements * part * bits // (8 * whole))


def _compute_expert_padding(model: Model, arguments: Arguments, release: tuple[int, int]) -> Fraction:
    """Return by what factor 4-bit experts grow on a rank because their intermediate size is padded; 1 for others."""
    size = 1 if arguments.enable_expert_parallel else arguments.tensor_parallel_size
    ungated = not model.gated and arguments.fp4_units and model.quantization.group_size == 16
    if (
        model.quantization.weight_bits != 4
        or model.quantization.method == "mxfp4"  # see _compute_mxfp4_bytes
        or (release < MARLIN_EXPERTS_PADDED_SINCE and not ungated)
        or not model.expert_intermediate_size
        or model.expert_intermediate_size % size
    ):
        return Fraction(1)
    part = model.expert_intermediate_size // size
    tile = UNGATED_TILE if ungated else math.lcm(MARLIN_EXPERTS_TILE, model.quantization.group_size or 1)
    return Fraction(-(-part // tile) * tile, part)


def bound_expert_padding(
    model: Model,
    arguments: Arguments,
    release: tuple[int, int],
    loaded: RankWeights,
    capability: tuple[int, int] | None,
) -> int:
    """Return how many bytes of padding experts without a gate may have on a rank beyond those that are counted.

    Args:
        capability: compute capability of the GPU; None if it is not known.
    """
    trtllm = capability is None or capability[0] == 10
    if model.gated or not (trtllm or (model.quantization.method != "none" and capability and capability >= (9, 0))):
        return 0
    part = model.expert_intermediate_size // (1 if arguments.enable_expert_parallel else arguments.tensor_parallel_size)
    counted = part * _compute_expert_padding(model, arguments, release) * model.hidden_size
    tile = TRTLLM_HIDDEN_TILE if trtllm and model.quantization.weight_bits == 4 else 1
    most = -(-part // UNGATED_TILE) * UNGATED_TILE * -(-model.hidden_size // tile) * tile
    return max(0, math.ceil(loaded.by_kind.get("experts", 0) * (most / counted - 1)))


def _compute_mxfp4_bytes(component: Component, model: Model, ranks: int) -> int:
    """Return the bytes of a tensor of gpt-oss's experts: each rank's part is padded to the tiles of the kernel
    (mxfp4_round_up_hidden_size_and_intermediate_size, vllm/model_executor/layers/fused_moe/oracle/mxfp4.py)."""
    inner, hidden = _read_expert_sizes(model, ranks)
    first = "gate_up_proj" in component.tensor.name
    rows, columns = (2 * inner, hidden) if first else (hidden, inner)
    if component.tensor.name.endswith("_bias"):
        return model.experts * rows * 2
    per_byte = 32 if component.tensor.name.endswith("_scales") else 2
    return model.experts * rows * columns // per_byte


def _read_expert_sizes(model: Model, ranks: int) -> tuple[int, int]:
    """Return the intermediate size of an expert on a rank and its hidden size, in MXFP4 with the padding."""
    sizes = model.expert_intermediate_size // ranks, model.hidden_size
    if model.quantization.method != "mxfp4":
        return sizes
    inner, hidden = (-(-size // tile) * tile for size, tile in zip(sizes, MXFP4_TILE, strict=True))
    return inner, hidden


def _compute_rope_bytes(model: Model, arguments: Arguments, release: tuple[int, int]) -> int:
    """Return the bytes of cos and sin for every position; every rank has them.

    In eager mode DeepSeek's are for FlashInfer's kernel, in float32 (rotary_embedding/deepseek_scaling_rope.py; custom
    operators are on unless vLLM compiles, config/vllm.py).
    """
    elements = [size * rows for size, rows in model.rope_caches]
    if model.encoder and (release < MROPE_ROWS_ONCE or model.family == "qwen2_5_vl"):
        elements[0] *= 4
    wide = model.rope_float32 or (model.family.startswith("deepseek") and arguments.enforce_eager)
    return (4 if wide else DTYPE_BYTES.get(model.dtype, 2)) * sum(elements)


def _compute_batch_buffers(stage: _Stage, tokens: int) -> int:
    """Return the bytes of what a model keeps for each token of a batch: per-layer embeddings of Gemma 4's E models
    (gemma4_mm.py), outputs of Qwen3-VL's encoder (qwen3_vl.py), and the tokens that an indexer has chosen, four bytes
    each, also of layers that draft (0.19.0 deepseek_v2.py:1158, deepseek_mtp.py:77, the same in 0.33.0)."""
    model, encodes = stage.model, stage.towers or stage.release < DEEPSTACK_WITH_TOWER
    size = len(model.layers) * model.per_layer_embedding_size if model.multimodal else 0
    size += model.encoder.deepstack * model.hidden_size if model.encoder and encodes else 0
    chosen = model.facts.config.get("index_topk", 2048) if model.latent and model.latent.index_bytes else 0
    return tokens * (size * DTYPE_BYTES.get(model.dtype, 2) + 4 * chosen)


def _compute_latent_copies(model: Model, ranks: int, layers: int) -> int:
    """Return the bytes of kv_b_proj in the model's dtype, which vLLM keeps beside a quantized one for decoding.

    Of one that is not quantized it keeps views. Source: process_weights_after_loading,
    model_executor/layers/attention/mla_attention.py of 0.19.0 to 0.33.0.
    """
    if model.latent is None or all(
        part.tensor.dtype in _FLOATS for part in model.components if part.tensor.name.endswith(_COPIED)
    ):
        return 0
    heads = model.query_heads // ranks
    return layers * heads * model.latent.head_size * model.latent.rank * DTYPE_BYTES.get(model.dtype, 2)


def _compute_lora_bytes(loaded: Sequence[Component], stage: _Stage, arguments: Arguments, version: str) -> int:
    """Return the bytes of the buffers for adapters, which vLLM takes at its start: A and B of max_lora_rank for every
    linear layer of the language model, max_loras times, whatever an adapter has of them.

    Source: create_lora_weights, lora/layers/*.py of 0.19.0 to 0.33.0. A of a column-parallel layer is whole on each
    rank, unless fully_sharded_loras, and so is B of a row-parallel one.
    """
    model, ranks, rank = stage.model, arguments.tensor_parallel_size, arguments.max_lora_rank
    rest = ranks if arguments.fully_sharded_loras else 1
    elements = 0
    for component in loaded:
        path, leaf = split_name(component.tensor.name)
        linear = len(component.tensor.shape) == 2 or path.endswith(".conv1d")
        if component.kind not in LORA_KINDS or leaf not in VALUES or not linear:
            continue
        if stage.release >= INDEXER_KEYS_WIDE and path.endswith((".indexer.wk", ".indexer.weights_proj")):
            continue  # in one layer, wk_weights_proj, which no adapter can name
        if component.kind == "router" and model.family.startswith("glm4") and stage.release < GLM_ROUTERS_SINCE:
            continue
        inputs, outputs = _read_sizes(component, model)
        # Phi stores Q, K and V, and gate and up, as one, and so do its adapters; GLM's do not.
        slices = 2 if path.endswith("gate_up_proj") and model.family != "phi3" else 1
        slices = 3 if path.endswith(".in_proj_qkv") else slices
        if component.sharding is Sharding.REPLICATED or _is_whole_gate(component, stage):
            size = inputs * slices + outputs
        elif ROW_PARALLEL.search(path):
            size = inputs // ranks + outputs // rest
        else:
            heads = component.kv_heads or ranks
            copied = model.family == "phi3" and re.search(r"self_attn\.[kv]_proj$", path)
            size = (0 if copied else inputs * slices // rest) + outputs * max(1, heads // ranks) // heads
        elements += _count(component, stage) * size * _count_names(path, stage)
    layers = {layer for part in loaded if part.kind == "experts" for layer in part.tensor.layers or ()}
    elements += len(layers & {*stage.layers}) * _count_expert_sizes(model, arguments, rest)
    late = model.family in ("qwen3_5", "qwen3_5_moe") and stage.release >= QWEN3_5_EMBEDDINGS_SINCE
    if late or model.family in EMBEDDINGS_WITH_LORA:
        every = model.embeddings_on_every_stage
        head = stage.last or (every and not model.hybrid)
        tables = (stage.first or every or (stage.tied and stage.last)) + head
        tables += stage.release < HEAD_APART_SINCE and model.family in HEAD_IS_TABLE and stage.tied and stage.last
        elements += tables * (model.vocabulary + model.hidden_size)
    dtype = model.dtype if arguments.lora_dtype == "auto" else arguments.lora_dtype
    indices = PUNICA_BYTES_PER_TOKEN * max_num_batched_tokens(model, arguments, version)
    return arguments.max_loras * rank * elements * DTYPE_BYTES.get(dtype, 2) + indices


def _count_names(path: str, stage: _Stage) -> int:
    """Return by how many names the model's class has a layer, each of which gets buffers up to 0.21 (the table
    wrapped_by_id of 0.22.0 lora/model_manager.py makes it one)."""
    if stage.release >= LORA_ONCE_SINCE:
        return 1
    if stage.model.latent and path.startswith("self_attn.") and ".indexer." not in path:
        return 3 if path.endswith("kv_b_proj") else 2
    router = path == "mlp.gate" and (stage.model.latent or stage.model.family in ROUTERS_TWICE)
    return 2 if router and stage.release == (0, 21) else 1


def _read_sizes(component: Component, model: Model) -> tuple[int, int]:
    """Return inputs and outputs of a linear layer, whose weight may be packed. With weights of several sizes, those of
    more bits count as larger than they are."""
    rows, columns = component.tensor.shape[0], component.tensor.shape[-1]
    bits = DTYPE_BITS[component.tensor.dtype]
    packed = bits // model.quantization.weight_bits if component.tensor.dtype in ("I32", "U8") else 1
    if component.tensor.name.endswith(".qweight"):
        return (rows, columns * packed) if model.quantization.method == "awq" else (rows * packed, columns)
    return columns * packed, rows


def _count_expert_sizes(model: Model, arguments: Arguments, rest: int) -> int:
    """Return the inputs and outputs of the experts of a layer on a rank, as `_compute_lora_bytes` adds them up."""
    ranks = 1 if arguments.enable_expert_parallel else arguments.tensor_parallel_size
    experts = -(-model.experts // (arguments.tensor_parallel_size // ranks))
    inner, hidden = _read_expert_sizes(model, ranks)
    slices = 1 if model.architecture in FUSED_EXPERTS else 2
    return experts * (slices * hidden // rest + 3 * inner + hidden // rest)
