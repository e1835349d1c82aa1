# SPDX-License-Identifier: Apache-2.0
"""Estimates of what an engine takes of a GPU besides weights and KV cache: activations, CUDA context, CUDA graphs.

None of this follows from a checkpoint alone. Each constant gives its source, its range, and whether measurements of the
reference host were used to derive it; if so, agreement with those proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..contract import Arguments, Model, Uncertain
from .vllm_versions import DTYPE_BYTES, GEMMA4_VIDEO_TOKENS

MIB = 2**20
GIB = 2**30

ACTIVATION_BYTES = Uncertain(
    0.27 * GIB,
    0.15 * GIB,
    0.45 * GIB,
    "fitted: what two runs of the reference host (31B NVFP4 over 2 GPUs, 31B bf16 over 4, vLLM 0.19.0) leave beside "
    "weights, KV cache and logits; at max_num_batched_tokens 2048",
)
SAMPLER_BYTES_PER_LOGIT = Uncertain(
    14.0,
    10.0,
    16.0,
    "fitted: the slope between the same two runs, 0.875 GiB for 256 rows of 262,144 logits. The tensors that live at "
    "once in vLLM 0.19.0 are the model's logits (2 B, bf16), their copy in fp32 (4 B, v1/sample/sampler.py:90), "
    "probabilities (4 B, v1/sample/ops/topk_topp_sampler.py:112) and random numbers (4 B, ibid. random_sample): 14 B."
    " A log of E4B with 256 sequences on another GPU (vLLM 0.22.1) leaves 1.1 GiB for both, as these two give",
)
REJECTION_BYTES_PER_LOGIT = Uncertain(
    26.0,
    22.0,
    30.0,
    "computed: with any speculative decoding the first model runner profiles its rejection sampler with one draft for "
    "each sequence (0.19.0 v1/worker/gpu_model_runner.py:5609). For a sequence live at once two rows of logits (2 B "
    "each) and, while the token after the draft is sampled, its logits, their copy and log probabilities in fp32, "
    "probabilities and random numbers (22 B); then what is left of that, the draft's logits in fp32 twice, "
    "probabilities and random numbers (26 B; v1/sample/rejection_sampler.py:60-150)",
)
VERIFIES_IN_PARTS_SINCE = (0, 27)
ALLOCATOR_BYTES = Uncertain(
    0.06 * GIB,
    0.0,
    0.2 * GIB,
    "what vLLM logs for the weights of multimodal models beyond their tensors: 15.18 GiB for E4B (0.22.1), whose "
    "tensors and caches are 15.12; 0.0 to 0.16 for 14 others, of which Qwen3.5 and 3.6 have 0.0 to 0.03, in FP8 0.08",
)
ALLOCATOR_BYTES_TEXT = Uncertain(
    0.0,
    0.0,
    0.02 * GIB,
    "what vLLM logs for Llama 3.1 8B, Mistral 7B, Qwen3-8B and Qwen3-30B-A3B is what their tensors take, to 0.002 GiB "
    "(docs/evidence.md, 2026-11-22)",
)
CONTEXT_BYTES_ALONE = Uncertain(
    200 * MIB,
    150 * MIB,
    300 * MIB,
    "fitted: CUDA of the reference host had 21.84 of 22.034 GiB free when an engine of one GPU began to count",
)
CONTEXT_BYTES_PER_PEER = Uncertain(
    (391 - 200) * MIB / 3,
    0.0,
    100 * MIB,
    "fitted: NVML's 21,149 MiB of 31B bf16 over 4 GPUs minus 0.92 of CUDA's 22,563 leave 391 MiB for context and "
    "NCCL, here divided among three peers. Over two GPUs 105 MiB were left, less than one GPU alone takes: hence "
    "+-300 MiB",
)
CONTEXT_BYTES_ELSEWHERE = Uncertain(
    0.0,
    0.0,
    400 * MIB,
    "an assumption: the context grows with the GPU, and only an L4, an H100 and an H200 were measured",
)
CONTEXT_BYTES_OF_HOPPER = Uncertain(
    (527 - 200) * MIB,
    (527 - 200) * MIB,
    400 * MIB,
    "measured: on an H100 and an H200 526.8 MiB were taken after torch.cuda.init() and set_device (PyTorch 2.11, CUDA "
    "13.0, driver 580.159.04), here beyond what an L4 takes",
)
HOPPER = frozenset({"NVIDIA H100 80GB HBM3", "NVIDIA H200"})
NVLINK_BYTES = Uncertain(
    64 * MIB,
    32 * MIB,
    512 * MIB,
    "buffers for all-reduce over NVLink: 32 to 128 MiB of symmetric memory (vLLM 0.32.0 "
    "distributed/device_communicators/all_reduce_utils.py:58), and what NCCL adds for its channels, which is "
    "an assumption",
)
BEYOND_FITTED = Uncertain(
    1.0,
    0.5,
    2.0,
    "an assumption about the peak of activations that is computed from the tensors of one layer instead of measured",
)
GRAPH_POOL_BYTES_PER_TOKEN_AND_HIDDEN = Uncertain(
    0.167 * GIB / (512 * 2560),
    0.1 * GIB / (512 * 2560),
    0.25 * GIB / (512 * 2560),
    "published logs of vLLM with 51 + 35 captured sizes on one GPU: Qwen3.5-4B 0.55 GiB (0.22.0) and Qwen3.5-9B 0.65 "
    "GiB (0.19.0), 32 layers both, hidden sizes 2560 and 4096",
)
GRAPH_BYTES_PER_LAYER = Uncertain(
    0.145 * MIB,
    0.12 * MIB,
    0.2 * MIB,
    "the same logs; they predict 0.68 GiB for Gemma 4 E4B, whose log says 0.71 (0.22.1), and 0.33 for Qwen2.5-7B with "
    "128 sequences, whose log says 0.31 (0.22.0)",
)
GRAPH_BYTES_PER_LAYER_TENSOR_PARALLEL = Uncertain(
    0.222 * MIB,
    0.145 * MIB,
    0.26 * MIB,
    "fitted: 1.47 GiB in the reference's log of 31B NVFP4 over 2 GPUs with 256 sequences: 51 + 35 sizes, 60 layers, "
    "less the pool",
)
GRAPH_BYTES_WITH_LORA = Uncertain(
    1.5,
    1.0,
    2.0,
    "an assumption: a graph with adapters has two to three kernels more for each linear layer, at most twice as many "
    "in all. A public log of Qwen3-4B with adapters has 1.28 GiB (0.27.1, RTX 4090), of which this gives 1.26",
)
GRAPH_ESTIMATE_RATIO = Uncertain(
    1.16,
    1.11,
    1.21,
    "vLLM's own estimate over what capturing took, in the four logs above; the estimate is what it keeps free",
)
COMPILE_CACHE_BYTES = Uncertain(
    0.0,
    0.0,
    0.99 * GIB,
    "two starts of one engine, a public log (Qwen3-8B, RTX 4090, vLLM 0.27.1, 2,048 tokens): a peak of 1.18 GiB while "
    "vLLM compiled, 0.19 with its compile cache. Inductor measures combined kernels while the profile runs "
    "(config/compilation.py, benchmark_combo_kernel, 0.19 to 0.33). Two starts with another share each differ by 2.55 "
    "GiB (Qwen3-32B-AWQ, RTX 5090, 0.28.0)",
)
PCIE_BYTES = Uncertain(
    0.0,
    0.0,
    (1.70 - 0.38) * GIB,
    "a public log of four RTX PRO 6000 over PCIe has 1.70 GiB outside of torch, where the plan counts 0.38; on the "
    "reference host, four L4 over PCIe, NVML leaves no more than the plan counts",
)
FLASHINFER_BYTES = Uncertain(
    394 * MIB,
    394 * MIB,
    2 * 394 * MIB,
    "the workspace of FlashInfer (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE, 0.19.0 envs.py:175, the same in 0.33.0). It"
    " is taken when graphs are captured, so that vLLM's estimate of them has it: six public logs with one to three "
    "sizes have 0.39 to 0.47 GiB (0.20.0). Kernels for Blackwell may take another one",
)
SHARED_MEMORY_BYTES = Uncertain(
    0.0,
    0.0,
    14.1 * GIB,
    "by how much five public logs of a GB10 have less than the plan: 2.9 to 14.1 GiB (0.19 to 0.24). vLLM takes what"
    " the host has available for what the GPU has free (0.19.0 utils/mem_utils.py:122, the same in 0.33.0), so that "
    "all that programs take of it while vLLM starts, its own among them, counts as the engine's",
)
INTEGRATED = frozenset({(8, 7), (11, 0), (12, 1)})
"""Compute capabilities of GPUs without memory of their own: Orin, Thor, GB10."""
GRAPHS_SEEN_ALONE = Uncertain(
    0.08,
    0.0,
    1.0,
    "fitted: NVML on the reference host, vLLM 0.19.0, one GPU, leaves about 0 MiB for graphs of E4B and 98 MiB of "
    "E2B, where the log of another host has 0.71 GiB for E4B (0.22.1). What differs is not known; later releases keep"
    " graphs in the share",
)

ENCODER_RUN = Uncertain(
    1.0,
    0.95,
    1.05,
    "the tensors that live at once, counted in qwen2_5_vl.py and qwen3_vl.py of 0.19.0 and 0.33.0; public logs have 3 %"
    " more (Qwen2.5-VL-7B, a video of 114,688 tokens, 0.23.0) and as much (Qwen3-VL-2B, an image, 0.20.2)",
)
LARGEST_QWEN_IMAGE = 16 * 1024
"""Tokens by the published preprocessor_config.json: 12,845,056 pixels of 28 x 28 each in Qwen2.5-VL, 16,777,216 of
32 x 32 in Qwen3-VL."""
QWEN3_VIDEO = 3 / 4
"""Of them in a video, by video_preprocessor_config.json: 25,165,824 pixels, of two frames."""
QWEN2_5_FRAME_PAIRS = 7
"""As many images may a video have (0.33.0 model_executor/models/qwen2_vl.py:120, _MAX_FRAMES_PER_VIDEO)."""

FREE_UNCERTAINTIES = {
    "compile_cache": (COMPILE_CACHE_BYTES, "while vLLM compiles, which it does until its compile cache is filled"),
    "pcie": (PCIE_BYTES, "for tensor parallelism over PCIe, outside of torch"),
    "shared_memory": (SHARED_MEMORY_BYTES, "where the CPU takes of the same memory while vLLM starts"),
    "experts": (Uncertain(0.0, 0.0, 0.0), "for experts without a gate, where FlashInfer's kernels pad them"),
}
"""What may be missing on a GPU, by name, and when."""

CAPPED = frozenset({"gemma2", "gemma4"})
"""Families whose logits are capped (final_logit_softcapping; model_executor/models/gemma2.py, gemma4.py)."""
LATENT_WORKSPACE_TOKENS = 64 * 1024
"""The most tokens of context that latent attention expands at once
(determine_chunked_prefill_workspace_size, model_executor/layers/attention/mla_attention.py of 0.19.0 to 0.33.0)."""

DEFAULTS = Arguments()
INDEX_SCORES_BYTES = 512 * MIB
"""0.19.0 envs.py, VLLM_SPARSE_INDEXER_MAX_LOGITS_MB, the same in 0.33.0."""

FITTED_GPU, FITTED_SEQUENCES, FITTED_TOKENS, FITTED_HIDDEN_SIZE = "NVIDIA L4", 256, GEMMA4_VIDEO_TOKENS, 5376
FITTED_LAYER_BYTES = GEMMA4_VIDEO_TOKENS * 2 * (2 * 5376 + 3 * 21504 // 2)
"""What `_compute_layer_bytes` gives for the run of the reference with the most: 31B over two GPUs."""

OBSERVABLE = ("weights_bytes", "overhead_bytes", "context_bytes", "graphs_bytes")
"""The components that an operator's observation of an engine may replace."""


