# SPDX-License-Identifier: Apache-2.0
"""Check, from outside of the containers of a host, whether they may still open the GPU devices that they were given.

`systemctl daemon-reload` makes systemd write the device permissions of the control groups that it manages anew. It does
not know what NVIDIA's legacy runtime hook granted to a container: the container keeps its device nodes but may no
longer open them, and NVML in it fails with "Unknown Error" (NVIDIA/nvidia-container-toolkit#48).

The check uses access(2) on the device node. access(2) passes the kernel's check of the control group
(devcgroup_check_permission in inode_permission: the rules of version 1, the BPF program of version 2) without opening
the device. So no driver code runs, and a lost GPU cannot block it. A process of ours joins the container's control
group, calls access(2) and ends; nothing runs in the container and nothing in it is changed.

The host stage runs this before it has rejected a Python that is too old, so this file and everything that it imports
must work with Python 3.8.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..names import LABEL_ENGINE, unit_name

ASK_S = 10.0
"""Seconds that the check of one container may take. Our choice: it normally takes some hundredths of a second."""

# Program of the process that joins the control group (see `ask_as_member`). It is killed with the container if that
# ends. It sets its oom_score_adj to the maximum, so that in a container at its memory limit the kernel kills this
# process and none of the container's.
PROGRAM = r"""
import json, os, re, stat, sys

place, groups = sys.argv[1], sys.argv[2:]
answer = {"devices": [], "denied": [], "why": ""}
try:
    try:
        directory = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        directory = None
    names = [] if directory is None else sorted(os.listdir(directory))
    for name in names:
        if re.fullmatch("nvidia(ctl|-uvm|[0-9]+)", name):
            if stat.S_ISCHR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                answer["devices"].append(name)
    if answer["devices"] and groups:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        for group in groups:
            with open(group, "w") as file:
                file.write(str(os.getpid()))
        for name in answer["devices"]:
            if not os.access(name, os.R_OK | os.W_OK, dir_fd=directory):
                answer["denied"].append(name)
except OSError as error:
    answer["why"] = f"{error.filename or place}: {error.strerror}"
