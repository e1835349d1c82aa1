#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: settings merged into Docker's daemon.json, and the daemon brought to them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_daemon_config
short_description: Merges settings into daemon.json and lets the daemon take them
description:
  - Merges O(settings) into the file. Mappings are merged, lists get what they lack, other values are replaced.
    What others wrote stays.
  - dockerd validates the file before it replaces the old one. The daemon is reloaded or, where needed, restarted.
  - A restart that running containers would feel happens only with O(allow_restart); else the module fails before
    it changes anything.
  - File and daemon change together. Where the daemon does not come back with the new file, the old one is restored.
  - CDI is switched on where the engine's version does not have it on by default, or where it was switched off.
attributes:
  check_mode: {support: full, description: Foresees the change and whether the daemon would be reloaded or restarted.}
  diff_mode: {support: full, description: Shows the file.}
options:
  path: {description: The file., type: path, default: /etc/docker/daemon.json}
  settings: {description: What to merge., type: dict, default: {}}
  allow_restart: {description: Whether a restart may touch running containers., type: bool, default: false}
  timeout: {description: Seconds that the daemon may take to answer after a reload or restart., type: int, default: 60}
author:
  - vllm-edge (@vllm-edge)
"""

EXAMPLES = r"""
- name: Keep containers over a restart of the daemon
  docker_daemon_config:
    settings:
      live-restore: true
"""

RETURN = r"""
action:
  description: What the daemon needed; C(none), C(reload), C(restart) or C(reload,restart).
  returned: success
  type: str
