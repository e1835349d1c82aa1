# SPDX-License-Identifier: Apache-2.0
"""What vLLM has compiled for one engine and image: a directory that is set aside once if it breaks a start.

Code in the container writes the directory, so nothing in it is trusted or followed. The directory above belongs to
root. While there is one that was set aside, the cache is not blamed again; it is removed when a start has succeeded, or
by the next run of the engines stage.
"""

from __future__ import annotations

import os
from pathlib import Path

MODE = 0o750


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
