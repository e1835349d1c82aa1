#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: install packages with apt-get and explain failures."""

from __future__ import annotations

DOCUMENTATION = r"""
module: apt_packages
short_description: Install and remove packages with apt and explain failures
version_added: "0.1.0"
description:
  - Refreshes the package indexes and installs packages with C(apt-get). An index that cannot be read is only a warning
    if the packages can be installed without it, because a host may have sources that do not belong to vllm-edge.
  - Waits for other programs that hold a lock of apt or dpkg. If the lock is not released in time, the module fails and
    names the program.
  - Gives up on a server that does not answer within O(timeout) seconds.
  - Asks apt what it would do first, and fails if there is not enough disk space, or if it would remove packages that
    neither O(absent) nor O(removable) names.
  - apt downloads and checks all packages before dpkg installs the first one. If the module fails before that, nothing
    was changed, and the message says so.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
  - edge.vllm_edge.apt
  - edge.vllm_edge.root
attributes:
  check_mode:
    support: full
    description: In check mode the module asks apt what it would do with the package indexes that the host has.
  diff_mode:
    support: none
    description: The module returns no difference.
options:
  packages:
    description: Packages to install, each as C(name) or C(name=version). A version may end in C(*).
    type: list
    elements: str
    default: []
  absent:
    description: Packages to remove in the same transaction. Without O(packages) their configuration files go, too.
    type: list
    elements: str
    default: []
  removable:
    description: Packages that apt may remove where one of O(packages) takes their place or no longer fits them.
    type: list
    elements: str
    default: []
  purpose:
    description: What the packages are for, for example V(the container toolkit). Used in messages.
    type: str
    required: true
  version_variable:
    description: Name of the variable that sets the version. Used in messages.
    type: str
    default: ''
  repository_variables:
    description: Names of the variables that set the addresses of repositories, by address. Used in messages.
    type: dict
    default: {}
  replace:
    description: Whether apt may change held packages and install older versions.
    type: bool
    default: false
  update:
    description: Whether to refresh the package indexes first.
    type: bool
    default: true
  download_only:
    description: Whether to only download and check the packages, so that a later run can install them without a
      network.
    type: bool
    default: false
seealso:
  - module: edge.vllm_edge.signed_apt_repository
    description: Add the repository that contains the packages.
"""

EXAMPLES = r"""
- name: Install the container toolkit
  edge.vllm_edge.apt_packages:
    packages: [nvidia-container-toolkit=1.18.2-1]
    purpose: the container toolkit
    version_variable: container_runtime_toolkit_version
"""

RETURN = r"""
installed:
  description: Packages that were set up, each with its version.
  returned: success
  type: list
  elements: str
  sample: [nvidia-persistenced 580.178.04-1]
apt:
  description: Lines that C(apt-get) printed.
  returned: on failure, with verbosity 1 or higher
  type: list
  elements: str
"""

import os
import re
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.facts.dpkg import parse_madison
from ..module_utils.vllm_edge.system import apt
from ..module_utils.vllm_edge.system.apt_sources import read_sources


