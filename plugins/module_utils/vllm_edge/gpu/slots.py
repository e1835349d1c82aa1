# SPDX-License-Identifier: Apache-2.0
"""GPU slots: the numbers 0, 1, 2, ... by which engines name their GPUs, and the stable mapping from slots to UUIDs.

The mapping comes from the inventory's gpu_uuids or, without it, from a record on the host that the first run writes in
PCI bus order. It never changes by itself. A card that is missing is an error and keeps its slot: if later cards moved
up, every engine behind the gap would silently run on a wrong GPU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..system.nvml import GpuIdentity, NvmlFailure, NvmlSession, name_lost

RECORD_PATH = "/var/lib/vllm-edge/gpu-slots.json"
RECORD_VERSION = 1
_UUID = re.compile(r"GPU-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")


class SlotError(ValueError):
    """The slots cannot be determined. The text says what is wrong, why, and the remedy."""


@dataclass(frozen=True)
class Slot:
    """One slot. Name and bus id are None if the card was never seen on this host."""

    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None

    def as_dict(self, number: int) -> dict[str, Any]:
        return {"slot": number, "uuid": self.uuid, "name": self.name, "pci_bus_id": self.pci_bus_id}

    def describe(self, number: int) -> str:
        if self.pci_bus_id is None:
            return f"slot {number}, {self.uuid} (never seen on this host)"
        return f"slot {number}, {self.uuid} ({self.name or 'unknown model'}, last seen at {self.pci_bus_id})"


@dataclass(frozen=True)
class SlotPlan:
    """The slots of a host, and the record before and after."""

    slots: tuple[Slot, ...]
    source: str
    """`declared` (gpu_uuids), `recorded` (the file) or `discovered` (first run, PCI bus order)."""
    before: str
    """Text of the record on the host; empty if there is none."""
    after: str
    """Text that the record should have."""
    warnings: tuple[str, ...]

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def uuids(self) -> list[str]:
        return [slot.uuid for slot in self.slots]

    @property
    def paste(self) -> str:
        lines = ["gpu_uuids:"]
        for number, slot in enumerate(self.slots):
            place = ", ".join(part for part in (slot.name, slot.pci_bus_id) if part)
            lines.append(f"  - {slot.uuid}  # slot {number}" + (f": {place}" if place else ""))
        return "\n".join(lines) + "\n"


def render(slots: Sequence[Slot]) -> str:
    """Return the text of the record. It has no time stamp, so the same slots give the same file."""
    record = {"version": RECORD_VERSION, "gpus": [slot.as_dict(number) for number, slot in enumerate(slots)]}
    return json.dumps(record, indent=2) + "\n"


def parse(text: str, path: str = RECORD_PATH) -> tuple[Slot, ...]:
    """Parse a record; an empty text (no record) has no slots.

    Raises SlotError: the text is not a record, is of another version or names a GPU twice.
    """
    if not text.strip():
        return ()
    remedy = f"Restore it from a backup, or remove {path} to have the slots recorded anew in PCI bus order."
    try:
        record = json.loads(text)
        if record["version"] != RECORD_VERSION:
            raise SlotError(
                f"{path} is of version {record['version']!r} and this program knows {RECORD_VERSION}: "
                f"another release of vllm-edge wrote it. {remedy}"
            )
        slots = tuple(Slot(str(gpu["uuid"]), gpu.get("name"), gpu.get("pci_bus_id")) for gpu in record["gpus"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, SlotError):
            raise
        raise SlotError(f"{path} is not a record of GPU slots ({type(error).__name__}: {error}). {remedy}") from error
    refuse_duplicates([slot.uuid for slot in slots], path)
    return slots


def load(path: str = RECORD_PATH) -> tuple[Slot, ...]:
    return parse(read_text(path), path)


def read_text(path: str) -> str:
    """Return the content of the file; empty if there is no such file. Raises OSError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def list_lost(session: NvmlSession, slots: Sequence[Slot]) -> list[NvmlFailure]:
    """Return the failures of the GPUs that did not answer when the session was opened, with the name of their slot."""
    expected = [
        GpuIdentity(number, slot.uuid, slot.name or "unknown model", slot.pci_bus_id or "an unknown bus id")
        for number, slot in enumerate(slots)
    ]
    return [name_lost(failure, expected, [gpu.uuid for gpu in session.identities]) for failure in session.lost]


