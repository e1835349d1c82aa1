# SPDX-License-Identifier: Apache-2.0
"""How the GPUs of a host are connected, and what engines over several of them need to be correct.

Only what makes results wrong, or makes NCCL hang, becomes environment and arguments of an engine (`correctness`). A GPU
reads the memory of another one over PCIe. An IOMMU that translates addresses, or a bridge whose Access Control Services
send such reads through the root complex, is known to corrupt or stop them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..system.host import Unread

SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# PCI Express: the extended capability Access Control Services, and in its control register the bits that send one
# device's requests and completions for another one up to the root complex.
ACS_CAPABILITY = 0x000D
ACS_REDIRECT = 0x04 | 0x08
EXTENDED_CONFIG = 0x100
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
UNSEEN = Unread("nobody looked")
UNKNOWN_PEER = "U"
"""nvidia-smi's word for a pair of GPUs of which the driver does not say whether one reads the other."""


@dataclass(frozen=True)
class Card:
    """One GPU as the bus and the driver show it. None means that the driver does not say."""

    uuid: str
    bus: str
    """PCI address as the kernel writes it: 0000:17:00.0."""
    idle: bool = True
    recovery: str | None = None
    """nvidia-smi's words for what the GPU needs after a fault; None with drivers before branch 565."""
    compute_mode: str | None = None
    """In nvidia-smi's words, too."""
    mig: bool | None = None
    generation: int | None = None
    generation_possible: int | None = None
    width: int | None = None
    width_possible: int | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    """Uncorrected ECC errors since the driver was loaded."""
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    slowdown: int | None = None
    """Bits of SLOWDOWNS that are set."""
    numa: int | None = None
    iommu: str | Unread = UNSEEN
    """`off`, `identity` (addresses are not changed), or the type of the IOMMU group, which translates."""
    redirecting: tuple[str, ...] | Unread = UNSEEN
    """Bridges above the GPU whose Access Control Services send requests between peers to the root complex."""


@dataclass(frozen=True)
class Xid:
    bus: str
    number: int
    line: str


@dataclass(frozen=True)
class Topology:
    cards: tuple[Card, ...]
    peers: Mapping[tuple[str, str], str] | Unread
    """What the driver says about reads between two GPUs, by pair of UUIDs: OK, or why not."""
    xids: tuple[Xid, ...] | Unread = UNSEEN
    """Those since the kernel module was loaded, oldest first."""
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    """Size of the host's /dev/shm; None if it is not mounted."""
    unassigned: frozenset[str] = frozenset()
    """PCI addresses of GPUs that have no slot, or that were given to virtual machines."""
    numa_nodes: int = 0
    """How many NUMA nodes the kernel knows."""


@dataclass(frozen=True)
class Recommendation:
    """What engines over several GPUs need on this host to give correct results; empty if they need nothing."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = field(default_factory=list)
    reasons: Sequence[str] = field(default_factory=list)


NO_PEERS = Recommendation({"NCCL_P2P_DISABLE": "1"}, ["--disable-custom-all-reduce"])
"""Keeps the GPUs of an engine from reading each other's memory, for whatever reason."""
FORBIDDEN = replace(NO_PEERS, reasons=["vllm_engine_peer_to_peer says so"])


def find_obstacles(cards: Iterable[Card]) -> list[str]:
    """Return the reasons why reads between these GPUs may give wrong data or never end."""
    reasons = []
    translated = [card for card in cards if isinstance(card.iommu, str) and card.iommu not in ("off", "identity")]
    if translated:
        where = ", ".join(f"{card.bus} ({card.iommu})" for card in translated)
        reasons.append(f"the IOMMU translates the addresses of {where}, so that GPUs do not reach each other's memory")
    bridges = sorted({bridge for card in cards if isinstance(card.redirecting, tuple) for bridge in card.redirecting})
    if bridges:
        reasons.append(
            f"Access Control Services of {', '.join(bridges)} send what GPUs read of each other to the root complex"
        )
    return reasons


