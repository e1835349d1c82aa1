#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: fail if the file system of a directory is not mounted, or nothing can be executed there."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mounted_paths
short_description: Assert that the file systems of directories are mounted
version_added: "0.1.0"
description:
  - Fails if a path is at or below a mount point that C(/etc/fstab) or an enabled mount unit in C(/etc/systemd/system)
    names and that is not mounted now. What is created there would fill the disk below and be hidden by the mount.
  - With O(executed), also fails if the file system of the path is mounted with C(noexec).
  - Entries of C(/etc/fstab) with the option C(noauto) are left out. A mount point of systemd's automount counts as
    mounted.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  paths:
    description: Absolute path of each directory, by the name of the variable that sets it.
    type: dict
    required: true
  executed:
    description: Names in O(paths) of the directories that hold programs or shared libraries, and what these are.
    type: dict
    default: {}
  root:
    description: Root directory of the host's file system. Only tests set it to something other than V(/).
    type: path
    default: /
"""

EXAMPLES = r"""
- name: Assert that the disk of the weights is mounted
  edge.vllm_edge.mounted_paths:
    paths:
      model_weights_root: /data/vllm/weights
"""

RETURN = r"""# """

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def unescape(word: str) -> str:
    """Return a field of fstab or mountinfo with its octal escapes replaced, as of a blank (\\040)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def read_lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="surrogateescape").splitlines() if file.exists() else []


def find_mount_points(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield mount point, device, and the file that names them, of what is mounted at boot."""
    for line in read_lines(root / "etc/fstab"):
        fields = line.split()
        if len(fields) < 3 or fields[0].startswith("#") or not fields[1].startswith("/"):
            continue  # swap has no mount point
        if "noauto" not in (fields[3] if len(fields) > 3 else "").split(","):
            yield unescape(fields[1]), unescape(fields[0]), "/etc/fstab"
    for unit in sorted((root / "etc/systemd/system").glob("*.*/*.mount")):
        given = dict(re.findall(r"^(Where|What)\s*=\s*(.*?)\s*$", "\n".join(read_lines(unit)), re.MULTILINE))
        if "Where" in given:
            yield given["Where"], given.get("What", "its device"), unit.name


def find_unmounted(root: Path) -> list[tuple[str, str, str]]:
    mounted = {unescape(line.split()[4]) for line in read_lines(root / "proc/self/mountinfo")}
    return [found for found in find_mount_points(root) if os.path.realpath(found[0]) not in mounted]


def explain_unmounted(variable: str, path: str, unmounted: list[tuple[str, str, str]]) -> str | None:
    """Return why nothing may be created at a path; None if its file system is mounted."""
    inside = Path(os.path.realpath(path))
    for point, device, source in unmounted:
        if inside.is_relative_to(os.path.realpath(point)):
            remedy = "remove its line" if source == "/etc/fstab" else f"'systemctl disable {source}'"
            return (
                f"{variable} is {path}, and {source} mounts {device} at {point}, which is not mounted now: what is "
                f"created there would be on another disk, and hidden once it is mounted. Run 'mount {point}' on the "
                f"host (if {source} is out of date, {remedy}), then run again. Nothing was created."
            )
    return None


def explain_noexec(variable: str, path: str, what: str, root: Path) -> str | None:
    """Return why the kernel would not execute what is at a path; None if it would."""
    inside, options, point = Path(os.path.realpath(path)), "", ""
    for fields in map(str.split, read_lines(root / "proc/self/mountinfo")):  # a later mount covers an earlier one
        if inside.is_relative_to(unescape(fields[4])) and len(unescape(fields[4])) >= len(point):
            point, options = unescape(fields[4]), fields[5]
    if "noexec" not in options.split(","):
        return None
    return (
        f"{variable} is {path}, and {point} is mounted with noexec: the kernel refuses {what} there (Permission "
        f"denied, or 'failed to map segment from shared object'). Set {variable} to one on another file system, "
        f"or 'mount -o remount,exec {point}' and take noexec out of its options in /etc/fstab. Nothing was created."
    )


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "dict", "required": True},
            "executed": {"type": "dict", "default": {}},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    unmounted = find_unmounted(Path(module.params["root"]))
    for variable, path in module.params["paths"].items():
        why = explain_unmounted(variable, path, unmounted)
        if why is None and variable in module.params["executed"]:
            why = explain_noexec(variable, path, module.params["executed"][variable], Path(module.params["root"]))
        if why is not None:
            module.fail_json(msg=why)
    module.exit_json(changed=False)


if __name__ == "__main__":
    main()
