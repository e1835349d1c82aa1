# SPDX-License-Identifier: Apache-2.0
"""Configurations for the judge of the KV cache, and how an answer of vLLM is compared with ours.

Made from a fixed seed: published shapes of the families that the planner knows, and made-up ones that reach the rules
which those shapes do not. Available bytes lie around what one request needs, and around whole blocks.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ansible.module_utils.vllm_edge.planning.checkpoint import families
from ansible.module_utils.vllm_edge.planning.contract import (
    Arguments,
    Attention,
    DecoderLayer,
    Latent,
    Model,
    Speculation,
)
from ansible.module_utils.vllm_edge.planning.memory import kv_cache

sys.path.append(str(Path(__file__).parents[1] / "unit" / "planning"))

import checkpoints
import published
from kv_models import full, model, needed, sliding

SEED = 20261121
PER_SHAPE = 24
V3_2 = Latent(512, 64, 256, 132)
WINDOWS = (128, 512, 1000, 1024, 4096)
LENGTHS = (1, 17, 1000, 4096, 8192, 16384, 32768, 100000)
BATCHES = (256, 2048, 2496, 8192)
HYBRIDS = ("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-4B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B")
HYBRIDS += ("Qwen/Qwen3-Next-80B-A3B-Instruct",)
MAMBA = (published.NEMOTRON, "Nemotron-3-Nano, one group")


@dataclass(frozen=True)
class Configuration:
    family: str
    model: Model
    arguments: Arguments
    available_bytes: tuple[int, ...]
    """One for each pipeline rank."""

    def as_json(self) -> dict[str, Any]:
        """For the judge, in which nothing of this project is imported."""
        layers = (*self.model.layers, *(self.model.drafter.layers if self.model.drafter else ()))
        described = [
            {
                "index": index,
                "kv_heads": layer.kv_heads,
                "head_size": layer.head_size,
                "window": layer.window_tokens if layer.attention is Attention.SLIDING else None,
                "chunk": layer.window_tokens if layer.attention is Attention.CHUNKED else None,
                "latent": layer.attention is Attention.LATENT,
                "index_bytes": self.model.latent.index_bytes if self.model.latent else 0,
                "own_cache": layer.shares_with is None and layer.attention is not Attention.NONE,
                "state": layer.state is not None,
            }
            for index, layer in enumerate(layers)
        ]
        names = ("tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype", "max_model_len", "block_size")
        names += ("enable_prefix_caching", "mamba_ssm_cache_dtype", "flashinfer_states")
        return {
            "layers": described,
            "drafts": self.arguments.drafts,
            "linear": self.model.hybrid and (self.model.facts.config.get("text_config") or self.model.facts.config),
            **{name: getattr(self.arguments, name) for name in names},
            **({"kv_cache_dtype": kv_cache.DS_MLA} if self.arguments.ds_mla else {}),
            "max_num_batched_tokens": self.arguments.max_num_batched_tokens,
            "async_scheduling": self.arguments.async_scheduling is not False,
            "model_maximum": self.model.max_position_embeddings,
            "available_bytes": list(self.available_bytes),
        }


def configurations() -> tuple[Configuration, ...]:
    generator = random.Random(SEED)
    others = (
        (family, replace(model(layers, maximum=maximum), latent=V3_2 if family == "DeepSeek V3.2" else None))
        for family, layers, maximum in shapes(generator)
    )
    hybrids = [("Qwen3.5", families.interpret(published.facts(repo))) for repo in HYBRIDS]
    drafted = ((family, replace(each, drafter=families.interpret_drafting(each))) for family, each in hybrids)
    mamba = [("NemotronH", families.interpret(published.facts(repo))) for repo in MAMBA]
    made = itertools.chain(others, hybrids, drafted, mamba, mamba)
    return tuple(configuration for family, each in made for configuration in _around(generator, family, each))


def shapes(generator: random.Random) -> Iterator[tuple[str, list[DecoderLayer], int]]:
    """Family, layers and longest request of each shape."""
    for name in ("31b-bf16", "26b-bf16", "e4b", "e2b"):
        gemma = checkpoints.model(name)
        yield "Gemma 4", list(gemma.layers), gemma.max_position_embeddings
        # The same with another window, for what is rounded.
        window = generator.choice(WINDOWS)
        other = [replace(layer, window_tokens=layer.window_tokens and window) for layer in gemma.layers]
        yield "Gemma 4", other, gemma.max_position_embeddings
    # layers, KV heads, head size, window of 1b, 4b, 12b and 27b: one layer of six has full attention.
    for count, heads, size, window in ((26, 1, 256, 512), (34, 4, 256, 1024), (48, 8, 256, 1024), (62, 16, 128, 1024)):
        layers = [_layer(index, heads, size, None if index % 6 == 5 else window) for index in range(count)]
        yield "Gemma 3", layers, 32768 if heads == 1 else 131072
    for family, longest, sizes in (
        ("Llama 3", 131072, ((32, 8, 128), (80, 8, 128), (16, 8, 64), (28, 8, 128))),  # 8B, 70B, 3.2 1B and 3B
        ("Qwen3", 40960, ((28, 8, 128), (36, 8, 128), (64, 8, 128))),  # 0.6B, 8B, 32B
        ("Qwen3 MoE", 40960, ((48, 4, 128), (94, 4, 128))),  # 30B-A3B, 235B-A22B
    ):
        for count, heads, size in sizes:
            yield family, [_layer(index, heads, size) for index in range(count)], longest
    # 7B v0.1, whose layers all slide, 7B v0.3, Nemo, Small 24B
    for count, window in ((32, 4096), (32, None), (40, None), (40, None)):
        yield "Mistral", [_layer(index, 8, 128, window) for index in range(count)], 32768
    # layers, KV heads, head size, window and pattern; Qwen2 and Phi-4, Granite, Mixtral and MiniMax M2 are as Llama.
    for family, count, heads, size, window, pattern in (
        ("Gemma 2", 42, 8, 256, 4096, 2),
        ("Gemma 2", 46, 16, 128, 4096, 2),
        ("EXAONE 4", 64, 8, 128, 4096, 4),
        ("gpt-oss", 24, 8, 64, 128, 2),
        ("gpt-oss", 36, 8, 64, 128, 2),
        ("Phi-3 and 4", 32, 32, 96, 2047, 33),
        ("Phi-3 and 4", 32, 8, 128, 262144, 33),
        ("Phi-3 and 4", 40, 10, 128, 0, 1),
    ):
        layers = [_layer(index, heads, size, None if (index + 1) % pattern == 0 else window) for index in range(count)]
        yield family, layers, 131072 if family != "Gemma 2" else 8192
    for _ in range(12):
        yield "made up", _made_up(generator), generator.choice((4096, 40000, 131072))
    # After the others, whose configurations depend on the order.
    for chunk in (8192, 1024):
        kinds = [Attention.FULL if index % 4 == 3 else Attention.CHUNKED for index in range(48)]
        chunks = [
            DecoderLayer(index, kind, 8, 128, chunk if kind is Attention.CHUNKED else None)
            for index, kind in enumerate(kinds)
        ]
        yield "Llama 4", chunks, 1048576
    # V2-Lite, V2, V3 and Kimi K2
    for family, count in (("DeepSeek", 27), ("DeepSeek", 60), ("DeepSeek", 61), ("DeepSeek V3.2", 61)):
        yield family, [DecoderLayer(index, Attention.LATENT, 1, 576) for index in range(count)], 163840
    # Ministral 3 14B, Ministral 8B, whose window is as long as the longest request
    for count, window, longest in ((40, None, 262144), (36, 32768, 32768)):
        yield "Mistral", [_layer(index, 8, 128, window) for index in range(count)], longest
    # A chunk that is no multiple of a block, in every layer, or beside sliding and full ones.
    for others in ((), (full(0, 8, 128),), (full(0, 8, 128), sliding(0, 8, 128, 1000), sliding(0, 8, 128, 512))):
        kinds = (DecoderLayer(0, Attention.CHUNKED, 8, 128, 1000), *others)
        yield "Llama 4", [replace(kinds[index % len(kinds)], index=index) for index in range(24)], 131072
    # Qwen3-32B, Gemma 3 4B and gpt-oss-20b with a layer of EAGLE-3 after theirs, and Qwen3-32B with Qwen3-0.6B
    qwen = [_layer(index, 8, 128) for index in range(64)]
    gemma = [_layer(index, 4, 256, None if index % 6 == 5 else 1024) for index in range(34)]
    gpt = [_layer(index, 8, 64, None if index % 2 else 128) for index in range(24)]
    yield "drafted", [*qwen, _layer(64, 8, 80)], 40960
    yield "drafted", [*gemma, _layer(34, 8, 128)], 131072
    yield "drafted", [*gpt, _layer(24, 8, 64)], 131072
    yield "drafted", [*qwen, *(_layer(64 + index, 8, 128) for index in range(28))], 40960


def differences(configuration: Configuration, told: Mapping[str, Any], version: str) -> list[str]:
    """What our port says otherwise than vLLM, each as `name: ours, vLLM's`."""
    made, arguments = configuration.model, configuration.arguments
    try:
        ours = kv_cache.capacity(made, arguments, configuration.available_bytes, version)
        groups = kv_cache.groups(made, arguments, version)
    except kv_cache.UnsupportedKvCache as error:
        return [] if {"error", "refused"} & told.keys() else [f"refused: {error}, nothing"]
    if "error" in told:
        return [f"refused: nothing, {told['error']}"]
    if "refused" in told:
        return [] if ours.needed_bytes > ours.available_bytes else ["verdict: fits, refused"]
    ranks = [kv_cache.select_layers(made, arguments, rank) for rank in range(arguments.pipeline_parallel_size)]
    checks = told["checks"]
    # What is kept back before the check, in releases that do.
    kept = [have - check["available"] for have, check in zip(configuration.available_bytes, checks, strict=True)]
    needs = [check["needed"] + rest for check, rest in zip(checks, kept, strict=True)]
    held = [[[layer for layer in group.layers if layer in rank] for group in groups] for rank in ranks]
    poorest = next(
        index
        for index, of_groups in enumerate(held)
        if ours.available_bytes == configuration.available_bytes[index]
        and [group.layers for group in ours.groups] == [len(layers) for layers in of_groups]
    )
    compared = {
        "layers of groups": (held, [[group["layers"] for group in of_rank] for of_rank in told["groups"]]),
        "groups": ([_described(group) for group in ours.groups], [_told(group) for group in told["groups"][poorest]]),
        "blocks": ([ours.blocks], told["blocks"]),
        "tokens": (ours.tokens, told["tokens"]),
        "concurrency": (ours.max_concurrency, told["concurrency"]),
        "needed bytes": (needed(made, arguments, version), max(needs)),
        "needed bytes of the poorest rank": (ours.needed_bytes, needs[poorest]),
        "verdict": (
            "refused" if ours.needed_bytes > ours.available_bytes else "fits",
            "refused" if any(check["refusal"] for check in checks) else "fits",
        ),
        "longest request": (ours.max_context_tokens, min(check["longest"] for check in checks)),
        "estimated length in the refusal": _estimates(configuration, checks, version),
    }
    return [f"{name}: {mine}, {theirs}" for name, (mine, theirs) in compared.items() if mine != theirs]


def _estimates(configuration: Configuration, checks: Sequence[Mapping[str, Any]], version: str) -> tuple[Any, Any]:
    """The length that each rank's refusal names; none for what has no memory at all, or not for one token."""
    mine, theirs = [], []
    for rank, check in enumerate(checks):
        named = re.search(r"estimated maximum model length is (\d+)", check["refusal"])
        theirs.append(int(named[1]) if named else None)
        if named:
            ours = kv_cache.capacity(configuration.model, configuration.arguments, _alone(configuration, rank), version)
            mine.append(ours.max_context_tokens)
        else:
            mine.append(None)
    return mine, theirs


