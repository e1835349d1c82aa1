# SPDX-License-Identifier: Apache-2.0
"""Whether the containers of a host may still use the GPUs that they have, asked from outside of them.

When systemd is told daemon-reload it writes anew which devices the control groups may use that it manages. What
NVIDIA's older runtime hook let into a container it does not know: the container keeps the device nodes, may no longer
open them, and its NVML says "Unknown Error" (NVIDIA/nvidia-container-toolkit#48).

access(2) of a device node goes through the kernel's check of the control group (devcgroup_check_permission in
inode_permission: the rules of version 1, the BPF program of version 2) and does not open the device. So nothing of
the driver runs, and a lost GPU cannot make it hang. A process of ours joins the container's control group, asks, and
ends; nothing runs in the container, and nothing of it is changed.

The host stage asks before it has refused a Python that is too old: nothing here, and nothing that is imported, may
need more than Python 3.8.
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

from ..names import LABEL_ENGINE

ASK_S = 10.0
"""A limit of ours: the question takes some hundredths of a second."""

# Ends where it stands when its container ends. A container at its limit of memory must not lose a process to ours:
# where the kernel has to kill one of the group, this one goes first.
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
    """No container of this host can be asked; the text says why."""


class Unknown(Exception):
    """One container cannot be asked; the text says why."""


@dataclass(frozen=True)
class Hierarchy:
    """A mounted hierarchy of control groups that can say who may use a device."""

    version: int
    """1 for the controller `devices`, 2 for the unified hierarchy."""
    root: str
    """The group that the mount point shows."""
    point: str


@dataclass(frozen=True)
class Running:
    """A container that runs, as Docker knows it."""

    id: str
    name: str
    pid: int
    engine: str
    """The engine of ours that it is; empty for somebody else's."""
    paused: bool
    host_devices: bool
    """Whether its /dev is the host's: then a node in it does not say that it was given the device."""


@dataclass(frozen=True)
class Answer:
    """What the process said that asked. Devices are names below /dev."""

    devices: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    why: str = ""
    """Why it could not ask; empty where it could."""


@dataclass(frozen=True)
class Access:
    """A container that has GPUs. Devices are paths in it."""

    id: str
    name: str
    engine: str
    """The engine of ours that it is; empty for somebody else's."""
    devices: tuple[str, ...]
    denied: tuple[str, ...]
    """Those that it may not use."""
    unknown: str
    """Why it could not be asked; empty where it could."""

    @property
    def unit(self) -> str:
        """The unit that starts it; empty for somebody else's."""
        return f"vllm-{self.engine}.service" if self.engine else ""

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
    """Runs a program: its exit status and what it printed on both streams. CannotAsk where that is not possible."""

    def __call__(self, command: Sequence[str], /) -> tuple[int, str, str]: ...


class Asker(Protocol):
    """Asks for the devices in a directory as a member of the groups whose `cgroup.procs` are given. CannotAsk."""

    def __call__(self, place: Path, groups: Sequence[Path], /) -> Answer: ...


# -- what texts mean


def parse_hierarchies(mountinfo: str) -> list[Hierarchy]:
    """The mounts of /proc/self/mountinfo (proc(5)) that can say who may use a device."""
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
    """The groups that /proc/<pid>/cgroup (cgroups(7)) names for devices, by the version of their hierarchy."""
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
    """Where a group lies; Unknown where no mount shows it, as of a group outside of our own namespace."""
    if ".." not in path.split("/"):
        for hierarchy in hierarchies:
            root = hierarchy.root.rstrip("/")
            if f"{path}/".startswith(f"{root}/"):
                return (hierarchy.point.rstrip("/") + path[len(root) :]).rstrip("/")
    raise Unknown(f"its control group {path} is not to be seen from here")


def groups_of(cgroup: str, hierarchies: Sequence[Hierarchy]) -> list[str]:
    """The directories of the groups that say which devices a process may use, from its /proc/<pid>/cgroup.

    Where both versions are there the process is a member of both, and each may deny: both are given. A unified
    hierarchy that nobody has mounted denies nothing.
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
    """Containers that run, of what `docker inspect` prints; ValueError where that is something else."""
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


# -- asking


def ask_as_member(place: Path, groups: Sequence[Path]) -> Answer:
    """The real Asker: by a process of its own, since who joins a group stays in it."""
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


def running_containers(run: Run) -> list[Running]:
    """Every container that runs, by Docker's own program. CannotAsk where Docker cannot be asked."""
    try:
        _, shown, _ = run(["systemctl", "show", "--property=Id,LoadState,ActiveState", "--", "docker.service"])
    except CannotAsk:
        shown = ""
    unit = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    state = unit.get("ActiveState", "")
    # Its socket would start a Docker that somebody has stopped.
    if unit.get("LoadState") == "loaded" and state not in ("active", "activating", "reloading"):
        raise CannotAsk(f"docker.service is {state}")
    status, out, err = run(["docker", "ps", "--quiet", "--no-trunc"])
    if status != 0:
        raise CannotAsk(f"docker ps: {err.strip() or f'ended with {status}'}")
    ids = out.split()
    if not ids:
        return []
    status, out, err = run(["docker", "inspect", "--type=container", *ids])
    # One that has ended since is said so, beside the others.
    refused = [line for line in err.splitlines() if line.strip() and "no such" not in line.lower()]
    if status != 0 and refused:
        raise CannotAsk(f"docker inspect: {refused[0].strip()}")
    try:
        return parse_inspect(out)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise CannotAsk(f"docker inspect printed something else than containers: {error!r}") from error


def read_cgroup(proc: Path) -> str | None:
    """None where the process is gone."""
    try:
        return (proc / "cgroup").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise CannotAsk(f"{proc}/cgroup: {error.strerror}") from error


def examine(container: Running, hierarchies: Sequence[Hierarchy], root: Path, ask: Asker) -> Access | None:
    """What one container may use; None where it has no GPU, or has ended."""
    proc = root / "proc" / str(container.pid)
    cgroup = read_cgroup(proc)
    if cgroup is None:
        return None
    groups: list[Path] = []
    unknown = ""
    if container.paused:
        # On version 2 who joins a group that is frozen is frozen with it.
        unknown = "it is paused"
    else:
        try:
            groups = [root / directory.lstrip("/") for directory in groups_of(cgroup, hierarchies)]
        except Unknown as error:
            unknown = str(error)
    missing = [group for group in groups if not (group / "cgroup.procs").exists()]
    if missing:
        groups, unknown = [], f"its control group {missing[0]} does not exist"
    answer = ask(proc / "root" / "dev", [group / "cgroup.procs" for group in groups])
    # By now the container may have ended, and its pid may be another's.
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
    """Every running container that has GPUs, by name. CannotAsk where Docker or the kernel cannot be asked.

    `root` is the directory that has /proc and /sys; another one than / only in tests.
    """
    containers = running_containers(run)
    try:
        hierarchies = parse_hierarchies((root / "proc/self/mountinfo").read_text(encoding="utf-8"))
    except OSError as error:
        raise CannotAsk(f"/proc/self/mountinfo: {error.strerror}") from error
    found = [examine(container, hierarchies, root, ask) for container in containers]
    return sorted((access for access in found if access is not None), key=lambda access: access.name)
