# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: add the names and values of variables to the arguments of the module serving_check."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

DOCUMENTATION = r"""
name: serving_check
short_description: Collect the variables that the module serving_check checks
version_added: "0.1.0"
description:
  - Adds the names of all variables, and the values of those that are numbers, booleans or one of a few words, to the
    arguments of M(edge.vllm_edge.serving_check), and runs that module.
  - Values that depend on facts or results that do not exist yet are left out.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
seealso:
  - module: edge.vllm_edge.serving_check
    description: The module, with its options and examples.
"""

SIMPLE = ("int", "float", "bool")


class ActionModule(ActionBase):  # type: ignore[misc]
    """Action plugin for C(serving_check). The module of the same name checks the variables."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Add `names` and `settings` to the module's arguments and run it."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        arguments = dict(self._task.args)
        settings = dict(arguments.get("settings") or {})
        for name in wanted(arguments["roles_directories"], arguments["group_vars"]):
            if name in variables and name not in settings:
                try:
                    settings[name] = self._templar.template(variables[name])
                except AnsibleError:
                    continue  # depends on facts or results that do not exist yet; the role validates it
        arguments |= {"names": sorted(map(str, variables)), "settings": settings}
        return dict(self._execute_module(module_name="serving_check", module_args=arguments, task_vars=variables))


def wanted(roles_directories: list[str], group_vars: str) -> Iterator[str]:
    """Yield the variables that are a number, a boolean or one of a few words. Others may be secret."""
    switches = yaml.safe_load((Path(group_vars) / "switches.yml").read_text())
    derived = {name for name, value in switches.items() if "{{" in str(value)}
    for directory in roles_directories:
        for path in sorted(Path(directory).glob("*/meta/argument_specs.yml")):
            for entry_point in yaml.safe_load(path.read_text())["argument_specs"].values():
                for name, option in entry_point.get("options", {}).items():
                    simple = option.get("type") in SIMPLE or option.get("choices")
                    if simple and not option.get("no_log") and name not in derived:
                        yield name
    yield from switches.keys() - derived
    yield "vram_foreign"
