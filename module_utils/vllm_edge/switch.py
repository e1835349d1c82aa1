# SPDX-License-Identifier: Apache-2.0
"""The switch as a transaction: forward through the phases to a new generation, or back to the committed one.

What a phase does to the host stands behind `World`; what a generation is, in `generations`. Here stands only the order
of things, and who serves after each way that it can fail.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any

from . import generations
from .generations import Committed, GenerationError
from .host_paths import HostPaths
from .journal import DAMAGED, Busy, JournalFile, JournalLost, Lock, new_id, read_journal, set_aside_damaged
from .switching import (
    BACK_PHASES,
    EXITS,
    HARMLESS,
    PHASES,
    SWITCH_UNIT,
    TARGET,
    Direction,
    Done,
    Downtime,
    Exit,
    Gap,
    Generation,
    Interrupted,
    Journal,
    Moves,
    Phase,
    PhaseFailed,
    Result,
    Watch,
    World,
)
from .systemd import Systemd, SystemdError

DECIDE_PATIENCE_S = 120.0
"""Before a way back is gone without knowing what runs: Docker or systemd may just be restarting."""
DECIDE_POLL_S = 2.0
DROP_JOBS_S = 60.0
UNVERIFIED = frozenset({Phase.STOP, Phase.FREE, Phase.START, Phase.WARM_UP})
"""A failure of these on the way back is a warning where the engines are then healthy, asked and measured."""


def _say(text: str) -> None:
    """A line of progress; a reader that is gone must not end a switch."""
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def _complain(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


# ---- words --------------------------------------------------------------------------------------------------------


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _named(generation: Generation | None) -> str:
    return "nothing" if generation is None else f"generation {generation.number} ({generation.profile})"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _route(journal: Journal) -> str:
    """`Switching from generation 3 (nvfp4-tp2) to generation 4 (bf16-tp4)`."""
    to = f"generation {journal.generation}" + (f" ({journal.profile})" if journal.profile else "")
    if journal.from_generation is None:
        return f"The first switch of this host, to {to},"
    if journal.from_generation == journal.generation:
        return f"Repairing {to}"
    return f"Switching from generation {journal.from_generation} ({journal.from_profile}) to {to}"


# ---- signals ------------------------------------------------------------------------------------------------------


class Signals:
    """SIGTERM, SIGINT and SIGHUP ask the switch to go back. They interrupt only what is `interruptible`, which journal
    and commit are not; on the way back they are heard only where the host goes down."""

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked: str | None = None
        """The signal that came and has not been obeyed yet."""
        self.going_down: Callable[[], bool] = lambda: False
        self._open = False
        self._back = False
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._former = {number: signal.signal(number, self._arrived) for number in self.NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.asked = signal.Signals(number).name
        if self._back and not self.going_down():
            _complain(f"{self.asked}: the switch goes back already.")
        elif self._open:
            self._open = False
            raise Interrupted(self.asked)

    def go_back(self) -> None:
        self.asked, self._back = None, True

    def go_forward(self) -> None:
        """What came meanwhile is obeyed now."""
        self._back = False

    def check(self) -> None:
        if self.asked is not None and (not self._back or self.going_down()):
            raise Interrupted(self.asked)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            self._open = True
            self.check()
            yield
        finally:
            self._open = False


# ---- the transaction ----------------------------------------------------------------------------------------------


class LeftForBoot(Exception):
    """The host goes down: the journal stays unfinished, and the boot ends the switch."""


@dataclass(frozen=True)
class Failed:
    """A phase that failed."""

    phase: Phase | None
    text: str
    engines: tuple[str, ...] = ()


class Transaction:
    """One switch, or the recovery of one. Holds no lock of its own: who makes one has it."""

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
        """Of `world.monotonic()`: the switch's zero."""
        self._watch: Watch | None = None

    @property
    def journal(self) -> Journal:
        return self.file.journal

    def now(self) -> float:
        return round(self.world.monotonic() - self.began, 3)

    def warn(self, text: str) -> None:
        if text not in self.journal.warnings:
            _complain(f"warning: {text}")
            self.file.journal = replace(self.journal, warnings=(*self.journal.warnings, text))

    # -- one phase

    def attempt(self, what: str, act: Callable[[], Done]) -> Done | PhaseFailed:
        """Whatever goes wrong is a failed phase; what nobody expected leaves its traceback in systemd's journal."""
        try:
            return act()
        except PhaseFailed as failure:
            return failure
        except Interrupted as asked:
            return PhaseFailed(f"{asked} asked the switch to end")
        except GenerationError as error:
            return PhaseFailed(str(error))
        except Exception as error:
            _complain(traceback.format_exc())
            return PhaseFailed(
                f"{what} met what it does not know: {type(error).__name__}: {error}. That is a mistake of this "
                f"program; 'journalctl -u {SWITCH_UNIT}' has the traceback"
            )

    def interruptible(self, act: Callable[[], Done]) -> Callable[[], Done]:
        def run() -> Done:
            with self.signals.interruptible():
                return act()

        return run

    def phase(
        self, phase: Phase, direction: Direction, act: Callable[[], Done], *, shielded: bool = False
    ) -> Failed | None:
        """Journalled, then acted. Forward, a phase that cannot be journalled does not act: except after the commit,
        where there is only onward."""
        began = self.now()
        outcome: Done | PhaseFailed
        try:
            self.file.enter(phase, direction, self.world.stamp(), began)
            journalled = True
        except JournalLost as lost:
            journalled = direction == "back" or phase is Phase.CLEAN_UP
            outcome = PhaseFailed(f"{lost}; a phase that cannot be journalled is not begun")
            if journalled:
                self.warn(f"{_sentence(str(lost))} The switch goes on without its journal.")
        if journalled:
            _say(f"{'going back, ' if direction == 'back' else ''}{phase}: begins")
            outcome = self.attempt(f"Phase {phase}", act if shielded else self.interruptible(act))
        seconds = round(self.now() - began, 3)
        kept: dict[str, Any] = {
            key: tuple(outcome.data[key]) for key in ("canary", "gpus", "drift") if outcome.data.get(key) is not None
        }
        self.file.journal = replace(self.journal, **kept)
        if isinstance(outcome, Done):
            self.file.leave("done", seconds, outcome.detail)
            _say(f"{phase}: done in {seconds:.1f} s{': ' if outcome.detail else ''}{outcome.detail}")
            for text in outcome.warnings:
                self.warn(text)
            return None
        self.file.leave("failed", seconds, outcome.text)
        _say(f"{phase}: failed after {seconds:.1f} s: {outcome.text}")
        if phase not in HARMLESS and self.goes_down():
            raise LeftForBoot(phase)
        return Failed(phase, _sentence(outcome.text), outcome.engines)

    def with_all_room(
        self, phase: Phase, direction: Direction, act: Callable[[], Done], *, shielded: bool = False
    ) -> Failed | None:
        """Where there is no other way on: files that cannot be written get the ballast's room."""
        failure = self.phase(phase, direction, act, shielded=shielded)
        if failure is not None and phase in (Phase.INSTALL, Phase.CLEAN_UP) and self.file.give_up_ballast():
            failure = self.phase(phase, direction, act, shielded=shielded)
        return failure

    def goes_down(self) -> bool:
        try:
            return self.world.going_down()
        except Exception:
            return False  # to go back where the host goes down is tried in vain, and ended by the boot

    # -- what clients see

    def begin_watch(self, wanted: Generation, former: Generation | None) -> None:
        if former is None:
            return  # nobody served before, so no client misses anything
        try:
            self._watch = self.world.watch(wanted, former)
        except Exception as error:
            self.warn(f"Downtime is not watched: {error}")

    def end_watch(self) -> None:
        if self._watch is None:
            return
        watch, self._watch = self._watch, None
        phases = [replace(record, began_s=record.began_s + self.began) for record in self.journal.phases]
        try:
            seen = {role: _later(downtime, -self.began) for role, downtime in watch.end(phases).items()}
            self.file.journal = replace(self.journal, downtime=seen)
        except Exception as error:
            self.warn(f"Downtime is not known: {error}")

    # -- forward

    def forward(
        self, wanted: Generation, former: Generation | None, *, origin: str, inventory_profile: str | None
    ) -> tuple[Result, str]:
        """`former` is the committed generation; `wanted` itself where this is a repair, None where there is none."""
        repair = former is not None and former.number == wanted.number
        seen: list[Moves] = []
        failure = self._decide(wanted, seen)
        if failure is not None:
            return self._refused(failure)
        moves = seen[0]
        try:
            self.file.write(keep=moves.keep, stop=moves.stop, start=moves.start)
        except JournalLost as lost:
            return self._refused(Failed(None, _sentence(str(lost))))
        if repair and not moves:
            return self._unchanged(wanted, origin=origin, inventory_profile=inventory_profile)

        def drain() -> Done:
            if not moves.stop:
                return Done("no engine has to stop")
            return _both(self.world.hook("before_drain", wanted, former), self.world.drain(moves, wanted.limits))

        def commit() -> Done:
            self.signals.check()  # the last moment to go back
            generations.commit(
                wanted, self.paths, origin=origin, inventory_profile=inventory_profile, chosen_at=self.world.stamp()
            )
            return Done(f"{_named(wanted)} is committed")

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
                # The rename has happened, what came after it failed: from here there is only onward.
                self.warn(failure.text)
                continue
            if phase is Phase.CLEAN_UP:
                return self._left_over(wanted, failure)
            return self.go_back(failure, wanted, former, moves)
        return Result.COMMITTED, self._serves(wanted, moves)

    def _decide(self, generation: Generation, seen: list[Moves]) -> Failed | None:
        def look() -> Done:
            seen.append(self.world.moves(generation))
            return Done()

        outcome = self.attempt("Looking at what runs", self.interruptible(look))
        return None if isinstance(outcome, Done) else Failed(None, _sentence(outcome.text))

    def _is_committed(self, wanted: Generation) -> bool:
        try:
            now = generations.committed(self.paths)
        except GenerationError:
            return False
        return now is not None and now.generation == wanted.number

    def clean_up(self, wanted: Generation, former: Generation | None, *, hook: bool) -> Done:
        done = self.world.clean_up(wanted, former)
        if not hook:
            return done
        told = self.attempt("Hook after_commit", lambda: self.world.hook("after_commit", wanted, former))
        if isinstance(told, Done):
            return _both(done, told)
        # It serves: what a hook says to that is for people.
        return replace(done, warnings=(*done.warnings, told.text))

    def _unchanged(self, wanted: Generation, *, origin: str, inventory_profile: str | None) -> tuple[Result, str]:
        def remember() -> Done:
            now = generations.committed(self.paths)
            if now is not None and (now.origin, now.inventory_profile) != (origin, inventory_profile):
                # The same choice, made by somebody else: who is remembered, and nothing of the host is touched.
                chosen_at = self.world.stamp()
                generations.commit(
                    wanted, self.paths, origin=origin, inventory_profile=inventory_profile, chosen_at=chosen_at
                )
            return Done()

        outcome = self.attempt("Remembering who chose the profile", remember)
        if isinstance(outcome, PhaseFailed):
            self.warn(outcome.text)
        return Result.UNCHANGED, f"{_capital(_named(wanted))} serves already and nothing differs: nothing was touched."

    def _refused(self, failure: Failed) -> tuple[Result, str]:
        where = f" in phase {failure.phase}" if failure.phase else ""
        journal = self.journal
        still = (
            "nothing is committed on this host"
            if journal.from_generation is None
            else f"the host is committed to generation {journal.from_generation} ({journal.from_profile})"
        )
        return (
            Result.REFUSED,
            f"{_route(self.journal)} was refused{where}. {failure.text} Nothing was touched: {still}, as before.",
        )

    def _serves(self, wanted: Generation, moves: Moves) -> str:
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
        return _sentence(
            f"{_capital(_named(wanted))} serves and is verified, {self.now():.1f} s after the switch began: "
            f"{'; '.join(did) or 'no engine had to move'}"
        )

    def _left_over(self, wanted: Generation, failure: Failed) -> tuple[Result, str]:
        return (
            Result.FAILED,
            f"{_capital(_named(wanted))} is committed and serves, but to clean up failed. {failure.text} "
            f"{TARGET} may still want the engines of before, and a boot would start those. When the cause is gone, "
            f"'vllm-edge switch {wanted.number}' does what is left and touches nothing that serves.",
        )

    # -- back

    def go_back(
        self, failure: Failed, wanted: Generation, former: Generation | None, moves: Moves
    ) -> tuple[Result, str]:
        """To the committed generation, after a phase that is not harmless."""
        self.signals.go_back()
        head = f"{_route(self.journal)} failed in phase {failure.phase}. {failure.text}"
        if former is not None and former.number == wanted.number:
            return Result.FAILED, f"{head} What serves was not touched. {self._what_runs(wanted)}"
        if former is None:
            return self._nothing_before(head, moves.start if self._has(Phase.START) else ())
        _say(f"going back to {_named(former)}")
        failures = self.towards(former, wanted, "back")
        if self._serves_again(failures):
            for one in failures:
                self.warn(f"On the way back, in phase {one.phase}: {one.text}")
            return (
                Result.ROLLED_BACK,
                f"{head} It was undone: {_named(former)} serves again and is verified, {self.now():.1f} s after the "
                f"switch began. Correct the cause and switch again; 'journalctl -u {SWITCH_UNIT}' has every step.",
            )
        return (
            Result.FAILED,
            f"{head} Going back to {_named(former)} failed as well: {self._in_parts(failures, former)}",
        )

    def _has(self, phase: Phase) -> bool:
        return any(record.phase is phase for record in self.journal.phases)

    def _serves_again(self, failures: Sequence[Failed]) -> bool:
        return all(failure.phase in UNVERIFIED for failure in failures)

    def _in_parts(self, failures: Sequence[Failed], committed: Generation) -> str:
        said = " ".join(
            f"In phase {failure.phase}: {failure.text}" if failure.phase else failure.text for failure in failures
        )
        return f"{said} {self._what_runs(committed)}"

    def _what_runs(self, generation: Generation) -> str:
        try:
            runs = _sentence(self.world.what_runs(generation))
        except Exception as error:
            runs = f"unknown ({error}); 'vllm-edge status' tells."
        return (
            f"What runs now: {runs} When the cause is gone, 'vllm-edge switch {generation.number}' brings back what is "
            "missing and touches nothing that serves."
        )

    def _nothing_before(self, head: str, started: Sequence[str]) -> tuple[Result, str]:
        """No generation to go back to: what was started is stopped."""
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
                f"{head} {_capital(stopped)}. {', '.join(self.journal.stop)}, which ran before, cannot be brought "
                "back: there is no directory of their generation. Correct the cause and run site.yml again.",
            )
        return (
            Result.ROLLED_BACK,
            f"{head} {_capital(stopped)}. Nothing served before, and nothing serves now; nothing is committed. Correct "
            f"the cause and switch again; 'journalctl -u {SWITCH_UNIT}' has every step.",
        )

    def towards(self, generation: Generation, other: Generation | None, direction: Direction) -> list[Failed]:
        """The same machinery towards the committed generation, as far as it goes: what fails does not keep the rest
        from serving. Returns what failed."""
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
                # With the files of the other generation an engine would start as something else.
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
        """What still differs. An engine that could not be stopped may answer and be of the other generation."""
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
        return Failed(None, _sentence(f"Not as {_named(generation)} says are {'; '.join(wrong)}")) if wrong else None

    def _act_back(
        self,
        phase: Phase,
        moves: Moves,
        generation: Generation,
        serving: Generation,
        other: Generation | None,
        direction: Direction,
    ) -> Done:
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
        try:
            return not generations.live_changes(generation, self.paths, [engine], target=False)
        except (GenerationError, OSError):
            return False

    def _decide_patiently(self, generation: Generation) -> Moves:
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
            _complain(f"what runs cannot be seen, asking again: {failure.text}")
            time.sleep(DECIDE_POLL_S)
        self.warn(f"What runs could not be seen, going by the journal: {failure.text}")
        keep = tuple(name for name in generation.engines if name in self.journal.keep)
        return Moves(
            keep=keep, stop=self.journal.start, start=tuple(name for name in generation.engines if name not in keep)
        )

    def recovered(self, left: Journal, head: str) -> tuple[Result, str]:
        """To what is committed, whatever the journal says: where the commit had happened, that is the new one."""
        try:
            committed = generations.load_committed(self.paths)
        except GenerationError as error:
            why = _sentence(str(error))
            return Result.FAILED, f"{head} Going back failed: {why} 'vllm-edge status' says what runs."
        if committed is None:
            return self._nothing_before(head, left.start if self._has(Phase.START) else ())
        other = _other(left, committed, self.paths)
        onward = committed.number == left.generation and left.id != DAMAGED
        self.begin_watch(committed, other)
        failures = self.towards(committed, other, "forward" if onward else "back")
        if not self._serves_again(failures):
            return Result.FAILED, f"{head} Recovery failed: {self._in_parts(failures, committed)}"
        for one in failures:
            self.warn(f"In the recovery, phase {one.phase}: {one.text}")
        if onward:
            return Result.COMMITTED, f"{head} {_capital(_named(committed))} is committed, serves and is verified."
        return (
            Result.ROLLED_BACK,
            f"{head} It was undone: {_named(committed)}, which is committed, serves again and is verified. Switch "
            f"again when the cause is known; 'journalctl -u {SWITCH_UNIT}' has every step.",
        )

    # -- the end

    def finish(self, result: Result, message: str) -> Result:
        """The last words of the journal. They stand on stdout, too: a full disk must not swallow them."""
        self.end_watch()
        message = " ".join(message.split())  # one paragraph, whatever a program said in it
        _say(f"{result}: {message}")
        changes: dict[str, Any] = {
            "result": result,
            "message": message,
            "ended_at": self.world.stamp(),
            "seconds": self.now(),
        }
        try:
            self.file.finish(**changes)
        except JournalLost as lost:
            _complain(f"{_sentence(str(lost))} The end of this switch is only here, and in its exit status.")
        return result


