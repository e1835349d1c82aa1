# SPDX-License-Identifier: Apache-2.0
"""Whether somebody still waits for a long run.

A play that is cut off (Ctrl-C, a lost connection, a killed Ansible) leaves its command running on the host. Each poll
for progress therefore touches a file, and a run that was started with `--attended` ends when nobody has polled for a
while.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

AFTER_S = 90.0
"""Seconds without a poll. The action plugin `follow` polls every 10 s and may need a minute to connect again."""


@dataclass
class Attendance:
    """The file that polls touch."""

    path: Path
    _began: float = field(default_factory=time.time)

    def touch(self) -> None:
        """Note that somebody asked. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch(mode=0o600)

    def is_lost(self, after_s: float = AFTER_S) -> bool:
        """Return whether nobody has asked for `after_s` seconds, nor was the run begun since."""
        try:
            asked = self.path.stat().st_mtime
        except OSError:
            asked = 0.0
        return time.time() - max(asked, self._began) > after_s