version: {description: Version of the engine., returned: success, type: str}
containers: {description: Names of the containers that were running., returned: success, type: list, elements: str}
backup_file: {description: Where the file's old content was kept., returned: changed, type: str}
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.files import sync

# What dockerd takes over on SIGHUP (docs.docker.com, dockerd reference, "Configuration reload behavior").
# "features" is in that list too, but CDI's driver is registered at start only.
RELOADABLE = frozenset(
    {
        "authorization-plugins",
        "debug",
        "default-runtime",
        "insecure-registries",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "registry-mirrors",
        "runtimes",
        "shutdown-timeout",
    }
)
CDI_SINCE = (25, 0)
CDI_DEFAULT_SINCE = (28, 2)


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor number in "Docker version 26.1.5+dfsg1, build a72d7cd"."""
    match = re.search(r"version (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_config(text: str) -> dict[str, Any]:
    """The settings in a daemon.json; an empty file has none."""
    if not text.strip():
        return {}
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError("it is not an object of settings")
    return config


def render(config: dict[str, Any], like: str) -> str:
    """The file's new text, indented as the old one, so that a diff shows what changed and nothing else."""
    indented = re.search(r"^([ \t]+)\S", like, re.MULTILINE)
    return json.dumps(config, indent=indented[1] if indented else 2, ensure_ascii=False) + "\n"


def merge(current: Any, wanted: Any) -> Any:
    """Current settings with the wanted ones in them."""
    if isinstance(current, dict) and isinstance(wanted, dict):
        return {**current, **{key: merge(current.get(key), value) for key, value in wanted.items()}}
    if isinstance(current, list) and isinstance(wanted, list):
        return current + [item for item in wanted if item not in current]
    return wanted


def with_cdi(config: dict[str, Any], version: tuple[int, int]) -> dict[str, Any]:
    """The settings with CDI on: written only where this engine would otherwise have it off."""
    features = config.get("features", {})
    if features.get("cdi", version >= CDI_DEFAULT_SINCE):
        return config
    return merge(config, {"features": {"cdi": True}})  # type: ignore[no-any-return]


def actions(before: dict[str, Any], after: dict[str, Any], info: dict[str, Any]) -> list[str]:
    """What the running daemon needs to have the settings, from the change and from what the daemon says of itself."""
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    live_restore = bool(after.get("live-restore", False))
    behind = live_restore != bool(info.get("LiveRestoreEnabled", False))
    restart = bool(changed - RELOADABLE) or not info.get("CDISpecDirs")
    if not restart:
        return ["reload"] if changed or behind else []
    # Taken over first, live-restore keeps the containers over the restart that follows.
    return ["reload", "restart"] if live_restore and behind else ["restart"]


class Daemon:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.path: str = module.params["path"]

    def run(self, *command: str) -> tuple[int, str, str]:
        code, out, err = self.module.run_command(list(command), environ_update={"LC_ALL": "C"})
        return code, out, err

    def info(self) -> dict[str, Any] | None:
        """What the daemon says of itself; None where it does not run."""
        code, out, _ = self.run("docker", "info", "--format", "{{json .}}")
        try:
            info = json.loads(out)
        except ValueError:
            return None
        return info if code == 0 and isinstance(info, dict) and info.get("ServerVersion") else None

    def containers(self) -> list[str]:
        _, out, _ = self.run("docker", "ps", "--format", "{{.Names}}")
        return sorted(out.split())

    def answers(self, config: dict[str, Any]) -> bool:
        """Whether the daemon came (back) with what is ours in the settings."""
        deadline = time.monotonic() + self.module.params["timeout"]
        while True:
            info = self.info()
            if info and bool(info.get("LiveRestoreEnabled")) == bool(config.get("live-restore", False)):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)

    def write(self, text: str | None) -> None:
        if text is None:
            if os.path.exists(self.path):
                os.unlink(self.path)
            return
        os.makedirs(os.path.dirname(self.path), mode=0o755, exist_ok=True)
        temporary = os.path.join(self.module.tmpdir, "daemon.json")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        self.module.atomic_move(temporary, self.path)
        # Docker does not start with a file that a power cut emptied.
        sync(Path(self.path))
        sync(Path(self.path).parent)

    def validate(self, text: str) -> None:
        temporary = os.path.join(self.module.tmpdir, "daemon-to-validate.json")
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        code, out, err = self.run("dockerd", "--validate", "--config-file", temporary)
        if code != 0:
            said = (err.strip() or out.strip()).replace(temporary, self.path)
            self.module.fail_json(
                msg=f"dockerd refuses the settings that {self.path} would have, so nothing was changed: {said}. "
                f"Correct container_runtime_daemon_options, or what the file has already."
            )

    def journal(self) -> str:
        _, out, _ = self.run("journalctl", "--unit", "docker.service", "--lines", "20", "--output", "cat", "--no-pager")
        errors = [line for line in out.splitlines() if re.search(r"fatal|failed|error|unable", line, re.IGNORECASE)]
        return " ".join((errors or out.splitlines())[-3:])

    def apply(self, needed: list[str], config: dict[str, Any], old: str | None) -> None:
        for action in needed:
            code, _, _ = self.run("systemctl", action, "docker.service")
            if code == 0 and self.answers(config):
                continue
            said = self.journal()
            self.write(old)
            self.run("systemctl", "reset-failed", "docker.service")
            back, _, _ = self.run("systemctl", "restart", "docker.service")
            self.module.fail_json(
                msg=f"Docker did not come back after a {action} with the new {self.path}: {said} -- the old file is in "
                f"place again and Docker {'runs with it' if back == 0 else 'does not run: journalctl -u docker'}. "
                f"An option that is set both in the file and on dockerd's command line (systemctl cat docker.service) "
                f"is a usual cause."
            )

    def ensure(self) -> dict[str, Any]:
        params = self.module.params
        _, out, _ = self.run("dockerd", "--version")
        version = parse_version(out)
        old: str | None = None
        try:
            with open(self.path, encoding="utf-8") as file:
                old = file.read()
        except FileNotFoundError:
            pass
        try:
            before = parse_config(old or "")
        except ValueError as error:
            before = {}
            self.module.fail_json(
                msg=f"{self.path} on the host is not valid: {error}. Docker will not start with it again; "
                f"repair it (dockerd --validate --config-file {self.path} tells the place) and run again. "
                f"Nothing was changed."
            )
        after = with_cdi(merge(before, params["settings"]), version)
        text = render(after, old or "") if after != before else old

        info = self.info()
        containers = self.containers() if info else []
        # A daemon that does not run takes the file when it is started.
        needed = actions(before, after, info) if info else []
        changed = after != before
        if changed and text is not None:
            self.validate(text)
        if "restart" in needed and containers and not params["allow_restart"]:
            fate = "A restart stops them."
            if after.get("live-restore", False):
                fate = "live-restore keeps them, but not the clients attached to them."
            reasons = sorted(key for key in {*before, *after} if before.get(key) != after.get(key)) or ["features"]
            message = (
                f"Docker needs a restart to take over {', '.join(reasons)} in {self.path}, while containers run: "
                f"{', '.join(containers)}. {fate} Nothing was changed: set container_runtime_allow_restart to true "
                f"at a time when that harms nobody."
            )
            if not self.module.check_mode:
                self.module.fail_json(msg=message)
            self.module.warn(message)
        result: dict[str, Any] = {
            "changed": changed or bool(needed),
            "action": ",".join(needed) or "none",
            "version": ".".join(str(part) for part in version),
            "containers": containers,
            "diff": {"before_header": self.path, "after_header": self.path, "before": old or "", "after": text or ""},
        }
        if needed and not changed:
            result["diff"] = {"before": "", "after": "", "prepared": f"docker.service: {' and '.join(needed)}\n"}
        if self.module.check_mode:
            return result
        if changed:
            if old is not None:
                result["backup_file"] = self.module.backup_local(self.path)
            self.write(text)
        self.apply(needed, after, old)
        return result


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "default": "/etc/docker/daemon.json"},
            "settings": {"type": "dict", "default": {}},
            "allow_restart": {"type": "bool", "default": False},
            "timeout": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Daemon(module).ensure())


if __name__ == "__main__":
    main()