def _both(first: Done, second: Done) -> Done:
    details = [done.detail for done in (first, second) if done.detail]
    return Done("; ".join(details), {**first.data, **second.data}, (*first.warnings, *second.warnings))


def _later(downtime: Downtime, by_s: float) -> Downtime:
    gaps = (
        Gap(max(0.0, round(gap.from_s + by_s, 3)), None if gap.to_s is None else round(gap.to_s + by_s, 3))
        for gap in downtime.gaps
    )
    return replace(downtime, gaps=tuple(gaps))


# ---- a switch -----------------------------------------------------------------------------------------------------


def _fresh_journal(
    world: World, paths: HostPaths, *, number: int, profile: str, now: Committed | None, origin: str, asked_by: str
) -> Journal:
    stamp = world.stamp()
    return Journal(
        id=new_id(paths, stamp, number),
        generation=number,
        profile=profile,
        from_generation=now.generation if now else None,
        from_profile=now.profile if now else None,
        origin=origin,
        asked_by=asked_by,
        pid=os.getpid(),
        boot_id=world.boot_id(),
        started_at=stamp,
        began_monotonic_s=world.monotonic(),
    )


def _former_of(now: Committed | None, wanted: Generation, paths: HostPaths) -> tuple[Generation | None, str]:
    """The generation to go back to, and a warning where there is none although one is committed."""
    if now is None:
        return None, ""
    if now.generation == wanted.number:
        return wanted, ""
    directory = paths.generation_dir(now.generation)
    if not directory.exists():
        return None, (
            f"Generation {now.generation} ({now.profile}) is committed, but {directory} does not exist: it was set up "
            "by an older release, or removed. There is nothing to go back to if this switch fails."
        )
    try:
        return generations.load(paths, now.generation), ""
    except GenerationError as error:
        raise GenerationError(
            f"{_sentence(_capital(str(error)))} It is the committed one: if this switch failed, there would be nothing "
            f"to go back to. Bring it back with site.yml and its profile ({now.profile}); or move {directory} away, "
            "and the switch is made without a way back."
        ) from error


