# SPDX-License-Identifier: Apache-2.0
"""The types that the modules of a switch share: phases, results, moves with how they are decided, and the journal.

A switch takes the host from the committed generation to another one, and back if that fails. transaction.py has the
order of the phases, host.py the work of each phase on the host, journal.py the files of the journal, and the
package `generation` the directories of generations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

from ..generation.model import FileChange, Generation, SeenEngine


class Phase(StrEnum):
    """The phases of a switch, in order. Each is written to the journal before it begins."""

    PREFLIGHT = "preflight"
    """Checks image, weights, GPUs and disk: everything that can be known to fail before anything is changed."""
    PREPARE = "prepare"
    """Reads the weights of the new engines into the page cache while the old engines serve."""
    AWAY = "away"
    """Tells the gateway which served names go away: their requests wait from now on, and running ones finish. From here
    on a failure rolls back."""
    DRAIN = "drain"
    """Runs the hook `before_drain`, then waits until no request runs or the limit has passed."""
    STOP = "stop"
    FREE = "free"
    """Waits until the GPUs that are needed are measured to be free."""
    INSTALL = "install"
    """Writes the files of the engines that start. The target is not written: it must always want the engines of the
    committed generation."""
    START = "start"
    HEALTHY = "healthy"
    """Waits until the last engine serves. Each one goes on to the next three by itself, and then clients may reach it:
    these phases wait for those that are not yet done."""
    WARM_UP = "warm_up"
    CANARY = "canary"
    MEASURE = "measure"
    """Compares the VRAM of every GPU of the host with its budget."""
    COMMIT = "commit"
    """Renames one file onto active-profile.json."""
    BACK = "back"
    """Tells the gateway that the committed generation serves: requests that waited go on to its engines."""
    CLEAN_UP = "clean_up"
    """Writes the target of the new generation, removes files of engines that are gone and old generations, and runs the
    hook `after_commit`."""


PHASES: tuple[Phase, ...] = tuple(Phase)
HARMLESS: frozenset[Phase] = frozenset({Phase.PREFLIGHT, Phase.PREPARE})
"""A failure in one of these phases has changed nothing: the switch is refused and not rolled back."""
ONWARD: frozenset[Phase] = frozenset({Phase.BACK, Phase.CLEAN_UP})
"""What follows the commit: it runs even without the journal, whatever of it fails, and is never rolled back."""
BACK_PHASES: tuple[Phase, ...] = tuple(
    phase for phase in Phase if phase not in {Phase.PREFLIGHT, Phase.PREPARE, Phase.COMMIT}
)
"""The phases of a rollback, which runs them towards the committed generation."""

Direction = Literal["forward", "back"]


class Result(StrEnum):
    COMMITTED = "committed"
    OVER_BUDGET = "over_budget"
    """A first switch whose engines serve and use more memory than their budgets: there is nothing to go back to."""
    MEASURED = "measured"
    """A calibration: its engines were measured, and what was committed before serves again and is verified."""
    UNCHANGED = "unchanged"
    """The host already was as wanted: nothing was changed."""
    REFUSED = "refused"
    """A problem was found before anything was changed."""
    ROLLED_BACK = "rolled_back"
    """The switch failed; the committed generation serves again and is verified."""
    FAILED = "failed"
    """The switch failed, and the host is not fully as the committed generation says. The message says what runs."""


class Exit(IntEnum):
    """Exit status of `vllm-edge switch`, `rollback`, `recover` and `run-switch`."""

    OK = 0
    ROLLED_BACK = 1
    REFUSED = 2
    FAILED = 3
    BUSY = 4
    """Another switch holds the lock: nothing was done."""
    OVER_BUDGET = 5


EXITS: Mapping[Result, Exit] = {result: Exit.__members__.get(result.name, Exit.OK) for result in Result}


@dataclass(frozen=True)
class Moves:
    """What has to change so that the host is as a generation says. It is false if nothing has to change."""

    keep: tuple[str, ...] = ()
    """Engines that run with the wanted input hash; they are not touched."""
    stop: tuple[str, ...] = ()
    """Engines of ours that run, load or wait for a restart and are not wanted in that form. An engine that changed is
    here and in `start`."""
    start: tuple[str, ...] = ()
    """Engines of the generation that do not run as wanted."""
    wait: tuple[str, ...] = ()
    """Engines that are loading with the wanted input hash: the switch waits for them and does not start them again."""
    files: tuple[FileChange, ...] = ()
    """Live files to write or remove, including those of the target."""
    target: tuple[str, ...] = ()
    """What is wrong with the state of the target in systemd: `not enabled`, `not active`, `needs daemon-reload`."""

    def __bool__(self) -> bool:
        return bool(self.stop or self.start or self.wait or self.files or self.target)


@dataclass(frozen=True)
class Done:
    """The result of a phase that succeeded: `detail` is one sentence for people, `data` is for programs."""

    detail: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The keys `canary` (rows of results), `quality` (rows of verdicts), `gpus` (rows of the VRAM evaluation), `drift`,
    `over_budget` and `measured` are copied to the journal."""
    warnings: tuple[str, ...] = ()


class PhaseFailed(Exception):
    """A phase failed. The text is one paragraph: what was seen, why, and what to do."""

    def __init__(
        self,
        text: str,
        *,
        engines: Iterable[str] = (),
        data: Mapping[str, Any] | None = None,
        phase: Phase | None = None,
    ) -> None:
        super().__init__(text)
        self.text, self.phase = text, phase
        self.engines = tuple(engines)
        """The engines that the failure concerns; the others may serve."""
        self.data: Mapping[str, Any] = data or {}


