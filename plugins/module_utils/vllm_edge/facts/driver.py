# SPDX-License-Identifier: Apache-2.0
"""What a host has of NVIDIA's driver, and what the driver says of its GPUs.

The doctor and the roles read a host with the same reader. It asks nvidia-smi, which comes with every
driver, and not nvidia-ml-py, which a bare host does not have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..gpu import topology
from ..gpu.driver import DriverVersions, read_versions
from ..gpu.topology import Card, Topology
from ..system.host import HostReader, Unread
from ..system.systemd import SystemdError, Unit
from ..text import make_sort_key
from . import dpkg
from .dpkg import Packages

SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
MODULE = re.compile(r"^\S*/nvidia(?:-current(?:-open)?)?\.ko(?:\.\w+)?:", re.MULTILINE)
REFUSAL = re.compile(r"\[(?!N/A|Not Supported|Requested functionality)[^\][]{1,200}\]")
# Debian's own packages have the module under the other names.
MODULES = ("nvidia", "nvidia-current", "nvidia-current-open")
BUS_FIELDS = ("uuid", "pci.bus_id")


@dataclass(frozen=True)
class Kernel:
    release: str
    has_module: bool


@dataclass(frozen=True)
class Driver:
    versions: DriverVersions
    origins: Mapping[str, tuple[str, ...]] | Unread
    """Who offers the installed version of a package (`o=` of apt's sources, otherwise the address), by package."""
    installer: str
    """The uninstaller that NVIDIA's .run installer left; empty if there is none."""
    loaded: bool
    uvm: bool
    """Whether the module nvidia-uvm is loaded. It is called so in the kernel whatever its file is called."""
    nouveau: bool
    secure_boot: bool | Unread | None
    """None if the host was not started by UEFI."""
    signer: str | Unread
    """Who signed the module on disk; empty if nobody did."""
    running_kernel: str
    kernels: tuple[Kernel, ...]
    """Installed kernels, oldest first."""
    persistence: Unit | Unread
    held_kernels: Mapping[str, tuple[str, str]] | Unread
    """Installed version and apt's candidate of each held kernel metapackage."""


def switch(word: str) -> bool | None:
    """Parse nvidia-smi's words for on and off; None for anything else."""
    return {"enabled": True, "yes": True, "disabled": False, "no": False}.get(word.lower())


@dataclass(frozen=True)
class DriverReader(HostReader):
    """Reads the packages, the driver, the kernels that can start, and the bus between the GPUs."""

    def packages(self, *patterns: str) -> tuple[Packages | Unread, tuple[str, ...]]:
        """Return the installed packages that fit a pattern (all without one), and the names of half installed ones."""
        ran = self.ask("dpkg-query", "-W", "-f", dpkg.FORMAT, *patterns)
        if isinstance(ran, Unread):
            return ran, ()
        # Exit status 1 means that a pattern matches no package, which is usual.
        if ran.status > (1 if patterns else 0):
            return Unread(f"dpkg-query failed: {ran.err}"), ()
        found, half = dpkg.parse_packages(ran.out)
        return found, tuple(half)

    def driver(self, packages: Packages | Unread) -> Driver:
        release = self.plain("proc/sys/kernel/osrelease")
        return Driver(
            versions=read_versions(self.root),
            origins=packages if isinstance(packages, Unread) else self.origins(packages),
            installer=next((path for path in dpkg.INSTALLERS if self.at(path).exists()), ""),
            loaded=self.at("sys/module/nvidia").is_dir(),
            uvm=self.at("sys/module/nvidia_uvm").is_dir(),
            nouveau=self.at("sys/module/nouveau").is_dir(),
            secure_boot=self.secure_boot(),
            signer=self.signer(),
            running_kernel=release,
            kernels=self.kernels(release),
            persistence=self.unit("nvidia-persistenced.service"),
            held_kernels=packages if isinstance(packages, Unread) else self.held_kernels(packages),
        )

    def candidates(self, names: Sequence[str]) -> dict[str, dict[str, str]]:
        """Return the fields of each package's candidate. Raises SystemdError."""
        return dpkg.parse_show(self.demand("apt-cache", "show", "--no-all-versions", *names).out) if names else {}

    def held_kernels(self, packages: Packages) -> dict[str, tuple[str, str]] | Unread:
        """Return the installed version and the candidate of each held kernel metapackage."""
        held = {
            name: packages[name]["version"] for name in dpkg.find_kernel_flavours(packages) if packages[name]["held"]
        }
        try:
            shown = self.candidates(list(held))
        except SystemdError as error:
            return Unread(str(error))
        if unknown := held.keys() - shown.keys():
            return Unread(f"apt does not know {', '.join(sorted(unknown))}: 'apt-get update' reads its sources anew")
        return {name: (version, shown[name]["Version"]) for name, version in held.items()}

    def offered(self, packages: Packages) -> tuple[dict[str, list[str]], dict[str, set[str]]]:
        """Return which addresses offer the installed version of each package of the driver, and who signs them.

        Raises SystemdError.
        """
        names = dpkg.versioned(packages)
        if not names:
            return {}, {}
        sources, policy = self.demand("apt-cache", "policy"), self.demand("apt-cache", "policy", *names)
        return dpkg.parse_policy(policy.out), dpkg.parse_origins(sources.out)

    def origins(self, packages: Packages) -> dict[str, tuple[str, ...]] | Unread:
        try:
            offered, owners_of = self.offered(packages)
        except SystemdError as error:
            return Unread(str(error))
        return {
            name: tuple(sorted({owner for uri in uris for owner in owners_of.get(uri, {uri})}))
            for name, uris in offered.items()
        }

    def secure_boot(self) -> bool | Unread | None:
        """Return whether Secure Boot is on; None if the host was not started by UEFI."""
        if not self.at("sys/firmware/efi").is_dir():
            return None
        try:
            # Four bytes of attributes, then the value.
            return self.at(SECURE_BOOT).read_bytes()[-1:] == b"\x01"
        except FileNotFoundError:
            # A firmware without Secure Boot has other variables.
            if any(self.root.glob("sys/firmware/efi/efivars/*")):
                return False
            return Unread("the state of Secure Boot: /sys/firmware/efi/efivars is not mounted")
        except OSError as error:
            return Unread(f"the state of Secure Boot: {error.strerror}")

    def signer(self) -> str | Unread:
        """Return who signed the module on disk; empty if nobody did."""
        for name in MODULES:
            ran = self.ask("modinfo", "-F", "signer", name)
            if isinstance(ran, Unread):
                return ran
            if ran.status == 0:
                return ran.out.strip()
        return Unread("modinfo finds no module of the driver for the running kernel")

    def module_on_disk(self, release: str) -> str:
        for name in MODULES:
            ran = self.ask("modinfo", "-k", release, "-F", "version", name)
            if not isinstance(ran, Unread) and ran.status == 0:
                return ran.out.strip()
        return ""

    def kernels(self, running: str) -> tuple[Kernel, ...]:
        """Return the kernels that can be started: the running one, and those with an image in /boot."""
        releases = [entry.name for entry in self.at("lib/modules").glob("*/")]
        bootable = [name for name in releases if name == running or self.at(f"boot/vmlinuz-{name}").exists()]
        return tuple(
            Kernel(name, bool(MODULE.search(self.plain(f"lib/modules/{name}/modules.dep"))))
            for name in sorted(bootable, key=make_sort_key)
        )

    def smi(self, fields: Sequence[str]) -> tuple[list[list[str]], str]:
        """Query fields of every GPU. Return a row for each that answers, and all else that nvidia-smi printed."""
        ran = self.ask("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        if isinstance(ran, Unread):
            return [], ran.why
        rows, said = [], []
        for line in f"{ran.out}\n{ran.err}".splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if cells[0].startswith("GPU-") and len(cells) == len(fields):
                rows.append(cells)
                # Where a card refuses one field it says why in its place.
                said += [f"{cells[0]}: {cell}" for cell in cells if REFUSAL.fullmatch(cell)]
            elif line.strip():
                said.append(line.strip())
        if ran.status != 0 and not said:
            said = [f"nvidia-smi ended with {ran.status} and said nothing"]
        return rows, " ".join(said)

    def by_uuid(self, fields: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Query fields that not every driver knows, by UUID; empty if the driver refuses them."""
        rows, _ = self.smi(["uuid", *fields])
        return {row[0]: tuple(row[1:]) for row in rows}

    def bus(self, places: Iterable[tuple[str, str]]) -> Topology:
        """Read the bus as far as `correctness` needs it. `places` are UUID and address of GPUs, as nvidia-smi says."""
        cards = []
        for uuid, bus_id in places:
            address = topology.convert_address(bus_id)
            device = self.at(f"sys/bus/pci/devices/{address}")
            cards.append(
                Card(
                    uuid=uuid,
                    bus=address,
                    iommu=topology.read_iommu(self.root, device),
                    redirecting=topology.read_redirecting(device),
                )
            )
        return Topology(tuple(cards), self.peers([card.uuid for card in sorted(cards, key=lambda card: card.bus)]))

    def peers(self, uuids: Sequence[str]) -> dict[tuple[str, str], str] | Unread:
        """Return what the driver says about reads between each pair of GPUs. `uuids` are in the order of the bus."""
        if len(uuids) < 2:
            return {}
        ran = self.ask("nvidia-smi", "topo", "-p2p", "r")
        if isinstance(ran, Unread):
            return ran
        found = topology.parse_peers(ran.out, uuids)
        said = " ".join(ran.out.split())[:80]
        return found or Unread(f"'nvidia-smi topo -p2p r' shows no pairs: {said or ran.err}")
