# SPDX-License-Identifier: Apache-2.0
"""How much memory a real Gemma 4 takes of a GPU: published figures, and for the rest a draw from what is published.

Weights are vLLM's "Model loading took" per GPU as published for 0.19 (bytes of the checkpoint over the ranks, plus what
every rank repeats: vision and audio towers, RoPE caches, norms). Nobody knows the rest for this vLLM on these cards:
what the allocator rounds, what a profiling run finds, the CUDA context, NCCL. So each host draws it from the whole
range of what is published, by a seed: the file `seed` beside its boards, from VLLM_EDGE_LAB_SEED. A seed always gives
the same host. The runs of the reference host, to which plans are fitted, are one point of these ranges.

CUDA graphs come out of the fraction `gpu_memory_utilization`, as they do since vLLM 0.20. The totals of the reference
host were measured with 0.19, which left them outside; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 does so here too.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

MIB = 2**20
GIB = 2**30
# What the allocator adds to the tensors' bytes: published loads lie so far above the sum.
LOAD_SLACK_GIB = (0.05, 0.2)
# Activations and what grows outside of torch, at 2048 batched tokens: 0.27 in both runs of the reference host, 0.2 in a
# log of E4B (0.22.1); since then there is another model runner, and the encoders are profiled by another rule.
PROFILE_BASE_GIB = (0.15, 0.45)
PUBLISHED_TOKENS = 2496
"""The largest batch of those runs."""
# For each logit that is sampled: the logits and their copy in fp32 are 6 bytes, probabilities and random numbers 4
# each. 14 of them fit the reference host; at least 10 live at once, and another copy in bf16 makes 16.
LOGIT_BYTES = (10, 16)
VOCABULARY = 262_144
# nvidia-smi beyond weights, cache and graphs is 105, 190 and 391 MiB in three runs that differ in nothing that explains
# it; CUDA 13 and NCCL 2.30 have no published figure.
OUTSIDE_MIB = 300
DEFAULT_SEED = "11057"
"""A host on which every engine of the project is within its budget. On most others, some are not."""


@dataclass(frozen=True)
class Architecture:
    """What decides the KV cache: layers that own one, in order (`s` sliding, `F` full), and their heads."""

    kv_layers: str
    kv_heads_sliding: int
    kv_heads_full: int
    sliding_window: int
    head_dim_sliding: int = 256
    head_dim_full: int = 512


@dataclass(frozen=True)
class Model:
    """One published checkpoint."""

    family: str
    precision: str
    # GiB per GPU by tensor_parallel_size.
    load_gib: dict[int, float]
    # What `--kv-cache-dtype auto` means for it: a quantized checkpoint may carry its own KV cache scheme.
    auto_kv_dtype: str = "bfloat16"


ARCHITECTURES = {
    "31B": Architecture("sssssF" * 10, 16, 4, 1024),
    "26B-A4B": Architecture("sssssF" * 5, 8, 2, 1024),
    "E4B": Architecture("sssssF" * 4, 2, 2, 512),
    "E2B": Architecture("ssssF" * 3, 1, 1, 512),
}

MODELS = {
    "google/gemma-4-31B-it": Model("31B", "bf16", {1: 58.83, 2: 30.14, 4: 15.80}),
    "RedHatAI/gemma-4-31B-it-FP8-dynamic": Model("31B", "fp8", {1: 31.45, 2: 16.45, 4: 8.95}),
    "nvidia/Gemma-4-31B-IT-NVFP4": Model("31B", "nvfp4", {1: 30.97, 2: 16.21, 4: 8.83}, auto_kv_dtype="fp8"),
    # With a head of its own beside the table of embeddings, 2.625 GiB over the ranks.
    "google/gemma-4-31B-it-qat-w4a16-ct": Model("31B", "w4a16", {1: 22.10, 2: 11.77, 4: 6.62}),
    "google/gemma-4-26B-A4B-it": Model("26B-A4B", "bf16", {1: 48.47, 2: 24.97, 4: 13.23}),
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic": Model("26B-A4B", "fp8", {1: 25.65, 2: 13.56, 4: 7.52}),
    # Over two and four GPUs the part of an expert is padded from 352 to 384 and from 176 to 192, as vLLM does since
    # 0.25: 12.85 GB of experts over the ranks become 1/11 more.
    "nvidia/Gemma-4-26B-A4B-NVFP4": Model("26B-A4B", "nvfp4", {1: 17.18, 2: 9.86, 4: 5.67}, auto_kv_dtype="fp8"),
    "google/gemma-4-E4B-it": Model("E4B", "bf16", {1: 15.12, 2: 8.17, 4: 4.76}),
    "google/gemma-4-E2B-it": Model("E2B", "bf16", {1: 9.76, 2: 5.49, 4: 3.36}),
}

# Families whose config.json says use_bidirectional_attention: vision.
SEES_BOTH_WAYS = ("31B", "26B-A4B")

# CUDA context and NCCL buffers of the reference host, by tensor_parallel_size. There when vLLM takes its first look at
# the free memory.
CONTEXT_MIB = {1: 190, 2: 105, 4: 391}
# CUDA graphs of 256 sequences, as logged: 31B over two GPUs (0.19), E4B (0.22.1). 31B over four ran eager only and is
# taken to need what it needs over two, E2B what E4B needs by its layers (35 of 42). With fewer sequences vLLM captures
# fewer sizes, and each is taken to need the same.
GRAPHS_MIB = {
    ("31B", 2): 1505,
    ("31B", 4): 1505,
    ("E4B", 1): 727,
    ("E2B", 1): 606,
}
GRAPHS_MIB_ELSEWHERE = 727


@dataclass(frozen=True)
class Need:
    """Bytes one engine takes from one GPU, by what they are for, and what is left for its KV cache."""

    context: int
    weights: int
    profile: int
    kv_cache: int
    graphs: int

    @property
    def total(self) -> int:
        return self.context + self.weights + self.profile + self.kv_cache + self.graphs


class UnknownModel(ValueError):
    """A checkpoint, or a way to split it, that no published figure covers."""


def model_of(repository: str) -> Model:
    try:
        return MODELS[repository]
    except KeyError:
        raise UnknownModel(
            f"the lab knows no published memory figures for the checkpoint {repository!r}; it knows "
            + ", ".join(MODELS)
        ) from None


def draw(between: tuple[float, float], *of: str) -> float:
    """A number between two, always the same for the same words and seed, and spread evenly over others."""
    seed = hashlib.sha256("\n".join(of).encode()).digest()
    low, high = between
    return low + (high - low) * int.from_bytes(seed[:6], "big") / 256**6


def weights_bytes(repository: str, tensor_parallel_size: int, seed: str = DEFAULT_SEED) -> int:
    load = model_of(repository).load_gib
    if tensor_parallel_size not in load:
        raise UnknownModel(
            f"the lab knows no published load of {repository} over {tensor_parallel_size} GPUs; it knows: "
            + ", ".join(str(size) for size in load)
        )
    return int((load[tensor_parallel_size] + draw(LOAD_SLACK_GIB, "load", repository, seed)) * GIB)


def profile_bytes(repository: str, max_num_seqs: int, max_num_batched_tokens: int, seed: str = DEFAULT_SEED) -> int:
    """The same on every rank, as the ranks of an engine compute the same."""
    rows = min(max_num_seqs, max_num_batched_tokens)
    low, high = PROFILE_BASE_GIB
    # Nobody has published larger batches. Of what is profiled, activations grow with the tokens, and the rest does not.
    high *= max(1.0, max_num_batched_tokens / PUBLISHED_TOKENS)
    base = draw((low, high), "profile", repository, seed) * GIB
    return int(base + draw(LOGIT_BYTES, "logits", repository, seed) * rows * VOCABULARY)


def context_bytes(repository: str, tensor_parallel_size: int, gpu_uuid: str, seed: str = DEFAULT_SEED) -> int:
    """Context, NCCL and what nobody models, for each card: never less than half of what the reference host showed."""
    nominal = CONTEXT_MIB.get(tensor_parallel_size, 391)
    drawn = draw((nominal - OUTSIDE_MIB, nominal + OUTSIDE_MIB), "context", repository, gpu_uuid, seed)
    return max(int(drawn), nominal // 2) * MIB


def captured(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """How many CUDA graphs: one for each size up to twice the sequences, and again for those that decoding can have.

    vLLM logs 51 and 35 for 256 sequences, 35 and 19 for 128, 5 and 4 for 8.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    largest = min(2 * max_num_seqs, 512, max_num_batched_tokens)
    return sum(size <= largest for size in sizes) + sum(size <= min(largest, max_num_seqs) for size in sizes)


