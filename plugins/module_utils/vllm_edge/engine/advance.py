# SPDX-License-Identifier: Apache-2.0
"""Forward progress of a serving engine, judged from its /metrics without any input or output.

vLLM's /health is 200 as long as its processes exist (v1/engine/async_llm.py, check_health): it stays 200 while the
engine's process is stopped or one of its ranks hangs, and requests wait for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..system.http import Answer
from .metrics import read_figures, requests_in_work


@dataclass
class Advance:
    """What is known about an engine's progress. All times are seconds of one monotonic clock."""

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
    _figures: tuple[str, ...] = ()

    def on_metrics(self, metrics: str, now: float) -> None:
        """Process the text of /metrics; empty if it could not be read."""
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
        """Return the seconds since the engine last made progress, or since it was asked for a token."""
        return now - max(self.moved_at, self.probed_at or self.moved_at)

    def describe_work(self) -> str:
        return f"{self.in_work} running or waiting" if self.in_work else "the supervisor's own, for one token"
