#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check which running containers have lost access to their GPUs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_gpu_access
short_description: Check whether running containers can still use their GPUs
version_added: "0.1.0"
description:
  - After C(systemctl daemon-reload), a container that got its GPUs from NVIDIA's legacy runtime hook still has the
    device nodes but may no longer open them. This module asks the kernel about every running Docker container that has
    C(/dev/nvidiactl), C(/dev/nvidia-uvm) or C(/dev/nvidia<number>).
  - A short-lived process of the module joins the control group of the container, calls access(2) on the device nodes,
    and exits. Nothing runs inside the container, and no device is opened.
  - Does not fail if containers cannot be checked; see RV(problem) and RV(unknown). Returns no containers if Docker is
    not installed.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
seealso:
  - module: edge.vllm_edge.container_gpu_probe
    description: Open NVML in a container.
"""

EXAMPLES = r"""
- name: Check which containers can use their GPUs
  edge.vllm_edge.container_gpu_access:
  register: access

- name: Print those that cannot
  ansible.builtin.debug:
    msg: "{{ access.lost }}"
"""

RETURN = r"""
containers:
  description: >-
    Running containers that have GPUs, each with C(id), C(name), C(ours) (whether it is an engine of vllm-edge), C(unit)
    (systemd unit of the engine, empty for other containers), C(devices) (device nodes of its GPUs), C(denied) (those
    that it may not use) and C(unknown) (why it could not be checked, empty if it was).
  returned: success
  type: list
  elements: dict
lost:
  description: Names of the containers that may not use at least one of their devices.
  returned: success
  type: list
  elements: str
unknown:
  description: Names of the containers that could not be checked.
  returned: success
  type: list
  elements: str
problem:
  description: Why no container could be checked. Empty if they were checked or if Docker is not installed.
  returned: success
  type: str
"""

from collections.abc import Sequence

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu.access import Access, CannotAsk, look

DOCKER_S = 30


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)

    def run(command: Sequence[str]) -> tuple[int, str, str]:
        try:
            return module.run_command(
                ["timeout", str(DOCKER_S), *command], environ_update={"LC_ALL": "C"}, handle_exceptions=False
            )
        except OSError as error:
            raise CannotAsk(f"{command[0]} cannot be run: {error.strerror}") from error

    containers: list[Access] = []
    problem = ""
    if module.get_bin_path("docker"):
        try:
            containers = look(run)
        except CannotAsk as error:
            problem = str(error)
    module.exit_json(
        changed=False,
        containers=[container.as_dict() for container in containers],
        lost=[container.name for container in containers if container.denied],
        unknown=[container.name for container in containers if container.unknown],
        problem=problem,
    )


if __name__ == "__main__":
    main()
