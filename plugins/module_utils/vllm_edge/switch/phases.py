# SPDX-License-Identifier: Apache-2.0
"""One phase of a switch: journalled, run and recorded; and what begins and ends around all of them."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ..generation import committed as generation_committed
from ..generation.model import Generation, GenerationError
from ..system.systemd import SystemdError
from .host import SwitchedHost
from .journal import JournalFile, JournalLost
from .model import (
    HARMLESS,
    ONWARD,
    Direction,
    Done,
    Interrupted,
    Journal,
    Moves,
    Phase,
    PhaseFailed,
    Result,
)
from .render import complain, explain_unexpected, say, to_sentence
from .signals import Signals
from .steps.downtime import RoleWatch

Value = TypeVar("Value")
ROWS = ("canary", "quality", "gpus", "drift", "over_budget")
"""Keys of the data of a phase that are copied to the journal."""


class LeftForBoot(Exception):
    """Raised when the host is shutting down. The journal stays unfinished, and recovery at the next boot ends the
    switch."""


class PhaseRunner:
    """Runs the phases of one switch, or of the recovery of one, on `host` and writes them to the journal (`file`).

    Signals interrupt every phase except those that are shielded. The runner takes no lock: its caller must hold
    `journal.take_lock`.
    """

    def __init__(self, host: SwitchedHost, file: JournalFile, signals: Signals) -> None:
        self.host = host
        self.file = file
        self.paths = file.paths
        self.signals = signals
        self.began = file.journal.began_monotonic_s or 0.0
        """Time zero of the switch, as `host.clock()` counts."""
        self._watch: RoleWatch | None = None

    @property
    def journal(self) -> Journal:
        return self.file.journal

    def now(self) -> float:
        return round(self.host.clock() - self.began, 3)

    def warn(self, text: str) -> None:
        if text not in self.journal.warnings:
            complain(f"warning: {text}")
            self.file.journal = replace(self.journal, warnings=(*self.journal.warnings, text))

    def attempt(self, what: str, act: Callable[[], Value], *, shielded: bool) -> Value | PhaseFailed:
        """Call `act` and turn every exception into a PhaseFailed, which is returned and not raised.

        One that nobody expected also prints its traceback. `what` names the action in its message. Signals interrupt it
        unless it is `shielded`.
        """
        try:
            with contextlib.nullcontext() if shielded else self.signals.interruptible():
                return act()
        except PhaseFailed as failure:
            return failure
        except Interrupted as asked:
            return PhaseFailed(f"{asked} asked the switch to end")
        except (GenerationError, SystemdError) as error:
            return PhaseFailed(str(error))
        except Exception as error:
            complain(traceback.format_exc())
            return PhaseFailed(explain_unexpected(what, error))

    def phase(
        self, phase: Phase, direction: Direction, act: Callable[[], Done], *, shielded: bool = False
    ) -> PhaseFailed | None:
        """Write a phase to the journal, run it, and record how it ended. Returns None, or what failed.

        A phase that cannot be written to the journal is not run and counts as failed. There are two exceptions, which
        run without the journal: every phase on the way back, and those after the commit, because a switch is never
        rolled back after its commit. Raises LeftForBoot if one that is not harmless failed while the host goes down.
        """
        began = self.now()
        outcome: Done | PhaseFailed
        try:
            self.file.enter(phase, direction, self.host.stamp(), began)
            journalled = True
        except JournalLost as lost:
            journalled = direction == "back" or phase in ONWARD
            outcome = PhaseFailed(f"{lost}; a phase that cannot be journalled is not begun")
            if journalled:
                self.warn(f"{to_sentence(str(lost))} The switch goes on without its journal.")
        if journalled:
            say(f"{'going back, ' if direction == 'back' else ''}{phase}: begins")
            self.publish(phase)
            outcome = self.attempt(f"Phase {phase}", act, shielded=shielded)
        seconds = round(self.now() - began, 3)
        data = outcome.data
        rows: dict[str, Any] = {key: tuple(data[key]) for key in ROWS if data.get(key) is not None}
        rows |= {"measured": data["measured"]} if "measured" in data else {}
        self.file.journal = replace(self.journal, **rows)
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
        return PhaseFailed(to_sentence(outcome.text), engines=outcome.engines, phase=outcome.phase or phase)

    def goes_down(self) -> bool:
        try:
            return self.host.going_down()
        except Exception:
            return False  # if it does shut down, the rollback fails, and the boot ends it

    def decide(self, generation: Generation) -> Moves | PhaseFailed:
        outcome = self.attempt("Looking at what runs", lambda: self.host.moves(generation), shielded=False)
        return outcome if isinstance(outcome, Moves) else PhaseFailed(to_sentence(outcome.text))

    def accepts(self, wanted: Generation) -> bool:
        """Return whether more VRAM than a budget is no failure: in the first switch of a host, which would otherwise
        serve nothing, and in the generation that was committed that way."""
        first = self.journal.from_generation is None
        now = None if first else generation_committed.committed(self.paths)
        return first or (now is not None and now.generation == wanted.number and now.over_budget)

    def measure(self, wanted: Generation) -> Done:
        return self.host.measure(wanted, accept=self.accepts(wanted))

    def let_return(self, wanted: Generation, serving: Generation | None, moves: Moves) -> Callable[[str], None] | None:
        """Return what lets clients reach an engine of `wanted` before the end; None if all come back together.

        `serving` is the committed generation. The journal has the engine before the gateway, so that a recovery knows
        it. What fails here is a warning: the engine comes back with the others.
        """
        again = serving is not None and serving.number == wanted.number
        try:
            late = not (again or wanted.returns_early) or self.accepts(wanted)
        except GenerationError as error:
            self.warn(f"Engines come back together: {error}")
            return None
        if serving is None or late or not self.host.has_gateway():
            return None
        key = "restored" if again else "provisional"

        def tell(engine: str) -> None:
            former = getattr(self.journal, key)
            there = {**former, engine: self.now()}
            try:
                try:
                    self.file.write(**{key: there})
                except JournalLost:
                    if not again:  # what is committed comes back without the journal, too
                        raise
                done = self.host.return_early(wanted, serving, moves, there, self.journal.phase)
            except (JournalLost, PhaseFailed) as error:
                with contextlib.suppress(JournalLost):
                    self.file.write(**{key: former})
                self.warn(f"{engine} comes back with the others: {error}")
                return
            for text in done.warnings:
                self.warn(text)
            say(f"{engine} is verified{'' if again else ', and provisional'}: {done.detail}")

        return self.signals.shielded()(tell)

    @property
    def committed(self) -> Result:
        return Result.OVER_BUDGET if self.journal.over_budget else Result.COMMITTED

    def clean_up(self, wanted: Generation, former: Generation | None, *, hook: bool) -> Done:
        """Remove what the committed generation no longer needs and, if `hook` is set, run the hook `after_commit`."""
        done = self.host.clean_up(wanted)
        if not hook:
            return done
        told = self.attempt("Hook after_commit", lambda: self.host.hook("after_commit", wanted, former), shielded=True)
        if isinstance(told, Done):
            return combine(done, told)
        # The generation serves already, so a hook that fails is only a warning.
        return replace(done, warnings=(*done.warnings, told.text))

    def publish(self, phase: Phase | None) -> None:
        with contextlib.suppress(Exception):
            self.host.publish(phase)

    def begin_watch(self, wanted: Generation, former: Generation | None) -> None:
        """Start to measure the downtime that clients see. A watch that cannot start is a warning."""
        if former is None:
            return  # nothing served before, so there is no downtime
        try:
            self._watch = self.host.watch(wanted, former, self.now)
        except Exception as error:
            self.warn(f"Downtime is not watched: {error}")

    def end_watch(self) -> None:
        """Stop measuring, and write the downtime of each served name to the journal."""
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        try:
            self.file.journal = replace(self.journal, downtime=watch.end(self.journal.phases))
        except Exception as error:
            self.warn(f"Downtime is not known: {error}")

    def end(self, act: Callable[[], tuple[Result, str]]) -> Result | None:
        """Finish with what `act` returns; return None and leave the journal unfinished if the host goes down."""
        try:
            return self.finish(*act())
        except LeftForBoot:
            self.end_watch()
            text = f"The host goes down in phase {self.journal.phase}: the boot goes back to the committed generation."
            say(text)
            with contextlib.suppress(JournalLost):
                self.file.write(message=text)
            return None

    def finish(self, result: Result, message: str) -> Result:
        """Write the end of the journal, print it in case the disk is full, and return the result."""
        self.end_watch()
        self.publish(None)
        message = " ".join(message.split())  # the output of programs may contain line breaks
        say(f"{result}: {message}")
        try:
            self.file.finish(result=result, message=message, ended_at=self.host.stamp(), seconds=self.now())
        except JournalLost as lost:
            complain(f"{to_sentence(str(lost))} The end of this switch is only here, and in its exit status.")
        return result


def combine(first: Done, second: Done) -> Done:
    details = [done.detail for done in (first, second) if done.detail]
    return Done("; ".join(details), {**first.data, **second.data}, (*first.warnings, *second.warnings))
