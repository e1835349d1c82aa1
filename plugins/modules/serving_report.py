# SPDX-License-Identifier: Apache-2.0
"""Ansible module: render the report of a run for the terminal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_report
short_description: Render the report of a run for the terminal
description:
  - Turns the collected results into lines of at most 100 columns.
  - Reads and changes nothing; delegate it to the controller.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
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
    description: Number of the generation that serves.
    type: int
    required: true
  engines:
    description: >-
      Engines with C(engine), C(unit), C(model), C(precision), C(tensor_parallel_size), C(slots), C(port),
      C(served_names), C(state), C(load_seconds) and C(since).
    type: list
    elements: dict
    required: true
  completions:
    description: >-
      What was asked, as C(vllm-edge canary) says it, with C(served_name), C(engine), C(seconds), C(ok), C(completion),
      C(error), C(checks), C(passed_at) (when all checks passed, UTC) and C(token_s) (seconds of the one token that was
      asked instead in this run).
    type: list
    elements: dict
    default: []
  gpus:
    description: GPUs as the module C(vram_budget) returns them; sizes in MiB.
    type: list
    elements: dict
    required: true
  versions:
    description: Name and version of what serves.
    type: dict
    default: {}
  problems:
    description: What is wrong, one sentence each.
    type: list
    elements: str
    default: []
  switch:
    description: The journal of the switch that this run made, as C(vllm-edge history --format json) has it.
    type: dict
  last_switch:
    description: The last switch of the host, as C(vllm-edge status --format json) has it, for a run that made none.
    type: dict
  drift:
    description: Plan against measurement, as C(vllm-edge status --format json) has it.
    type: list
    elements: dict
    default: []
  overrides:
    description: Why the plan refused what serves, one sentence for each engine; only with C(plan_override).
    type: list
    elements: str
    default: []
  pins:
    description: Lines for the inventory that pin what was recorded at first use.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Render the report
  serving_report:
    host: "{{ inventory_hostname }}"
    profile: e2b-only
    generation: 1
    engines: "{{ engines }}"
    gpus: "{{ vram_result.gpus }}"
  delegate_to: localhost
"""

RETURN = r"""
report:
  description: The options, as one dictionary.
  type: dict
  returned: success
lines:
  description: Lines for the terminal.
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
