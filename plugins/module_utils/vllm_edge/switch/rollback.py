# SPDX-License-Identifier: Apache-2.0
"""The way back: brings the host to the committed generation after a failed phase, or after a switch that was killed."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..generation import live, store
from ..generation.model import Generation, GenerationError
from ..names import SWITCH_UNIT, TARGET
from ..paths import HostPaths
from .model import BACK_PHASES, ONWARD, Direction, Done, Journal, Moves, Phase, PhaseFailed, Result
from .phases import LeftForBoot, PhaseRunner
from .render import (
    capitalize,
    complain,
    describe_over_budget,
    describe_provisional,
    describe_route,
    name_generation,
    say,
    to_sentence,
)

DECIDE_PATIENCE_S = 120.0
"""How long a rollback retries to read what runs before it goes by the journal instead: Docker or systemd may be
restarting."""
DECIDE_POLL_S = 2.0
UNVERIFIED = frozenset({Phase.AWAY, Phase.DRAIN, Phase.STOP, Phase.FREE, Phase.START, Phase.WARM_UP})
"""If one of these phases fails on the way back, and the engines are then healthy, pass the canary and are within their
budgets, the failure is only a warning."""
EVERY_STEP = f"'journalctl -u {SWITCH_UNIT}' has every step."


def go_back(
    change: PhaseRunner, failure: PhaseFailed | None, wanted: Generation, former: Generation | None, moves: Moves
) -> tuple[Result, str]:
    """Roll back after a phase failed that may have changed the host, or without a failure after a calibration.

    Returns the result and its message. A failed repair is not rolled back, because there is no other generation
    to return to. If nothing was committed before, the engines that were started are stopped again.
    """
    change.signals.go_back()
    if failure is None:
        head = f"{capitalize(name_generation(wanted))} is a calibration and was measured."
    else:
        head = f"{describe_route(change.journal)} failed in phase {failure.phase}. {failure.text}"
    head += describe_provisional(change.journal)
    if former is not None and former.number == wanted.number:
        # Engines that serve again, or are started by hand, must be reached.
        if (left := change.phase(Phase.BACK, "back", lambda: change.host.back(wanted))) is not None:
            head = f"{head} {left.text}"
        return Result.FAILED, f"{head} What serves was not touched. {_describe_what_runs(change, wanted)}"
    if former is None:
        if failure is not None:
            return _stop_what_started(change, head, moves.start)
        result, message = _stop_what_started(change, head, moves.start, "site.yml starts the engines as planned.")
        return (Result.MEASURED if result is Result.ROLLED_BACK else result), message
    say(f"going back to {name_generation(former)}")
    failures = converge_to(change, former, wanted, "back")
    if not _serves_again(failures):
        return (
            Result.FAILED,
            f"{head} Going back to {name_generation(former)} failed{' as well' if failure else ''}: "
            f"{_describe_failures(change, failures, former)}",
        )
    _warn_of(change, failures, "On the way back, in phase")
    serves = f"{name_generation(former)} serves again and is verified, {change.now():.1f} s after the switch began."
    if failure is None:
        return Result.MEASURED, f"{head} {capitalize(serves)}"
    return (
        Result.ROLLED_BACK,
        f"{head} It was undone: {serves} Correct the cause and switch again; {EVERY_STEP}",
    )


def load_committed(left: Journal, paths: HostPaths) -> Generation | None:
    """Return the committed generation; None if nothing was committed before a killed switch either.

    Raises GenerationError, also if the record is gone: engines may serve, and none of them is stopped for its loss.
    """
    committed = store.load_committed(paths)
    if committed is None and left.from_generation is not None:
        raise GenerationError(
            f"{paths.active_profile}, which named generation {left.from_generation} when the switch began, does not "
            "exist. No engine was touched. Run site.yml, which writes it again."
        )
    return committed


def end_killed(change: PhaseRunner, left: Journal, head: str) -> tuple[Result, str]:
    """End a switch that was killed, and return the result and its message. Raises LeftForBoot.

    The host goes to the committed generation, which is the new one if the killed switch had already committed. `left`
    is its journal, and `head` the beginning of the message, which says how it ended.
    """
    try:
        committed = load_committed(left, change.paths)
    except GenerationError as error:
        why = to_sentence(str(error))
        return Result.FAILED, f"{head} Going back failed: {why} 'vllm-edge status' says what runs."
    if committed is None:
        return _stop_what_started(change, head, left.start)
    other = _load_other(left, committed, change.paths)
    onward = committed.number == left.generation
    if not onward:
        head += describe_provisional(left)
    change.begin_watch(committed, other)
    failures = converge_to(change, committed, other, "forward" if onward else "back")
    if not _serves_again(failures):
        return Result.FAILED, f"{head} Recovery failed: {_describe_failures(change, failures, committed)}"
    _warn_of(change, failures, "In the recovery, phase")
    if onward:
        return (
            change.committed,
            f"{head} {capitalize(name_generation(committed))} is committed, serves and is verified.",
        )
    return (
        Result.ROLLED_BACK,
        f"{head} It was undone: {name_generation(committed)}, which is committed, serves again and is verified. Switch "
        f"again when the cause is known; {EVERY_STEP}",
    )


def _load_other(left: Journal, committed: Generation, paths: HostPaths) -> Generation | None:
    number = left.from_generation if left.generation == committed.number else left.generation
    if number is None or number == committed.number:
        return committed if number is not None else None
    try:
        return store.load(paths, number)
    except GenerationError:
        return None


def _stop_what_started(
    change: PhaseRunner,
    head: str,
    start: Sequence[str],
    remedy: str = f"Correct the cause and switch again; {EVERY_STEP}",
) -> tuple[Result, str]:
    """End a switch that has no generation to return to: stop what it started."""

    def has(phase: Phase) -> bool:
        return any(record.phase is phase for record in change.journal.phases)

    stopped = change.journal.stop
    if stopped and not has(Phase.STOP):
        return (
            Result.ROLLED_BACK,
            f"{head} Nothing had been stopped or started yet: {', '.join(stopped)} were not touched.",
        )
    started = tuple(start) if has(Phase.START) else ()
    failure = change.phase(Phase.STOP, "back", lambda: change.host.stop(Moves(stop=started)))
    done = f"{', '.join(started)} stopped again" if started else "no engine had been started"
    if failure is not None:
        return (
            Result.FAILED,
            f"{head} There is no generation to go back to, and what had been started could not be stopped: "
            f"{failure.text} Nothing is committed.",
        )
    if stopped:
        return (
            Result.FAILED,
            f"{head} {capitalize(done)}. {', '.join(stopped)}, which ran before, cannot be brought back: there is no "
            "directory of their generation. Correct the cause and run site.yml again.",
        )
    return (
        Result.ROLLED_BACK,
        f"{head} {capitalize(done)}. Nothing served before, and nothing serves now; nothing is committed. " + remedy,
    )


def converge_to(
    change: PhaseRunner, generation: Generation, other: Generation | None, direction: Direction
) -> list[PhaseFailed]:
    """Bring the host to the committed generation, as far as possible. Raises LeftForBoot.

    A phase that fails does not end this: the engines that are not concerned continue. `other` is the generation at the
    other end of the switch, if it is known; the direction is `forward` if the killed switch had committed `generation`.
    Returns what failed, and at the end what still differs from the generation.
    """
    host = change.host
    moves = _decide_patiently(change, generation)
    # Of the engines that go, only these have clients.
    reached = _only(moves.stop, change.journal.provisional.__contains__)
    # Those that the switch would have stopped and that still run.
    restored = {name: change.now() for name in moves.keep if name not in change.journal.keep}
    provisional = change.journal.provisional if direction == "back" else {}  # else it is committed
    change.file.journal = replace(change.journal, restored=restored, provisional=provisional)
    serving = generation  # then the part of it whose engines became healthy
    acts: Mapping[Phase, Callable[[], Done]] = {
        Phase.AWAY: lambda: host.away(generation, generation, moves, gap=True),
        Phase.DRAIN: lambda: host.drain(Moves(stop=reached), generation.limits),
        Phase.STOP: lambda: host.stop(moves),
        Phase.FREE: lambda: host.free(generation, moves),
        Phase.INSTALL: lambda: host.install(generation, moves),
        Phase.START: lambda: host.start(moves),
        Phase.HEALTHY: lambda: host.healthy(
            generation, moves, all_of_them=True, tell=change.let_return(generation, generation, moves)
        ),
        Phase.WARM_UP: lambda: host.warm_up(serving, moves),
        Phase.CANARY: lambda: host.canary(serving),
        Phase.MEASURE: lambda: change.measure(generation),
        Phase.BACK: lambda: host.back(generation),
        Phase.CLEAN_UP: lambda: change.clean_up(generation, other, hook=direction == "forward"),
    }
    failures: list[PhaseFailed] = []
    for phase in BACK_PHASES:
        attempt = functools.partial(change.phase, phase, direction, acts[phase])
        failure = change.file.with_all_room(attempt) if phase is Phase.INSTALL or phase in ONWARD else attempt()
        if failure is None:
            continue
        failures.append(failure)
        if phase is Phase.INSTALL:
            # An engine whose files could not be written would start as the engine of the other generation: do not
            # start it.
            moves = replace(moves, start=_only(moves.start, lambda name: _has_its_files(change, generation, name)))
        elif phase is Phase.HEALTHY:
            healthy = {name: value for name, value in generation.engines.items() if name not in failure.engines}
            serving = replace(generation, engines=healthy)
            start, wait = (_only(names, healthy.__contains__) for names in (moves.start, moves.wait))
            moves = replace(moves, start=start, wait=wait)
    if change.journal.over_budget:
        change.warn(describe_over_budget(generation, change.journal, "is still"))
    left = _find_difference(change, generation) if _serves_again(failures) else None
    return [*failures, left] if left is not None else failures


def _only(names: Iterable[str], condition: Callable[[str], bool]) -> tuple[str, ...]:
    return tuple(name for name in names if condition(name))


def _decide_patiently(change: PhaseRunner, generation: Generation) -> Moves:
    """Return what has to change, retrying for DECIDE_PATIENCE_S; after that return what the journal suggests."""
    deadline = change.host.clock() + DECIDE_PATIENCE_S
    while isinstance(moves := change.decide(generation), PhaseFailed):
        if change.goes_down():
            raise LeftForBoot
        if change.host.clock() >= deadline:
            break
        complain(f"what runs cannot be seen, asking again: {moves.text}")
        time.sleep(DECIDE_POLL_S)
    else:
        return moves
    change.warn(f"What runs could not be seen, going by the journal: {moves.text}")
    keep = _only(generation.engines, change.journal.keep.__contains__)
    start = _only(generation.engines, lambda name: name not in keep)
    return Moves(keep=keep, stop=change.journal.start, start=start)


def _has_its_files(change: PhaseRunner, generation: Generation, engine: str) -> bool:
    try:
        return not live.live_changes(generation, change.paths, [engine], target=False)
    except (GenerationError, OSError):
        return False


def _find_difference(change: PhaseRunner, generation: Generation) -> PhaseFailed | None:
    """Return what still differs, such as an engine that could not be stopped: it may answer, but is of another one."""
    moves = change.decide(generation)
    if isinstance(moves, PhaseFailed):
        change.warn(f"What runs could not be seen at the end: {moves.text}")
        return None
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
    if not wrong:
        return None
    return PhaseFailed(to_sentence(f"These differ from {name_generation(generation)}: {'; '.join(wrong)}"))


def _serves_again(failures: Sequence[PhaseFailed]) -> bool:
    return all(failure.phase in UNVERIFIED for failure in failures)


def _warn_of(change: PhaseRunner, failures: Iterable[PhaseFailed], where: str) -> None:
    for failure in failures:
        change.warn(f"{where} {failure.phase}: {failure.text}")


def _describe_failures(change: PhaseRunner, failures: Iterable[PhaseFailed], committed: Generation) -> str:
    texts = [f"In phase {failure.phase}: {failure.text}" if failure.phase else failure.text for failure in failures]
    return " ".join([*texts, _describe_what_runs(change, committed)])


def _describe_what_runs(change: PhaseRunner, generation: Generation) -> str:
    try:
        runs = to_sentence(change.host.what_runs(generation))
    except Exception as error:
        runs = f"unknown ({error}); 'vllm-edge status' shows it."
    return (
        f"What runs now: {runs} When the cause is gone, 'vllm-edge switch {generation.number}' brings back what is "
        "missing and touches nothing that serves."
    )