class Packages:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params = module.params
        self.request = apt.Request(
            params["purpose"],
            params["version_variable"],
            params["repository_variables"],
            apt.Limits(params["lock_timeout"], params["timeout"]),
            "installed" if params["packages"] else "removed",
        )
        self.names = [package.split("=")[0] for package in params["packages"]]

    def run(self, command: list[str]) -> tuple[int, str, str]:
        environment = {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
        return self.module.run_command(command, environ_update=environment)

    def offered(self) -> dict[str, list[str]]:
        """Return the versions that the indexes contain.

        Where the branch or version is a part of an unknown package's name, it returns those that the indexes have.
        """
        found = parse_madison(self.run(["apt-cache", "madison", *self.names])[1])
        for name in self.names:
            parts = re.match(r"(.*?-)(\d{3}[\d.]*)(.*)", name)
            if name not in found and parts:
                kind = r"\d{3}\.[\d.]+" if "." in parts[2] else r"\d{3}"
                like = re.compile(f"{re.escape(parts[1])}({kind}){re.escape(parts[3])}")
                names = self.run(["apt-cache", "pkgnames", parts[1]])[1].split()
                numbers = (match[1] for match in map(like.fullmatch, names) if match)
                found[name] = sorted(numbers, key=lambda number: [*map(int, number.split("."))], reverse=True)
        return found

    def foresee(self, command: list[str]) -> str:
        """Return what apt would do. Fails if that removes packages of others, or if the disk space is insufficient."""
        # --assume-no would only answer questions, and apt asks none if it installs exactly what was requested. The lock
        # is not needed, because nothing is written.
        asked = [*command, "--print-uris", "-o", "Debug::NoLocking=1"]
        foretold = apt.apt_get(self.run, asked, self.request.limits).text
        meant = {*self.module.params["absent"], *self.module.params["removable"]}
        if others := [name for name in apt.parse_removals(foretold) if name not in meant]:
            self.module.fail_json(msg=apt.explain_removals(self.request, others))
        free = {}
        for directory in ("/var/cache/apt/archives", "/usr"):
            at = os.path.join(self.module.params["root"], directory.lstrip("/"))
            if not os.path.isdir(at):
                return foretold
            found = os.statvfs(at)
            free[directory] = (os.stat(at).st_dev, found.f_bavail * found.f_frsize)
        if cramped := apt.explain_lack_of_space(self.request, apt.parse_sizes(foretold), free):
            self.module.fail_json(msg=cramped)
        return foretold

    def ensure(self) -> dict[str, Any]:
        params = self.module.params
        update = apt.Outcome(True, "", 0)
        if params["update"] and not self.module.check_mode:
            update = apt.apt_get(self.run, ["update"], self.request.limits)
            if apt.find_lock(update.text):
                self.module.fail_json(msg=apt.explain_failed_install(self.request, update, "", [], {}))
        command = ["install", "--yes", "--no-install-recommends"]
        # Keep configuration files that the operator changed.
        command += ["-o", "Dpkg::Options::=--force-confdef", "-o", "Dpkg::Options::=--force-confold"]
        if params["replace"]:
            command += ["--allow-downgrades", "--allow-change-held-packages"]
        command += [*params["packages"], *(f"{name}-" for name in params["absent"])]
        command += [] if params["packages"] else ["--purge"]
        nothing = r"^Need to get 0 B" if params["download_only"] else r"^0 upgraded, 0 newly installed, 0 to remove"
        foretold = self.foresee(command)
        if self.module.check_mode:
            return {"changed": re.search(nothing, foretold, re.MULTILINE) is None, "installed": []}
        command += ["--download-only"] if params["download_only"] else []
        # Holds where apt's words were not understood.
        command += [] if params["absent"] or params["removable"] else ["--no-remove"]
        outcome = apt.apt_get(self.run, command, self.request.limits)
        sources = read_sources(params["root"])
        if not outcome.ok:
            why = apt.explain_failed_install(self.request, outcome, update.text, sources, self.offered())
            self.module.fail_json(msg=why, **({"apt": outcome.text.splitlines()} if self.module._verbosity else {}))
        if unread := apt.find_failures(update.text):
            purpose = self.request.purpose
            told = apt.describe_failures(unread, sources, self.request.variables, self.request.limits.silence_s)
            self.module.warn(f"{purpose[:1].upper()}{purpose[1:]} could be installed, but {told}")
        return {
            "changed": re.search(nothing, outcome.text, re.MULTILINE) is None,
            "installed": [" ".join(pair) for pair in re.findall(r"^Setting up (\S+) \((\S+)\)", outcome.text, re.M)],
        }


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "default": []},
            "absent": {"type": "list", "elements": "str", "default": []},
            "removable": {"type": "list", "elements": "str", "default": []},
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
        supports_check_mode=True,
    )
    module.exit_json(**Packages(module).ensure())


if __name__ == "__main__":
    main()
