# SPDX-License-Identifier: Apache-2.0
"""Removing what vllm-edge created: named files and directories, then the directories around them if they are empty.

A directory that only the program writes goes with everything in it. What else lies in the directories around it is kept
and listed. Links are removed as links, and file systems that are mounted inside are left alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# fmt: off
SYSTEM = frozenset((
    "/", "/bin", "/boot", "/dev", "/etc", "/home", "/lib", "/lib32", "/lib64", "/media", "/mnt", "/opt", "/proc",
    "/root", "/run", "/sbin", "/srv", "/sys", "/tmp", "/usr", "/var", "/etc/docker", "/etc/systemd",
    "/etc/systemd/system", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/sbin", "/usr/share",
    "/var/cache", "/var/lib", "/var/lib/docker", "/var/log", "/var/spool", "/var/tmp",
))
# fmt: on
"""System directories: a variable that names one of them is a mistake, so it is rejected."""


class RemovalError(ValueError):
    """A path is not acceptable; nothing was removed."""


@dataclass(frozen=True)
class Removal:
    removed: list[str] = field(default_factory=list)
    """Paths. A directory ends with `/` and stands for everything in it."""
    left: dict[str, str] = field(default_factory=dict)
    """Paths that stay, and why."""


def check_path(path: str, inside: str | None = None) -> Path:
    """Return the path. Its last component may be a link, which is removed as a link.

    `inside` is a directory that it must be in, after links are resolved; links in this directory count as part of it.
    Raises RemovalError: the path is relative or contains `..`, is a system directory or is not inside `inside`.
    """
    pure = Path(path)
    if not path or not pure.is_absolute() or ".." in pure.parts:
        raise RemovalError(f"{path!r} is no absolute path without '..': nothing was removed.")
    if str(pure) in SYSTEM or str(pure.resolve()) in SYSTEM:
        raise RemovalError(f"{path} is {pure.resolve()}, a directory of the system: nothing was removed.")
    if inside is not None:
        parent = check_path(inside)
        linked = [entry.resolve() for entry in parent.iterdir() if entry.is_symlink()] if parent.is_dir() else []
        resolved = pure.parent.resolve() / pure.name
        if resolved not in linked and not any(place in resolved.parents for place in [parent.resolve(), *linked]):
            raise RemovalError(f"{path} is not inside {inside}: nothing was removed. Remove it by hand.")
    return pure


def _find_mount(directory: Path) -> str | None:
    """Return a file system that is mounted at or below the directory; None if there is none."""
    device = os.lstat(directory.parent).st_dev
    for place, names, _ in os.walk(directory):
        for path in [place, *(os.path.join(place, name) for name in names)]:
            if not os.path.islink(path) and os.lstat(path).st_dev != device:
                return path
    return None


def _remove_trees(paths: Sequence[Path], result: Removal, apply: bool) -> Iterator[Path]:
    for path in paths:
        if not os.path.lexists(path):
            continue
        directory = path.is_dir() and not path.is_symlink()
        mounted = _find_mount(path) if directory else None
        if mounted:
            result.left[str(path)] = f"a file system is mounted at {mounted}"
            continue
        if apply and directory:
            shutil.rmtree(path)
        elif apply:
            path.unlink()
        result.removed.append(f"{path}/" if directory else str(path))
        yield path


def _explain_keeping(directory: Path) -> str:
    if directory.is_symlink():
        return f"it is a link to {directory.resolve()}, which is empty now"
    if os.path.ismount(directory):
        return "a file system is mounted there; it is empty now"
    return "it lies directly below /; it is empty now" if len(directory.parts) < 3 else ""


def _remove_empty(directory: Path, absent: set[Path], known: set[Path], result: Removal, apply: bool) -> None:
    """Remove a directory if nothing but `absent` is in it; list what is neither absent nor `known`."""
    entries = [entry for entry in sorted(directory.iterdir()) if entry not in absent]
    for entry in entries:
        if entry not in known:
            result.left.setdefault(str(entry), "vllm-edge did not create it")
    if entries:
        return
    reason = _explain_keeping(directory)
    if reason:
        result.left[str(directory)] = reason
        return
    if apply:
        directory.rmdir()
    absent.add(directory)
    result.removed.append(f"{directory}/")


def remove(
    paths: Sequence[str],
    directories: Sequence[str] = (),
    *,
    keep: Sequence[str] = (),
    inside: str | None = None,
    gone: Sequence[str] = (),
    apply: bool = True,
) -> Removal:
    """Remove files and directories, and then the directories around them if nothing else is in them.

    Args:
        paths: absolute paths of files, links and directories; a directory goes with everything in it
        directories: directories that are removed if they are empty afterwards; what else is in them is listed
        keep: paths in `directories` that stay without being listed
        inside: directory that all of `paths` and `directories` must be in
        gone: paths to treat as absent, because an earlier step removed them or, in check mode, would have

    Raises:
        RemovalError: a path is not acceptable; nothing was removed
        OSError: an entry could not be removed; those before it are gone
    """
    doomed = [check_path(path, inside) for path in paths]
    around = {check_path(path, inside) for path in directories}
    # Also the directories between one of them and a path.
    around |= {parent for path in doomed for parent in path.parents if around & set(parent.parents)}
    result = Removal()
    absent = {Path(path) for path in gone}
    absent |= set(_remove_trees([path for path in doomed if path not in absent], result, apply))
    known = around | {Path(path) for path in keep}
    for directory in sorted(around - absent, key=lambda path: (-len(path.parts), path)):
        if directory.is_dir():
            _remove_empty(directory, absent, known, result, apply)
    return result
