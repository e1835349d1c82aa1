# SPDX-License-Identifier: Apache-2.0
"""Search for changes with which an engine that does not fit would fit, the cheapest first, and what each costs.

A change is a set of keys of serving_engines. Each is planned as if the operator had written it, so an operator who
follows it gets a plan that fits. It is as mild as possible: with more requests, tokens or context it would not fit.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, IntEnum
from typing import Any

from .contract import Fix, Verdict
from .decode import TOGETHER_REQUESTS, estimate
from .feasibility import Engine
from .memory.kv_cache import ELEMENT_BYTES
from .memory.vllm_versions import max_num_batched_tokens
from .outcome import Outcome, compute_outcome, derive_kv_cache_bytes

CONTEXT_STEP_TOKENS = 1024
"""A suggested context is a multiple of this."""
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)
FP8_SINCE = (8, 9)
"""Compute capability of an FP8 KV cache, as in `feasibility`; it is not suggested where that is not known."""
FEWEST_BATCHED_TOKENS = 512
"""With fewer, prompts would take much longer; our choice."""
MOST_PAIRS = 4
OF_MEMORY = frozenset(
    {Verdict.NOT_FREE, Verdict.OOM_WEIGHTS, Verdict.NO_KV, Verdict.KV_BELOW_MAX_MODEL_LEN, Verdict.OOM_WARMUP}
)
TEXT_ONLY = {"image": 0, "video": 0, "audio": 0}

Settings = Mapping[str, Any]
"""Keys of serving_engines and their new values."""
Levels = Sequence[Settings]
"""Settings of one kind, the mildest first."""


Search = Enum("Search", "NOWHERE SAME_GPUS EVERYWHERE")
"""Where changes are looked for."""
Loss = IntEnum("Loss", "NOTHING REQUESTS PROMPTS QUALITY MODALITIES SPEED GPUS CONTEXT")
"""What a change costs, the cheapest first."""


def find_fixes(
    described: Settings, engine: Engine, outcome: Outcome, parse: Callable[..., Engine], search: Search
) -> tuple[Fix, ...]:
    """Return changes with which the engine fits: single ones, and several at once where no single one does.

    The cheapest is first; one that loses more than half of the context or of the speed comes after all that do not,
    and so does one that leaves fewer than 8 requests at once, or needs GPUs that the host does not have.

    Args:
        described: the engine as in serving_engines.
        parse: makes an engine of such a mapping, and of `gpus` and `free` other than the host's.
    """
    if search is Search.NOWHERE:
        return ()
    tries = _Tries(described, engine, outcome, parse)
    start: Settings = {}
    for correction in () if outcome.verdict in OF_MEMORY else _list_corrections(engine, outcome):
        verdict = tries.judge(correction)
        if verdict is Verdict.FITS:
            tries.add(correction)
        elif verdict in OF_MEMORY and not start:
            start = correction
    if not tries.found and (start or outcome.verdict in OF_MEMORY):
        _change_in_place(tries, start)
    if search is Search.EVERYWHERE:
        _change_gpus(tries, start)
    return tuple(fix for _, fix in sorted(tries.found, key=lambda found: found[0]))


class _Tries:
    """Attempts to plan an engine with other settings, and the changes that were found."""

    def __init__(self, described: Settings, engine: Engine, outcome: Outcome, parse: Callable[..., Engine]) -> None:
        self.described, self.engine, self.outcome, self.parse = described, engine, outcome, parse
        self.found: list[tuple[tuple[bool, Loss], Fix]] = []
        """Each with its place in the order: whether most of something is lost, and the dearest of what is lost."""

    def attempt(self, settings: Settings) -> tuple[Engine, Outcome]:
        """Plan the engine with other settings. Slots that the host does not have are GPUs like the engine's first."""
        changed = {**self.described, **settings}
        added = [self.engine.gpu] * (max(changed["gpus"]) + 1 - len(self.engine.gpus))
        free = [*self.engine.free, *(gpu.cuda_total_bytes for gpu in added)]
        engine = self.parse(changed, gpus=[*self.engine.gpus, *added], free=free)
        return engine, compute_outcome(engine, "most")

    def judge(self, *settings: Settings) -> Verdict:
        return self.attempt(_merge(settings))[1].verdict

    def fits(self, *settings: Settings) -> bool:
        return self.judge(*settings) is Verdict.FITS

    def add(self, settings: Settings) -> bool:
        """Add a change that fits. Return whether it keeps the context, and most of everything else."""
        engine, outcome = self.attempt(settings)
        losses = list(_list_losses(self.engine, self.outcome, engine, outcome))
        place = any(most for _, most, _ in losses), max((loss for loss, _, _ in losses), default=Loss.NOTHING)
        change = ", ".join(f"{key}: {json.dumps(value).replace(chr(34), '')}" for key, value in settings.items())
        costs, at_once = tuple(words for _, _, words in losses), outcome.kv.max_concurrency if outcome.kv else 0.0
        fix = Fix(change, settings, costs, engine.max_model_len, at_once, _estimate_speed(engine, outcome))
        self.found.append((place, fix))
        return place < (False, Loss.CONTEXT)


