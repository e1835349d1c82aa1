# SPDX-License-Identifier: Apache-2.0
"""The directory on the controller for clients' keys, reports and records of hosts."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "reports"
ROW = ".row.json"
"""After the name of a host: the file with its row of the index."""
FILES = (".html", ROW, ".json", "-status.json")
"""What follows the name of a host in the names of its files."""


def locate_reports(inventory_file: str | None) -> str:
    """Return the directory beside the inventory file that defines a host; empty if no file does.

    Files of other names than hosts.yml may lie side by side and define hosts of one name.
    """
    file = Path(inventory_file or "")
    if not file.is_absolute():
        return ""
    return str(file.parent / NAME / ("" if file.name == "hosts.yml" else file.name))


def list_hosts(directory: str, groups: Mapping[str, Any], hostvars: Mapping[str, Any]) -> list[str]:
    """Return the hosts of gpu_hosts whose reports are in this directory."""
    hosts = [str(host) for host in groups.get("gpu_hosts", ())]
    places = {host: str(hostvars[host].get("serving_reports_directory", directory)) for host in hosts}
    return [host for host in hosts if places[host].rstrip("/") == directory.rstrip("/")]


def find_shared_file(hosts: Sequence[str]) -> str:
    """Return which hosts would write one file, also where upper and lower case are the same; or an empty string."""
    owners = {"index.html": "the index"}
    for host in hosts:
        for end in FILES:
            file = f"{host}{end}".casefold()
            other = owners.setdefault(file, f"host {host}")
            if end != ROW and file.endswith(ROW):
                other = f"the row of host {file.removesuffix(ROW)}"
            if other != f"host {host}":
                return f"{file} of host {host} is that of {other}, too"
    return ""


def find_fault(directory: str, sources: Sequence[str], ignored: Sequence[str], hosts: Sequence[str] = ()) -> str:
    """Return why this is no place for keys and reports, or an empty string.

    `sources` are the inventories of this run, `ignored` patterns of names in a directory of inventories that Ansible
    does not read, `hosts` those whose reports are here.
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
    if shared := find_shared_file(hosts):
        return f"{told}cannot have the reports of all hosts: {shared}; rename one of them in the inventory."
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
