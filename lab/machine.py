# SPDX-License-Identifier: Apache-2.0
"""What the lab needs of the machine that runs it: looked at within a second, before anything is downloaded.

Needs nothing but Python, since it runs first: `python3 -m lab.machine`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

GIB = 2**30
MEMORY_GIB = 10
"""Host, vendors and the three engines of nvfp4-tp2 while they load."""
DOCKER_GIB = 6
"""Images, and the host's own Docker with the engine's image in it."""
CACHE_GIB = 3
"""Wheels, root file systems, packages, and the registry's copy of the engine's image."""
DOCKER_MINIMUM = (20, 10)
"""The first Docker Engine with --cgroupns."""
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")


def missing_of_cpu(machine: str, cpuinfo: str) -> list[str]:
    """The architecture that vLLM's CPU build is made for, and the instructions that it uses."""
    if machine != "x86_64":
        return [f"an x86-64 CPU (this one is {machine}, and vLLM's CPU build for the lab is made for x86-64)"]
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    if flags is None or "avx2" not in flags.group(1).split():
        return ["AVX2 (which vLLM's CPU build computes with)"]
    return []


def missing_of_memory(meminfo: str) -> list[str]:
    """Memory that is available without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    available = int(found.group(1)) * 1024 if found else 0
    if available >= MEMORY_GIB * GIB:
        return []
    return [f"memory ({MEMORY_GIB} GiB are wanted, {available / GIB:.1f} GiB are available)"]


def existing(path: Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    return path if path.exists() or path == path.parent else existing(path.parent)


def missing_of_disk(wanted: dict[Path, int]) -> list[str]:
    """Room for what each place will hold, in GiB; places on one file system share its room."""
    by_device: dict[int, list[Path]] = {}
    for path in wanted:
        by_device.setdefault(existing(path).stat().st_dev, []).append(path)
    missing = []
    for paths in by_device.values():
        gib = sum(wanted[path] for path in paths)
        free = shutil.disk_usage(existing(paths[0])).free
        if free < gib * GIB:
            places = " and ".join(map(str, paths))
            missing.append(f"room on the disk ({gib} GiB are wanted in {places}, {free / GIB:.1f} GiB are free)")
    return missing


def missing_of_docker(version: str) -> list[str]:
    """A Docker Engine that is too old; where there is none, one is installed."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) >= DOCKER_MINIMUM:
        return []
    minimum = ".".join(map(str, DOCKER_MINIMUM))
    return [f"a newer Docker Engine ({minimum} or later is wanted, {version} is here)"]


def said_by(*command: str) -> str:
    """What a command prints; empty where there is no such command, or it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def docker_version() -> str:
    """The version of the Engine that answers, else of the one that is installed; empty where there is none."""
    if answered := said_by("docker", "version", "--format", "{{.Server.Version}}"):
        return answered
    found = re.search(r"version (\S+?),", said_by("dockerd", "--version"))
    return found.group(1) if found else ""


def missing() -> list[str]:
    """What this machine lacks, in words; a lab that already runs has its memory and its room."""
    lacking = missing_of_cpu(platform.machine(), CPUINFO.read_text(errors="replace"))
    lacking += missing_of_docker(docker_version())
    host = f"{os.environ.get('VLLM_EDGE_LAB_NAME', 'vllm-edge-lab')}-host"
    if said_by("docker", "inspect", "--format", "{{.State.Running}}", host) == "true":
        return lacking
    root = said_by("docker", "info", "--format", "{{.DockerRootDir}}") or "/var/lib/docker"
    cache = Path(os.environ.get("VLLM_EDGE_LAB_CACHE") or Path.home() / ".cache" / "vllm-edge-lab")
    # The registry has the engine's image once everything else is built; a host with its weights then takes the rest.
    built = (cache / "images" / "pushed").exists()
    lacking += missing_of_memory(MEMINFO.read_text())
    wanted = {Path(root): DOCKER_GIB // 2} if built else {Path(root): DOCKER_GIB, cache: CACHE_GIB}
    return lacking + missing_of_disk(wanted)


def main() -> None:
    """End with one sentence where anything is missing."""
    if lacking := missing():
        sys.exit(f"lab: this machine lacks {'; '.join(lacking)}. Nothing was downloaded or started.")


if __name__ == "__main__":
    main()