print(json.dumps(answer))
"""


class CannotAsk(Exception):
    """No container of this host can be checked; the text says why."""


class Unknown(Exception):
    """One container cannot be checked; the text says why."""


@dataclass(frozen=True)
class Hierarchy:
    """A mounted control group hierarchy that controls access to devices."""

    version: int
    """1 for the controller `devices`, 2 for the unified hierarchy."""
    root: str
    """The group at the mount point."""
    point: str
    """The mount point."""


@dataclass(frozen=True)
class Running:
    """A running container, as Docker describes it."""

    id: str
    name: str
    pid: int
    engine: str
    """Name of the engine; empty if vllm-edge did not create the container."""
    paused: bool
    host_devices: bool
    """Whether its /dev is the host's. Then a device node in it does not show that the container was given the device.
    """


@dataclass(frozen=True)
class Answer:
    """Result of the check in one container. Devices are names below /dev."""

    devices: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    why: str = ""
    """Why the check failed; empty if it succeeded."""


@dataclass(frozen=True)
class Access:
    """A container that has GPUs. Devices are paths in the container."""

    id: str
    name: str
    engine: str
    """Name of the engine; empty if vllm-edge did not create the container."""
    devices: tuple[str, ...]
    denied: tuple[str, ...]
    """The devices that it may not open."""
    unknown: str
    """Why it could not be checked; empty if it was."""

    @property
    def unit(self) -> str:
        """The unit that starts the container; empty if vllm-edge did not create it."""
        return unit_name(self.engine) if self.engine else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "ours": bool(self.engine),
            "unit": self.unit,
            "devices": list(self.devices),
            "denied": list(self.denied),
            "unknown": self.unknown,
        }


class Run(Protocol):
    """Runs a program and returns exit status, standard output and standard error. Raises CannotAsk if that is
    impossible.
    """

    def __call__(self, command: Sequence[str], /) -> tuple[int, str, str]: ...


class Asker(Protocol):
    """Checks the devices in `place` as a member of the groups with these `cgroup.procs` files. Raises CannotAsk."""

    def __call__(self, place: Path, groups: Sequence[Path], /) -> Answer: ...


# -- parsing


def parse_hierarchies(mountinfo: str) -> list[Hierarchy]:
    """Return the mounted hierarchies that control access to devices.

    Args:
        mountinfo: content of /proc/self/mountinfo (proc(5))
    """
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        root, point = (re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields[3:5])
        if kind[0] == "cgroup2":
            found.append(Hierarchy(2, root, point))
        elif kind[0] == "cgroup" and "devices" in kind[2].split(","):
            found.append(Hierarchy(1, root, point))
    return found


def parse_memberships(cgroup: str) -> dict[int, str]:
    """Return the control groups of a process that concern devices, by the version of their hierarchy.

    Args:
        cgroup: content of /proc/<pid>/cgroup (cgroups(7))
    """
    found = {}
    for line in cgroup.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "devices" in controllers.split(","):
            found[1] = path
        elif number == "0" and not controllers:
            found[2] = path
    return found


def directory_of(path: str, hierarchies: Iterable[Hierarchy]) -> str:
    """Return the directory of a control group.

    Raises:
        Unknown: no mount shows the group, for example because it is outside of our cgroup namespace
    """
    if ".." not in path.split("/"):
        for hierarchy in hierarchies:
            root = hierarchy.root.rstrip("/")
            if f"{path}/".startswith(f"{root}/"):
                return (hierarchy.point.rstrip("/") + path[len(root) :]).rstrip("/")
    raise Unknown(f"its control group {path} is not to be seen from here")


def find_group_directories(cgroup: str, hierarchies: Sequence[Hierarchy]) -> list[str]:
    """Return the directories of the control groups that decide which devices a process may open.

    If both versions are in use, the process is a member of a group in each and either may deny, so both are returned. A
    unified hierarchy that is not mounted denies nothing.

    Args:
        cgroup: content of /proc/<pid>/cgroup
        hierarchies: the mounted hierarchies

    Raises:
        Unknown: the process has no such group or its directory is not visible
    """
    paths = parse_memberships(cgroup)
    if 1 in paths and not any(hierarchy.version == 2 for hierarchy in hierarchies):
        paths.pop(2, None)
    if not paths:
        raise Unknown("the kernel names no control group of it that is for devices")
    return [
        directory_of(path, [hierarchy for hierarchy in hierarchies if hierarchy.version == version])
        for version, path in sorted(paths.items())
    ]


def parse_inspect(text: str) -> list[Running]:
    """Return the running containers from the output of `docker inspect`. Raises ValueError if it is no list."""
    listed = json.loads(text)
    if not isinstance(listed, list):
        raise ValueError("no list")
    found = []
    for entry in listed:
        state = entry.get("State") or {}
        if not state.get("Pid"):
            continue
        found.append(
            Running(
                id=str(entry["Id"]),
                name=str(entry.get("Name") or entry["Id"][:12]).lstrip("/"),
                pid=int(state["Pid"]),
                engine=str(((entry.get("Config") or {}).get("Labels") or {}).get(LABEL_ENGINE) or ""),
                paused=bool(state.get("Paused")),
                host_devices=any(mount.get("Destination") == "/dev" for mount in entry.get("Mounts") or []),
            )
        )
    return found


# -- checking


def ask_as_member(place: Path, groups: Sequence[Path]) -> Answer:
    """Check the devices from a separate process, because a process that joined a group stays in it. Raises CannotAsk.

    Args:
        place: directory of the device nodes, /proc/<pid>/root/dev of the container
        groups: `cgroup.procs` files of the groups to join; with none the devices are only listed
    """
    if os.geteuid() != 0:
        raise CannotAsk("only root may join the control group of a container")
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(place), *map(str, groups)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False, cwd="/")
    except subprocess.TimeoutExpired:
        return Answer(why=f"no answer within {ASK_S:g} s")
    except OSError as error:
        raise CannotAsk(f"{sys.executable} cannot be run: {error.strerror}") from error
    try:
        said = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return Answer(why=f"the process that asks ended with {done.returncode}: {last}")
    return Answer(tuple(said["devices"]), tuple(said["denied"]), said["why"])


def list_running_containers(run: Run) -> list[Running]:
    """Return all running containers, by means of the `docker` command. Raises CannotAsk."""
    try:
        _, shown, _ = run(["systemctl", "show", "--property=Id,LoadState,ActiveState", "--", "docker.service"])
    except CannotAsk:
        shown = ""
    unit = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    state = unit.get("ActiveState", "")
    # Its socket unit would start a Docker Engine that somebody has stopped.
    if unit.get("LoadState") == "loaded" and state not in ("active", "activating", "reloading"):
        raise CannotAsk(f"docker.service is {state}")
    status, out, err = run(["docker", "ps", "--quiet", "--no-trunc"])
    if status != 0:
        raise CannotAsk(f"docker ps: {err.strip() or f'ended with {status}'}")
    ids = out.split()
    if not ids:
        return []
    status, out, err = run(["docker", "inspect", "--type=container", *ids])
    # Containers that have ended since are reported as errors beside the others.
    refused = [line for line in err.splitlines() if line.strip() and "no such" not in line.lower()]
    if status != 0 and refused:
        raise CannotAsk(f"docker inspect: {refused[0].strip()}")
    try:
        return parse_inspect(out)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise CannotAsk(f"docker inspect printed something else than containers: {error!r}") from error


def read_cgroup(proc: Path) -> str | None:
    """Return the control groups of the process with this proc directory; None if it has ended. Raises CannotAsk."""
    try:
        return (proc / "cgroup").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise CannotAsk(f"{proc}/cgroup: {error.strerror}") from error


def examine(container: Running, hierarchies: Sequence[Hierarchy], root: Path, ask: Asker) -> Access | None:
    """Check one container; None if it has no GPU or has ended.

    Args:
        container: the container
        hierarchies: the mounted control group hierarchies
        root: directory that has proc and sys
        ask: makes the check

    Raises:
        CannotAsk: no container can be checked
    """
    proc = root / "proc" / str(container.pid)
    cgroup = read_cgroup(proc)
    if cgroup is None:
        return None
    groups: list[Path] = []
    unknown = ""
    if container.paused:
        # On version 2 a process that joins a frozen group is frozen too.
        unknown = "it is paused"
    else:
        try:
            groups = [root / directory.lstrip("/") for directory in find_group_directories(cgroup, hierarchies)]
        except Unknown as error:
            unknown = str(error)
    missing = [group for group in groups if not (group / "cgroup.procs").exists()]
    if missing:
        groups, unknown = [], f"its control group {missing[0]} does not exist"
    answer = ask(proc / "root" / "dev", [group / "cgroup.procs" for group in groups])
    # Meanwhile the container may have ended and another process may have its pid.
    if read_cgroup(proc) != cgroup or not (answer.devices or answer.why):
        return None
    unknown = unknown or answer.why
    if answer.denied and container.host_devices:
        unknown = "its /dev is the host's, which does not say what it was given"
    devices, denied = ([f"/dev/{name}" for name in names] for names in (answer.devices, answer.denied))
    return Access(
        id=container.id,
        name=container.name,
        engine=container.engine,
        devices=tuple(devices),
        denied=() if unknown else tuple(denied),
        unknown=unknown,
    )


def look(run: Run, root: Path = Path("/"), ask: Asker = ask_as_member) -> list[Access]:
    """Return all running containers that have GPUs, sorted by name.

    Args:
        run: runs a program on the host
        root: directory that has proc and sys; other than / only in tests
        ask: makes the check in one container

    Raises:
        CannotAsk: Docker or the kernel cannot be queried
    """
    containers = list_running_containers(run)
    try:
        hierarchies = parse_hierarchies((root / "proc/self/mountinfo").read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotAsk(f"/proc/self/mountinfo: {error.strerror}") from error
    found = [examine(container, hierarchies, root, ask) for container in containers]
    return sorted((access for access in found if access is not None), key=lambda access: access.name)
