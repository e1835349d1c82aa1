# SPDX-License-Identifier: Apache-2.0
"""Decisions of the supervisor, without any input or output.

They concern what to do with a container that already exists, and what each event (a log line, an answer of /health,
Docker going away and coming back, time passing) means for what systemd is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ..names import LABEL_ENGINE, LABEL_INPUT_HASH
from ..system.docker import Container
from ..system.http import Answer
from .config import EngineConfig
from .diagnosis import find_start_warning
from .metrics import Advance
from .signatures import Explanation
from .startup import BUSY_PHASES, STARTING_PHASES, WORDS, Phase, Progress, is_progress
from .state import TAIL_LINES, EngineState
from .usage import Usage

SCAN_LINES = 600
"""Log lines that are kept for the diagnosis."""
STATUS_EVERY_S = 2.0
"""Least seconds between two status texts, unless the phase changes."""
EXTEND_EVERY_S = 5.0
"""Seconds between two extensions of the start timeout while the engine loads."""
EXTEND_BY_S = 60.0
READS_BYTES_PER_S = 1024 * 1024
"""Bytes per second that a loading container must read from disks to make progress."""
FAULTS_PER_S = 1.0
"""Major page faults per second that are as much: each reads a page of a mapped file and what is read ahead of it."""
COMPUTES_SHARE = 0.1
"""Share of one core that a loading container must use to make progress. Waiting processes of vLLM use about 1 %."""
COMPUTES_ALONE_S = 1200.0
"""Seconds during which computing alone is progress: ranks that wait for each other in NCCL for ever compute, too."""
UNSEEN = "does what cannot be seen: its control group in /sys/fs/cgroup cannot be read"
SILENT_S = 30.0
"""Seconds without a line in the log after which the status tells what the container does instead."""


class Existing(Enum):
    CREATE = "create"
    REFUSE = "refuse"
    REMOVE = "remove"
    STOP_AND_REMOVE = "stop and remove"
    ATTACH_SERVING = "attach, it serves"
    ATTACH_LOADING = "attach, it still loads"


@dataclass(frozen=True)
class Decision:
    what: Existing
    why: str


@dataclass(frozen=True)
class Found:
    """What was found out about a running container of the engine."""

    health: Answer
    was_ready: bool
    """Whether it has ever answered /health."""
    log_age_s: float | None
    """Seconds since its last log line (or its start); None if unknown."""
    doing: str = ""
    """What its processes do although its log is silent, as `describe_work` says; empty if nothing or not asked."""


def is_other_image(container: Container, config: EngineConfig) -> bool:
    """Return whether a container was made from another image than the engine's; False if either is not known."""
    return bool(container.image_id and config.image_id) and container.image_id != config.image_id


def decide_existing(container: Container | None, config: EngineConfig, look: Callable[[Container], Found]) -> Decision:
    """Decide what to do with an existing container.

    Containers of others are never touched. One of ours is kept only if it has the right configuration and is alive.
    `container` is the one with the engine's container name, None if there is none. `look` finds out its condition,
    which may take health_timeout_s: it is called only where the decision depends on it.
    """
    if container is None:
        return Decision(Existing.CREATE, "no container of this name")
    owner = container.labels.get(LABEL_ENGINE)
    if owner != config.engine:
        told = f"belongs to the engine {owner!r}" if owner else f"has no label {LABEL_ENGINE}, so it is not ours"
        return Decision(
            Existing.REFUSE,
            f"a container named {container.name} exists (image {container.image}, {container.status}) and {told}: it "
            f"is left alone; rename or remove it, then start {config.unit} again",
        )
    if not container.running:
        return Decision(Existing.REMOVE, f"the previous container is {container.status}")
    if container.labels.get(LABEL_INPUT_HASH) != config.input_hash:
        return Decision(Existing.STOP_AND_REMOVE, "the running container was made from other inputs")
    if is_other_image(container, config):
        return Decision(
            Existing.STOP_AND_REMOVE,
            f"the running container was made from the image {container.image_id}, the engine's is {config.image_id}",
        )
    found = look(container)
    if found.health.ok:
        return Decision(Existing.ATTACH_SERVING, "the running container is the right one and answers /health")
    if found.was_ready:
        return Decision(
            Existing.STOP_AND_REMOVE,
            f"the running container has served before and does not answer /health now ({found.health.words()})",
        )
    if found.log_age_s is not None and found.log_age_s < config.stall_timeout_s:
        return Decision(Existing.ATTACH_LOADING, "the running container is the right one and still loads")
    if found.doing:
        return Decision(
            Existing.ATTACH_LOADING, f"the running container is the right one, its log is silent, and it {found.doing}"
        )
    return Decision(
        Existing.STOP_AND_REMOVE,
        "the running container has never answered, its log stands still, and it neither reads nor computes",
    )


