# SPDX-License-Identifier: Apache-2.0
"""Progress of a transfer: one line in a file, for Ansible and for operators."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..system.files import make_directories


def mib(size_bytes: int) -> str:
    """Return a size in MiB for a message, such as `1,024.0 MiB`."""
    return f"{size_bytes / 1024**2:,.1f} MiB"


class Progress:
    """Writes one line to a file every `interval_s` seconds during the work, since a module cannot stream its output."""

    def __init__(self, path: Path | None, model: str, interval_s: float = 2.0) -> None:
        self._path = path
        self._model = model
        self._interval_s = interval_s
        self._started = time.monotonic()

    def _write(self, what: str, have_bytes: int, total_bytes: int) -> None:
        """Replace the line, such as `e2b: 3 of 9 files, 41 %, 1.2 of 10.2 GiB, 35 s`. Errors stop no download."""
        if self._path is None:
            return
        share = 100 * have_bytes // total_bytes if total_bytes else 100
        unit, name = (1024**3, "GiB") if total_bytes >= 1024**3 else (1024**2, "MiB")
        size = f"{have_bytes / unit:.1f} of {total_bytes / unit:.1f} {name}"
        line = f"{self._model}: {what}, {share} %, {size}, {time.monotonic() - self._started:.0f} s"
        with contextlib.suppress(OSError):
            make_directories(self._path.parent)
            temporary = self._path.with_name(f".{self._path.name}.new")
            temporary.write_text(line + "\n", encoding="utf-8")
            temporary.chmod(0o644)
            temporary.replace(self._path)

    def count(self, total_bytes: int, describe: Callable[[], str] = lambda: "verifying") -> Callable[[int], None]:
        """Return a callback that counts bytes, also of several threads. It writes the line in time, and for 0 bytes."""
        lock = threading.Lock()
        have_bytes, written_s = 0, time.monotonic()

        def count(size_bytes: int) -> None:
            nonlocal have_bytes, written_s
            with lock:
                have_bytes += size_bytes
                if size_bytes == 0 or time.monotonic() - written_s >= self._interval_s:
                    written_s = time.monotonic()
                    self._write(describe(), min(have_bytes, total_bytes), total_bytes)

        return count
