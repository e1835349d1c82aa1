# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: check the variables of a host for mistakes before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError, AnsibleUndefinedVariable
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ..module_utils.vllm_edge.inventory import profiles, variables

DOCUMENTATION = r"""
name: serving_check
short_description: Check variables for mistakes and contradictions
version_added: "0.1.0"
description:
  - Checks the profiles, engines and models of an inventory, what it declares about the host, and the names of all
    variables. Every name must be known to a role or to C(group_vars/all).
  - Reads only the variables of the host and files of the project, and runs on the controller before any host is
    changed.
  - Fails with all mistakes at once. Each names the variable, its value, the reason and a correction.
  - What is wrong in any case is reported for all entries. What depends on the host is only checked for the chosen
    profile.
  - Arguments of vLLM are compared with those that were recorded for one release. If C(vllm_image_base) contains another
    release, an argument that is not recorded is a warning.
  - Values that depend on facts or results that do not exist yet are left out; the roles validate them.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
seealso:
  - module: edge.vllm_edge.serving_plan
    description: Check whether the engines of the profile fit on the GPUs.
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
  sample: "1. serving_profile: 'e2b-onyl' is not a key of serving_profiles; did you mean e2b-only?\n"
"""

PROJECT = Path(__file__).resolve().parents[2]
GIVEN = ("model_weights_token", "model_weights_token_file", "vllm_image_base_archive", "vllm_image_base_digest")


class ActionModule(ActionBase):  # type: ignore[misc]
    """Action plugin for C(serving_check)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the mistakes as a failure, or nothing."""
        super().run(tmp, task_vars)
        self.validate_argument_spec(argument_spec={})
        self._variables = task_vars or {}
        project = variables.load(PROJECT)
        inventory = self._read_inventory(project)
        for warning in profiles.find_warnings(inventory, project):
            Display().warning(warning)
        found = profiles.find_mistakes(inventory, project)
        if not found:
            return {"changed": False}
        # Ansible prints a text with several lines unchanged, but quotes and folds the elements of a list.
        count = "One mistake" if len(found) == 1 else f"{len(found)} mistakes"
        return {
            "failed": True,
            "msg": f"{count} in the variables, see 'mistakes'; no host was touched.",
            "mistakes": "".join(f"{number}. {sentence}\n" for number, sentence in enumerate(found, 1)),
        }

    def _read(self, name: str) -> Any:
        """Return the value of a variable; None if it is not set or names one that is not."""
        try:
            return self._templar.template(self._variables.get(name))
        except AnsibleUndefinedVariable:
            return None

    def _read_settings(self, project: variables.Project) -> dict[str, Any]:
        settings = {}
        for name in project.settings & self._variables.keys():
            try:
                settings[name] = self._templar.template(self._variables[name])
            except AnsibleError:
                continue  # depends on facts or results that do not exist yet
        return settings

    def _read_inventory(self, project: variables.Project) -> profiles.Inventory:
        """Return what the checks need of the variables. Other values may be secret."""
        directory = self._read("vllm_engine_chat_templates_directory")
        templates = Path(directory or f"{self._read('inventory_dir')}/chat_templates")
        files = templates.iterdir() if templates.is_dir() else ()
        return profiles.Inventory(
            profile=self._read("serving_profile"),
            **{
                key: self._templar.template(self._variables.get(name))
                for key, name in {
                    "profiles": "serving_profiles",
                    "engines": "serving_engines",
                    "models": "vllm_models",
                    "roles": "serving_roles",
                    "image": "vllm_image_base",
                }.items()
            },
            **{key: self._read(key) for key in ("gpu_count", "gpu_memory_mib", "gpu_uuids")},
            settings=self._read_settings(project),
            given={name: bool(self._read(name)) for name in GIVEN},
            chat_template=self._read("vllm_engine_chat_template") or "",
            chat_templates=frozenset(entry.name for entry in files if entry.is_file()),
            chat_templates_directory=str(templates),
            names=frozenset(map(str, self._variables)),
        )
