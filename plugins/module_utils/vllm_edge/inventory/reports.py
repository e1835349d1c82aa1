# SPDX-License-Identifier: Apache-2.0
"""The directory on the controller for clients' keys, reports and records of hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

NAME = "reports"


def locate_reports(inventory_file: str | None) -> str:
    """Return the directory beside the inventory file that defines a host; empty if no file does.

    Files of other names than hosts.yml may lie side by side and define hosts of one name.
    """
    file = Path(inventory_file or "")
    if not file.is_absolute():
        return ""
    return str(file.parent / NAME / ("" if file.name == "hosts.yml" else file.name))


def find_fault(directory: str, sources: Sequence[str], ignored: Sequence[str]) -> str:
    """Return why this is no place for keys, or an empty string.

    `sources` are the inventories of this run, `ignored` patterns of names in a directory of inventories that Ansible
    does not read.
    """
    told = f"serving_reports_directory: {directory!r} "
    remedy = f"such as {os.path.expanduser('~/vllm-edge-reports')}"
    if not Path(directory).is_absolute():
        why = "is no absolute path" if directory else "has no default, because no inventory file defines this host"
        return f"{told}{why}; set it to a directory on this machine, {remedy}."
    real = Path(directory).resolve()
    if "ansible_collections" in real.parts:
        return (
            f"{told}lies in an installed collection, and ansible-galaxy removes it with all keys when it installs "
            f"another release; keep the inventory outside, or set it to a directory outside, {remedy}."
        )
    for source in map(Path, sources):
        if not source.is_dir() or not real.is_relative_to(source.resolve()):
            continue
        below = real.relative_to(source.resolve()).parts
        if not any(re.search(pattern, part) for pattern in (r"^\.", *ignored) for part in below):
            return (
                f"{told}lies in {str(source)!r}, whose files Ansible reads as inventories, keys too; write "
                f"`ignore_patterns = ^(chat_templates|model_facts|{NAME})$` below [inventory] in your ansible.cfg, or "
                f"set it to a directory outside, {remedy}."
            )
    return ""
