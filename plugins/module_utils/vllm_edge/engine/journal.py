# SPDX-License-Identifier: Apache-2.0
"""Output of an engine's supervisor for systemd's journal: its own messages and the engine's log, with priorities."""

from __future__ import annotations

import re
import threading
from typing import TextIO

# The supervisor's own /health requests, every few seconds, would fill the journal.
OWN_PROBE = re.compile(r'"GET /health HTTP/1\.[01]" 200')
_LEVEL = re.compile(r"^(?:\x1b\[[\d;]*m)*(?:\([^)]*\)\s*)*(?:\x1b\[[\d;]*m)*(CRITICAL|ERROR|WARNING)\b")
_PRIORITY = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4}


class Journal:
    """Writes lines to a stream, with the prefix `<priority>` if systemd's journal reads it. Threads may share it."""

    def __init__(self, stream: TextIO, prefixed: bool) -> None:
        self._stream = stream
        self._prefixed = prefixed
        self._lock = threading.Lock()

    def write(self, text: str, priority: int = 6) -> None:
        """Write a message of one or more lines with a syslog priority (3 error, 4 warning, 5 notice, 6 info)."""
        with self._lock:
            for line in text.splitlines():
                prefix = f"<{priority}>" if self._prefixed else ""
                try:
                    self._stream.write(f"{prefix}{line}\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return  # a reader that has gone must not end the engine

    def write_engine_line(self, line: str) -> None:
        """Write a line of the engine's log with the priority of the level that vLLM printed in it."""
        level = _LEVEL.match(line)
        self.write(line, _PRIORITY[level.group(1)] if level else 6)
