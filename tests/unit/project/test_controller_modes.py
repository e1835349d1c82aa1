# SPDX-License-Identifier: Apache-2.0
"""What plays write on the controller: it holds answers, addresses or gated weights, so its owner alone reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from helpers import ROOT

WRITERS = ("ansible.builtin.copy", "ansible.builtin.file", "ansible.builtin.template", "community.general.archive")
PRIVATE = ("0600", "0700", "u+rwx", "u=rwX,go=")
OF_THE_REPOSITORY = {
    "Write the recorded facts",
    "Create the directory of the inventory's facts",
    "Write the facts into the inventory",
}
"""Files of the project itself or of an inventory, as git keeps them: shapes of published checkpoints."""


def find_local_tasks(tasks: list[Any], local: bool = False) -> Iterator[dict[str, Any]]:
    """The tasks that run on the controller, also those in blocks."""
    for task in tasks:
        here = local or task.get("delegate_to") == "localhost"
        for part in ("block", "rescue", "always", "tasks"):
            yield from find_local_tasks(task.get(part) or [], here)
        if here and any(name in task for name in WRITERS):
            yield task


def test_files_on_the_controller_are_their_owners_alone() -> None:
    files: list[Path] = [*(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").glob("*/tasks/*.yml")]
    found = {}
    for file in files:
        content = yaml.safe_load(file.read_text())
        for task in find_local_tasks(content if isinstance(content, list) else []):
            (options,) = (task[name] for name in WRITERS if name in task)
            if options.get("state") != "absent":
                found[task["name"]] = options.get("mode")
    assert len(found) >= 10, found
    open_to_others = {name: mode for name, mode in found.items() if mode not in PRIVATE}
    assert open_to_others.keys() == OF_THE_REPOSITORY, open_to_others
