# SPDX-License-Identifier: Apache-2.0
"""Ansible module: remove files of vllm-edge below a directory, and keep everything else."""

from __future__ import annotations

DOCUMENTATION = r"""
module: remove_owned
short_description: Remove files of vllm-edge from a directory
version_added: "0.1.0"
description:
  - Removes the files and directories that match the given patterns, and the directory itself if it is then empty.
  - Everything else is kept and returned as RV(left), with the reason.
  - Links are removed but never followed, and other file systems are not entered.
  - Directories that belong to the system, such as C(/etc), are refused.
author:
  - vllm-edge contributors
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
    description: Shows one line for each path that is (or would be) removed.
  idempotent:
    support: full
    description: A second run finds nothing to remove.
options:
  path:
    description: The directory.
    type: path
    required: true
  inside:
    description: Directory that must contain O(path), directly or through a link in it. Otherwise O(path) is refused.
    type: path
  files:
    description: Files and links to remove, as patterns relative to O(path). C(*) does not match C(/).
    type: list
    elements: str
    default: []
  names:
    description: Files and links to remove, as literal names relative to O(path). C(*) has no special meaning.
    type: list
    elements: str
    default: []
  trees:
    description: Directories to remove with all their contents, as patterns relative to O(path).
    type: list
    elements: str
    default: []
  uid:
    description: Numeric id of a user. If it is set, only what belongs to this user is removed from O(trees).
    type: int
  keep:
    description: Paths that belong to vllm-edge and are kept, as patterns relative to O(path).
    type: list
    elements: str
    default: []
  gone:
    description: Paths that are treated as absent, because an earlier task removed them or would have in check mode.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Remove the program and its environment
  edge.vllm_edge.remove_owned:
    path: /opt/vllm-edge
    files:
      - current
    trees:
      - releases/*
"""

RETURN = r"""
removed:
  description: Paths that were (or would be) removed. Directories end with C(/).
  type: list
  elements: str
  returned: success
kept:
  description: Paths that were kept because of O(keep).
  type: list
  elements: str
  returned: success
left:
  description: Paths that do not belong to vllm-edge, each with the reason.
  type: dict
  returned: success
refused:
  description: V(true) if O(path) was refused. Nothing was removed.
  returned: when O(path) was refused
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