class ObservationError(ValueError):
    """An observation that cannot be used. The message names the variable, the value and what would be right."""


def list_captured_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, query: int = 1, arguments: Arguments = DEFAULTS
) -> list[int]:
    """Return the batch sizes for which vLLM captures graphs: 1, 2, 4, every 8 up to 248, every 16 from 256.

    The largest is at most twice max_num_seqs, at most 512 and at most max_num_batched_tokens. Source: vLLM 0.19.0
    config/vllm.py:1399-1444, the same in 0.33.0 on GPUs before Blackwell (:2463). With speculative decoding a request
    has `query` tokens in a batch, and the first model runner rounds sizes up to multiples of it (0.19.0
    config/compilation.py:1235, adjust_cudagraph_sizes_for_spec_decode); the second rounds those for decoding alone,
    which makes about as many.

    Args:
        arguments: which may ask for another largest size, or for these sizes only.
    """
    most = min(arguments.max_cudagraph_capture_size or min(max_num_seqs * query * 2, 512), max_num_batched_tokens)
    if asked := arguments.cudagraph_capture_sizes:
        most = max_num_batched_tokens
    sizes = (-(-size // query) * query for size in asked or (1, 2, 4, *range(8, 256, 8), *range(256, most + 1, 16)))
    return sorted({size for size in sizes if size <= most})


def sampler(model: Model, rows: int) -> Uncertain:
    """Return the bytes for sampling `rows` sequences at once, needed at profiling and again after the graphs.

    With float32 the model's logits need no copy in fp32, which is 2 bytes less for each.
    """
    return (SAMPLER_BYTES_PER_LOGIT + (-2 if model.dtype == "float32" else 0)) * (rows * model.vocabulary)


def sampler_with_drafts(
    model: Model, drafts: int, sequences: int, tokens: int, *, second: bool, in_parts: bool
) -> Uncertain:
    """Return the bytes for sampling with speculative decoding, as vLLM profiles it or, in its second model runner,
    needs it when it warms up.

    The latter verifies all drafts of as many sequences as a batch has room for (0.33.0 v1/worker/gpu/warmup.py:304):
    their logits, at least, and a copy in fp32, which may be there twice.

    Args:
        in_parts: whether the copy is made in parts of at most 1 GiB (0.27.0
            v1/worker/gpu/spec_decode/rejection_sampler.py, MAX_CHUNK_BYTES).
    """
    rows = min(sequences, tokens)
    if not second:
        return REJECTION_BYTES_PER_LOGIT * (rows * model.vocabulary)
    logits = min(sequences, tokens // (drafts + 2)) * (drafts + 1) * model.vocabulary
    least = logits * DTYPE_BYTES.get(model.dtype, 2)
    copy = min(4 * logits, GIB) if in_parts else 4 * logits
    one = sampler(model, rows)
    return Uncertain(max(one.value, least + copy), max(one.low, least), max(one.high, least + 2 * copy))


def profile_logits(model: Model, rows: int, tensor_parallel_size: int, *, copies: bool) -> Uncertain:
    """Return the bytes for sampling `rows` sequences at once when vLLM's second model runner profiles.

    That samples greedily, which takes no tensor as large as the logits (0.27.0 v1/worker/gpu/sample/gumbel.py:215,
    sampler.py:155). The most of these lives at once: the logits, or two of them while they are capped
    (model_executor/layers/logits_processor.py); a rank's part, what is gathered of all ranks and that in the order of
    the vocabulary (distributed/device_communicators/base_device_communicator.py:230-253); the logits and their copy.

    Args:
        copies: whether the release copies them in fp32.
    """
    width = DTYPE_BYTES.get(model.dtype, 2)
    capped = model.generic or model.family in CAPPED
    gathered = width * (2 + 1 / tensor_parallel_size) if tensor_parallel_size > 1 else 0
    size = max(width * (2 if capped else 1), gathered, width + 4 if copies else 0) * rows * model.vocabulary
    return Uncertain(size, size, size)


def allocator(model: Model, *, text_only: bool = False) -> Uncertain:
    """Return the bytes that vLLM logs for the weights beyond their tensors, which only multimodal models have.

    With text only it is not known whether they stay, so the range begins at 0.
    """
    if not model.multimodal:
        return ALLOCATOR_BYTES_TEXT
    return replace(ALLOCATOR_BYTES, low=0.0) if text_only else ALLOCATOR_BYTES


def _compute_layer_bytes(model: Model, arguments: Arguments, tokens: int) -> float:
    """Return the bytes of the largest tensors that live at once while a batch passes a layer, in two bytes each.

    Those are the hidden states, the residual, and the inputs of the MLP before and after its activation; of experts the
    workspaces of vLLM's fused kernel (model_executor/layers/fused_moe/fused_moe.py, 0.32.0). That of vLLM's own CUTLASS
    for NVFP4 has beside them the rows of the experts as they come in and go out, and the latter weighted (0.19.0
    fused_moe/cutlass_moe.py, run_cutlass_moe_fp4, the same in 0.33.0).
    """
    mlp = 3 * max(model.intermediate_sizes, default=0) / arguments.tensor_parallel_size
    part = model.expert_intermediate_size / arguments.tensor_parallel_size
    in_fp4 = model.quantization.method == "modelopt_fp4" or "NVFP4" in model.quantization.schemes
    rows = 3 * model.hidden_size if in_fp4 and arguments.moe_backend.lower() == "cutlass" else 0
    experts = model.experts_per_token * (max(2 * part, model.hidden_size) + part + rows)
    other_tower = model.multimodal and not arguments.language_model_only and model.encoder is None
    encoder = model.hidden_size if other_tower and tokens > FITTED_TOKENS else 0
    return tokens * 2 * (2 * model.hidden_size + max(mlp, experts) + encoder)


def count_encoder_tokens(model: Model, arguments: Arguments, max_model_len: int, batch_tokens: int) -> int:
    """Return the tokens that Qwen's encoder makes at once when vLLM profiles: of as many of the largest items as a
    batch holds, at least one (compute_mm_encoder_budget, 0.33.0 v1/core/encoder_cache_manager.py:333;
    multimodal/encoder_budget.py); 0 without it."""
    if model.encoder is None or arguments.language_model_only:
        return 0
    pixels = arguments.max_pixels
    image = max(1, pixels // model.encoder.pixels_per_token) if pixels else LARGEST_QWEN_IMAGE
    video = int(image * QWEN3_VIDEO)
    if model.family == "qwen2_5_vl":
        video = image * min(QWEN2_5_FRAME_PAIRS, max(1, max_model_len // image))
    items = {"image": image, "video": video}
    largest = max(size for name, size in items.items() if name not in arguments.without)
    return max(1, batch_tokens // largest) * largest


def encode(model: Model, arguments: Arguments, tokens: int) -> tuple[Uncertain, int]:
    """Return the bytes that a run of Qwen's encoder takes, and those of its outputs, which stay while the language
    model runs; 0 for other models.

    Of each patch live in a layer: the inputs of the layer, of its attention and of its projection, and a part of Q, K,
    V, of Q and K copied and rotated, and of what attention returns; or the inputs of the MLP, and its activations
    before and after the gate, which are two tensors where vLLM compiles, also if it does not compile the encoder
    (custom operators are off then). Over several GPUs the sum of their parts is one more.
    """
    encoder, size = model.encoder, arguments.tensor_parallel_size
    if arguments.mm_encoder_tp_mode == "data":
        size = 1  # Each GPU encodes whole items, here all of them.
    if encoder is None or not tokens:
        return Uncertain(0.0, 0.0, 0.0), 0
    hidden, inner = encoder.hidden_size, encoder.intermediate_size / size
    layer = (4 if size > 1 else 3) * hidden + 8 * hidden / size
    mlp = 3 * hidden + (3 if encoder.gated else 2) * inner
    layer = max(layer, 2 * hidden + 4 * inner if encoder.gated and not arguments.enforce_eager else mlp)
    width = DTYPE_BYTES.get(model.dtype, 2)
    kept = encoder.deepstack * model.hidden_size
    run = ENCODER_RUN * (tokens * width * (4 * (encoder.fixed_size + layer) + kept))
    outside = ACTIVATION_BYTES + -FITTED_LAYER_BYTES
    return run + replace(outside, low=max(outside.low, 0)), tokens * width * (kept + model.hidden_size)


def count_latent_workspace_tokens(max_model_len: int, max_num_seqs: int, block_tokens: int) -> int:
    """Return the tokens of context that latent attention expands at once: those of eight requests, or four blocks of
    each, up to LATENT_WORKSPACE_TOKENS."""
    wanted = max(8 * max_model_len, 4 * max_num_seqs * block_tokens)
    least = min(wanted, LATENT_WORKSPACE_TOKENS)
    return -(-least // block_tokens) * block_tokens


def compute_latent_context(model: Model, tokens: int, tensor_parallel_size: int) -> tuple[int, int]:
    """Return the bytes that `tokens` of context take on a GPU while a request with a long one runs; 0 without latent
    attention.

    Those of their keys and values, for which vLLM's profile makes room, and those into which they are gathered from
    the KV cache. The latter vLLM takes after it has measured what is left for the KV cache, outside of its share.
    """
    latent, width = model.latent, DTYPE_BYTES.get(model.dtype, 2)
    if latent is None or latent.index_bytes:
        return 0, 0
    heads = model.query_heads // tensor_parallel_size
    return tokens * heads * latent.head_size * width, tokens * (latent.rank + latent.rope_size) * width


def compute_index_workspace(model: Model, arguments: Arguments, max_model_len: int, tokens: int) -> Uncertain:
    """Return the bytes that an indexer and its attention take when vLLM profiles; 0 without an indexer.

    One workspace is for what the indexer gathers of the KV cache, 40 times the longest request, and for the attention:
    a batch of queries and, with DeepSeek's FP8 format, 5 times the longest request in bfloat16. The scores of the
    indexer, 512 MiB, live before the experts do, so that they may not be part of the peak (0.19.0, in
    v1/attention/backends/mla indexer.py and flashmla_sparse.py:210,591; model_executor/layers/sparse_attn_indexer.py).
    """
    if model.latent is None or not model.latent.index_bytes:
        return Uncertain(0.0, 0.0, 0.0)
    vector = 2 * (model.latent.rank + model.latent.rope_size)
    queries = tokens * model.query_heads // arguments.tensor_parallel_size * vector
    gathered = 40 * max_model_len * model.latent.index_bytes
    workspace = max(gathered, queries + (5 * max_model_len * vector if arguments.ds_mla else 0))
    return Uncertain(workspace + INDEX_SCORES_BYTES, workspace, workspace + INDEX_SCORES_BYTES)


def activations(model: Model, arguments: Arguments, tokens: int) -> Uncertain:
    """Return the bytes that vLLM's profile finds besides weights and sampler: activations, growth outside of torch.

    The fitted runs took images and videos. For text only, the output of the encoder is left out, which the profile
    holds while the language model runs: the largest item of Gemma 4, a video, in the hidden size (0.32.0
    v1/worker/gpu/mm/encoder_runner.py:114, v1/core/encoder_cache_manager.py:316). By how much the encoder's own
    activations raised the peak is not known: from 0 to the 123 MiB between the figure and its lowest value.

    Args:
        tokens: of one batch. Where a layer needs more for them than in the fitted runs, the difference is added.
    """
    text_only = arguments.language_model_only
    kept = model.multimodal and text_only and model.family == "gemma4"
    found = ACTIVATION_BYTES + (-GEMMA4_VIDEO_TOKENS * model.hidden_size * 2 if kept else 0)
    beyond = _compute_layer_bytes(model, arguments, tokens) - FITTED_LAYER_BYTES
    if beyond > 0:
        found += BEYOND_FITTED * beyond
    return _widen(model, found)


def context(ranks: int, gpu_name: str = FITTED_GPU, nvlink: bool = False) -> Uncertain:
    """Return the bytes of the CUDA context and NCCL's buffers on each GPU of an engine that has `ranks` of them.

    vLLM takes its first snapshot after them (0.19.0 v1/worker/gpu_worker.py:277-283). On another GPU than that of the
    reference the range is wider.
    """
    found = CONTEXT_BYTES_ALONE
    if ranks > 1:
        found += CONTEXT_BYTES_PER_PEER * (ranks - 1)
    if gpu_name != FITTED_GPU:
        found += CONTEXT_BYTES_OF_HOPPER if gpu_name in HOPPER else CONTEXT_BYTES_ELSEWHERE
    return found + NVLINK_BYTES if nvlink and ranks > 1 else found


def graphs(
    model: Model,
    arguments: Arguments,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    all_seen: bool,
) -> Uncertain:
    """Return the bytes that capturing CUDA graphs takes on each GPU; 0 with enforce_eager.

    There is a graph for each captured size, and another one for those that occur when only decoding, which has at most
    max_num_seqs tokens. Logs confirm it: 51 and 35 for 256 sequences, 35 and 19 for 128, 5 and 4 for 8. Each graph has
    a cost for each of its layers, and all share one pool that is as large as the largest batch needs.

    Args:
        all_seen: False for the first model runner of vLLM 0.19 on the reference's GPU, see GRAPHS_SEEN_ALONE.
    """
    if arguments.enforce_eager or arguments.cudagraph_mode == "NONE":
        return Uncertain(0.0, 0.0, 0.0)
    query = arguments.drafts + 1
    sizes = list_captured_sizes(max_num_seqs, max_num_batched_tokens, query, arguments)
    decoding = [size for size in sizes if size <= max_num_seqs * query]
    if arguments.cudagraph_mode == "FULL_DECODE_ONLY":
        sizes = decoding
    captured = len(sizes) + (len(decoding) if arguments.cudagraph_mode in ("", "FULL_AND_PIECEWISE") else 0)
    layers = -(-len(model.layers) // arguments.pipeline_parallel_size)
    layers += len(model.drafter.layers) if model.drafter else 0
    ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
    per_layer = GRAPH_BYTES_PER_LAYER_TENSOR_PARALLEL if arguments.tensor_parallel_size > 1 else GRAPH_BYTES_PER_LAYER
    pool = GRAPH_POOL_BYTES_PER_TOKEN_AND_HIDDEN * (max(sizes, default=0) * model.hidden_size)
    found = _widen(model, pool) + per_layer * (captured * layers)
    if lora_cases := _count_lora_cases(arguments):
        found += per_layer * (captured * layers * lora_cases) * GRAPH_BYTES_WITH_LORA
    return found if all_seen or ranks > 1 else found * GRAPHS_SEEN_ALONE


def _count_lora_cases(arguments: Arguments) -> int:
    """Return for how many numbers of adapters graphs are captured besides those without any: one, or with
    specialize_active_lora the powers of 2 up to max_loras + 1 and that (get_captured_lora_counts, 0.33.0
    lora/utils.py:49; cudagraph_specialize_lora is on, config/compilation.py; the second runner of 0.22 and 0.23 has
    graphs with adapters only)."""
    most = arguments.max_loras + 1
    if not arguments.enable_lora or not arguments.specialize_active_lora:
        return int(arguments.enable_lora)
    return sum(1 for count in range(1, most + 1) if count & (count - 1) == 0 or count == most)


def _widen(model: Model, figure: Uncertain) -> Uncertain:
    """Return a figure that was found with two bytes for each element for the model's dtype.

    In float32, which nobody measured, it is twice as much. How much of it is tensors is not known, so that range begins
    at the lowest of two bytes.
    """
    if DTYPE_BYTES.get(model.dtype, 2) == 2:
        return figure
    return Uncertain(figure.value * 2, figure.low, figure.high * 2)


def observed(observations: Mapping[str, Any], engine: str) -> dict[str, int]:
    """Return what plan_observations say of an engine: bytes by component. Raises ObservationError if a component is
    unknown or a value is no number of bytes."""
    given = observations.get(engine, {})
    if not isinstance(given, Mapping):
        raise ObservationError(
            f"plan_observations.{engine}: {given!r} is not a mapping; write {', '.join(OBSERVABLE)} with bytes."
        )
    for name, value in given.items():
        where = f"plan_observations.{engine}.{name}"
        if name not in OBSERVABLE:
            raise ObservationError(f"{where} is not a component of a plan; use one of {', '.join(OBSERVABLE)}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ObservationError(
                f"{where}: {value!r} is not a number of bytes; write a whole number, as logs in GiB x 2^30."
            )
    return dict(given)
