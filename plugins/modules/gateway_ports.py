#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: fail if somebody else listens on a port of the gateway."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_ports
short_description: Assert that the ports of the gateway are free
version_added: "0.1.0"
description:
  - Fails if a process listens on one of the addresses, and names it. What the gateway itself listens on counts as free.
  - Fails if the host does not have an address.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  listen:
    description: Addresses of the gateway, each with C(address) and C(port).
    type: list
    elements: dict
    required: true
  ports:
    description: Ports of engines, on which the gateway answers on C(127.0.0.1).
    type: list
    elements: int
    default: []
"""

EXAMPLES = r"""
- name: Assert that the ports of the gateway are free
  edge.vllm_edge.gateway_ports:
    listen:
      - address: 127.0.0.1
        port: 8000
"""

RETURN = r"""# """

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.names import GATEWAY_UNIT
from ..module_utils.vllm_edge.system.listeners import find_port_users


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "listen": {"type": "list", "elements": "dict", "required": True},
            "ports": {"type": "list", "elements": "int", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    wanted = [(entry["address"], int(entry["port"])) for entry in params["listen"]]
    wanted += [("127.0.0.1", port) for port in params["ports"]]
    if found := find_port_users(wanted, GATEWAY_UNIT):
        module.fail_json(
            msg=f"The gateway cannot listen: {'; '.join(found)}. The gateway was not changed. Stop what listens, or "
            "give the gateway (serving_gateway_listen, serving_fleet_listen) or the engine (port) another place."
        )
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
