# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-edge run-engine`: runs one engine's container under systemd (Type=notify), from start to end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from ..paths import HostPaths
from ..system.docker import Container, DockerAway, DockerEngine, DockerRefused, parse_stamp
from ..system.http import Answer, request
from ..system.threads import Worker
from . import compile_cache, launch
from .config import EngineConfigError, load_engine
from .container import LaunchFailed
from .diagnosis import Death, explain
from .events import Died, DockerSeen, HealthSeen, LogLine, LogLost, ProbeSeen, Signalled, Stopped, UsageSeen
from .journal import Journal
from .launch import DOCKER_WAIT_S, Launcher
from .lifecycle import EXTEND_BY_S, Existing, Reaction, Supervision
from .loads import describe_load, find_longest, remember_load
from .metrics import kv_blocks
from .sd_notify import Notifier, read_watchdog_seconds
from .signatures import BLAMED_ON_CACHE, Explanation
from .startup import WORDS, Phase
from .state import stamp
from .watchers import Watchers

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 78
"""EX_CONFIG of sysexits.h: another attempt cannot succeed. The unit names it in RestartPreventExitStatus."""

STOP_LOADING_S = 3.0
"""Seconds to end by itself for an engine that is still loading. It has no requests to finish, and as PID 1 of its
container it ignores SIGTERM until vLLM has installed its handler."""
LAST_LINES_S = 10.0
"""Longest wait for the last lines of an ended container. They come at once, but from Docker on a busy host."""
TICK_S = 1.0
"""Seconds between two calls of `Supervision.on_tick`."""


