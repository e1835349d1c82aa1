# SPDX-License-Identifier: Apache-2.0
"""Commands that take minutes (benchmark, quality suite, reference answer): one at a time, followed, and bounded.

A play that is cut off (Ctrl-C, a lost connection, a killed Ansible) leaves its command running on the host. Each poll
for progress therefore touches a file, and a command that was started with `--attended` ends when nobody has polled for
a while.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import ParamSpec

from .files import LockHeld, hold_lock, make_directories, write_durably

AFTER_S = 90.0
"""Seconds without a poll. The action plugin `follow` polls every 10 s and may need a minute to connect again."""

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


P = ParamSpec("P")


def count_boot_seconds() -> float:
    """Return the seconds since the boot, with those of a suspension: no step of the wall clock changes them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class CommandRefused(Exception):
    """A command does nothing. The text says why and what to do."""


def refusing(run: Callable[P, int]) -> Callable[P, int]:
    """Print why a command was refused, and return 2 as its exit status."""

    @functools.wraps(run)
    def run_or_say(*args: P.args, **given: P.kwargs) -> int:
        try:
            return run(*args, **given)
        except CommandRefused as refused:
            print(refused, file=sys.stderr)
            return 2

    return run_or_say


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise KeyboardInterrupt in the body of the `with` statement, as Ctrl-C does.

    Only the first signal does: a second one, such as that of `timeout` to the whole process group, would end the
    removal of the container.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in INTERRUPTS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    former = {number: signal.signal(number, interrupt) for number in INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@dataclass
class LongRun:
    """A command holds `alone()` while it works, tells its progress by `say`, and ends when `find_trouble` says why."""

    directory: Path
    """Where its lock and its line of progress are: HostPaths.run."""
    name: str
    attended: bool = False
    """Whether it ends when nobody follows it."""
    echo: bool = False
    """Whether its progress is printed, too."""
    find_switch: Callable[[], str] = lambda: ""
    """Returns that a switch began, which needs the engines and GPUs; empty if none did (switch.journal.find_switch)."""
    _began: float = field(default_factory=count_boot_seconds)
    _saying: threading.Lock = field(default_factory=threading.Lock)

    def _path(self, suffix: str) -> Path:
        return self.directory / f"{self.name}.{suffix}"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of the command, and remove its line of progress in the end; a signal raises KeyboardInterrupt.

        Raises CommandRefused, OSError.
        """
        try:
            with interruptible(), hold_lock(self._path("lock")):
                try:
                    yield
                finally:
                    self._path("progress").unlink(missing_ok=True)
        except LockHeld as error:
            command = f"vllm-edge {'quality reference' if self.name == 'reference' else self.name}"
            raise CommandRefused(
                f"`{command}` runs on this host already; `{command} --progress` follows it."
            ) from error

    def say(self, line: str) -> None:
        """Replace the line of progress; several threads may do so. Raises OSError."""
        with self._saying:
            write_durably(self._path("progress"), f"{line}\n", 0o600)
        if self.echo:
            print(line, file=sys.stderr, flush=True)

    def follow(self) -> int:
        """Print the line of progress, note that somebody asked, and return the exit status."""
        make_directories(self.directory)
        write_durably(self._path("asked"), f"{count_boot_seconds()}\n", 0o600)
        with contextlib.suppress(FileNotFoundError):  # it has not begun, or has ended
            print(self._path("progress").read_text(encoding="utf-8"), end="")
        return 0

    def is_lost(self) -> bool:
        """Return whether it has to end: nobody has asked for AFTER_S seconds, nor was it begun since."""
        if not self.attended:
            return False
        try:
            asked = float(self._path("asked").read_text(encoding="ascii"))
        except (OSError, ValueError):
            asked = 0.0
        return count_boot_seconds() - max(asked, self._began) > AFTER_S

    def find_trouble(self) -> str:
        """Return why the command has to end, in words after `because`; empty if it may go on."""
        return "nobody follows it any more" if self.is_lost() else self.find_switch()
