# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge run-switch` and `vllm-edge recover`: lock, signals and exit status around one switch or recovery."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace

from ..generation import committed as generation_committed
from ..generation import store
from ..generation.model import Choice, Committed, Generation, GenerationError
from ..paths import HostPaths
from .host import SwitchedHost
from .journal import Busy, JournalFile, JournalLost, read_journal, take_lock
from .model import EXITS, Exit, PhaseFailed, Result
from .recovery import recover, recover_at_boot
from .render import capitalize, complain, describe_route, say, to_sentence
from .signals import Signals
from .transaction import Transaction, archive, begin_journal


def run_recover(paths: HostPaths, *, boot: bool) -> int:
    """Run `vllm-edge recover`, with `--boot` if `boot` is set.

    Returns its exit status: OK if the committed generation serves or there was nothing to do, BUSY if another switch
    holds the lock, otherwise FAILED.
    """

    def act(signals: Signals) -> Exit:
        left = read_journal(paths)
        if left is None or left.result is not None:
            if left is not None:
                archive(paths, left)
            say("nothing to recover: the last switch ended" if left else "nothing to recover: there was no switch")
            return Exit.OK
        host = SwitchedHost(paths)
        signals.going_down = host.going_down
        if not boot and host.going_down():
            say("the host goes down: the boot recovers")
            return Exit.OK
        recovered = recover_at_boot(host, left) if boot else recover(host, left, signals)
        return Exit.FAILED if recovered is Result.FAILED else Exit.OK

    return _run(paths, act, quiet=True)


def _load_former(now: Committed | None, wanted: Generation, paths: HostPaths) -> tuple[Generation | None, str]:
    """Return the generation to roll back to, and a warning if one is committed but its directory is gone.

    Raises GenerationError if the directory is there and cannot be used.
    """
    if now is None:
        return None, ""
    if now.generation == wanted.number:
        return wanted, ""
    directory = paths.generation_dir(now.generation)
    if not directory.exists():
        return None, (
            f"Generation {now.generation} ({now.profile}) is committed, but {directory} does not exist. "
            "There is nothing to go back to if this switch fails."
        )
    try:
        return store.load(paths, now.generation), ""
    except GenerationError as error:
        raise GenerationError(
            f"{to_sentence(capitalize(str(error)))} It is the committed one: if this switch failed, there would be "
            f"nothing to go back to. Bring it back with site.yml and its profile ({now.profile}); or move {directory} "
            "away, and the switch is made without a way back."
        ) from error


def switch(host: SwitchedHost, number: int, signals: Signals, choice: Choice) -> Result | None:
    """Switch to a generation. An unfinished former switch is recovered first. The caller holds the lock.

    Returns the result, or None if the host goes down and the boot has to end the switch.
    """
    paths = host.paths
    left = read_journal(paths)
    if left is not None and left.result is not None:
        archive(paths, left)
    elif left is not None:
        say("a former switch did not end: going back first")
        if recover(host, left, signals) is None:
            return None
        signals.go_forward()
    problem, warning = "", ""
    now: Committed | None = None
    wanted = former = None
    try:
        now = generation_committed.committed(paths)
        wanted = store.load(paths, number)
        former, warning = _load_former(now, wanted, paths)
    except GenerationError as error:
        problem = to_sentence(str(error))
    profile, purpose = (wanted.profile, wanted.purpose) if wanted else ("", "serving")
    journal = begin_journal(host, number=number, profile=profile, now=now, choice=choice, purpose=purpose)
    file = JournalFile(paths, journal)
    change = Transaction(host, file, signals)
    refused = f"{describe_route(journal)} was refused."
    if wanted is None or problem:
        return change.finish(Result.REFUSED, f"{refused} {capitalize(problem)} Nothing was touched.")
    try:
        file.take_ballast()
        file.write()
    except JournalLost as lost:
        return change.finish(Result.REFUSED, f"{refused} {to_sentence(str(lost))} Nothing was touched.")
    if warning:
        change.warn(warning)
    if now is not None and now.generation == number and choice.origin == "host":
        # A repair by hand of the active generation is no new choice: keep the recorded origin.
        choice = replace(choice, origin=now.origin, inventory_profile=now.inventory_profile)
    return change.end(lambda: change.forward(wanted, former, choice))


def _run(paths: HostPaths, act: Callable[[Signals], Exit], *, quiet: bool = False) -> int:
    """Act under the lock and with handlers of signals, and turn exceptions into exit statuses.

    An uncaught exception would end the program with status 1, which means `rolled back`.
    """
    try:
        with take_lock(paths), Signals() as signals:
            return act(signals)
    except Busy as busy:
        (say if quiet else complain)(str(busy))
        return Exit.BUSY
    except PhaseFailed as failure:
        complain(failure.text)
        return Exit.FAILED
    except Exception:
        complain(traceback.format_exc())
        return Exit.FAILED


def run_switch(paths: HostPaths, number: int, choice: Choice) -> int:
    """Run `vllm-edge run-switch`, the program of vllm-edge-switch.service. Returns its exit status."""

    def act(signals: Signals) -> Exit:
        host = SwitchedHost(paths)
        signals.going_down = host.going_down
        result = switch(host, number, signals, choice)
        return Exit.FAILED if result is None else EXITS[result]

    return _run(paths, act)
