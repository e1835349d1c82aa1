# SPDX-License-Identifier: Apache-2.0
"""Who a process on a GPU belongs to: pid -> container -> engine -> unit.

NVML gives host pids. /proc/<pid>/cgroup names the container by its id, Docker knows the container's name and labels,
and the label vllm-edge.engine=<engine> makes it ours, with the unit vllm-<engine>.service. Where Docker cannot be
asked, a process in a container is of unknown owner, with the reason: calling it foreign would blame somebody else for
our own memory.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ENGINE_LABEL = "vllm-edge.engine"
PROC = Path("/proc")
DOCKER_TIMEOUT_S = 10

ENDED = "the process ended while it was being looked up"

OwnerKind = Literal["ours", "foreign", "unknown"]
Runtime = Literal["docker", "podman", "other"]

_ID = re.compile(r"(?:(?P<prefix>[a-z][a-z-]*)-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_RUNTIMES: dict[str, Runtime] = {"docker": "docker", "libpod": "podman"}


@dataclass(frozen=True)
class ContainerRef:
    """A container as a cgroup path shows it."""

    id: str
    runtime: Runtime


@dataclass(frozen=True)
class Container:
    """A container as Docker knows it."""

    id: str
    name: str
    engine: str | None


@dataclass(frozen=True)
class Owner:
    kind: OwnerKind
    container: str | None = None
    unit: str | None = None
    reason: str | None = None
    """Why the owner is unknown."""


def _segments(cgroup: str) -> Iterable[list[str]]:
    """The path of every line of a cgroup file ("12:cpu,cpuacct:/a/b", or "0::/a/b" of version 2), as segments."""
    for line in cgroup.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield [segment for segment in parts[2].split("/") if segment]


def _container_of(path: list[str]) -> ContainerRef | None:
    """The innermost container of a path: with Docker in Docker the outer one comes first."""
    for at in range(len(path) - 1, -1, -1):
        match = _ID.fullmatch(path[at])
        if match is None or match["prefix"] == "libpod-conmon":  # conmon only watches over the container
            continue
        parent = path[at - 1] if at > 0 else ""
        prefix = match["prefix"] or ("docker" if parent == "docker" else "")
        # A parent of the operator's choosing (dockerd --cgroup-parent) has no telling name: Docker is asked about it.
        kubernetes = any(segment.startswith("kubepods") for segment in path)
        default: Runtime = "other" if kubernetes or match["prefix"] else "docker"
        return ContainerRef(match["id"], _RUNTIMES.get(prefix, default))
    return None


def container_ids(cgroup: str) -> frozenset[str]:
    """Every container id in a cgroup file."""
    return frozenset(
        match["id"] for path in _segments(cgroup) for segment in path if (match := _ID.fullmatch(segment)) is not None
    )


def parse_cgroup(cgroup: str, around: frozenset[str] = frozenset()) -> ContainerRef | None:
    """The container that /proc/<pid>/cgroup puts a process in, None for a process of the host itself.

    `around` are the ids that this host itself runs in (those of /proc/1/cgroup): where the host is a container, every
    path begins with them, and a process in no further container is a process of the host.
    """
    for path in _segments(cgroup):
        found = _container_of(path)
        if found is not None and found.id not in around:
            return found
    return None


def parse_unit(cgroup: str) -> str | None:
    """The systemd service of a process that is in no container."""
    for path in _segments(cgroup):
        for segment in reversed(path):
            if segment.endswith(".service"):
                return segment
    return None


def decide_owner(
    cgroup: str | None,
    around: frozenset[str],
    containers: Callable[[], Mapping[str, Container] | str],
) -> Owner:
    """Pure but for `containers`, which asks Docker: what it runs by id, or a sentence why it cannot be asked."""
    if cgroup is None:
        return Owner("unknown", reason=ENDED)
    ref = parse_cgroup(cgroup, around)
    if ref is None:
        return Owner("foreign", unit=parse_unit(cgroup))
    short = ref.id[:12]
    if ref.runtime != "docker":
        return Owner("foreign", container=f"{ref.runtime}:{short}" if ref.runtime == "podman" else short)
    known = containers()
    if isinstance(known, str):
        return Owner("unknown", container=short, reason=f"Docker cannot say whose container {short} is: {known}")
    container = known.get(ref.id)
    if container is None:
        return Owner("foreign", container=short)
    if container.engine is None:
        return Owner("foreign", container=container.name)
    return Owner("ours", container=container.name, unit=f"vllm-{container.engine}.service")


def read_cgroup(pid: int) -> str | None:
    """None when the process is gone."""
    try:
        return (PROC / str(pid) / "cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None


def docker_containers() -> Mapping[str, Container] | str:
    """Every container that Docker knows, by id; a sentence when it cannot be asked."""
    try:
        docker: Any = importlib.import_module("docker")
    except ImportError:
        return "the Python package docker is not installed here"
    try:
        client = docker.from_env(timeout=DOCKER_TIMEOUT_S)
        try:
            listed = client.api.containers(all=True)
        finally:
            client.close()
    except Exception as error:  # docker-py lets exceptions of requests and urllib3 through, too
        return f"it does not answer ({type(error).__name__}: {error})"
    return {
        entry["Id"]: Container(
            id=entry["Id"],
            name=str((entry.get("Names") or [entry["Id"][:12]])[0]).lstrip("/"),
            engine=(entry.get("Labels") or {}).get(ENGINE_LABEL),
        )
        for entry in listed
    }


def find_owners(pids: Iterable[int]) -> dict[int, Owner]:
    """The owner of each pid. Docker is asked once, and only when a process is in one of its containers."""
    answer: list[Mapping[str, Container] | str] = []

    def containers() -> Mapping[str, Container] | str:
        if not answer:
            answer.append(docker_containers())
        return answer[0]

    around = container_ids(read_cgroup(1) or "")
    return {pid: decide_owner(read_cgroup(pid), around, containers) for pid in pids}
