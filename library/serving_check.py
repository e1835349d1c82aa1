# SPDX-License-Identifier: Apache-2.0
"""Ansible module: refuse profiles, engines and models that contradict each other."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_check
short_description: Refuse profiles, engines and models that contradict each other
description:
  - Reads variables only, so it runs before any host is touched; delegate it to the controller.
  - Reports every contradiction at once, each with the variable, its value, the reason and what would do.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
options:
  profile:
    description: Name of the chosen profile.
    type: str
    required: true
  profiles:
    description: All profiles, C(serving_profiles).
    type: dict
    required: true
  engines:
    description: All engines, C(serving_engines).
    type: dict
    required: true
  models:
    description: All models, C(vllm_models).
    type: dict
    required: true
  roles:
    description: Names that every profile must serve exactly once, C(serving_roles).
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Check the variables
  serving_check:
    profile: "{{ serving_profile }}"
    profiles: "{{ serving_profiles }}"
    engines: "{{ serving_engines }}"
    models: "{{ vllm_models }}"
    roles: "{{ serving_roles }}"
  delegate_to: localhost
"""

RETURN = r"""
contradictions:
  description: One sentence each; empty when the variables are sound.
  type: list
  elements: str
  returned: always
  sample: ["serving_profile: 'e2b-onyl' is not a key of serving_profiles; did you mean e2b-only?"]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.vllm_edge.serving import contradictions


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "str", "required": True},
            "profiles": {"type": "dict", "required": True},
            "engines": {"type": "dict", "required": True},
            "models": {"type": "dict", "required": True},
            "roles": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    found = contradictions(**module.params)
    if found:
        module.fail_json(msg="The inventory contradicts itself: " + " ".join(found), contradictions=found)
    module.exit_json(changed=False, contradictions=[])


if __name__ == "__main__":
    main()
