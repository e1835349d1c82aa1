# SPDX-License-Identifier: GPL-3.0-or-later
"""Say who chose the profile of this run, and refuse to end by a plain run what somebody chose for this host."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ansible.context import CLIARGS
from ansible.errors import AnsibleError
from ansible.inventory.manager import InventoryManager
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars
from ansible.vars.manager import VariableManager

DOCUMENTATION = r"""
name: serving_choice
short_description: Say who chose the profile of this run, and keep to what was chosen for a host
description:
  - Says whether C(serving_profile) comes from the inventory or from C(-e), and what the inventory says of it.
  - A profile given by C(-e) which is the inventory's, too, counts as the inventory's.
  - Fails where a run without C(-e) would end a profile that was chosen by C(-e), or on the host itself, and names both
    ways on. A host on which nothing was committed yet passes.
  - Reads one file of the host without Python, and changes nothing, also in check mode.
options:
  profile:
    description: Name of the profile of this run, C(serving_profile).
    type: str
    required: true
  state_directory:
    description: Directory of the host where what is active is recorded.
    type: path
    default: /var/lib/vllm-edge
"""

EXAMPLES = r"""
- name: Keep to the profile that was chosen
  serving_choice:
    profile: "{{ serving_profile }}"
  register: serving_choice_made
"""

RETURN = r"""
origin:
  description: V(inventory) or V(-e).
  type: str
  returned: always
inventory_profile:
  description: What the inventory says; null where it says nothing.
  type: str
  returned: always
"""

VARIABLE = "serving_profile"
CHOSEN = {"-e": "with -e", "host": "on the host itself"}


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action behind C(serving_choice)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Who chose, or why this run must not."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "profile": {"type": "str", "required": True},
                "state_directory": {"type": "path", "default": "/var/lib/vllm-edge"},
            }
        )
        profile = options["profile"]
        given = VARIABLE in load_extra_vars(self._loader)
        host = str(variables.get("inventory_hostname", ""))
        says = self._inventory_says(host) if given else profile
        result: dict[str, Any] = {
            "changed": False,
            "origin": "-e" if given and says != profile else "inventory",
            "inventory_profile": says,
        }
        path = f"{options['state_directory']}/active-profile.json"
        read = self._low_level_execute_command(f"test ! -e {shlex.quote(path)} || cat {shlex.quote(path)}")
        if read["rc"] != 0:
            return result | {"failed": True, "msg": f"{path} of {host} cannot be read: {read['stderr'].strip()}"}
        reason = None if given else refusal(host, profile, committed(read["stdout"]))
        return result | ({"failed": True, "msg": reason} if reason else {})

    def _inventory_says(self, host: str) -> str | None:
        """The variable as it is below the extra variables, which hide it. None where it is not there, or not plain."""
        inventory = InventoryManager(loader=self._loader, sources=CLIARGS["inventory"])
        manager = VariableManager(loader=self._loader, inventory=inventory)
        manager._extra_vars = {}
        found = inventory.get_host(host)
        try:
            below = manager.get_vars(host=found, include_hostvars=False) if found else {}
            value = self._templar.copy_with_new_env(available_variables=below).template(below.get(VARIABLE))
        except AnsibleError:
            return None
        return value if isinstance(value, str) else None


def committed(text: str) -> Mapping[str, Any]:
    """The record of what is active; one that cannot be read is for the stage of the engines to refuse."""
    try:
        data = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    return data if isinstance(data, Mapping) else {}


def refusal(host: str, profile: str, active: Mapping[str, Any]) -> str | None:
    """Why a run without -e must not bring this profile; None where it may."""
    origin, runs = active.get("origin", "inventory"), active.get("profile")
    if origin == "inventory" or runs in (None, profile):
        return None
    when = f" at {active['chosen_at']}" if active.get("chosen_at") else ""
    return (
        f"{host} runs profile {runs} (generation {active.get('generation')}), which was chosen "
        f"{CHOSEN.get(origin, origin)}{when}; the inventory says {profile}, and a run without -e does not end what was "
        f"chosen for a host. Nothing was changed on any host. To keep {runs}, put 'serving_profile: {runs}' into the "
        f"inventory. To go to {profile}, run with '-e serving_profile={profile}'."
    )