def _merge(settings: Sequence[Settings]) -> Settings:
    return {key: value for each in settings for key, value in each.items()}


def _list_corrections(engine: Engine, outcome: Outcome) -> Iterator[Settings]:
    """Yield settings for an engine that vLLM refuses whatever memory there is."""
    key, _, value = outcome.fix.partition(": ")
    if key in ("max_model_len", "max_num_batched_tokens", "dtype", "kv_cache_dtype"):
        yield {key: int(value) if value.isdigit() else value}
    elif engine.arguments.kv_cache_dtype != "auto":
        yield {"kv_cache_dtype": "auto"}
    if engine.model.experts and not engine.arguments.enable_expert_parallel:
        yield {"extra_args": [*engine.extra_args, "--enable-expert-parallel"]}


def _change_in_place(tries: _Tries, start: Settings) -> None:
    """Add changes that need no other GPUs, each together with `start`."""
    kinds = [levels for levels in _list_kinds(*tries.attempt(start)) if levels]
    possible = {*OF_MEMORY, Verdict.FITS}
    if tries.judge(start, *(levels[-1] for levels in kinds)) not in possible:
        # One kind is refused, whatever memory there is.
        kinds = [levels for levels in kinds if tries.judge(start, levels[-1]) in possible]
    if not tries.fits(start, *(levels[-1] for levels in kinds)):
        return
    singles = [_find_mildest(tries, start, [levels]) for levels in kinds]
    good = [bool(settings and tries.add(settings)) for settings in singles]
    # Two cheaper changes come before a dearer one; the context, which is the dearest, is in no pair.
    cheaper = kinds[: good.index(True)] if True in good else kinds[:-1]
    pairs = (_find_mildest(tries, start, pair) for pair in itertools.combinations(cheaper, 2))
    for settings in itertools.islice(filter(None, pairs), MOST_PAIRS):
        tries.add(settings)
    if not tries.found and (together := _find_mildest(tries, start, [({}, *levels) for levels in kinds])):
        tries.add(together)


def _find_mildest(tries: _Tries, start: Settings, kinds: Sequence[Levels]) -> Settings | None:
    """Return the mildest settings of these kinds that fit together, the dearest kind as mild as possible; None if not
    even the strongest fit."""
    chosen = [levels[-1] for levels in kinds]
    if not tries.fits(start, *chosen):
        return None
    for number, levels in reversed(list(enumerate(kinds))):
        rest = [start, *chosen[:number], *chosen[number + 1 :]]
        milder = bisect.bisect_left(levels[:-1], True, key=lambda level: tries.fits(*rest, level))
        chosen[number] = levels[milder]
    return _merge([start, *chosen])