def describe_work(before: Usage, after: Usage, span_s: float) -> tuple[str, bool]:
    """Return what the processes of a loading container have done in some seconds, and whether that was reading.

    The text is empty if they did nothing that counts as progress.
    """
    reads = (after.read_bytes - before.read_bytes) / span_s
    if reads >= READS_BYTES_PER_S:
        return f"reads {reads / 2**20:.0f} MiB/s", True
    if (after.faults - before.faults) / span_s >= FAULTS_PER_S:
        return "reads mapped files", True
    return ("computes" if (after.cpu_s - before.cpu_s) / span_s >= COMPUTES_SHARE else ""), False


def had_been_ready(container: Container, state: EngineState | None, lines: Sequence[str]) -> bool:
    """Return whether the container has ever answered /health.

    The state file decides if it is about this container, else vLLM's log, which says when its server has started.
    """
    if state is not None and state.container_id == container.id:
        return state.ready_at is not None
    return any("Application startup complete" in line for line in lines)


@dataclass(frozen=True)
class Reaction:
    """What the supervisor has to do after an event. Usually nothing."""

    ready: bool = False
    """Tell systemd that the engine is ready."""
    watchdog: bool = False
    """Feed systemd's watchdog."""
    status: str | None = None
    """New status text for systemd."""
    extend_s: float | None = None
    """Extend the start timeout by so many seconds."""
    phase_changed: bool = False
    """Record the new phase."""
    say: str | None = None
    """Message for the journal."""
    give_up: Explanation | None = None
    """End the engine for this reason."""
    probe: bool = False
    """Ask the engine for one token."""
    late_facts: bool = False
    """Record figures of the load again: Docker delivered their line after the first answer of /health."""


NOTHING = Reaction()


