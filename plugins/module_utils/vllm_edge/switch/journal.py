# SPDX-License-Identifier: Apache-2.0
"""The journal of a switch, `switch.json`, its copies in `history/`, and the lock that only one switch holds.

A phase is written here before it acts: write, fsync, rename, fsync of the directory. A reader sees the old or the new
journal, a power cut leaves one of them. What cannot be read counts as a switch that never ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ..paths import HostPaths
from ..system.files import is_locked, write_durably
from .model import Direction, Downtime, Gap, Journal, Phase, PhaseRecord, Result

BALLAST_BYTES = 1024 * 1024
HISTORY_KEPT = 200
DAMAGED = "damaged"
"""Id of what `read_journal` gives for a journal that cannot be read."""
LOCK_PATIENCE_S = 0.5
"""`holder` takes the lock, shared, for a moment: that must not look like a switch to one that begins just then."""


class JournalLost(Exception):
    """The journal cannot be written; the text says where and why."""


class JournalDamaged(ValueError):
    """A file is no journal; the text says why."""


# ---- as JSON ----------------------------------------------------------------------------------------------------


def to_json(journal: Journal) -> dict[str, Any]:
    """What the file says; enums as their values."""
    return asdict(journal)


def _known(kind: type[Any], data: object, what: str) -> dict[str, Any]:
    """Values of a dataclass; keys of a newer program are dropped, missing ones have defaults or are an error."""
    if not isinstance(data, Mapping):
        raise JournalDamaged(f"{what} is {type(data).__name__}, an object is expected")
    missing = [
        item.name
        for item in fields(kind)
        if item.name not in data and item.default is MISSING and item.default_factory is MISSING
    ]
    if missing:
        raise JournalDamaged(f"{what} has no {', '.join(missing)}")
    return {item.name: data[item.name] for item in fields(kind) if item.name in data}


def _downtime(data: object, role: str) -> Downtime:
    values = _known(Downtime, data, f"downtime of {role}")
    values["gaps"] = tuple(Gap(**_known(Gap, gap, f"a gap of {role}")) for gap in values.get("gaps", ()))
    return Downtime(**values)


def _record(data: object) -> PhaseRecord:
    values = _known(PhaseRecord, data, "a phase")
    values["phase"] = Phase(values["phase"])
    return PhaseRecord(**values)


def from_json(data: Mapping[str, Any]) -> Journal:
    """A journal of this or another version of the program; JournalDamaged where it is none."""
    values = _known(Journal, data, "the journal")
    try:
        for key, kind in (("phase", Phase), ("result", Result)):
            if values.get(key) is not None:
                values[key] = kind(values[key])
        for key in ("keep", "stop", "start", "warnings", "canary", "gpus", "drift"):
            values[key] = tuple(values.get(key, ()))
        values["phases"] = tuple(_record(item) for item in values.get("phases", ()))
        values["downtime"] = {role: _downtime(item, role) for role, item in values.get("downtime", {}).items()}
        for key, kinds in (("id", str), ("generation", int), ("from_generation", int | None)):
            if not isinstance(values[key], kinds):
                raise JournalDamaged(f"{key} is {values[key]!r}")
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise error if isinstance(error, JournalDamaged) else JournalDamaged(str(error)) from error
    return Journal(**values)


def _parse(text: str) -> Journal:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise JournalDamaged(f"not JSON: {error}") from error
    return from_json(data)


def _unknown(journal_id: str, message: str, asked_by: str = "somebody") -> Journal:
    """Stands for a switch of which nothing can be read."""
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
    """The running or last switch. One that cannot be read is a journal with the id DAMAGED, without a result."""
    path = paths.switch_journal
    try:
        return _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return _unknown(DAMAGED, f"{path} cannot be read: {error}")


def history(paths: HostPaths, limit: int | None = None) -> list[Journal]:
    """Former switches, newest first; files that are no journals are left out."""
    found: list[Journal] = []
    for path in sorted(_journals(paths), key=lambda path: path.stem, reverse=True):
        if limit is not None and len(found) >= limit:
            break
        try:
            found.append(_parse(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            continue
    return found


def _journals(paths: HostPaths) -> Iterable[Path]:
    return paths.history.glob("*.json")


# ---- writing ----------------------------------------------------------------------------------------------------


class JournalFile:
    """The journal of the switch that runs; whoever has one holds the lock."""

    def __init__(self, paths: HostPaths, journal: Journal) -> None:
        self.paths = paths
        self.journal = journal
        self.ballast = paths.state / ".switch.ballast"

    def take_ballast(self) -> None:
        """Room on the disk that can be given up, so that the way back can be journalled on a full one."""
        try:
            self.paths.state.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.ballast, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(handle, 0, BALLAST_BYTES)
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            self.give_up_ballast()
            raise JournalLost(
                f"{BALLAST_BYTES // 1024} KiB for the journal of the switch cannot be had in {self.paths.state}: "
                f"{error.strerror}. Make room on that disk; 'df -h {self.paths.state}' shows it"
            ) from error

    def give_up_ballast(self) -> bool:
        """Whether there was any."""
        try:
            self.ballast.unlink()
        except OSError:
            return False
        return True

    def write(self, **changes: Any) -> None:
        """With these fields changed, and durable; JournalLost where that fails, the fields are changed all the same."""
        self.journal = replace(self.journal, **changes)
        self._write(self.paths.switch_journal)

    def enter(self, phase: Phase, direction: Direction, began_at: str, began_s: float) -> None:
        """A phase that is about to act. What ended the one before it is written with it."""
        record = PhaseRecord(phase, direction, began_at, began_s)
        self.write(phase=phase, direction=direction, phases=(*self.journal.phases, record))

    def leave(self, outcome: Literal["done", "failed"], seconds: float, detail: str = "") -> None:
        """The phase has ended; on disk with the next `enter`, `write` or `finish`."""
        *former, last = self.journal.phases
        ended = replace(last, outcome=outcome, seconds=seconds, detail=detail)
        self.journal = replace(self.journal, phases=(*former, ended))

    def finish(self, **changes: Any) -> None:
        """The last words, here and in the history."""
        try:
            self.write(**changes)
            self.archive()
        finally:
            self.give_up_ballast()

    def archive(self) -> None:
        """A copy in the history, and the oldest ones pruned."""
        kept = self.paths.history / f"{self.journal.id}.json"
        self._write(kept)
        # By name, hence by the wall clock; whatever that says, this switch is not the oldest.
        others = sorted(path for path in _journals(self.paths) if path != kept)
        for path in others[: max(0, len(others) + 1 - HISTORY_KEPT)]:
            with contextlib.suppress(OSError):  # one too many harms nobody
                path.unlink()

    def _write(self, path: Path) -> None:
        # What JSON does not know stands there as its text: a row of a phase must not end a switch.
        text = json.dumps(to_json(self.journal), indent=2, ensure_ascii=False, default=str) + "\n"
        try:
            try:
                write_durably(path, text)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self.give_up_ballast():
                    raise
                write_durably(path, text)
        except OSError as error:
            raise JournalLost(
                f"{path} cannot be written: {error.strerror}. 'df -h {path.parent}' shows how full that disk is"
            ) from error


def new_id(paths: HostPaths, stamp: str, generation: int) -> str:
    """`20261121T164000Z-4`; with a number behind it where a clock that went back gave the same one before."""
    plain = f"{stamp.translate(str.maketrans('', '', '-:'))}-{generation}"
    taken = {path.stem for path in _journals(paths)}
    taken.add(getattr(read_journal(paths), "id", ""))
    candidates = (plain if count == 1 else f"{plain}-{count}" for count in range(1, len(taken) + 2))
    return next(name for name in candidates if name not in taken)


def set_aside_damaged(paths: HostPaths, stamp: str) -> Path | None:
    """Keep a journal that cannot be read for people, under `history/`. None where even that is impossible."""
    name = f"switch.json.{DAMAGED}-{stamp.translate(str.maketrans('', '', '-:'))}"
    try:
        paths.history.mkdir(parents=True, exist_ok=True)
        taken = {path.name for path in paths.history.iterdir()}
        candidates = (name if count == 1 else f"{name}-{count}" for count in range(1, len(taken) + 2))
        kept = paths.history / next(candidate for candidate in candidates if candidate not in taken)
        os.rename(paths.switch_journal, kept)
    except OSError:
        return None
    return kept


# ---- the lock ---------------------------------------------------------------------------------------------------


LOCK_MODE = 0o600
"""flock(2) needs no right to write: whoever may open the file could hold the lock and keep everybody from switching."""


class Busy(Exception):
    """Another process holds the lock; `journal` is what it does."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        back = ", going back" if journal.direction == "back" else ""
        where = (
            f"to generation {journal.generation} ({journal.profile}), asked by {journal.asked_by}, "
            f"phase {journal.phase or 'none yet'}{back}, process {journal.pid}"
            if journal.pid
            else "which has not said yet what it does"
        )
        super().__init__(f"Another switch runs, {where}. Nothing was done; run again when it has ended.")

    @property
    def name(self) -> str:
        return self.journal.asked_by

    @property
    def phase(self) -> Phase | None:
        return self.journal.phase

    @property
    def generation(self) -> int:
        return self.journal.generation