def _list_kinds(engine: Engine, outcome: Outcome) -> Iterator[Levels]:
    """Yield the settings that may make an engine smaller on the same GPUs, the kinds in the order of Loss."""
    model, now = engine.model, engine.arguments
    if now.gpu_memory_utilization is not None:
        yield _list_shares(engine, outcome, now.gpu_memory_utilization)
    if now.kv_cache_memory_bytes is not None and (derived := derive_kv_cache_bytes(engine, outcome.ranks)):
        yield [{"kv_cache_memory_bytes": derived}]
    powers = (2**power for power in range(9, -1, -1))
    yield [{"max_num_seqs": fewer} for fewer in powers if fewer < engine.max_num_seqs]
    yield _list_batches(engine)
    capability = engine.gpu.compute_capability
    if ELEMENT_BYTES.get(engine.kv_cache_dtype, 1) > 1 and capability and capability >= FP8_SINCE:
        yield [{"kv_cache_dtype": "fp8"}]
    if model.multimodal and not now.language_model_only:
        yield [{"limit_mm_per_prompt": TEXT_ONLY}]
    if not now.enforce_eager:
        yield [{"enforce_eager": True}]
    longest = (engine.max_model_len - 1) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
    yield [{"max_model_len": tokens} for tokens in range(longest, 0, -CONTEXT_STEP_TOKENS)]


def _list_shares(engine: Engine, outcome: Outcome, now: float) -> Levels:
    """Return the largest share that is free if the stated one is not, otherwise larger ones, up to one that leaves the
    margin free on every GPU. The CUDA context comes on top of it, and with some releases graphs do."""
    smaller = outcome.verdict is Verdict.NOT_FREE
    beyond = max(
        (
            rank.fixed_bytes - rank.weights.bytes - rank.overhead.bytes - rank.graphs_kept.bytes
            for rank in outcome.ranks
        ),
        default=0,
    )
    kept = beyond if smaller else beyond + engine.margin_bytes
    largest = min((engine.free[slot] - kept) / engine.gpus[slot].cuda_total_bytes for slot in engine.slots)
    end = math.floor(largest * 100)
    hundredths = range(max(end, 1), end + 1) if smaller else range(math.floor(now * 100) + 1, end + 1)
    return [{"gpu_memory_utilization": share / 100} for share in hundredths]


def _list_batches(engine: Engine) -> Levels:
    """Return fewer tokens of a batch, down to what vLLM takes by default on a small GPU if the model has an encoder.

    vLLM refuses fewer than max_num_seqs (0.32.0 config/scheduler.py:328), and fewer than an image or video has that it
    may not divide (v1/core/encoder_cache_manager.py:346).
    """
    now, tokens = engine.arguments, engine.max_num_batched_tokens
    usual = replace(now, max_num_batched_tokens=None, default_max_num_batched_tokens=None, max_num_seqs=None)
    encodes = engine.model.multimodal and not now.language_model_only
    least = max_num_batched_tokens(engine.model, usual, engine.release.version) if encodes else FEWEST_BATCHED_TOKENS
    least = max(least, now.max_num_seqs or 0)
    halves = [half for power in range(1, 8) if (half := tokens >> power) > least]
    return [{"max_num_batched_tokens": fewer} for fewer in (*halves, *([least] if least < tokens else []))]


def _change_gpus(tries: _Tries, start: Settings) -> None:
    """Add the first way to distribute the engine over the host's GPUs that fits; if nothing fits, that together with
    other changes, and then more GPUs than there are."""
    engine = tries.engine
    others = set(range(len(engine.free))) - {*engine.slots, *engine.others}
    slots = (*engine.slots, *sorted(others, key=lambda slot: (-engine.free[slot], slot)))
    if spread := next((each for each in _list_spreads(engine, slots) if tries.fits(start, each)), None):
        tries.add(_merge([start, spread]))
    widest = max(size for size in TENSOR_PARALLEL_SIZES if size <= len(slots))
    if not tries.found and widest > engine.arguments.tensor_parallel_size:
        _change_in_place(tries, _merge([start, _spread(engine, slots, widest, 1)]))
    for size in TENSOR_PARALLEL_SIZES:
        added = _spread(engine, (*slots, *range(len(engine.free), len(engine.free) + size)), size, 1)
        if not tries.found and size > len(slots) and tries.fits(start, added):
            tries.add(_merge([start, added]))


