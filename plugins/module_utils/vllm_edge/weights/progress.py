# SPDX-License-Identifier: Apache-2.0
"""Progress of a transfer: one line in a file, for Ansible and for operators."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .record import RemoteFile


def mib(size_bytes: int) -> str:
    """Return a size in MiB for a message, such as `1,024.0 MiB`."""
    return f"{size_bytes / 1024**2:,.1f} MiB"


def format_progress(what: str, have_bytes: int, total_bytes: int, seconds: float) -> str:
    """Return one line on the progress of a download, such as `e2b: 3 of 9 files, 41 %, 1.2 of 10.2 GiB, 35 s`.

    `what` is the part before the percentage.
    """
    share = min(100, 100 * have_bytes // total_bytes) if total_bytes else 100
    unit, name = (1024**3, "GiB") if total_bytes >= 1024**3 else (1024**2, "MiB")
    return f"{what}, {share} %, {have_bytes / unit:.1f} of {total_bytes / unit:.1f} {name}, {seconds:.0f} s"


class Progress:
    """Writes one line to a file every `interval_s` seconds during the work, since a module cannot stream its output."""

    def __init__(self, path: Path | None, model: str, interval_s: float = 2.0) -> None:
        self._path = path
        self._model = model
        self._interval_s = interval_s
        self._started = time.monotonic()

    def _write(self, what: str, have_bytes: int, total_bytes: int) -> None:
        """Replace the line. Errors are ignored: they are no reason to stop a download."""
        if self._path is None:
            return
        line = format_progress(f"{self._model}: {what}", have_bytes, total_bytes, time.monotonic() - self._started)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.new")
            temporary.write_text(line + "\n", encoding="utf-8")
            temporary.replace(self._path)

    def count_hashed(self, total_bytes: int) -> Callable[[int], None]:
        """Return a callback that counts hashed bytes and writes the line every `interval_s` seconds."""
        hashed_bytes, written_s = 0, time.monotonic()

        def count(size_bytes: int) -> None:
            nonlocal hashed_bytes, written_s
            hashed_bytes += size_bytes
            if time.monotonic() - written_s >= self._interval_s:
                written_s = time.monotonic()
                self._write("verifying", hashed_bytes, total_bytes)

        return count

    @contextlib.contextmanager
    def watch(self, staging: Path, files: list[RemoteFile], count_finished: Callable[[], int]) -> Iterator[None]:
        """Report in a thread how much of the files has arrived in the staging directory, until the with block ends.

        `count_finished` returns the number of files that are complete.
        """
        total_bytes = sum(item.size_bytes for item in files)
        stop = threading.Event()

        def write() -> None:
            have_bytes = min(_sum_sizes(staging), total_bytes)
            self._write(f"{count_finished()} of {len(files)} files", have_bytes, total_bytes)

        def loop() -> None:
            while not stop.wait(self._interval_s):
                write()

        thread = threading.Thread(target=loop, daemon=True)
        write()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            write()


def _sum_sizes(directory: Path) -> int:
    total_bytes = 0
    for base, _folders, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total_bytes += os.lstat(os.path.join(base, name)).st_size
    return total_bytes
