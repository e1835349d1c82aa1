# SPDX-License-Identifier: Apache-2.0
"""What vLLM has compiled for one engine and image: a directory that is set aside if it breaks a start or is too large.

Code in the container writes the directory, so nothing in it is trusted or followed. The directory above belongs to
root. While there is one that was set aside, the cache is not blamed again; it is removed when a start has succeeded, or
by the next run of the engines stage.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ..system.files import remove_foreign

MODE = 0o750
MOST_GIB = 20
"""What a cache may have before the next start empties it: vLLM compiles 1 to 3 GB for a model."""
MOST_FILES = 1_000_000
MEASURE_S = 30
REMOVE_S = 600.0


def find_aside(cache: Path) -> Path:
    """Return where a cache is moved to. The role's tasks/prune.yml knows the name."""
    return cache.with_name(f"{cache.name}.set-aside")


def prepare(cache: Path, uid: int) -> bool:
    """Return whether the cache has something in it, before a container is made; make it if a set-aside was cut off.

    Raises OSError.
    """
    if not cache.exists() and find_aside(cache).exists():
        _make(cache, uid)
    return cache.is_dir() and next(os.scandir(cache), None) is not None


def find_excess(cache: Path) -> str:
    """Return what a cache has too much of; empty if nothing. Counts no further than that, within MEASURE_S seconds.

    Raises OSError: it cannot be read, or not in that time.
    """
    # Not os.walk: it gives up in a tree that is nested deeply enough.
    command = ["timeout", str(MEASURE_S), "find", "-P", str(cache), "-xdev", "-printf", "%s %b\n"]
    size = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as found:
        for files, line in enumerate(found.stdout or ()):
            length, blocks = map(int, line.split())
            size += max(length, 512 * blocks)
            if size > MOST_GIB * 2**30:
                return f"more than {MOST_GIB} GiB"
            if files > MOST_FILES:
                return f"more than {MOST_FILES} files"
    if found.returncode != 0:
        raise OSError(f"the size of {cache} cannot be determined (find ended with {found.returncode})")
    return ""


def discard(cache: Path) -> None:
    """Remove the cache that was set aside, if there is one. Raises OSError."""
    if os.path.lexists(aside := find_aside(cache)):
        remove_foreign(aside, REMOVE_S)


def set_aside(cache: Path, uid: int) -> Path:
    """Move the cache aside, and make an empty one, for a container that does not exist yet; return where it is now.

    `uid` is the user id and the group id of the engine. Raises OSError: nothing was moved, or no new one was made.
    """
    aside = find_aside(cache)
    if cache.is_symlink() or os.path.lexists(aside):
        raise OSError(f"{cache} is a link, or {aside} is there already")
    os.rename(cache, aside)
    _make(cache, uid)
    return aside


def _make(cache: Path, uid: int) -> None:
    cache.mkdir(0o700)
    cache.chmod(MODE)
    if os.geteuid() == 0:
        os.chown(cache, uid, uid)
