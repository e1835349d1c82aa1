# SPDX-License-Identifier: Apache-2.0
"""Checks of the bus between the GPUs, of the cards' memory and power, and of shared memory."""

from __future__ import annotations

from collections import Counter

from ...facts.model import DEFAULT_SHM_BYTES, Engine, Facts
from ...gpu import condition
from ...gpu.topology import SLOWDOWNS, UNKNOWN_PEER, Card, correctness, find_obstacles
from ...system.host import Unread
from ...system.nvml import explain_reset
from ..contract import NotKnown, Verdict, fail, good, known, warn

MIB = 1024 * 1024


def _locate(card: Card) -> str:
    return f"{card.uuid} at {card.bus}"


def _require_cards(facts: Facts) -> tuple[Card, ...]:
    if not facts.topology.cards:
        raise NotKnown("no GPU answers")
    return facts.topology.cards


def _list_engines(facts: Facts) -> tuple[Engine, ...]:
    return () if isinstance(facts.serving.engines, Unread) else facts.serving.engines


def _is_below(value: float | None, possible: float | None) -> bool:
    return value is not None and possible is not None and value < possible


def check_pcie(facts: Facts) -> Verdict:
    """Warn if a PCIe link is narrower than possible, or slower under load.

    A slow link counts only under load, because idle GPUs lower it to save power.
    """
    cards = _require_cards(facts)
    slow = [
        f"{_locate(card)} has {card.width} of {card.width_possible} lanes"
        for card in cards
        if _is_below(card.width, card.width_possible)
    ]
    slow += [
        f"{_locate(card)} works at generation {card.generation} of {card.generation_possible}"
        for card in cards
        if not card.idle and _is_below(card.generation, card.generation_possible)
    ]
    if slow:
        return warn(
            "; ".join(slow),
            "Reseat the card and its riser, look for corrected errors ('journalctl -k | grep AER') and at the slot's "
            "settings in the firmware: tensor parallelism is bound by this link.",
        )
    hidden = [_locate(card) for card in cards if None in (card.width, card.width_possible, card.generation_possible)]
    if hidden:
        raise NotKnown(f"the driver does not say how wide or fast the link is of {', '.join(hidden)}")
    links = sorted({f"x{card.width} generation {card.generation_possible}" for card in cards})
    return good(f"every link has the width that it can have: {', '.join(links)}")


def check_numa(facts: Facts) -> Verdict:
    cards = {card.uuid: card for card in _require_cards(facts)}
    nodes = {uuid: card.numa for uuid, card in cards.items() if card.numa is not None}
    if len(nodes) < len(cards) and facts.topology.numa_nodes > 1:
        raise NotKnown(
            f"the host has {facts.topology.numa_nodes} NUMA nodes, and the firmware does not say on which are "
            + ", ".join(card.bus for uuid, card in cards.items() if uuid not in nodes)
        )
    if not nodes:
        return good("the host has one NUMA node")
    engines = _list_engines(facts)
    across = [engine.name for engine in engines if len({nodes.get(uuid) for uuid in engine.gpus} - {None}) > 1]
    told = ", ".join(f"{cards[uuid].bus} on node {node}" for uuid, node in nodes.items())
    if across:
        return warn(
            f"{told}; GPUs of {', '.join(across)} are on more than one node",
            "Give the engine slots of one node, where there are enough: between nodes every transfer crosses the "
            "processors' link.",
        )
    return good(told)


def check_iommu(facts: Facts) -> Verdict:
    cards = _require_cards(facts)
    recommended = correctness(facts.topology)
    if recommended.reasons:
        words = " ".join(f"{key}={value}" for key, value in recommended.environment.items())
        return warn(
            "; ".join(recommended.reasons),
            f"Engines over several GPUs need {words} and {' '.join(recommended.arguments)}, which site.yml gives them "
            "while vllm_engine_peer_to_peer is auto. They are faster without: boot with iommu=pt (or the IOMMU off), "
            "with Access Control Services off in the firmware, unless virtual machines of this host need them.",
        )
    if len(cards) < 2:
        return good("one GPU: there is no other to reach")
    modes = sorted({known(card.iommu) for card in cards})
    hidden = next((card.redirecting for card in cards if isinstance(card.redirecting, Unread)), None)
    if hidden is not None:
        raise NotKnown(f"IOMMU: {', '.join(modes)}; Access Control Services: {hidden.why}")
    reasons = find_obstacles(cards)
    if reasons:
        return good(f"{'; '.join(reasons)}; the driver offers no peer-to-peer, so nothing uses it")
    return good(f"IOMMU: {', '.join(modes)}; no bridge keeps the GPUs apart")


def check_peer_to_peer(facts: Facts) -> Verdict:
    cards = {card.uuid: card for card in _require_cards(facts)}
    if len(cards) < 2:
        return good("one GPU: there is no other to reach")
    refused = {pair: word for pair, word in known(facts.topology.peers).items() if word != "OK"}
    if not refused:
        return good("the driver offers peer-to-peer between all GPUs")
    told = ", ".join(f"{cards[one].bus} and {cards[other].bus} ({word})" for (one, other), word in refused.items())
    if UNKNOWN_PEER in refused.values():
        raise NotKnown(f"the driver does not say whether it offers peer-to-peer: {told}")
    return good(f"no peer-to-peer between {told}", "NCCL uses shared memory there, which is correct and slower.")


