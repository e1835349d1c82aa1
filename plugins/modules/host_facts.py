#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: read what roles decide by from a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_facts
short_description: Read what roles decide by from a host
version_added: "0.1.0"
description:
  - Reads the parts that are asked for, and nothing else, with the reader of M(edge.vllm_edge.host_doctor), also on a
    host that has neither a driver nor anything of vllm-edge. What several parts need is read once.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  driver:
    description: >-
      The driver that the host should have, as the fields of the class C(Wanted) in C(facts/driver_state.py) of the
      package. If it is set, the results include the fields of C(DriverState), which is there too.
    type: dict
  runtime:
    description: >-
      Names of C(packages) and systemd C(units) of Docker and the container toolkit, C(source), the path of the apt
      source of Docker's own repository, and C(daemon_options), settings for C(daemon.json). If it is set, the results
      include the fields of the class C(RuntimeState) in C(facts/runtime.py) of the package.
    type: dict
  peer_to_peer:
    description: >-
      Return the settings that engines on several GPUs need. Without these such an engine may hang or compute wrong
      results. Settings that only affect speed are not included, and facts that cannot be read lead to no setting.
    type: str
    choices:
      auto: Inspect the IOMMU, the PCI bridges and what the driver says of reads between GPUs.
      forbidden: Return the settings that disable peer-to-peer reads without inspecting the host.
  containers:
    description: >-
      Find the running containers that may lose their GPUs at C(systemctl daemon-reload), which are those that got them
      from NVIDIA's legacy runtime hook (C(--gpus) or C(--runtime=nvidia)). They are not changed, and nothing runs in
      them.
    type: bool
    default: false
  root:
    description: Root directory of the host's file system. Only tests set it to something other than V(/).
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Check which containers may lose their GPUs
  edge.vllm_edge.host_facts:
    containers: true
  register: gpu_access
"""

RETURN = r"""
packages:
  description: >-
    Those of O(runtime) that are installed, and installed packages of any driver or kernel, by name, each with
    C(version) and C(held).
  returned: with O(driver) or O(runtime)
  type: dict
gpus:
  description: UUIDs of the GPUs that C(nvidia-smi) reports.
  returned: with O(driver) or O(runtime)
  type: list
  elements: str
nvml_error:
  description: What C(nvidia-smi) printed beside or instead of GPUs. Empty if all is well.
  returned: with O(driver) or O(runtime)
  type: str
environment:
  description: Environment variables for the engine.
  type: dict
  returned: with O(peer_to_peer)
  sample: {NCCL_P2P_DISABLE: "1"}
arguments:
  description: Arguments for C(vllm serve).
  type: list
  elements: str
  returned: with O(peer_to_peer)
  sample: [--disable-custom-all-reduce]
reasons:
  description: What was found between the GPUs, or that peer-to-peer reads are forbidden.
  type: list
  elements: str
  returned: with O(peer_to_peer)
at_risk:
  description: Names of the containers that may lose their GPUs. Empty if Docker is not installed.
  returned: with O(containers)
  type: list
  elements: str
warning:
  description: What may happen to these containers, why, and the remedy. Empty if there are none.
  returned: with O(containers)
  type: str
problem:
  description: Why the containers could not be read. Empty if they were or if Docker is not installed.
  returned: with O(containers)
  type: str
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.facts.dpkg import PATTERNS
from ..module_utils.vllm_edge.facts.driver import BUS_FIELDS
from ..module_utils.vllm_edge.facts.driver_state import Wanted, read_driver_state
from ..module_utils.vllm_edge.facts.runtime import RuntimeReader
from ..module_utils.vllm_edge.gpu.access import REMEDY, Access
from ..module_utils.vllm_edge.gpu.topology import FORBIDDEN, correctness
from ..module_utils.vllm_edge.system.host import Unread
from ..module_utils.vllm_edge.system.systemd import SystemdError


def read_driver_and_runtime(module: AnsibleModule, reader: RuntimeReader) -> dict[str, Any]:
    driver, runtime = module.params["driver"], dict(module.params["runtime"] or {})
    names = [*(PATTERNS if driver else ()), *runtime.pop("packages", ())]
    packages, half_installed = reader.packages(*names)
    if isinstance(packages, Unread):
        module.fail_json(msg=packages.why)
    rows, said = reader.smi(("uuid", "driver_version", "persistence_mode"))
    gpus = [row[0] for row in rows]
    problem = said if said or rows else "nvidia-smi named no GPU"
    found: dict[str, Any] = {"packages": packages, "gpus": gpus, "nvml_error": problem}
    if driver:
        modes = {row[0]: row[2] for row in rows}
        try:
            found |= asdict(read_driver_state(reader, Wanted(**driver), packages, half_installed, modes))
        except SystemdError as error:
            module.fail_json(msg=f"apt cannot be asked about the driver: {error}")
    if runtime:
        found |= asdict(reader.read_runtime_state(**runtime, gpus=gpus, driver=rows[0][1] if rows else ""))
    return found


def recommend(reader: RuntimeReader, peer_to_peer: str) -> dict[str, Any]:
    if peer_to_peer == "forbidden":
        return asdict(FORBIDDEN)
    rows, _ = reader.smi(BUS_FIELDS)
    return asdict(correctness(reader.bus((uuid, bus_id) for uuid, bus_id in rows)))


def find_containers_at_risk(reader: RuntimeReader) -> dict[str, Any]:
    access = reader.access() if reader.version("docker") else Access()
    if isinstance(access, Unread):
        return {"at_risk": [], "warning": "", "problem": access.why}
    warning = f"{access.risk}. {REMEDY}" if access.at_risk else ""
    return {"at_risk": list(access.at_risk), "warning": warning, "problem": ""}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "driver": {"type": "dict"},
            "runtime": {"type": "dict"},
            "peer_to_peer": {"type": "str", "choices": ["auto", "forbidden"]},
            "containers": {"type": "bool", "default": False},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    given = module.params
    found: dict[str, Any] = {}
    reader = RuntimeReader(Path(given["root"]))
    if given["driver"] or given["runtime"]:
        found.update(read_driver_and_runtime(module, reader))
    if given["peer_to_peer"]:
        found.update(recommend(reader, given["peer_to_peer"]))
    if given["containers"]:
        # Also before the host stage has rejected a Python that is too old, hence with Python 3.8.
        found.update(find_containers_at_risk(reader))
    module.exit_json(changed=False, **found)


if __name__ == "__main__":
    main()
