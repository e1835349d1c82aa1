# SPDX-License-Identifier: Apache-2.0
"""Figures from vLLM's /metrics (versions 0.19 to 0.33), by pure functions that return None if a figure is missing."""

from __future__ import annotations

import re
from dataclasses import dataclass

_IN_WORK = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_KV_BLOCKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?num_gpu_blocks="(\d+)"', re.MULTILINE)
_FIGURES = re.compile(
    r"^vllm:(?:num_requests_(?:running|waiting)|kv_cache_usage_perc|prefix_cache_queries_total|num_preemptions_total|"
    r"prompt_tokens_total|generation_tokens_total|request_success_total|iteration_tokens_total_count)[ {].*$",
    re.MULTILINE,
)
"""Figures that vLLM's API server sets from what the engine's process reports after each step (v1/metrics/loggers.py).

The prompt's tokens are counted with the first token of the answer. Between two chunks of a long prefill the share of
the KV cache moves: the scheduler sends its statistics also for a step without output (v1/core/sched/scheduler.py).
"""


def read_figures(metrics: str) -> tuple[str, ...]:
    """Return the lines of /metrics of which at least one changes with each step of the engine."""
    return tuple(_FIGURES.findall(metrics))


def requests_in_work(metrics: str) -> int | None:
    """Return the number of running and waiting requests, summed over all label sets."""
    found = _IN_WORK.findall(metrics)
    try:
        return int(sum(float(value) for value in found)) if found else None
    except ValueError:
        return None


def kv_blocks(metrics: str) -> int | None:
    found = _KV_BLOCKS.search(metrics)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Totals:
    """Figures of an engine, summed over all label sets. None if the engine does not report one."""

    kv_use: float | None
    """Share of the KV cache in use now, from 0 to 1."""
    preemptions: int | None
    prefix_queries: int | None
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: int | None
    finished: int | None
    """Requests that ended with an answer."""
    tokens: int | None
    """Tokens of answers."""
    in_work: int | None
    """Requests that run or wait now."""


def read_totals(metrics: str) -> Totals:
    """Return the figures of the benchmark from the text of /metrics."""

    def add(name: str) -> float | None:
        found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})?\s+([0-9.eE+-]+)", metrics, re.MULTILINE)
        try:
            return sum(map(float, found)) if found else None
        except ValueError:
            return None

    def count(name: str) -> int | None:
        value = add(name)
        return None if value is None else int(value)

    return Totals(
        add("kv_cache_usage_perc"),
        count("num_preemptions_total"),
        count("prefix_cache_queries_total"),
        count("prefix_cache_hits_total"),
        count("request_success_total"),
        count("generation_tokens_total"),
        requests_in_work(metrics),
    )