def switch(
    world: World,
    paths: HostPaths,
    number: int,
    signals: Signals,
    *,
    origin: str,
    inventory_profile: str | None,
    asked_by: str,
) -> Result | None:
    """With the lock held. None where the host goes down and the boot has to end it."""
    left = read_journal(paths)
    if left is not None and left.result is not None:
        _archive(paths, left)
    elif left is not None:
        _say("a former switch did not end: going back first")
        if recover(world, paths, left, signals) is None:
            return None
        signals.go_forward()
    problem, profile, warning = "", "", ""
    now: Committed | None = None
    wanted = former = None
    try:
        now = generations.committed(paths)
        wanted = generations.load(paths, number)
        profile = wanted.profile
        former, warning = _former_of(now, wanted, paths)
    except GenerationError as error:
        problem = _sentence(str(error))
    journal = _fresh_journal(world, paths, number=number, profile=profile, now=now, origin=origin, asked_by=asked_by)
    file = JournalFile(paths, journal)
    change = Transaction(world, file, signals, began=journal.began_monotonic_s or 0.0)
    refused = f"{_route(journal)} was refused."
    if wanted is None or problem:
        return change.finish(Result.REFUSED, f"{refused} {_capital(problem)} Nothing was touched.")
    try:
        file.take_ballast()
        file.write()
    except JournalLost as lost:
        return change.finish(Result.REFUSED, f"{refused} {_sentence(str(lost))} Nothing was touched.")
    if warning:
        change.warn(warning)
    if now is not None and now.generation == number and origin == "host":
        # Who repairs by hand what is active has not chosen it.
        origin, inventory_profile = now.origin, now.inventory_profile
    try:
        return change.finish(*change.forward(wanted, former, origin=origin, inventory_profile=inventory_profile))
    except LeftForBoot:
        _leave_for_boot(change)
        return None


