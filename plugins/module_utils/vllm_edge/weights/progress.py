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


def format_progress(model: str, done: int, count: int, have_bytes: int, total_bytes: int, seconds: float) -> str:
    """Return one line on the progress of a download, such as `e2b: 3 of 9 files, 41 %, 1.2 of 10.2 GiB, 35 s`.

    Args:
        model: name of the model
        done: number of files that are complete
        count: number of all files
        have_bytes: bytes that have arrived
        total_bytes: bytes of all files
        seconds: duration so far
    """
    share = 100 * have_bytes // total_bytes if total_bytes else 100
    unit, name = (1024**3, "GiB") if total_bytes >= 1024**3 else (1024**2, "MiB")
    return (
        f"{model}: {done} of {count} files, {min(share, 100)} %, {have_bytes / unit:.1f} of {total_bytes / unit:.1f} "
        f"{name}, {seconds:.0f} s"
    )


class Progress:
    """Writes one line to a file every `interval_s` seconds during the work, since a module cannot stream its output."""

    def __init__(self, path: Path | None, model: str, interval_s: float = 2.0) -> None:
        self._path = path
        self._model = model
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._hashed_bytes = 0

    def _get_elapsed_seconds(self) -> float:
        return time.monotonic() - self._started

    def write(self, text: str) -> None:
        """Replace the line. Errors are ignored: they are no reason to stop a download."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.new")
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(self._path)

    def hashing(self, total_bytes: int) -> Callable[[int], None]:
        """Return a callback that counts hashed bytes and writes the line every `interval_s` seconds."""
        state = {"done": 0, "said": time.monotonic()}

        def count(size: int) -> None:
            with self._lock:
                state["done"] += size
                now = time.monotonic()
                if now - state["said"] < self._interval_s:
                    return
                state["said"] = now
                share = min(100, 100 * int(state["done"]) // total_bytes) if total_bytes else 100
            self.write(
                f"{self._model}: verifying, {share} %, {mib(int(state['done']))} of {mib(total_bytes)}, "
                f"{self._get_elapsed_seconds():.0f} s"
            )

        return count

    @contextlib.contextmanager
    def watching(self, staging: Path, files: list[RemoteFile], finished: Callable[[], int]) -> Iterator[None]:
        """Report how much has arrived in the staging directory, in a thread, until the with block ends.

        Args:
            staging: staging directory
            files: the files to be downloaded
            finished: returns the number of files that are complete
        """
        total = sum(item.size_bytes for item in files)
        stop = threading.Event()

        def say() -> None:
            self.write(
                format_progress(
                    self._model,
                    finished(),
                    len(files),
                    min(_sum_sizes(staging), total),
                    total,
                    self._get_elapsed_seconds(),
                )
            )

        def loop() -> None:
            while not stop.wait(self._interval_s):
                say()

        thread = threading.Thread(target=loop, daemon=True)
        say()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            say()


def _sum_sizes(directory: Path) -> int:
    total = 0
    for base, _folders, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total
