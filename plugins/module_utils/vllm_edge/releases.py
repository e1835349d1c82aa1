# SPDX-License-Identifier: Apache-2.0
"""Releases of this program on a host: each in a directory of its own, and a link to the one that counts.

A release is built at its final path, since a Python environment cannot be moved, and nothing leads there until all of
it is on the disk. What runs from the release before goes on with that one, whatever it imports later.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .system import files as durable
from .system.process import PROC
from .system.removal import remove

MANIFEST = "release.json"
"""Of a release that is whole: mode and hash of every file. Written last."""
SOURCE = "source.json"
"""Of a release: `version` of the program, and `committed_s`, the time of its newest commit since the epoch, 0 if the
controller has no git checkout."""


@dataclass(frozen=True)
class Wanted:
    """Directory of a release, whole or to be built."""

    path: Path
    whole: bool
    current: bool
    why: str
    """Why it has to be built; empty if it is whole."""


class Releases:
    """The releases below a directory such as `/opt/vllm-edge`."""

    def __init__(self, prefix: Path, proc: Path = PROC) -> None:
        self.prefix = prefix
        self.proc = proc
        self.link = prefix / "current"

    @property
    def current(self) -> Path | None:
        return self.prefix / os.readlink(self.link) if self.link.is_symlink() else None

    def wanted(self, name: str) -> Wanted:
        """Return the whole release of this name; if there is none, an unused directory to build it in."""
        candidates = [path for path in self._all() if path.name == name or path.name.startswith(f"{name}-")]
        problems = {path: _find_difference(path) for path in candidates}
        whole = [path for path in candidates if not problems[path]]
        if whole:
            path = self.current if self.current in whole else whole[0]
            return Wanted(path, whole=True, current=path == self.current, why="")
        why = next(iter(problems.values()), f"{self.link} does not lead to a release with this content")
        return Wanted(self._find_free(name), whole=False, current=False, why=why)

    def _find_free(self, name: str) -> Path:
        names = (name if count == 1 else f"{name}-{count}" for count in itertools.count(1))
        return next(path for path in map(self._path, names) if path != self.current and not self._is_used(path))

    def find_newer(self, source: Mapping[str, Any]) -> str | None:
        """Return what the current release is made of if it is newer than `source`, "" if not; None if nobody knows."""
        try:
            there = json.loads((self.link / SOURCE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None if self.link.is_symlink() else ""
        versions = [tuple(map(int, re.findall(r"\d+", it["version"]))) for it in (there, source)]
        times = [int(it["committed_s"]) for it in (there, source)]
        if versions[0] == versions[1] and not all(times):
            return None
        return describe_source(there) if (versions[0], times[0]) > (versions[1], times[1]) else ""

    def finish(self, release: Path, source: Mapping[str, Any]) -> None:
        durable.write_durably(release / SOURCE, json.dumps(source) + "\n")
        durable.write_durably(release / MANIFEST, json.dumps(_contents(release), indent=0, sort_keys=True) + "\n")

    def make_current(self, release: Path) -> None:
        """Point the link to the release by one rename; a reader of the link sees the former release or this one."""
        # Tells the next release which one was current before it.
        os.utime(release / MANIFEST, ns=(time.time_ns(),) * 2)
        fresh = durable.make_fresh_name(self.link)
        with durable.name_errors(fresh):
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(release.relative_to(self.prefix))
            os.rename(fresh, self.link)
        durable.sync(self.prefix)

    def remove_others(self, release: Path, *, apply: bool = True) -> list[str]:
        """Removes what was installed before and nothing runs from, except the release before this one; returns what."""
        others = sorted((path for path in self._all() if path != release), key=_last_current)
        keep = {others[-1]} if others and _last_current(others[-1]) else set()
        paths = [str(path) for path in others if path not in keep and not self._is_used(path)]
        if paths and apply:
            # Links that lead away from what goes are on the disk before it goes.
            os.sync()
        return remove(paths, apply=apply).removed

    def _path(self, name: str) -> Path:
        return self.prefix / "releases" / name

    def _all(self) -> list[Path]:
        return sorted(path for path in (self.prefix / "releases").glob("*") if path.is_dir())

    def _is_used(self, directory: Path) -> bool:
        """Return whether the command line of a running process names a file there, as that of a script of ours does."""
        begin = os.fsencode(f"{directory}/")
        for process in self.proc.glob("[0-9]*/cmdline"):
            try:
                arguments = process.read_bytes().split(b"\0")
            except OSError:
                continue  # it has ended
            if any(argument.startswith(begin) for argument in arguments):
                return True
        return False


def describe_source(source: Mapping[str, Any]) -> str:
    moment = f", committed {datetime.fromtimestamp(s, UTC):%Y-%m-%d %H:%M} UTC" if (s := source["committed_s"]) else ""
    return f"version {source['version']}{moment}"


def flush(release: Path) -> None:
    """Write a built release to the disk: one call for thousands of files. Raises CalledProcessError, OSError."""
    subprocess.run(["sync", "--file-system", str(release)], check=True, capture_output=True, text=True)


def _last_current(release: Path) -> int:
    manifest = release / MANIFEST
    return manifest.stat().st_mtime_ns if manifest.exists() else 0  # 0 where it is not whole


def _contents(release: Path) -> dict[str, str]:
    """Return mode and hash of every file, and the target of every link, except for what Python compiles by itself."""
    found = {}
    for directory, directories, files in os.walk(release):
        directories[:] = sorted(name for name in directories if name != "__pycache__")
        for name in sorted([*files, *directories]):
            path = Path(directory, name)
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                found[str(path.relative_to(release))] = f"link to {os.readlink(path)}"
            elif stat.S_ISREG(status.st_mode):
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                found[str(path.relative_to(release))] = f"{stat.S_IMODE(status.st_mode):04o} {digest}"
    found.pop(MANIFEST, None)
    return found


def _find_difference(release: Path) -> str:
    """Return what differs from the release as it was built, or is not for everybody; added files do not count."""
    try:
        built: dict[str, str] = json.loads((release / MANIFEST).read_text(encoding="utf-8"))
        if SOURCE not in built:
            raise ValueError
    except FileNotFoundError:
        return f"{release} was not built to its end"
    except (ValueError, TypeError):
        return f"{release / MANIFEST} is damaged"
    there = _contents(release)
    for path, found in built.items():
        if there.get(path) != found:
            return f"{release / path} is not as it was built"
        if not found.startswith("link to ") and not int(found[:4], 8) & stat.S_IROTH:
            return f"{release / path} was built with a umask that lets only root read it"
    return ""