class Lock:
    """Held from `with` to its end. The kernel gives it back when the process dies, and no child inherits it."""

    def __init__(self, paths: HostPaths) -> None:
        self.paths = paths
        self._handle: int | None = None

    def __enter__(self) -> Lock:
        self.paths.state.mkdir(parents=True, exist_ok=True)
        # Python opens files close-on-exec: a hook or a docker client that outlives the switch does not hold it.
        handle = os.open(self.paths.switch_lock, os.O_RDWR | os.O_CREAT, LOCK_MODE)
        os.fchmod(handle, LOCK_MODE)  # of a former release, or by another umask
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                os.close(handle)
                raise Busy(_running(self.paths)) from None
            except BaseException:
                os.close(handle)
                raise
            self._handle = handle
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def holder(paths: HostPaths) -> Journal | None:
    """The switch that runs, None when the lock is free. Users who may not open the lock go by the journal."""
    try:
        return _running(paths) if is_locked(paths.switch_lock) else None
    except PermissionError:
        journal = _read_unfinished(paths)
        return journal if journal is not None and Path(f"/proc/{journal.pid}").exists() else None


def _read_unfinished(paths: HostPaths) -> Journal | None:
    """The journal of a switch that has not ended, as far as it can be read."""
    journal = read_journal(paths)
    return journal if journal is not None and journal.result is None and journal.id != DAMAGED else None


def _running(paths: HostPaths) -> Journal:
    """The journal of whoever holds the lock. One that has just begun has not written it yet: wait a little."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        journal = _read_unfinished(paths)
        if journal is not None:
            return journal
        if time.monotonic() >= deadline:
            return _unknown("", "It has not written its journal yet.", asked_by="another vllm-edge")
        time.sleep(0.02)
