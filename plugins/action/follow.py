# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: run a long module in the background of the host and print its progress."""

from __future__ import annotations

import contextlib
import json
import posixpath
import re
import shlex
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

FIRST_POLL_S = 0.2
POLL_S = 1.0
"""The first polls follow each other faster, because most modules have nothing to do."""
WIDTH = 160
SECRETS_DIRECTORY = "/run/vllm-edge-secrets"
"""On the host: a file system in memory, so that nothing is on a disk, and that nothing survives a boot."""
STATUS_MODULE = "ansible.legacy.async_status"


class ActionModule(ActionBase):  # type: ignore[misc]
    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        variables = task_vars or {}
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "module": {"type": "str", "required": True},
                "args": {"type": "dict", "default": {}},
                "secrets": {"type": "dict", "no_log": True},
                "label": {"type": "str", "required": True},
                "progress": {"type": "list", "elements": "str", "default": []},
                "interval_s": {"type": "int", "default": 10},
                "timeout_s": {"type": "int", "default": 3600},
            }
        )
        name, arguments = resolve(options["module"], options["args"])
        if options["secrets"] is None:
            return self._run_module(name, arguments, options, variables)
        path = f"{SECRETS_DIRECTORY}/{re.sub('[^A-Za-z0-9._-]', '-', options['label'])}.secrets"
        # Asynchronous modules are files with their arguments, and `environment` is part of a command line.
        if error := self._hand_over(path, json.dumps(options["secrets"])):
            return {"failed": True, "msg": f"{options['label']}: {path} cannot be written on the host: {error}"}
        try:
            return self._run_module(name, {**arguments, "secrets_path": path}, options, variables)
        finally:
            # The module has removed it, unless it did not start.
            with contextlib.suppress(AnsibleConnectionFailure):
                self._low_level_execute_command(f"rm -f {shlex.quote(path)}")

    def _hand_over(self, path: str, text: str) -> str:
        """Write a file on the host that only its user may read, through the connection; return an error or nothing."""
        place, file = shlex.quote(posixpath.dirname(path)), shlex.quote(path)
        # The directory belongs to the user of the module and nobody else may write to it, or it is not used.
        command = (
            f"umask 077 && {{ mkdir {place} 2>/dev/null || true; }} && test ! -L {place} && test -O {place} && "
            f"chmod 0700 {place} && rm -f {file} && cat >{file}"
        )
        done = self._low_level_execute_command(command, in_data=text.encode())
        said = done.get("stderr") or done.get("stdout") or f"status {done['rc']}"
        return "" if done["rc"] == 0 else str(said).strip()

    def _run_module(
        self, name: str, arguments: dict[str, Any], options: dict[str, Any], variables: dict[str, Any]
    ) -> dict[str, Any]:
        if self._task.check_mode:
            return dict(self._execute_module(module_name=name, module_args=arguments, task_vars=variables))

        self._task.async_val = options["timeout_s"]
        job = self._execute_module(module_name=name, module_args=arguments, task_vars=variables, wrap_async=True)
        self._task.async_val = 0
        if "ansible_job_id" not in job:
            return dict(job)
        return self._follow(job, options, variables)

    def _follow(self, job: dict[str, Any], options: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
        # The action plugin `async_status` would add this option. The module fails without it.
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
            if status.get("finished", True):  # the key is missing if the job could not be polled
                break
            if now - began > options["timeout_s"]:
                # An exception would end the play in spite of the task's failed_when.
                return {"failed": True, "msg": f"{options['label']}: not finished after {options['timeout_s']} s"}
            if now - shown >= options["interval_s"] and not lost:
                shown = now
                self._show(options, now - began, variables)
        try:
            self._low_level_execute_command(f"rm -f {shlex.quote(job['results_file'])}")
        except AnsibleConnectionFailure:
            self._reset()  # a leftover file on the host is harmless, a lost result is not
        ours = ("ansible_job_id", "results_file", "started", "finished")
        return {**{key: value for key, value in status.items() if key not in ours}, "seconds": round(now - began, 1)}

    def _reset(self) -> None:
        """Make the next poll open a new connection. Some connection plugins would reuse the broken one."""
        with contextlib.suppress(AnsibleError):
            self._connection.reset()

    def _show(self, options: dict[str, Any], seconds: float, variables: dict[str, Any]) -> None:
        lines: list[str] = []
        if options["progress"]:
            with contextlib.suppress(AnsibleConnectionFailure):  # the next poll handles it
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
            plain = "".join(one if one.isprintable() else " " for one in line[:WIDTH])
            Display().display(f"{head}  {plain}".rstrip())


def resolve(module: str, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of the module that runs on the host. `shell` is run as `command`."""
    if module in ("shell", "ansible.builtin.shell"):
        words = {key: value for key, value in arguments.items() if key != "cmd"}
        return "ansible.builtin.command", {**words, "_raw_params": arguments["cmd"], "_uses_shell": True}
    return module, arguments
