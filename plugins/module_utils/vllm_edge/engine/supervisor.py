# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge run-engine`: one engine's container under systemd (Type=notify), from its creation to its end.

One thread decides (`Supervision`), helpers only tell it what they see: the container's log, `docker wait`, the
process itself (a pidfd, which also speaks while Docker is away) and /health. A signal is an event like the others.
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
from ..names import LABEL_ENGINE
from ..paths import HostPaths
from ..system.docker import (
    Container,
    ContainerGone,
    Docker,
    DockerAway,
    DockerRefused,
    DockerUnit,
    LogRecord,
    docker_unit,
    stamp_seconds,
    why_away,
)
from ..system.files import is_locked
from ..system.http import Answer, get_health, request
from ..system.sd_notify import Notifier, watchdog_seconds
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
# sysexits' EX_CONFIG: another attempt cannot succeed. The unit names it in RestartPreventExitStatus.
EXIT_CONFIG = 78

DOCKER_WAIT_S = 900.0
# How long an error of Docker's API is taken for a passing one.
REFUSED_S = 5.0
# Between two tries of what heals: first as systemd's RestartSec, then twice as long each time.
RETRY_FIRST_S = 5.0
RETRY_MOST_S = 300.0
REMOVE_WAIT_S = 120.0
# An engine that loads has no request to finish, and as PID 1 of its container it does not hear SIGTERM until vLLM has
# installed its handler.
STOP_LOADING_S = 3.0
PING_S = 3.0
# The longest that `docker create` and `docker start` may take together.
CREATE_S = 240.0
TICK_S = 1.0

# Phases that a supervisor leaves behind when it has seen the end itself.
_ENDS = (Phase.FAILED, Phase.STOPPING, Phase.STOPPED)

T = TypeVar("T")


# -- events


class Stopped(Exception):
    """A signal asked us to stop while we were getting ready."""


class Launch(Exception):
    """The container could not be brought up; carries the explanation."""

    def __init__(self, explanation: Explanation) -> None:
        super().__init__(explanation.reason)
        self.explanation = explanation


def health_interval(watchdog_s: float | None) -> float:
    """A third of WatchdogSec: one lost answer does not kill an engine, two in a row may."""
    return 10.0 if watchdog_s is None else min(10.0, max(0.2, watchdog_s / 3))


