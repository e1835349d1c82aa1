# SPDX-License-Identifier: Apache-2.0
"""Ansible module: the host's program in releases, each in a directory of its own."""

from __future__ import annotations

DOCUMENTATION = r"""
module: program_release
short_description: The host's program in releases, each in a directory of its own
description:
  - Says where a release is to be built, makes one that was built the current one, or removes those that are over.
  - What runs from a release goes on with that one. A release that was cut off while it was built is never current.
author: vllm-edge
attributes:
  check_mode:
    description: Says what would be done, and does nothing.
    support: full
  diff_mode:
    description: The link before and after, or one line for each path that is removed.
    support: full
  idempotent:
    description: A second run finds the release current and nothing to remove.
    support: full
options:
  prefix:
    description: Directory of the program. Its C(releases/) holds them, and its link C(current) leads to one of them.
    type: path
    required: true
  name:
    description: Name of the wanted release, which stands for its content.
    type: str
    required: true
  state:
    description:
      - V(known) only returns where the release is, or where it is to be built.
      - V(current) takes what was built there as whole, syncs it and makes it current by one rename.
      - V(alone) removes the others that nothing runs from, except the one before.
    type: str
    choices: [known, current, alone]
    default: known
  state_directory:
    description: Directory with the lock of the switch. No switch runs while another release becomes current.
    type: path
    default: /var/lib/vllm-edge
"""

EXAMPLES = r"""
- name: Look for the release
  program_release:
    prefix: /opt/vllm-edge
    name: 0f3c5a7be1d2
  register: release

- name: Make it current
  program_release:
    prefix: /opt/vllm-edge
    name: 0f3c5a7be1d2
    state: current
"""

RETURN = r"""
path:
  description: Directory of the release.
  type: str
  returned: success
whole:
  description: Whether it is there as it was built. Where it is not, it is to be built.
  type: bool
  returned: success
current:
  description: Whether it is the current one already.
  type: bool
  returned: success
why:
  description: Why it is to be built.
  type: str
  returned: success
removed:
  description: What was, or would be, removed. Directories end with C(/).
  type: list
  elements: str
  returned: with O(state=alone)
"""

import os
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.paths import STATE, HostPaths
from ..module_utils.vllm_edge.releases import Releases, flush
from ..module_utils.vllm_edge.switch.journal import Busy, Lock


def make_current(releases: Releases, module: AnsibleModule) -> dict[str, Any]:
    """Takes what was built as whole where that was not said of it before."""
    wanted, former = releases.wanted(module.params["name"]), releases.current
    if not wanted.current and not module.check_mode:
        if not wanted.whole:
            flush(wanted.path)
            releases.finish(wanted.path)
        with Lock(HostPaths(state=Path(module.params["state_directory"]))):
            releases.make_current(wanted.path)
    before = {"path": str(releases.link), "src": former and os.path.relpath(former, releases.prefix)}
    after = {"path": str(releases.link), "src": os.path.relpath(wanted.path, releases.prefix)}
    diff = {} if wanted.current else {"before": before, "after": after}
    return {"changed": not wanted.current, "path": str(wanted.path), "diff": diff}


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "prefix": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["known", "current", "alone"], "default": "known"},
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
        if module.params["state"] == "known":
            module.exit_json(changed=False, **known)
        removed = releases.remove_others(wanted.path, apply=not module.check_mode)
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
