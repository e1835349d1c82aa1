# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: show
short_description: Print lines on the terminal
version_added: "0.1.0"
description:
  - Prints lines without quoting or indentation, which M(ansible.builtin.debug) cannot do.
  - Also prints if C(display_ok_hosts) is disabled, as in this project's C(ansible.cfg).
  - Runs on the controller.
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
  color:
    description: Colour of the lines, if the terminal shows colours.
    type: str
    choices: [red]
"""

EXAMPLES = r"""
- name: Print a plan
  edge.vllm_edge.show:
    lines: "{{ plan.lines }}"

- name: Print a sentence about the host
  edge.vllm_edge.show:
    text: The host was not changed.
"""
