# SPDX-License-Identifier: Apache-2.0
"""Run commands for the lab, and say how long each stage took."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
LAB = REPOSITORY / "lab"


def cache_directory() -> Path:
    """Directory of what the lab downloads and builds; `make lab-down` removes it."""
    base = os.environ.get("VLLM_EDGE_LAB_CACHE") or Path.home() / ".cache" / "vllm-edge-lab"
    path = Path(base)
    path.mkdir(parents=True, exist_ok=True)
    return path


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
    """Standard output of a command that must succeed."""
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
