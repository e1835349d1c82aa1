# SPDX-License-Identifier: Apache-2.0
"""The driver's version in its three places: the loaded kernel module, the libraries, the CDI specifications.

A container gets the libraries that the specification mounts, and they only talk to a module of their own version:
otherwise NVML and CUDA fail inside with "Driver/library version mismatch". What cannot be read is not known, and what
is not known is no mismatch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..system import cdi

LIBRARIES = ("libnvidia-ml.so.1", "libcuda.so.1")
DIRECTORIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib/aarch64-linux-gnu", "usr/lib")
GENERATED = "var/run/cdi"
"""Written anew at each boot; Docker prefers a device from here to one of the same name from STATIC."""
STATIC = "etc/cdi"
MAX_LINKS = 40

_NUMBER = r"\d+\.\d+(?:\.\d+)?"
_LIBRARY = re.compile(rf"\.so\.({_NUMBER})")
_MODULE = re.compile(rf"Kernel Module\b.*?\s({_NUMBER})\s")


@dataclass(frozen=True)
class DriverVersions:
    """What was found; empty where there is none or where it cannot be read."""

    module: str = ""
    """Of the loaded kernel module."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Name of the library to the version of the file behind it."""
    specifications: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Path of each CDI specification of NVIDIA's GPUs to the versions of the driver's libraries that it mounts."""

    @property
    def library(self) -> str:
        """The libraries' version, that of NVML first."""
        return next((self.libraries[name] for name in LIBRARIES if name in self.libraries), "")

    @property
    def in_use(self) -> Mapping[str, tuple[str, ...]]:
        """The specifications that containers get their libraries from: generated ones where there are any."""
        generated = {path: found for path, found in self.specifications.items() if f"/{GENERATED}/" in path}
        return generated or self.specifications


@dataclass(frozen=True)
class Mismatch:
    """Why a container would not reach its GPUs. `heals` says whether it can pass without anybody's doing."""

    reason: str
    remedy: str
    heals: bool

    def __str__(self) -> str:
        return f"{self.reason[:1].upper()}{self.reason[1:]}. {self.remedy}."


def explain_mismatch(found: DriverVersions) -> Mismatch | None:
    """None where nothing speaks against starting a container."""
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
    """The file that a path leads to, with every link taken as if root were /; None where it leads nowhere."""
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
    """Of the loaded module; empty where none is loaded."""
    try:
        return (root / "sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        pass
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = _MODULE.search(text)
    return found[1] if found else ""


def library_versions(root: Path) -> dict[str, str]:
    """By the names of the files: to load a library would be to open the driver."""
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


def specification_versions(root: Path) -> dict[str, tuple[str, ...]]:
    """Of every specification that names NVIDIA's GPUs; paths as the host has them."""
    found: dict[str, tuple[str, ...]] = {}
    for directory in (STATIC, GENERATED):
        try:
            texts = cdi.gpu_specs(str(root / directory))
        except OSError:
            continue
        for path, text in texts.items():
            found[f"/{Path(path).relative_to(root)}"] = tuple(cdi.driver_versions(text))
    return found


def read_versions(root: Path = Path("/")) -> DriverVersions:
    """The whole host."""
    return DriverVersions(module_version(root), library_versions(root), specification_versions(root))