def _list_spreads(engine: Engine, slots: Sequence[int]) -> Iterator[Settings]:
    """Yield the same division on emptier GPUs, tensor parallelism alone over as many GPUs as now, over more and over
    fewer, and a pipeline over as many as now and more."""
    had, stages = len(engine.slots), engine.arguments.pipeline_parallel_size
    emptiest = sorted(slots, key=lambda slot: -engine.free[slot])[:had]
    if set(emptiest) != set(engine.slots):
        yield {"gpus": sorted(emptiest)}
    more = [size for size in TENSOR_PARALLEL_SIZES if size > had or (size == had and stages > 1)]
    fewer = [size for size in reversed(TENSOR_PARALLEL_SIZES) if size < had]
    pipelines = itertools.product(reversed(TENSOR_PARALLEL_SIZES), range(2, len(slots) + 1))
    longer = sorted((each for each in pipelines if had <= math.prod(each)), key=math.prod)
    for size, number in (*((size, 1) for size in (*more, *fewer)), *longer):
        if size * number <= len(slots):
            yield _spread(engine, slots, size, number)


def _spread(engine: Engine, slots: Sequence[int], size: int, stages: int) -> Settings:
    taken = sorted(slots[: size * stages])
    found: dict[str, Any] = {"tensor_parallel_size": size}
    if stages > 1 or engine.arguments.pipeline_parallel_size > 1:
        found["pipeline_parallel_size"] = stages
    return found if taken == sorted(engine.slots) else found | {"gpus": taken}


def _list_losses(was: Engine, before: Outcome, engine: Engine, after: Outcome) -> Iterator[tuple[Loss, bool, str]]:
    """Yield what an engine loses by a change, whether that is most of it, and both in words."""
    had, has = was.max_num_seqs, engine.max_num_seqs
    if has < had:
        yield Loss.REQUESTS, has < min(had, TOGETHER_REQUESTS), f"at most {has:,} instead of {had:,} requests at once"
    had, has = was.max_num_batched_tokens, engine.arguments.max_num_batched_tokens or was.max_num_batched_tokens
    if has < had:
        yield Loss.PROMPTS, False, f"long prompts in steps of {has:,} instead of {had:,} tokens"
    if engine.kv_cache_dtype.startswith("fp8") and not was.kv_cache_dtype.startswith("fp8"):
        scaled = str(engine.model.quantization.kv_cache_dtype).startswith("fp8")
        small = "small, and the checkpoint has scales" if scaled else "small, not measured here"
        yield Loss.NOTHING if scaled else Loss.QUALITY, False, f"quality: {small}"
    if engine.arguments.language_model_only and not was.arguments.language_model_only:
        yield Loss.MODALITIES, False, "no images, videos or audio"
    slow, fast = _estimate_speed(engine, after), _estimate_speed(was, before)
    if slow and fast and round(slow, 1) < round(fast, 1):
        yield Loss.SPEED, slow * 2 < fast, f"{slow:.1f} instead of {fast:.1f} tok/s"
    if (missing := max(engine.slots) + 1 - len(was.gpus)) > 0:
        yield Loss.GPUS, True, f"{missing} more {engine.gpu.name or 'GPUs'} than there are"
    elif len(engine.slots) > len(was.slots):
        yield Loss.GPUS, False, f"{len(engine.slots)} GPUs instead of {len(was.slots)}"
    had, has = was.max_model_len, engine.max_model_len
    if has < had:
        yield Loss.CONTEXT, has * 2 < had, f"{has:,} instead of {had:,} tokens of context"


def _estimate_speed(engine: Engine, outcome: Outcome) -> float | None:
    weights = [rank.loaded for rank in outcome.ranks]
    speed = estimate(engine.model, engine.arguments, weights, engine.bandwidth_bytes_per_s)
    return speed.mid if speed else None
