# SPDX-License-Identifier: Apache-2.0
"""The order of a switch: the phases towards a new generation, up to the commit and the clean-up.

What happens if a phase fails is in rollback.py, how a single phase runs in phases.py, and what it does to the host in
steps/ and host.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence

from ..generation import committed as generation_committed
from ..generation.model import Choice, Committed, Generation, GenerationError
from ..names import TARGET
from ..paths import HostPaths
from .host import SwitchedHost
from .journal import JournalFile, JournalLost, make_id
from .model import HARMLESS, ONWARD, PHASES, Done, Journal, Moves, Phase, PhaseFailed, Result, explain_restarts
from .phases import PhaseRunner, combine
from .render import (
    capitalize,
    describe_moves,
    describe_over_budget,
    describe_route,
    name_generation,
    to_sentence,
)
from .rollback import go_back


class Transaction(PhaseRunner):
    """One switch.

        forward()     refused   <-- failure in preflight or prepare: nothing was changed
           |
           |   preflight -> prepare -> away -> drain -> stop -> free -> install -> start -> healthy -> warm_up
           |                                -> canary -> measure -> commit -> back -> clean_up  -->  committed
           |
           +-- failure from away to commit --> rollback.go_back(): away, drain, stop, free, install, start, healthy,
           |                                   warm_up, canary, measure, back, clean_up  -->  rolled_back, or failed
           +-- a calibration that was measured: the same way back instead of the commit  -->  measured
           +-- failure in back or clean_up: failed, but the new generation is committed and serves; there is no rollback
           +-- the host shuts down: LeftForBoot; the journal stays unfinished and the boot recovers

        rollback.end_killed()    the journal of a killed switch --> the same phases to the committed generation

    From `healthy` on each engine goes its own way (steps.arrivals), and clients reach it when it is verified, before
    the commit: `provisional`.

    `forward` returns a Result and its message; the caller (run.switch) passes both to `finish`, which writes the end of
    the journal. Signals interrupt every phase up to the commit.
    """

    def forward(self, wanted: Generation, former: Generation | None, choice: Choice) -> tuple[Result, str]:
        """Switch to a generation, and roll back if that fails. Returns the result and the message for the journal.

        `former` is the committed generation; `wanted` itself if this is a repair, None if nothing was committed before.
        Raises LeftForBoot if the host goes down during the switch.
        """
        repair = former is not None and former.number == wanted.number
        moves = self.decide(wanted)
        if isinstance(moves, PhaseFailed):
            return self._refused(moves)
        try:
            restarts = explain_restarts(former, wanted, moves)
            self.file.write(keep=moves.keep, stop=moves.stop, start=moves.start, restarts=restarts)
        except JournalLost as lost:
            return self._refused(PhaseFailed(to_sentence(str(lost))))
        if repair and not moves:
            return self._unchanged(wanted, choice)
        calibration = wanted.purpose == "calibration"
        if calibration and former is None and moves.stop:
            return self._refused(
                PhaseFailed(
                    f"A calibration ends with a way back to the committed generation, which this host does not have; "
                    f"it would stop {', '.join(moves.stop)} for good. Run site.yml first, or 'vllm-edge stop'."
                )
            )

        def drain() -> Done:
            if not moves.stop:
                return Done("no engine has to stop")
            return combine(self.host.hook("before_drain", wanted, former), self.host.drain(moves, wanted.limits))

        def commit() -> Done:
            self.signals.check()  # the last point at which a signal can roll the switch back
            over_budget = bool(self.journal.over_budget)
            generation_committed.commit(wanted, self.paths, choice, self.host.stamp(), over_budget=over_budget)
            return Done(f"{name_generation(wanted)} is committed")

        acts: Mapping[Phase, Callable[[], Done]] = {
            Phase.PREFLIGHT: lambda: combine(
                self.host.preflight(wanted, moves), self.host.check_peers(wanted, former, moves, gap=choice.gap)
            ),
            Phase.PREPARE: lambda: self.host.prepare(wanted, moves),
            Phase.AWAY: lambda: self.host.away(wanted, former, moves, gap=choice.gap),
            Phase.DRAIN: drain,
            Phase.STOP: lambda: self.host.stop(moves),
            Phase.FREE: lambda: self.host.free(wanted, moves),
            Phase.INSTALL: lambda: self.host.install(wanted, moves),
            Phase.START: lambda: self.host.start(moves),
            Phase.HEALTHY: lambda: self.host.healthy(
                wanted, moves, all_of_them=False, tell=self.let_return(wanted, former, moves)
            ),
            Phase.WARM_UP: lambda: self.host.warm_up(wanted, moves),
            Phase.CANARY: lambda: combine(self.host.canary(wanted), self.host.ask_suite(wanted, moves)),
            Phase.MEASURE: lambda: self.measure(wanted),
            Phase.COMMIT: commit,
            Phase.BACK: lambda: self.host.back(wanted),
            Phase.CLEAN_UP: lambda: self.clean_up(wanted, former, hook=True),
        }
        left: list[PhaseFailed] = []
        for phase in PHASES:
            if phase is Phase.COMMIT and calibration:
                return go_back(self, None, wanted, former, moves)
            if phase is Phase.AWAY:
                self.begin_watch(wanted, former)
            shielded = phase is Phase.COMMIT or phase in ONWARD
            attempt = functools.partial(self.phase, phase, "forward", acts[phase], shielded=shielded)
            failure = self.file.with_all_room(attempt) if phase in ONWARD else attempt()
            if failure is None:
                continue
            if phase in HARMLESS:
                return self._refused(failure)
            if phase in ONWARD:
                left.append(failure)
                continue
            if phase is Phase.COMMIT and not repair and self._is_committed(wanted):
                # The rename of active-profile.json succeeded and something after it failed. The generation is
                # committed, so the switch continues.
                self.warn(failure.text)
                continue
            return go_back(self, failure, wanted, former, moves)
        if left:
            return self._left_over(wanted, left)
        return self.committed, self._serves(wanted, moves)

    def _is_committed(self, wanted: Generation) -> bool:
        try:
            now = generation_committed.committed(self.paths)
        except GenerationError:
            return False
        return now is not None and now.generation == wanted.number

    def _unchanged(self, wanted: Generation, choice: Choice) -> tuple[Result, str]:
        """End a repair that found nothing to do, and record who chose the profile if that is new."""

        def remember() -> Done:
            now = generation_committed.committed(self.paths)
            if now is not None and (now.origin, now.inventory_profile) != (choice.origin, choice.inventory_profile):
                # The profile is the same and was chosen by somebody else: record who, and change nothing else on the
                # host.
                chosen_at = self.host.stamp()
                generation_committed.commit(wanted, self.paths, choice, chosen_at, over_budget=now.over_budget)
            return Done()

        outcome = self.attempt("Remembering who chose the profile", remember, shielded=True)
        # A former switch may have failed to bring back what clients of the gateway see.
        shown = self.attempt("Looking at the gateway", lambda: self.host.back(wanted), shielded=True)
        for each in (outcome, shown):
            if isinstance(each, PhaseFailed):
                self.warn(each.text)
        return (
            Result.UNCHANGED,
            f"{capitalize(name_generation(wanted))} serves already and nothing differs: nothing was touched.",
        )

    def _refused(self, failure: PhaseFailed) -> tuple[Result, str]:
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
        words = {"stop": "stopped", "start": "started", "wait": "waited for", "keep": "kept"}
        did = describe_moves(vars(moves), words) or "no engine had to move"
        text = to_sentence(
            f"{capitalize(name_generation(wanted))} serves and is verified, {self.now():.1f} s after the switch began: "
            f"{did}"
        )
        if not self.journal.over_budget:
            return text
        return (
            f"{text} {describe_over_budget(wanted, self.journal, 'is')} Its engines keep serving, because there was "
            "nothing else to go back to; a later switch over a budget is rolled back. playbooks/calibrate.yml measures "
            "them, and site.yml then starts those whose KV cache the plan sets with one that fits."
        )

    def _left_over(self, wanted: Generation, failures: Sequence[PhaseFailed]) -> tuple[Result, str]:
        texts = [f"Phase {failure.phase} failed: {failure.text}" for failure in failures]
        if any(failure.phase is Phase.CLEAN_UP for failure in failures):
            texts.append(
                f"{TARGET} may still want the engines of before, and a boot would start those. When the cause is gone, "
                f"'vllm-edge switch {wanted.number}' does what is left and touches nothing that serves."
            )
        return (
            Result.FAILED,
            f"{capitalize(name_generation(wanted))} is committed and serves, but work is left. {' '.join(texts)}",
        )


def begin_journal(
    host: SwitchedHost,
    *,
    number: int,
    profile: str,
    now: Committed | None,
    choice: Choice,
    purpose: str = "serving",
) -> Journal:
    """Return the journal of a switch that begins now; nothing is written."""
    stamp = host.stamp()
    return Journal(
        id=make_id(host.paths, stamp, number),
        generation=number,
        profile=profile,
        from_generation=now.generation if now else None,
        from_profile=now.profile if now else None,
        origin=choice.origin,
        asked_by=choice.asked_by or "somebody",
        pid=os.getpid(),
        boot_id=host.boot_id(),
        started_at=stamp,
        began_monotonic_s=host.clock(),
        purpose=purpose,
    )


def archive(paths: HostPaths, ended: Journal) -> None:
    """Copy a finished journal to the history if a kill between the last two writes left it out."""
    if not (paths.history / f"{ended.id}.json").exists():
        with contextlib.suppress(JournalLost):
            JournalFile(paths, ended).archive()