def graphs_bytes(
    repository: str, tensor_parallel_size: int, enforce_eager: bool, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    if enforce_eager:
        return 0
    of_256 = GRAPHS_MIB.get((model_of(repository).family, tensor_parallel_size), GRAPHS_MIB_ELSEWHERE) * MIB
    return of_256 * captured(max_num_seqs, max_num_batched_tokens) // captured(256, 2048)


def requested_bytes(cuda_total: int, gpu_memory_utilization: float) -> int:
    return math.ceil(cuda_total * gpu_memory_utilization)


def need(
    repository: str,
    *,
    gpu_uuid: str,
    cuda_total: int,
    tensor_parallel_size: int,
    gpu_memory_utilization: float,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    enforce_eager: bool,
    graphs_in_fraction: bool,
    seed: str = DEFAULT_SEED,
) -> Need:
    """What the engine will hold on this GPU once it serves. A negative KV cache is what vLLM finds out for itself."""
    weights = weights_bytes(repository, tensor_parallel_size, seed)
    profile = profile_bytes(repository, max_num_seqs, max_num_batched_tokens, seed)
    graphs = graphs_bytes(repository, tensor_parallel_size, enforce_eager, max_num_seqs, max_num_batched_tokens)
    if kv_cache_memory_bytes is not None:
        kv_cache = kv_cache_memory_bytes
    else:
        kv_cache = requested_bytes(cuda_total, gpu_memory_utilization) - weights - profile
        if graphs_in_fraction:
            kv_cache -= graphs
    context = context_bytes(repository, tensor_parallel_size, gpu_uuid, seed)
    return Need(context=context, weights=weights, profile=profile, kv_cache=kv_cache, graphs=graphs)


def kv_dtype(repository: str, kv_cache_dtype: str) -> str:
    return model_of(repository).auto_kv_dtype if kv_cache_dtype == "auto" else kv_cache_dtype
