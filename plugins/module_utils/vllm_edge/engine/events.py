# SPDX-License-Identifier: Apache-2.0
"""Events on which a supervisor decides. Its watcher threads and its signal handler put them into one queue."""

from __future__ import annotations

from dataclasses import dataclass

from ..system.http import Answer


@dataclass(frozen=True)
class LogLine:
    """The container printed a line."""

    line: str


@dataclass(frozen=True)
class HealthSeen:
    """/health was asked."""

    answer: Answer
    metrics: str = ""
    """Text of /metrics, only with the first successful answer."""


@dataclass(frozen=True)
class DockerSeen:
    """The Docker Engine went away or is back."""

    away: bool


@dataclass(frozen=True)
class LogLost:
    """The log cannot be read any more, or can be read again."""

    why: str | None
    """Why it cannot be read; None if it can be read again."""


@dataclass(frozen=True)
class Died:
    """The container's main process has ended."""

    how: str
    """Who noticed: `docker` or `process` (the pidfd)."""


@dataclass(frozen=True)
class Signalled:
    """The supervisor received a signal."""

    number: int


Event = LogLine | LogLost | HealthSeen | DockerSeen | Died | Signalled
