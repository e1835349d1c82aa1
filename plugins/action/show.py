# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: print lines on the terminal without changing them."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

DOCUMENTATION = r"""
name: show
short_description: Print lines on the terminal
version_added: "0.1.0"
description:
  - Prints lines without quoting or indentation, which M(ansible.builtin.debug) cannot do.
  - Also prints if C(display_ok_hosts) is disabled, as in this project's C(ansible.cfg).
  - Runs on the controller.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  lines:
    description: Lines to print. Exactly one of O(lines) and O(text) is required.
    type: list
    elements: str
  text:
    description: Sentences to print on one line, after the name of the host.
    type: str
seealso:
  - module: ansible.builtin.debug
"""

EXAMPLES = r"""
- name: Print a plan
  edge.vllm_edge.show:
    lines: "{{ plan.lines }}"

- name: Print a sentence about the host
  edge.vllm_edge.show:
    text: The host was not changed.
"""


class ActionModule(ActionBase):  # type: ignore[misc]
    """Action plugin for C(show)."""

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
