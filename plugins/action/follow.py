# SPDX-License-Identifier: GPL-3.0-or-later
"""Run a long module in the background of the host and show on the terminal how far it is."""

from __future__ import annotations

import contextlib
import posixpath
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

DOCUMENTATION = r"""
name: follow
short_description: Run a long module and show its progress live
description:
  - Starts a module in the background of the host and asks for its result.
  - Meanwhile it asks the progress command every O(interval_s) seconds and prints one line for each line of its answer.
  - A line holds the label, the seconds since the start, and what the progress command printed.
  - The module does not depend on the connection. While that is lost, which is said once, the host is asked again.
  - In check mode the module runs in the foreground, as it would by itself.
options:
  module:
    description: Fully qualified name of the module.
    type: str
    required: true
  args:
    description: Arguments of the module.
    type: dict
    default: {}
  label:
    description: What is going on, one or two words.
    type: str
    required: true
  progress:
    description: Command, as a list, whose standard output says how far it is, a line for each thing that is under way.
    type: list
    elements: str
    default: []
  interval_s:
    description: Seconds between two lines.
    type: int
    default: 10
  timeout_s:
    description: Seconds after which the module is ended and the task fails.
    type: int
    default: 3600
"""

FIRST_POLL_S = 0.2
POLL_S = 1.0
"""The first questions come sooner: most modules that are followed find nothing to do."""
WIDTH = 160
STATUS_MODULE = "ansible.legacy.async_status"


class ActionModule(ActionBase):  # type: ignore[misc]
    """The action behind C(follow)."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module; returns its result, whatever it is."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "module": {"type": "str", "required": True},
                "args": {"type": "dict", "default": {}},
                "label": {"type": "str", "required": True},
                "progress": {"type": "list", "elements": "str", "default": []},
                "interval_s": {"type": "int", "default": 10},
                "timeout_s": {"type": "int", "default": 3600},
            }
        )
        name, arguments = resolve(options["module"], options["args"])
        if self._task.check_mode:
            return dict(self._execute_module(module_name=name, module_args=arguments, task_vars=variables))

        self._task.async_val = options["timeout_s"]
        job = self._execute_module(module_name=name, module_args=arguments, task_vars=variables, wrap_async=True)
        self._task.async_val = 0
        if "ansible_job_id" not in job:
            return dict(job)
        return self._follow(job, options, variables)

    def _follow(self, job: dict[str, Any], options: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        """Ask for the job's result until it is there; print the progress meanwhile."""
        # What the action plugin `async_status` would fill in; the module refuses to look without it.
        asked = {"jid": job["ansible_job_id"], "_async_dir": posixpath.dirname(job["results_file"])}
        began = shown = time.monotonic()
        pause, lost = FIRST_POLL_S, False
        while True:
            time.sleep(pause)
            pause = min(2 * pause, POLL_S)
            try:
                status = self._execute_module(module_name=STATUS_MODULE, module_args=asked, task_vars=variables)
            except AnsibleConnectionFailure as error:
                status = {"finished": False}
                if not lost:
                    why = " ".join(str(error).split())
                    text = f"the connection is lost, the work goes on there, asking again: {why}"
                    self._print(options, time.monotonic() - began, variables, [text])
                lost = True
                self._reset()
            else:
                lost = False
            now = time.monotonic()
            if status.get("finished", True):  # an answer without the key is a failure to ask
                break
            if now - began > options["timeout_s"]:
                # Not raised: an exception would end the play whatever the task's failed_when says.
                return {"failed": True, "msg": f"{options['label']}: not finished after {options['timeout_s']} s"}
            if now - shown >= options["interval_s"] and not lost:
                shown = now
                self._show(options, now - began, variables)
        try:
            self._execute_module(
                module_name=STATUS_MODULE, module_args={**asked, "mode": "cleanup"}, task_vars=variables
            )
        except AnsibleConnectionFailure:
            self._reset()  # a record that stays on the host harms nobody, a lost result does
        result = dict(status)
        result["seconds"] = round(now - began, 1)
        for key in ("ansible_job_id", "results_file", "started", "finished"):
            result.pop(key, None)
        return result

    def _reset(self) -> None:
        """The next question makes a new connection; some plugins would go on with the broken one."""
        with contextlib.suppress(AnsibleError):
            self._connection.reset()

    def _show(self, options: dict[str, Any], seconds: float, variables: dict[str, Any]) -> None:
        """Print the progress, at least one line."""
        lines: list[str] = []
        if options["progress"]:
            with contextlib.suppress(AnsibleConnectionFailure):  # the next question for the job deals with it
                answer = self._execute_module(
                    module_name="ansible.builtin.command",
                    module_args={"argv": options["progress"]},
                    task_vars=variables,
                )
                lines = [line.strip() for line in answer.get("stdout", "").splitlines() if line.strip()]
        self._print(options, seconds, variables, lines or [""])

    def _print(self, options: dict[str, Any], seconds: float, variables: dict[str, Any], lines: list[str]) -> None:
        head = f"  {variables.get('inventory_hostname', '')}  {options['label']}  {seconds:4.0f} s"
        for line in lines:
            Display().display(f"{head}  {line[:WIDTH]}".rstrip())


def resolve(module: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and arguments of the module that runs on the host: `shell` is `command` there."""
    if module in ("shell", "ansible.builtin.shell"):
        words = {key: value for key, value in arguments.items() if key != "cmd"}
        return "ansible.builtin.command", {**words, "_raw_params": arguments["cmd"], "_uses_shell": True}
    return module, arguments
