# SPDX-License-Identifier: Apache-2.0
"""The words of a switch: phases, generations, moves, the journal, and what the transaction asks of the host.

A switch takes the host from the committed generation to another one, and back again where that fails. `switch.py` is
the transaction, `host_world.py` the host, `generations.py` the directories, `journal.py` the files; this file is what
they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal, Protocol

from ..generation.model import FileChange, Generation, Limits


class Phase(StrEnum):
    """What a switch does, in order. Each is written to the journal before it acts."""

    PREFLIGHT = "preflight"
    """Image, weights, ports, GPUs, disk: everything that can be known to fail, before anything is touched."""
    PREPARE = "prepare"
    """Weights of the new engines into the page cache, while the old ones serve."""
    DRAIN = "drain"
    """Hook `before_drain`, then no request runs, or the limit has passed. From here on a failure rolls back."""
    STOP = "stop"
    FREE = "free"
    """The memory of the GPUs that are needed is measured free."""
    INSTALL = "install"
    """Files of the engines that start. Not the target: that always wants the engines of the committed generation."""
    START = "start"
    HEALTHY = "healthy"
    WARM_UP = "warm_up"
    CANARY = "canary"
    MEASURE = "measure"
    """VRAM of every GPU against its budget."""
    COMMIT = "commit"
    """One rename, onto active-profile.json."""
    CLEAN_UP = "clean_up"
    """The target of the new generation, files of engines that are no more, old generations, hook `after_commit`."""


PHASES: tuple[Phase, ...] = tuple(Phase)
HARMLESS: frozenset[Phase] = frozenset({Phase.PREFLIGHT, Phase.PREPARE})
"""A failure in these has touched nothing: the switch is refused, not rolled back."""
BACK_PHASES: tuple[Phase, ...] = tuple(
    phase for phase in Phase if phase not in {Phase.PREFLIGHT, Phase.PREPARE, Phase.DRAIN, Phase.COMMIT}
)
"""What a rollback goes through: the same machinery towards the committed generation."""

Direction = Literal["forward", "back"]


class Result(StrEnum):
    """How a switch ended."""

    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    """Nothing differed: nothing was touched."""
    REFUSED = "refused"
    """Something was wrong before anything was touched."""
    ROLLED_BACK = "rolled_back"
    """It failed, and the committed generation serves again, verified."""
    FAILED = "failed"
    """It failed, and the committed generation does not serve in full either: the message says what runs."""


class Exit(IntEnum):
    """Exit status of `vllm-edge switch`, `rollback`, `recover` and `run-switch`."""

    OK = 0
    ROLLED_BACK = 1
    REFUSED = 2
    FAILED = 3
    BUSY = 4
    """Another switch holds the lock: nothing was done."""


EXITS: Mapping[Result, Exit] = {
    Result.COMMITTED: Exit.OK,
    Result.UNCHANGED: Exit.OK,
    Result.REFUSED: Exit.REFUSED,
    Result.ROLLED_BACK: Exit.ROLLED_BACK,
    Result.FAILED: Exit.FAILED,
}


@dataclass(frozen=True)
class Moves:
    """What has to happen so that the host is what a generation says."""

    keep: tuple[str, ...] = ()
    """Engines that run with the wanted input hash: they are not touched."""
    stop: tuple[str, ...] = ()
    """Engines of ours that run, load or wait for a restart and are not wanted so; a changed one's former self, too."""
    start: tuple[str, ...] = ()
    """Engines of the generation that do not run as wanted."""
    wait: tuple[str, ...] = ()
    """Engines that are just loading with the wanted input hash: they are waited for, not started again."""
    files: tuple[FileChange, ...] = ()
    """Live files to be written or removed, those of the target included."""
    target: tuple[str, ...] = ()
    """What is wrong with the target's state in systemd: `not enabled`, `not active`, `needs daemon-reload`."""

    def __bool__(self) -> bool:
        return bool(self.stop or self.start or self.wait or self.files or self.target)


