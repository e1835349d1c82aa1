# SPDX-License-Identifier: Apache-2.0
"""What the processes of a container read and compute, as the kernel counts it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Positions of the fields of proc(5) in /proc/<pid>/stat after the name, which may contain blanks and parentheses.
_PPID, _FAULTS, _CPU = 1, slice(9, 11), slice(11, 15)
_READ = {
    "": ("io.stat", re.compile(r"\brbytes=(\d+)")),
    "blkio": ("blkio.throttle.io_service_bytes_recursive", re.compile(r"^\S+ Read (\d+)$", re.MULTILINE)),
}
"""By controller in /proc/<pid>/cgroup (cgroup v2 has none): the file that counts bytes read from disks."""


@dataclass(frozen=True)
class Usage:
    """Sums since the processes began."""

    read_bytes: int
    """Bytes read from disks. A network file system is not counted here."""
    faults: int
    """Major page faults, by which pages of a mapped file are read, from every file system."""
    cpu_s: float
    """Seconds of CPU time, ended children included."""


def read_usage(pid: int, root: Path = Path("/")) -> Usage | None:
    """Return what a container's processes have used; None if it cannot be read.

    `pid` is the main process of the container, an ancestor of all others. /proc/<pid>/io would need CAP_SYS_PTRACE; the
    numbers here need no capability.
    """
    parents: dict[int, int] = {}
    used: dict[int, tuple[int, int]] = {}
    try:
        for entry in (root / "proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                number = int(entry.name)
                parents[number] = int(fields[_PPID])
                used[number] = sum(map(int, fields[_FAULTS])), sum(map(int, fields[_CPU]))
            except (OSError, ValueError, IndexError):
                continue  # the process has ended
    except OSError:
        return None
    if pid not in used:
        return None
    family = {pid}
    while found := {child for child, parent in parents.items() if parent in family} - family:
        family |= found
    faults, ticks = (sum(used[number][at] for number in family) for at in (0, 1))
    return Usage(_count_bytes_read(pid, root), faults, ticks / _TICKS_PER_S)


def _count_bytes_read(pid: int, root: Path) -> int:
    try:
        lines = (root / "proc" / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    total = 0
    for line in lines:
        _, controller, path = line.split(":", 2)
        if controller not in _READ:
            continue
        name, pattern = _READ[controller]
        try:
            text = (root / "sys/fs/cgroup" / controller / path.lstrip("/") / name).read_text(encoding="ascii")
        except OSError:
            continue
        total += sum(map(int, pattern.findall(text)))
    return total
