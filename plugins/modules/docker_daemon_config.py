#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: merge settings into Docker's daemon.json and reload or restart the daemon."""

from __future__ import annotations

DOCUMENTATION = r"""
module: docker_daemon_config
short_description: Manage settings in Docker's daemon.json
version_added: "0.1.0"
description:
  - Merges O(settings) into the file. Mappings are merged, lists are extended by the items that they lack, and other
    values are replaced. All other settings in the file are kept.
  - Enables CDI if the installed version of Docker does not enable it by default, or if it was disabled.
  - C(dockerd --validate) checks the new file before it replaces the old one. The daemon is then reloaded or, if
    necessary, restarted.
  - If a restart is necessary while containers are running, the module fails before it changes anything, unless
    O(allow_restart) is set.
  - If the daemon does not come up with the new file, the old file is restored and the module fails. Docker is restarted
    for that only if it was restarted before, or if it no longer runs.
  - On a node of a swarm C(live-restore) is taken out, with a warning, because Docker starts no such node with it.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  check_mode:
    description: In check mode the module predicts the change and whether the daemon would be reloaded or restarted. A
      restart that O(allow_restart) does not permit is a warning.
  diff_mode:
    description: Shows the file before and after the change.
options:
  path:
    description: Path of the file.
    type: path
    default: /etc/docker/daemon.json
  settings:
    description: Settings to merge into the file.
    type: dict
    default: {}
  allow_restart:
    description: Whether Docker may be restarted while containers are running.
    type: bool
    default: false
  timeout:
    description: Number of seconds that the daemon may take to answer after a reload or restart.
    type: int
    default: 60
seealso:
  - module: edge.vllm_edge.host_facts
    description: Gather the state of Docker and CDI.
"""

EXAMPLES = r"""
- name: Keep containers running when the daemon restarts
  edge.vllm_edge.docker_daemon_config:
    settings:
      live-restore: true
"""

