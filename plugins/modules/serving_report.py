# SPDX-License-Identifier: Apache-2.0
"""Ansible module: render the report of a run for the terminal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_report
short_description: Render the report of a run
version_added: "0.1.0"
description:
  - Renders the collected results of a run as lines of at most 100 columns. Delegate the task to the controller.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  host:
    description: Name of the host in the inventory.
    type: str
    required: true
  profile:
    description: Name of the active profile.
    type: str
    required: true
  generation:
    description: Number of the active generation.
    type: int
    required: true
  engines:
    description: >-
      Engines, each with C(engine), C(unit), C(model), C(precision), C(tensor_parallel_size), C(slots), C(port),
      C(served_names), C(state), C(load_seconds) and C(since).
    type: list
    elements: dict
    required: true
  completions:
    description: >-
      Results of C(vllm-edge canary), each with C(served_name), C(engine), C(seconds), C(ok), C(completion), C(error),
      C(checks), C(passed_at) (time in UTC at which all checks passed) and C(token_s) (duration of the request for a
      single token that this run made instead of all checks, in seconds).
    type: list
    elements: dict
    default: []
  gpus:
    description: GPUs as M(edge.vllm_edge.vram_budget) returns them. Sizes are in MiB.
    type: list
    elements: dict
    required: true
  versions:
    description: Names and versions of the software that serves.
    type: dict
    default: {}
  problems:
    description: Problems, one sentence each.
    type: list
    elements: str
    default: []
  switch:
    description: Journal of the switch that this run made, as C(vllm-edge history --format json) prints it.
    type: dict
  last_switch:
    description: Last switch of the host, as C(vllm-edge status --format json) prints it. Used if this run made none.
    type: dict
  drift:
    description: Differences between plan and measurement, as C(vllm-edge status --format json) prints them.
    type: list
    elements: dict
    default: []
  overrides:
    description: Why the plan rejected the active engines, one sentence each. Only with C(plan_override).
    type: list
    elements: str
    default: []
  pins:
    description: Lines for the inventory that pin values which were recorded at first use.
    type: list
    elements: str
    default: []
seealso:
  - module: edge.vllm_edge.serving_switch
    description: Switch the host, and return the journal for O(switch).
  - module: edge.vllm_edge.vram_budget
    description: Measure the memory in use, for O(gpus).
"""

EXAMPLES = r"""
- name: Render the report
  edge.vllm_edge.serving_report:
    host: "{{ inventory_hostname }}"
    profile: e2b-only
    generation: 1
    engines: "{{ engines }}"
    gpus: "{{ vram_result.gpus }}"
  delegate_to: localhost
"""

RETURN = r"""
report:
  description: The options as a dictionary.
  type: dict
  returned: success
lines:
  description: The report as lines for the terminal.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.status.tables import render


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "profile": {"type": "str", "required": True},
            "generation": {"type": "int", "required": True},
            "engines": {"type": "list", "elements": "dict", "required": True},
            "completions": {"type": "list", "elements": "dict", "default": []},
            "gpus": {"type": "list", "elements": "dict", "required": True},
            "versions": {"type": "dict", "default": {}},
            "problems": {"type": "list", "elements": "str", "default": []},
            "switch": {"type": "dict"},
            "last_switch": {"type": "dict"},
            "drift": {"type": "list", "elements": "dict", "default": []},
            "overrides": {"type": "list", "elements": "str", "default": []},
            "pins": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    module.exit_json(changed=False, report=module.params, lines=render(module.params))


if __name__ == "__main__":
    main()
