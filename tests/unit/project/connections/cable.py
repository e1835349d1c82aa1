# SPDX-License-Identifier: GPL-3.0-or-later
"""A connection to this machine that is cut while a file is there, and that takes note of its resets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection.local import Connection as Local

DOCUMENTATION = """
name: cable
short_description: This machine, over a cable that may be cut
description:
  - It is cut while the file that CABLE_CUT names is there.
options: {}
"""


class Connection(Local):  # type: ignore[misc]
    """The connection behind C(cable)."""

    transport = "cable"
    cut = Path(os.environ.get("CABLE_CUT", "/nonexistent"))

    def exec_command(self, *given: Any, **named: Any) -> Any:
        """What the local connection does, while it is there."""
        if self.cut.exists():
            raise AnsibleConnectionFailure("Connection reset by peer")
        return super().exec_command(*given, **named)

    def reset(self) -> None:
        """Some plugins connect at once, and meet the same failure."""
        self.cut.with_suffix(".reset").touch()
        raise AnsibleConnectionFailure("still down")
