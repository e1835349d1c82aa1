#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: determine the version constraint on transformers for a vLLM release."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_compat
short_description: Determine which transformers releases a vLLM release works with
version_added: "0.1.0"
description:
  - Intersects the operator's requirement on transformers with what the vLLM release of an image supports, and returns
    whether the image already meets the result.
  - Fails if no release meets both, or if the combination is known to be broken. The message contains the row of the
    matrix that excludes it.
  - Computes from its options only. Run it on the controller, because it needs the Python library C(packaging), which
    ansible-core depends on.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
requirements:
  - packaging (Python package)
options:
  requirement:
    description: Requirement of the operator, in the syntax of pip.
    type: str
    required: true
  vllm_version:
    description: Version of vLLM in the base image.
    type: str
    required: true
  installed:
    description: Version of transformers in the base image. Not set if the image contains none.
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
        description: Releases of transformers that they support, as version specifiers. Empty in a row that only lists
          known-bad combinations.
        type: str
        required: true
      known_bad:
        description: Releases of transformers that vLLM's metadata allows and that do not work.
        type: list
        elements: dict
        default: []
        options:
          transformers:
            description: The releases that do not work, as version specifiers.
            type: str
            required: true
          reason:
            description: What happens with them.
            type: str
            required: true
          remedy:
            description: What to do instead.
            type: str
          reference:
            description: Where the problem is reported.
            type: str
      reference:
        description: Source of the row.
        type: str
        required: true
  needs:
    description: Further requirements, such as the first release that supports an architecture.
    type: list
    elements: dict
    default: []
    options:
      transformers:
        description: Releases of transformers, as version specifiers.
        type: str
        required: true
      reason:
        description: What needs them, worded so that it can precede "needs" in a sentence.
        type: str
        required: true
  gaps:
    description: Places in the history of transformers where version numbers were skipped. Messages use them to explain
      why a requirement matches no release.
    type: list
    elements: dict
    default: []
    options:
      last:
        description: Last release before the gap.
        type: str
        required: true
      next:
        description: First release after the gap.
        type: str
        required: true
"""

EXAMPLES = r"""
- name: Determine the constraint on transformers
  edge.vllm_edge.vllm_compat:
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
  description: The requirement for pip.
  returned: success
  type: str
  sample: transformers>=5.16.1,<5.20.0
needs_layer:
  description: Whether the image does not meet the constraint and needs an additional layer.
  returned: success
  type: bool
explanation:
  description: One sentence that explains how the constraint was derived.
  returned: success
  type: str
  sample: transformers>=4.58 names no release (4.57.6 -> 5.0.0); with vLLM 0.32.0 it becomes >=5.16.1,<5.20.0
references:
  description: Sources of the rows that applied.
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
    """Return the options of the module."""
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
    """Run the module."""
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
