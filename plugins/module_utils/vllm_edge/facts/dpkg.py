# SPDX-License-Identifier: Apache-2.0
"""Parsing of dpkg's and apt's output about NVIDIA driver packages: what is installed, half installed and offered."""

from __future__ import annotations

import re
from typing import Any, Mapping  # noqa: UP035 that of collections.abc cannot be subscripted by Python 3.8

Packages = Mapping[str, Mapping[str, Any]]
"""Installed packages by name: `version` (str) and `held` (bool)."""

FORMAT = "${Package}\\t${db:Status-Abbrev}\\t${Version}\\n"
"""Output format for `dpkg-query -W` that `parse_packages` reads."""
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
"""Package name patterns to query."""
# Packages with NVIDIA's prefix that are no part of a driver: the container toolkit has its own versions and its own
# role, a pinning package only configures apt, and CUDA's compiler and libraries are for programs of others.
OTHERS = re.compile(
    r"(?:lib)?nvidia-container.*|nvidia-docker.*|nvidia-driver-pinning-.*|nvidia-cuda-(?!mps).*|nvidia-cudnn.*"
)
PREBUILT = re.compile(r"linux-(?:modules|objects|signatures)-nvidia-.*")
"""Kernel modules that a distribution built and signed; their versions follow the kernel."""
DRIVER = re.compile(rf"(?:lib)?nvidia-.*|libcuda1|{PREBUILT.pattern}")
# Kernel metapackages follow the newest kernel of their flavour. Names for one kernel begin with its version.
_KERNEL = re.compile(r"linux-image-(?!\d|unsigned-|extra-|uc-)(.+)")
# Only NVIDIA's .run installer leaves these files.
INSTALLERS = ("/usr/bin/nvidia-uninstall", "/usr/local/bin/nvidia-uninstall")


def parse_upstream_version(version: str) -> str:
    """Return NVIDIA's version, which is the Debian version without epoch and revision."""
    return version.split(":", 1)[-1].rsplit("-", 1)[0]


def parse_packages(text: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Parse dpkg-query in FORMAT. Return the installed packages by name, and the names of half installed ones."""
    installed: dict[str, dict[str, Any]] = {}
    half: list[str] = []
    for line in text.splitlines():
        name, status, version = line.split("\t")
        # The first letter is the wanted state (i install, h hold, ...), the second the actual one (n not installed, c
        # only configuration files left, i installed).
        if status[1] == "i":
            installed[name] = {"version": version, "held": status[0] == "h"}
        elif status[1] not in "nc":
            half.append(name)
    return installed, sorted(half)


def is_driver(name: str) -> bool:
    return bool(DRIVER.fullmatch(name)) and not OTHERS.fullmatch(name)


def is_versioned(version: str) -> bool:
    """Return whether this is a driver version. Helpers such as nvidia-installer-cleanup have dates as versions."""
    return bool(re.match(r"\d{3}\.\d+", parse_upstream_version(version)))


def versioned(packages: Packages) -> list[str]:
    """Return the installed driver packages, without helpers that have dates as versions."""
    return sorted(name for name, package in packages.items() if is_driver(name) and is_versioned(package["version"]))


def driver_packages(packages: Packages, version: str) -> list[str]:
    """Return the packages that make up the driver of this version. apt must not upgrade one of them alone."""
    return sorted(
        name for name in packages if is_driver(name) and parse_upstream_version(packages[name]["version"]) == version
    )


def parse_policy(text: str) -> dict[str, list[str]]:
    """Parse `apt-cache policy`: the sources that offer the installed version of each package."""
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


def parse_madison(text: str) -> dict[str, list[str]]:
    """Parse `apt-cache madison`: the available versions of each package, newest first."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 3 and cells[1] not in found.setdefault(cells[0], []):
            found[cells[0]].append(cells[1])
    return found


def parse_show(text: str) -> dict[str, dict[str, str]]:
    """Parse `apt-cache show --no-all-versions`: the fields of each package's candidate, by its name."""
    found: dict[str, dict[str, str]] = {}
    for stanza in text.split("\n\n"):
        fields = dict(re.findall(r"^([\w-]+): (.*)$", stanza, re.MULTILINE))
        if "Package" in fields:
            found.setdefault(fields["Package"], fields)
    return found


def find_module_release(depends: str) -> str:
    """Return the driver release that a package with prebuilt modules needs; empty if it names none.

    Ubuntu's depend on `nvidia-kernel-common-<branch>-server (>= X), (<= X-1)`, which only release X satisfies.
    """
    found = re.search(r"\bnvidia-kernel-common-[\w.-]+ \(>= ([^)]+)\)", depends)
    return parse_upstream_version(found[1]) if found else ""


def find_kernel_flavours(packages: Packages) -> dict[str, str]:
    """Return the installed kernel metapackages with their flavour, such as linux-image-generic: generic."""
    found = ((name, _KERNEL.fullmatch(name)) for name in sorted(packages))
    return {name: match[1] for name, match in found if match}


def list_wanted_modules(prefix: str, packages: Packages, kernels: list[str]) -> list[str]:
    """Return the packages of prebuilt modules that these kernels need now, and the next one of each flavour.

    `prefix` is the name of such a package up to the flavour or version of the kernel.
    """
    names = [*find_kernel_flavours(packages).values(), *kernels]
    return [f"{prefix}{name}" for name in dict.fromkeys(names)]


def add_prebuilt_parts(prefix: str, modules: list[str], names: list[str]) -> list[str]:
    """Return packages with prebuilt modules, and those of `names` with objects and signatures for the same kernels.

    Those of Ubuntu depend on one another in one version.
    """
    kernels = tuple(f"-{name.removeprefix(prefix)}" for name in modules if name.removeprefix(prefix)[:1].isdigit())
    return [
        *modules,
        *(name for name in names if PREBUILT.fullmatch(name) and name.endswith(kernels) and name not in modules),
    ]


def find_other_branches(names: list[str], branch: str) -> list[str]:
    """Return the packages whose names carry another driver branch than `branch`, which does not replace them."""
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
