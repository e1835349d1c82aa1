# SPDX-License-Identifier: Apache-2.0
"""Ansible module: remove what is ours below a directory, and nothing else."""

from __future__ import annotations

DOCUMENTATION = r"""
module: remove_owned
short_description: Remove what is ours below a directory, and nothing else
description:
  - Removes files and directories that patterns name, and the directory itself where nothing is left in it.
  - Everything else stays and is returned as RV(left), with the reason.
  - No link is followed, and no other file system is entered.
  - Directories of the system are refused.
author: vllm-edge
attributes:
  check_mode:
    description: Says what would be removed, and removes nothing.
    support: full
  diff_mode:
    description: One line for each path that is, or would be, removed.
    support: full
  idempotent:
    description: A second run finds nothing to remove.
    support: full
options:
  path:
    description: The directory.
    type: path
    required: true
  inside:
    description: Directory that O(path) must lie in, or below a link in it; one that does not is refused.
    type: path
  files:
    description: Files and links that are ours, as patterns relative to O(path). C(*) stays within one name.
    type: list
    elements: str
    default: []
  names:
    description: The same by their very names, in which C(*) means itself.
    type: list
    elements: str
    default: []
  trees:
    description: Directories that are ours with everything in them, as patterns.
    type: list
    elements: str
    default: []
  uid:
    description: Where it is given, only what belongs to this user is ours in O(trees).
    type: int
  keep:
    description: What is ours and stays, as patterns.
    type: list
    elements: str
    default: []
  gone:
    description: Paths that count as not there, as an earlier step has removed them, or would have in check mode.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Remove the program and its environment
  remove_owned:
    path: /opt/vllm-edge
    files:
      - current
    trees:
      - releases/*
"""

RETURN = r"""
removed:
  description: What was, or would be, removed. Directories end with C(/).
  type: list
  elements: str
  returned: success
kept:
  description: What is ours and stays, as O(keep) says.
  type: list
  elements: str
  returned: success
left:
  description: What is not ours, and why it is thought so.
  type: dict
  returned: success
refused:
  description: The path cannot have been meant, and nothing was removed.
  returned: when it was refused
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.removal import Owned, RemovalError, remove


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "inside": {"type": "path"},
            "files": {"type": "list", "elements": "str", "default": []},
            "names": {"type": "list", "elements": "str", "default": []},
            "trees": {"type": "list", "elements": "str", "default": []},
            "uid": {"type": "int"},
            "keep": {"type": "list", "elements": "str", "default": []},
            "gone": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    owned = Owned(given["files"], given["names"], given["trees"], given["uid"], given["keep"])
    try:
        result = remove(given["path"], owned, inside=given["inside"], gone=given["gone"], apply=not module.check_mode)
    except RemovalError as error:
        module.fail_json(msg=str(error), refused=True)
    except OSError as error:
        module.fail_json(msg=f"{given['path']} could not be removed: {error}. What was removed before stays removed.")
    before = "".join(f"{path}\n" for path in result.removed)
    module.exit_json(
        changed=bool(result.removed),
        removed=result.removed,
        kept=result.kept,
        left=result.left,
        diff={"before": before, "after": "", "before_header": given["path"], "after_header": given["path"]},
    )


if __name__ == "__main__":
    main()
