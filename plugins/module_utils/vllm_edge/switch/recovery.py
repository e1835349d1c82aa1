# SPDX-License-Identifier: Apache-2.0
"""Recovery of a switch that was killed or cut off: ends it at once, or at the next boot."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

from ..generation import committed as generation_committed
from ..generation import live, secrets
from ..generation.model import Choice, GenerationError
from ..names import TARGET, unit_name
from .host import SwitchedHost
from .journal import DAMAGED, JournalFile, JournalLost, set_aside_damaged
from .model import HARMLESS, Direction, Done, Journal, Phase, Result
from .phases import PhaseRunner
from .render import describe_provisional, describe_route, name_generation, to_sentence
from .rollback import end_killed, load_committed
from .signals import Signals
from .transaction import begin_journal

DROP_JOBS_S = 60.0


def _take_over(host: SwitchedHost, left: Journal) -> JournalFile:
    """Return the journal of a switch that did not end, ready to be continued."""
    paths, stamp = host.paths, host.stamp()
    if left.id == DAMAGED:
        kept = set_aside_damaged(paths, stamp)
        try:
            now = generation_committed.committed(paths)
        except GenerationError:
            now = None
        number, profile = (now.generation, now.profile) if now else (0, "")
        choice = Choice("host", asked_by="vllm-edge recover")
        fresh = begin_journal(host, number=number, profile=profile, now=now, choice=choice)
        where = f"It is kept as {kept}." if kept else "It could not be kept."
        fresh = replace(fresh, phase=Phase.STOP, direction="back", warnings=(f"{to_sentence(left.message)} {where}",))
        return JournalFile(paths, fresh)
    boot_id = host.boot_id()
    zero = left.began_monotonic_s
    if zero is None or left.boot_id != boot_id:
        # The clock of the other boot is lost: continue at the end of the last phase that is known.
        reached = max((record.began_s + (record.seconds or 0.0) for record in left.phases), default=0.0)
        zero = host.clock() - reached
    file = JournalFile(paths, replace(left, pid=os.getpid(), boot_id=boot_id, began_monotonic_s=zero, message=""))
    if left.phases and left.phases[-1].outcome is None:
        lasted = max(0.0, round(host.clock() - zero - left.phases[-1].began_s, 3))
        file.leave("failed", lasted, "the program that ran the switch was ended here")
    return file


def _describe_killed(left: Journal) -> str:
    if left.id == DAMAGED:
        return "The journal of a switch cannot be read, it counts as one that did not end."
    where = f"in phase {left.phase}" if left.phase else "at its beginning"
    back = ", on the way back" if left.direction == "back" else ""
    return f"{describe_route(left)} did not end: its program was killed, or the host went down, {where}{back}."


def _continue(host: SwitchedHost, left: Journal, signals: Signals) -> tuple[PhaseRunner, str]:
    file = _take_over(host, left)
    with contextlib.suppress(JournalLost):
        file.take_ballast()
    return PhaseRunner(host, file, signals), _describe_killed(left)


def recover(host: SwitchedHost, left: Journal, signals: Signals) -> Result | None:
    """End a killed switch by going to the committed generation, whichever that is.

    The caller holds the lock. Signals are ignored from now on, unless the host goes down. Returns the result, or None
    if the boot has to recover.
    """
    signals.go_back()
    change, head = _continue(host, left, signals)
    if left.id != DAMAGED and left.direction == "forward" and (left.phase is None or left.phase in HARMLESS):
        return change.finish(Result.REFUSED, f"{head} Nothing had been touched.")
    return change.end(lambda: end_killed(change, left, head))


def recover_at_boot(host: SwitchedHost, left: Journal) -> Result:
    """End a killed switch before the engines start: put back files and target of the committed generation.

    systemd then starts the engines, as at every boot; they are not verified. The caller holds the lock.
    """
    paths, systemd = host.paths, host.systemd
    change, head = _continue(host, left, Signals())
    try:
        committed = load_committed(left, paths)
    except GenerationError as error:
        return change.finish(
            Result.FAILED, f"{head} At boot its files could not be put back: {to_sentence(str(error))}"
        )
    if committed is None:
        return change.finish(
            Result.ROLLED_BACK, f"{head} Nothing was committed on this host before: no engine is started at boot."
        )
    onward = committed.number == left.generation
    if not onward:
        head += describe_provisional(left)
    direction: Direction = "forward" if onward else "back"

    def install() -> Done:
        written = live.install(committed, paths, list(committed.engines), target=True)
        return Done(f"{len(written)} files written")

    def clean_up() -> Done:
        gone = [name for name in live.list_live_engines(paths) if name not in committed.engines]
        # If the former target was on the disk, the boot may already have queued these units.
        said = systemd.stop([unit_name(name) for name in gone], DROP_JOBS_S) if gone else None
        for name in gone:
            live.remove_engine(name, paths)
        secrets.prune(paths)
        systemd.daemon_reload()
        systemd.enable(TARGET)
        systemd.start([TARGET])
        return Done(f"{', '.join(gone)} removed" if gone else "", warnings=(said,) if said else ())

    # If it fails, the gateway does it when it starts.
    change.phase(Phase.BACK, direction, lambda: host.back(committed), shielded=True)
    failures = [
        failure
        for phase, act in ((Phase.INSTALL, install), (Phase.CLEAN_UP, clean_up))
        if (failure := change.phase(phase, direction, act, shielded=True)) is not None
    ]
    if failures:
        return change.finish(
            Result.FAILED,
            f"{head} At boot {name_generation(committed)} could not be put back: "
            + " ".join(f"In phase {failure.phase}: {failure.text}" for failure in failures)
            + f" When the cause is gone, 'vllm-edge switch {committed.number}' does it.",
        )
    return change.finish(
        change.committed if onward else Result.ROLLED_BACK,
        f"{head} At boot the files of {name_generation(committed)}, which is committed, were put back; systemd starts "
        "its engines. They were not verified: 'vllm-edge status' says how they are.",
    )
