# SPDX-License-Identifier: Apache-2.0
"""An engine's container as its supervisor handles it. No decision depends on a single error of Docker's API."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from ..system.docker import (
    Container,
    ContainerGone,
    DockerAway,
    DockerEngine,
    DockerRefused,
    DockerUnit,
    LogRecord,
    explain_unreachable_docker,
)
from ..system.process import KILLED_S, end_process
from .events import Events
from .journal import Reporter
from .lifecycle import EXTEND_BY_S
from .signatures import Explanation

REFUSED_S = 5.0
"""Seconds during which an error of Docker's API is regarded as temporary."""
REMOVE_WAIT_S = 120.0
"""Seconds that the removal of a container may take."""
PING_S = 3.0

T = TypeVar("T")


class LaunchFailed(Exception):
    """The container could not be started, or the previous one could not be removed."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__(explanation.reason)
        self.explanation = explanation


@dataclass
class ContainerControl:
    """Queries and commands about an engine's container. Threads share it."""

    docker: DockerEngine
    unit: Callable[[], DockerUnit | None]
    reporter: Reporter
    events: Events
    away: threading.Event = field(default_factory=threading.Event)
    """Set while Docker is away, by the thread that waits for the container's end."""
    _invocation: str | None = None
    _live_restore: bool | None = None

    def explain_unreachable(self, timeout_s: float = PING_S) -> str | None:
        return explain_unreachable_docker(self.docker.ping, self.unit(), timeout_s)

    def ask(self, question: Callable[[], T]) -> T:
        """Repeat a query that Docker refuses, for REFUSED_S seconds; raise only an error that persists."""
        deadline = time.monotonic() + REFUSED_S
        while True:
            try:
                return question()
            except ContainerGone:
                raise
            except DockerRefused:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(0.2)

    def find(self, name: str) -> Container | None:
        return self.ask(lambda: self.docker.find(name))

    def read_log(self, container_id: str, tail: int) -> list[LogRecord]:
        """Return the log so far, at most `tail` lines; none if it is unreadable, since no decision requires it."""
        try:
            return self.ask(lambda: list(self.docker.logs(container_id, after=None, follow=False, tail=tail)))
        except DockerRefused as error:
            self.reporter.journal.write(f"the log of container {container_id[:12]} cannot be read: {error}", 4)
            return []

    def remember_invocation(self) -> None:
        unit = self.unit()
        self._invocation = unit.invocation if unit is not None else None

    def has_docker_restarted(self) -> bool:
        """Return whether Docker is stopping, or was restarted since the container was started or attached to."""
        unit = self.unit()
        return unit is not None and self._invocation is not None and unit != DockerUnit(True, self._invocation)

    def refresh_live_restore(self) -> bool | None:
        """Return whether Docker keeps containers running while it is stopped, which may have been changed meanwhile."""
        with contextlib.suppress(DockerAway, DockerRefused):
            self._live_restore = self.ask(self.docker.live_restore)
        return self._live_restore

    def remove(self, container_id: str, *, stopping: bool = False) -> None:
        """Remove a container and wait until it is gone: `docker rm` returns early if another removal is in progress.

        With `stopping`, a signal to stop is no reason to give up. Raises LaunchFailed: the container was still there
        after REMOVE_WAIT_S seconds; Stopped: a signal arrived.
        """
        deadline = time.monotonic() + REMOVE_WAIT_S
        problem = ""
        while time.monotonic() < deadline:
            if not stopping:
                self.events.check_stop()
            try:
                if self.docker.find(container_id) is None:
                    return
                self.docker.remove(container_id)
                if self.docker.find(container_id) is None:
                    return
            except DockerRefused as error:
                problem = str(error)
            self.reporter.notifier.send(extend_s=EXTEND_BY_S)
            time.sleep(0.3)
        raise LaunchFailed(
            Explanation(
                "not_removable",
                f"a container could not be removed within {REMOVE_WAIT_S:.0f} s ({problem or 'still there'})",
                "A process that cannot be killed holds it, often inside the driver: look for state D in "
                "`ps -eo pid,stat,wchan,cmd` and at `journalctl -k`",
            )
        )

    def end(self, container: Container, timeout_s: float) -> None:
        """Stop the container within `timeout_s` seconds. If Docker cannot, end its main process directly."""
        try:
            if self.explain_unreachable() is None:
                self.docker.stop(container.id, timeout_s)
                return
        except ContainerGone:
            return
        except (DockerAway, DockerRefused) as error:
            self.reporter.journal.write(f"Docker cannot stop the container, its process gets the signal: {error}", 4)
        if container.pid > 0:
            end_process(container.pid, [(signal.SIGTERM, timeout_s), (signal.SIGKILL, KILLED_S)])