def _leave_for_boot(change: Transaction) -> None:
    change.end_watch()
    text = f"The host goes down in phase {change.journal.phase}: the boot goes back to the committed generation."
    _say(text)
    with contextlib.suppress(JournalLost):
        change.file.write(message=text)


def _archive(paths: HostPaths, ended: Journal) -> None:
    """A program that was killed between its last two writes left no copy in the history."""
    if not (paths.history / f"{ended.id}.json").exists():
        with contextlib.suppress(JournalLost):
            JournalFile(paths, ended).archive()


# ---- a recovery ---------------------------------------------------------------------------------------------------


def _taken_over(world: World, paths: HostPaths, left: Journal) -> tuple[JournalFile, float]:
    """The journal of a switch that did not end, and the zero of its seconds."""
    stamp = world.stamp()
    if left.id == DAMAGED:
        kept = set_aside_damaged(paths, stamp)
        try:
            now = generations.committed(paths)
        except GenerationError:
            now = None
        number, profile = (now.generation, now.profile) if now else (0, "")
        fresh = _fresh_journal(
            world, paths, number=number, profile=profile, now=now, origin="host", asked_by="vllm-edge recover"
        )
        where = f"It is kept as {kept}." if kept else "It could not be kept."
        fresh = replace(fresh, phase=Phase.STOP, direction="back", warnings=(f"{_sentence(left.message)} {where}",))
        return JournalFile(paths, fresh), fresh.began_monotonic_s or 0.0
    boot_id = world.boot_id()
    zero = left.began_monotonic_s
    if zero is None or left.boot_id != boot_id:
        # Of another boot, whose clock is gone: goes on where the last phase that is known was.
        reached = max((record.began_s + (record.seconds or 0.0) for record in left.phases), default=0.0)
        zero = world.monotonic() - reached
    file = JournalFile(paths, replace(left, pid=os.getpid(), boot_id=boot_id, began_monotonic_s=zero, message=""))
    if left.phases and left.phases[-1].outcome is None:
        lasted = max(0.0, round(world.monotonic() - zero - left.phases[-1].began_s, 3))
        file.leave("failed", lasted, "the program that ran the switch was ended here")
    return file, zero


