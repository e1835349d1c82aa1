# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: read the file of an air gap's medium on the controller, as data and not as variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ..module_utils.vllm_edge.system import air_gap


class ActionModule(ActionBase):  # type: ignore[misc]
    TRANSFERS_FILES = False
    _supports_check_mode = True
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        self.validate_argument_spec(argument_spec={})
        if "air_gap_format" in variables:
            return self._refuse(
                "air_gap_format is set: air-gap.yml was given as variables (-e @FILE), which Ansible would evaluate. "
                "Give its name and its hash: -e air_gap=FILE -e air_gap_sha256=HASH, with the hash that "
                "playbooks/stage.yml printed."
            )
        settings = {
            name: self._templar.template(variables.get(f"air_gap{name}")) or ""
            for name in ("", "_sha256", "_host_directory", "_url")
        }
        if not settings[""]:
            return {"changed": False, "variables": {}}
        try:
            file = Path(str(settings[""])).expanduser().absolute()
            document = air_gap.read_document(file, str(settings["_sha256"]).strip())
            host = str(settings["_host_directory"]).rstrip("/")
            found = air_gap.resolve(document, file.parent, host, str(settings["_url"]))
            sums = air_gap.read_sums(file.parent, document.sums_sha256)
            air_gap.verify(file.parent, sums, ["wheels"], {})
            models = self._templar.template(variables.get("vllm_models")) or {}
            found["vllm_models"] = air_gap.pin_models(document, models)
        except air_gap.MediumError as error:
            return self._refuse(str(error))
        return {"changed": False, "variables": found, "sums_sha256": document.sums_sha256, "host_directory": host}

    def _refuse(self, message: str) -> dict[str, Any]:
        return {"failed": True, "msg": f"{message} No host was touched."}
