# SPDX-License-Identifier: Apache-2.0
"""Threads that observe a running engine: log, `docker wait`, main process, /health. They report and do not decide."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..system.docker import Container, ContainerGone, DockerAway, DockerRefused
from ..system.http import Answer
from ..system.threads import Worker
from .api_socket import open_to_gateway
from .config import EngineConfig
from .container import ContainerControl
from .events import Died, DockerSeen, Event, Events, HealthSeen, LogLine, LogLost, ProbeSeen, UsageSeen
from .journal import OWN_MARK, OWN_PROBE, Journal
from .usage import read_usage

ASK_AGAIN_S = 1.0
"""Seconds before Docker is asked again after an error of its API."""
USAGE_S = 5.0
"""Most seconds between two looks at what a loading container reads and computes."""
OPEN_S = 0.2
"""Seconds between two looks for the engine's socket."""
PROBE_S = 86_400.0
"""Seconds to wait for the token of a probe: whether the engine stands still is judged without its end."""


def compute_health_interval(watchdog_s: float | None) -> float:
    """Return the seconds between two requests of /health.

    It is a third of WatchdogSec: one lost answer does not end an engine, two in a row may.
    """
    return 10.0 if watchdog_s is None else min(10.0, max(0.2, watchdog_s / 3))


@dataclass
class Watchers:
    """The watcher threads of one engine. They are daemon threads that end when `closing` is set."""

    config: EngineConfig
    control: ContainerControl
    journal: Journal
    events: Events
    watchdog_s: float | None
    health: Callable[[str, float], Answer]
    ask: Callable[..., Answer]
    closing: threading.Event = field(default_factory=threading.Event)
    served: threading.Event = field(default_factory=threading.Event)
    """Set once /health has answered."""
    last_stamp: str | None = None
    """Docker's time stamp of the newest log line."""
    _follower: Worker | None = None
    _log_ended: threading.Event = field(default_factory=threading.Event)
    """Set while no line is on its way: the log is at its end, or Docker broke it off."""

    def start(self, container: Container) -> None:
        self.control.remember_invocation()
        self._follower = self._thread(self._follow_log, container.id)
        self._thread(self._wait_for_end, container.id)
        if container.pid > 0:
            self._thread(self._watch_process, container.pid)
            self._thread(self._watch_usage, container.id)
        self._thread(self._probe)
        if self.config.socket is not None:
            self._thread(self._open_socket, self.config.socket)

    def wait_for_log(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for the end of the log; if Docker broke it off, half a second for more of it."""
        if self._follower is not None and self._log_ended.wait(wait_s):
            self._follower.join(min(wait_s, 0.5))

    def _tell(self, event: Event) -> None:
        """Report an event, unless the supervisor has done with the container: another one may run by now."""
        if not self.closing.is_set():
            self.events.put(event)

    def _thread(self, target: Callable[..., None], *arguments: object) -> Worker:
        """Run a watcher. If it meets an error that nobody expected, the journal says so and it begins again."""

        def watch() -> None:
            while True:
                try:
                    return target(*arguments)
                except Exception as error:
                    text = (
                        f"{target.__name__} met an unexpected error and begins again: {type(error).__name__}: {error}"
                    )
                    self.journal.write(text, 3)
                if self.closing.wait(ASK_AGAIN_S):
                    return None

        return Worker(watch)

    def _follow_log(self, container_id: str) -> None:
        """Report log lines. After a restart of Docker each connection continues after the last time stamp."""
        while not self.closing.is_set():
            self._log_ended.clear()
            try:
                for record in self.control.docker.logs(container_id, after=self.last_stamp, follow=True, tail=None):
                    self.last_stamp = record.at
                    if OWN_PROBE.search(record.line):
                        continue
                    self.journal.write_engine_line(record.line)
                    self._tell(LogLine(record.line))
                # The stream ends if the container or Docker ends. Check Docker's unit before touching the socket again.
                if self.control.explain_unreachable() is None:
                    found = self.control.docker.find(container_id)
                    if found is None or not found.running:
                        return
            except ContainerGone:
                return
            except DockerRefused as error:
                self._tell(LogLost(str(error)))
                self._wait_until_log_is_back(container_id)
            except DockerAway:
                pass
            finally:
                self._log_ended.set()
            self.closing.wait(0.5)
            self._wait_until_docker_is_back()

    def _wait_until_log_is_back(self, container_id: str) -> None:
        self._log_ended.set()
        while not self.closing.wait(ASK_AGAIN_S):
            if self.control.explain_unreachable() is not None:
                continue
            try:
                list(self.control.docker.logs(container_id, after=None, follow=False, tail=1))
            except ContainerGone:
                return
            except (DockerAway, DockerRefused):
                continue
            self._tell(LogLost(None))
            return

    def _wait_until_docker_is_back(self) -> None:
        while not self.closing.is_set() and self.control.explain_unreachable() is not None:
            self.closing.wait(1.0)

    def _wait_for_end(self, container_id: str) -> None:
        """Report the container's end, and when Docker goes away and comes back.

        Docker's statement that the container is not running counts as its end. An error of Docker's API does not:
        meanwhile `_watch_process` observes the process.
        """
        said = ""
        while not self.closing.is_set():
            try:
                if self.control.explain_unreachable() is not None:
                    raise DockerAway
                found = self.control.docker.find(container_id)
                if found is None or not found.running:
                    break
                if self.control.away.is_set():
                    self.control.remember_invocation()
                    self.control.away.clear()
                    self._tell(DockerSeen(away=False))
                self.control.docker.wait(container_id)
            except ContainerGone:
                break
            except DockerRefused as error:
                if str(error) != said:
                    self.journal.write(f"Docker does not tell the container's state and is asked again: {error}", 4)
                said = str(error)
                self.closing.wait(ASK_AGAIN_S)
            except DockerAway:
                if not self.control.away.is_set():
                    self.control.away.set()
                    self._tell(DockerSeen(away=True))
                self.closing.wait(0.5)
                self._wait_until_docker_is_back()
        self._tell(Died())

    def _watch_process(self, pid: int) -> None:
        """Report the end of the container's main process, which the kernel tells even while Docker is away."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._tell(Died())
            return
        except OSError:
            return  # Docker is in another PID namespace, or the kernel is old: `docker wait` has to suffice
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)
        self._tell(Died())

    def _watch_usage(self, container_id: str) -> None:
        while not self.closing.wait(min(USAGE_S, self.config.stall_timeout_s / 5)) and not self.served.is_set():
            self._tell(UsageSeen(read_usage(container_id)))

    def _open_socket(self, place: Path) -> None:
        said = ""
        while not self.closing.is_set():
            try:
                open_to_gateway(place)
                return
            except FileNotFoundError:
                pass
            except OSError as error:
                if str(error) != said:
                    self.journal.write(f"the socket of the engine cannot be opened to the gateway: {error}", 4)
                said = str(error)
            self.closing.wait(OPEN_S)

    def _probe(self) -> None:
        interval = compute_health_interval(self.watchdog_s)
        while not self.closing.is_set():
            begin = time.monotonic()
            answer = self.health(self.config.url, self.config.health_timeout_s)
            self._tell(HealthSeen(answer, self._ask_metrics() if answer.ok else ""))
            if answer.ok:
                self.served.set()
            # Ask often while loading, so that READY is not late, and after a bad answer, to make up for a lost one.
            pause = interval if answer.ok else min(0.25, interval)
            self.closing.wait(max(0.05, pause - (time.monotonic() - begin)))

    def _ask_metrics(self) -> str:
        answer = self.ask(self.config.url, f"/metrics{OWN_MARK}", self.config.health_timeout_s)
        return answer.body.decode("utf-8", "replace") if answer.ok else ""

    def send_probe(self) -> None:
        self._thread(self._ask_token)

    def _ask_token(self) -> None:
        asked = {"model": self.config.served_names[0], "prompt": ".", "max_tokens": 1, "temperature": 0}
        path = f"/v1/completions{OWN_MARK}"
        self._tell(ProbeSeen(self.ask(self.config.url, path, PROBE_S, method="POST", payload=asked)))
