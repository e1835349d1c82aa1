# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_check
short_description: Check variables for mistakes and contradictions
version_added: "0.1.0"
description:
  - Checks the profiles, engines and models of an inventory, what it declares about the host, and the names of all
    variables. What depends on the host is only checked for the chosen profile.
  - Fails with all mistakes at once. Each names the variable, its value, the reason and a correction.
  - If C(vllm_image_base) has a release of vLLM that is not recorded, an argument that is not known is a warning.
  - Values that depend on facts or results that do not exist yet are left out; the roles validate them.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  profile:
    description: Profile to check as the chosen one. If it is not set, C(serving_profile) is.
    type: str
  playbook:
    description: Playbook whose own variables are checked too.
    type: str
    choices: [bench, quality]
"""

EXAMPLES = r"""
- name: Check the variables
  edge.vllm_edge.serving_check:
"""

RETURN = r"""
mistakes:
  description: The mistakes as numbered lines, one sentence each.
  type: str
  returned: on failure
options:
  description: >-
    With O(playbook), the options of C(vllm-edge bench), C(quality), C(quality --compare) (key C(compare)) and
    C(quality reference) (key C(reference)) that the variables of the plays make, as lists of words by command.
  type: dict
  returned: success
"""
