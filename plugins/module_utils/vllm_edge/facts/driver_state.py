# SPDX-License-Identifier: Apache-2.0
"""What the role nvidia_driver decides by: the driver of a host, beside the one that it should have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..system.apt import shorten_address
from ..system.host import Unread
from . import dpkg
from .dpkg import Packages
from .driver import Driver, DriverReader, Kernel, switch

SOURCE = re.compile(r"^// Source: (\w+)", re.MULTILINE)
"""A line of our apt configuration. Files without it were written when only NVIDIA's repository was supported."""
# The certificate that DKMS signs with, on Debian and on Ubuntu, and the list of certificates that shim trusts.
KEYS = ("var/lib/dkms/mok.pub", "var/lib/shim-signed/mok/MOK.der")
TRUSTED = ("sys/firmware/efi/efivars/MokListRT*", "sys/firmware/efi/mok-variables/MokListRT*")


@dataclass(frozen=True)
class Wanted:
    """The driver that a host should have, as the option `driver` of the module host_facts says it."""

    packages: Sequence[str]
    """Packages that make up the driver; the version of the first is the version of the driver."""
    source: str
    """Where they should come from: `distribution`, its archive, or `nvidia`, NVIDIA's apt repository."""
    branch: str
    mark: str
    """File that exists if vllm-edge installed the driver. It names the source."""
    archive: str = ""
    """Who signs the distribution's archive (`Origin` of its index)."""
    repository: str = ""
    """Address of NVIDIA's repository."""
    prebuilt: str = ""
    """Beginning of the names of packages with prebuilt kernel modules; empty if DKMS builds the modules."""
    headers: Sequence[str] = ()
    """Kernel header packages that DKMS needs; those of the installed kernels if it is empty."""
    metapackages: Mapping[str, str] = field(default_factory=dict)
    """Kernel metapackages, each with the metapackage of its headers."""


@dataclass(frozen=True)
class DriverState:
    """The driver of a host. The defaults are a host without one; an empty text means that there is no such thing."""

    unconfigured: Sequence[str] = ()
    """Packages that dpkg left half installed."""
    version: str = ""
    """Version of the first of the wanted packages."""
    installed: str = ""
    """The same; if that package is not installed, the version of another package of a driver."""
    driver_packages: Sequence[str] = ()
    """Installed packages of that version."""
    unheld: Sequence[str] = ()
    """Packages to hold that are not held: those of the driver and, if modules are prebuilt, modules and kernels."""
    held: Sequence[str] = ()
    """Held packages of any driver, with prebuilt modules and kernel metapackages."""
    of_the_driver: Sequence[str] = ()
    """Installed packages of any driver."""
    other_branch: Sequence[str] = ()
    """Installed packages with another branch in their names, which packages of the wanted branch do not replace."""
    recorded: str = ""
    """Source that vllm-edge installed the driver from; empty if it did not."""
    foreign: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Packages whose version other sources offer and the wanted one does not, each with these sources."""
    unknown: Sequence[str] = ()
    """Packages whose version no configured source offers."""
    fitting: str = ""
    """The source that fits the installed packages, if some are `foreign` and there is one."""
    installer: str = ""
    """Trace of a driver that was installed without packages."""
    module_version: str = ""
    """Version of the loaded kernel module."""
    uvm: bool = False
    """Whether the kernel module nvidia-uvm is loaded, which CUDA needs and NVML does not."""
    signer: str = ""
    """Who signed the installed kernel module."""
    secure_boot: bool = False
    key_enrolled: bool = False
    """Whether the key that DKMS signs with is in the firmware's list of machine owner keys."""
    nouveau: bool = False
    kernel: str = ""
    """Release of the running kernel."""
    bare_kernels: Sequence[str] = ()
    """Bootable kernels without a driver module, from the running one to the newest."""
    next_kernel: str = ""
    """Release of the newest bootable kernel, which the next boot starts."""
    modules_on_disk: Mapping[str, str] = field(default_factory=dict)
    """Version of the installed module by kernel, from the running one to the newest; those without are left out."""
    headers: bool = False
    """Whether the headers of the running kernel are installed, so that modules can be built."""
    headers_to_install: Sequence[str] = ()
    """Header packages that are needed, not installed, and known to apt."""
    modules_to_install: Sequence[str] = ()
    """Packages with prebuilt modules that are needed, not installed, and known to apt."""
    candidate: str = ""
    """Version of the first wanted package that apt would install; empty if apt does not know it."""
    module_releases: Mapping[str, str] = field(default_factory=dict)
    """Driver release that each package with prebuilt modules is built for, in the version that apt would install."""
    next_modules: Sequence[str] = ()
    """Packages that bring the newest kernel its prebuilt module: those of the flavours, or that of `next_kernel`."""
    offered_kernel: str = ""
    """Release of the newest kernel that apt has prebuilt modules for, by the packages of the flavours."""
    kernel_updates: Sequence[str] = ()
    """Installed kernel metapackages of which apt has another version, if modules are prebuilt."""
    module_updates: Sequence[str] = ()
    """Installed packages with prebuilt modules of which apt has another version, built for `candidate`."""
    outdated_modules: Sequence[str] = ()
    """Installed packages with prebuilt modules of one kernel, which apt does not have for `candidate`."""
    persistence: bool = False
    """Whether the persistence daemon is enabled and runs."""
    volatile_gpus: Sequence[str] = ()
    """UUIDs of GPUs without persistence mode, which lose their state when no process uses them."""


