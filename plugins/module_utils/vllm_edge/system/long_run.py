# SPDX-License-Identifier: Apache-2.0
"""Commands that take minutes (benchmark, quality suite, reference answer): one at a time, followed, and bounded.

A play that is cut off (Ctrl-C, a lost connection, a killed Ansible) leaves its command running on the host. Each poll
for progress therefore marks a file, and a command that was started with `--attended` ends when nobody has polled for
a while. Whoever is about to stop engines, a switch or `vllm-edge stop`, says so by `begin_moving`.

Such a command does its work, and writes its record, in `with long_run.alone():`, which turns what cuts it off into a
CommandRefused. Meanwhile it asks `find_trouble` every second or so, and ends when that has an answer; it asks once more
before it writes its record.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import ParamSpec

from .files import LockHeld, hold_lock, is_locked, make_directories, write_durably
from .space import list_shortages

AFTER_S = 90.0
"""Seconds without a poll. The action plugin `follow` polls every 10 s and may need a minute to connect again."""

COMMANDS = {"bench": "vllm-edge bench", "quality": "vllm-edge quality", "reference": "vllm-edge quality reference"}
"""By name of a LongRun."""
MOVING = "moving.lock"
"""A file beside their locks. It is locked while engines may stop and start, and changed each time that this begins."""
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


P = ParamSpec("P")


def count_boot_seconds() -> float:
    """Return the seconds since the boot, with those of a suspension: no step of the wall clock changes them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def list_running(directory: Path) -> list[str]:
    """Return the names of the long commands that run now; `directory` is HostPaths.run. Raises OSError."""
    return [name for name in COMMANDS if is_locked(directory / f"{name}.lock")]


@contextlib.contextmanager
def begin_moving(directory: Path) -> Iterator[None]:
    """Tell long commands and checks, until the end of the `with` statement, that engines may stop and start.

    `directory` is HostPaths.run. Raises LockHeld: another process does; OSError.
    """
    with hold_lock(directory / MOVING):
        os.utime(directory / MOVING)
        yield


def watch_moves(directory: Path) -> Callable[[], str]:
    """Return a function that says in words after `because` whether engines are moved, or were since now; else nothing.

    `directory` is HostPaths.run. Somebody who may not look is told nothing.
    """

    def read() -> int:
        try:
            return (directory / MOVING).stat().st_mtime_ns
        except OSError:
            return 0  # nobody has moved engines since the boot

    def find() -> str:
        with contextlib.suppress(PermissionError):
            if is_locked(directory / MOVING) or read() != before:
                return "a switch began, or a stop of the engines (`vllm-edge progress` follows a switch)"
        return ""

    before = read()
    return find


class CommandRefused(Exception):
    """A command does nothing. The text says why and what to do."""


def list_records(directory: Path, pattern: str) -> list[Path]:
    """Return the records of long commands, sorted. Raises CommandRefused: this user may not see whether there are."""
    if directory.is_dir() and not os.access(directory, os.R_OK | os.X_OK):
        raise CommandRefused(f"{directory} is for root, so its records cannot be listed. Run the command with sudo.")
    return sorted(directory.glob(pattern))


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
    places: Mapping[str, Path] = field(default_factory=dict)
    """The directories that it writes to, by their names in `system/space.py`; without them no room is looked for."""
    _began: float = field(default_factory=count_boot_seconds)
    _saying: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._find_moves = watch_moves(self.directory)

    def _path(self, suffix: str) -> Path:
        return self.directory / f"{self.name}.{suffix}"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the lock of the command, and remove its line of progress in the end.

        A signal raises KeyboardInterrupt in the body. Raises CommandRefused: the command or a switch runs already, or
        the body was interrupted or could not write.
        """
        command = COMMANDS.get(self.name, self.name)
        try:
            with interruptible(), hold_lock(self._path("lock")):
                if why := self._find_moves():
                    raise CommandRefused(f"`{command}` does not run, because {why}. Run it when that has ended.")
                if self.places and (wrong := list_shortages("run", self.places)):
                    told = "; ".join(wrong)
                    raise CommandRefused(f"`{command}` does not run: {told}. Make room there and run it again.")
                try:
                    yield
                finally:
                    self._path("progress").unlink(missing_ok=True)
        except LockHeld as error:
            raise CommandRefused(
                f"`{command}` runs on this host already; `{command} --progress` follows it."
            ) from error
        except KeyboardInterrupt as asked:
            by = f" by {asked}" if str(asked) else ""
            raise CommandRefused(f"`{command}` was interrupted{by}. Nothing was recorded.") from asked
        except OSError as error:
            raise CommandRefused(f"`{command}` ended, because a file could not be used: {error}.") from error

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
        return "nobody follows it any more" if self.is_lost() else self._find_moves()
