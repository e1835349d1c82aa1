# SPDX-License-Identifier: Apache-2.0
"""The journal of a switch (`switch.json`), its copies in `history/`, and the lock that only one switch can hold.

A phase is written to the journal before it begins: write, fsync, rename, fsync of the directory. A reader sees either
the old or the new journal, and a power cut leaves one of them. A journal that cannot be read counts as a switch that
did not end.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..generation.model import STORED_MODE
from ..paths import HostPaths
from ..system.files import LockHeld, hold_lock, is_locked, make_directories, name_errors, prune, write_durably
from ..system.records import read_record
from .model import Direction, Journal, Phase, PhaseRecord

BALLAST_BYTES = 1024 * 1024
HISTORY_KEPT = 200
DAMAGED = "damaged"
"""The id of the journal that `read_journal` returns if the file cannot be read."""
LOCK_PATIENCE_S = 0.5
"""`holder` takes a shared lock for a moment. A switch that begins at that moment waits this long and does not report
another switch."""


Value = TypeVar("Value")


class JournalLost(Exception):
    """The journal cannot be written. The text says where and why."""


def to_json(journal: Journal) -> dict[str, Any]:
    return asdict(journal)


def _read(path: Path) -> Journal:
    """Read a journal that this or another version of the program wrote. Raises OSError, ValueError if it is none."""
    text = path.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    return read_record(Journal, data)


def _build_unknown(journal_id: str, message: str, asked_by: str = "somebody") -> Journal:
    """Return a stand-in for a switch whose journal cannot be read."""
    return Journal(
        id=journal_id,
        generation=0,
        profile="",
        from_generation=None,
        from_profile=None,
        origin="host",
        asked_by=asked_by,
        pid=0,
        boot_id="",
        started_at="",
        message=message,
    )


def read_journal(paths: HostPaths) -> Journal | None:
    """Return the journal of the running or last switch; with the id DAMAGED and no result if it cannot be read."""
    path = paths.switch_journal
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _build_unknown(DAMAGED, f"{path} cannot be read: {error}")


def explain_unreadable(paths: HostPaths) -> str | None:
    """Return that this user may not read what is known of switches; None otherwise."""
    for path in (paths.switch_journal, paths.history):
        if path.exists() and not os.access(path, os.R_OK):
            return f"{path} is not for this user: switches are shown to root"
    return None


def history(paths: HostPaths, limit: int | None = None) -> list[Journal]:
    """Return former switches, newest first; files that are not journals are skipped."""
    found: list[Journal] = []
    for path in sorted(paths.history.glob("*.json"), key=lambda path: path.stem, reverse=True):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(_read(path))
        except (OSError, ValueError):
            continue
    return found


class JournalFile:
    """The journal of the running switch and its file. Whoever has one must hold the lock."""

    def __init__(self, paths: HostPaths, journal: Journal) -> None:
        self.paths = paths
        self.journal = journal
        self.ballast = paths.state / ".switch.ballast"

    def take_ballast(self) -> None:
        """Reserve BALLAST_BYTES, which are released where a rollback meets a full disk. Raises JournalLost."""
        try:
            make_directories(self.paths.state)
            with name_errors(self.ballast):
                handle = os.open(self.ballast, os.O_WRONLY | os.O_CREAT, 0o600)
                try:
                    os.posix_fallocate(handle, 0, BALLAST_BYTES)
                    os.fsync(handle)
                finally:
                    os.close(handle)
        except OSError as error:
            self.give_up_ballast()
            raise JournalLost(
                f"{BALLAST_BYTES // 1024} KiB for the journal of the switch cannot be reserved in {self.paths.state}: "
                f"{error.strerror}. Make room there"
            ) from error

    def give_up_ballast(self) -> bool:
        try:
            self.ballast.unlink()
        except OSError:
            return False
        return True

    def with_all_room(self, attempt: Callable[[], Value | None]) -> Value | None:
        """Run something that returns its failure or None; if it fails, run it once more without the ballast."""
        failure = attempt()
        return attempt() if failure is not None and self.give_up_ballast() else failure

    def write(self, **changes: Any) -> None:
        """Change fields of the journal in any case, and write it durably. Raises JournalLost."""
        self.journal = replace(self.journal, **changes)
        self._write(self.paths.switch_journal)

    def enter(self, phase: Phase, direction: Direction, began_at: str, began_s: float) -> None:
        """Write that a phase is about to begin, and how the one before it ended. Raises JournalLost.

        `began_at` is wall clock, for people, and `began_s` seconds since the switch began.
        """
        record = PhaseRecord(phase, direction, began_at, began_s)
        self.write(phase=phase, direction=direction, phases=(*self.journal.phases, record))

    def leave(self, outcome: Literal["done", "failed"], seconds: float, detail: str = "") -> None:
        """Record how the phase has ended. It reaches the disk with the next `enter`, `write` or `finish`."""
        *former, last = self.journal.phases
        ended = replace(last, outcome=outcome, seconds=seconds, detail=detail)
        self.journal = replace(self.journal, phases=(*former, ended))

    def finish(self, **changes: Any) -> None:
        """Write the last changes to journal and history, and release the ballast. Raises JournalLost."""
        try:
            self.write(**changes)
            self.archive()
        finally:
            self.give_up_ballast()

    def archive(self) -> None:
        """Copy the journal to the history, and remove the oldest copies beyond HISTORY_KEPT."""
        kept = self.paths.history / f"{self.journal.id}.json"
        self._write(kept)
        # Names sort by wall clock; whatever that says, this switch is not the oldest.
        prune(sorted(self.paths.history.glob("*.json")), HISTORY_KEPT, kept)

    def _write(self, path: Path) -> None:
        # Values that JSON does not know are written as text: the data of a phase must not end a switch.
        text = json.dumps(to_json(self.journal), indent=2, ensure_ascii=False, default=str) + "\n"
        try:
            try:
                write_durably(path, text, STORED_MODE)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.give_up_ballast():
                    raise
                write_durably(path, text, STORED_MODE)
        except OSError as error:
            raise JournalLost(f"{path} cannot be written: {error.strerror}. Make room there") from error


def _choose_free(name: str, taken: Collection[str]) -> str:
    candidates = (name if count == 1 else f"{name}-{count}" for count in range(1, len(taken) + 2))
    return next(candidate for candidate in candidates if candidate not in taken)


def _strip_stamp(stamp: str) -> str:
    return stamp.translate(str.maketrans("", "", "-:"))


def make_id(paths: HostPaths, stamp: str, generation: int) -> str:
    """Return an id such as `20261121T164000Z-4`, with one more number if the clock went back and it is taken."""
    taken = {path.stem for path in paths.history.glob("*.json")} | {getattr(read_journal(paths), "id", "")}
    return _choose_free(f"{_strip_stamp(stamp)}-{generation}", taken)


def set_aside_damaged(paths: HostPaths, stamp: str) -> Path | None:
    """Move a journal that cannot be read to `history/`; return its new path, or None if that is not possible."""
    try:
        make_directories(paths.history)
        taken = {path.name for path in paths.history.iterdir()}
        kept = paths.history / _choose_free(f"switch.json.{DAMAGED}-{_strip_stamp(stamp)}", taken)
        os.rename(paths.switch_journal, kept)
    except OSError:
        return None
    return kept


class Busy(Exception):
    """Another process holds the lock; `journal` is what it does."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        back = ", going back" if journal.direction == "back" else ""
        where = (
            f"to generation {journal.generation} ({journal.profile}), asked by {journal.asked_by}, "
            f"phase {journal.phase or 'none yet'}{back}, process {journal.pid}"
            if journal.pid
            else "which has not written its journal yet"
        )
        super().__init__(f"Another switch runs, {where}. Nothing was done; run again when it has ended.")


@contextlib.contextmanager
def take_lock(paths: HostPaths) -> Iterator[None]:
    """Hold the lock of the switch during a `with` statement. Raises Busy if another process holds it."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(hold_lock(paths.switch_lock, LOCK_PATIENCE_S))
        except LockHeld:
            raise Busy(_read_running(paths)) from None
        yield


def holder(paths: HostPaths) -> Journal | None:
    """Return the journal of the running switch; None if the lock is free, or this user may not open it."""
    try:
        return _read_running(paths) if is_locked(paths.switch_lock) else None
    except PermissionError:
        return None


def _read_running(paths: HostPaths) -> Journal:
    """Return the journal of the process that holds the lock, waiting a little if that has not written it yet."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        journal = read_journal(paths)
        if journal is not None and journal.result is None and journal.id != DAMAGED:
            return journal
        if time.monotonic() >= deadline:
            return _build_unknown("", "It has not written its journal yet.", asked_by="another vllm-edge")
        time.sleep(0.02)
