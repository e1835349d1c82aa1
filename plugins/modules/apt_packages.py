#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: packages by apt, with failures that say what an operator can do."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_packages
short_description: Installs packages by apt and explains why it could not
description:
  - Reads the indexes, then installs the packages with C(apt-get). An index that cannot be read is a warning where the
    packages can be installed all the same, since a host has sources of other people too.
  - Waits for other programs that hold a lock of apt or dpkg, and names the one that held it too long.
  - A server that does not answer is given up after O(timeout).
  - Asks apt first how much room the packages take, and refuses where the disk has too little.
  - apt fetches and checks all packages before dpkg touches the first one. A failure before that changed nothing, and
    says so.
attributes:
  check_mode:
    support: none
    description: The roles say what would be installed.
  diff_mode:
    support: none
options:
  packages:
    description: Packages, each as C(name) or C(name=version); a version may end in C(*).
    type: list
    elements: str
    required: true
  absent: {description: Packages to remove in the same step., type: list, elements: str, default: []}
  purpose: {description: What the packages make up; for messages., type: str, required: true}
  version_variable: {description: Variable that chooses the version; for messages., type: str, default: ''}
  repository_variables: {description: Variables that hold addresses, by address; for messages., type: dict, default: {}}
  replace: {description: Whether held packages may change and versions may go down., type: bool, default: false}
  update: {description: Whether to read the indexes first., type: bool, default: true}
  download_only:
    description: Whether to fetch and check the packages only, for a later run that installs them without a network.
    type: bool
    default: false
  lock_timeout: {description: Seconds to wait for another apt or dpkg to finish., type: int, default: 300}
  timeout: {description: Seconds that a server may be silent., type: int, default: 20}
  root: {description: Directory that holds C(etc); not V(/) only in tests., type: path, default: /}
author:
  - vllm-edge (@vllm-edge)
"""

EXAMPLES = r"""
- name: Install the container toolkit
  apt_packages:
    packages: [nvidia-container-toolkit=1.18.2-1]
    purpose: the container toolkit
    version_variable: container_runtime_toolkit_version
"""

RETURN = r"""
installed:
  description: Packages that were set up, with their versions.
  returned: success
  type: list
  elements: str
  sample: [nvidia-persistenced 580.178.04-1]
"""

import os
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system import apt


class Packages:
    """Packages on one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params = module.params
        self.request = apt.Request(
            params["purpose"],
            params["version_variable"],
            params["repository_variables"],
            apt.Limits(params["lock_timeout"], params["timeout"]),
        )
        self.names = [package.split("=")[0] for package in params["packages"]]

    def run(self, command: list[str]) -> tuple[int, str, str]:
        environment = {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        return self.module.run_command(command, environ_update=environment)

    def offered(self) -> dict[str, list[str]]:
        """What the indexes have of the packages; of a name with a version in it, which such names there are."""
        found = apt.parse_madison(self.run(["apt-cache", "madison", *self.names])[1])
        for name in self.names:
            family = re.match(r"(.*-)\d", name)
            if name not in found and family:
                found[name] = sorted(self.run(["apt-cache", "pkgnames", family[1]])[1].split())
        return found

    def cramped(self, command: list[str]) -> str:
        """Why there is too little room; empty where there is enough, or where apt foretells nothing."""
        # Not --assume-no, which only answers questions: apt asks none where it installs just what it was told. Nothing
        # is written, so nobody's lock has to be waited for.
        asked = [*command, "--print-uris", "-o", "Debug::NoLocking=1"]
        foretold = apt.apt_get(self.run, asked, self.request.limits)
        free = {}
        for directory in ("/var/cache/apt/archives", "/usr"):
            at = os.path.join(self.module.params["root"], directory.lstrip("/"))
            if not os.path.isdir(at):
                return ""
            found = os.statvfs(at)
            free[directory] = (os.stat(at).st_dev, found.f_bavail * found.f_frsize)
        return apt.no_room(self.request.purpose, apt.sizes(foretold.text), free)

    def ensure(self) -> dict[str, Any]:
        params = self.module.params
        update = apt.Outcome(True, "", 0)
        if params["update"]:
            update = apt.apt_get(self.run, ["update"], self.request.limits)
            if apt.find_lock(update.text):
                self.module.fail_json(msg=apt.why_not_installed(self.request, update, "", [], {}))
        command = ["install", "--yes", "--no-install-recommends"]
        # A changed file of configuration stays as the operator left it.
        command += ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        if params["replace"]:
            command += ["--allow-downgrades", "--allow-change-held-packages"]
        command += [*params["packages"], *(f"{name}-" for name in params["absent"])]
        if cramped := self.cramped(command):
            self.module.fail_json(msg=cramped)
        command += ["--download-only"] if params["download_only"] else []
        outcome = apt.apt_get(self.run, command, self.request.limits)
        sources = apt.read_sources(params["root"])
        if not outcome.ok:
            why = apt.why_not_installed(self.request, outcome, update.text, sources, self.offered())
            self.module.fail_json(msg=why, **({"apt": outcome.text.splitlines()} if self.module._verbosity else {}))
        if unread := apt.find_failures(update.text):
            purpose = self.request.purpose
            told = apt.describe(unread, sources, self.request.variables, self.request.limits.silence_s)
            self.module.warn(f"{purpose[:1].upper()}{purpose[1:]} could be installed, but {told}")
        nothing = r"^Need to get 0 B" if params["download_only"] else r"^0 upgraded, 0 newly installed, 0 to remove"
        return {
            "changed": re.search(nothing, outcome.text, re.MULTILINE) is None,
            "installed": [" ".join(pair) for pair in re.findall(r"^Setting up (\S+) \((\S+)\)", outcome.text, re.M)],
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "required": True},
            "absent": {"type": "list", "elements": "str", "default": []},
            "purpose": {"type": "str", "required": True},
            "version_variable": {"type": "str", "default": ""},
            "repository_variables": {"type": "dict", "default": {}},
            "replace": {"type": "bool", "default": False},
            "update": {"type": "bool", "default": True},
            "download_only": {"type": "bool", "default": False},
            "lock_timeout": {"type": "int", "default": 300},
            "timeout": {"type": "int", "default": 20},
            "root": {"type": "path", "default": "/"},
        },
    )
    module.exit_json(**Packages(module).ensure())


if __name__ == "__main__":
    main()