def _killed(left: Journal) -> str:
    if left.id == DAMAGED:
        return "The journal of a switch cannot be read, it counts as one that did not end."
    where = f"in phase {left.phase}" if left.phase else "at its beginning"
    back = ", on the way back" if left.direction == "back" else ""
    return f"{_route(left)} did not end: its program was killed, or the host went down, {where}{back}."


def recover(
    world: World,
    paths: HostPaths,
    left: Journal,
    signals: Signals,
) -> Result | None:
    """With the lock held: to the committed generation, whichever that is. None where the host goes down."""
    signals.go_back()
    file, began = _taken_over(world, paths, left)
    change = Transaction(world, file, signals, began=began)
    with contextlib.suppress(JournalLost):
        file.take_ballast()
    head = _killed(left)
    if left.id != DAMAGED and left.direction == "forward" and (left.phase is None or left.phase in HARMLESS):
        return change.finish(Result.REFUSED, f"{head} Nothing had been touched.")
    try:
        return change.finish(*change.recovered(left, head))
    except LeftForBoot:
        _leave_for_boot(change)
        return None


def _other(left: Journal, committed: Generation, paths: HostPaths) -> Generation | None:
    """The generation at the other end of the switch, as far as it is known."""
    number = left.from_generation if left.generation == committed.number else left.generation
    if number is None or number == committed.number:
        return committed if number is not None else None
    try:
        return generations.load(paths, number)
    except GenerationError:
        return None


