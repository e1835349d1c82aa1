#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: which running containers may no longer use the GPUs that they have."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_gpu_access
short_description: Asks whether running containers may use the GPUs that they have
description:
  - When systemd is told daemon-reload, a container that got its GPUs from NVIDIA's older runtime hook keeps the device
    nodes and may no longer open them. This module asks the kernel, for every container that Docker runs and that has
    C(/dev/nvidiactl), C(/dev/nvidia-uvm) or C(/dev/nvidia<number>).
  - A short-lived process of its own joins the container's control group, calls access(2) on the nodes, and ends.
    Nothing runs in a container and no device is opened.
  - Does not fail. Without Docker there are no containers.
attributes:
  check_mode: {support: full, description: Changes nothing and is the same in check mode.}
options: {}
author:
  - vllm-edge (@vllm-edge)
"""

EXAMPLES = r"""
- name: Ask which containers may use the GPUs that they have
  container_gpu_access:
  register: access

- name: Name those that may not
  ansible.builtin.debug:
    msg: "{{ access.lost }}"
"""

RETURN = r"""
containers:
  description: >-
    Running containers that have GPUs, each with C(id), C(name), C(ours) (whether it is an engine), C(unit) (what starts
    it, empty where it is not ours), C(devices) (its GPUs' nodes), C(denied) (those that it may not use) and C(unknown)
    (why it could not be asked, empty where it could).
  returned: success
  type: list
  elements: dict
lost:
  description: Names of those that may not use a device which they have.
  returned: success
  type: list
  elements: str
unknown: {description: Names of those that could not be asked., returned: success, type: list, elements: str}
problem:
  description: Why no container could be asked; empty where they were, or where there is no Docker.
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