RETURN = r"""
action:
  description: What was (or would be) done to the daemon. V(none), V(reload), V(restart) or V(reload,restart).
  returned: success
  type: str
version:
  description: Major and minor version of the Docker Engine.
  returned: success
  type: str
  sample: "28.2"
containers:
  description: Names of the containers that were running.
  returned: success
  type: list
  elements: str
backup_file:
  description: Path of the backup of the old file.
  returned: when the file existed and was changed
  type: str
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.docker import locate_swarm_state
from ..module_utils.vllm_edge.system.files import sync
from ..module_utils.vllm_edge.text import printable

# Options that dockerd reloads on SIGHUP (docs.docker.com, dockerd reference, "Configuration reload behavior").
# That list contains "features", too, but dockerd only registers the CDI driver at start.
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
    """Return the major and minor version from a text such as "Docker version 26.1.5+dfsg1, build a72d7cd"."""
    match = re.search(r"version (\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_config(text: str) -> dict[str, Any]:
    """Return the settings in a daemon.json. An empty file contains none."""
    if not text.strip():
        return {}
    config = json.loads(text)
    if not isinstance(config, dict):
        raise ValueError("it is not an object of settings")
    return config


def render(config: dict[str, Any], like: str) -> str:
    """Render the file with the indentation of the old one, so that a diff only shows what changed."""
    indented = re.search(r"^([ \t]+)\S", like, re.MULTILINE)
    return json.dumps(config, indent=indented[1] if indented else 2, ensure_ascii=False) + "\n"


def merge(current: Any, wanted: Any) -> Any:
    if isinstance(current, dict) and isinstance(wanted, dict):
        return {**current, **{key: merge(current.get(key), value) for key, value in wanted.items()}}
    if isinstance(current, list) and isinstance(wanted, list):
        return current + [item for item in wanted if item not in current]
    return wanted


def with_cdi(config: dict[str, Any], version: tuple[int, int]) -> dict[str, Any]:
    """Return the settings with CDI enabled. Nothing is added if this version of Docker enables it by default."""
    features = config.get("features", {})
    if features.get("cdi", version >= CDI_DEFAULT_SINCE):
        return config
    return merge(config, {"features": {"cdi": True}})  # type: ignore[no-any-return]


def actions(before: dict[str, Any], after: dict[str, Any], info: dict[str, Any]) -> list[str]:
    """Return the actions with which the running daemon adopts the settings, from the change and from docker info."""
    changed = {*compare(before, after)}
    live_restore = bool(after.get("live-restore", False))
    behind = live_restore != bool(info.get("LiveRestoreEnabled", False))
    restart = bool(changed - RELOADABLE) or not info.get("CDISpecDirs")
    if not restart:
        return ["reload"] if changed or behind else []
    # After a reload with live-restore the containers keep running during the restart that follows.
    return ["reload", "restart"] if live_restore and behind else ["restart"]


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(key for key in {*before, *after} if before.get(key) != after.get(key))


class Daemon:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.path: str = module.params["path"]

    def run(self, *command: str) -> tuple[int, str, str]:
        code, out, err = self.module.run_command(list(command), environ_update={"LC_ALL": "C"})
        return code, out, printable(err)

    def info(self) -> dict[str, Any] | None:
        """Return the output of docker info. None if the daemon is not running."""
        code, out, _ = self.run("docker", "info", "--format", "{{json .}}")
        try:
            info = json.loads(out)
        except ValueError:
            return None
        return info if code == 0 and isinstance(info, dict) and info.get("ServerVersion") else None

    def is_in_swarm(self, info: dict[str, Any] | None, config: dict[str, Any]) -> bool:
        """Return whether the host is a node of a swarm; one whose daemon is stopped is known by the node's state."""
        if info is None:
            return os.path.exists(locate_swarm_state(config))
        return bool((info.get("Swarm") or {}).get("LocalNodeState", "inactive") != "inactive")

    def containers(self) -> list[str]:
        _, out, _ = self.run("docker", "ps", "--format", "{{.Names}}")
        return sorted(out.split())

    def answers(self, config: dict[str, Any]) -> bool:
        """Wait until the daemon runs with the wanted live-restore. Return whether it does."""
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
        # Docker does not start with a file that a power failure truncated.
        sync(Path(self.path))
        sync(Path(self.path).parent)

    def read(self) -> tuple[str | None, dict[str, Any]]:
        """Return the text of the file, None if there is none, and the settings in it."""
        try:
            text = Path(self.path).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None, {}
        try:
            return text, parse_config(text)
        except ValueError as error:
            self.module.fail_json(
                msg=f"{self.path} on the host is not valid: {error}. Docker will not start with it again; "
                f"repair it (dockerd --validate --config-file {self.path} tells the place) and run again. "
                f"Nothing was changed."
            )

    def validate(self, text: str) -> None:
        """Fail if dockerd refuses the settings."""
        temporary = Path(self.module.tmpdir, "daemon-to-validate.json")
        temporary.write_text(text, encoding="utf-8")
        code, out, err = self.run("dockerd", "--validate", "--config-file", str(temporary))
        if code != 0:
            said = (err.strip() or out.strip()).replace(str(temporary), self.path)
            self.module.fail_json(
                msg=f"dockerd refuses the settings that {self.path} would have, so nothing was changed: {said}. "
                f"Correct container_runtime_daemon_options, or what the file has already."
            )

    def check_restart(self, containers: list[str], reasons: list[str], live_restore: bool) -> None:
        """Fail if a restart is not allowed while these containers run. In check mode this is a warning."""
        if not containers or self.module.params["allow_restart"]:
            return
        fate = "live-restore keeps them, but not the clients attached to them." if live_restore else ""
        message = (
            f"Docker needs a restart to take over {', '.join(reasons)} in {self.path}, while containers run: "
            f"{', '.join(containers)}. {fate or 'A restart stops them.'} Nothing was changed: set "
            f"container_runtime_allow_restart to true at a time when that harms nobody."
        )
        if not self.module.check_mode:
            self.module.fail_json(msg=message)
        self.module.warn(message)

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
            # A daemon that refused a reload runs on: a restart would end other people's containers.
            runs_on = action == "reload" and self.info() is not None
            self.run("systemctl", "reset-failed", "docker.service")
            back, _, _ = self.run("systemctl", "reload" if runs_on else "restart", "docker.service")
            failed = "did not take over" if runs_on else f"did not come back after a {action} with"
            self.module.fail_json(
                msg=f"Docker {failed} the new {self.path}: {said} -- the old file is in "
                f"place again and Docker {'runs with it' if back == 0 else 'does not run: journalctl -u docker'}. "
                f"An option that is set both in the file and on dockerd's command line (systemctl cat docker.service) "
                f"is a usual cause."
            )

    def diff(self, before: str, after: str, needed: list[str]) -> dict[str, str]:
        if needed and before == after:
            return {"before": "", "after": "", "prepared": f"docker.service: {' and '.join(needed)}\n"}
        return {"before_header": self.path, "after_header": self.path, "before": before, "after": after}

    def ensure(self) -> dict[str, Any]:
        version = parse_version(self.run("dockerd", "--version")[1])
        old, before = self.read()
        after = with_cdi(merge(before, self.module.params["settings"]), version)
        info = self.info()
        if after.get("live-restore") and self.is_in_swarm(info, after):
            del after["live-restore"]
            self.module.warn(
                "This host is a node of a swarm (docker info: Swarm), and Docker starts no node with live-restore, so "
                f"it is left out of {self.path}: a restart of Docker ends all containers, and engines start again "
                "after it. Where no swarm is needed, 'docker swarm leave' and another run bring it."
            )
        changed = compare(before, after)
        text = render(after, old or "") if changed else old or ""
        if changed:
            self.validate(text)
        # A stopped daemon reads the file when it is started.
        needed, containers = (actions(before, after, info), self.containers()) if info else ([], [])
        if "restart" in needed:
            self.check_restart(containers, changed or ["features"], bool(after.get("live-restore", False)))
        result: dict[str, Any] = {
            "changed": bool(changed or needed),
            "action": ",".join(needed) or "none",
            "version": ".".join(str(part) for part in version),
            "containers": containers,
            "diff": self.diff(old or "", text, needed),
        }
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