def read_driver_state(
    reader: DriverReader,
    wanted: Wanted,
    packages: Packages,
    half_installed: Sequence[str],
    persistence: Mapping[str, str],
) -> DriverState:
    """Read what is not known yet, and compare it with what is wanted.

    Args:
        persistence: nvidia-smi's word for persistence mode by UUID

    Raises:
        SystemdError: apt cannot be asked
    """
    driver = reader.driver({})
    unit = driver.persistence
    enabled = not isinstance(unit, Unread) and unit.file_state.startswith("enabled")
    return DriverState(
        unconfigured=half_installed,
        **sort_packages(wanted, packages),
        **read_origins(reader, wanted, packages),
        **read_kernel_needs(reader, wanted, packages, driver),
        installer=driver.installer,
        module_version=driver.versions.module,
        uvm=driver.uvm,
        signer=driver.signer if isinstance(driver.signer, str) else "",
        secure_boot=driver.secure_boot is True,
        key_enrolled=is_key_enrolled(reader.root),
        nouveau=driver.nouveau,
        persistence=enabled and not isinstance(unit, Unread) and unit.active_state == "active",
        volatile_gpus=[uuid for uuid, word in persistence.items() if switch(word) is False],
    )


def sort_packages(wanted: Wanted, packages: Packages) -> dict[str, Any]:
    """Return which packages are of the driver, and which of them are (or should be) held."""
    lead = packages.get(wanted.packages[0])
    version = dpkg.parse_upstream_version(lead["version"]) if lead else ""
    ours = dpkg.driver_packages(packages, version) if lead else []
    others = (dpkg.parse_upstream_version(packages[name]["version"]) for name in dpkg.versioned(packages))
    drivers = sorted(name for name in packages if dpkg.is_driver(name))
    kernel = list_kernel_packages(packages)
    hold = {*ours, *wanted.packages, *(kernel if wanted.prebuilt else ())} if lead else set()
    return {
        "version": version,
        "installed": version or next(others, ""),
        "driver_packages": ours,
        "unheld": sorted(name for name in hold & packages.keys() if not packages[name]["held"]),
        "held": sorted({name for name in (*drivers, *kernel) if packages[name]["held"]}),
        "of_the_driver": drivers,
        "other_branch": dpkg.find_other_branches(drivers, str(wanted.branch)),  # YAML may say a number
    }


def list_kernel_packages(packages: Packages) -> list[str]:
    """Return the packages with prebuilt modules and, if there are any, the kernel's metapackages.

    Without a hold on these, a newer kernel could be installed without a module.
    """
    built = [name for name in packages if dpkg.PREBUILT.fullmatch(name)]
    return [*built, *(dpkg.find_kernel_flavours(packages) if built else ())]


def read_origins(reader: DriverReader, wanted: Wanted, packages: Packages) -> dict[str, Any]:
    """Return where the installed packages came from. If vllm-edge installed them, that is recorded."""
    mark = reader.text(wanted.mark)
    if not isinstance(mark, Unread):
        found = SOURCE.search(mark)
        return {"recorded": found[1] if found else "nvidia"}
    offered, owners = reader.offered(packages)
    foreign = {
        source: find_foreign(offered, list_homes(source, wanted, offered, owners))
        for source in ("distribution", "nvidia")
    }
    elsewhere, unknown = foreign[wanted.source]
    fitting = [source for source, found in foreign.items() if source != wanted.source and found == ({}, [])]
    return {"foreign": elsewhere, "unknown": unknown, "fitting": fitting[0] if fitting and elsewhere else ""}


def list_homes(
    source: str, wanted: Wanted, offered: Mapping[str, Sequence[str]], owners: Mapping[str, set[str]]
) -> set[str]:
    """Return the addresses that belong to a source: NVIDIA's by the address, the distribution's by the signer."""
    addresses = {uri for uris in offered.values() for uri in uris}
    if source == "nvidia":
        home = shorten_address(wanted.repository)
        return {uri for uri in addresses if home and shorten_address(uri).startswith(home)}
    return {uri for uri in addresses if wanted.archive in owners.get(uri, ())}


