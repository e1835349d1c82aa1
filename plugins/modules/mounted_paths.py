#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: fail if a directory cannot be used: not mounted, nothing can be executed there, or no room."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mounted_paths
short_description: Assert that file systems are mounted and have room
version_added: "0.1.0"
description:
  - Fails if a path is at or below a mount point that C(/etc/fstab) or an enabled mount unit in C(/etc/systemd/system)
    names and that is not mounted now. What is created there would fill the disk below and be hidden by the mount.
  - With O(executed), also fails if the file system of the path is mounted with C(noexec).
  - With O(room), also fails if a file system that a step writes to is full, has no inodes or is mounted read-only. The
    directories of each step are in C(system/space.py) of the package; those on one file system share its room.
  - Entries of C(/etc/fstab) with the option C(noauto) are left out. A mount point of systemd's automount counts as
    mounted.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  paths:
    description: Absolute path of each directory, by the name of the variable that sets it.
    type: dict
    default: {}
  executed:
    description: Names in O(paths) of the directories that hold programs or shared libraries, and what these are.
    type: dict
    default: {}
  room:
    description: >-
      MiB that are about to be written, by directory, for each step. A step may name directories that are set elsewhere,
      such as V(images), where Docker keeps them.
    type: dict
    default: {}
  places:
    description: The directories that a step knows by a name, where they are not the default ones.
    type: dict
    default: {}
  docker:
    description: The command that tells where Docker keeps its data. If it is set, the results include C(places).
    type: str
  purpose:
    description: What is not done without the room, as the beginning of the message.
    type: str
    default: Nothing was created
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

RETURN = r"""
places:
  description: C(docker) and C(images), the directories of Docker's data and of its images.
  type: dict
  returned: with O(docker)
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.host import HostReader
from ..module_utils.vllm_edge.system.space import MIB, STEPS, list_shortages, locate_images


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


def explain_shortage(given: Mapping[str, Any], places: Mapping[str, str]) -> str:
    """Return which file systems lack room, with remedies; empty if none does."""
    wrong, hints = [], []
    for step, needed_mib in given["room"].items():
        needed = {place: int(float(mib) * MIB) for place, mib in needed_mib.items()}
        try:
            found = list_shortages(step, places, needed, root=Path(given["root"]))
        except OSError as error:
            found = [f"{error.filename} cannot be read ({error.strerror})"]
        wrong += found
        hints += [STEPS[step].hint] if found else []
    text = f"{given['purpose']}: {'; '.join(wrong)}. {' '.join(hints)}"
    return text if wrong else ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "dict", "default": {}},
            "executed": {"type": "dict", "default": {}},
            "room": {"type": "dict", "default": {}},
            "places": {"type": "dict", "default": {}},
            "docker": {"type": "str"},
            "purpose": {"type": "str", "default": "Nothing was created"},
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
    docker = module.params["docker"]
    found = locate_images(HostReader(), docker) if docker else {}
    if why := explain_shortage(module.params, {**found, **module.params["places"]}):
        module.fail_json(msg=why)
    module.exit_json(changed=False, places=found)


if __name__ == "__main__":
    main()