class Supervisor:
    """Wiring between the pure `Supervision` and the world."""

    def __init__(
        self,
        engine: Engine,
        paths: HostPaths,
        docker: Docker,
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
        """SIGTERM and SIGINT stop; SIGABRT is systemd's watchdog: the time to say why and to end the container."""

        def tell(number: int, _frame: object) -> None:
            self._signal = self._signal or number
            self.events.put(Signalled(number))

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):
            signal.signal(number, tell)

    # -- small helpers

    def _record(self, **changes: object) -> None:
        self._state = replace(self._state, **changes)  # type: ignore[arg-type]
        try:
            write_state(self._state_path, self._state)
        except OSError as error:
            if not self._record_failed:
                self.journal.write(f"cannot write {self._state_path}: {error}; the engine runs on without it", 4)
            self._record_failed = True

    def _enter(self, phase: Phase, status: str | None = None) -> None:
        self.notifier.send(status=status or WORDS[phase], extend_s=EXTEND_BY_S)
        if self._state.phase != phase:
            self._record(phase=phase, since=stamp())

    def _pause(self, seconds: float) -> None:
        """Waits, but not for longer than a signal needs to arrive. Only for the time before the container runs."""
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

    def _reachable(self, timeout_s: float = PING_S) -> str | None:
        """None when Docker answers, else why not."""
        return why_away(self.docker.ping, self._unit(), timeout_s)

    # -- asking Docker: no decision hangs on one error of its API

    def _ask_docker(self, question: Callable[[], T]) -> T:
        """The answer to what can be asked again; an error only where it stays."""
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
        """What was printed so far; nothing where it cannot be read, since what it tells is no condition of anything."""
        try:
            return self._ask_docker(lambda: list(self.docker.logs(container_id, after=None, follow=False, tail=tail)))
        except DockerRefused as error:
            self.journal.write(f"the log of container {container_id[:12]} cannot be read: {error}", 4)
            return []

    # -- bringing the container up

    def _wait_for_docker(self) -> None:
        begin = time.monotonic()
        while True:
            if self._signal is not None:
                raise Stopped
            why = self._reachable()
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

    def _look(self, container: Container) -> Found:
        """Is a running container of ours worth keeping?"""
        lines: list[str] = []
        newest: str | None = None
        for record in self._read_log(container.id, 2000):
            lines.append(record.line)
            newest = record.at
        answer = self._health(self.config.url, self.config.health_timeout_s)
        seconds = stamp_seconds(newest or container.started_at)
        age = None if seconds is None else max(0.0, time.time() - seconds)
        return Found(answer, had_been_ready(container, self._previous, lines), age)

    def _report_corpse(self, container: Container) -> None:
        """A container that died while nobody watched (supervisor killed, host crashed) gets its explanation now."""
        finished = stamp_seconds(container.finished_at)
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
        """Until it is really gone: `docker rm` returns early while another removal is in progress."""
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
        """A new container would end minutes later with "Failed to initialize NVML". One that runs has its libraries
        already and is not judged."""
        found = explain_mismatch(self._driver())
        if found is not None:
            raise Launch(Explanation("driver_mismatch", found.reason, found.remedy, heals=found.heals))

    def _prepare(self) -> tuple[Container, Existing]:
        """The container that is to be supervised, running."""
        config = self.config
        present = self._find(config.container)
        found = self._look(present) if present is not None and needs_look(present, config) else None
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
        """Docker may go away at any point of the preparation; everything in it can be begun again."""
        deadline = time.monotonic() + self._docker_wait_s
        while True:
            self._wait_for_docker()
            try:
                self._live_restore_now()
                return self._prepare()
            except DockerRefused as error:
                raise Launch(explain(Death(docker_message=str(error)))) from error
            except DockerAway as error:
                if time.monotonic() >= deadline:
                    raise Launch(explain(Death(docker_message=str(error)))) from error
                self.journal.write(f"the Docker Engine went away: {error}", 4)
                self._pause(1.0)

    def _switching(self) -> bool:
        """Whether a switch waits for this engine, which has a way back and wants to know at once."""
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
        """What heals by itself is tried again here: systemd would have used up its starts within half a minute."""
        deadline = time.monotonic() + self._docker_wait_s
        pause = RETRY_FIRST_S
        while True:
            try:
                return self._launch()
            except Launch as launch:
                left = deadline - time.monotonic()
                why = launch.explanation
                # What nobody knows may be one error of Docker's API, which is no reason to roll back.
                first_unknown = why.cause == "docker_refused" and pause == RETRY_FIRST_S
                if not why.heals or left <= 0 or (self._switching() and not first_unknown):
                    raise
                self._note(why)
            self._wait_to_retry(min(pause, left), why.sentence())
            pause = min(2 * pause, RETRY_MOST_S)

    # -- helpers in threads: they see, they do not decide

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=target.__name__, daemon=True)
        thread.start()
        return thread

    def _until_docker_is_back(self) -> None:
        while not self._closing.is_set() and self._reachable() is not None:
            self._closing.wait(1.0)

    def _follow_log(self, container_id: str) -> None:
        """Across restarts of Docker: each connection continues after the last time stamp."""
        while not self._closing.is_set():
            try:
                for record in self.docker.logs(container_id, after=self._last_stamp, follow=True, tail=None):
                    self._last_stamp = record.at
                    if OWN_PROBE.search(record.line):
                        continue
                    self.journal.engine_line(record.line)
                    self.events.put(LogLine(record.line))
                # An end of the stream is the container's or Docker's: look before the socket is touched again.
                if self._reachable() is None:
                    found = self.docker.find(container_id)
                    if found is None or not found.running:
                        return
            except ContainerGone:
                return
            except DockerRefused as error:
                self.events.put(LogLost(str(error)))
                self._until_the_log_is_back(container_id)
            except DockerAway:
                pass
            self._closing.wait(0.5)
            self._until_docker_is_back()

    def _until_the_log_is_back(self, container_id: str) -> None:
        while not self._closing.wait(TICK_S):
            if self._reachable() is not None:
                continue
            try:
                list(self.docker.logs(container_id, after=None, follow=False, tail=1))
            except ContainerGone:
                return
            except (DockerAway, DockerRefused):
                continue
            self.events.put(LogLost(None))
            return

    def _current_invocation(self) -> str | None:
        unit = self._unit()
        return unit.invocation if unit is not None else None

    def _docker_restarted(self) -> bool:
        """Whether this is another Docker Engine than the one the container lived under, or one that is ending."""
        unit = self._unit()
        return unit is not None and self._invocation is not None and unit != DockerUnit(True, self._invocation)

    def _wait_for_end(self, container_id: str) -> None:
        """Docker's word on the container is an end, an error of its API is none: meanwhile the process itself tells."""
        said = ""
        while not self._closing.is_set():
            try:
                if self._reachable() is not None:
                    raise DockerAway
                found = self.docker.find(container_id)
                if found is None or not found.running:
                    break
                if self._docker_away.is_set():
                    self._invocation = self._current_invocation()
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
                self._until_docker_is_back()
        self.events.put(Died("docker"))

    def _watch_process(self, pid: int) -> None:
        """The kernel tells of the end of the container's first process, whether Docker is there or not."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.events.put(Died("process"))
            return
        except OSError:
            return  # Docker lives in another PID namespace, or an old kernel: `docker wait` alone must do
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll()
        finally:
            os.close(descriptor)
        self.events.put(Died("process"))

    def _probe(self, direct: Iterable[str]) -> None:
        interval = health_interval(self._watchdog_s)
        served = False
        while not self._closing.is_set():
            begin = time.monotonic()
            answer = self._ask_health(direct)
            self.events.put(HealthSeen(answer, self._ask_metrics() if answer.ok and not served else ""))
            served = served or answer.ok
            # Loading: often, so that READY is not late. Missing answers: often, so that one lost is made up for.
            pause = interval if served and answer.ok else min(1.0, interval)
            self._closing.wait(max(0.05, pause - (time.monotonic() - begin)))

    def _ask_metrics(self) -> str:
        answer = self._ask(self.config.url, "/metrics", self.config.health_timeout_s)
        return answer.body.decode("utf-8", "replace") if answer.ok else ""

    def _ask_health(self, direct: Iterable[str]) -> Answer:
        answer = self._health(self.config.url, self.config.health_timeout_s)
        if answer.ok or not self._docker_away.is_set():
            return answer
        # Docker's proxy on the loopback ends with Docker; with live-restore the engine itself serves on, and must
        # not be killed for its port.
        for address in direct:
            inner = self._health(f"http://{address}", self.config.health_timeout_s)
            if inner.ok:
                return inner
        return answer

    # -- the life of the container

    def _begin(self, container: Container, how: Existing) -> Supervision:
        self._container = container
        now = time.monotonic()
        begun = stamp_seconds(container.started_at)
        age = 0.0 if begun is None or how is Existing.CREATE else max(0.0, time.time() - begun)
        known = self._previous if self._previous and self._previous.container_id == container.id else None
        life = Supervision(
            self.config,
            started=now - age,
            was_ready=how is Existing.ATTACH_SERVING,
            load_seconds=known.load_seconds if known else None,
        )
        if how is not Existing.CREATE:
            # What was printed before was in the journal already; it still tells how far the engine is.
            with contextlib.suppress(DockerAway):  # the helper that follows the log waits for Docker
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
        self._invocation = self._current_invocation()
        self._follower = self._thread(self._follow_log, container.id)
        self._thread(self._wait_for_end, container.id)
        if container.pid > 0:
            self._thread(self._watch_process, container.pid)
        self._thread(self._probe, container.direct)
        return life

    def _apply(self, life: Supervision, reaction: Reaction) -> None:
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
                        seconds = life.unanswered_s(now)
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

    # -- ends

    def _drain(self, life: Supervision, wait_s: float) -> None:
        """The last lines are the ones that explain: give the log a moment to arrive."""
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

    def _last_facts(self) -> tuple[Container | None, bool, bool]:
        """What Docker says of the dead container, whether it is removed, and whether Docker is away."""
        assert self._container is not None
        deadline = time.monotonic() + 0.7
        found: Container | None = None
        while True:
            if self._reachable(0.5) is not None:
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
        """The container died by itself."""
        # At once: a restart of Docker may be over before the last lines have been read.
        restarted = self._docker_restarted()
        self._drain(life, 0.0 if self._docker_away.is_set() else 0.5)
        if self._signal is not None and self._signal != signal.SIGABRT:
            return self._stop(life)
        found, removed, away = self._last_facts()
        # Docker may be back already, and it remembers nothing of having stopped a container on its own way out.
        with_docker = restarted or self._docker_restarted() or self._docker_away.is_set()
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
            live_restore=self._live_restore_now(),
            outside_signal=outside,
        )
        return self._fail(life, explain(death), death.exit_code, dead=True)

    def _live_restore_now(self) -> bool | None:
        """Whether Docker leaves containers alone when it ends; it may have been told otherwise since the launch."""
        with contextlib.suppress(DockerAway, DockerRefused):
            self._live_restore = self._ask_docker(self.docker.live_restore)
        return self._live_restore

    def _note(self, why: Explanation, exit_code: int | None = None, tail: Iterable[str] = ()) -> None:
        """Says why, and keeps it."""
        self.journal.write(why.sentence(), 3)
        self.notifier.send(status=why.sentence(), extend_s=EXTEND_BY_S)
        failure = Failure(stamp(), exit_code, why.cause, why.reason, why.remedy, self._state.phase, list(tail))
        self._record(phase=Phase.FAILED, since=stamp(), last_failure=failure)

    def _fail(self, life: Supervision | None, why: Explanation, exit_code: int | None, *, dead: bool = False) -> int:
        """The end; leaves no engine running that nobody watches."""
        self._closing.set()
        self._note(why, exit_code, life.tail if life is not None else ())
        if self._container is not None and not dead:
            self._end_container(self._container, 0)
        return EXIT_FAILED if why.heals else EXIT_CONFIG

    def _end_container(self, container: Container, timeout_s: float) -> None:
        """Ends the container's processes; where Docker does not, by the first of them."""
        try:
            if self._reachable() is None:
                self.docker.stop(container.id, timeout_s)
                return
        except ContainerGone:
            return
        except (DockerAway, DockerRefused) as error:
            self.journal.write(f"Docker does not stop the container, its process is told: {error}", 4)
        self._end_process(container.pid, timeout_s)

    def _end_process(self, pid: int, timeout_s: float) -> None:
        if pid <= 0:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # it has ended, or it cannot be seen from here
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            for number, patience in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 10.0)):
                signal.pidfd_send_signal(descriptor, number)
                if poll.poll(patience * 1000):
                    return
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)

    def _stop(self, life: Supervision) -> int:
        """systemd asked. The container ends first, then it is removed, then we."""
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
            if self._reachable() is None:
                self._remove(self._container.id, stopping=True)
            else:
                self.journal.write("the Docker Engine is away: the next start removes the ended container", 4)
        except (DockerAway, DockerRefused, Launch) as error:
            self.journal.write(f"the ended container was not removed: {error}; the next start removes it", 4)
        return self._stopped()

    def _stop_before_launch(self) -> int:
        """Asked to stop before anything runs under us. What a supervisor before us left running must not stay."""
        patience = self.config.stop_timeout_s
        self.notifier.send(stopping=True, status=WORDS[Phase.STOPPING], extend_s=patience + EXTEND_BY_S)
        try:
            if self._reachable() is None:
                left = self._find(self.config.container)
                if left is not None and left.labels.get(LABEL_ENGINE) == self.config.engine:
                    self._end_container(left, patience)
                    self._remove(left.id, stopping=True)
        except (DockerAway, DockerRefused, Launch) as error:
            self.journal.write(f"a container of this engine may be left: {error}; the next start sees to it", 4)
        return self._stopped()

    def _stopped(self) -> int:
        self._record(phase=Phase.STOPPED, since=stamp())
        self.notifier.send(status=WORDS[Phase.STOPPED])
        return EXIT_OK

    def run(self) -> int:
        """The exit status of the unit's main process."""
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
    """Entry of `vllm-edge run-engine`."""
    from ..system.docker import DockerEngine

    notifier = Notifier.from_environment()
    journal = Journal(sys.stdout, prefixed=not sys.stdout.isatty())
    try:
        engine = load_engine(name, paths)
    except EngineConfigError as error:
        journal.write(str(error), 3)
        notifier.send(status=str(error))
        return EXIT_CONFIG
    watchdog_s = watchdog_seconds(os.environ, os.getpid())
    for name_of in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"):
        # They are addressed to this process: `systemctl`, which we ask about Docker, would report its own errors there.
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
