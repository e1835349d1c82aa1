# SPDX-License-Identifier: Apache-2.0
"""Events on which a supervisor decides. Its watcher threads and its signal handler put them into one queue."""

from __future__ import annotations

import queue
import signal
import time
from dataclasses import dataclass

from ..system.http import Answer
from .usage import Usage


@dataclass(frozen=True)
class LogLine:
    line: str


@dataclass(frozen=True)
class HealthSeen:
    answer: Answer
    metrics: str = ""
    """Text of /metrics with a successful answer; empty if it could not be read."""


@dataclass(frozen=True)
class ProbeSeen:
    answer: Answer


@dataclass(frozen=True)
class UsageSeen:
    usage: Usage | None
    """None if it cannot be read."""


@dataclass(frozen=True)
class DockerSeen:
    away: bool


@dataclass(frozen=True)
class LogLost:
    why: str | None
    """Why it cannot be read; None if it can be read again."""


@dataclass(frozen=True)
class Died:
    """The container, or its main process, has ended."""


@dataclass(frozen=True)
class Signalled:
    number: int


Event = LogLine | LogLost | HealthSeen | ProbeSeen | UsageSeen | DockerSeen | Died | Signalled


class Stopped(Exception):
    """A signal to stop arrived during the launch."""


class Events(queue.SimpleQueue[Event]):
    """Queue of one supervisor's events, and the first signal that it received."""

    signal: int | None = None

    def install_signals(self) -> None:
        """Install the signal handlers: SIGTERM and SIGINT stop the engine, SIGABRT comes from systemd's watchdog.

        systemd leaves time after SIGABRT to report the reason and to end the container.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
            signal.signal(number, lambda received, _frame: self.receive(received))

    def receive(self, number: int) -> None:
        self.signal = self.signal or number
        self.put(Signalled(number))

    def take_all(self) -> list[Event]:
        """Return what has happened so far, such as to a container that has ended. A signal stays known (`signal`)."""
        return [self.get_nowait() for _ in range(self.qsize())]

    def check_stop(self) -> None:
        if self.signal is not None:
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Wait before the container runs; a signal ends the wait. Raises Stopped."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.check_stop()
            try:
                self.get(timeout=left)
            except queue.Empty:
                break
        self.check_stop()
