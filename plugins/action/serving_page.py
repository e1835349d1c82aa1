# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: write the report page of a host, on the controller."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ..module_utils.vllm_edge.inventory.reports import ROW, list_hosts
from ..module_utils.vllm_edge.page.data import PageData, complete, read_bench, read_quality, read_rows
from ..module_utils.vllm_edge.page.render import render_host, render_index


def write(path: Path, text: str) -> None:
    """Replace a file that only its owner may read. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    fresh.replace(path)


def list_rows(directory: Path, made_at: str, variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each host: those of all runs, and hosts of the inventory without one.

    A host of this run that wrote no page is `missed`, which its row keeps until it writes one. Raises OSError.
    """
    rows = read_rows(directory)
    every = variables.get("hostvars", {})
    asked, active = variables.get("ansible_play_hosts_all", ()), variables.get("ansible_play_hosts", ())
    for host in list_hosts(str(directory), variables.get("groups", {}), every):
        row = rows.setdefault(host, {"host": host, "missed": "not reached"})
        if host in asked and "row" not in (every[host].get("serving_page_result") or {}):
            waits = (every[host].get("nvidia_driver_result") or {}).get("awaits_reboot")
            missed = "nothing serves" if host in active else "awaits a reboot" if waits else "not reached"
            row |= {"missed": missed, "missed_at": made_at}
            write(directory / f"{host}{ROW}", json.dumps(row))
    return [rows[host] for host in sorted(rows)]


class ActionModule(ActionBase):  # type: ignore[misc]
    _supports_check_mode = False
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        listed = {"type": "list", "elements": "dict", "default": []}
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "report": {"type": "dict"},
                "index": {"type": "bool"},
                "status": {"type": "dict", "default": {}},
                "history": listed,
                "records": {"type": "list", "elements": "str", "default": []},
                "saved": {"type": "dict", "default": {}},
                "reference": listed,
                "made_at": {"type": "str", "default": "unknown"},
                "directory": {"type": "path", "required": True},
            },
            mutually_exclusive=[("report", "index")],
            required_one_of=[("report", "index")],
        )
        # As plain data: texts of Ansible have a type of their own.
        given = json.loads(json.dumps(options, default=str))
        directory = Path(given["directory"])
        result: dict[str, Any] = {"changed": False}
        try:
            if given["index"]:
                rows = list_rows(directory, given["made_at"], task_vars or {})
                files = {"index.html": render_index(rows, given["made_at"])}
            else:
                report = complete(given["report"], given["saved"])
                name = str(report["host"])
                bench = read_bench(directory / "bench" / name, given["records"])
                quality = read_quality(directory / "quality" / name, given["records"])
                data = PageData(
                    report, given["made_at"], given["status"], given["history"], bench, quality, given["reference"]
                )
                result["row"] = data.index_row
                files = {f"{name}.html": render_host(data), f"{name}{ROW}": json.dumps(result["row"])}
            for name, text in files.items():
                write(directory / name, text)
        except OSError as error:
            remedy = "Set serving_reports_directory to another place."
            return {"failed": True, "msg": f"The report page cannot be written: {error}. {remedy}"}
        return {**result, "path": str(directory / next(iter(files)))}
