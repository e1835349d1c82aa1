#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: the constraint that a requirement on transformers becomes with a vLLM release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_compat
short_description: Intersect a requirement on transformers with the compatibility matrix
description:
  - Joins the operator's requirement with what the vLLM release of an image takes, and says whether the image already
    meets it.
  - Refuses an impossible pair, and a pair that is known to be broken, with the row of the matrix that stands
    against it.
  - Reads nothing and writes nothing. Needs the Python library C(packaging); run it on the controller, where
    ansible-core has it.
attributes:
  check_mode:
    support: full
    description: The module changes nothing in either mode.
options:
  requirement:
    description: What the operator asks for, as pip writes it.
    type: str
    required: true
  vllm_version:
    description: Version of vLLM in the base image.
    type: str
    required: true
  installed:
    description: Version of transformers in the base image; without it the image has none.
    type: str
  matrix:
    description: Rows of the compatibility matrix. All rows whose C(vllm) contains the release apply.
    type: list
    elements: dict
    required: true
    options:
      vllm:
        description: Releases of vLLM, as version specifiers.
        type: str
        required: true
      transformers:
        description: Releases of transformers that they take; empty in a row that only names known-bad pairs.
        type: str
        required: true
      known_bad:
        description: Releases that the metadata allows and that break vLLM all the same.
        type: list
        elements: dict
        default: []
        options:
          transformers:
            description: The broken releases, as version specifiers.
            type: str
            required: true
          reason:
            description: What happens.
            type: str
            required: true
          remedy:
            description: What to do instead.
            type: str
          reference:
            description: Where it is reported.
            type: str
      reference:
        description: Where the row comes from.
        type: str
        required: true
  needs:
    description: Further requirements, such as the first release that knows an architecture.
    type: list
    elements: dict
    default: []
    options:
      transformers:
        description: Releases of transformers, as version specifiers.
        type: str
        required: true
      reason:
        description: What needs them, in words that fit before "needs".
        type: str
        required: true
  gaps:
    description: Places in the release history where version numbers were skipped, to name what means no release.
    type: list
    elements: dict
    default: []
    options:
      last:
        description: Last release before the gap.
        type: str
        required: true
      next:
        description: First release after it.
        type: str
        required: true
author:
  - vllm-edge contributors
"""

EXAMPLES = r"""
- name: Join requirement and matrix
  vllm_compat:
    requirement: transformers>=4.58
    vllm_version: 0.32.0
    installed: 5.12.0
    matrix: "{{ vllm_compatibility_matrix }}"
  delegate_to: localhost
  become: false
  vars:
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
"""

RETURN = r"""
constraint:
  description: The requirement that pip is given.
  returned: success
  type: str
  sample: transformers>=5.16.1,<5.20.0
needs_layer:
  description: Whether the image does not meet the constraint as it is.
  returned: success
  type: bool
explanation:
  description: One sentence on what the requirement became and why.
  returned: success
  type: str
  sample: transformers>=4.58 names no release (4.57.6 -> 5.0.0); with vLLM 0.32.0 it becomes >=5.16.1,<5.20.0
references:
  description: Where the rows that applied come from.
  returned: success
  type: list
  elements: str
"""

import traceback
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

try:
    from ..module_utils.vllm_edge.inventory import image_compat
except ImportError:
    COMPAT_ERROR: str | None = traceback.format_exc()
else:
    COMPAT_ERROR = None


def argument_spec() -> dict[str, Any]:
    """The module's options."""
    text = {"type": "str", "required": True}
    bad = {"transformers": text, "reason": text, "remedy": {"type": "str"}, "reference": {"type": "str"}}
    return {
        "requirement": text,
        "vllm_version": text,
        "installed": {"type": "str"},
        "matrix": {
            "type": "list",
            "elements": "dict",
            "required": True,
            "options": {
                "vllm": text,
                "transformers": text,
                "reference": text,
                "known_bad": {"type": "list", "elements": "dict", "default": [], "options": bad},
            },
        },
        "needs": {
            "type": "list",
            "elements": "dict",
            "default": [],
            "options": {"transformers": text, "reason": text},
        },
        "gaps": {"type": "list", "elements": "dict", "default": [], "options": {"last": text, "next": text}},
    }


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    if COMPAT_ERROR is not None:
        module.fail_json(msg=missing_required_lib("packaging"), exception=COMPAT_ERROR)
    params = module.params
    try:
        resolution = image_compat.resolve(
            requirement=params["requirement"],
            vllm=params["vllm_version"],
            installed=params["installed"] or None,
            rows=image_compat.parse_matrix(params["matrix"]),
            needs=[image_compat.Need(need["transformers"], need["reason"]) for need in params["needs"]],
            gaps=[(gap["last"], gap["next"]) for gap in params["gaps"]],
        )
    except image_compat.CompatError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=False,
        constraint=resolution.constraint,
        needs_layer=resolution.needs_layer,
        explanation=resolution.explanation,
        references=list(resolution.references),
    )


if __name__ == "__main__":
    main()
