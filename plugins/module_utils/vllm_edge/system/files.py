# SPDX-License-Identifier: Apache-2.0
"""Files that are never seen half written, also after a power cut."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def fresh_name(path: Path) -> Path:
    """Where a file is written before it takes its name."""
    return path.with_name(f".{path.name}.new")


def sync(path: Path) -> None:
    """A file's content, or the names in a directory, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether somebody holds the exclusive flock(2) of a file; False where there is none. Raises OSError.

    Asks for a shared lock, so that two who ask do not disturb each other.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def write_durably(path: Path, text: str, mode: int = 0o644) -> None:
    """All or nothing: a reader sees the old or the new file, a power cut leaves one of them. Raises OSError.

    For one writer at a time: what a killed one left behind is written over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = fresh_name(path)
    try:
        fresh.unlink(missing_ok=True)
        # For its owner alone until it has its mode: the text may not be for everybody.
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    sync(path.parent)