def check_declared(uuids: Sequence[str]) -> None:
    """Check gpu_uuids before any GPU is queried. Raises SlotError if an entry is no UUID or occurs twice."""
    for number, uuid in enumerate(uuids):
        if _UUID.fullmatch(uuid) is None:
            raise SlotError(
                f"gpu_uuids[{number}] is {uuid!r}, which is no GPU UUID. 'nvidia-smi -L' prints them: "
                "GPU-, then 8-4-4-4-12 hexadecimal digits. Indexes and bus ids change with the hardware; UUIDs do not."
            )
    refuse_duplicates(uuids, "gpu_uuids")


def refuse_duplicates(uuids: Sequence[str], where: str) -> None:
    lowered = [uuid.lower() for uuid in uuids]
    for uuid in uuids:
        places = [str(number) for number, other in enumerate(lowered) if other == uuid.lower()]
        if len(places) > 1:
            raise SlotError(
                f"{where} names {uuid} {len(places)} times, as slots {' and '.join(places)}: "
                "two engines would share a GPU that each believes to have alone. Every slot is another card."
            )


def _describe_gone(gone: Sequence[str], extra: Sequence[GpuIdentity], where: str) -> str:
    if extra:
        cards = ", ".join(gpu.card for gpu in extra)
        next_step = f"It sees without a slot: {cards}. If that is the exchanged card, put its UUID in the same place"
    else:
        next_step = (
            "Look for Xid messages in 'journalctl -k' and for the card in 'lspci -d 10de:'. "
            "If it is gone for good, put its successor's UUID in its place"
        )
    return (
        f"NVML does not see {'; '.join(gone)}, which {where} names. {next_step} in gpu_uuids of the host's host_vars. "
        "No slot is re-mapped by itself: the engines behind it would land on other cards."
    )


def _describe_too_few(slots: Sequence[Slot], extra: Sequence[GpuIdentity], minimum: int, where: str) -> str:
    named = f" ({', '.join(slot.uuid for slot in slots)})" if slots else ""
    if extra:
        cards = ", ".join(gpu.card for gpu in extra)
        next_step = f"NVML also sees {cards}, without a slot: add to gpu_uuids what the profile may use."
    else:
        next_step = "Choose a serving_profile for fewer GPUs, or look in 'lspci -d 10de:' for a card the driver misses."
    return f"The profile needs {minimum} GPUs, but {where} has {len(slots)}{named}. {next_step}"


def _choose(
    declared: Sequence[str] | None, record: str, present: Sequence[GpuIdentity], path: str
) -> tuple[tuple[Slot, ...], str, str]:
    """Return the slots, their source (see `SlotPlan.source`) and what to call it in messages. Raises SlotError."""
    try:
        recorded = parse(record, path)
    except SlotError:
        # gpu_uuids overrides the record. If the record is unreadable, only the last known names of the cards are lost.
        if not declared:
            raise
        recorded = ()
    by_bus = [Slot(gpu.uuid, gpu.name, gpu.pci_bus_id) for gpu in sorted(present, key=lambda gpu: gpu.index)]
    known = {slot.uuid.lower(): slot for slot in (*recorded, *by_bus)}
    if declared:
        return tuple(known.get(uuid.lower(), Slot(uuid)) for uuid in declared), "declared", "gpu_uuids of the inventory"
    if recorded:
        return tuple(known[slot.uuid.lower()] for slot in recorded), "recorded", path
    return tuple(by_bus), "discovered", "NVML"


def plan(
    declared: Sequence[str] | None,
    record: str,
    present: Sequence[GpuIdentity],
    minimum: int = 1,
    path: str = RECORD_PATH,
) -> SlotPlan:
    """Determine the slots from the inventory, the record and the GPUs that NVML sees.

    `declared` is gpu_uuids of the inventory, `record` the text of the record on the host; both may be empty. `minimum`
    is the number of slots that the profile needs. Raises SlotError: a GPU that has a slot is missing, there are fewer
    slots than needed, or a list is invalid.
    """
    check_declared(declared or ())
    slots, source, where = _choose(declared, record, present, path)
    seen = {gpu.uuid.lower() for gpu in present}
    named = {slot.uuid.lower() for slot in slots}
    extra = [gpu for gpu in present if gpu.uuid.lower() not in named]
    gone = [slot.describe(number) for number, slot in enumerate(slots) if slot.uuid.lower() not in seen]
    if gone:
        raise SlotError(_describe_gone(gone, extra, where))
    if len(slots) < minimum:
        raise SlotError(_describe_too_few(slots, extra, minimum, where))
    warnings = [f"{gpu.card} has no slot and stays unused; add it to gpu_uuids to use it." for gpu in extra]
    return SlotPlan(slots, source, record, render(slots), tuple(warnings))
