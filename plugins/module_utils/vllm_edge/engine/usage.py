# SPDX-License-Identifier: Apache-2.0
"""What the processes of a container read and compute, as the kernel counts it in the container's control group.

Not /proc: `hidepid` with a group hides the container's processes from the supervisor, which has no CAP_SYS_PTRACE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COUNTERS = {
    2: (
        ("", "io.stat", r"\brbytes=(\d+)", 1),
        ("", "memory.stat", r"^pgmajfault (\d+)", 1),
        ("", "cpu.stat", r"^usage_usec (\d+)", 1e-6),
    ),
    1: (
        ("blkio", "blkio.throttle.io_service_bytes_recursive", r"^\S+ Read (\d+)$", 1),
        ("memory", "memory.stat", r"^total_pgmajfault (\d+)", 1),
        ("cpuacct", "cpuacct.usage", r"^(\d+)", 1e-9),
    ),
}
"""By version of cgroups, for each field of `Usage`: controller, file, pattern of its numbers, and their unit."""


@dataclass(frozen=True)
class Usage:
    """Sums since the container began, ended processes included."""

    read_bytes: int
    """Bytes read from disks. A network file system is not counted here."""
    faults: int
    """Major page faults, by which pages of a mapped file are read, from every file system."""
    cpu_s: float
    """Seconds of CPU time."""


def read_usage(container_id: str, root: Path = Path("/")) -> Usage | None:
    """Return what a container's processes have used; None if it cannot be read, which does not mean nothing."""
    try:
        read_bytes, faults, cpu_s = _read_counters(container_id, root / "sys/fs/cgroup")
    except (OSError, ValueError):
        return None
    return Usage(int(read_bytes), int(faults), cpu_s)


def _read_counters(container_id: str, base: Path) -> Iterator[float]:
    """Yield the sum of each counter. Raises OSError: there is no such control group, or a file of it is missing."""
    for controller, name, pattern, unit in _COUNTERS[2 if (base / "cgroup.controllers").exists() else 1]:
        text = (_find_group(base / controller, container_id) / name).read_text(encoding="ascii")
        yield sum(map(int, re.findall(pattern, text, re.MULTILINE))) * unit


def _find_group(top: Path, container_id: str) -> Path:
    """Return the control group of a container, below which parent ever the operator had Docker put it."""
    for directory, names, _ in os.walk(top):
        for name in names:
            if name in (container_id, f"docker-{container_id}.scope"):
                return Path(directory, name)
    raise FileNotFoundError(f"no control group of {container_id} is below {top}")