def _format_span(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min {whole % 60:02d} s"


@dataclass
class Supervision:
    """State of an engine from the start of its container to its end, and the reaction to each event.

    The supervisor's main thread calls the `on_...` methods, one per event, and carries out the Reaction that they
    return. All times are seconds of one monotonic clock.

        STARTING ... HEALTH   on_log advances the phase with vLLM's log (startup.Progress); on_tick gives up
              |               after stall_timeout_s without progress; on_usage knows progress without a line
              | first good on_health
           SERVING  <------>  UNHEALTHY
                on_health: each good answer feeds systemd's watchdog; bad answers do not, nor good ones of an
                engine that makes no progress (Advance), so the watchdog ends an engine that stays UNHEALTHY

    While Docker is away, or the log or what the processes use is unreadable, silence in the log does not count as a
    stall; the start timeout of the unit applies.
    """

    config: EngineConfig
    started: float
    was_ready: bool = False
    """Whether the container served before this supervisor attached to it."""
    load_seconds: float | None = None
    """Seconds from the start of the container to the first answer of /health."""
    load_phases: dict[str, float] = field(default_factory=dict)
    """The same seconds by phase; complete with the first answer of /health."""
    loading_read_bytes: int | None = None
    """Bytes that the container read from disks while it loaded weights; None if they were not counted."""
    progress: Progress = field(default_factory=Progress)
    start_warnings: list[str] = field(default_factory=list)
    ready: bool = False
    phase: Phase = Phase.STARTING
    scan: deque[str] = field(default_factory=lambda: deque(maxlen=SCAN_LINES))
    """Log lines for the diagnosis."""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    """Log lines for the failure record."""
    last_log: float = 0.0
    """When the log last showed progress."""
    last_read: float = 0.0
    """When the container's reading last showed progress."""
    last_moved: float = 0.0
    """When the log, reading or computing last showed progress."""
    doing: str = ""
    """What the container does while its log is silent, as text."""
    last_ok: float | None = None
    """When /health last answered."""
    unhealthy_since: float | None = None
    unhealthy_clock: str = ""
    """The same time as wall clock, for the status text."""
    unhealthy_answer: str = ""
    standstill: str = ""
    """The requests of an engine that answers /health and makes no progress, as text; else empty."""
    docker_away_since: float | None = None
    log_lost: bool = False
    usage_lost: bool = False
    """Whether nobody can tell if the container works in silence."""
    _usage: tuple[Usage, float] | None = None
    _usage_phase: Phase = Phase.STARTING
    """The phase when `_usage` was read."""
    _phase_at: float = 0.0
    _status: str = ""
    _status_at: float = float("-inf")
    _extended_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.last_log = self.last_log or self.started
        self._phase_at = self.started
        self.advance = Advance(self.config.progress_timeout_s, self.config.idle_probe_s, self.started)

    def status_text(self, now: float) -> str:
        config = self.config
        names = ", ".join(config.served_names)
        if self.phase is Phase.SERVING:
            loaded = "" if self.load_seconds is None else f", loaded in {_format_span(self.load_seconds)}"
            away = "" if self.docker_away_since is None else "; the Docker Engine is away, clients cannot connect"
            return f"serving {names} at {config.url} ({config.model} {config.precision}){loaded}{away}"
        if self.phase is Phase.UNHEALTHY:
            since = f"not answering /health since {self.unhealthy_clock} ({self.unhealthy_answer})"
            if self.standstill:
                since = f"requests make no progress, seen at {self.unhealthy_clock} ({self.standstill})"
            return f"{since}; the watchdog restarts the engine if it stays so"
        if self.phase in STARTING_PHASES:
            unseen = "; its log cannot be read" if self.log_lost else ""
            silent = now - self.last_log
            doing = f"; no line for {_format_span(silent)}, {self.doing}" if self.doing and silent >= SILENT_S else ""
            return f"{self.progress.words()}, {_format_span(now - self.started)}{doing}{unseen}"
        return WORDS[self.phase]

    def _react(self, now: float, reaction: Reaction = NOTHING, before: Phase | None = None) -> Reaction:
        """Return the reaction with the status text if it changed (not too often), and more start timeout while loading.

        `before` is the phase before the event.
        """
        changed = before is not None and before is not self.phase
        text = self.status_text(now)
        due = changed or reaction.ready or now - self._status_at >= STATUS_EVERY_S
        status = text if text != self._status and due else None
        if status is not None:
            self._status, self._status_at = text, now
        extend: float | None = None
        # Where nobody sees whether the engine advances, its unit's start timeout applies.
        unseen = self.log_lost or (self.usage_lost and now - self.last_log >= self.config.stall_timeout_s)
        if not self.ready and not unseen and now - self._extended_at >= EXTEND_EVERY_S:
            extend, self._extended_at = EXTEND_BY_S, now
        return replace(reaction, status=status, extend_s=extend, phase_changed=changed)

    def _end_phase(self, now: float) -> None:
        self.load_phases[self.phase] = round(self.load_phases.get(self.phase, 0.0) + now - self._phase_at, 1)
        self._phase_at = now

    def on_log(self, line: str, now: float) -> Reaction:
        before = self.phase
        self.scan.append(line)
        self.tail.append(line)
        if is_progress(line):
            self.last_log = now
        known = dict(self.progress.facts)
        self.progress.feed(line)
        warning = None if self.ready else find_start_warning(line)
        if warning and warning.sentence() not in self.start_warnings:
            self.start_warnings.append(warning.sentence())
        late = self.ready and self.progress.facts != known
        if not self.ready and self.phase is not self.progress.phase:
            self._end_phase(now)
            self.phase = self.progress.phase
        return self._react(now, Reaction(late_facts=late), before)

    def on_usage(self, usage: Usage | None, now: float) -> None:
        """Process what the processes of a loading container have used: the log may be silent while they work."""
        self.usage_lost = usage is None
        if usage is None:
            self.doing = UNSEEN
            return
        before, at = self._usage or (usage, now)
        self._usage, self.doing = (usage, now), ""
        span = now - at
        if Phase.LOADING in (self.phase, self._usage_phase):
            self.loading_read_bytes = (self.loading_read_bytes or 0) + max(0, usage.read_bytes - before.read_bytes)
        self._usage_phase = self.phase
        if span <= 0 or self.phase not in BUSY_PHASES:
            return
        self.doing, reads = describe_work(before, usage, span)
        if reads:
            self.last_read = now
        if reads or (self.doing and now - max(self.last_log, self.last_read) < COMPUTES_ALONE_S):
            self.last_moved = now

    def on_health(self, answer: Answer, now: float, clock: str, metrics: str = "") -> Reaction:
        """Process an answer of /health.

        `clock` is the wall clock time as text, for messages; `metrics` the text of /metrics at the same time, empty if
        it could not be read.
        """
        before = self.phase
        self.advance.on_metrics(metrics, now)
        still = self.advance.find_standstill(now) if answer.ok and self.ready else None
        if not answer.ok or still is not None:
            if not self.ready:
                return self._react(now)
            say = None
            self.standstill = "" if still is None else self.advance.describe_work()
            if self.unhealthy_since is None:
                self.unhealthy_since, self.unhealthy_clock = now, clock
                say = f"/health does not answer: {answer.words()}"
                if still is not None:
                    say = f"requests make no progress for {_format_span(still)} ({self.standstill})"
            self.unhealthy_answer = answer.words()
            self.phase = Phase.UNHEALTHY
            return self._react(now, Reaction(say=say), before)
        say = None
        first = not self.ready
        if first:
            self.ready = True
            if self.load_seconds is None and not self.was_ready:
                self._end_phase(now)
                self.load_seconds = round(now - self.started, 1)
            self.advance.moved_at = now
            # Lines from loading do not explain a later failure.
            self.scan.clear()
        elif self.unhealthy_since is not None:
            what = "requests make progress" if self.standstill else "/health answers"
            say = f"{what} again after {_format_span(now - self.unhealthy_since)}"
        self.unhealthy_since, self.standstill = None, ""
        self.last_ok = now
        self.phase = Phase.SERVING
        probe = self.advance.take_probe(now)
        return self._react(now, Reaction(ready=first, watchdog=True, say=say, probe=probe), before)

    def on_docker(self, away: bool, now: float) -> Reaction:
        if away == (self.docker_away_since is not None):
            return self._react(now)
        say = None
        if away:
            self.docker_away_since = now
            say = "the Docker Engine is away; the engine's process lives, waiting for Docker to come back"
        elif self.docker_away_since is not None:
            say = f"the Docker Engine is back after {_format_span(now - self.docker_away_since)}"
            self.docker_away_since = None
            # While Docker was away no log line could be read, so the silence was not the engine's.
            self.last_log = now
        self._status_at = float("-inf")
        return self._react(now, Reaction(say=say))

    def on_log_lost(self, why: str | None, now: float) -> Reaction:
        """Process that the log became unreadable (`why`) or readable again (None)."""
        if (why is not None) == self.log_lost:
            return self._react(now)
        self.log_lost = why is not None
        self.last_log = now
        self._status_at = float("-inf")
        said = "the engine's log can be read again" if why is None else f"the engine's log cannot be read: {why}"
        return self._react(now, Reaction(say=said))

    def on_tick(self, now: float) -> Reaction:
        """Process that time has passed; gives up on an engine that stands still while it loads."""
        silent = now - max(self.last_log, self.last_moved)
        heard = self.docker_away_since is None and not self.log_lost and not self.usage_lost
        if not self.ready and heard and silent >= self.config.stall_timeout_s:
            stalled = Explanation(
                "stalled",
                f"the engine's log did not advance for {silent:.0f} s ({self.progress.words()}), and what its "
                "container read and computed was no sign of progress; it was ended",
                "If a phase takes that long on this host, raise vllm_engine_stall_timeout_s; with several GPUs, NCCL "
                "may hang",
            )
            return self._react(now, Reaction(give_up=stalled))
        return self._react(now)

    def explain_end_by_watchdog(self, now: float) -> Explanation:
        remedy = (
            "systemd starts it again; when it repeats, look at the last requests and at `journalctl -k` for Xid lines"
        )
        if self.standstill:
            return Explanation(
                "no_progress",
                f"the engine answered /health, but none of its requests ({self.standstill}) made progress for "
                f"{self.advance.get_still_s(now):.0f} s; systemd's watchdog ended it",
                f"{remedy}; if one step of this engine really takes that long, raise vllm_engine_progress_timeout_s",
            )
        return Explanation(
            "hung",
            f"the engine has not answered /health for {self.get_unanswered_s(now):.0f} s "
            f"({self.unhealthy_answer or 'no answer'}); systemd's watchdog ended it",
            remedy,
        )

    def get_unanswered_s(self, now: float) -> float:
        return now - (self.started if self.last_ok is None else self.last_ok)
