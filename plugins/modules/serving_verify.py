# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check the results that playbooks/verify.yml collected on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_verify
short_description: Check whether a host serves what the inventory asks for
version_added: "0.1.0"
description:
  - Checks results that were collected on the host, and returns all problems at once. Delegate the task to the
    controller.
  - The module does not fail if there are problems, so that the play can print RV(lines).
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  host:
    description: Name of the host in the inventory.
    type: str
    required: true
  status:
    description: Output of C(vllm-edge status --format json).
    type: dict
    required: true
  image:
    description: C(name), C(recorded_id) and C(present_id) of the image that the engines use. An empty id means that
      the image is not recorded, or is not on the host.
    type: dict
    required: true
  weights:
    description: >-
      Models of the inventory, each with C(name), C(repo), C(revision), C(recorded) (C(repo) and C(revision) of the
      record, empty if there is none), C(fits) and C(result) of M(edge.vllm_edge.model_weights).
    type: list
    elements: dict
    default: []
  canary:
    description: Output of C(vllm-edge canary --format json) for each running engine.
    type: list
    elements: dict
    default: []
  files:
    description: Files with C(path) and C(diff) against what the inventory renders. Not set if they could not be
      compared.
    type: list
    elements: dict
  vram:
    description: Result of M(edge.vllm_edge.vram_budget). Not set if it was not run.
    type: dict
seealso:
  - module: edge.vllm_edge.host_doctor
    description: Check the host itself.
  - module: edge.vllm_edge.vram_budget
    description: Measure the memory in use, for O(vram).
"""

EXAMPLES = r"""
- name: Check the host
  edge.vllm_edge.serving_verify:
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
  description: The result as lines for the terminal.
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