def recover_at_boot(world: World, paths: HostPaths, left: Journal, systemd: Systemd) -> Result:
    """With the lock held, before the engines start: files and target of the committed generation; starting them is
    systemd's, as at every boot."""
    file, began = _taken_over(world, paths, left)
    change = Transaction(world, file, Signals(), began=began)
    with contextlib.suppress(JournalLost):
        file.take_ballast()
    head = _killed(left)
    try:
        committed = generations.load_committed(paths)
    except GenerationError as error:
        return change.finish(Result.FAILED, f"{head} At boot its files could not be put back: {_sentence(str(error))}")
    if committed is None:
        return change.finish(
            Result.ROLLED_BACK, f"{head} Nothing was committed on this host before: no engine is started at boot."
        )
    onward = committed.number == left.generation and left.id != DAMAGED
    direction: Direction = "forward" if onward else "back"

    def install() -> Done:
        written = generations.install(committed, paths, list(committed.engines), target=True)
        return Done(f"{len(written)} files written")

    def clean_up() -> Done:
        gone = [name for name in generations.live_engines(paths) if name not in committed.engines]
        # A boot may already want to start them, where the target of before was on the disk.
        said = systemd.stop([f"vllm-{name}.service" for name in gone], DROP_JOBS_S) if gone else None
        for name in gone:
            generations.remove_engine(name, paths)
        systemd.daemon_reload()
        systemd.enable(TARGET)
        systemd.start([TARGET])
        return Done(f"{', '.join(gone)} removed" if gone else "", warnings=(said,) if said else ())

    failures = [
        failure
        for phase, act in ((Phase.INSTALL, install), (Phase.CLEAN_UP, clean_up))
        if (failure := change.phase(phase, direction, _in_words(act), shielded=True)) is not None
    ]
    if failures:
        return change.finish(
            Result.FAILED,
            f"{head} At boot {_named(committed)} could not be put back: "
            + " ".join(f"In phase {failure.phase}: {failure.text}" for failure in failures)
            + f" When the cause is gone, 'vllm-edge switch {committed.number}' does it.",
        )
    return change.finish(
        Result.COMMITTED if onward else Result.ROLLED_BACK,
        f"{head} At boot the files of {_named(committed)}, which is committed, were put back; systemd starts its "
        "engines. They were not verified: 'vllm-edge status' says how they are.",
    )


