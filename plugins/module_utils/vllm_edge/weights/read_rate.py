# SPDX-License-Identifier: Apache-2.0
"""The read rate of the disk that holds weights, measured once for each directory and device of the host.

A weights file is read with O_DIRECT, past the page cache: nothing is evicted from it, and what it holds does not count.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..system.files import read_foreign, write_durably
from ..system.records import RecordError, parse_json, read_record

MOST_BYTES = 1024**3
LIMIT_S = 2.0
LEAST_BYTES = 64 * 1024**2
"""Less says nothing: the first reads of a disk or of a hypervisor's cache are not typical."""
CHUNK_BYTES = 8 * 1024**2
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
MOST_RECORD_BYTES = 256 * 1024


@dataclass(frozen=True)
class ReadRate:
    """What a sequential reader gets from the disk of a directory."""

    directory: str
    device: str
    """`major:minor` of the file system."""
    bytes_per_s: float | None
    """None if it cannot be measured."""
    reason: str
    """Why not; empty if it was measured."""
    read_bytes: int
    at: str
    """When, as `engine.state.stamp` formats it."""


def find_file_system(device: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2] == device), "")


def measure(path: Path, clock: Callable[[], float] = time.monotonic) -> tuple[float | None, str, int]:
    """Read up to MOST_BYTES of a file, for at most LIMIT_S seconds.

    Returns bytes per second or None, why it could not be measured, and the bytes read. Nothing is raised.
    """
    done, began = 0, clock()
    try:
        status = path.stat()
        device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        if (kind := find_file_system(device)) in IN_MEMORY:
            return None, f"{path} is on {kind}, which is in memory", 0
        if status.st_size < LEAST_BYTES:
            return None, f"{path} has less than {LEAST_BYTES // 1024**2} MiB", 0
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, CHUNK_BYTES) as buffer:  # O_DIRECT wants memory that begins at a page
                while done < MOST_BYTES and clock() - began < LIMIT_S:
                    read = os.preadv(handle, [buffer], done)
                    done += read
                    if read < CHUNK_BYTES:
                        break
        finally:
            os.close(handle)
    except OSError as error:
        return None, f"{path} cannot be read past the page cache: {error.strerror}", done
    seconds = clock() - began
    if done < LEAST_BYTES or seconds <= 0:
        return None, f"only {done / 1024**2:.0f} MiB of {path} were read in {seconds:.1f} s", done
    return done / seconds, "", done


def read_rates(record: Path) -> list[ReadRate]:
    """Return the recorded rates; none if there are none. Raises PermissionError: this user may not read them."""
    try:
        return [read_record(ReadRate, row) for row in parse_json(read_foreign(record, MOST_RECORD_BYTES))["rates"]]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecordError):
        return []


def _find_place(weights: Path) -> tuple[str, str]:
    """Return the directory that holds a model's directory, and the device of the latter. Raises OSError."""
    device = weights.stat().st_dev
    return str(weights.parent), f"{os.major(device)}:{os.minor(device)}"


def find_rate(record: Path, weights: Path) -> ReadRate | None:
    try:
        place = _find_place(weights)
    except OSError:
        return None
    return next((rate for rate in read_rates(record) if (rate.directory, rate.device) == place), None)


def ensure_measured(record: Path, weights: Path, files: Sequence[tuple[Path, int]], at: str) -> ReadRate | None:
    """Measure the disk of a model's directory, unless it was measured before, and record the result.

    Returns the new rate, or None if there is nothing new; one that could not be measured is tried again next time.
    Raises OSError: the record cannot be written, or the directory cannot be read.
    """
    known = find_rate(record, weights)
    if not files or (known is not None and known.bytes_per_s is not None):
        return None
    directory, device = _find_place(weights)
    bytes_per_s, reason, read_bytes = measure(max(files, key=lambda file: file[1])[0])
    if known is not None and (known.bytes_per_s, known.reason) == (bytes_per_s, reason):
        return None
    rate = ReadRate(directory, device, bytes_per_s, reason, read_bytes, at)
    others = [each for each in read_rates(record) if (each.directory, each.device) != (directory, device)]
    write_durably(record, json.dumps({"rates": [asdict(each) for each in [*others, rate]]}, indent=1) + "\n", 0o640)
    return rate