def correctness(topology: Topology) -> Recommendation:
    """Return what engines over several GPUs need.

    It is empty if the driver offers no peer-to-peer, because then nothing uses it.
    """
    if len(topology.cards) < 2:
        return Recommendation()
    peers = topology.peers
    if not isinstance(peers, Unread) and peers and not {"OK", UNKNOWN_PEER} & set(peers.values()):
        return Recommendation()
    reasons = find_obstacles(topology.cards)
    return replace(NO_PEERS, reasons=reasons) if reasons else Recommendation()


def convert_address(bus_id: str) -> str:
    """Convert a PCI address as NVML writes it (00000000:17:00.0) to the kernel's form."""
    domain, rest = bus_id.lower().split(":", 1)
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def read_numa(device: Path) -> int | None:
    """Return the NUMA node of a device; None if the kernel knows none, which it writes as -1."""
    try:
        node = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def read_iommu(root: Path, device: Path) -> str | Unread:
    """Return `off`, or the type of the IOMMU group that a device is in."""
    groups = root / "sys/kernel/iommu_groups"
    try:
        if not groups.is_dir() or not any(groups.iterdir()):
            return "off"
        if not device.exists():
            return Unread(f"the kernel shows no PCI device {device.name}")
        link = device / "iommu_group"
        if not link.exists():
            return "off"
        return (link.resolve() / "type").read_text(encoding="ascii").strip()
    except OSError as error:
        return Unread(f"{device.name}: {error}")


def find_acs_control(config: bytes) -> int | None:
    """Find the control register of Access Control Services in a PCI configuration space.

    The extended capabilities are a linked list that begins at EXTENDED_CONFIG. Returns None if the device has no such
    capability.
    """
    at, seen = EXTENDED_CONFIG, set()
    while EXTENDED_CONFIG <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == ACS_CAPABILITY:
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
    return None


def read_redirecting(device: Path) -> tuple[str, ...] | Unread:
    """Return the bridges above a device that send requests between peers to the root complex."""
    if not device.exists():
        return Unread(f"the kernel shows no PCI device {device.name}")
    place = device.resolve()
    found = []
    for bridge in (parent for parent in place.parents if ADDRESS.fullmatch(parent.name)):
        try:
            config = (bridge / "config").read_bytes()
        except OSError as error:
            return Unread(f"{bridge.name}: {error}")
        if len(config) <= EXTENDED_CONFIG:
            # The kernel shows the first 64 bytes to everybody, all of it to root.
            if len(config) <= 64:
                return Unread("only root may read the configuration space of PCI bridges")
            continue
        control = find_acs_control(config)
        if control is not None and control & ACS_REDIRECT:
            found.append(bridge.name)
    return tuple(sorted(found))


def parse_peers(text: str, uuids: Sequence[str]) -> dict[tuple[str, str], str]:
    """Parse the matrix of `nvidia-smi topo -p2p r`. Its numbers are those of the GPUs in the order of the bus."""
    rows = [line.split() for line in text.splitlines()]
    heads = next((row for row in rows if row and all(re.fullmatch(r"GPU\d+", word) for word in row)), [])
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        if len(row) != len(heads) + 1 or row[0] not in heads:
            continue
        for column, word in zip(heads, row[1:], strict=True):
            one, other = int(row[0][3:]), int(column[3:])
            if one < other < len(uuids):
                found[uuids[one], uuids[other]] = word
    return found


def parse_xids(text: str) -> tuple[Xid, ...]:
    """Parse kernel messages such as "NVRM: Xid (PCI:0000:17:00): 79, pid=..., GPU has fallen off the bus.".

    Drivers add the function to the address, and the instance of a GPU in MIG mode, in some messages.
    """
    found = re.finditer(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:]+)(?:\.\d)?(?: [^)]*)?\): (\d+),?.*", text)
    return tuple(Xid(match[1].lower(), int(match[2]), match[0].strip()) for match in found)
