# SPDX-License-Identifier: Apache-2.0
"""Owner, group and permissions of a model's files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Ownership:
    """Owner, group and permissions that the files and directories should have."""

    uid: int
    gid: int
    file_mode: int = 0o640
    directory_mode: int = 0o750


def list_directories(directory: Path, files: Iterable[str]) -> list[Path]:
    """Return the directory and every directory in it that is a parent of the files, parents first."""
    found = {directory}
    for path in files:
        for parent in PurePosixPath(path).parents:
            found.add(directory / parent)
    return sorted(found)


def find_ownership_faults(directory: Path, files: Iterable[str], owner: Ownership) -> dict[Path, str]:
    """Return the files and directories with a wrong owner, group or mode.

    Args:
        directory: directory of the model
        files: paths below it; files that do not exist are skipped
        owner: what is wanted

    Returns:
        What each path has instead, as `uid:gid mode`.
    """
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
    """Set owner, group and mode of one file or directory. Raises OSError."""
    os.chown(path, owner.uid, owner.gid)
    path.chmod(owner.directory_mode if path.is_dir() else owner.file_mode)