def check_ecc(facts: Facts) -> Verdict:
    cards = _require_cards(facts)
    broken = [f"{_locate(card)}: remapping a row failed" for card in cards if card.remap_failed]
    if broken:
        return fail("; ".join(broken), "Have the card replaced; until then leave it out of the profile.")
    trouble = [
        f"{_locate(card)}: {card.uncorrected} uncorrected errors since the driver was loaded"
        for card in cards
        if card.uncorrected
    ]
    trouble += [f"{_locate(card)}: a row waits to be remapped" for card in cards if card.remap_pending]
    if trouble:
        return warn(
            "; ".join(trouble),
            f"A reset remaps what is bad: {explain_reset()}. Replace the card if it comes back.",
        )
    off = [_locate(card) for card in cards if card.ecc is False]
    if off:
        return good(f"ECC is off on {', '.join(off)}", "'nvidia-smi -e 1' and a reboot turn it on; it takes memory.")
    hidden = [_locate(card) for card in cards if None in (card.ecc, card.uncorrected)]
    if hidden:
        raise NotKnown(f"it is not known whether ECC is on, or errors are not counted: {', '.join(hidden)}")
    return good("ECC is on, without uncorrected errors")


def check_recovery(facts: Facts) -> Verdict:
    """Fail if the driver says that a GPU needs a reset, a reboot or to be drained."""
    cards = _require_cards(facts)
    asked = [card for card in cards if card.recovery is not None and condition.read_action(card.recovery) != "none"]
    if asked:
        return fail(
            "; ".join(f"{_locate(card)}: the driver asks for the recovery action {card.recovery}" for card in asked),
            condition.explain_action(condition.read_action(asked[0].recovery or ""), asked[0].uuid),
        )
    if any(card.recovery is None for card in cards):
        raise NotKnown("this driver does not name a GPU recovery action: branches before 565 do not, nor do some cards")
    return good("the driver asks for no recovery of a GPU")


def check_xid(facts: Facts) -> Verdict:
    """Judge the Xids since the driver's module was loaded.

    What the driver asks for now, or asked for in the last Xid 154, decides; otherwise NVIDIA's table of Xids does. A
    GPU without a slot is never more than a warning, because no engine gets it.
    """
    topology = facts.topology
    xids = known(topology.xids)
    if not xids:
        return good("the kernel has logged no Xid since the driver's module was loaded")
    counts = Counter(map(condition.name_xid, xids))
    told = ", ".join(name + (f", {count} times" if count > 1 else "") for name, count in counts.items())
    told = f"{told}; the last: {xids[-1].line}"
    cards = {card.bus.rpartition(".")[0]: card for card in topology.cards}
    spare = {bus.rpartition(".")[0] for bus in topology.unassigned}
    well = {bus for bus, card in cards.items() if condition.read_action(card.recovery or "?") == "none"}
    needs = condition.sum_up(xid for xid in xids if xid.bus not in spare | well)
    for action in condition.ACTIONS:
        for bus in (bus for bus, needed in needs.items() if needed == action):
            return fail(told, condition.explain_action(action, cards[bus].uuid if bus in cards else "<uuid>"))
    if all(xid.bus in spare for xid in xids):
        return warn(told, "No slot of this host has that GPU (gpu_uuids), so no engine gets it: tell who uses it.")
    if any(xid.number in condition.GRAVE for xid in xids):
        return warn(told, "The driver asks for no recovery of that GPU now; have the card tested if it comes back.")
    return warn(
        told,
        "Xid 13, 31, 43 and 45 usually come from a program that crashed: compare the times with the engine's journal. "
        "Others are the card's: https://docs.nvidia.com/deploy/xid-errors.",
    )


def check_power(facts: Facts) -> Verdict:
    cards = _require_cards(facts)
    slowed = [
        f"{_locate(card)}: {', '.join(name for bit, name in SLOWDOWNS.items() if (card.slowdown or 0) & bit)}"
        for card in cards
        if card.slowdown
    ]
    if slowed:
        return warn(
            "; ".join(slowed),
            "Check the air flow, the fans' profile in the management controller and the power supplies: the driver "
            "lowers the clocks until it is cool or has power.",
        )
    hidden = [_locate(card) for card in cards if card.slowdown is None]
    if hidden:
        raise NotKnown(f"the driver does not say whether a clock is slowed down of {', '.join(hidden)}")
    lowered = [
        f"{_locate(card)} is limited to {card.power_limit_w:g} of {card.power_default_w:g} W"
        for card in cards
        if _is_below(card.power_limit_w, card.power_default_w)
    ]
    if lowered:
        return good("; ".join(lowered), "'nvidia-smi -pl <watts>' sets it; a lower limit is slower, and may be wanted.")
    return good("the power limits are the cards' own, and no clock is slowed down")


def check_shared_memory(facts: Facts) -> Verdict:
    """Judge the /dev/shm of the host, and those of the containers, which are in the host's memory too."""
    topology = facts.topology
    if topology.shm_bytes is None:
        return fail(
            "/dev/shm is not mounted", "'mount -t tmpfs tmpfs /dev/shm'; systemd does it at boot unless told not to."
        )
    engines = _list_engines(facts)
    small = [engine.name for engine in engines if len(engine.gpus) > 1 and engine.shm_bytes <= DEFAULT_SHM_BYTES]
    if small:
        return warn(
            f"engines over several GPUs with {DEFAULT_SHM_BYTES // MIB} MiB or less: {', '.join(small)}",
            "Set vllm_engine_shm_size to 2g or more: NCCL passes data between processes there.",
        )
    claimed = sum(engine.shm_bytes for engine in engines)
    if topology.memory_bytes is not None and claimed > topology.memory_bytes:
        return warn(
            f"engines may fill {claimed // MIB} MiB of /dev/shm, and the host has {topology.memory_bytes // MIB} MiB",
            "Lower vllm_engine_shm_size: it is memory of the host, and engines need it to load weights.",
        )
    return good(f"the host's /dev/shm has {topology.shm_bytes // MIB} MiB, containers have their own")
