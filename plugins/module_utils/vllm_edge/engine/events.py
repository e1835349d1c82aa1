# SPDX-License-Identifier: Apache-2.0
"""Events that a supervisor decides on."""

from __future__ import annotations

from dataclasses import dataclass

from ..system.http import Answer


@dataclass(frozen=True)
class LogLine:
    line: str


@dataclass(frozen=True)
class HealthSeen:
    answer: Answer
    metrics: str = ""
    """The text of /metrics, with the first good answer."""


@dataclass(frozen=True)
class DockerSeen:
    away: bool


@dataclass(frozen=True)
class LogLost:
    """Why the log cannot be read; None when it can be read again."""

    why: str | None


@dataclass(frozen=True)
class Died:
    """The container's process is gone; `how` is who noticed."""

    how: str


@dataclass(frozen=True)
class Signalled:
    number: int


Event = LogLine | LogLost | HealthSeen | DockerSeen | Died | Signalled
