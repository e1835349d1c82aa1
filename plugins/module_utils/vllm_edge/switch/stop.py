# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge stop`: stops all engines the way a switch does, for maintenance of the host.

Under the lock of the switch it runs the hook `before_drain`, waits for running requests, and stops units and target.
The committed generation stays committed: a boot starts it, and `vllm-edge switch <generation>` starts and verifies it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, replace

from ..generation import store
from ..generation.model import Generation, GenerationError
from ..names import TARGET
from ..paths import HostPaths
from .command import INTERRUPTED, refuse_without_write_access
from .host import SwitchedHost
from .journal import Busy, read_journal, take_lock
from .model import Done, Exit, PhaseFailed

TARGET_S = 30.0


@dataclass(frozen=True)
class Stopped:
    """How the command ended. `generation` is the committed one, or None if there is none or it cannot be read."""

    status: Exit
    message: str
    generation: int | None = None
    profile: str = ""
    engines: tuple[str, ...] = ()
    """Engines that ran and were told to stop."""
    warnings: tuple[str, ...] = ()


def _back(generation: Generation) -> str:
    return f"'vllm-edge switch {generation.number}' brings back what is missing and verifies it."


def stop_engines(host: SwitchedHost, *, gap: bool = False) -> Stopped:
    """Stop all engines and the target. The caller holds the lock.

    Nothing is stopped if a switch was left unfinished, if no other host of the fleet serves a name (unless `gap` is
    set), or if the hook `before_drain` fails.
    """
    left = read_journal(host.paths)
    if left is not None and left.result is None:
        return Stopped(
            Exit.REFUSED, "A switch was killed and left unfinished, so nothing was stopped: 'vllm-edge recover' first."
        )
    try:
        committed = store.load_committed(host.paths)
    except GenerationError as error:
        return Stopped(Exit.REFUSED, f"{str(error).rstrip('.')}. Nothing was stopped; site.yml repairs it.")
    if committed is None:
        return Stopped(Exit.OK, "Nothing is committed on this host, so there is no engine to stop.")

    def ended(status: Exit, message: str, engines: tuple[str, ...], *done: Done) -> Stopped:
        warnings = tuple(text for one in done for text in one.warnings)
        return Stopped(status, message, committed.number, committed.profile, engines, warnings)

    done: list[Done] = []
    engines: tuple[str, ...] = ()
    try:
        moves = host.moves(replace(committed, engines={}))
        if moves.stop:
            host.check_peers(committed, committed, moves, gap=gap)
            done.append(host.hook("before_drain", committed, committed))
            try:
                done.append(replace(host.away(committed, committed, moves, gap=gap), detail=""))
                done.append(host.drain(moves, committed.limits))
                engines = moves.stop
                done.append(host.stop(moves))
            finally:
                # The gateway finds out by itself when an engine answers: systemctl may start it as well as a switch.
                with contextlib.suppress(PhaseFailed):
                    host.back(committed)
    except PhaseFailed as failure:
        if not engines:
            return ended(Exit.REFUSED, failure.text, (), *done)
        return ended(Exit.FAILED, f"{failure.text.rstrip('.')}. {_back(committed)}", engines, *done)
    # Stop the target last: stopping it stops its engines too, without waiting for their requests.
    said = host.systemd.stop([TARGET], TARGET_S)
    if said:
        return ended(Exit.FAILED, f"{TARGET} did not stop: {said}. {_back(committed)}", engines, *done)
    what = "; ".join(one.detail for one in done if one.detail) or "no engine ran"
    words = f"{what}. The next boot starts generation {committed.number} ({committed.profile}); {_back(committed)}"
    return ended(Exit.OK, words, engines, *done)


def _print_end(stopped: Stopped, output: str) -> int:
    if output == "json":
        print(json.dumps(asdict(stopped) | {"status": stopped.status.name.lower()}, indent=2, ensure_ascii=False))
    else:
        for text in stopped.warnings:
            print(f"warning: {text}", file=sys.stderr)
        print(stopped.message, file=sys.stdout if stopped.status is Exit.OK else sys.stderr)
    return stopped.status


def run_stop(paths: HostPaths, *, output: str, gap: bool = False) -> int:
    refused = refuse_without_write_access(paths, "stop")
    if refused:
        return refused
    try:
        with take_lock(paths):
            stopped = stop_engines(SwitchedHost(paths), gap=gap)
    except Busy as busy:
        stopped = Stopped(Exit.BUSY, f"{busy} Nothing was stopped.")
    except KeyboardInterrupt:
        print("Cut off: engines may be stopped in part, 'vllm-edge status' says which.", file=sys.stderr)
        return INTERRUPTED
    return _print_end(stopped, output)
