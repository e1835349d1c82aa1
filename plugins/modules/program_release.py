# SPDX-License-Identifier: Apache-2.0
"""Ansible module: manage the releases of the host's program, each in its own directory."""

from __future__ import annotations

DOCUMENTATION = r"""
module: program_release
short_description: Manage the releases of the host's program
version_added: "0.1.0"
description:
  - Returns the directory in which a release of the program C(vllm-edge) is to be built, makes a built release the
    current one, to which the link C(current) leads, or removes old releases.
  - Processes that were started from a release keep using it after another one became current. A release whose build
    was interrupted never becomes current.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  diff_mode:
    description: Shows the link before and after the change, or one line for each path that is removed.
  idempotent:
    description: A second run finds the release current and nothing to remove.
options:
  prefix:
    description: Directory of the program. It contains the directory C(releases) and the link C(current).
    type: path
    required: true
  name:
    description: Name of the release. Releases with the same name have the same content.
    type: str
    required: true
  state:
    description: What to do.
    type: str
    choices:
      known: Only return the directory of the release, or the directory to build it in.
      current: Mark the built release as complete, write it to disk, and make it current by a single rename.
      alone: Remove the other releases that no process uses, except for the previous one.
    default: known
  source:
    description: What the release is made of. With O(state=known) the module fails if the current release is newer.
    type: dict
    required: true
    suboptions:
      version:
        description: Version of the program.
        type: str
        required: true
      committed_s:
        description: Time of the newest commit of the program, in seconds since the epoch. V(0) if it is not known.
        type: int
        required: true
  allow_older:
    description: Whether an older release may replace the current one.
    type: bool
    default: false
  state_directory:
    description: Directory that contains the lock of the switch. The release is not changed while a switch is running.
    type: path
    default: /var/lib/vllm-edge
"""

EXAMPLES = r"""
- name: Make a release current
  edge.vllm_edge.program_release:
    prefix: /opt/vllm-edge
    name: 0f3c5a7be1d2
    source: {version: 0.1.0, committed_s: 1764201600}
    state: current
"""

RETURN = r"""
path:
  description: Directory of the release.
  type: str
  returned: success
whole:
  description: Whether the release is complete and unchanged since it was built. If not, it has to be built.
  type: bool
  returned: with O(state=known) and O(state=alone)
current:
  description: Whether the release is already current.
  type: bool
  returned: with O(state=known) and O(state=alone)
why:
  description: Why the release has to be built. Empty if it is complete.
  type: str
  returned: with O(state=known) and O(state=alone)
removed:
  description: Paths that were (or would be) removed, with V(known) by a task with V(alone). Directories end with C(/).
  type: list
  elements: str
  returned: with O(state=known) and O(state=alone)
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.paths import STATE, HostPaths
from ..module_utils.vllm_edge.releases import Releases, describe_source, flush
from ..module_utils.vllm_edge.switch.journal import Busy, take_lock


def make_current(releases: Releases, module: AnsibleModule) -> dict[str, Any]:
    """Make the release current. Mark it as complete first, unless it is already marked."""
    wanted, former = releases.wanted(module.params["name"]), releases.current
    if not wanted.current and not module.check_mode:
        if not wanted.whole:
            flush(wanted.path)
            releases.finish(wanted.path, module.params["source"])
        with take_lock(HostPaths(state=Path(module.params["state_directory"]))):
            releases.make_current(wanted.path)
    before = {"path": str(releases.link), "src": former and os.path.relpath(former, releases.prefix)}
    after = {"path": str(releases.link), "src": os.path.relpath(wanted.path, releases.prefix)}
    diff = {} if wanted.current else {"before": before, "after": after}
    return {"changed": not wanted.current, "path": str(wanted.path), "diff": diff}


def refuse_older(releases: Releases, module: AnsibleModule) -> None:
    """Fail if the current release is newer than what the controller has; warn if that is not known."""
    newer, own = releases.find_newer(module.params["source"]), describe_source(module.params["source"])
    if newer:
        module.fail_json(
            msg=f"The current release of the program below {releases.prefix} is newer ({newer}) than that of this "
            f"controller ({own}), so another checkout installed it. Nothing was changed. Update this one, or go back "
            "to its release with -e vllm_edge_host_allow_older=true."
        )
    if newer is None:
        module.warn(
            f"The current release of the program below {releases.prefix} is replaced by {own}, and whether that is "
            "older is not known: the release, or this controller's copy of vllm-edge, has no time of a commit."
        )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["known", "current", "alone"], "default": "known"},
            "source": {
                "type": "dict",
                "required": True,
                "options": {
                    "version": {"type": "str", "required": True},
                    "committed_s": {"type": "int", "required": True},
                },
            },
            "allow_older": {"type": "bool", "default": False},
            "state_directory": {"type": "path", "default": STATE},
        },
        supports_check_mode=True,
    )
    prefix = module.params["prefix"]
    releases = Releases(Path(prefix))
    try:
        if module.params["state"] == "current":
            module.exit_json(**make_current(releases, module))
        wanted = releases.wanted(module.params["name"])
        known = {"path": str(wanted.path), "whole": wanted.whole, "current": wanted.current, "why": wanted.why}
        only_known = module.params["state"] == "known"
        if only_known and not wanted.current and not module.params["allow_older"]:
            refuse_older(releases, module)
        removed = releases.remove_others(wanted.path, apply=not (only_known or module.check_mode))
        if only_known:
            module.exit_json(changed=False, removed=removed, **known)
    except Busy as busy:
        module.fail_json(msg=f"The program below {prefix} was not replaced by its new release, which is built. {busy}")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        module.fail_json(
            msg=f"The program below {prefix} cannot be changed to release {module.params['name']}: {reason}."
        )
    before = "".join(f"{path}\n" for path in removed)
    diff = {"before": before, "after": "", "before_header": prefix, "after_header": prefix}
    module.exit_json(changed=bool(removed), removed=removed, diff=diff, **known)


if __name__ == "__main__":
    main()
