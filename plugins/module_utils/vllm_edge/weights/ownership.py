# SPDX-License-Identifier: Apache-2.0
"""Owner, group and mode of a model's files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Ownership:
    """Who owns the weights and who reads them."""

    uid: int
    gid: int
    file_mode: int = 0o640
    directory_mode: int = 0o750


def list_directories(directory: Path, files: Iterable[str]) -> list[Path]:
    found = {directory}
    for path in files:
        for parent in PurePosixPath(path).parents:
            found.add(directory / parent)
    return sorted(found)


def ownership_faults(directory: Path, files: Iterable[str], owner: Ownership) -> dict[Path, str]:
    """Files and directories whose owner or mode is not what it should be, with what it is."""
    names = list(files)
    wanted = [(path, owner.directory_mode) for path in list_directories(directory, names)]
    wanted += [(directory / name, owner.file_mode) for name in names]
    faults = {}
    for path, mode in wanted:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) != (owner.uid, owner.gid, mode):
            faults[path] = f"{found.st_uid}:{found.st_gid} {stat.S_IMODE(found.st_mode):04o}"
    return faults


def give(path: Path, owner: Ownership) -> None:
    """Sets owner and mode of one file or directory."""
    os.chown(path, owner.uid, owner.gid)
    path.chmod(owner.directory_mode if path.is_dir() else owner.file_mode)
