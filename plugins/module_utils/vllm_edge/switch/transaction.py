# SPDX-License-Identifier: Apache-2.0
"""The order of a switch: the phases towards a new generation, and the rollback to the committed one.

This module decides which phase comes next and which generation serves after each way in which a phase can fail. What a
phase does to the host is behind the protocol `World` (model.py, implemented in host.py); what a generation is, is
defined in the package `generation`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..generation import committed as generation_committed
from ..generation import live, store
from ..generation.model import Choice, Committed, Generation, GenerationError
from ..names import SWITCH_UNIT, TARGET
from ..paths import HostPaths
from .journal import DAMAGED, JournalFile, JournalLost, make_id
from .messages import capitalize, complain, describe_route, name_generation, say, to_sentence
from .model import (
    BACK_PHASES,
    HARMLESS,
    PHASES,
    Direction,
    Done,
    Downtime,
    Gap,
    Interrupted,
    Journal,
    Moves,
    Phase,
    PhaseFailed,
    Result,
    Watch,
    World,
)
from .signals import Signals

DECIDE_PATIENCE_S = 120.0
"""How long a rollback retries to read what runs before it goes by the journal instead: Docker or systemd may be
restarting."""
DECIDE_POLL_S = 2.0
UNVERIFIED = frozenset({Phase.STOP, Phase.FREE, Phase.START, Phase.WARM_UP})
"""If one of these phases fails on the way back, and the engines are then healthy, pass the canary and are within their
budgets, the failure is only a warning."""


# ---- the transaction ----------------------------------------------------------------------------------------------


class LeftForBoot(Exception):
    """Raised when the host is shutting down. The journal stays unfinished, and recovery at the next boot ends the
    switch."""


@dataclass(frozen=True)
class Failed:
    """A phase that failed.

    `phase` is None if something failed outside of any phase. `text` is one paragraph that ends with a full stop.
    `engines` are the engines that the failure concerns.
    """

    phase: Phase | None
    text: str
    engines: tuple[str, ...] = ()


class Transaction:
    """One switch, or the recovery of one.

        forward()     refused   <-- failure in preflight or prepare: nothing was changed
           |
           |   preflight -> prepare -> drain -> stop -> free -> install -> start -> healthy -> warm_up -> canary
           |                                                  -> measure -> commit -> clean_up  -->  committed
           |
           +-- failure from drain to commit --> go_back() --> towards(former): stop, free, install, start, healthy,
           |                                    warm_up, canary, measure, clean_up  -->  rolled_back, or failed
           +-- failure in clean_up: failed, but the new generation is committed and serves; there is no rollback
           +-- the host shuts down: LeftForBoot; the journal stays unfinished and the boot recovers

        recovered()      the journal of a killed switch --> towards(committed generation), whichever that is

    Every phase goes through `phase()`, which writes the phase to the journal (`file`), calls the method of `world` and
    records the result. `forward` and `recovered` return a Result and its message; the caller (run.switch,
    recovery.recover) passes both to `finish`, which writes the end of the journal. Signals interrupt every phase except
    commit and clean-up.

    The transaction takes no lock: its caller must hold `journal.Lock`.
    """

    def __init__(
        self,
        world: World,
        file: JournalFile,
        signals: Signals,
        *,
        began: float,
    ) -> None:
        self.world = world
        self.file = file
        self.paths = file.paths
        self.signals = signals
        self.began = began
        """Time zero of the switch, as `world.monotonic()` counts."""
        self._watch: Watch | None = None

    @property
    def journal(self) -> Journal:
        return self.file.journal

    def now(self) -> float:
        """Return the seconds since the switch began."""
        return round(self.world.monotonic() - self.began, 3)

    def warn(self, text: str) -> None:
        """Print a warning and add it to the journal, unless it is there already."""
        if text not in self.journal.warnings:
            complain(f"warning: {text}")
            self.file.journal = replace(self.journal, warnings=(*self.journal.warnings, text))

    # -- one phase

    def attempt(self, what: str, act: Callable[[], Done]) -> Done | PhaseFailed:
        """Call `act` and turn every exception into a PhaseFailed, which is returned and not raised.

        An exception that nobody expected also prints its traceback, which ends up in systemd's journal. `what` names
        the action in that message.
        """
        try:
            return act()
        except PhaseFailed as failure:
            return failure
        except Interrupted as asked:
            return PhaseFailed(f"{asked} asked the switch to end")
        except GenerationError as error:
            return PhaseFailed(str(error))
        except Exception as error:
            complain(traceback.format_exc())
            return PhaseFailed(
                f"{what} met what it does not know: {type(error).__name__}: {error}. That is a mistake of this "
                f"program; 'journalctl -u {SWITCH_UNIT}' has the traceback"
            )

    def interruptible(self, act: Callable[[], Done]) -> Callable[[], Done]:
        """Wrap `act` so that a signal can interrupt it."""

        def run() -> Done:
            with self.signals.interruptible():
                return act()

        return run

    def phase(
        self, phase: Phase, direction: Direction, act: Callable[[], Done], *, shielded: bool = False
    ) -> Failed | None:
        """Write a phase to the journal, run it, and record how it ended.

        A phase that cannot be written to the journal is not run and counts as failed. There are two exceptions, which
        run without the journal: every phase on the way back, and the clean-up after the commit, because a switch is
        never rolled back after its commit.

        Args:
            direction: `back` if the phase belongs to a rollback.
            act: the work of the phase.
            shielded: True if no signal may interrupt it.

        Returns:
            None if the phase succeeded, otherwise what failed.

        Raises:
            LeftForBoot: if a phase that is not harmless failed while the host is shutting down.
        """
        began = self.now()
        outcome: Done | PhaseFailed
        try:
            self.file.enter(phase, direction, self.world.stamp(), began)
            journalled = True
        except JournalLost as lost:
            journalled = direction == "back" or phase is Phase.CLEAN_UP
            outcome = PhaseFailed(f"{lost}; a phase that cannot be journalled is not begun")
            if journalled:
                self.warn(f"{to_sentence(str(lost))} The switch goes on without its journal.")
        if journalled:
            say(f"{'going back, ' if direction == 'back' else ''}{phase}: begins")
            outcome = self.attempt(f"Phase {phase}", act if shielded else self.interruptible(act))
        seconds = round(self.now() - began, 3)
        kept: dict[str, Any] = {
            key: tuple(outcome.data[key]) for key in ("canary", "gpus", "drift") if outcome.data.get(key) is not None
        }
        self.file.journal = replace(self.journal, **kept)
        if isinstance(outcome, Done):
            self.file.leave("done", seconds, outcome.detail)
            say(f"{phase}: done in {seconds:.1f} s{': ' if outcome.detail else ''}{outcome.detail}")
            for text in outcome.warnings:
                self.warn(text)
            return None
        self.file.leave("failed", seconds, outcome.text)
        say(f"{phase}: failed after {seconds:.1f} s: {outcome.text}")
        if phase not in HARMLESS and self.goes_down():
            raise LeftForBoot(phase)
        return Failed(phase, to_sentence(outcome.text), outcome.engines)

    def with_all_room(
        self, phase: Phase, direction: Direction, act: Callable[[], Done], *, shielded: bool = False
    ) -> Failed | None:
        """Run a phase that must not fail for lack of disk space; the parameters are those of `phase`.

        If writing the files fails (install, clean-up), the journal's ballast is removed and the phase runs once more.
        """
        failure = self.phase(phase, direction, act, shielded=shielded)
        if failure is not None and phase in (Phase.INSTALL, Phase.CLEAN_UP) and self.file.give_up_ballast():
            failure = self.phase(phase, direction, act, shielded=shielded)
        return failure

    def goes_down(self) -> bool:
        """Return whether systemd is shutting the host down; False if it does not answer."""
        try:
            return self.world.going_down()
        except Exception:
            return False  # if it does shut down, the rollback fails, and the boot ends it

    # -- what clients see

    def begin_watch(self, wanted: Generation, former: Generation | None) -> None:
        """Start to measure the downtime that clients see. A watch that cannot start is a warning."""
        if former is None:
            return  # nothing served before, so there is no downtime
        try:
            self._watch = self.world.watch(wanted, former)
        except Exception as error:
            self.warn(f"Downtime is not watched: {error}")

    def end_watch(self) -> None:
        """Stop measuring and write the downtime of each served name to the journal, in seconds since the switch
        began."""
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        phases = [replace(record, began_s=record.began_s + self.began) for record in self.journal.phases]
        try:
            seen = {role: _shift(downtime, -self.began) for role, downtime in watch.end(phases).items()}
            self.file.journal = replace(self.journal, downtime=seen)
        except Exception as error:
            self.warn(f"Downtime is not known: {error}")

    # -- forward

    def forward(self, wanted: Generation, former: Generation | None, choice: Choice) -> tuple[Result, str]:
        """Switch to a generation, and roll back if that fails.

        Args:
            wanted: the generation to switch to.
            former: the committed generation; `wanted` itself if this is a repair, None if nothing was committed before.
            choice: who chose the profile, to be recorded.

        Returns:
            The result, and the message for the end of the journal.

        Raises:
            LeftForBoot: if the host shuts down during the switch.
        """
        repair = former is not None and former.number == wanted.number
        seen: list[Moves] = []
        failure = self._decide(wanted, seen)
        if failure is not None:
            return self._refused(failure)
        moves = seen[0]
        try:
            self.file.write(keep=moves.keep, stop=moves.stop, start=moves.start)
        except JournalLost as lost:
            return self._refused(Failed(None, to_sentence(str(lost))))
        if repair and not moves:
            return self._unchanged(wanted, choice)

        def drain() -> Done:
            if not moves.stop:
                return Done("no engine has to stop")
            return _both(self.world.hook("before_drain", wanted, former), self.world.drain(moves, wanted.limits))

        def commit() -> Done:
            self.signals.check()  # the last point at which a signal can roll the switch back
            generation_committed.commit(wanted, self.paths, choice, self.world.stamp())
            return Done(f"{name_generation(wanted)} is committed")

        acts: Mapping[Phase, Callable[[], Done]] = {
            Phase.PREFLIGHT: lambda: self.world.preflight(wanted, moves),
            Phase.PREPARE: lambda: self.world.prepare(wanted, moves),
            Phase.DRAIN: drain,
            Phase.STOP: lambda: self.world.stop(moves),
            Phase.FREE: lambda: self.world.free(wanted, moves),
            Phase.INSTALL: lambda: self.world.install(wanted, moves),
            Phase.START: lambda: self.world.start(moves),
            Phase.HEALTHY: lambda: self.world.healthy(wanted, moves, all_of_them=False),
            Phase.WARM_UP: lambda: self.world.warm_up(wanted, moves),
            Phase.CANARY: lambda: self.world.canary(wanted),
            Phase.MEASURE: lambda: self.world.measure(wanted),
            Phase.COMMIT: commit,
            Phase.CLEAN_UP: lambda: self.clean_up(wanted, former, hook=True),
        }
        for phase in PHASES:
            if phase is Phase.DRAIN:
                self.begin_watch(wanted, former)
            shielded = phase in (Phase.COMMIT, Phase.CLEAN_UP)
            tried = self.with_all_room if phase is Phase.CLEAN_UP else self.phase
            failure = tried(phase, "forward", acts[phase], shielded=shielded)
            if failure is None:
                continue
            if phase in HARMLESS:
                return self._refused(failure)
            if phase is Phase.COMMIT and not repair and self._is_committed(wanted):
                # The rename of active-profile.json succeeded and something after it failed. The generation is
                # committed, so the switch continues.
                self.warn(failure.text)
                continue
            if phase is Phase.CLEAN_UP:
                return self._left_over(wanted, failure)
            return self.go_back(failure, wanted, former, moves)
        return Result.COMMITTED, self._serves(wanted, moves)

    def _decide(self, generation: Generation, seen: list[Moves]) -> Failed | None:
        """Append to `seen` what has to change for `generation`; return the failure if that cannot be read."""

        def look() -> Done:
            seen.append(self.world.moves(generation))
            return Done()

        outcome = self.attempt("Looking at what runs", self.interruptible(look))
        return None if isinstance(outcome, Done) else Failed(None, to_sentence(outcome.text))

    def _is_committed(self, wanted: Generation) -> bool:
        """Return whether active-profile.json names `wanted`."""
        try:
            now = generation_committed.committed(self.paths)
        except GenerationError:
            return False
        return now is not None and now.generation == wanted.number

    def clean_up(self, wanted: Generation, former: Generation | None, *, hook: bool) -> Done:
        """Remove what the committed generation no longer needs and, if `hook` is set, run the hook `after_commit`."""
        done = self.world.clean_up(wanted, former)
        if not hook:
            return done
        told = self.attempt("Hook after_commit", lambda: self.world.hook("after_commit", wanted, former))
        if isinstance(told, Done):
            return _both(done, told)
        # The generation serves already, so a hook that fails is only a warning.
        return replace(done, warnings=(*done.warnings, told.text))

    def _unchanged(self, wanted: Generation, choice: Choice) -> tuple[Result, str]:
        """End a repair that found nothing to do, and record who chose the profile if that is new."""

        def remember() -> Done:
            now = generation_committed.committed(self.paths)
            if now is not None and (now.origin, now.inventory_profile) != (choice.origin, choice.inventory_profile):
                # The profile is the same and was chosen by somebody else: record who, and change nothing else on the
                # host.
                generation_committed.commit(wanted, self.paths, choice, self.world.stamp())
            return Done()

        outcome = self.attempt("Remembering who chose the profile", remember)
        if isinstance(outcome, PhaseFailed):
            self.warn(outcome.text)
        return (
            Result.UNCHANGED,
            f"{capitalize(name_generation(wanted))} serves already and nothing differs: nothing was touched.",
        )

    def _refused(self, failure: Failed) -> tuple[Result, str]:
        """Return the result of a switch that changed nothing."""
        where = f" in phase {failure.phase}" if failure.phase else ""
        journal = self.journal
        still = (
            "nothing is committed on this host"
            if journal.from_generation is None
            else f"the host is committed to generation {journal.from_generation} ({journal.from_profile})"
        )
        return (
            Result.REFUSED,
            f"{describe_route(self.journal)} was refused{where}. {failure.text} Nothing was touched: {still}, as "
            "before.",
        )

    def _serves(self, wanted: Generation, moves: Moves) -> str:
        """Return the message of a switch that succeeded: what was stopped, started, waited for and kept."""
        did = [
            f"{words} {', '.join(names)}"
            for words, names in (
                ("stopped", moves.stop),
                ("started", moves.start),
                ("waited for", moves.wait),
                ("kept", moves.keep),
            )
            if names
        ]
        return to_sentence(
            f"{capitalize(name_generation(wanted))} serves and is verified, {self.now():.1f} s after the switch began: "
            f"{'; '.join(did) or 'no engine had to move'}"
        )

    def _left_over(self, wanted: Generation, failure: Failed) -> tuple[Result, str]:
        """Return the result of a switch whose clean-up failed after the commit."""
        return (
            Result.FAILED,
            f"{capitalize(name_generation(wanted))} is committed and serves, but to clean up failed. {failure.text} "
            f"{TARGET} may still want the engines of before, and a boot would start those. When the cause is gone, "
            f"'vllm-edge switch {wanted.number}' does what is left and touches nothing that serves.",
        )

    # -- back

    def go_back(
        self, failure: Failed, wanted: Generation, former: Generation | None, moves: Moves
    ) -> tuple[Result, str]:
        """Roll back to the committed generation after a phase failed that may have changed the host.

        A failed repair is not rolled back, because there is no other generation to return to. If nothing was committed
        before, the engines that were started are stopped again.

        Args:
            failure: what failed.
            wanted, former: as in `forward`.
            moves: what the switch was to change.

        Returns:
            The result (`rolled_back` or `failed`) and its message.
        """
        self.signals.go_back()
        head = f"{describe_route(self.journal)} failed in phase {failure.phase}. {failure.text}"
        if former is not None and former.number == wanted.number:
            return Result.FAILED, f"{head} What serves was not touched. {self._what_runs(wanted)}"
        if former is None:
            return self._nothing_before(head, moves.start if self._has(Phase.START) else ())
        say(f"going back to {name_generation(former)}")
        failures = self.towards(former, wanted, "back")
        if self._serves_again(failures):
            for one in failures:
                self.warn(f"On the way back, in phase {one.phase}: {one.text}")
            return (
                Result.ROLLED_BACK,
                f"{head} It was undone: {name_generation(former)} serves again and is verified, {self.now():.1f} s "
                f"after the switch began. Correct the cause and switch again; 'journalctl -u {SWITCH_UNIT}' has every "
                "step.",
            )
        return (
            Result.FAILED,
            f"{head} Going back to {name_generation(former)} failed as well: {self._in_parts(failures, former)}",
        )

    def _has(self, phase: Phase) -> bool:
        """Return whether the journal has this phase."""
        return any(record.phase is phase for record in self.journal.phases)

    def _serves_again(self, failures: Sequence[Failed]) -> bool:
        """Return whether the generation serves and is verified in spite of these failures."""
        return all(failure.phase in UNVERIFIED for failure in failures)

    def _in_parts(self, failures: Sequence[Failed], committed: Generation) -> str:
        """Return the failures and what runs now, as one text."""
        said = " ".join(
            f"In phase {failure.phase}: {failure.text}" if failure.phase else failure.text for failure in failures
        )
        return f"{said} {self._what_runs(committed)}"

    def _what_runs(self, generation: Generation) -> str:
        """Return what runs now and the command that repairs it."""
        try:
            runs = to_sentence(self.world.what_runs(generation))
        except Exception as error:
            runs = f"unknown ({error}); 'vllm-edge status' tells."
        return (
            f"What runs now: {runs} When the cause is gone, 'vllm-edge switch {generation.number}' brings back what is "
            "missing and touches nothing that serves."
        )

    def _nothing_before(self, head: str, started: Sequence[str]) -> tuple[Result, str]:
        """End a switch that has no generation to return to: stop what was started."""
        if self.journal.stop and not self._has(Phase.STOP):
            runs = ", ".join(self.journal.stop)
            return Result.ROLLED_BACK, f"{head} Nothing had been stopped or started yet: {runs} were not touched."
        moves = Moves(stop=tuple(started))
        failure = self.phase(Phase.STOP, "back", lambda: self.world.stop(moves))
        stopped = f"{', '.join(started)} stopped again" if started else "no engine had been started"
        if failure is not None:
            return (
                Result.FAILED,
                f"{head} There is no generation to go back to, and what had been started could not be stopped: "
                f"{failure.text} Nothing is committed.",
            )
        if self.journal.stop:
            return (
                Result.FAILED,
                f"{head} {capitalize(stopped)}. {', '.join(self.journal.stop)}, which ran before, cannot be brought "
                "back: there is no directory of their generation. Correct the cause and run site.yml again.",
            )
        return (
            Result.ROLLED_BACK,
            f"{head} {capitalize(stopped)}. Nothing served before, and nothing serves now; nothing is committed. "
            f"Correct the cause and switch again; 'journalctl -u {SWITCH_UNIT}' has every step.",
        )

    def towards(self, generation: Generation, other: Generation | None, direction: Direction) -> list[Failed]:
        """Bring the host to the committed generation, as far as possible.

        A phase that fails does not end this: the engines that are not concerned continue. It is used by a rollback and
        by a recovery.

        Args:
            generation: the committed generation.
            other: the generation at the other end of the switch, if it is known.
            direction: `forward` if the killed switch had already committed `generation`.

        Returns:
            What failed, and at the end what still differs from the generation; empty if everything succeeded.

        Raises:
            LeftForBoot: if the host shuts down.
        """
        moves = self._decide_patiently(generation)
        serving = generation
        failures: list[Failed] = []
        for phase in BACK_PHASES:
            act = functools.partial(self._act_back, phase, moves, generation, serving, other, direction)
            failure = self.with_all_room(phase, direction, act)
            if failure is None:
                continue
            failures.append(failure)
            if phase is Phase.INSTALL:
                # An engine whose files could not be written would start as the engine of the other generation: do not
                # start it.
                whole = tuple(name for name in moves.start if self._has_its_files(generation, name))
                moves = replace(moves, start=whole)
            elif phase is Phase.HEALTHY:
                serving = replace(
                    serving,
                    engines={name: value for name, value in serving.engines.items() if name not in failure.engines},
                )
                moves = replace(
                    moves,
                    start=tuple(name for name in moves.start if name in serving.engines),
                    wait=tuple(name for name in moves.wait if name in serving.engines),
                )
        left = self._left(generation) if self._serves_again(failures) else None
        return [*failures, left] if left is not None else failures

    def _left(self, generation: Generation) -> Failed | None:
        """Return what still differs from the generation, or None.

        This finds an engine that could not be stopped: it may answer, but belongs to the other generation.
        """
        seen: list[Moves] = []
        failure = self._decide(generation, seen)
        if failure is not None:
            self.warn(f"What runs could not be seen at the end: {failure.text}")
            return None
        moves = seen[0]
        wrong = [
            f"{words}: {', '.join(names)}"
            for words, names in (
                ("engines that run and should not, or otherwise", moves.stop),
                ("engines that should run and do not, or otherwise", moves.start),
                ("files", tuple(change.path for change in moves.files)),
                (TARGET, moves.target),
            )
            if names
        ]
        return (
            Failed(None, to_sentence(f"Not as {name_generation(generation)} says are {'; '.join(wrong)}"))
            if wrong
            else None
        )

    def _act_back(
        self,
        phase: Phase,
        moves: Moves,
        generation: Generation,
        serving: Generation,
        other: Generation | None,
        direction: Direction,
    ) -> Done:
        """Run one phase of a rollback.

        `generation` is what the host returns to; `serving` is the part of it whose engines became healthy.
        """
        acts: Mapping[Phase, Callable[[], Done]] = {
            Phase.STOP: lambda: self.world.stop(moves),
            Phase.FREE: lambda: self.world.free(generation, moves),
            Phase.INSTALL: lambda: self.world.install(generation, moves),
            Phase.START: lambda: self.world.start(moves),
            Phase.HEALTHY: lambda: self.world.healthy(generation, moves, all_of_them=True),
            Phase.WARM_UP: lambda: self.world.warm_up(serving, moves),
            Phase.CANARY: lambda: self.world.canary(serving),
            Phase.MEASURE: lambda: self.world.measure(generation),
            Phase.CLEAN_UP: lambda: self.clean_up(generation, other, hook=direction == "forward"),
        }
        return acts[phase]()

    def _has_its_files(self, generation: Generation, engine: str) -> bool:
        """Return whether the live files of an engine are those of the generation."""
        try:
            return not live.live_changes(generation, self.paths, [engine], target=False)
        except (GenerationError, OSError):
            return False

    def _decide_patiently(self, generation: Generation) -> Moves:
        """Return what has to change, retrying for DECIDE_PATIENCE_S; after that return what the journal suggests."""
        deadline = self.world.monotonic() + DECIDE_PATIENCE_S
        while True:
            seen: list[Moves] = []
            failure = self._decide(generation, seen)
            if failure is None:
                return seen[0]
            if self.goes_down():
                raise LeftForBoot
            if self.world.monotonic() >= deadline:
                break
            complain(f"what runs cannot be seen, asking again: {failure.text}")
            time.sleep(DECIDE_POLL_S)
        self.warn(f"What runs could not be seen, going by the journal: {failure.text}")
        keep = tuple(name for name in generation.engines if name in self.journal.keep)
        return Moves(
            keep=keep, stop=self.journal.start, start=tuple(name for name in generation.engines if name not in keep)
        )

    def recovered(self, left: Journal, head: str) -> tuple[Result, str]:
        """End a switch that was killed.

        The host goes to the committed generation, whatever the journal says. If the killed switch had already
        committed, that is its new generation.

        Args:
            left: the journal of the killed switch.
            head: the beginning of the message, which says how that switch ended.

        Returns:
            The result and its message.

        Raises:
            LeftForBoot: if the host shuts down.
        """
        try:
            committed = store.load_committed(self.paths)
        except GenerationError as error:
            why = to_sentence(str(error))
            return Result.FAILED, f"{head} Going back failed: {why} 'vllm-edge status' says what runs."
        if committed is None:
            return self._nothing_before(head, left.start if self._has(Phase.START) else ())
        other = _load_other(left, committed, self.paths)
        onward = committed.number == left.generation and left.id != DAMAGED
        self.begin_watch(committed, other)
        failures = self.towards(committed, other, "forward" if onward else "back")
        if not self._serves_again(failures):
            return Result.FAILED, f"{head} Recovery failed: {self._in_parts(failures, committed)}"
        for one in failures:
            self.warn(f"In the recovery, phase {one.phase}: {one.text}")
        if onward:
            return (
                Result.COMMITTED,
                f"{head} {capitalize(name_generation(committed))} is committed, serves and is verified.",
            )
        return (
            Result.ROLLED_BACK,
            f"{head} It was undone: {name_generation(committed)}, which is committed, serves again and is verified. "
            f"Switch again when the cause is known; 'journalctl -u {SWITCH_UNIT}' has every step.",
        )

    # -- the end

    def finish(self, result: Result, message: str) -> Result:
        """Write the end of the journal and return the result.

        The message is also printed, so that it is not lost if the disk is full.
        """
        self.end_watch()
        message = " ".join(message.split())  # the output of programs may contain line breaks
        say(f"{result}: {message}")
        changes: dict[str, Any] = {
            "result": result,
            "message": message,
            "ended_at": self.world.stamp(),
            "seconds": self.now(),
        }
        try:
            self.file.finish(**changes)
        except JournalLost as lost:
            complain(f"{to_sentence(str(lost))} The end of this switch is only here, and in its exit status.")
        return result


def _both(first: Done, second: Done) -> Done:
    """Return two results of one phase as one."""
    details = [done.detail for done in (first, second) if done.detail]
    return Done("; ".join(details), {**first.data, **second.data}, (*first.warnings, *second.warnings))


def _shift(downtime: Downtime, by_s: float) -> Downtime:
    """Shift the gaps by a number of seconds; no gap begins before 0."""
    gaps = (
        Gap(max(0.0, round(gap.from_s + by_s, 3)), None if gap.to_s is None else round(gap.to_s + by_s, 3))
        for gap in downtime.gaps
    )
    return replace(downtime, gaps=tuple(gaps))


# ---- a switch -----------------------------------------------------------------------------------------------------


def begin_journal(
    world: World, paths: HostPaths, *, number: int, profile: str, now: Committed | None, choice: Choice
) -> Journal:
    """Return the journal of a switch that begins now; nothing is written.

    Args:
        number, profile: the generation to switch to.
        now: what is committed, or None.
        choice: who chose the profile, and who asked.
    """
    stamp = world.stamp()
    return Journal(
        id=make_id(paths, stamp, number),
        generation=number,
        profile=profile,
        from_generation=now.generation if now else None,
        from_profile=now.profile if now else None,
        origin=choice.origin,
        asked_by=choice.asked_by or "somebody",
        pid=os.getpid(),
        boot_id=world.boot_id(),
        started_at=stamp,
        began_monotonic_s=world.monotonic(),
    )


def leave_for_boot(change: Transaction) -> None:
    """Record in the journal that the host shuts down and that the boot will end the switch."""
    change.end_watch()
    text = f"The host goes down in phase {change.journal.phase}: the boot goes back to the committed generation."
    say(text)
    with contextlib.suppress(JournalLost):
        change.file.write(message=text)


def archive(paths: HostPaths, ended: Journal) -> None:
    """Copy a finished journal to the history if the copy is missing.

    It is missing if the program was killed between its last two writes.
    """
    if not (paths.history / f"{ended.id}.json").exists():
        with contextlib.suppress(JournalLost):
            JournalFile(paths, ended).archive()


def _load_other(left: Journal, committed: Generation, paths: HostPaths) -> Generation | None:
    """Return the generation at the other end of the switch, or None if it is not known."""
    number = left.from_generation if left.generation == committed.number else left.generation
    if number is None or number == committed.number:
        return committed if number is not None else None
    try:
        return store.load(paths, number)
    except GenerationError:
        return None
