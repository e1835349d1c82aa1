#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: find running containers that may lose their GPUs at a daemon-reload."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_gpu_access
short_description: Find containers that may lose their GPUs at a daemon-reload
version_added: "0.1.0"
description:
  - C(systemctl daemon-reload) takes the GPUs from containers that got them from NVIDIA's legacy runtime hook
    (C(docker run --gpus) or C(--runtime=nvidia)), if Docker's cgroup driver is C(systemd) and C(/dev/char) has no links
    to NVIDIA's devices. This module names these containers and the remedy.
  - Reads C(docker inspect) only. Nothing runs inside the containers, and they are not changed.
  - Does not fail if the containers cannot be read; see RV(problem). Returns no containers if Docker is not installed.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
seealso:
  - module: edge.vllm_edge.container_gpu_probe
    description: Open NVML in a container.
"""

EXAMPLES = r"""
- name: Check which containers may lose their GPUs
  edge.vllm_edge.container_gpu_access:
  register: gpu_access

- name: Print them with the remedy
  ansible.builtin.debug:
    msg: "{{ gpu_access.warning }}"
"""

RETURN = r"""
at_risk:
  description: Names of the containers that may lose their GPUs.
  returned: success
  type: list
  elements: str
warning:
  description: What may happen to these containers, why, and the remedy. Empty if there are none.
  returned: success
  type: str
problem:
  description: Why the containers could not be read. Empty if they were or if Docker is not installed.
  returned: success
  type: str
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu.access import REMEDY, Access, CannotAsk, look


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    access, problem = Access(), ""
    if module.get_bin_path("docker"):
        try:
            access = look()
        except CannotAsk as error:
            problem = str(error)
    warning = f"{access.risk}. {REMEDY}" if access.at_risk else ""
    module.exit_json(changed=False, at_risk=list(access.at_risk), warning=warning, problem=problem)


if __name__ == "__main__":
    main()
