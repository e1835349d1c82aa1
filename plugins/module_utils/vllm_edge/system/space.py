# SPDX-License-Identifier: Apache-2.0
"""Free space: the file systems that each step writes to, what is left there, and why something was not written."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..paths import ETC, RUN, STATE
from .host import HostReader, Unread

MIB = 1024**2
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
DOCKER = "/var/lib/docker"
PLACES = {
    **{"prefix": "/opt/vllm-edge", "data": "/data/vllm", "etc": ETC, "run": RUN, "state": STATE},
    **{"docker": DOCKER, "images": DOCKER},
}
"""Directories that variables or Docker may put elsewhere, by the name that the steps have for them."""


@dataclass(frozen=True)
class Step:
    kept_mib: Mapping[str, int]
    """Every directory, or name in PLACES, that the step writes to, with the MiB that stay free; our choices."""
    hint: str
    """What makes room there."""
    inodes: int = 100
    """Inodes that have to be free; our choice."""


TMP, VAR_TMP = "/tmp", "/var/tmp"  # noqa: S108

STEPS: Mapping[str, Step] = {
    # What apt, Docker, the journal and programs need. Only the doctor looks at all of it.
    "system": Step(
        {"/": 1024, "/usr": 64, "/var": 1024, "/var/log": 64, TMP: 64},
        "'journalctl --vacuum-size=200M' shortens the journal.",
    ),
    # For dpkg's own files and the scripts of packages, which apt does not count.
    "packages": Step(
        {"/var/cache/apt/archives": 512, "/usr": 512, "/var/lib/dpkg": 512, TMP: 16},
        "'apt-get clean', removing old kernels ('apt-get autoremove --purge') and 'journalctl --vacuum-size=200M' free "
        "some.",
        inodes=2000,
    ),
    # It is made in /var/tmp (mkinitramfs(8), dracut(8)), and written beside the former one. Our estimates are of one
    # with the NVIDIA modules.
    "initramfs": Step(
        {"/boot": 128, VAR_TMP: 256}, "Removing old kernels ('apt-get autoremove --purge') frees some for an initramfs."
    ),
    "program": Step({"prefix": 256, TMP: 64}, "vllm_edge_host_prefix names another place.", inodes=10_000),
    "image": Step(
        {"images": 1024, "docker": 64, "state": 64},
        "'docker system df' shows what Docker uses, and a larger file system could hold Docker's data.",
    ),
    "weights": Step({"data": 1024, "state": 64}, "vllm_edge_host_data_directory names another place."),
    # Of a benchmark, a suite of questions or a reference: what it records.
    "run": Step({"state": 64, "run": 1}, "Records need it."),
    "switch": Step({"state": 64, "etc": 4, "run": 1}, "Switches and records need it."),
}


@dataclass(frozen=True)
class Space:
    """A file system that a step writes to."""

    step: str
    mount: str
    paths: tuple[str, ...]
    """The directories of the step that are on it."""
    free_bytes: int
    free_inodes: int | None
    """None on a file system that makes inodes as it needs them."""
    read_only: bool = False
    needed_bytes: int = 0
    """What is about to be written there."""
    kept_bytes: int = 0
    """What has to stay free beside that."""

    @property
    def where(self) -> str:
        others = [path for path in self.paths if path != self.mount]
        return self.mount + (f", the file system of {' and '.join(others)}," if others else "")


def _find_existing(path: Path) -> Path:
    """Return the path, or the directory in which it will be, without links. Raises OSError."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path.resolve()


def find_mount(path: Path) -> Path:
    """Return the mount point of the file system that a path is on, or will be on once it exists. Raises OSError."""
    place = _find_existing(path)
    return next((each for each in (place, *place.parents) if os.path.ismount(each)), place)


def measure_step(
    step: str,
    at: Mapping[str, Path | str] | None = None,
    needed: Mapping[str, int] | None = None,
    kept: Mapping[str, int] | None = None,
    root: Path = Path("/"),
) -> list[Space]:
    """Return the file systems that a step writes to, each once.

    Args:
        step: its name in STEPS
        at: the directory of a name in PLACES where that is another one
        needed: bytes that are about to be written, by name or directory; of one file system they are added up
        kept: bytes that stay free, by name or directory, where they are not those of the step
        root: of the host's file system

    Raises OSError.
    """
    needed = needed or {}
    reserves = {**{name: mib * MIB for name, mib in STEPS[step].kept_mib.items()}, **(kept or {})}
    systems: dict[int, list[tuple[str, str, Path]]] = {}
    for name in dict.fromkeys([*reserves, *needed]):
        path = str((at or {}).get(name) or PLACES.get(name, name))
        place = _find_existing(root / path.lstrip("/"))
        systems.setdefault(place.stat().st_dev, []).append((name, path, place))
    return [
        Space(
            step,
            str(find_mount(rows[0][2])),
            tuple(dict.fromkeys(path for _, path, _ in rows)),
            *_read_free(rows[0][2]),
            sum(needed.get(name, 0) for name, _, _ in rows),
            max(reserves.get(name, 0) for name, _, _ in rows),
        )
        for rows in systems.values()
    ]


