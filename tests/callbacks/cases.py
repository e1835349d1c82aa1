# SPDX-License-Identifier: GPL-3.0-or-later
"""Callback plugin: what each host of a play came to, in results.json of the directory CASES; see role_cases.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.plugins.callback import CallbackBase

RESULT = "Print the result"


def list_texts(value: Any) -> Iterator[str]:
    """Every text in a task's result."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from list_texts(item)


class CallbackModule(CallbackBase):
    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "cases"

    def __init__(self) -> None:
        super().__init__()
        self.hosts: dict[str, dict[str, Any]] = {}

    def v2_runner_on_ok(self, task: Any, failed: bool = False) -> None:
        host = self.hosts.setdefault(task.host.get_name(), {"message": "", "changed": [], "texts": [], "result": None})
        if task.task.name == RESULT:
            host["result"] = task.result["msg"]
            return
        changed = task.result.get("changed", False)
        if changed:
            host["changed"].append(task.task.name)
        # As the terminal shows it with --diff.
        if failed or task.task.action.endswith("debug"):
            host["texts"] += list_texts({key: value for key, value in task.result.items() if key != "invocation"})
        elif changed:
            host["texts"] += list_texts(task.result.get("diff"))

    def v2_runner_on_failed(self, task: Any, ignore_errors: bool = False) -> None:
        self.v2_runner_on_ok(task, failed=True)
        self.hosts[task.host.get_name()]["message"] = str(task.result.get("msg", ""))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        for name, host in self.hosts.items():
            counts = stats.summarize(name)
            host["failed"] = counts["failures"] > 0 or counts["unreachable"] > 0
            host["message"] *= host["failed"]  # and not of a task that was rescued
        Path(os.environ["CASES"], "results.json").write_text(json.dumps(self.hosts))