def _in_words(act: Callable[[], Done]) -> Callable[[], Done]:
    def run() -> Done:
        try:
            return act()
        except SystemdError as error:
            raise PhaseFailed(str(error)) from error

    return run


# ---- entries ------------------------------------------------------------------------------------------------------


def _exit(run: Callable[[], Exit], *, quiet: bool = False) -> int:
    """An exception would end the program with the status of a rollback."""
    try:
        return run()
    except Busy as busy:
        (_say if quiet else _complain)(str(busy))
        return Exit.BUSY
    except PhaseFailed as failure:
        _complain(failure.text)
        return Exit.FAILED
    except Exception:
        _complain(traceback.format_exc())
        return Exit.FAILED


def _open_world(paths: HostPaths) -> World:
    from .host_world import open_world

    return open_world(paths)


def run_switch(paths: HostPaths, number: int, *, origin: str, inventory_profile: str | None, asked_by: str) -> int:
    """Entry of `vllm-edge run-switch`, the program of vllm-edge-switch.service."""

    def run() -> Exit:
        with Lock(paths), Signals() as signals:
            world = _open_world(paths)
            signals.going_down = world.going_down
            result = switch(
                world, paths, number, signals, origin=origin, inventory_profile=inventory_profile, asked_by=asked_by
            )
            return Exit.FAILED if result is None else EXITS[result]

    return _exit(run)


def run_recover(paths: HostPaths, *, boot: bool) -> int:
    """Entry of `vllm-edge recover`: OK where the committed generation serves, or there was nothing to do."""

    def run() -> Exit:
        with Lock(paths), Signals() as signals:
            left = read_journal(paths)
            if left is None or left.result is not None:
                if left is not None:
                    _archive(paths, left)
                _say("nothing to recover: the last switch ended" if left else "nothing to recover: there was no switch")
                return Exit.OK
            world = _open_world(paths)
            signals.going_down = world.going_down
            result: Result | None
            if boot:
                result = recover_at_boot(world, paths, left, Systemd())
            elif world.going_down():
                _say("the host goes down: the boot recovers")
                return Exit.OK
            else:
                result = recover(world, paths, left, signals)
            return Exit.FAILED if result is Result.FAILED else Exit.OK

    return _exit(run, quiet=True)
