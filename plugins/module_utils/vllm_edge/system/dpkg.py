# SPDX-License-Identifier: Apache-2.0
"""What dpkg and apt say of a driver's packages: which there are, what is half installed, where they came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Packages = Mapping[str, Mapping[str, Any]]
"""Installed packages: name to version and held."""

FORMAT = "${Package}\\t${db:Status-Abbrev}\\t${Version}\\n"
"""What dpkg-query -W is to print for `parse_packages`."""
PATTERNS = (
    "nvidia-*",
    "libnvidia-*",
    "libcuda1",
    "linux-image-*",
    "linux-headers-*",
    "linux-modules-nvidia-*",
    "linux-objects-nvidia-*",
    "linux-signatures-nvidia-*",
)
# The container toolkit shares the vendor's prefix and has its own versions and its own role; a pin is no driver.
OTHERS = re.compile(r"nvidia-container-.*|libnvidia-container.*|nvidia-docker.*|nvidia-driver-pinning-.*")
PREBUILT = re.compile(r"linux-(?:modules|objects|signatures)-nvidia-.*")
"""Modules that a distribution built and signed; their versions are the kernel's."""
DRIVER = re.compile(rf"(?:lib)?nvidia-.*|libcuda1|{PREBUILT.pattern}")
# A metapackage follows the newest kernel of its flavour; the packages of one kernel begin with its version.
_KERNEL = re.compile(r"linux-image-(?!\d|unsigned-|extra-|uc-)(.+)")
# Left by the vendor's .run installer and by nothing else.
INSTALLERS = ("/usr/bin/nvidia-uninstall", "/usr/local/bin/nvidia-uninstall")


def upstream(version: str) -> str:
    """The vendor's version in a Debian version, without epoch and revision."""
    return version.split(":", 1)[-1].rsplit("-", 1)[0]


def parse_packages(text: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Installed packages and half installed ones, from dpkg-query's name, status and version."""
    installed: dict[str, dict[str, Any]] = {}
    half: list[str] = []
    for line in text.splitlines():
        name, status, version = line.split("\t")
        # Status is what is wanted (i, h = hold, ...) and what is: n nothing, c only its configuration, i installed.
        if status[1] == "i":
            installed[name] = {"version": version, "held": status[0] == "h"}
        elif status[1] not in "nc":
            half.append(name)
    return installed, sorted(half)


def is_driver(name: str) -> bool:
    """Whether a package is a part of a driver, whoever made it."""
    return bool(DRIVER.fullmatch(name)) and not OTHERS.fullmatch(name)


def is_versioned(version: str) -> bool:
    """Whether a version is a driver's. Helpers such as nvidia-installer-cleanup have dates for versions."""
    return bool(re.match(r"\d{3}\.\d+", upstream(version)))


def versioned(packages: Packages) -> list[str]:
    """Installed packages of drivers, without the helpers that have dates for versions."""
    return sorted(name for name, package in packages.items() if is_driver(name) and is_versioned(package["version"]))


def driver_packages(packages: Packages, version: str) -> list[str]:
    """The packages that make up the driver: apt must not replace one of them alone."""
    return sorted(name for name in packages if is_driver(name) and upstream(packages[name]["version"]) == version)


def parse_policy(text: str) -> dict[str, list[str]]:
    """The sources that offer the installed version of each package, from apt-cache policy."""
    offered: dict[str, list[str]] = {}
    name, mine = "", False
    for line in text.splitlines():
        if re.match(r"\S.*:$", line):
            name, mine = line[:-1].split(":")[0], False
            offered.setdefault(name, [])
        elif match := re.match(r" (\*\*\*|   ) \S+ -?\d+$", line):
            mine = match[1] == "***"
        elif mine and (match := re.match(r"\s+-?\d+ (\S+:\S+)", line)):
            offered[name].append(match[1])
    return offered


def kernel_flavours(packages: Packages) -> dict[str, str]:
    """Installed kernel metapackages to what they call their flavour: linux-image-generic, generic."""
    found = ((name, _KERNEL.fullmatch(name)) for name in sorted(packages))
    return {name: match[1] for name, match in found if match}


def wanted_modules(prefix: str, packages: Packages, kernels: list[str]) -> list[str]:
    """Packages of prebuilt modules: for each flavour, so that the next kernel has one, and for these kernels."""
    names = [*kernel_flavours(packages).values(), *kernels]
    return [f"{prefix}{name}" for name in dict.fromkeys(names)]


def other_branches(names: list[str], branch: str) -> list[str]:
    """Packages whose names carry another branch: the driver of the wanted one does not replace them."""
    found = ((name, re.search(r"-(\d{3})(?=-|$)", name)) for name in names)
    return [name for name, match in found if match and match[1] != branch]


def parse_origins(text: str) -> dict[str, set[str]]:
    """Addresses of apt's sources to who signs them (`o=` of the release), from `apt-cache policy` without a package."""
    found: dict[str, set[str]] = {}
    uri = ""
    for line in text.splitlines():
        if match := re.match(r"\s+-?\d+ (\S+:\S+)", line):
            uri = match[1]
        elif uri and (match := re.search(r"^\s+release .*?\bo=([^,]+)", line)):
            found.setdefault(uri, set()).add(match[1])
    return found
