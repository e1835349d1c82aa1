# SPDX-License-Identifier: Apache-2.0
"""The file `edge_policy.py` on the host, which engines mount: each version in a directory that its hash names.

So an engine restarts for another version of the file, and for no other change of the program.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..paths import HostPaths
from ..system.files import find_wrong_attributes, write_durably
from . import edge_policy
from .config import CONTAINER_FILE

TEXT = inspect.getsource(edge_policy)
HASH = hashlib.sha256(TEXT.encode()).hexdigest()
MIDDLEWARE = "--middleware=edge_policy.Policy"
DIRECTORY = "/policy"
"""In the container."""
_FILE = "edge_policy.py"
_MODE = 0o644
_DIRECTORY_MODE = 0o755
_MOUNT = re.compile(rf"--mount=type=bind,source=(/[^,]*/[0-9a-f]{{64}}),target={DIRECTORY},readonly")


def make_mount(paths: HostPaths) -> str:
    return f"--mount=type=bind,source={paths.policies / HASH},target={DIRECTORY},readonly"


def find_problem(container: Iterable[str]) -> str:
    """Return what is wrong with the file that a container mounts; empty if nothing is, or if it mounts none."""
    for found in filter(None, map(_MOUNT.fullmatch, container)):
        place = Path(found[1])
        try:
            wrong = find_wrong_attributes(place, _DIRECTORY_MODE) or find_wrong_attributes(place / _FILE, _MODE)
            if hashlib.sha256((place / _FILE).read_bytes()).hexdigest() != place.name:
                wrong = "another content than its directory says"
        except OSError as error:
            wrong = str(error.strerror)
        if wrong:
            return f"the file by which it judges requests, {place / _FILE}: {wrong}"
    return ""


def install(paths: HostPaths, *, write: bool) -> bool:
    """Return whether the file of this release is missing or differs; then write it, unless `write` is false.

    Raises OSError.
    """
    if not find_problem([make_mount(paths)]):
        return False
    if write:
        place = paths.policies / HASH
        write_durably(place / _FILE, TEXT, _MODE)
        for directory in (place, paths.policies):
            directory.chmod(_DIRECTORY_MODE)  # whatever the umask is
    return True


def prune(paths: HostPaths) -> None:
    """Remove the files that neither a generation nor a live engine names. Raises OSError."""
    inside = f"engines/*/{CONTAINER_FILE}"
    files = [*(paths.state / "generations").glob(f"*/{inside}"), *paths.etc.glob(inside)]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    with contextlib.suppress(FileNotFoundError):
        for directory in paths.policies.iterdir():
            if not any(directory.name in text for text in texts):
                shutil.rmtree(directory)
