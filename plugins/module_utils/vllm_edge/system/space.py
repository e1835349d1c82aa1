# SPDX-License-Identifier: Apache-2.0
"""Free space of file systems: what is left, and why something could not be written."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

STATE_BYTES = 64 * 1024**2
"""Our choice of what a switch wants to be free for its journal and files."""
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass(frozen=True)
class Space:
    what: str
    path: str
    free_bytes: int
    free_inodes: int | None
    """None on a file system that makes inodes as it needs them."""
    read_only: bool = False


def measure(what: str, path: Path) -> Space:
    """Return the space of the file system that a path is on, or will be on once it exists. Raises OSError."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    inodes = found.f_favail if found.f_files else None
    return Space(what, str(path), found.f_bavail * found.f_frsize, inodes, bool(found.f_flag & os.ST_RDONLY))


def find_mount(path: Path) -> Path:
    """Return the mount point of the file system that a path is on, or will be on once it exists."""
    place = path
    while place != place.parent and not (place.exists() and os.path.ismount(place)):
        place = place.parent
    return place


def find_shortage(space: Space, least_bytes: int) -> str:
    """Return why nothing more can be written there; empty if at least so many bytes, and inodes, are free."""
    if space.read_only:
        return f"{space.path} is on a file system that is mounted read-only"
    if space.free_inodes == 0:
        return f"{space.path} has no inode free"
    return f"{space.path} has {space.free_bytes // 1024**2} MiB free" if space.free_bytes < least_bytes else ""


def explain_unwritable(error: OSError, fallback: Path) -> str:
    """Return which file system is full, over its quota or read-only, with a remedy; empty for another error.

    `fallback` is a path on it where the error names none. A copy names what it reads first, and what it writes second.
    """
    if error.errno not in UNWRITABLE:
        return ""
    place = Path(os.fsdecode(error.filename2 or error.filename or fallback))
    place = place if place.is_absolute() else fallback / place
    mount = find_mount(place)
    what = f"{place} could not be written ({os.strerror(error.errno)})"
    if error.errno == errno.EROFS:
        return (
            f"{what}: the file system {mount} is mounted read-only. 'findmnt {mount}' shows its options, and "
            "'journalctl --dmesg' whether its disk fails. Repair it and run again."
        )
    space = measure("", place)
    left = f"{space.free_bytes // 1024**2} MiB" + (f" and {space.free_inodes} inodes" if space.free_inodes else "")
    left = "no inode" if space.free_inodes == 0 else left
    return (
        f"{what}: the file system {mount} is full, or a quota holds there ({left} free now). 'du -xh --max-depth=2 "
        f"{mount} | sort -h | tail' shows where it went. Make room there, and run again."
    )
