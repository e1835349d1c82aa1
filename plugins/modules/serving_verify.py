# SPDX-License-Identifier: Apache-2.0
"""Ansible module: judge what playbooks/verify.yml collected."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_verify
short_description: Judge whether a host serves as it should
description:
  - Takes what was collected on the host and says what is wrong with it, everything at once.
  - Reads and changes nothing; delegate it to the controller. It does not fail, so that the play can print the lines.
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
  status:
    description: What C(vllm-edge status --format json) said.
    type: dict
    required: true
  image:
    description: C(name), C(recorded_id) and C(present_id) of the engines' image; an id that is empty is not there.
    type: dict
    required: true
  weights:
    description: >-
      Models of the inventory with C(name), C(repo), C(revision), C(recorded) (C(repo) and C(revision), empty without a
      record), C(fits) and C(result) of the module C(model_weights).
    type: list
    elements: dict
    default: []
  canary:
    description: What C(vllm-edge canary --format json) said of each engine that runs.
    type: list
    elements: dict
    default: []
  files:
    description: Files with C(path) and C(diff) against what the inventory renders; left out where that is unknown.
    type: list
    elements: dict
  vram:
    description: What the module C(vram_budget) returned; leave it out where it was not asked.
    type: dict
"""

EXAMPLES = r"""
- name: Judge it
  serving_verify:
    host: "{{ inventory_hostname }}"
    status: "{{ serving_status.stdout | from_json }}"
    image: "{{ vllm_image_verified }}"
    vram: "{{ vram_result }}"
  delegate_to: localhost
  register: verified
"""

RETURN = r"""
problems:
  description: One paragraph for each problem, with its remedy.
  type: list
  elements: str
  returned: success
lines:
  description: Lines for the terminal.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.doctor.verify import Collected, render, verify


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "status": {"type": "dict", "required": True},
            "image": {"type": "dict", "required": True},
            "weights": {"type": "list", "elements": "dict", "default": []},
            "canary": {"type": "list", "elements": "dict", "default": []},
            "files": {"type": "list", "elements": "dict"},
            "vram": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    collected = Collected(**module.params)
    checked = verify(collected)
    module.exit_json(
        changed=False,
        problems=[problem for check in checked for problem in check.problems],
        lines=render(collected, checked),
    )


if __name__ == "__main__":
    main()
