# SPDX-License-Identifier: Apache-2.0
"""How the GPUs hang together, and what of it can make engines wrong or slow.

Only what makes results wrong or lets NCCL hang becomes environment and arguments of an engine (`correctness`): a GPU
reads another one's memory over PCIe, and an IOMMU that translates, or a bridge whose Access Control Services send such
reads through the root complex, is known to corrupt or stop them. All else is advice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .contract import NotKnown, Unread, Verdict, fail, good, known, warn

MIB = 1024 * 1024
GIB = 1024 * MIB

# nvmlClocksEventReasons in NVML's header.
IDLE = 0x1
SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
# https://docs.nvidia.com/deploy/xid-errors: after these the card cannot be trusted before a reset or replacement.
GRAVE_XIDS = {
    48: "double bit ECC error",
    64: "row remapping failed",
    79: "fallen off the bus",
    95: "uncontained ECC error",
}
# PCI Express: the extended capability Access Control Services, and in its control register the bits that send one
# device's requests and completions for another one up to the root complex.
ACS_CAPABILITY = 0x000D
ACS_REDIRECT = 0x04 | 0x08
EXTENDED_CONFIG = 0x100
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# Docker's own default for a container that says nothing.
DEFAULT_SHM_BYTES = 64 * MIB
UNSEEN = Unread("nobody looked")


@dataclass(frozen=True)
class Card:
    """One GPU as the bus and the driver show it. None where the driver has no answer."""

    uuid: str
    bus: str
    """As the kernel writes it: 0000:17:00.0."""
    idle: bool = True
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
    """Bits of SLOWDOWNS."""
    numa: int | None = None
    iommu: str | Unread = UNSEEN
    """off, identity (addresses go through as they are), or the type of the group, which translates."""
    redirecting: tuple[str, ...] | Unread = UNSEEN
    """Bridges above it whose Access Control Services send peers' requests to the root complex."""


@dataclass(frozen=True)
class Xid:
    bus: str
    number: int
    line: str


@dataclass(frozen=True)
class Sharing:
    """An engine that uses GPUs."""

    engine: str
    gpus: tuple[str, ...]
    shm_bytes: int | None = None
    """Of its container's /dev/shm; None: it has the host's."""


@dataclass(frozen=True)
class Topology:
    cards: tuple[Card, ...]
    peers: Mapping[tuple[str, str], str] | Unread
    """Pair of UUIDs to what the driver says of reads between them: OK, or why not."""
    xids: tuple[Xid, ...] | Unread = UNSEEN
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    """Of the host's /dev/shm; None without one."""
    engines: tuple[Sharing, ...] = ()


@dataclass(frozen=True)
class Recommendation:
    """What keeps engines over several GPUs correct on this host; empty where nothing has to be done."""

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, object]:
        return {
            "environment": dict(self.environment),
            "arguments": list(self.arguments),
            "reasons": list(self.reasons),
        }


NO_PEERS = Recommendation({"NCCL_P2P_DISABLE": "1"}, ("--disable-custom-all-reduce",))
"""Keeps the GPUs of an engine from reading each other's memory, for whatever reasons."""
FORBIDDEN = replace(NO_PEERS, reasons=("vllm_engine_peer_to_peer says so",))


def in_the_way(cards: Iterable[Card]) -> list[str]:
    """Why reads between these GPUs may be wrong or never end."""
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
    """What engines over several GPUs need. Nothing where the driver offers no peer-to-peer: then nobody uses it."""
    if len(topology.cards) < 2:
        return Recommendation()
    peers = topology.peers
    if not isinstance(peers, Unread) and peers and "OK" not in peers.values():
        return Recommendation()
    reasons = in_the_way(topology.cards)
    return replace(NO_PEERS, reasons=tuple(reasons)) if reasons else Recommendation()


# -- reading: what the kernel shows of the bus


def kernel_address(bus_id: str) -> str:
    """'00000000:17:00.0', as NVML writes it, as the kernel writes it."""
    domain, rest = bus_id.lower().split(":", 1)
    return f"{domain[-4:].rjust(4, '0')}:{rest}"