@dataclass
class Supervisor(Launcher):
    """Runs one engine: launches or attaches to its container, supervises it, and ends it.

    It connects the decisions (`lifecycle.Supervision`) with Docker, the engine's HTTP server, systemd and the state
    file.

        main thread: run()

          launch            create the container, or attach to a running one of ours; retries what may pass (RETRYING)
          _begin            start the watcher threads
              |
          _supervise  <--- queue `events` ----+--  Watchers._follow_log      LogLine, LogLost
              |                               +--  Watchers._wait_for_end    DockerSeen, Died (docker wait)
              |                               +--  Watchers._watch_process   Died (pidfd)
              |                               +--  Watchers._watch_usage     UsageSeen
              |                               +--  Watchers._probe           HealthSeen
              |                               +--  Watchers._ask_token       ProbeSeen
              |                               +--  signal handler            Signalled
              |    each event and each tick: Supervision.on_...() -> Reaction -> _apply (journal, state file, systemd)
              |
          _stop  SIGTERM, SIGINT                  -> STOPPED, exit status EXIT_OK
          _bury  the container ended              -> _fail (or _stop, if a signal had arrived); launch again if the
                                                     compile cache was set aside, once
          _fail  launch failed, stall, hang, end  -> FAILED, exit status EXIT_FAILED (systemd restarts) or EXIT_CONFIG

          A signal during the launch raises Stopped, which leads to _stop -> STOPPED.

    Only the main thread decides, writes the state file and talks to systemd. All threads share `ContainerControl`.
    """

    watchdog_s: float | None = None
    """The unit's WatchdogSec in seconds; None if there is none."""
    ask: Callable[..., Answer] = request
    """Sends any other request than that of /health to the engine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._container: Container | None = None
        self._watchers = self._make_watchers()

    def _make_watchers(self) -> Watchers:
        given = (self.config, self.control, self.journal, self.events, self.watchdog_s, self.health, self.ask)
        return Watchers(*given)

    def run(self) -> int:
        """Run the engine until it ends; return the exit status of the unit's main process."""
        self.reporter.record()
        again = False
        while True:
            try:
                if again:  # the GPUs give their memory back meanwhile
                    self._wait_to_retry(launch.RETRY_FIRST_S, "The compile cache was set aside")
                container, how = self.launch()
                self.events.take_all()
                self.events.check_stop()
            except Stopped:
                return self._stop()
            except LaunchFailed as failure:
                return self._fail(None, failure.explanation, None)
            life = self._begin(container, how)
            try:
                status = self._supervise(life)
            finally:
                self._watchers.closing.set()
            if status is not None:
                return status
            again = True

    def _begin(self, container: Container, how: Existing) -> Supervision:
        self._container = container
        self._watchers = self._make_watchers()
        now = time.monotonic()
        begun = parse_stamp(container.started_at)
        age = 0.0 if begun is None or how is Existing.CREATE else max(0.0, time.time() - begun)
        previous = self.reporter.previous
        known = previous if previous and previous.container_id == container.id else None
        life = Supervision(
            self.config,
            started=now - age,
            was_ready=how is Existing.ATTACH_SERVING,
            load_seconds=known.load_seconds if known else None,
            load_phases=dict(known.load_phases) if known and known.load_seconds is not None else {},
            start_warnings=list(known.start_warnings) if known else [],
        )
        if how is not Existing.CREATE:
            # Earlier lines are in the journal already, but they show how far the engine is.
            with contextlib.suppress(DockerAway):  # _follow_log waits for Docker
                for record in self.control.read_log(container.id, 2000):
                    self._watchers.last_stamp = record.at
                    written = parse_stamp(record.at)
                    life.on_log(record.line, now - (max(0.0, time.time() - written) if written else 0.0))
            if known:
                life.progress.facts = {**known.log_facts, **life.progress.facts}
        life.last_log = now
        self.reporter.record(
            life.phase,
            starts=self.reporter.state.starts + (how is Existing.CREATE),
            container_id=container.id,
            started_at=container.started_at or stamp(),
            ready_at=known.ready_at if known else None,
            load_seconds=life.load_seconds,
            load_phases=life.load_phases if life.load_seconds is not None else {},
            log_facts=life.progress.facts,
            start_warnings=life.start_warnings,
        )
        # systemd may end a start later for this, never earlier. It counts if the log is lost: nobody extends then.
        longest = find_longest(self.paths.engine_loads(self.config.engine), self.config)
        if not life.was_ready and longest > age:
            self.notifier.send(extend_s=longest - age)
        self._watchers.start(container)
        return life

    def _apply(self, life: Supervision, reaction: Reaction) -> None:
        if reaction.say:
            self.journal.write(reaction.say, 5)
        if reaction.ready:
            self.reporter.record(
                life.phase,
                ready_at=self.reporter.state.ready_at or stamp(),
                load_seconds=life.load_seconds,
                load_phases=life.load_phases,
                log_facts=life.progress.facts,
                start_warnings=life.start_warnings,
            )
            self._remember_load(life)
            Worker(self.discard_cache)
            self.journal.write(f"{self.config.unit}: {life.status_text(time.monotonic())}")
        elif reaction.phase_changed:
            standstills = self.reporter.state.standstills + bool(life.standstill)
            self.reporter.record(life.phase, log_facts=life.progress.facts, standstills=standstills)
        elif reaction.late_facts:
            self.reporter.record(log_facts=life.progress.facts)
        if reaction.probe:
            self._watchers.send_probe()
        self.notifier.send(
            ready=reaction.ready, watchdog=reaction.watchdog, status=reaction.status, extend_s=reaction.extend_s
        )

    def _remember_load(self, life: Supervision) -> None:
        if life.was_ready or life.load_seconds is None:
            return
        try:
            told = life.load_seconds, life.load_phases, life.progress.facts, life.loading_read_bytes
            remember_load(self.paths.engine_loads(self.config.engine), describe_load(self.config, stamp(), *told))
        except OSError as error:
            self.journal.write(f"the load cannot be recorded: {error}", 4)

    def _supervise(self, life: Supervision) -> int | None:
        """Process events until the engine ends; return the exit status, None to start it again at once."""
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
                        return self._fail(life, life.explain_end_by_watchdog(now), None)
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
                    self._apply(life, life.on_health(answer, now, datetime.now().strftime("%H:%M:%S"), metrics))
                case UsageSeen(usage):
                    life.on_usage(usage, now)
                case ProbeSeen(answer):
                    life.advance.on_probe(answer, now)
                case DockerSeen(away):
                    self._apply(life, life.on_docker(away, now))

    def _drain(self, life: Supervision, wait_s: float) -> None:
        """Wait up to `wait_s` seconds for the last log lines, which explain most about the end."""
        self._watchers.wait_for_log(wait_s)
        for event in self.events.take_all():
            if isinstance(event, LogLine):
                life.scan.append(event.line)
                life.tail.append(event.line)

    def _gather_last_facts(self) -> tuple[Container | None, bool, bool]:
        """Return Docker's data on the ended container, whether it was removed, and whether Docker is away."""
        assert self._container is not None
        deadline = time.monotonic() + 0.7
        found: Container | None = None
        while True:
            if self.control.explain_unreachable(0.5) is not None:
                return None, False, True
            try:
                found = self.control.find(self._container.id)
            except DockerAway:
                return None, False, True
            except DockerRefused:
                return None, False, False
            if found is None or not found.running or time.monotonic() >= deadline:
                return found, found is None, False
            time.sleep(0.05)

    def _bury(self, life: Supervision) -> int | None:
        """Diagnose and record why the container ended by itself; return the exit status, None to start it again."""
        # Check at once: a restart of Docker may be over before the last lines have been read.
        restarted = self.control.has_docker_restarted()
        self._drain(life, 0.0 if self.control.away.is_set() else LAST_LINES_S)
        if self.events.signal is not None and self.events.signal != signal.SIGABRT:
            return self._stop(life)
        found, removed, away = self._gather_last_facts()
        # Docker may already be back, and does not remember that it stopped a container when it shut down itself.
        with_docker = restarted or self.control.has_docker_restarted() or self.control.away.is_set()
        away = away or with_docker or life.docker_away_since is not None
        outside: str | None = None
        if found is not None:
            dead = found.id
            with contextlib.suppress(DockerAway, DockerRefused):
                outside = self.control.ask(lambda: self.docker.killed_from_outside(dead, since_s=120))
        death = Death(
            lines=list(life.scan),
            exit_code=found.exit_code if found else None,
            oom_killed=bool(found and found.oom_killed),
            docker_message=found.error if found else "",
            was_serving=life.ready,
            removed=removed and not away,
            docker_away=away,
            live_restore=self.control.refresh_live_restore(),
            outside_signal=outside,
        )
        why, again = self._judge_cache(explain(death))
        status = self._fail(life, why, death.exit_code, dead=True)
        # One that had served goes the way of systemd, which bounds how often.
        return None if again and not life.ready else status

    def _judge_cache(self, why: Explanation) -> tuple[Explanation, bool]:
        """Set the compile cache aside, once, if it may be the cause; return the explanation, and whether it was."""
        cache = self.engine.cache
        if cache is None or why.cause not in BLAMED_ON_CACHE:
            return why, False
        if not self.cache_filled or compile_cache.find_aside(cache).exists():
            reason = f"{why.reason} (the compile cache was new, so it is not the cause)"
            return replace(why, cause="compile_failed", reason=reason), False
        try:
            aside = compile_cache.set_aside(cache, self.engine.uid)
        except OSError as error:
            self.journal.write(f"the compile cache may be the cause and cannot be set aside: {error}", 4)
            return why, False
        remedy = (
            f"Its compile cache may be the cause: it was set aside as {aside}, and the engine starts again with an "
            "empty one, which takes longer. If that start succeeds, nothing has to be done"
        )
        return replace(why, remedy=remedy, heals=True), True

    def _fail(self, life: Supervision | None, why: Explanation, exit_code: int | None, *, dead: bool = False) -> int:
        """Record a failure and end the engine, which must not run unsupervised; return the exit status."""
        self._watchers.closing.set()
        self.reporter.note_failure(why, exit_code, life.tail if life is not None else ())
        if self._container is not None and not dead:
            self.control.end(self._container, 0)
        return EXIT_FAILED if why.heals else EXIT_CONFIG

    def _stop(self, life: Supervision | None = None) -> int:
        """Stop the engine for systemd: end the container, remove it, return the exit status.

        Without `life` the launch was not complete, and a container that an earlier supervisor left running is ended.
        """
        patience = self.config.stop_timeout_s
        if life is not None and not life.ready:
            patience = min(patience, STOP_LOADING_S)
        self.notifier.send(stopping=True, status=WORDS[Phase.STOPPING], extend_s=patience + EXTEND_BY_S)
        self.reporter.record(Phase.STOPPING)
        try:
            container = self._container if life is not None else self._find_left()
            if container is not None:
                self.journal.write(f"stopping container {container.name}, {patience:g} s to end by itself")
                self.control.end(container, patience)
                if life is not None:
                    self._drain(life, 0.5)
                    self._watchers.closing.set()
                if self.control.explain_unreachable() is None:
                    self.control.remove(container.id, stopping=True)
                else:
                    self.journal.write("the Docker Engine is away: the next start removes the ended container", 4)
        except (DockerAway, DockerRefused, LaunchFailed) as error:
            self.journal.write(f"a container of this engine may be left: {error}; the next start removes it", 4)
        self.reporter.record(Phase.STOPPED)
        self.notifier.send(status=WORDS[Phase.STOPPED])
        return EXIT_OK

    def _find_left(self) -> Container | None:
        left = self.control.find(self.config.container) if self.control.explain_unreachable() is None else None
        return left if left is not None and left.engine == self.config.engine else None


def run_engine(name: str, paths: HostPaths, *, docker_wait_s: float = DOCKER_WAIT_S) -> int:
    """Run `vllm-edge run-engine`.

    Returns EXIT_OK after a requested stop, EXIT_FAILED if another attempt may succeed, else EXIT_CONFIG.
    """
    notifier = Notifier(os.environ.get("NOTIFY_SOCKET"))
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
        engine, paths, DockerEngine(), notifier, journal, watchdog_s=watchdog_s, docker_wait_s=docker_wait_s
    )
    supervisor.events.install_signals()
    return supervisor.run()
