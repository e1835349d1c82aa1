# SPDX-License-Identifier: Apache-2.0
"""Take the collections of requirements.yml out of the `ansible` wheel, where Galaxy cannot be reached.

Usage: collections_from_wheel.py WHEEL REQUIREMENTS DIRECTORY
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import yaml


def with_dependencies(wheel: zipfile.ZipFile, names: list[str]) -> list[str]:
    """`names` and the collections that they depend on."""
    wanted: list[str] = []
    queue = list(names)
    while queue:
        name = queue.pop()
        if name in wanted:
            continue
        wanted.append(name)
        manifest = json.loads(wheel.read(f"ansible_collections/{name.replace('.', '/')}/MANIFEST.json"))
        queue += manifest["collection_info"]["dependencies"]
    return wanted


def main() -> None:
    """Extract."""
    wheel_path, requirements, directory = map(Path, sys.argv[1:4])
    names = [entry["name"] for entry in yaml.safe_load(requirements.read_text())["collections"]]
    with zipfile.ZipFile(wheel_path) as wheel:
        prefixes = tuple(f"ansible_collections/{name.replace('.', '/')}/" for name in with_dependencies(wheel, names))
        wheel.extractall(directory, [member for member in wheel.namelist() if member.startswith(prefixes)])


if __name__ == "__main__":
    main()
