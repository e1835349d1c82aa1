#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what the bus between a host's GPUs wants of engines over several of them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_topology
short_description: Say what engines over several GPUs need to be correct on a host
description:
  - Reads the IOMMU, Access Control Services of PCI bridges, and what the driver says of reads between GPUs.
  - Where something between GPUs may spoil such reads, it names the environment and the arguments without which an
    engine over several GPUs may hang or compute wrong. What makes engines slower only, M(host_doctor) says.
  - What cannot be read is no reason. Changes nothing.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
options:
  peer_to_peer:
    description: V(auto) looks at the host. V(forbidden) looks at nothing and names what keeps GPUs from such reads.
    type: str
    choices: [auto, forbidden]
    default: auto
"""

EXAMPLES = r"""
- name: Know the bus
  gpu_topology:
  register: bus

- name: Know what keeps GPUs from reading each other's memory, whatever is between them
  gpu_topology:
    peer_to_peer: forbidden
  register: bus
"""

RETURN = r"""
environment:
  description: Environment of such an engine; empty where nothing has to be done.
  type: dict
  returned: success
  sample: {NCCL_P2P_DISABLE: "1"}
arguments:
  description: Arguments of C(vllm serve).
  type: list
  elements: str
  returned: success
  sample: [--disable-custom-all-reduce]
reasons:
  description: What stands between the GPUs, or that the reads are forbidden.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu.driver_facts import BUS_FIELDS, DriverReader
from ..module_utils.vllm_edge.gpu.topology import FORBIDDEN, Recommendation, correctness


def recommend(peer_to_peer: str) -> Recommendation:
    """What engines over several GPUs need on this host."""
    if peer_to_peer == "forbidden":
        return FORBIDDEN
    reader = DriverReader()
    rows, _ = reader.smi(BUS_FIELDS)
    return correctness(reader.bus((uuid, bus_id) for uuid, bus_id in rows))


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={"peer_to_peer": {"type": "str", "choices": ["auto", "forbidden"], "default": "auto"}},
        supports_check_mode=True,
    )
    module.exit_json(changed=False, **recommend(module.params["peer_to_peer"]).as_dict())


if __name__ == "__main__":
    main()
