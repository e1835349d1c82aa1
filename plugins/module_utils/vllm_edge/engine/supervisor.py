# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-edge run-engine`: runs one engine's container under systemd (Type=notify), from start to end.

One thread makes all decisions (with `Supervision`). Other threads only report what they observe: the container's log,
`docker wait`, the main process (through a pidfd, which works even while Docker is away) and /health. A signal is an
event like the others.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

from ..gpu.driver import DriverVersions, explain_mismatch, read_versions
from ..names import EngineIdentity
from ..paths import HostPaths
from ..system.docker import (
    Container,
    ContainerGone,
    DockerAway,
    DockerEngine,
    DockerRefused,
    DockerUnit,
    LogRecord,
    docker_unit,
    explain_unreachable_docker,
    parse_stamp,
)
from ..system.files import is_locked
from ..system.http import Answer, get_health, request
from ..system.process import KILLED_S, end_process
from ..system.sd_notify import Notifier, read_watchdog_seconds
from .config import Engine, EngineConfig, EngineConfigError, load_engine
from .diagnosis import Death, explain, explain_hang
from .events import Died, DockerSeen, Event, HealthSeen, LogLine, LogLost, Signalled
from .journal import OWN_PROBE, Journal
from .lifecycle import (
    EXTEND_BY_S,
    Decision,
    Existing,
    Found,
    Reaction,
    Supervision,
    decide_existing,
    had_been_ready,
    needs_look,
)
from .metrics import kv_blocks
from .signatures import Explanation
from .startup import WORDS, Phase
from .state import TAIL_LINES, EngineState, Failure, read_state, stamp, write_state

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: another attempt cannot succeed. The unit names it in RestartPreventExitStatus."""

DOCKER_WAIT_S = 900.0
"""Seconds that a launch waits for Docker, and during which a failed launch is repeated."""
REFUSED_S = 5.0
"""Seconds during which an error of Docker's API is regarded as temporary."""
RETRY_FIRST_S = 5.0
"""Seconds before the second attempt after a failure that may pass, as systemd's RestartSec; then doubled each time."""
RETRY_MOST_S = 300.0
"""Longest time between two attempts, in seconds."""
REMOVE_WAIT_S = 120.0
"""Seconds that the removal of a container may take."""
STOP_LOADING_S = 3.0
"""Seconds to end by itself for an engine that is still loading. It has no requests to finish, and as PID 1 of its
container it ignores SIGTERM until vLLM has installed its handler.
"""
PING_S = 3.0
"""Seconds to wait for Docker's answer."""
CREATE_S = 240.0
"""Seconds that `docker create` and `docker start` may take together."""
TICK_S = 1.0
"""Seconds between two calls of `Supervision.on_tick`."""

_ENDS = (Phase.FAILED, Phase.STOPPING, Phase.STOPPED)
"""Phases that a supervisor records when it has seen the container's end itself."""

T = TypeVar("T")


# -- exceptions


class Stopped(Exception):
    """A signal to stop arrived during the launch."""


