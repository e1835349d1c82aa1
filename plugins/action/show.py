# SPDX-License-Identifier: GPL-3.0-or-later
"""Print lines on the terminal as they are."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

DOCUMENTATION = r"""
name: show
short_description: Print lines on the terminal as they are
description:
  - Prints without quoting or indenting, which C(ansible.builtin.debug) cannot.
  - Prints also where C(display_ok_hosts) is off, as it is in this project's C(ansible.cfg).
  - Runs on the controller and changes nothing.
options:
  lines:
    description: Lines to print. Either these or O(text) are given.
    type: list
    elements: str
  text:
    description: Sentences to print on one line, after the name of the host.
    type: str
"""


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action behind C(show)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Print the lines."""
        super().run(tmp, task_vars)
        _spec, options = self.validate_argument_spec(
            argument_spec={"lines": {"type": "list", "elements": "str"}, "text": {"type": "str"}},
            mutually_exclusive=[("lines", "text")],
            required_one_of=[("lines", "text")],
        )
        lines = options["lines"]
        if lines is None:
            lines = [f"{(task_vars or {}).get('inventory_hostname', '')}: {options['text']}"]
        for line in lines:
            Display().display(line)
        return {"changed": False}
