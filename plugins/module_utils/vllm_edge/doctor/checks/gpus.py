# SPDX-License-Identifier: Apache-2.0
"""The checks of the GPUs: present on the bus, answering, expected, and used by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...facts.model import Facts
from ...gpu.condition import explain_mode, find_obstacle, is_exclusive
from ...system.host import Unread
from ...system.nvml import ERRORS
from ..contract import NotKnown, Verdict, decline_to_judge, fail, good, known, listed, warn
from .driver import require_driver


def check_present(facts: Facts) -> Verdict:
    gpus = facts.gpus
    if not gpus.on_bus and not gpus.answering:
        return fail(
            "no GPU of NVIDIA on the PCI bus, and none answers",
            "'lspci -d 10de:' lists cards; one that is missing is not seated, not powered, or given to a virtual "
            "machine.",
        )
    names = sorted({gpu.name for gpu in gpus.answering})
    given = sorted(bus for bus, driver in gpus.on_bus.items() if driver == "vfio-pci")
    silent = sorted(set(gpus.on_bus) - {gpu.bus for gpu in gpus.answering} - set(given))
    if gpus.answering and silent:
        return fail(
            f"{len(gpus.on_bus)} GPUs on the PCI bus, {len(gpus.answering)} answer; silent: {', '.join(silent)}",
            "'journalctl -k | grep -i nvrm' says why the driver left them.",
        )
    count = len(gpus.answering) or len(gpus.on_bus) - len(given)
    if count < gpus.needed:
        return fail(
            f"{count} GPUs are there, the profile needs {gpus.needed}",
            "Choose a serving_profile for fewer GPUs ('ansible-playbook playbooks/advise.yml' ranks them), or look for "
            "the missing cards in 'lspci -d 10de:'.",
        )
    told = f"{count} of {', '.join(names)}" if names else f"{count} GPUs on the PCI bus"
    return good(told + (f"; kept for virtual machines (vfio-pci): {', '.join(given)}" if given else ""))


def check_answer(facts: Facts) -> Verdict:
    require_driver(facts)
    if not facts.driver.loaded and not facts.gpus.answering:
        decline_to_judge("the module nvidia is not loaded")
    said = facts.gpus.problem
    if not said:
        return good(f"nvidia-smi names {len(facts.gpus.answering)} GPUs")
    code = next((code for words, code in SMI_WORDS.items() if words in said), "UNKNOWN")
    return fail(f"nvidia-smi says: {said}", ERRORS[code][1].format(gpu="the card"))


SMI_WORDS: Mapping[str, str] = {
    "cannot be run": "LIBRARY_NOT_FOUND",
    "couldn't find libnvidia-ml": "LIBRARY_NOT_FOUND",
    "couldn't communicate with the NVIDIA driver": "DRIVER_NOT_LOADED",
    "library version mismatch": "LIB_RM_VERSION_MISMATCH",
    "No devices were found": "GPU_NOT_FOUND",
    "GPU is lost": "GPU_IS_LOST",
    "Reset the GPU": "RESET_REQUIRED",
    "requires reset": "RESET_REQUIRED",
    "Insufficient Permissions": "NO_PERMISSION",
    "Timeout": "TIMEOUT",
}


def check_expected(facts: Facts) -> Verdict:
    gpus, expected = facts.gpus, known(facts.gpus.expected)
    if not expected:
        return good("no engine, record or inventory names a GPU by its UUID yet")
    if not gpus.answering:
        decline_to_judge("no GPU answers")
    there = {gpu.uuid: gpu for gpu in gpus.answering}
    gone = [f"{uuid} ({who})" for uuid, who in expected.items() if uuid not in there]
    new = [f"{gpu.uuid} ({gpu.name} at {gpu.bus})" for gpu in gpus.answering if gpu.uuid not in expected]
    if gone:
        swapped = f"; there without being expected: {', '.join(new)}" if new else ""
        remedy = (
            "If that is the exchanged card, put its UUID in the place of the old one in gpu_uuids and run site.yml."
            if new
            else "Look for the card in 'lspci -d 10de:' and for Xid messages in 'journalctl -k'; choose a profile "
            "without it while it is gone."
        )
        return fail(f"not there: {', '.join(gone)}{swapped}", remedy)
    if new:
        return good(f"every expected GPU is there; unused: {', '.join(new)}", "Add it to gpu_uuids to use it.")
    return good(f"the {len(expected)} expected GPUs are there")


def check_mode(facts: Facts) -> Verdict:
    """Judge compute mode and MIG mode of the GPUs that engines may get."""
    topology, engines = facts.topology, facts.serving.engines
    if not topology.cards:
        decline_to_judge("no GPU answers")
    ours = [card for card in topology.cards if card.bus not in topology.unassigned]
    users = Counter(uuid for engine in (() if isinstance(engines, Unread) else engines) for uuid in engine.gpus)
    wrong = {card: why for card in ours if (why := find_obstacle(card.compute_mode, card.mig, users[card.uuid]))}
    for card in wrong:
        told = "; ".join(f"{card.uuid} at {card.bus} {why}" for card, why in wrong.items())
        return fail(told, explain_mode(card.uuid, card.mig))
    if any(card.compute_mode is None for card in ours):
        raise NotKnown("the driver does not say which compute mode the GPUs have")
    for card in ours:
        if is_exclusive(card.compute_mode):
            return warn(
                f"{card.uuid} at {card.bus} has compute mode {card.compute_mode}, which allows one process",
                f"That is right for an engine with this GPU alone. {explain_mode(card.uuid)}",
            )
    return good("every GPU is whole, and more than one process may use it")


def check_holders(facts: Facts) -> Verdict:
    if not facts.gpus.answering:
        decline_to_judge("no GPU answers")
    others = known(facts.gpus.others)
    if not others:
        return good("nobody but our engines uses a GPU")
    return good(
        f"used by others too: {listed(others)}",
        "They are left alone; what they hold is missing to an engine on the same GPU.",
    )


def check_device_nodes(facts: Facts) -> Verdict:
    """Warn if every local user may open the GPUs and more than one person can log in; otherwise it is advice."""
    nodes = known(facts.gpus.nodes)
    if not nodes:
        decline_to_judge("the driver has no device nodes yet")
    everybody = [f"{path} ({mode:04o})" for path, mode in nodes.items() if mode & 0o006]
    if not everybody:
        return good(f"only root and a group may open the {len(nodes)} device nodes of the GPUs")
    people = facts.system.accounts
    told = f"every local user may open {listed(everybody)} and fill the memory of a GPU"
    remedy = (
        "Restrict them to a group with the line 'options nvidia NVreg_DeviceFileUID=0 NVreg_DeviceFileGID=<gid> "
        "NVreg_DeviceFileMode=0660' in /etc/modprobe.d/nvidia-device-nodes.conf, where <gid> is the number of a group "
        "of those who use GPUs; it counts from the next boot on. See docs/install.md, Restrict the device nodes."
    )
    if len(people) > 1:
        return warn(f"{told}; {listed(people)} can log in", remedy)
    return good(told, remedy)