def _read_free(place: Path) -> tuple[int, int | None, bool]:
    found = os.statvfs(place)
    inodes = found.f_favail if found.f_files else None
    return found.f_bavail * found.f_frsize, inodes, _is_read_only(place, found.f_flag)


def _is_read_only(place: Path, flags: int) -> bool:
    """Return whether the host has mounted it read-only; it may be so only for a service, by `ProtectSystem`."""
    if not flags & os.ST_RDONLY:
        return False
    try:
        return bool(os.statvfs(f"/proc/1/root{place}").f_flag & os.ST_RDONLY)
    except OSError:
        return True


def find_shortage(space: Space) -> str:
    """Return why the step cannot write there; empty if it has the room."""
    if space.read_only:
        return f"{space.where} is mounted read-only"
    if space.free_inodes is not None and space.free_inodes < STEPS[space.step].inodes:
        return f"{space.where} has {space.free_inodes} inodes free, and {STEPS[space.step].inodes} are needed ('df -i')"
    if space.free_bytes >= space.needed_bytes + space.kept_bytes:
        return ""
    needed, kept = -(-space.needed_bytes // MIB), space.kept_bytes // MIB
    wanted = f"{needed} MiB are to be written and {kept} MiB to stay free" if needed else f"{kept} MiB have to be"
    return f"{space.where} has {space.free_bytes // MIB} MiB free, and {wanted}"


def list_shortages(step: str, *asked: Any, **options: Any) -> list[str]:
    """Return why a step cannot write where it has to, for each file system; the arguments are those of `measure_step`.

    Raises OSError.
    """
    return [wrong for space in measure_step(step, *asked, **options) if (wrong := find_shortage(space))]


def tell_use(mount: Path | str) -> str:
    return f"'du -xh --max-depth=2 {mount} | sort -h | tail' shows where it went"


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def locate_images(host: HostReader, docker: str = "docker") -> dict[str, str]:
    """Return Docker's data directory and that of its images, as `docker` and `images` of PLACES.

    The latter is containerd's where Docker uses its store, as new hosts do since Docker 29. If Docker does not answer,
    daemon.json tells the former.
    """
    ran = host.ask(docker, "info", "--format", "{{json .}}")
    info = {} if isinstance(ran, Unread) else _parse(ran.out)
    root = str(info.get("DockerRootDir") or _parse(host.plain("etc/docker/daemon.json")).get("data-root") or DOCKER)
    # A containerd that dockerd starts itself has its data and its socket in directories of Docker.
    own = "/docker/" in str((info.get("Containerd") or {}).get("Address"))
    if own or "io.containerd.snapshotter" not in str(info.get("DriverStatus")):
        return {"docker": root, "images": root}
    top = re.split(r"(?m)^[ \t]*\[", host.plain("etc/containerd/config.toml"))[0]
    store = re.search(r"""^root[ \t]*=[ \t]*(["'])(.+?)\1""", top, re.MULTILINE)
    return {"docker": root, "images": store[2] if store else "/var/lib/containerd"}


def describe_full(number: int, path: Path) -> str:
    """Return which file system an error number of UNWRITABLE is about, and what is free there. Raises OSError."""
    mount = find_mount(path)
    if number == errno.EROFS:
        return f"the file system {mount} is mounted read-only"
    free_bytes, inodes, _ = _read_free(_find_existing(path))
    left = f"{free_bytes // MIB} MiB{'' if inodes is None else f' and {inodes} inodes'} free now"
    return f"the file system {mount} is full, or a quota holds there ({left})"


def explain_unwritable(error: OSError, fallback: Path) -> str:
    """Return which file system is full, over its quota or read-only, with a remedy; empty for another error.

    `fallback` is a path on it where the error names none. A copy names what it reads first, and what it writes second.
    """
    if error.errno not in UNWRITABLE:
        return ""
    place = fallback / os.fsdecode(error.filename2 or error.filename or fallback)
    mount = find_mount(place)
    remedy = (
        f"'findmnt {mount}' shows its options, and 'journalctl --dmesg' whether its disk fails. Repair it"
        if error.errno == errno.EROFS
        else f"{tell_use(mount)}. Make room there,"
    )
    told = describe_full(error.errno, place)
    return f"{place} could not be written ({os.strerror(error.errno)}): {told}. {remedy} and run again."
