# SPDX-License-Identifier: Apache-2.0
"""Figures from vLLM's /metrics (versions 0.19 to 0.33), None if one is missing, and whether an engine advances."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..system.http import Answer

_IN_WORK = "num_requests_(?:running|waiting)"
_KV_BLOCKS = re.compile(r'^vllm:cache_config_info\{(?:[^}]*,)?num_gpu_blocks="(\d+)"', re.MULTILINE)
_FIGURES = re.compile(
    r"^vllm:(?:num_requests_(?:running|waiting)|kv_cache_usage_perc|prefix_cache_queries_total|num_preemptions_total|"
    r"prompt_tokens_total|generation_tokens_total|request_success_total|iteration_tokens_total_count)[ {].*$",
    re.MULTILINE,
)
"""Lines of which at least one changes with each step of the engine: vLLM's API server sets them from what the engine's
process reports after each step (v1/metrics/loggers.py).

The prompt's tokens are counted with the first token of the answer. Between two chunks of a long prefill the share of
the KV cache moves: the scheduler sends its statistics also for a step without output (v1/core/sched/scheduler.py).
"""


def read_figures(metrics: str) -> list[str]:
    return _FIGURES.findall(metrics)


def _add(metrics: str, names: str) -> float | None:
    """Return the sum of figures over all label sets; `names` is a pattern of their names without `vllm:`."""
    found = re.findall(rf"^vllm:{names}(?:\{{[^}}]*\}})?\s+([0-9.eE+-]+)", metrics, re.MULTILINE)
    try:
        return sum(map(float, found)) if found else None
    except ValueError:
        return None


def requests_in_work(metrics: str) -> int | None:
    """Return the number of running and waiting requests, summed over all label sets."""
    value = _add(metrics, _IN_WORK)
    return None if value is None else int(value)


def kv_blocks(metrics: str) -> int | None:
    found = _KV_BLOCKS.search(metrics)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Totals:
    """Figures of an engine, summed over all label sets. None if the engine does not report one."""

    kv_use: float | None = None
    """Share of the KV cache in use now, from 0 to 1."""
    preemptions: float | None = None
    prefix_queries: float | None = None
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hits: float | None = None
    finished: float | None = None
    """Requests that ended with an answer."""
    tokens: float | None = None
    """Tokens of answers."""
    in_work: float | None = None
    """Requests that run or wait now."""


_TOTALS = {
    "kv_use": "kv_cache_usage_perc",
    "preemptions": "num_preemptions_total",
    "prefix_queries": "prefix_cache_queries_total",
    "prefix_hits": "prefix_cache_hits_total",
    "finished": "request_success_total",
    "tokens": "generation_tokens_total",
    "in_work": _IN_WORK,
}


def read_totals(metrics: str) -> Totals:
    return Totals(**{name: _add(metrics, figure) for name, figure in _TOTALS.items()})


@dataclass
class Advance:
    """What is known about an engine's progress, judged from its /metrics. All times are seconds of one monotonic clock.

    vLLM's /health is 200 as long as its processes exist (v1/engine/async_llm.py, check_health): it stays 200 while the
    engine's process is stopped or one of its ranks hangs, and requests wait for ever.
    """

    limit_s: float
    """Seconds without progress after which an engine that has something to do stands still."""
    idle_probe_s: float
    """Seconds without progress after which an idle engine is asked for a token; 0 for never."""
    moved_at: float
    """When a figure of /metrics last moved, or an answer to a probe last arrived."""
    in_work: int | None = None
    """Requests that run or wait; None if /metrics does not tell now."""
    probed_at: float | None = None
    """When the probe was sent that has not been answered yet."""
    _figures: list[str] = field(default_factory=list)

    def on_metrics(self, metrics: str, now: float) -> None:
        self.in_work = requests_in_work(metrics)
        figures = read_figures(metrics)
        if self.in_work is not None and figures != self._figures:
            self.moved_at, self._figures = now, figures

    def take_probe(self, now: float) -> bool:
        """Return whether to send a probe now, and regard it as sent: nothing runs, and nothing has for idle_probe_s."""
        due = self.idle_probe_s > 0 and self.in_work == 0 and self.probed_at is None
        if not due or now - self.moved_at < self.idle_probe_s:
            return False
        self.probed_at = now
        return True

    def on_probe(self, answer: Answer, now: float) -> None:
        """Process the end of a probe. Any answer will do: an engine that refuses the request is not one that hangs."""
        self.probed_at = None
        if answer.status is not None:
            self.moved_at = now

    def find_standstill(self, now: float) -> float | None:
        """Return for how many seconds the engine has stood still; None if it advances, is idle or nothing is known."""
        if not self.in_work and (self.in_work is None or self.probed_at is None):
            return None
        still = self.get_still_s(now)
        return still if still >= self.limit_s else None

    def get_still_s(self, now: float) -> float:
        return now - max(self.moved_at, self.probed_at or self.moved_at)

    def describe_work(self) -> str:
        return f"{self.in_work} running or waiting" if self.in_work else "the supervisor's own, for one token"
