# SPDX-License-Identifier: Apache-2.0
"""Versions of the NVIDIA driver: loaded kernel module, libraries on the host, and libraries in the CDI specifications.

A container gets the libraries that the CDI specification mounts, and they only work with a kernel module of the same
version; otherwise NVML and CUDA in the container fail with "Driver/library version mismatch". A version that cannot be
read is unknown and never counts as a mismatch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..system import cdi

LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")
DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib")
GENERATED = "var/run/cdi"
"""Written anew at each boot. If a device is defined here and in STATIC, Docker uses the definition from here."""
STATIC = "etc/cdi"
MAX_LINKS = 40
"""Links to follow before a path counts as a loop."""

CONTROL_NODE = re.compile(r"/dev/nvidia(?:ctl|-uvm|-uvm-tools|-modeset)(?![\w-])")
"""Device nodes that belong to no single GPU."""

_LIBRARY = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class DriverVersions:
    """The versions that were found; empty if there is none or if it cannot be read."""

    module: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Version of the file behind each library, by the library's name."""
    specifications: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Versions of the driver libraries that each CDI specification for NVIDIA GPUs mounts, by its path."""

    @property
    def library(self) -> str:
        return next((self.libraries[name] for name in LIBRARIES if name in self.libraries), "")

    @property
    def in_use(self) -> Mapping[str, tuple[str, ...]]:
        generated = {path: found for path, found in self.specifications.items() if f"/{GENERATED}/" in path}
        return generated or self.specifications


@dataclass(frozen=True)
class Mismatch:
    """Why a container would not get access to its GPUs."""

    reason: str
    remedy: str
    heals: bool

    def __str__(self) -> str:
        return f"{self.reason[:1].upper()}{self.reason[1:]}. {self.remedy}."


def explain_mismatch(found: DriverVersions) -> Mismatch | None:
    """Return the mismatch that keeps new containers from using a GPU; None if there is none."""
    if not found.module:
        return None
    other = sorted({version for version in found.libraries.values() if version != found.module})
    if other:
        names = ", ".join(f"{name} is {version}" for name, version in sorted(found.libraries.items()))
        return Mismatch(
            f"the loaded NVIDIA kernel module is {found.module} and {names}: the driver was changed and the host not "
            "rebooted since, so NVML and CUDA answer 'Driver/library version mismatch' to every new process",
            "Reboot the host, or run the host stage with `-e allow_reboot=true`; engines that run already go on until "
            "then",
            heals=False,
        )
    mounted = {version for versions in found.in_use.values() for version in versions}
    if mounted and found.module not in mounted:
        stale = "; ".join(f"{path} mounts {', '.join(versions)}" for path, versions in sorted(found.in_use.items()))
        return Mismatch(
            f"the CDI specification was made for another driver: {stale}, the loaded kernel module is {found.module}; "
            "a container would get libraries that are gone or do not fit",
            "`systemctl restart nvidia-cdi-refresh.service` makes it anew; one in /etc/cdi was made by hand: remove "
            "it where that service exists, else run `nvidia-ctk cdi generate` for that file",
            heals=True,
        )
    return None


def resolve(root: Path, path: str) -> Path | None:
    """Return the file that a path leads to, with links resolved as if `root` were /; None if it leads nowhere."""
    at, ahead, links = root, [part for part in path.split("/") if part], 0
    while ahead:
        part, *ahead = ahead
        if part in (".", ".."):
            at = at.parent if part == ".." and at != root else at
            continue
        following = at / part
        if not following.is_symlink():
            at = following
            continue
        links += 1
        if links > MAX_LINKS:
            return None
        target = os.readlink(following)
        at = root if target.startswith("/") else at
        ahead = [part for part in target.split("/") if part] + ahead
    return at if at.exists() else None


def module_version(root: Path) -> str:
    """Return the version of the loaded kernel module; empty if none is loaded."""
    try:
        return (root / "sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def read_library_versions(root: Path) -> dict[str, str]:
    """Return the versions of the driver libraries, by library name.

    They are read from the file names, because loading a library would open the driver.
    """
    found: dict[str, str] = {}
    for name in LIBRARIES:
        for directory in DIRECTORIES:
            file = resolve(root, f"{directory}/{name}")
            if file is None:
                continue
            version = _LIBRARY.search(file.name)
            if version:
                found[name] = version[1]
            break
    return found


def read_specifications(root: Path) -> dict[str, str]:
    """Return the text of each CDI specification for NVIDIA GPUs, by path as the host sees it; generated ones first.

    Raises OSError.
    """
    found = {}
    for directory in (GENERATED, STATIC):
        place = resolve(root, directory)
        for path, text in cdi.gpu_specs(str(place)).items() if place else ():
            found[f"/{directory}/{Path(path).name}"] = text
    return found


def find_missing_access(devices: Sequence[str], root: Path = Path("/")) -> str | None:
    return find_missing_devices(devices, read_specifications(root), root)


def find_missing_devices(devices: Sequence[str], texts: Mapping[str, str], root: Path) -> str | None:
    """Return what keeps CDI from giving a container the devices so that CUDA works; None if nothing does.

    After a boot the specification may come late, may lack GPUs that are still being initialised, and lists only the
    nodes that exist at that moment; /dev/nvidia-uvm is made later than the others, or by nobody. A container that is
    created from such a specification has NVML and no CUDA. Devices are named as in `nvidia.com/gpu=<name>`,
    `texts` are the specifications by path.
    """
    if devices and not texts:
        return f"there is no CDI specification for NVIDIA GPUs in /{GENERATED} or /{STATIC}"
    for device in devices:
        name = next((path for path, text in texts.items() if device in cdi.parse_device_names(text)), None)
        if name is None:
            return f"the CDI specification does not define {device}"
        if not cdi.lists_uvm(texts[name]):
            return f"{name} does not list {cdi.UVM}, which CUDA needs"
        absent = [node for node in sorted(set(CONTROL_NODE.findall(texts[name]))) if not (root / node[1:]).exists()]
        if absent:
            return f"{', '.join(absent)} of {name} does not exist"
    return None


def read_versions(root: Path = Path("/")) -> DriverVersions:
    try:
        texts = read_specifications(root)
    except OSError:
        texts = {}
    mounted = {path: tuple(cdi.driver_versions(text)) for path, text in texts.items()}
    return DriverVersions(module_version(root), read_library_versions(root), mounted)
