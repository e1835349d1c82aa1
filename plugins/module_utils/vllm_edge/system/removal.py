# SPDX-License-Identifier: Apache-2.0
"""Removing what is ours below a directory, and nothing else.

What is ours is named by patterns; everything else stays and is named. Nothing is followed: a link is a name, not what
it leads to, and a file system that is mounted below is somebody's disk. Directories are opened one inside the other,
so that a path cannot be exchanged for a link while it is walked.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

# fmt: off
SYSTEM = frozenset((
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/media", "/mnt", "/opt", "/proc",
    "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/etc/docker", "/etc/systemd",
    "/etc/systemd/system", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/sbin", "/usr/share",
    "/var/cache", "/var/lib", "/var/lib/docker", "/var/log", "/var/spool", "/var/tmp",
))
# fmt: on
"""Directories of the system: a variable that names one of them is a mistake."""

Parts = tuple[str, ...]


class RemovalError(ValueError):
    """The path cannot have been meant; nothing was removed."""


@dataclass(frozen=True)
class Owned:
    """What below a directory is ours. Patterns are relative to it, and `*` stays within one name."""

    files: Sequence[str] = ()
    """Files and links, as patterns."""
    names: Sequence[str] = ()
    """Files and links, by their very names."""
    trees: Sequence[str] = ()
    """Directories with everything in them."""
    uid: int | None = None
    """Where it is given, only what belongs to this user is ours in `trees`."""
    keep: Sequence[str] = ()
    """What is ours and stays, as patterns."""


@dataclass
class Removal:
    """What was removed, or would be. Directories end with `/`; one of `trees` stands for everything in it."""

    removed: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """What is not ours, and why it is thought so."""


def _parts(pattern: str) -> Parts:
    pure = PurePosixPath(pattern)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts:
        raise RemovalError(f"{pattern!r} does not name something below a directory")
    return pure.parts


def _matches(parts: Parts, patterns: Sequence[Parts]) -> bool:
    return any(len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)) for pattern in patterns)


def _leads(parts: Parts, patterns: Sequence[Parts]) -> bool:
    """Whether something below this directory may match."""
    return any(len(parts) < len(pattern) and all(map(fnmatchcase, parts, pattern)) for pattern in patterns)


def check_directory(path: str, inside: str | None = None) -> Path:
    """The directory, with links in its own path resolved; refuses what cannot have been meant."""
    pure = PurePosixPath(path)
    if not path or not pure.is_absolute() or ".." in pure.parts:
        raise RemovalError(f"{path!r} is no absolute path without '..': nothing was removed below it.")
    resolved = Path(path).resolve()
    if str(resolved) in SYSTEM:
        raise RemovalError(f"{path} is {resolved}, a directory of the system: nothing was removed below it.")
    if inside is not None:
        parent = check_directory(inside)
        linked = [entry.resolve() for entry in parent.iterdir() if entry.is_symlink()] if parent.is_dir() else []
        if not any(resolved == place or place in resolved.parents for place in linked) and (
            parent not in resolved.parents
        ):
            raise RemovalError(f"{path} is not inside {inside}: nothing was removed below it. Remove it by hand.")
    return resolved


class _Walk:
    def __init__(self, root: Path, owned: Owned, gone: frozenset[str], apply: bool) -> None:
        self.root = root
        self.owned = owned
        self.gone = gone
        self.apply = apply
        self.files = [_parts(pattern) for pattern in owned.files]
        self.names = {_parts(name) for name in owned.names}
        self.trees = [_parts(pattern) for pattern in owned.trees]
        self.keep = [_parts(pattern) for pattern in owned.keep]
        self.all = [*self.files, *self.names, *self.trees, *self.keep]
        self.device = os.stat(root).st_dev
        self.result = Removal()
        self.count = 0

    def path(self, parts: Parts) -> str:
        return str(self.root.joinpath(*parts))

    def directory(self, descriptor: int, above: Parts, tree: bool) -> bool:
        """Removes what is ours in an open directory; whether nothing is left in it."""
        empty = True
        with os.scandir(descriptor) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            parts = (*above, entry.name)
            if self.path(parts) in self.gone:
                continue
            try:
                found = entry.stat(follow_symlinks=False)
                gone = self.entry(descriptor, parts, found, tree)
            except FileNotFoundError:
                continue  # somebody was faster
            empty = empty and gone
        return empty

    def entry(self, descriptor: int, parts: Parts, found: os.stat_result, tree: bool) -> bool:
        """Whether the entry is gone."""
        path, name = self.path(parts), parts[-1]
        if _matches(parts, self.keep):
            self.result.kept.append(path)
            return False
        if not stat.S_ISDIR(found.st_mode):
            if tree and not self.owns(path, found):
                return False
            if not tree and parts not in self.names and not _matches(parts, self.files):
                self.result.left[path] = "nothing of ours is called so"
                return False
            if self.apply:
                os.unlink(name, dir_fd=descriptor)
            self.count += 1
            if not tree:
                self.result.removed.append(path)
            return True
        inside = tree or _matches(parts, self.trees)
        if found.st_dev != self.device:
            self.result.left[path] = "another file system is mounted there"
            return False
        if inside and not self.owns(path, found):
            return False
        if not inside and not _leads(parts, self.all):
            self.result.left[path] = "nothing of ours is called so"
            return False
        before = self.count
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
        try:
            empty = self.directory(below, parts, inside)
        finally:
            os.close(below)
        if empty and self.apply:
            os.rmdir(name, dir_fd=descriptor)
        if empty and not tree:
            self.result.removed.append(f"{path}/")
        elif inside and not tree and self.count > before:
            self.result.removed.append(f"{path}/ in part")
        return empty

    def owns(self, path: str, found: os.stat_result) -> bool:
        if self.owned.uid is None or found.st_uid == self.owned.uid:
            return True
        self.result.left[path] = f"it belongs to user {found.st_uid}, and ours is {self.owned.uid}"
        return False


def remove(
    path: str, owned: Owned, *, inside: str | None = None, gone: Sequence[str] = (), apply: bool = True
) -> Removal:
    """Removes what is ours below a directory, and the directory where nothing is left in it.

    `gone` are paths that count as not there: what an earlier step removed, or would have.
    """
    root = check_directory(path, inside)
    known = frozenset(str(Path(item.rstrip("/")).resolve(strict=False)) for item in gone)
    if not root.is_dir() or str(root) in known:
        return Removal()
    walk = _Walk(root, owned, known, apply)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        empty = walk.directory(descriptor, (), False)
    finally:
        os.close(descriptor)
    if not empty:
        return walk.result
    if Path(path).is_symlink():
        walk.result.left[path] = f"it is a link to {root}, which is empty now"
    elif os.path.ismount(root):
        walk.result.left[path] = "a file system is mounted there; it is empty now"
    elif len(root.parts) < 3:
        walk.result.left[path] = "it lies directly below /; it is empty now"
    else:
        if apply:
            root.rmdir()
        walk.result.removed.append(f"{root}/")
    return walk.result
