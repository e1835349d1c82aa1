#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: enable further components of the distribution's archive, with the host's own address and key."""

from __future__ import annotations

DOCUMENTATION = r"""
module: archive_components
short_description: Enable components of the distribution's archive
version_added: "0.1.0"
description:
  - Finds the apt sources of the host that contain the distribution's archive (those with the component C(main) for the
    release, its updates or its security updates). Writes a separate source with the components that they lack, with
    the same address and key. The host's own sources are not changed.
  - apt reads the new source before it is written. A failure therefore does not break C(apt-get update) on the host.
  - Fails if a source of the archive contains its key inline, because another source cannot refer to such a key.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes
  - edge.vllm_edge.apt
  - edge.vllm_edge.root
attributes:
  check_mode:
    support: full
    description: In check mode nothing is written and nothing is downloaded.
  diff_mode:
    support: full
    description: Shows the source before and after the change.
  idempotent:
    support: full
options:
  name:
    description: Base name of the file that is written below C(/etc/apt/sources.list.d).
    type: str
    required: true
  release:
    description: Code name of the distribution's release, for example V(trixie).
    type: str
    required: true
  components:
    description: Components that the host needs.
    type: list
    elements: str
    required: true
  refresh:
    description: Whether to refresh the host's package indexes even if nothing changed.
    type: bool
    default: false
seealso:
  - module: edge.vllm_edge.signed_apt_repository
    description: Add a repository of another vendor.
  - module: edge.vllm_edge.apt_packages
    description: Install packages from the components.
"""

EXAMPLES = r"""
- name: Enable non-free
  edge.vllm_edge.archive_components:
    name: vllm-edge-nvidia-driver
    release: trixie
    components: [contrib, non-free, non-free-firmware]
"""

RETURN = r"""
added:
  description: What the written source adds, each entry as C(address suite components).
  returned: success
  type: list
  elements: str
  sample: ["http://deb.debian.org/debian trixie contrib non-free non-free-firmware"]
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system import apt

HEADER = "# Managed by Ansible (vllm-edge, role nvidia_driver): changes made here by hand are lost.\n"


def lacking(sources: Sequence[apt.Source], release: str, components: Sequence[str]) -> list[apt.Source]:
    """Return the components that the host's own sources of the archive lack, with their address, suite and key."""
    suites = (release, f"{release}-updates", f"{release}-security")
    # Repositories of Docker and other vendors also have suites with these names, but no component main.
    archive: dict[tuple[str, str], apt.Source] = {}
    for source in sources:
        if source.suite in suites and "main" in source.components:
            archive.setdefault((source.uri.rstrip("/"), source.suite), source)
    found = []
    for (uri, suite), source in archive.items():
        have = {
            component
            for other in sources
            if (other.uri.rstrip("/"), other.suite) == (uri, suite)
            for component in other.components
        }
        if missing := tuple(component for component in components if component not in have):
            found.append(apt.Source(source.uri, suite, source.path, missing, source.signed_by))
    return found


def render(sources: Sequence[apt.Source]) -> str:
    """Render the source. Each stanza uses the key of the host's own source, because apt refuses a second one."""
    stanzas = []
    for source in sources:
        fields = {
            "Types": "deb",
            "URIs": source.uri,
            "Suites": source.suite,
            "Components": " ".join(source.components),
            **({"Signed-By": source.signed_by} if source.signed_by else {}),
        }
        stanzas.append("".join(f"{name}: {value}\n" for name, value in fields.items()))
    return HEADER + "\n".join(stanzas) if stanzas else ""


class Components:
    """The source on one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.root: str = module.params["root"]
        self.path = f"/etc/apt/sources.list.d/{module.params['name']}.sources"
        self.limits = apt.Limits(module.params["lock_timeout"], module.params["timeout"])

    def at(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def run(self, command: list[str]) -> tuple[int, str, str]:
        return self.module.run_command(command, environ_update={"LC_ALL": "C"})

    def update(self, *options: str) -> apt.Outcome:
        words = [word for option in options for word in ("-o", option)]
        return apt.apt_get(self.run, ["update", *words], self.limits)

    def verify(self, text: str, added: Sequence[apt.Source]) -> None:
        """Let apt read only this source, from a directory that the host's apt does not use. apt keeps the indexes."""
        scratch = tempfile.mkdtemp(prefix="vllm-edge-apt-")
        try:
            os.chmod(scratch, 0o755)
            trial = os.path.join(scratch, os.path.basename(self.path))
            with open(trial, "w", encoding="utf-8") as file:
                file.write(text)
            alone = (f"Dir::Etc::sourcelist={trial}", "Dir::Etc::sourceparts=-", "APT::Get::List-Cleanup=0")
            outcome = self.update(*alone, "APT::Update::Error-Mode=any")
        finally:
            shutil.rmtree(scratch)
        if not outcome.ok:
            key = added[0].signed_by or "the keys that apt trusts"
            self.module.fail_json(
                msg=apt.explain_unread_repository(added[0].uri, key, added[0].path, outcome, self.limits)
            )

    def ensure(self) -> dict[str, Any]:
        params = self.module.params
        others = [source for source in apt.read_sources(self.root) if source.path != self.at(self.path)]
        added = lacking(others, params["release"], params["components"])
        inside = [source.path for source in added if "BEGIN PGP" in source.signed_by]
        if inside:
            self.module.fail_json(
                msg=f"{inside[0]} has the key of its archive in itself, where no other source can name it. Nothing was "
                f"changed: add {' '.join(params['components'])} to its components there, and run again."
            )
        text = render(added)
        try:
            with open(self.at(self.path), encoding="utf-8") as file:
                before = file.read()
        except FileNotFoundError:
            before = ""
        changed = text != before
        result = {
            "changed": changed,
            "added": [f"{source.uri} {source.suite} {' '.join(source.components)}" for source in added],
            "diff": {"before_header": self.path, "after_header": self.path, "before": before, "after": text},
        }
        if self.module.check_mode:
            return result
        if changed and text:
            self.verify(text, added)
        if changed:
            self.write(text)
        if changed or params["refresh"]:
            # An index that cannot be read is reported when a package from it is installed.
            self.update()
        return result

    def write(self, text: str) -> None:
        target = self.at(self.path)
        if not text:
            os.unlink(target)
            return
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        temporary = os.path.join(self.module.tmpdir, os.path.basename(target))
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        self.module.atomic_move(temporary, target)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "release": {"type": "str", "required": True},
            "components": {"type": "list", "elements": "str", "required": True},
            "refresh": {"type": "bool", "default": False},
            "root": {"type": "path", "default": "/"},
            "timeout": {"type": "int", "default": 20},
            "lock_timeout": {"type": "int", "default": 300},
        },
        supports_check_mode=True,
    )
    module.exit_json(**Components(module).ensure())


if __name__ == "__main__":
    main()
