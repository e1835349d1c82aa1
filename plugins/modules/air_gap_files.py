#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: verify the files of an air gap's medium on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: air_gap_files
short_description: Verify the files of an air gap's medium
version_added: "0.1.0"
description:
  - Compares files of the medium with C(SHA256SUMS), and that file with O(sums_sha256). Fails with the name of a file
    that was changed, added or removed, and of a link.
  - Does nothing if O(path) has neither C(SHA256SUMS) nor one of the directories, because an installed host does not
    need the medium.
  - Remembers in O(record) what it verified. A file with the same inode, size and times is not read again.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  path:
    description: Directory of the medium.
    type: path
    required: true
  sums_sha256:
    description: Hash of C(SHA256SUMS).
    type: str
    required: true
  below:
    description: Directories of the medium that the host uses, relative to O(path).
    type: list
    elements: str
    required: true
  record:
    description: File for what was verified. It is written only if its directory exists.
    type: path
    default: /var/lib/vllm-edge/air-gap.json
"""

EXAMPLES = r"""
- name: Verify packages and the archive of the image
  edge.vllm_edge.air_gap_files:
    path: /media/vllm-edge
    sums_sha256: "{{ medium.sums_sha256 }}"
    below: [apt, keys, image]
"""

RETURN = r"""
verified:
  description: Number of files that were compared in this run or an earlier one. 0 without a medium.
  type: int
  returned: success
"""

import json
import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.air_gap import SUMS, MediumError, read_sums, verify
from ..module_utils.vllm_edge.system.files import write_durably


def read_record(path: Path) -> dict[str, list[object]]:
    """Return what was verified before; nothing if the record is damaged, which makes the files be read again."""
    try:
        found = json.loads(path.read_bytes())
        return {str(name): list(entry) for name, entry in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "sums_sha256": {"type": "str", "required": True},
            "below": {"type": "list", "elements": "str", "required": True},
            "record": {"type": "path", "default": "/var/lib/vllm-edge/air-gap.json"},
        },
        supports_check_mode=True,
    )
    root, record = Path(module.params["path"]), Path(module.params["record"])
    # The mount point of a medium that was taken away is an empty directory.
    if not any(os.path.lexists(root / name) for name in (SUMS, *module.params["below"])):
        module.exit_json(changed=False, verified=0)
    known = read_record(record)
    try:
        sums = read_sums(root, module.params["sums_sha256"])
        found = verify(root, sums, module.params["below"], known)
    except MediumError as error:
        module.fail_json(msg=f"{error} Nothing was changed on this host.")
    if found != known and record.parent.is_dir() and not module.check_mode:
        write_durably(record, json.dumps(found, sort_keys=True) + "\n")
    module.exit_json(changed=False, verified=len(found))


if __name__ == "__main__":
    main()
