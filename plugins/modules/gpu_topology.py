#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: determine the settings that engines on several GPUs need on this host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_topology
short_description: Gather the settings that engines on several GPUs need
version_added: "0.1.0"
description:
  - Reads the state of the IOMMU, Access Control Services (ACS) of the PCI bridges, and what the driver reports about
    peer-to-peer reads between GPUs.
  - If something between the GPUs can corrupt or block such reads, returns the environment variables and arguments that
    disable them. Without these an engine on several GPUs may hang or compute wrong results.
  - Settings that only affect speed are not included; M(edge.vllm_edge.host_doctor) reports them.
  - Facts that cannot be read do not lead to a setting.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  peer_to_peer:
    description: How to decide whether peer-to-peer reads are disabled.
    type: str
    choices:
      auto: Inspect the host.
      forbidden: Return the settings that disable peer-to-peer reads without inspecting the host.
    default: auto
seealso:
  - module: edge.vllm_edge.host_doctor
    description: Check the whole host, including the topology of its GPUs.
"""

EXAMPLES = r"""
- name: Gather the settings for this host
  edge.vllm_edge.gpu_topology:
  register: topology

- name: Gather the settings that disable peer-to-peer reads on any host
  edge.vllm_edge.gpu_topology:
    peer_to_peer: forbidden
  register: topology
"""

RETURN = r"""
environment:
  description: Environment variables for the engine. Empty if none are needed.
  type: dict
  returned: success
  sample: {NCCL_P2P_DISABLE: "1"}
arguments:
  description: Arguments for C(vllm serve). Empty if none are needed.
  type: list
  elements: str
  returned: success
  sample: [--disable-custom-all-reduce]
reasons:
  description: What was found between the GPUs, or that peer-to-peer reads are forbidden.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.facts.driver import BUS_FIELDS, DriverReader
from ..module_utils.vllm_edge.gpu.topology import FORBIDDEN, Recommendation, correctness


def recommend(peer_to_peer: str) -> Recommendation:
    if peer_to_peer == "forbidden":
        return FORBIDDEN
    reader = DriverReader()
    rows, _ = reader.smi(BUS_FIELDS)
    return correctness(reader.bus((uuid, bus_id) for uuid, bus_id in rows))


def main() -> None:
    module = AnsibleModule(
        argument_spec={"peer_to_peer": {"type": "str", "choices": ["auto", "forbidden"], "default": "auto"}},
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **recommend(module.params["peer_to_peer"]).as_dict())


if __name__ == "__main__":
    main()
