# SPDX-License-Identifier: Apache-2.0
"""Owners of the processes on a GPU: from pid to container to engine to unit.

NVML reports host pids. /proc/<pid>/cgroup contains the id of the process's container. Docker knows the container's name
and labels, and the label vllm-edge.engine=<engine> means that it is ours, with the unit vllm-<engine>.service. If
Docker cannot be queried, the owner of a process in a container is `unknown`, with the reason. It is not called foreign,
because our own memory would then be blamed on somebody else.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..names import LABEL_SIDECAR, unit_name
from ..system.docker import Container, DockerAway, DockerEngine, DockerRefused
from ..system.process import PROC, is_hidden

DOCKER_TIMEOUT_S = 10

ENDED = "the process ended while it was being looked up"
"""Reason of an unknown owner; budget.py compares with it."""
HIDDEN = "/proc hides it (hidepid) from whom asks, who is not in the group of its option gid; ask as root"

OwnerKind = Literal["ours", "sidecar", "foreign", "unknown"]
Runtime = Literal["docker", "podman", "other"]

_ID = re.compile(r"(?:(?P<prefix>[a-z][a-z-]{0,60})-)?(?P<id>[0-9a-f]{64})(?:\.scope)?")
_RUNTIMES: dict[str, Runtime] = {"docker": "docker", "libpod": "podman"}


@dataclass(frozen=True)
class ContainerRef:
    id: str
    runtime: Runtime


@dataclass(frozen=True)
class Owner:
    """Owner of a process: `ours` (an engine), `sidecar` (our container beside them, which ends when a switch needs its
    place), `foreign` (somebody else) or `unknown`."""

    kind: OwnerKind
    container: str | None = None
    unit: str | None = None
    reason: str | None = None


def _split_paths(cgroup: str) -> Iterable[list[str]]:
    """Yield the path segments of each line of a cgroup file ("12:cpu,cpuacct:/a/b", or "0::/a/b" in version 2)."""
    for line in cgroup.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            yield [segment for segment in parts[2].split("/") if segment]


def _find_container(path: list[str]) -> ContainerRef | None:
    """Return the innermost container of a path: with Docker in Docker the outer one comes first."""
    for at in range(len(path) - 1, -1, -1):
        match = _ID.fullmatch(path[at])
        if match is None or match["prefix"] == "libpod-conmon":  # conmon only monitors the container
            continue
        parent = path[at - 1] if at > 0 else ""
        prefix = match["prefix"] or ("docker" if parent == "docker" else "")
        # If the operator chose the parent (dockerd --cgroup-parent), its name says nothing, so Docker is asked about
        # the id.
        kubernetes = any(segment.startswith("kubepods") for segment in path)
        default: Runtime = "other" if kubernetes or match["prefix"] else "docker"
        return ContainerRef(match["id"], _RUNTIMES.get(prefix, default))
    return None


def find_container_ids(cgroup: str) -> frozenset[str]:
    return frozenset(
        match["id"]
        for path in _split_paths(cgroup)
        for segment in path
        if (match := _ID.fullmatch(segment)) is not None
    )


def parse_cgroup(cgroup: str, around: frozenset[str] = frozenset()) -> ContainerRef | None:
    """Return the container of a process; None for a process of the host itself.

    `cgroup` is the content of /proc/<pid>/cgroup. `around` are the ids of containers that this host itself runs in
    (those of /proc/1/cgroup): if the host is a container, every path begins with them, and a process in no further
    container is a process of the host.
    """
    for path in _split_paths(cgroup):
        found = _find_container(path)
        if found is not None and found.id not in around:
            return found
    return None


def decide_owner(
    cgroup: str | None,
    around: frozenset[str],
    containers: Callable[[], Mapping[str, Container] | str],
    *,
    hidden: bool = False,
) -> Owner:
    """Determine the owner of a process. The function is pure except for `containers`.

    `cgroup` and `around` are as in `parse_cgroup`; None means that the process has ended, or is `hidden`. `containers`
    queries Docker, and returns the containers by id, or a sentence why Docker cannot be queried.
    """
    if cgroup is None:
        return Owner("unknown", reason=HIDDEN if hidden else ENDED)
    ref = parse_cgroup(cgroup, around)
    if ref is None:
        # Of the services in its path the innermost one.
        segments = (segment for path in _split_paths(cgroup) for segment in reversed(path))
        return Owner("foreign", unit=next((name for name in segments if name.endswith(".service")), None))
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
        return Owner("sidecar" if LABEL_SIDECAR in container.labels else "foreign", container=container.name)
    return Owner("ours", container=container.name, unit=unit_name(container.engine))


def read_cgroup(pid: int) -> str | None:
    try:
        return (PROC / str(pid) / "cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None


def list_docker_containers() -> Mapping[str, Container] | str:
    """Return all containers that Docker knows, by id, or a sentence why Docker cannot be queried."""
    if importlib.util.find_spec("docker") is None:
        return "the Python package docker is not installed here"
    try:
        return {entry.id: entry for entry in DockerEngine(request_timeout_s=DOCKER_TIMEOUT_S).listed()}
    except (DockerAway, DockerRefused) as error:
        return f"it does not answer ({error})"


def find_owners(pids: Iterable[int]) -> dict[int, Owner]:
    """Return the owner of each pid. Docker is queried at most once, and only if a process is in a Docker container."""
    answer: list[Mapping[str, Container] | str] = []

    def containers() -> Mapping[str, Container] | str:
        if not answer:
            answer.append(list_docker_containers())
        return answer[0]

    around = find_container_ids(read_cgroup(1) or "")
    return {pid: decide_owner(read_cgroup(pid), around, containers, hidden=is_hidden(pid)) for pid in pids}