def find_foreign(offered: Mapping[str, Sequence[str]], homes: set[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return packages whose version is offered by other sources only, and packages whose version no source offers."""
    strange = {name: list(uris) for name, uris in sorted(offered.items()) if not homes & set(uris)}
    return {name: uris for name, uris in strange.items() if uris}, [name for name, uris in strange.items() if not uris]


def read_kernel_needs(reader: DriverReader, wanted: Wanted, packages: Packages, driver: Driver) -> dict[str, Any]:
    """Return which packages the kernels need for a module, and whether apt can install them."""
    running, prebuilt = driver.running_kernel, wanted.prebuilt
    kernels = list_not_older(driver.kernels, running)
    releases = list(dict.fromkeys([running, *(kernel.release for kernel in kernels)]))
    built = reader.at(f"lib/modules/{running}/build/Makefile").exists()
    modules = dpkg.list_wanted_modules(prebuilt, packages, releases) if prebuilt else []
    headers = [] if prebuilt else list_wanted_headers(wanted, built, running, packages)
    on_disk = {release: reader.module_on_disk(release) for release in releases}
    missing = [name for name in (*headers, *modules) if name not in packages]
    known = dpkg.parse_madison(reader.demand("apt-cache", "madison", *missing).out) if missing else {}
    return {
        **read_offers(reader, wanted, packages, modules),
        "kernel": running,
        "next_kernel": kernels[-1].release if kernels else running,
        "modules_on_disk": {release: version for release, version in on_disk.items() if version},
        "bare_kernels": [kernel.release for kernel in kernels if not kernel.has_module],
        "headers": built,
        "headers_to_install": [name for name in headers if name in missing and name in known],
        "modules_to_install": [name for name in modules if name in missing and name in known],
    }


def read_offers(reader: DriverReader, wanted: Wanted, packages: Packages, needed: Sequence[str]) -> dict[str, Any]:
    """Return what apt would install now of the driver, of the kernels and of their prebuilt modules.

    Args:
        needed: packages with prebuilt modules that the flavours and the kernels need, the newest kernel's last
    """
    lead, prebuilt = wanted.packages[0], wanted.prebuilt
    flavours = dpkg.find_kernel_flavours(packages) if prebuilt else {}
    installed = [name for name in packages if prebuilt and dpkg.PREBUILT.fullmatch(name)]
    known = reader.candidates([lead, *flavours, *needed, *installed])
    candidate = dpkg.parse_upstream_version(known.get(lead, {}).get("Version", ""))
    depends = {name: known[name].get("Depends", "") for name in (*needed, *installed) if name in known}
    releases = {name: release for name in depends if (release := dpkg.find_module_release(depends[name]))}
    # The package of a flavour depends on the one of its newest kernel.
    following = [prebuilt + flavour for flavour in flavours.values()] or list(needed[-1:])
    newest = [re.search(rf"{re.escape(prebuilt)}(\d[^\s,]*)", depends.get(name, "")) for name in following]
    fits = {name: release == candidate for name, release in releases.items() if name.startswith(prebuilt)}
    newer = [name for name in known if name in packages and known[name]["Version"] != packages[name]["version"]]
    outdated = [name for name in fits if name in packages and name not in following and not fits[name]]
    return {
        "candidate": candidate,
        "module_releases": releases,
        "next_modules": following,
        "offered_kernel": next((found[1] for found in newest if found), ""),
        "kernel_updates": [name for name in newer if name in flavours],
        "module_updates": dpkg.add_prebuilt_parts(prebuilt, [name for name in newer if fits.get(name)], newer),
        "outdated_modules": dpkg.add_prebuilt_parts(prebuilt, outdated, installed),
    }


def list_not_older(kernels: Sequence[Kernel], running: str) -> list[Kernel]:
    """Return the kernels from the running one to the newest. A host is not expected to boot an older one."""
    releases = [kernel.release for kernel in kernels]
    return list(kernels[releases.index(running) :]) if running in releases else list(kernels)


def list_wanted_headers(wanted: Wanted, built: bool, release: str, packages: Packages) -> list[str]:
    """Return the header packages that DKMS needs.

    These are the package for the running kernel, unless its headers are installed in some way (`built`), and the
    headers metapackage for each installed kernel metapackage. Without the latter DKMS could not build a module for the
    next kernel.
    """
    if wanted.headers:
        return list(wanted.headers)
    running = [] if built else [f"linux-headers-{release}"]
    return running + sorted(headers for kernel, headers in wanted.metapackages.items() if kernel in packages)


def is_key_enrolled(root: Path) -> bool:
    """Whether the certificate that DKMS signs with is in the list of certificates that shim trusts."""
    trusted = b"".join(read_bytes(path) for pattern in TRUSTED for path in sorted(root.glob(pattern)))
    return any(key and key in trusted for key in map(read_bytes, (root / path for path in KEYS)))


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