class Interrupted(BaseException):
    """A signal asked the switch to end. It rolls back to the committed generation, unless the host is shutting down.

    It may be raised at any point of a phase. It is not an Exception, so that code that catches every error of a library
    lets it pass.
    """


@dataclass(frozen=True)
class PhaseRecord:
    """One phase in the journal. `seconds` and `outcome` are None while it runs."""

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
    """A time in which no engine answered for a served name, in seconds since the switch began.

    `to_s` is None if there was no answer again by the end of the switch.
    """

    from_s: float
    to_s: float | None


@dataclass(frozen=True)
class Downtime:
    """The downtime of one served name, as its clients see it."""

    seconds: float
    gaps: tuple[Gap, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the downtime by phase (`stop`, `healthy`, ...; phases of a rollback as `back:healthy`)."""
    asked: int = 0


@dataclass(frozen=True)
class Journal:
    """The content of `switch.json`, which is kept as `history/<id>.json`. Times are UTC and for people; durations are
    monotonic."""

    id: str
    """`<UTC time without punctuation>-<generation>`."""
    generation: int
    profile: str
    from_generation: int | None
    from_profile: str | None
    origin: str
    """Who chose the profile: `inventory`, `-e` or `host`."""
    asked_by: str
    """For example `site.yml by alice` or `vllm-edge switch by root`."""
    pid: int
    boot_id: str
    started_at: str
    began_monotonic_s: float | None = None
    """In the clock of the boot `boot_id`: a recovery in the same boot continues to count from here."""
    ended_at: str | None = None
    seconds: float | None = None
    direction: Direction = "forward"
    phase: Phase | None = None
    result: Result | None = None
    message: str = ""
    keep: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    provisional: Mapping[str, float] = field(default_factory=dict)
    """Engines of `generation` that clients reached before the commit, and when, in seconds since the switch began. A
    way back takes them away again."""
    restored: Mapping[str, float] = field(default_factory=dict)
    """The same of engines of the committed generation, on the way back to it or in its repair."""
    restarts: tuple[str, ...] = ()
    """Why engines restart (`explain_restarts`)."""
    phases: tuple[PhaseRecord, ...] = ()
    downtime: Mapping[str, Downtime] = field(default_factory=dict)
    canary: tuple[Mapping[str, Any], ...] = ()
    quality: tuple[Mapping[str, Any], ...] = ()
    """Verdicts of the quality suite, one row for each case and served name; empty if it was not asked."""
    gpus: tuple[Mapping[str, Any], ...] = ()
    drift: tuple[Mapping[str, Any], ...] = ()
    """Comparison of plan and measurement, one row for each component."""
    over_budget: tuple[str, ...] = ()
    """One paragraph for each GPU that was measured over its budget and accepted."""
    purpose: str = "serving"
    """That of the generation."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """What a calibration measured, as `status --format json` shows it: `engines` and `gpus`."""
    warnings: tuple[str, ...] = ()
    format: int = 1


def _decide(engine: SeenEngine, wanted: str | None) -> Literal["keep", "wait", "stop"] | None:
    """Return what happens to an engine of which this input hash (or nothing) is wanted; None if it does not run."""
    if engine.running_input_hash is not None and engine.running_input_hash == wanted:
        if engine.active_state in ("active", "reloading", "refreshing"):
            return "keep"
        if engine.active_state == "activating" and not engine.sub_state.startswith("auto-restart"):
            return "wait"
    # It runs, will run or left a container: it must be stopped before its GPUs are used.
    rests = engine.active_state in ("inactive", "failed", "maintenance") and engine.running_input_hash is None
    return None if rests else "stop"


def explain_restarts(former: Generation | None, wanted: Generation, moves: Moves) -> tuple[str, ...]:
    """Return which engines stop and start again, and which of their options differ, engines with the same together."""
    reasons: dict[str, list[str]] = {}
    for name in moves.start:
        if former is None or name not in moves.stop or former.hashes.get(name) in (None, wanted.hashes[name]):
            continue
        differ = {*former.engines[name].container} ^ {*wanted.engines[name].container}
        options = {
            word.removeprefix("--env=").partition("=")[0] if word.startswith("-") else "image, model or names"
            for word in differ
        }
        reasons.setdefault(", ".join(sorted(options)) or "its unit, its files or a time limit", []).append(name)
    return tuple(f"{', '.join(names)}: restart because of {why}" for why, names in reasons.items())


def decide_moves(
    wanted: Mapping[str, str],
    seen: Iterable[SeenEngine],
    files: Iterable[FileChange],
    target: Iterable[str],
) -> Moves:
    """Decide what has to change so that the host is as wanted.

    An engine that waits for a restart has failed: it is stopped and started.

    Args:
        wanted: input hash by name of engine.
        files, target: live files that differ, and what is wrong with the target in systemd; copied to the result.
    """
    found = {engine.name: _decide(engine, wanted.get(engine.name)) for engine in seen}

    def select(kind: str) -> tuple[str, ...]:
        return tuple(name for name in wanted if found.get(name) == kind)

    stop = tuple(name for name, kind in found.items() if kind == "stop")
    start = tuple(name for name in wanted if found.get(name) in (None, "stop"))
    return Moves(select("keep"), stop, start, select("wait"), tuple(files), tuple(target))
