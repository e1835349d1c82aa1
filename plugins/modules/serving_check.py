# SPDX-License-Identifier: Apache-2.0
"""Ansible module: refuse variables that are wrong or contradict each other, before any host is touched."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_check
short_description: Refuse variables that are wrong or contradict each other
description:
  - Looks at profiles, engines, models and what is declared of the host, and at the names of all variables, which
    must be ones that a role or C(group_vars/all) knows.
  - Reads variables and the project's own files only, and runs on the controller before any host is touched.
  - Reports every mistake at once, each with the variable, its value, the reason and what would do.
  - What can never be right is refused wherever it stands; what depends on the host is asked of the chosen profile.
  - Arguments of vLLM are compared with those that were recorded of one release. With another release in O(image), what
    is not among them is a warning.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
options:
  profile:
    description: Name of the chosen profile, C(serving_profile).
    type: raw
    required: true
  profiles:
    description: All profiles, C(serving_profiles).
    type: raw
    required: true
  engines:
    description: All engines, C(serving_engines).
    type: raw
    required: true
  models:
    description: All models, C(vllm_models).
    type: raw
    required: true
  roles:
    description: Names that every profile must serve exactly once, C(serving_roles).
    type: raw
    required: true
  gpu_count:
    description: Number of GPUs that the operator declares of the host.
    type: raw
  gpu_memory_mib:
    description: MiB of each GPU that the operator declares, as nvidia-smi prints the total.
    type: raw
  gpu_uuids:
    description: UUIDs of the GPUs in the order of their slots.
    type: raw
  image:
    description: The base image, C(vllm_image_base); its tag is the release of vLLM.
    type: raw
  settings:
    description: Values of numbers, booleans and words of the roles and of operators, by name; collected by the action.
    type: dict
    default: {}
  given:
    description: For variables whose value is secret or does not matter, whether they have one.
    type: dict
    default: {}
  chat_template:
    description: Chat template of engines that name none, C(vllm_engine_chat_template).
    type: raw
    default: ""
  chat_templates_directory:
    description: Directory of the chat templates on the controller.
    type: path
  names:
    description: Names of all variables of the host; collected by the action.
    type: list
    elements: str
    default: []
  roles_directories:
    description: Directories with the project's roles, whose argument specs say which variables and keys there are.
    type: list
    elements: path
    required: true
  playbooks_directory:
    description: Directory of the project's playbooks.
    type: path
    required: true
  group_vars:
    description: Directory with the project's own variables, C(group_vars/all).
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Check the variables
  serving_check:
    profile: "{{ serving_profile | default(none) }}"
    profiles: "{{ serving_profiles }}"
    engines: "{{ serving_engines }}"
    models: "{{ vllm_models }}"
    roles: "{{ serving_roles }}"
    roles_directories: "{{ lookup('ansible.builtin.config', 'DEFAULT_ROLES_PATH') }}"
    playbooks_directory: "{{ playbook_dir }}"
    group_vars: "{{ playbook_dir }}/group_vars/all"
  delegate_to: localhost
"""

RETURN = r"""
mistakes:
  description: One sentence on one line for each.
  type: str
  returned: on failure
  sample: "serving_profile: 'e2b-onyl' is not a key of serving_profiles; did you mean e2b-only?"
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.inventory import profiles, variables


def files(directory: str | None) -> frozenset[str]:
    """Names of the files in a directory that need not be there."""
    if not directory or not Path(directory).is_dir():
        return frozenset()
    return frozenset(entry.name for entry in Path(directory).iterdir() if entry.is_file())


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "profile": {"type": "raw", "required": True},
            "profiles": {"type": "raw", "required": True},
            "engines": {"type": "raw", "required": True},
            "models": {"type": "raw", "required": True},
            "roles": {"type": "raw", "required": True},
            "gpu_count": {"type": "raw"},
            "gpu_memory_mib": {"type": "raw"},
            "gpu_uuids": {"type": "raw"},
            "image": {"type": "raw"},
            "settings": {"type": "dict", "default": {}},
            "given": {"type": "dict", "default": {}},
            "chat_template": {"type": "raw", "default": ""},
            "chat_templates_directory": {"type": "path"},
            "names": {"type": "list", "elements": "str", "default": []},
            "roles_directories": {"type": "list", "elements": "path", "required": True},
            "playbooks_directory": {"type": "path", "required": True},
            "group_vars": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    options = dict(module.params)
    project = variables.load(
        options.pop("roles_directories"), options.pop("playbooks_directory"), options.pop("group_vars")
    )
    directory = options.pop("chat_templates_directory")
    inventory = profiles.Inventory(
        **{**options, "names": frozenset(options["names"])},
        chat_templates_directory=directory or "",
        chat_templates=files(directory),
    )
    for warning in profiles.warnings(inventory, project):
        module.warn(warning)
    found = profiles.contradictions(inventory, project)
    if found:
        # A text of several lines is printed as it is; elements of a list would be quoted and folded.
        count = "One mistake" if len(found) == 1 else f"{len(found)} mistakes"
        module.fail_json(
            msg=f"{count} in the variables, see 'mistakes'; no host was touched.",
            mistakes="".join(f"{number}. {sentence}\n" for number, sentence in enumerate(found, 1)),
        )
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
