# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: determine who chose the profile of this run, and keep a profile that was chosen for the host."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars

VARIABLE = "serving_profile"
CHOSEN = {"-e": "with -e", "host": "on the host itself"}


class ActionModule(ActionBase):  # type: ignore[misc]
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return who chose the profile, or fail with the reason why this run must not replace the active one."""
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
        says = self._read_inventory(host) if given else profile
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

    def _read_inventory(self, host: str) -> str | None:
        """Return the variable as it is without `-e`. None if the inventory sets no text, or cannot be read."""
        manager = copy.copy(self._task.get_variable_manager())
        manager._extra_vars = {name: value for name, value in manager.extra_vars.items() if name != VARIABLE}
        others = manager.get_vars(host=manager._inventory.get_host(host), include_hostvars=False)
        try:
            value = self._templar.copy_with_new_env(available_variables=others).template(others.get(VARIABLE))
        except AnsibleError:
            return None
        return value if isinstance(value, str) else None


def committed(text: str) -> Mapping[str, Any]:
    """Return the record of the active profile. A damaged record is treated as empty; the engines stage reports it."""
    try:
        data = json.loads(text) if text.strip() else {}
    except ValueError:
        return {}
    return data if isinstance(data, Mapping) else {}


def refusal(host: str, profile: str, active: Mapping[str, Any]) -> str | None:
    """Return why a run without -e must not switch to this profile. None if it may."""
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
