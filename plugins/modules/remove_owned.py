# SPDX-License-Identifier: Apache-2.0
"""Ansible module: remove files and directories of vllm-edge, and the directories around them if they are empty."""

from __future__ import annotations

DOCUMENTATION = r"""
module: remove_owned
short_description: Remove files and directories of vllm-edge
version_added: "0.1.0"
description:
  - Removes the given files and directories, and then the directories around them in which nothing else is left.
  - Unlike M(ansible.builtin.file), refuses directories of the system, such as C(/etc), leaves mounted file systems
    alone, and lists what it removed and what somebody else put into the directories.
  - Links are removed but never followed.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
options:
  paths:
    description: Absolute paths of files, links and directories. A directory is removed with everything in it.
    type: list
    elements: str
    default: []
  directories:
    description: Directories that are removed if nothing else is in them. What else is in them is returned as RV(left).
    type: list
    elements: str
    default: []
  keep:
    description: Paths in O(directories) that stay and are not returned as RV(left).
    type: list
    elements: str
    default: []
  inside:
    description: Directory that must contain all paths, directly or through a link in it. Otherwise they are refused.
    type: path
  gone:
    description: Paths that are treated as absent, because an earlier task removed them or would have in check mode.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Remove the program and its environment
  edge.vllm_edge.remove_owned:
    paths:
      - /opt/vllm-edge/current
      - /opt/vllm-edge/releases
    directories:
      - /opt/vllm-edge
"""

RETURN = r"""
removed:
  description: Paths that were (or would be) removed. Directories end with C(/).
  type: list
  elements: str
  returned: success
left:
  description: Paths that stay, each with the reason.
  type: dict
  returned: success
refused:
  description: V(true) if a path was refused. Nothing was removed.
  returned: when a path was refused
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.removal import RemovalError, remove


def main() -> None:
    lists = ("paths", "directories", "keep", "gone")
    module = AnsibleModule(
        argument_spec={name: {"type": "list", "elements": "str", "default": []} for name in lists}
        | {"inside": {"type": "path"}},
        supports_check_mode=True,
    )
    try:
        result = remove(**module.params, apply=not module.check_mode)
    except RemovalError as error:
        module.fail_json(msg=str(error), refused=True)
    except OSError as error:
        module.fail_json(msg=f"Not everything could be removed: {error}. What was removed before stays removed.")
    before = "".join(f"{path}\n" for path in result.removed)
    module.exit_json(
        changed=bool(result.removed), removed=result.removed, left=result.left, diff={"before": before, "after": ""}
    )


if __name__ == "__main__":
    main()