class Launch(Exception):
    """The container could not be started."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__(explanation.reason)
        self.explanation = explanation


def compute_health_interval(watchdog_s: float | None) -> float:
    """Return the seconds between two requests of /health.

    It is a third of WatchdogSec: one lost answer does not end an engine, two in a row may.
    """
    return 10.0 if watchdog_s is None else min(10.0, max(0.2, watchdog_s / 3))


class Supervisor:
    """Runs one engine: launches or attaches to its container, supervises it, and ends it.

    It connects the decisions (`lifecycle.Supervision`, `lifecycle.decide_existing`) with Docker, the engine's HTTP
    server, systemd and the state file.

        main thread: run()

          _launch_patiently -> _launch -> _prepare     create the container, or attach to a running one of ours;
              |                                        failures that may pass are retried here (RETRYING)
          _begin                                       start the watcher threads
              |
          _supervise  <--- queue `events` ----+--      _follow_log      LogLine, LogLost
              |                               +--      _wait_for_end    DockerSeen, Died (docker wait)
              |                               +--      _watch_process   Died (pidfd)
              |                               +--      _probe           HealthSeen
              |                               +--      signal handler   Signalled
              |    each event and each tick: Supervision.on_...() -> Reaction -> _apply (journal, state file, systemd)
              |
          _stop  SIGTERM, SIGINT                  -> STOPPED, exit status EXIT_OK
          _bury  the container ended              -> _fail (or _stop, if a signal had arrived)
          _fail  launch failed, stall, hang, end  -> FAILED, exit status EXIT_FAILED (systemd restarts) or EXIT_CONFIG

          A signal during the launch raises Stopped, which leads to _stop_before_launch -> STOPPED.

    Only the main thread decides, writes the state file and talks to systemd. The watchers are daemon threads that end
    when `_closing` is set. They share `_docker_away`, `_invocation` (of docker.service) and `_last_stamp` (of the log).
    """

    def __init__(
        self,
        engine: Engine,
        paths: HostPaths,
        docker: DockerEngine,
        notifier: Notifier,
        journal: Journal,
        *,
        watchdog_s: float | None = None,
        docker_wait_s: float = DOCKER_WAIT_S,
        unit: Callable[[], DockerUnit | None] = docker_unit,
        health: Callable[[str, float], Answer] = get_health,
        ask: Callable[[str, str, float], Answer] = request,
        driver: Callable[[], DriverVersions] = read_versions,
    ) -> None:
        """Prepare the supervisor; nothing is started yet.

        Args:
            engine: configuration of the engine
            paths: where the host keeps its files
            docker: the Docker Engine
            notifier: systemd
            journal: output for systemd's journal
            watchdog_s: the unit's WatchdogSec in seconds; None if there is none
            docker_wait_s: seconds that the launch may take
            unit: returns the state of docker.service
            health: requests /health
            ask: sends any other request to the engine
            driver: returns the versions of the NVIDIA driver
        """
        self.engine = engine
        self.config: EngineConfig = engine.config
        self.docker = docker
        self.notifier = notifier
        self.journal = journal
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._paths = paths
        self._state_path = paths.engine_state(engine.config.engine)
        self._previous = read_state(self._state_path)
        self._state = EngineState(
            engine=self.config.engine,
            phase=Phase.WAITING_FOR_DOCKER,
            since=stamp(),
            input_hash=self.config.input_hash,
            generation=self.config.generation,
            last_failure=self._previous.last_failure if self._previous else None,
        )
        self._watchdog_s = watchdog_s
        self._docker_wait_s = docker_wait_s
        self._unit = unit
        self._invocation: str | None = None
        self._health = health
        self._driver = driver
        self._ask = ask
        self._closing = threading.Event()
        self._docker_away = threading.Event()
        self._container: Container | None = None
        self._live_restore: bool | None = None
        self._follower: threading.Thread | None = None
        self._last_stamp: str | None = None
        self._signal: int | None = None
        self._record_failed = False

    # -- signals

    def install_signals(self) -> None:
        """Install the signal handlers: SIGTERM and SIGINT stop the engine, SIGABRT comes from systemd's watchdog.

        systemd leaves time after SIGABRT to report the reason and to end the container.
        """

        def tell(number: int, _frame: object) -> None:
            self._signal = self._signal or number
            self.events.put(Signalled(number))

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
            signal.signal(number, tell)

    # -- state

    def _record(self, **changes: object) -> None:
        """Change the recorded state. Without a state file the engine goes on; the first error is logged."""
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        try:
            write_state(self._state_path, self._state)
        except OSError as error:
            if not self._record_failed:
                self.journal.write(f"cannot write {self._state_path}: {error}; the engine runs on without it", 4)
            self._record_failed = True

    def _enter(self, phase: Phase, status: str | None = None) -> None:
        """Tell systemd and the state file about a phase."""
        self.notifier.send(status=status or WORDS[phase], extend_s=EXTEND_BY_S)
        if self._state.phase != phase:
            self._record(phase=phase, since=stamp())

    def _pause(self, seconds: float) -> None:
        """Wait before the container runs; a signal ends the wait. Raises Stopped."""
        deadline = time.monotonic() + seconds
        while self._signal is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            try:
                self.events.get(timeout=min(left, TICK_S))
            except queue.Empty:
                continue
        raise Stopped

    def _check_docker(self, timeout_s: float = PING_S) -> str | None:
        """Return None if Docker answers, else why not."""
        return explain_unreachable_docker(self.docker.ping, self._unit(), timeout_s)

    # -- queries to Docker: no decision depends on a single error of its API

    def _ask_docker(self, question: Callable[[], T]) -> T:
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

    def _find(self, name: str) -> Container | None:
        return self._ask_docker(lambda: self.docker.find(name))

    def _read_log(self, container_id: str, tail: int) -> list[LogRecord]:
        """Return the log so far, at most `tail` lines; none if it is unreadable, since no decision requires it."""
        try:
            return self._ask_docker(lambda: list(self.docker.logs(container_id, after=None, follow=False, tail=tail)))
        except DockerRefused as error:
            self.journal.write(f"the log of container {container_id[:12]} cannot be read: {error}", 4)
            return []

    # -- launch

    def _wait_for_docker(self) -> None:
        """Wait until Docker answers. Raises Launch after `docker_wait_s` seconds, Stopped."""
        begin = time.monotonic()
        while True:
            if self._signal is not None:
                raise Stopped
            why = self._check_docker()
            if why is None:
                return
            waited = time.monotonic() - begin
            if waited >= self._docker_wait_s:
                raise Launch(
                    Explanation(
                        "docker_away",
                        f"the Docker Engine did not answer for {waited:.0f} s ({why})",
                        "`systemctl status docker.service docker.socket` tells why; systemd tries again",
                    )
                )
            self._enter(Phase.WAITING_FOR_DOCKER, f"waiting for the Docker Engine, {waited:.0f} s: {why}")
            self._pause(1.0)

    def _examine_container(self, container: Container) -> Found:
        """Determine the condition of a running container of ours, to decide whether it is kept."""
        lines: list[str] = []
        newest: str | None = None
        for record in self._read_log(container.id, 2000):
            lines.append(record.line)
            newest = record.at
        answer = self._health(self.config.url, self.config.health_timeout_s)
        seconds = parse_stamp(newest or container.started_at)
        age = None if seconds is None else max(0.0, time.time() - seconds)
        return Found(answer, had_been_ready(container, self._previous, lines), age)

    def _report_corpse(self, container: Container) -> None:
        """Record why a container ended while no supervisor was watching (supervisor killed, host crashed)."""
        finished = parse_stamp(container.finished_at)
        last = self._state.last_failure
        told = last is not None and finished is not None and last.time >= stamp(datetime.fromtimestamp(finished, UTC))
        ours = self._previous is not None and self._previous.container_id == container.id
        watched = ours and self._previous is not None and self._previous.phase in _ENDS
        if told or watched or finished is None or container.exit_code is None:
            return
        lines = [record.line for record in self._read_log(container.id, 400)]
        death = Death(lines=lines, exit_code=container.exit_code, oom_killed=container.oom_killed)
        why = explain(death)
        self.journal.write(f"the previous container ended unwatched: {why.sentence()}", 4)
        self._record(
            last_failure=Failure(
                time=stamp(datetime.fromtimestamp(finished, UTC)),
                exit_code=container.exit_code,
                cause=why.cause,
                reason=why.reason,
                remedy=why.remedy,
                phase=self._previous.phase if self._previous else "",
                log_tail=lines[-TAIL_LINES:],
            )
        )

    def _remove(self, container_id: str, *, stopping: bool = False) -> None:
        """Remove a container and wait until it is gone: `docker rm` returns early if another removal is in progress."""
        deadline = time.monotonic() + REMOVE_WAIT_S
        problem = ""
        while time.monotonic() < deadline:
            if self._signal is not None and not stopping:
                raise Stopped
            try:
                if self.docker.find(container_id) is None:
                    return
                self.docker.remove(container_id)
                if self.docker.find(container_id) is None:
                    return
            except DockerRefused as error:
                problem = str(error)
            self.notifier.send(extend_s=EXTEND_BY_S)
            time.sleep(0.3)
        raise Launch(
            Explanation(
                "not_removable",
                f"a container could not be removed within {REMOVE_WAIT_S:.0f} s ({problem or 'still there'})",
                "A process that cannot be killed holds it, often inside the driver: look for state D in "
                "`ps -eo pid,stat,wchan,cmd` and at `journalctl -k`",
            )
        )

    def _clear(self, container: Container, decision: Decision) -> None:
        self._enter(Phase.CLEARING, f"removing the previous container: {decision.why}")
        self.journal.write(f"removing container {container.name} ({container.id[:12]}): {decision.why}")
        if decision.what is Existing.STOP_AND_REMOVE:
            self.notifier.send(extend_s=self.config.stop_timeout_s + EXTEND_BY_S)
            self._end_container(container, self.config.stop_timeout_s)
        self._remove(container.id)

    def _refuse_mismatch(self) -> None:
        """Raise Launch if the NVIDIA kernel module does not match the libraries or the CDI specification.

        A new container would fail minutes later with "Failed to initialize NVML". A running container is not checked,
        because it has its libraries already.
        """
        found = explain_mismatch(self._driver())
        if found is not None:
            raise Launch(Explanation("driver_mismatch", found.reason, found.remedy, heals=found.heals))

    def _prepare(self) -> tuple[Container, Existing]:
        """Return the container to supervise, running, and how it came about: created, or attached to."""
        config = self.config
        present = self._find(config.container)
        found = self._examine_container(present) if present is not None and needs_look(present, config) else None
        decision = decide_existing(present, config, found)
        if decision.what is Existing.REFUSE:
            raise Launch(Explanation("name_foreign", decision.why, "Nothing was changed", heals=False))
        if present is not None and decision.what in (Existing.ATTACH_SERVING, Existing.ATTACH_LOADING):
            self.journal.write(f"attaching to container {present.name} ({present.id[:12]}): {decision.why}")
            return present, decision.what
        if present is not None:
            if not present.running:
                self._report_corpse(present)
            self._clear(present, decision)
        if self._signal is not None:
            raise Stopped
        self._refuse_mismatch()
        self._enter(Phase.STARTING)
        self.notifier.send(extend_s=CREATE_S + EXTEND_BY_S)
        container_id = self.docker.create(self.engine.create.arguments)
        try:
            self.docker.start(container_id)
        except DockerRefused:
            self._remove(container_id, stopping=True)
            raise
        started = self._find(container_id)
        if started is None:
            raise Launch(explain(Death(removed=True)))
        return started, Existing.CREATE

    def _launch(self) -> tuple[Container, Existing]:
        """Repeat the preparation if Docker goes away during it; every step can be repeated."""
        deadline = time.monotonic() + self._docker_wait_s
        while True:
            self._wait_for_docker()
            try:
                self._refresh_live_restore()
                return self._prepare()
            except DockerRefused as error:
                raise Launch(explain(Death(docker_message=str(error)))) from error
            except DockerAway as error:
                if time.monotonic() >= deadline:
                    raise Launch(explain(Death(docker_message=str(error)))) from error
                self.journal.write(f"the Docker Engine went away: {error}", 4)
                self._pause(1.0)

    def _is_switch_running(self) -> bool:
        """Return whether a switch is in progress. It can roll back and needs to know of a failure at once."""
        try:
            return is_locked(self._paths.switch_lock)
        except OSError:
            return False

    def _wait_to_retry(self, seconds: float, why: str) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._enter(Phase.RETRYING, f"Trying again in {left:.0f} s. {why}")
            self._pause(min(TICK_S, left))
        self._enter(Phase.WAITING_FOR_DOCKER)

    def _launch_patiently(self) -> tuple[Container, Existing]:
        """Repeat launches that failed for a reason that may pass: systemd would use up its starts in half a minute."""
        deadline = time.monotonic() + self._docker_wait_s
        pause = RETRY_FIRST_S
        while True:
            try:
                return self._launch()
            except Launch as launch:
                left = deadline - time.monotonic()
                why = launch.explanation
                # An unknown failure may be a single error of Docker's API, which is no reason to roll back.
                first_unknown = why.cause == "docker_refused" and pause == RETRY_FIRST_S
                if not why.heals or left <= 0 or (self._is_switch_running() and not first_unknown):
                    raise
                self._note(why)
            self._wait_to_retry(min(pause, left), why.sentence())
            pause = min(2 * pause, RETRY_MOST_S)

    # -- watcher threads: they report and do not decide

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=target.__name__, daemon=True)
        thread.start()
        return thread

    def _wait_until_docker_is_back(self) -> None:
        while not self._closing.is_set() and self._check_docker() is not None:
            self._closing.wait(1.0)

    def _follow_log(self, container_id: str) -> None:
        """Report log lines. After a restart of Docker each connection continues after the last time stamp."""
        while not self._closing.is_set():
            try:
                for record in self.docker.logs(container_id, after=self._last_stamp, follow=True, tail=None):
                    self._last_stamp = record.at
                    if OWN_PROBE.search(record.line):
                        continue
                    self.journal.write_engine_line(record.line)
                    self.events.put(LogLine(record.line))
                # The stream ends if the container or Docker ends. Check Docker's unit before touching the socket again.
                if self._check_docker() is None:
                    found = self.docker.find(container_id)
                    if found is None or not found.running:
                        return
            except ContainerGone:
                return
            except DockerRefused as error:
                self.events.put(LogLost(str(error)))
                self._wait_until_log_is_back(container_id)
            except DockerAway:
                pass
            self._closing.wait(0.5)
            self._wait_until_docker_is_back()

    def _wait_until_log_is_back(self, container_id: str) -> None:
        while not self._closing.wait(TICK_S):
            if self._check_docker() is not None:
                continue
            try:
                list(self.docker.logs(container_id, after=None, follow=False, tail=1))
            except ContainerGone:
                return
            except (DockerAway, DockerRefused):
                continue
            self.events.put(LogLost(None))
            return

    def _get_invocation(self) -> str | None:
        unit = self._unit()
        return unit.invocation if unit is not None else None

    def _has_docker_restarted(self) -> bool:
        """Return whether Docker is stopping, or was restarted since the container was started or attached to."""
        unit = self._unit()
        return unit is not None and self._invocation is not None and unit != DockerUnit(True, self._invocation)

    def _wait_for_end(self, container_id: str) -> None:
        """Report the container's end, and when Docker goes away and comes back.

        Docker's statement that the container is not running counts as its end. An error of Docker's API does not:
        meanwhile `_watch_process` observes the process.
        """
        said = ""
        while not self._closing.is_set():
            try:
                if self._check_docker() is not None:
                    raise DockerAway
                found = self.docker.find(container_id)
                if found is None or not found.running:
                    break
                if self._docker_away.is_set():
                    self._invocation = self._get_invocation()
                    self._docker_away.clear()
                    self.events.put(DockerSeen(away=False))
                self.docker.wait(container_id)
            except ContainerGone:
                break
            except DockerRefused as error:
                if str(error) != said:
                    self.journal.write(f"Docker does not tell how the container does, and is asked again: {error}", 4)
                said = str(error)
                self._closing.wait(TICK_S)
            except DockerAway:
                if not self._docker_away.is_set():
                    self._docker_away.set()
                    self.events.put(DockerSeen(away=True))
                self._closing.wait(0.5)
                self._wait_until_docker_is_back()
        self.events.put(Died("docker"))

    def _watch_process(self, pid: int) -> None:
        """Report the end of the container's main process, which the kernel tells even while Docker is away."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.events.put(Died("process"))
            return
        except OSError:
            return  # Docker is in another PID namespace, or the kernel is old: `docker wait` has to suffice
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)
        self.events.put(Died("process"))

    def _probe(self, direct: Iterable[str]) -> None:
        """Report the answers of /health."""
        interval = compute_health_interval(self._watchdog_s)
        served = False
        while not self._closing.is_set():
            begin = time.monotonic()
            answer = self._ask_health(direct)
            self.events.put(HealthSeen(answer, self._ask_metrics() if answer.ok and not served else ""))
            served = served or answer.ok
            # Ask often while loading, so that READY is not late, and after a bad answer, to make up for a lost one.
            pause = interval if served and answer.ok else min(1.0, interval)
            self._closing.wait(max(0.05, pause - (time.monotonic() - begin)))

    def _ask_metrics(self) -> str:
        answer = self._ask(self.config.url, "/metrics", self.config.health_timeout_s)
        return answer.body.decode("utf-8", "replace") if answer.ok else ""

    def _ask_health(self, direct: Iterable[str]) -> Answer:
        answer = self._health(self.config.url, self.config.health_timeout_s)
        if answer.ok or not self._docker_away.is_set():
            return answer
        # Docker's proxy on the loopback ends with Docker. With live-restore the engine goes on serving and must not be
        # killed because its port is unreachable.
        for address in direct:
            inner = self._health(f"http://{address}", self.config.health_timeout_s)
            if inner.ok:
                return inner
        return answer

    # -- supervision

    def _begin(self, container: Container, how: Existing) -> Supervision:
        """Start the supervision of a running container: reconstruct its state and start the watchers."""
        self._container = container
        now = time.monotonic()
        begun = parse_stamp(container.started_at)
        age = 0.0 if begun is None or how is Existing.CREATE else max(0.0, time.time() - begun)
        known = self._previous if self._previous and self._previous.container_id == container.id else None
        life = Supervision(
            self.config,
            started=now - age,
            was_ready=how is Existing.ATTACH_SERVING,
            load_seconds=known.load_seconds if known else None,
        )
        if how is not Existing.CREATE:
            # Earlier lines are in the journal already, but they show how far the engine is.
            with contextlib.suppress(DockerAway):  # _follow_log waits for Docker
                for record in self._read_log(container.id, 2000):
                    self._last_stamp = record.at
                    life.on_log(record.line, now)
            if known:
                life.progress.facts = {**known.log_facts, **life.progress.facts}
        life.last_log = now
        self._record(
            phase=life.phase,
            since=stamp(),
            container_id=container.id,
            started_at=container.started_at or stamp(),
            ready_at=known.ready_at if known else None,
            load_seconds=life.load_seconds,
            log_facts=life.progress.facts,
        )
        self._invocation = self._get_invocation()
        self._follower = self._thread(self._follow_log, container.id)
        self._thread(self._wait_for_end, container.id)
        if container.pid > 0:
            self._thread(self._watch_process, container.pid)
        self._thread(self._probe, container.direct)
        return life

    def _apply(self, life: Supervision, reaction: Reaction) -> None:
        """Carry out a Reaction."""
        if reaction.say:
            self.journal.write(reaction.say, 5)
        if reaction.ready:
            self._record(
                phase=life.phase,
                since=stamp(),
                ready_at=self._state.ready_at or stamp(),
                load_seconds=life.load_seconds,
                log_facts=life.progress.facts,
            )
            self.journal.write(f"{self.config.unit}: {life.status_text(time.monotonic())}")
        elif reaction.phase_changed:
            self._record(phase=life.phase, since=stamp(), log_facts=life.progress.facts)
        self.notifier.send(
            ready=reaction.ready, watchdog=reaction.watchdog, status=reaction.status, extend_s=reaction.extend_s
        )

    def _supervise(self, life: Supervision) -> int:
        """Process events until the engine ends; return the exit status."""
        tick_at = 0.0
        while True:
            now = time.monotonic()
            if now >= tick_at:
                tick_at = now + TICK_S
                reaction = life.on_tick(now)
                if reaction.give_up is not None:
                    return self._fail(life, reaction.give_up, None)
                self._apply(life, reaction)
            try:
                event = self.events.get(timeout=max(0.01, tick_at - now))
            except queue.Empty:
                continue
            now = time.monotonic()
            match event:
                case Signalled(number):
                    if number == signal.SIGABRT:
                        seconds = life.get_unanswered_s(now)
                        return self._fail(life, explain_hang(seconds, life.unhealthy_answer or "no answer"), None)
                    return self._stop(life)
                case Died():
                    return self._bury(life)
                case LogLine(line):
                    self._apply(life, life.on_log(line, now))
                case LogLost(why):
                    self._apply(life, life.on_log_lost(why, now))
                case HealthSeen(answer, metrics):
                    blocks = kv_blocks(metrics)
                    if blocks is not None:
                        life.progress.facts["kv_blocks"] = blocks
                    self._apply(life, life.on_health(answer, now, datetime.now().strftime("%H:%M:%S")))
                case DockerSeen(away):
                    self._apply(life, life.on_docker(away, now))

    # -- end

    def _drain(self, life: Supervision, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for the last log lines, which explain most about the end."""
        if self._follower is not None:
            self._follower.join(wait_s)
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, LogLine):
                life.scan.append(event.line)
                life.tail.append(event.line)

    def _gather_last_facts(self) -> tuple[Container | None, bool, bool]:
        """Return Docker's data on the ended container, whether it was removed, and whether Docker is away."""
        assert self._container is not None
        deadline = time.monotonic() + 0.7
        found: Container | None = None
        while True:
            if self._check_docker(0.5) is not None:
                return None, False, True
            try:
                found = self._find(self._container.id)
            except DockerAway:
                return None, False, True
            except DockerRefused:
                return None, False, False
            if found is None or not found.running or time.monotonic() >= deadline:
                return found, found is None, False
            time.sleep(0.05)

    def _bury(self, life: Supervision) -> int:
        """Diagnose and record why the container ended by itself; return the exit status."""
        # Check at once: a restart of Docker may be over before the last lines have been read.
        restarted = self._has_docker_restarted()
        self._drain(life, 0.0 if self._docker_away.is_set() else 0.5)
        if self._signal is not None and self._signal != signal.SIGABRT:
            return self._stop(life)
        found, removed, away = self._gather_last_facts()
        # Docker may already be back, and does not remember that it stopped a container when it shut down itself.
        with_docker = restarted or self._has_docker_restarted() or self._docker_away.is_set()
        away = away or with_docker or life.docker_away_since is not None
        outside: str | None = None
        if found is not None:
            dead = found.id
            with contextlib.suppress(DockerAway, DockerRefused):
                outside = self._ask_docker(lambda: self.docker.killed_from_outside(dead, since_s=120))
        death = Death(
            lines=list(life.scan),
            exit_code=found.exit_code if found else None,
            oom_killed=bool(found and found.oom_killed),
            docker_message=found.error if found else "",
            was_serving=life.ready,
            removed=removed and not away,
            docker_away=away,
            live_restore=self._refresh_live_restore(),
            outside_signal=outside,
        )
        return self._fail(life, explain(death), death.exit_code, dead=True)

    def _refresh_live_restore(self) -> bool | None:
        """Return whether Docker keeps containers running while it is stopped, which may have been changed meanwhile."""
        with contextlib.suppress(DockerAway, DockerRefused):
            self._live_restore = self._ask_docker(self.docker.live_restore)
        return self._live_restore

    def _note(self, why: Explanation, exit_code: int | None = None, tail: Iterable[str] = ()) -> None:
        """Log and record a failure."""
        self.journal.write(why.sentence(), 3)
        self.notifier.send(status=why.sentence(), extend_s=EXTEND_BY_S)
        failure = Failure(stamp(), exit_code, why.cause, why.reason, why.remedy, self._state.phase, list(tail))
        self._record(phase=Phase.FAILED, since=stamp(), last_failure=failure)

    def _fail(self, life: Supervision | None, why: Explanation, exit_code: int | None, *, dead: bool = False) -> int:
        """Record a failure and end the engine, which must not run unsupervised; return the exit status."""
        self._closing.set()
        self._note(why, exit_code, life.tail if life is not None else ())
        if self._container is not None and not dead:
            self._end_container(self._container, 0)
        return EXIT_FAILED if why.heals else EXIT_CONFIG

    def _end_container(self, container: Container, timeout_s: float) -> None:
        """Stop the container. If Docker cannot, end its main process directly."""
        try:
            if self._check_docker() is None:
                self.docker.stop(container.id, timeout_s)
                return
        except ContainerGone:
            return
        except (DockerAway, DockerRefused) as error:
            self.journal.write(f"Docker does not stop the container, its process is told: {error}", 4)
        if container.pid > 0:
            end_process(container.pid, [(signal.SIGTERM, timeout_s), (signal.SIGKILL, KILLED_S)])

    def _stop(self, life: Supervision) -> int:
        """Stop the engine for systemd: end the container, remove it, return the exit status."""
        patience = self.config.stop_timeout_s
        if not life.ready:
            patience = min(patience, STOP_LOADING_S)
        self.notifier.send(stopping=True, status=WORDS[Phase.STOPPING], extend_s=patience + EXTEND_BY_S)
        self._record(phase=Phase.STOPPING, since=stamp())
        self.journal.write(f"stopping container {self.config.container}, {patience:g} s to end by itself")
        assert self._container is not None
        self._end_container(self._container, patience)
        self._drain(life, 0.5)
        self._closing.set()
        try:
            if self._check_docker() is None:
                self._remove(self._container.id, stopping=True)
            else:
                self.journal.write("the Docker Engine is away: the next start removes the ended container", 4)
        except (DockerAway, DockerRefused, Launch) as error:
            self.journal.write(f"the ended container was not removed: {error}; the next start removes it", 4)
        return self._finish_stop()

    def _stop_before_launch(self) -> int:
        """Stop before the launch is complete. A container that an earlier supervisor left running is ended, too."""
        patience = self.config.stop_timeout_s
        self.notifier.send(stopping=True, status=WORDS[Phase.STOPPING], extend_s=patience + EXTEND_BY_S)
        try:
            if self._check_docker() is None:
                left = self._find(self.config.container)
                if left is not None and EngineIdentity(self.config.engine).owns(left.labels):
                    self._end_container(left, patience)
                    self._remove(left.id, stopping=True)
        except (DockerAway, DockerRefused, Launch) as error:
            self.journal.write(f"a container of this engine may be left: {error}; the next start sees to it", 4)
        return self._finish_stop()

    def _finish_stop(self) -> int:
        self._record(phase=Phase.STOPPED, since=stamp())
        self.notifier.send(status=WORDS[Phase.STOPPED])
        return EXIT_OK

    def run(self) -> int:
        """Run the engine until it ends; return the exit status of the unit's main process."""
        self._record()
        try:
            container, how = self._launch_patiently()
        except Stopped:
            return self._stop_before_launch()
        except Launch as launch:
            return self._fail(None, launch.explanation, None)
        life = self._begin(container, how)
        try:
            return self._supervise(life)
        finally:
            self._closing.set()


def run_engine(name: str, paths: HostPaths, *, docker_wait_s: float = DOCKER_WAIT_S) -> int:
    """Run `vllm-edge run-engine`.

    Args:
        name: name of the engine
        paths: where the host keeps its files
        docker_wait_s: seconds that the launch may take

    Returns:
        EXIT_OK after a requested stop, EXIT_FAILED if another attempt may succeed, else EXIT_CONFIG.
    """

    notifier = Notifier.from_environment()
    journal = Journal(sys.stdout, prefixed=not sys.stdout.isatty())
    try:
        engine = load_engine(name, paths)
    except EngineConfigError as error:
        journal.write(str(error), 3)
        notifier.send(status=str(error))
        return EXIT_CONFIG
    watchdog_s = read_watchdog_seconds(os.environ, os.getpid())
    for name_of in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        # The variables are meant for this process. `systemctl`, which is called about Docker, would send its own errors
        # there.
        os.environ.pop(name_of, None)
    supervisor = Supervisor(
        engine,
        paths,
        DockerEngine(),
        notifier,
        journal,
        watchdog_s=watchdog_s,
        docker_wait_s=docker_wait_s,
    )
    supervisor.install_signals()
    return supervisor.run()
