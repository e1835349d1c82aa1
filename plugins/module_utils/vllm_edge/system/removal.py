# SPDX-License-Identifier: Apache-2.0
"""Removing what vllm-edge created below a directory, and nothing else.

Files and directories of ours are described by patterns. Everything else is kept and listed. Nothing outside the
directory is reached: a link is removed as a link, and file systems mounted below are left alone. Directories are opened
relative to their parent, so that nobody can replace a part of the path with a link during the removal.
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
"""System directories: a variable that names one of them is a mistake, so it is rejected."""

Parts = tuple[str, ...]
"""A relative path or pattern, split at the slashes."""


class RemovalError(ValueError):
    """The path is not acceptable; nothing was removed."""


@dataclass(frozen=True)
class Owned:
    """What is ours below a directory. Patterns are relative to it, and `*` does not match a slash."""

    files: Sequence[str] = ()
    """Patterns of files and links."""
    names: Sequence[str] = ()
    """Exact paths of files and links."""
    trees: Sequence[str] = ()
    """Patterns of directories that are removed with their content."""
    uid: int | None = None
    """If set, only entries that belong to this user are ours within `trees`."""
    keep: Sequence[str] = ()
    """Patterns of entries that are ours but stay."""


@dataclass
class Removal:
    """What was removed, or would be."""

    removed: list[str] = field(default_factory=list)
    """Paths. A directory ends with `/`; one that matches `trees` stands for everything in it."""
    kept: list[str] = field(default_factory=list)
    """Paths that match `Owned.keep`."""
    left: dict[str, str] = field(default_factory=dict)
    """Paths that are not ours, and the reason for that conclusion."""


def _parts(pattern: str) -> Parts:
    pure = PurePosixPath(pattern)
    if pure.is_absolute() or not pure.parts or ".." in pure.parts:
        raise RemovalError(f"{pattern!r} does not name something below a directory")
    return pure.parts


def _matches(parts: Parts, patterns: Sequence[Parts]) -> bool:
    return any(len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)) for pattern in patterns)


def _leads(parts: Parts, patterns: Sequence[Parts]) -> bool:
    """Return whether something below this directory may match a pattern."""
    return any(len(parts) < len(pattern) and all(map(fnmatchcase, parts, pattern)) for pattern in patterns)


def check_directory(path: str, inside: str | None = None) -> Path:
    """Return the directory with all links in its path resolved.

    Args:
        path: absolute path
        inside: directory that it must be in; it counts as inside, too, if it is reached by a link in that directory

    Raises:
        RemovalError: the path is relative or contains `..`, is a system directory or is not inside `inside`
    """
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
    """One pass over a directory tree that removes, or only lists, what is ours."""

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
        """Remove what is ours from an open directory; return whether it is empty afterwards."""
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
                continue  # another process removed it
            empty = empty and gone
        return empty

    def entry(self, descriptor: int, parts: Parts, found: os.stat_result, tree: bool) -> bool:
        """Remove one entry if it is ours; return whether it is gone."""
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
    """Remove what is ours below a directory, and the directory itself if nothing is left in it.

    Args:
        path: absolute path of the directory
        owned: what is ours
        inside: directory that `path` must be in
        gone: paths to treat as absent, because an earlier step removed them or, in check mode, would have
        apply: False only lists what would be removed

    Raises:
        RemovalError: the path is not acceptable; nothing was removed
        OSError: an entry could not be removed; those before it are gone
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