@dataclass(frozen=True)
class Done:
    """A phase went well: one sentence for people, and what the journal keeps for programs."""

    detail: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Keys `canary` (rows of results), `gpus` (rows of vram) and `drift` go into the journal under their names."""
    warnings: tuple[str, ...] = ()


class PhaseFailed(Exception):
    """A phase did not do what it is for. The text is one paragraph: what was seen, why, what would do."""

    def __init__(self, text: str, *, engines: Iterable[str] = (), data: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.engines = tuple(engines)
        """Engines it is about; the others may serve."""
        self.data: Mapping[str, Any] = data or {}


class Interrupted(BaseException):
    """A signal asked the switch to end: it goes back to the committed generation, unless the host goes down.

    It may be raised anywhere in a phase, hence no Exception: code that catches whatever a library raises must let it
    through.
    """


class World(Protocol):
    """The host, as the transaction needs it. Everything here may raise PhaseFailed; nothing else is expected.

    Actions are idempotent: a recovery repeats them without knowing how far the former one came.
    """

    def monotonic(self) -> float:
        """Seconds that no clock change moves. All durations and deadlines are of it."""
        ...

    def stamp(self) -> str:
        """Wall clock, for people only: `2026-11-21T16:40:00Z`."""
        ...

    def boot_id(self) -> str: ...

    def going_down(self) -> bool:
        """Whether systemd is stopping the host: then nothing is rolled back now, the boot does it."""
        ...

    def moves(self, wanted: Generation) -> Moves:
        """What runs and what lies in the live files, held against a generation."""
        ...

    def preflight(self, wanted: Generation, moves: Moves) -> Done: ...

    def prepare(self, wanted: Generation, moves: Moves) -> Done: ...

    def hook(
        self, name: Literal["before_drain", "after_commit"], wanted: Generation, former: Generation | None
    ) -> Done: ...

    def drain(self, moves: Moves, limits: Limits) -> Done: ...

    def stop(self, moves: Moves) -> Done:
        """Stops units of `moves.stop` side by side, and removes containers that outlive their unit."""
        ...

    def free(self, wanted: Generation, moves: Moves) -> Done:
        """Waits until the GPUs of `moves.start` hold nothing of ours; past the limit names who does, ends only ours."""
        ...

    def install(self, wanted: Generation, moves: Moves) -> Done:
        """Engine files and units of `start`, `keep` and `wait` where they differ, and daemon-reload. Not the target."""
        ...

    def start(self, moves: Moves) -> Done:
        """reset-failed and start without waiting, all side by side."""
        ...

    def healthy(self, wanted: Generation, moves: Moves, *, all_of_them: bool) -> Done:
        """Waits until all of `start` and `wait` are active. Fails at the first that ends, with its explanation; with
        `all_of_them` (a rollback) waits for every one and then fails with those that do not serve."""
        ...

    def warm_up(self, wanted: Generation, moves: Moves) -> Done: ...

    def canary(self, wanted: Generation) -> Done:
        """Every served name of every engine; data `canary`."""
        ...

    def measure(self, wanted: Generation) -> Done:
        """data `gpus` and `drift`."""
        ...

    def clean_up(self, wanted: Generation, former: Generation | None) -> Done:
        """Target of `wanted` written, enabled, started; files of other engines removed; old generations pruned."""
        ...

    def what_runs(self, wanted: Generation) -> str:
        """For the message of a failure: each engine and whether it serves, in a sentence."""
        ...

    def watch(self, wanted: Generation, former: Generation | None) -> Watch:
        """Begins to ask for every role, as a client would. Its gaps, and the phases that `end` is given, are of
        `monotonic`; the transaction puts them into the switch's own time."""
        ...


class Watch(Protocol):
    """Asks every role twice a second from its beginning to `end`."""

    def end(self, phases: Iterable[PhaseRecord]) -> dict[str, Downtime]:
        """By role."""
        ...


# -- the journal


@dataclass(frozen=True)
class PhaseRecord:
    """One phase in the journal. `seconds` and `outcome` are None while it lasts."""

    phase: Phase
    direction: Direction
    began_at: str
    began_s: float
    """Seconds since the switch began."""
    seconds: float | None = None
    outcome: Literal["done", "failed"] | None = None
    detail: str = ""


@dataclass(frozen=True)
class Gap:
    """A time in which nobody answered for a role, seconds since the switch began; `to_s` None: not back at the end."""

    from_s: float
    to_s: float | None


@dataclass(frozen=True)
class Downtime:
    """Of one role, as a client of it sees it."""

    seconds: float
    gaps: tuple[Gap, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of it by phase (`stop`, `healthy`, ...; those of a rollback as `back:healthy`)."""
    asked: int = 0


@dataclass(frozen=True)
class Journal:
    """`switch.json`, and for good `history/<id>.json`. Times are UTC, for people; durations are monotonic."""

    id: str
    """`<UTC time without punctuation>-<generation>`."""
    generation: int
    profile: str
    from_generation: int | None
    from_profile: str | None
    origin: str
    """Who chose the profile: `inventory`, `-e` or `host`."""
    asked_by: str
    """`site.yml by alice`, `vllm-edge switch by root`."""
    pid: int
    boot_id: str
    started_at: str
    began_monotonic_s: float | None = None
    """Of boot `boot_id`: a recovery of the same boot goes on counting from here."""
    ended_at: str | None = None
    seconds: float | None = None
    direction: Direction = "forward"
    phase: Phase | None = None
    result: Result | None = None
    message: str = ""
    keep: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    phases: tuple[PhaseRecord, ...] = ()
    downtime: Mapping[str, Downtime] = field(default_factory=dict)
    canary: tuple[Mapping[str, Any], ...] = ()
    gpus: tuple[Mapping[str, Any], ...] = ()
    drift: tuple[Mapping[str, Any], ...] = ()
    """Plan against measurement, a row for each component."""
    warnings: tuple[str, ...] = ()
    format: int = 1
