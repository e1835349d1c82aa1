# SPDX-License-Identifier: Apache-2.0
"""Lines of an engine's log in the journal, with their priority."""

from __future__ import annotations

import re
import threading
from typing import TextIO

# Our own question, every few seconds, would fill the journal.
OWN_PROBE = re.compile(r'"GET /health HTTP/1\.[01]" 200')
_LEVEL = re.compile(r"^(?:\x1b\[[\d;]*m)*(?:\([^)]*\)\s*)*(?:\x1b\[[\d;]*m)*(CRITICAL|ERROR|WARNING)\b")
_PRIORITY = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4}


class Journal:
    """Lines to stdout, with syslog's priority prefix when systemd's journal reads them."""

    def __init__(self, stream: TextIO, prefixed: bool) -> None:
        self._stream = stream
        self._prefixed = prefixed
        self._lock = threading.Lock()

    def write(self, text: str, priority: int = 6) -> None:
        with self._lock:
            for line in text.splitlines():
                prefix = f"<{priority}>" if self._prefixed else ""
                try:
                    self._stream.write(f"{prefix}{line}\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return  # a reader that is gone must not end an engine

    def engine_line(self, line: str) -> None:
        level = _LEVEL.match(line)
        self.write(line, _PRIORITY[level.group(1)] if level else 6)
