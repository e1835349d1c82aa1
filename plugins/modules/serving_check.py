# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check the variables of a host for mistakes before anything is changed."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_check
short_description: Check variables for mistakes and contradictions
version_added: "0.1.0"
description:
  - Checks the profiles, engines and models of an inventory, what it declares about the host, and the names of all
    variables. Every name must be known to a role or to C(group_vars/all).
  - Reads only variables and files of the project, and runs on the controller before any host is changed.
  - Fails with all mistakes at once. Each names the variable, its value, the reason and a correction.
  - What is wrong in any case is reported for all entries. What depends on the host is only checked for the chosen
    profile.
  - Arguments of vLLM are compared with those that were recorded for one release. If O(image) contains another release,
    an argument that is not recorded is a warning.
  - The action plugin of the same name adds O(names) and O(settings).
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
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
    description: Number of GPUs that the inventory declares for the host.
    type: raw
  gpu_memory_mib:
    description: Total memory of each GPU that the inventory declares, in MiB as nvidia-smi prints it.
    type: raw
  gpu_uuids:
    description: UUIDs of the GPUs in the order of their slots.
    type: raw
  image:
    description: The base image, C(vllm_image_base). Its tag is the release of vLLM.
    type: raw
  settings:
    description: Values of variables that are numbers, booleans or one of a few words, by name.
    type: dict
    default: {}
  given:
    description: Whether a variable has a value, by name, for variables whose value is secret or does not matter.
    type: dict
    default: {}
  chat_template:
    description: Chat template of engines that do not set one, C(vllm_engine_chat_template).
    type: raw
    default: ""
  chat_templates_directory:
    description: Directory of the chat templates on the controller.
    type: path
  names:
    description: Names of all variables of the host.
    type: list
    elements: str
    default: []
  roles_directories:
    description: Directories with the roles of the project. Their argument specs define the known variables and keys.
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
seealso:
  - module: edge.vllm_edge.serving_plan
    description: Check whether the engines of the profile fit on the GPUs.
"""

EXAMPLES = r"""
- name: Check the variables
  edge.vllm_edge.serving_check:
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
  description: The mistakes as numbered lines, one sentence each.
  type: str
  returned: on failure
  sample: "1. serving_profile: 'e2b-onyl' is not a key of serving_profiles; did you mean e2b-only?\n"
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.inventory import profiles, variables


def files(directory: str | None) -> frozenset[str]:
    """Return the names of the files in a directory. The directory need not exist."""
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
        # Ansible prints a text with several lines unchanged, but quotes and folds the elements of a list.
        count = "One mistake" if len(found) == 1 else f"{len(found)} mistakes"
        module.fail_json(
            msg=f"{count} in the variables, see 'mistakes'; no host was touched.",
            mistakes="".join(f"{number}. {sentence}\n" for number, sentence in enumerate(found, 1)),
        )
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
