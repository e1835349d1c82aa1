# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_choice
short_description: Check who chose the profile of this run
version_added: "0.1.0"
description:
  - Determines whether C(serving_profile) comes from the inventory or from C(-e), and which profile the inventory names.
    One that is the same in both counts as the inventory's.
  - Fails if a run without C(-e) would replace a profile that was chosen with C(-e) or on the host itself.
  - Reads one file on the host, without Python.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  profile:
    description: Name of the profile of this run, C(serving_profile).
    type: str
    required: true
  state_directory:
    description: Directory on the host that contains the record of the active profile, C(active-profile.json).
    type: path
    default: /var/lib/vllm-edge
"""

EXAMPLES = r"""
- name: Refuse to replace a profile that was chosen for this host
  edge.vllm_edge.serving_choice:
    profile: "{{ serving_profile }}"
  register: serving_choice
"""

RETURN = r"""
origin:
  description: V(inventory) or V(-e).
  type: str
  returned: always
inventory_profile:
  description: Name of the profile in the inventory. V(null) if the inventory does not set it as plain text.
  type: str
  returned: always
"""
