# SPDX-License-Identifier: Apache-2.0
"""What the benchmark measures: the steps of each case, in sizes that fit an engine."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...inventory.measuring import CASES
from ...options import option
from .model import Case, Through

MARGIN_TOKENS = 64
"""Tokens of the context that stay free: vLLM's random prompts are made of text and may become some tokens longer."""
WARM_UP_TOKENS = 32
SWEEP_OUTPUT_TOKENS = 128
MOST_AT_ONCE = 128
"""Requests at once with which a sweep ends at the latest; our choice, far above what one GPU of 24 GiB serves well."""
DEFAULT_MAX_NUM_SEQS = 256
"""vLLM's own for GPUs below 70 GB (engine/arg_utils.py)."""
SHARED_PREFIX = (1024, 896, 32)
"""Tokens of the prompt, of the prefix that several prompts share, and of the answer: small calls of an agent."""
LONG_OUTPUT_TOKENS = 64
LONG_MOST_TOKENS = 32768
SOAK_AT_ONCE = 4
SOAK_ROUNDS = 16
"""Requests of one call of a soak by those at once: between two calls the engine idles for about four seconds."""


def _parse_tokens(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, such as 128,256,512") from None


@dataclass(frozen=True)
class Options:
    """What an operator may choose. The sizes of the protocol are the reference host's."""

    engine: tuple[str, ...] = option((), "may be repeated (default: all)", "NAME")
    case: tuple[Case, ...] = option(CASES, "may be repeated (default: all)", choices=CASES)
    through: Literal["engine", "gateway", "both"] = option(
        "both", "way of the requests (default: both)", choices=("engine", "gateway", "both")
    )
    soak_minutes: float = option(0.0, "also load each engine so long", "N")
    allow_load: bool = option(False, "also run while clients' requests are answered")
    limit_minutes: float = option(60.0, "longest time", "N")
    input_tokens: int = option(256, "of a prompt", "N")
    output_tokens: tuple[int, ...] = option(
        (128, 256, 512), "of the protocol (default: 128,256,512)", "N,...", type=_parse_tokens
    )
    requests: int = option(3, "of a step with one stream; one with several at once has twice as many", "N")
    reference: str = option("", "table of measurements to compare with (JSON)", "FILE")
    tolerance_percent: float = option(10.0, "how much runs may differ", "N")
    gate: Literal["warn", "fail"] = option("warn", "whether findings are a failure", choices=("warn", "fail"))
    asked_by: str = option("", "who asked, for the record", "TEXT")
    note: str = ""

    @property
    def ways(self) -> tuple[Through, ...]:
        return ("engine", "gateway") if self.through == "both" else (self.through,)


@dataclass(frozen=True)
class Step:
    """One call of `vllm bench serve`, or for a soak repeated calls."""

    case: Case
    input_tokens: int
    output_tokens: int
    concurrency: int
    requests: int
    prefix_tokens: int = 0
    """Tokens at the beginning of a prompt that several prompts share; 0 for prompts that share nothing."""
    for_s: float = 0.0
    seed: int = 0


def find_max_num_seqs(arguments: Sequence[str]) -> int:
    found = [re.fullmatch(r"--max[-_]num[-_]seqs=(\d+)", word) for word in arguments]
    return next((int(match[1]) for match in reversed(found) if match), DEFAULT_MAX_NUM_SEQS)


def build_steps(options: Options, *, max_model_len: int | None, max_num_seqs: int) -> list[Step]:
    """Return the steps of the cases, the warm-up first.

    Prompts are shortened where prompt and answer are more than the engine's context. Each step has a seed of its own,
    because equal prompts would come from the prefix cache.

    Args:
        max_model_len: the engine's context in tokens; None if it is not known
        max_num_seqs: requests that the engine runs at once
    """
    context = (max_model_len or LONG_MOST_TOKENS) - MARGIN_TOKENS

    def step(case: Case, tokens: int, answer: int, at_once: int, requests: int, prefix: int = 0) -> Step:
        answer = min(answer, context // 2)
        prompt = max(1, min(tokens, context - answer))
        return Step(case, prompt, answer, at_once, requests, min(prefix, prompt // 2 if prefix else 0))

    tokens = options.input_tokens
    steps = [step("warm-up", tokens, WARM_UP_TOKENS, 1, 2)]
    if "protocol" in options.case:
        steps += [step("protocol", tokens, answer, 1, options.requests) for answer in options.output_tokens]
    if "sweep" in options.case:
        answer, at_once = min(SWEEP_OUTPUT_TOKENS, max(options.output_tokens)), 1
        while at_once <= min(max_num_seqs, MOST_AT_ONCE):
            steps.append(step("sweep", tokens, answer, at_once, 2 * at_once))
            at_once *= 2
    if "long-context" in options.case:
        steps.append(step("long-context", LONG_MOST_TOKENS, min(LONG_OUTPUT_TOKENS, max(options.output_tokens)), 1, 1))
    if "shared-prefix" in options.case:
        prompt, prefix, answer = SHARED_PREFIX
        at_once = min(8, max_num_seqs)
        steps.append(step("shared-prefix", prompt, answer, at_once, 4 * at_once, prefix))
    if options.soak_minutes:
        at_once = min(SOAK_AT_ONCE, max_num_seqs)
        answer = min(SWEEP_OUTPUT_TOKENS, max(options.output_tokens))
        soak = step("soak", tokens, answer, at_once, SOAK_ROUNDS * at_once)
        steps.append(Step(**{**vars(soak), "for_s": 60 * options.soak_minutes}))
    return [Step(**{**vars(one), "seed": number}) for number, one in enumerate(steps)]
