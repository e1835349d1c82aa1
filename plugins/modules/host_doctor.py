#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: whether a host can serve, what is wrong with it, what to do."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_doctor
short_description: Say whether a host can serve, and what is wrong
description:
  - Looks at the system, the driver, the GPUs, the container runtime, the disks and the engines of a host, and judges
    them.
  - Needs nothing on the host but Python, so it works before anything of this project is installed. Changes nothing. As
    root it sees more than as another user; what it may not see is unknown, and no fault.
  - It does not fail, so that the play can print the lines.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
options:
  host:
    description: Name of the host in the inventory; without it the name that the host gives itself.
    type: str
    default: ""
  gpu_uuids:
    description: UUIDs that the inventory names; one that is gone is a fault.
    type: list
    elements: str
    default: []
  gpus:
    description: How many GPUs the profile takes; fewer are a fault.
    type: int
    default: 0
  data_directory:
    description: Directory of weights and caches.
    type: path
    default: /data/vllm
"""

EXAMPLES = r"""
- name: Look at the host
  host_doctor:
    gpu_uuids: "{{ gpu_uuids | default([]) }}"
  register: doctor
"""

RETURN = r"""
doctor:
  description: >-
    C(exit_status) (0 all is well, 1 warnings, 2 failures), C(summary) (checks by state), C(as_root), C(checks) with
    C(check), C(group), C(state) (V(ok), V(warn), V(fail), V(unknown)), C(evidence) and C(remedy), always all of them in
    the same order, and C(recommendation) with C(environment), C(arguments) and C(reasons) for engines over several
    GPUs.
  type: dict
  returned: success
problems:
  description: One paragraph for each check that failed.
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

from ..module_utils.vllm_edge.doctor.command import examine
from ..module_utils.vllm_edge.doctor.reading import DATA, Expectation, Reader
from ..module_utils.vllm_edge.doctor.render import problems, render


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": ""},
            "gpu_uuids": {"type": "list", "elements": "str", "default": []},
            "gpus": {"type": "int", "default": 0},
            "data_directory": {"type": "path", "default": DATA},
        },
        supports_check_mode=True,
    )
    given = module.params
    expected = Expectation(tuple(given["gpu_uuids"]), given["gpus"], given["data_directory"])
    document = examine(Reader().read(expected), given["host"])
    module.exit_json(changed=False, doctor=document, problems=problems(document), lines=render(document))


if __name__ == "__main__":
    main()
