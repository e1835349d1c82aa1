# SPDX-License-Identifier: Apache-2.0
"""Run commands for the lab, and say how long each stage took."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LAB = REPOSITORY / "lab"


MARKER = ".vllm-edge-lab"
"""The file by which a cache is known to be the lab's; only a regular file counts."""
CACHED = (
    *("lock", "dockerd.pid", "dockerd.log", "apt", "keys", "images", "rootfs", "wheels", "controller", "airgap"),
    # Models, whole and half made; scratch directories.
    *("hub-[0-9a-f]*", "tmp????????"),
)
"""Names of what the lab keeps in its cache."""


def cache_directory() -> Path:
    """Directory of what the lab downloads and builds; `make lab-down` removes it.

    An existing directory is taken if it carries the marker, or if it is empty.

    Raises:
        SystemExit: if it is somebody else's.
    """
    path = Path(os.environ.get("VLLM_EDGE_LAB_CACHE") or Path.home() / ".cache" / "vllm-edge-lab").resolve()
    marker = path / MARKER
    if path.exists() and not path.is_dir():
        raise SystemExit(f"lab: VLLM_EDGE_LAB_CACHE names {str(path)!a}, which is no directory; name one")
    path.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(marker) and stat.S_ISREG(marker.lstat().st_mode):
        return path
    if names := sorted(os.listdir(path)):
        raise SystemExit(
            f"lab: VLLM_EDGE_LAB_CACHE names {str(path)!a}, and the lab did not make this directory: it has no file "
            f"{MARKER}, and holds {', '.join(map(ascii, names[:3]))}. Nothing was removed. Name a directory that "
            "is empty or does not exist; if this is a cache of the lab, move away what is not."
        )
    marker.touch()
    return path


def is_cached(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in CACHED)


def remove_cache() -> None:
    """Remove from the cache what the lab made, then the cache if nothing else is in it.

    rm follows no links, leaves other file systems alone, and refuses a child that is a mount point.
    """
    path = cache_directory()
    made = sorted(child for child in path.iterdir() if is_cached(child.name))
    if made:
        # Containers and mmdebstrap write as root.
        rm = ["rm", "--recursive", "--force", "--one-file-system", "--preserve-root=all", "--"]
        run([*as_root(), *rm, *made], quiet=True)
    if left := sorted(child.name for child in path.iterdir() if child.name != MARKER):
        print(f"lab: {str(path)!a} stays, because the lab did not make {', '.join(map(ascii, left[:3]))} in it")
        return
    with contextlib.suppress(OSError):
        (path / MARKER).unlink()
        path.rmdir()


def run(command: Sequence[str | Path], *, check: bool = True, quiet: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command with its output passed through; `quiet` keeps it, and shows it only when the command fails."""
    words = [str(word) for word in command]
    if not quiet:
        return subprocess.run(words, check=check, text=True)
    done = subprocess.run(words, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if check and done.returncode != 0:
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"lab: command failed with exit status {done.returncode}: {' '.join(words)}")
    return done


def output(command: Sequence[str | Path]) -> str:
    return subprocess.run([str(word) for word in command], check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def as_root() -> list[str]:
    """Prefix for commands that need root: empty for root, `sudo` for everyone else."""
    if os.geteuid() == 0:
        return []
    sudo = shutil.which("sudo")
    if sudo is None:
        raise SystemExit("lab: this needs root and there is no sudo; run it as root")
    return [sudo]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the cache's lock: labs that come up side by side make what they share once, and the others wait for it."""
    with (cache_directory() / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def stage(title: str) -> Iterator[None]:
    """Announce a stage, and print its wall time when it is done; others may run beside it."""
    print(f"==> {title}", flush=True)
    began = time.monotonic()
    yield
    print(f"<== {title}: {time.monotonic() - began:.0f} s", flush=True)