def _alone(configuration: Configuration, rank: int) -> list[int]:
    """As if only this rank were short of memory."""
    return [size if index == rank else 2**50 for index, size in enumerate(configuration.available_bytes)]


def _described(group: Any) -> tuple[Any, ...]:
    sliding = group.attention is Attention.SLIDING
    return (group.layers, sliding, group.block_size_tokens, group.page_bytes, group.blocks_per_request)


def _told(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        len(group["layers"]),
        *(group[key] for key in ("sliding", "block_size", "page_bytes", "blocks_per_request")),
    )


def _around(generator: random.Random, family: str, made: Model) -> Iterator[Configuration]:
    """Configurations of one shape whose memory is about what one request needs, or about whole blocks."""
    for _ in range(PER_SHAPE):
        ranks = generator.choice((1, 1, 2))
        arguments = Arguments(
            tensor_parallel_size=generator.choice((1, 2, 4)),
            pipeline_parallel_size=ranks,
            max_model_len=min(generator.choice(LENGTHS), made.max_position_embeddings),
            max_num_batched_tokens=generator.choice(BATCHES),
            kv_cache_dtype=generator.choice(("bfloat16", "fp8")),
            block_size=generator.choice((16, 16, 16, 32, 64, 128)),
            async_scheduling=generator.choice((None, None, False)),
        )
        if made.latent and arguments.kv_cache_dtype == "fp8":
            arguments = replace(arguments, ds_mla=generator.choice((False, True)))
        if made.hybrid:
            arguments = replace(
                arguments,
                enable_prefix_caching=generator.choice((True, False)),
                mamba_ssm_cache_dtype=generator.choice(("auto", "auto", "float16")),
                flashinfer_states=generator.choice((True, False)),
            )
        if made.drafter:
            arguments = replace(arguments, speculation=Speculation("mtp", generator.choice((1, 2, 3, 5))))
            arguments, ranks = replace(arguments, pipeline_parallel_size=1), 1
        try:
            much = kv_cache.capacity(made, arguments, 2**40, "0.33.0")
            # The release keeps one block back.
            one_block = much.needed_bytes // (sum(group.blocks_per_request for group in much.groups) + 1)
            least = needed(made, arguments, "0.33.0")
        except kv_cache.UnsupportedKvCache:
            one_block = least = 2**20
        around = (
            least,
            least - 1,
            least - one_block,
            least + one_block,
            generator.randrange(0, least),
            generator.randrange(least, 8 * least),
            generator.randrange(1, 5000) * one_block - generator.choice((0, 1)),
            generator.choice((0, 1)),
        )
        weights = (3, 3, 1, 1, 3, 6, 6, 1)
        sizes = generator.choices(around, weights, k=ranks)
        if generator.random() < 0.5:
            sizes = sizes[:1] * ranks
        yield Configuration(family, made, arguments, tuple(sizes))


def _layer(index: int, kv_heads: int, head_size: int, window: int | None = None) -> DecoderLayer:
    return sliding(index, kv_heads, head_size, window) if window else full(index, kv_heads, head_size)


def _made_up(generator: random.Random) -> list[DecoderLayer]:
    """Up to three kinds of layers, in an order without a pattern, some with pages that do not divide each other."""
    kinds = [
        (generator.choice((1, 2, 4, 6)), generator.choice((64, 96, 128, 256)), generator.choice((None, *WINDOWS)))
        for _ in range(generator.choice((1, 2, 2, 3)))
    ]
    counts = [generator.randrange(2, 13) for _ in kinds]
    order = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    generator.shuffle(order)
    return [_layer(index, *kind) for index, kind in enumerate(order)]
