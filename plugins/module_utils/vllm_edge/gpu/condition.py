# SPDX-License-Identifier: Apache-2.0
"""Whether engines can use a GPU: its compute mode and MIG mode, and what it needs after a fault.

What it needs is said by the driver's own words, and by NVIDIA's catalogue of the Xids in the kernel's log. The words
come from `nvidia-smi --query-gpu=gpu_recovery_action` (None, Reset, Reboot, Drain P2P, Drain and Reset), and from Xid
154, which follows other Xids ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"; newer drivers
write PF FLR for a reset of the PCI function). They decide where they are known, because the driver sums up in them what
the Xids before need.

https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html,
https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from ..system.nvml import explain_reset
from .topology import Xid

Action = Literal["none", "drain", "later", "reset", "reboot", "unknown"]
ACTIONS: tuple[Action, ...] = ("reboot", "reset", "unknown", "drain", "later")
"""Those that call for somebody, beginning with the one that includes the others."""

ACTION_CHANGED = 154
_CHANGED = re.compile(r"to 0x[0-9a-fA-F]+ \(([^()]*)\)")
RESETS = frozenset({46, 48, 61, 62, 64, 74, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158})
"""Xids whose immediate action in NVIDIA's catalogue is RESET_GPU; 48 and 74 have a workflow that begins with a reset.
61 is unused since Ampere, and NVIDIA's GPU debug guidelines ask for a reset."""
REBOOTS = frozenset({79, 151})
"""Those whose immediate action is RESTART_BM or RESTART_VM."""
GRAVE = RESETS | REBOOTS | {ACTION_CHANGED}
MEANINGS = {
    48: "double bit ECC error",
    64: "row remapping failed",
    79: "fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP does not answer",
}


def read_action(words: str) -> Action:
    """Interpret the driver's words for a recovery action. What they do not say is `unknown`, and not `none`.

    `later` is a reset (Drain and Reset) of a GPU that works until then, with less of its memory.
    """
    low = words.strip().lower().replace("_", " ")
    if low == "none":
        return "none"
    if "reboot" in low:
        return "reboot"
    if "reset" in low or "flr" in low:
        return "later" if "drain" in low else "reset"
    return "drain" if "drain" in low else "unknown"


def read_changed(xid: Xid) -> str:
    """Return the words of the new action in an Xid 154; the whole line if it has no such words."""
    found = _CHANGED.search(xid.line)
    return found[1] if found else xid.line


def name_xid(xid: Xid) -> str:
    meaning = f"asks for {read_changed(xid)}" if xid.number == ACTION_CHANGED else MEANINGS.get(xid.number)
    return f"Xid {xid.number}{f' ({meaning})' if meaning else ''} of {xid.bus}"


def sum_up(xids: Iterable[Xid]) -> dict[str, Action]:
    """Return what each GPU needs after its Xids, oldest first: by its last Xid 154, or by the tables without one.

    After an Xid 154 that asks for nothing more the tables count again.
    """
    needs: dict[str, Action] = {}
    decided: dict[str, bool] = {}
    for xid in xids:
        if xid.number == ACTION_CHANGED:
            needs[xid.bus] = read_action(read_changed(xid))
            decided[xid.bus] = needs[xid.bus] != "none"
        elif not decided.get(xid.bus):
            if xid.number in REBOOTS:
                needs[xid.bus] = "reboot"
            elif xid.number in RESETS and needs.get(xid.bus) != "reboot":
                needs[xid.bus] = "reset"
    return needs


def find_obstacle(compute_mode: str | None, mig: bool | None, users: int) -> str:
    """Return why `users` engines and others cannot use a GPU together; empty if they can, or if no mode is known.

    Engines get whole GPUs by UUID, and in MIG mode CUDA sees instances of a GPU alone. `compute_mode` is as nvidia-smi
    writes it.
    """
    if mig:
        return "is in MIG mode, in which CUDA does not see the GPU itself"
    if compute_mode == "Prohibited":
        return "has compute mode Prohibited, in which CUDA refuses every process"
    if is_exclusive(compute_mode) and users > 1:
        return f"has compute mode {compute_mode}, which allows one process, and has {users} users, engines or others"
    return ""


def is_exclusive(compute_mode: str | None) -> bool:
    return (compute_mode or "").startswith("Exclusive")


def explain_mode(uuid: str, mig: bool | None = False) -> str:
    """Return how to give a GPU back to several processes, as a sentence."""
    if not mig:
        return f"'nvidia-smi -i {uuid} -c DEFAULT' changes it at once, until the driver is loaded anew."
    return (
        f"'nvidia-smi -i {uuid} -mig 0' ends MIG mode, and counts after a reset: {explain_reset(uuid)}. Or leave the "
        "card to others: take it out of gpu_uuids, or choose a serving_profile without it."
    )


def explain_action(action: Action, uuid: str = "<uuid>") -> str:
    """Return the remedy for an action."""
    again = "Check its seating, power and cooling; replace it if it comes back."
    if action == "reboot":
        return f"The card cannot be used before a reboot of the host. {again}"
    if action == "drain":
        return (
            "Stop the engines over several GPUs ('systemctl stop vllm-edge.target') and 'systemctl stop "
            "nvidia-persistenced', and look again with 'nvidia-smi --query-gpu=uuid,gpu_recovery_action --format=csv'. "
            f"If it still says so, {explain_reset(uuid)}."
        )
    if action == "unknown":
        return f"See NVIDIA's documentation of these words; where they say no more, {explain_reset(uuid)}."
    if action == "later":
        return f"The card works on with less of its memory until a reset. At a good time: {explain_reset(uuid)}."
    return f"The card cannot be trusted before a reset: {explain_reset(uuid)}. {again}"