def read_numa(device: Path) -> int | None:
    """None where the kernel knows no node, which it writes as -1."""
    try:
        node = int((device / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if node < 0 else node


def read_iommu(root: Path, device: Path) -> str | Unread:
    """What stands between a device and the memory."""
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


def acs_control(config: bytes) -> int | None:
    """The control register of Access Control Services in a device's configuration space; None without them."""
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
    """Bridges above a device that keep peers apart."""
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
        control = acs_control(config)
        if control is not None and control & ACS_REDIRECT:
            found.append(bridge.name)
    return tuple(sorted(found))


# -- reading: what programs print


def parse_peers(text: str, uuids: Sequence[str]) -> dict[tuple[str, str], str]:
    """The matrix of `nvidia-smi topo -p2p r`; its numbers are those of the GPUs in the order of the bus."""
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
    """Lines of the kernel such as "NVRM: Xid (PCI:0000:17:00): 79, pid=..., GPU has fallen off the bus."."""
    found = re.finditer(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+),?.*", text)
    return tuple(Xid(match[1].lower(), int(match[2]), match[0].strip()) for match in found)


# -- judging


def _at(card: Card) -> str:
    return f"{card.uuid} at {card.bus}"


def _cards(topology: Topology) -> tuple[Card, ...]:
    if not topology.cards:
        raise NotKnown("no GPU answers")
    return topology.cards


def judge_link(topology: Topology) -> Verdict:
    """A narrow link is a fault at any time; a slow one only under load, since idle GPUs lower it to save power."""
    cards = _cards(topology)
    if all(card.width is None for card in cards):
        raise NotKnown("the driver does not say how wide the links are")
    slow = [
        f"{_at(card)} has {card.width} of {card.width_possible} lanes"
        for card in cards
        if card.width is not None and card.width_possible is not None and card.width < card.width_possible
    ]
    slow += [
        f"{_at(card)} works at generation {card.generation} of {card.generation_possible}"
        for card in cards
        if not card.idle
        and card.generation is not None
        and card.generation_possible is not None
        and card.generation < card.generation_possible
    ]
    if slow:
        return warn(
            "; ".join(slow),
            "Reseat the card and its riser, look for corrected errors ('journalctl -k | grep AER') and at the slot's "
            "settings in the firmware: tensor parallelism is bound by this link.",
        )
    links = sorted({f"x{card.width} generation {card.generation_possible}" for card in cards})
    return good(f"every link has the width that it can have: {', '.join(links)}")


def judge_numa(topology: Topology) -> Verdict:
    cards = {card.uuid: card for card in _cards(topology)}
    nodes = {uuid: card.numa for uuid, card in cards.items() if card.numa is not None}
    if not nodes:
        return good("the kernel names no NUMA node of a GPU: there is one, or the firmware does not say")
    across = [
        engine.engine for engine in topology.engines if len({nodes[uuid] for uuid in engine.gpus if uuid in nodes}) > 1
    ]
    told = ", ".join(f"{cards[uuid].bus} on node {node}" for uuid, node in nodes.items())
    if across:
        return warn(
            f"{told}; GPUs of {', '.join(across)} are on more than one node",
            "Give the engine slots of one node, where there are enough: between nodes every transfer crosses the "
            "processors' link.",
        )
    return good(told)


def judge_iommu(topology: Topology) -> Verdict:
    cards = _cards(topology)
    recommended = correctness(topology)
    if recommended.reasons:
        words = " ".join([*(f"{key}={value}" for key, value in recommended.environment.items())])
        return warn(
            "; ".join(recommended.reasons),
            f"Engines over several GPUs need {words} and {' '.join(recommended.arguments)}, which site.yml gives them "
            "while vllm_engine_peer_to_peer is auto. They are faster without: boot with iommu=pt (or the IOMMU off), "
            "with Access Control Services off in the firmware, unless virtual machines of this host need them.",
        )
    if len(cards) < 2:
        return good("one GPU: there is no other to reach")
    for card in cards:
        known(card.iommu)
    modes = sorted({card.iommu for card in cards if isinstance(card.iommu, str)})
    hidden = next((card.redirecting for card in cards if isinstance(card.redirecting, Unread)), None)
    if hidden is not None:
        raise NotKnown(f"IOMMU: {', '.join(modes)}; Access Control Services: {hidden.why}")
    reasons = in_the_way(cards)
    if reasons:
        return good(f"{'; '.join(reasons)}; the driver offers no peer-to-peer, so nothing uses it")
    return good(f"IOMMU: {', '.join(modes)}; no bridge keeps the GPUs apart")


def judge_peers(topology: Topology) -> Verdict:
    cards = {card.uuid: card for card in _cards(topology)}
    if len(cards) < 2:
        return good("one GPU: there is no other to reach")
    peers = known(topology.peers)
    refused = {pair: word for pair, word in peers.items() if word != "OK"}
    if not peers:
        raise NotKnown("nvidia-smi names no pair of GPUs")
    if not refused:
        return good("the driver offers peer-to-peer between all GPUs")
    pairs = [(pair, word) for pair, word in refused.items() if set(pair) <= cards.keys()]
    told = ", ".join(f"{cards[one].bus} and {cards[other].bus} ({word})" for (one, other), word in pairs)
    return good(f"no peer-to-peer between {told}", "NCCL uses shared memory there, which is correct and slower.")


def judge_ecc(topology: Topology) -> Verdict:
    cards = _cards(topology)
    broken = [f"{_at(card)}: remapping a row failed" for card in cards if card.remap_failed]
    if broken:
        return fail("; ".join(broken), "Have the card replaced; until then leave it out of the profile.")
    trouble = [
        f"{_at(card)}: {card.uncorrected} uncorrected errors since the driver was loaded"
        for card in cards
        if card.uncorrected
    ]
    trouble += [f"{_at(card)}: a row waits to be remapped" for card in cards if card.remap_pending]
    if trouble:
        return warn(
            "; ".join(trouble),
            "Stop its engines and reset it ('nvidia-smi --gpu-reset -i <uuid>') or reboot, which remaps what is bad; "
            "replace the card where it comes back.",
        )
    off = [_at(card) for card in cards if card.ecc is False]
    if off:
        return good(f"ECC is off on {', '.join(off)}", "'nvidia-smi -e 1' and a reboot turn it on; it takes memory.")
    if all(card.ecc is None for card in cards):
        raise NotKnown("the driver does not say whether ECC is on")
    counted = any(card.uncorrected is not None for card in cards)
    return good("ECC is on" + (", without uncorrected errors" if counted else "; errors are not counted here"))


def judge_xids(topology: Topology) -> Verdict:
    xids = known(topology.xids)
    if not xids:
        return good("the kernel has logged no Xid since the boot")
    counts: dict[tuple[str, int], int] = {}
    for xid in xids:
        counts[xid.bus, xid.number] = counts.get((xid.bus, xid.number), 0) + 1
    told = ", ".join(
        f"Xid {number}{f' ({GRAVE_XIDS[number]})' if number in GRAVE_XIDS else ''} of {bus}"
        + (f", {count} times" if count > 1 else "")
        for (bus, number), count in counts.items()
    )
    if any(number in GRAVE_XIDS for _, number in counts):
        return fail(
            f"{told}; the last: {xids[-1].line}",
            "The card cannot be trusted before a reboot. Check its seating, power and cooling; replace it where it "
            "comes back.",
        )
    return warn(
        f"{told}; the last: {xids[-1].line}",
        "Xid 13, 31, 43 and 45 usually come from a program that crashed: compare the times with the engine's journal. "
        "Others are the card's: https://docs.nvidia.com/deploy/xid-errors.",
    )


def judge_power(topology: Topology) -> Verdict:
    cards = _cards(topology)
    slowed = [
        f"{_at(card)}: {', '.join(name for bit, name in SLOWDOWNS.items() if (card.slowdown or 0) & bit)}"
        for card in cards
        if card.slowdown
    ]
    if slowed:
        return warn(
            "; ".join(slowed),
            "Check the air flow, the fans' profile in the management controller and the power supplies: the driver "
            "lowers the clocks until it is cool or has power.",
        )
    lowered = [
        f"{_at(card)} is limited to {card.power_limit_w:g} of {card.power_default_w:g} W"
        for card in cards
        if card.power_limit_w is not None
        and card.power_default_w is not None
        and card.power_limit_w < card.power_default_w
    ]
    if lowered:
        return good("; ".join(lowered), "'nvidia-smi -pl <watts>' sets it; a lower limit is slower, and may be wanted.")
    if all(card.power_limit_w is None for card in cards):
        raise NotKnown("the driver names no power limit")
    told = "the power limits are the cards' own"
    return good(told if any(card.slowdown is None for card in cards) else f"{told}, and no clock is slowed down")


def judge_shared_memory(topology: Topology) -> Verdict:
    """Containers have a /dev/shm of their own out of the host's RAM; one with --ipc=host has the host's."""
    if topology.shm_bytes is None:
        return fail(
            "/dev/shm is not mounted", "'mount -t tmpfs tmpfs /dev/shm'; systemd does it at boot unless told not to."
        )
    small = [
        engine.engine
        for engine in topology.engines
        if len(engine.gpus) > 1
        and (topology.shm_bytes if engine.shm_bytes is None else engine.shm_bytes) <= DEFAULT_SHM_BYTES
    ]
    if small:
        return warn(
            f"engines over several GPUs with {DEFAULT_SHM_BYTES // MIB} MiB or less: {', '.join(small)}",
            "Set vllm_engine_shm_size to 2g or more: NCCL passes data between processes there.",
        )
    claimed = sum(engine.shm_bytes or 0 for engine in topology.engines)
    if topology.memory_bytes is not None and claimed > topology.memory_bytes:
        return warn(
            f"engines may fill {claimed // MIB} MiB of /dev/shm, and the host has {topology.memory_bytes // MIB} MiB",
            "Lower vllm_engine_shm_size: it is memory of the host, and engines need it to load weights.",
        )
    return good(f"the host's /dev/shm has {topology.shm_bytes // MIB} MiB, containers have their own")
