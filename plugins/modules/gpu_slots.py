#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: determine which GPU has which slot, and record it on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_slots
short_description: Manage the assignment of GPUs to slots
version_added: "0.1.0"
description:
  - Engines refer to their GPUs by slot number. A slot stands for the UUID of one GPU.
  - If O(gpu_uuids) is not set, the first run records the GPUs at O(path) in the order of their PCI bus ids, and returns
    lines to paste into the inventory. Later runs use the record. A GPU that is missing is an error; slots never move.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
  - edge.vllm_edge.nvml
attributes:
  check_mode:
    description: If the driver or the host runtime is not installed yet, the module is skipped with the reason; outside
      of check mode that is an error.
options:
  gpu_uuids:
    description: UUIDs of the host's GPUs in the order of their slots, as in the variable of this name. The record is
      updated to this list.
    type: list
    elements: str
  path:
    description: Path of the record on the host. Its directory must exist.
    type: path
    default: /var/lib/vllm-edge/gpu-slots.json
  minimum:
    description: Number of GPUs that the profile needs. Fewer slots are an error.
    type: int
    default: 1
"""

EXAMPLES = r"""
- name: Determine the GPU slots of a host for a profile that needs four GPUs
  edge.vllm_edge.gpu_slots:
    gpu_uuids: "{{ gpu_uuids | default(omit) }}"
    minimum: 4
"""

RETURN = r"""
uuids:
  description: UUIDs in the order of the slots. If the module was skipped, the UUIDs in the inventory or the record,
    which were not checked.
  returned: success or skipped
  type: list
  elements: str
slots:
  description: The slots, each with C(slot), C(uuid), C(name) and C(pci_bus_id) of its GPU, and the C(total_mib),
    C(reserved_mib) and C(compute_capability) of NVML, V(null) if it does not report one of the latter.
  returned: success
  type: list
  elements: dict
source:
  description: Where the order was taken from. V(declared) is O(gpu_uuids), V(recorded) is the record on the host, and
    V(discovered) is the PCI bus order of this run.
  returned: success
  type: str
paste:
  description: YAML lines for the host's host_vars that set the order explicitly.
  returned: success
  type: str
nvml:
  description: The error that NVML returned, C(code), C(gpu), C(sentence) and C(remedy).
  returned: when NVML returned an error
  type: dict
msg:
  description: A sentence that summarises the slots, or describes the error and its remedy.
  returned: always
  type: str
"""

import os
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, respawn_module

from ..module_utils.vllm_edge.gpu import slots
from ..module_utils.vllm_edge.gpu.condition import explain_mode, find_obstacle
from ..module_utils.vllm_edge.paths import find_interpreter
from ..module_utils.vllm_edge.system.files import write_durably
from ..module_utils.vllm_edge.system.nvml import GpuIdentity, NvmlFailure, PynvmlMissing, open_nvml, require_pynvml

ARGUMENT_SPEC: dict[str, Any] = {
    "gpu_uuids": {"type": "list", "elements": "str"},
    "path": {"type": "path", "default": slots.RECORD_PATH},
    "minimum": {"type": "int", "default": 1},
    "python": {"type": "path", "default": "/opt/vllm-edge/current/venv/bin/python"},
}

MODE = "0644"

SAID = {
    "declared": "as gpu_uuids of the inventory says",
    "recorded": "as recorded on the host",
    "discovered": "recorded in PCI bus order; paste the lines in 'paste' into host_vars to make the order explicit",
}


def remembered(module: AnsibleModule) -> tuple[slots.Slot, ...]:
    """Return the slots of the inventory or of the record, with the last known names. Does not need NVML."""
    recorded: tuple[slots.Slot, ...] = slots.load(module.params["path"])
    known = {slot.uuid: slot for slot in recorded}
    declared: list[str] = module.params["gpu_uuids"] or []
    return tuple(known.get(uuid, slots.Slot(uuid)) for uuid in declared) or recorded


def skip(module: AnsibleModule, reason: str, **more: Any) -> NoReturn:
    uuids = [slot.uuid for slot in remembered(module)]
    module.exit_json(skipped=True, uuids=uuids, msg=f"Would settle and record the GPU slots; not yet: {reason}", **more)


def see(module: AnsibleModule) -> tuple[tuple[GpuIdentity, ...], dict[str, dict[str, Any]]]:
    """Return the GPUs that NVML reports, and their memory by UUID. Raises NvmlFailure with the name of a lost GPU."""
    with open_nvml() as session:
        for failure in slots.list_lost(session, remembered(module)) if session.lost else ():
            raise failure
        for gpu in session.identities:
            mode = session.read_mode(gpu)
            if why := find_obstacle(mode.compute_mode, mode.mig, 1):
                module.warn(f"{gpu.card} {why}, so no engine can start there. {explain_mode(gpu.uuid, mode.mig)}")
        memory = {
            gpu.uuid: {key: getattr(gpu, key) for key in ("total_mib", "reserved_mib", "compute_capability")}
            for gpu in session.read().gpus
        }
        return session.identities, memory


def write(module: AnsibleModule, path: str, text: str) -> None:
    directory = os.path.dirname(path)
    if not os.path.isdir(directory):
        module.fail_json(msg=f"The GPU slots cannot be recorded: {directory} does not exist. {PynvmlMissing.remedy}")
    try:
        write_durably(Path(path), text)
    except OSError as error:
        module.fail_json(
            msg=f"The GPU slots cannot be recorded: {error}. They were not changed; run again when that is mended."
        )


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    python = find_interpreter(module.params["python"])
    path: str = module.params["path"]

    try:
        slots.check_declared(module.params["gpu_uuids"] or [])
        require_pynvml(python, has_respawned(), respawn_module)
        identities, memory = see(module)
        plan = slots.plan(module.params["gpu_uuids"], slots.read_text(path), identities, module.params["minimum"], path)
    except PynvmlMissing as missing:
        if module.check_mode:
            skip(module, f"{missing}.")
        module.fail_json(msg=f"The GPUs cannot be listed: {missing}. {missing.remedy}")
    except NvmlFailure as failure:
        if failure.driver_absent and module.check_mode:
            skip(module, failure.sentence, nvml=failure.as_dict())
        module.fail_json(msg=f"The GPUs cannot be listed: {failure}", nvml=failure.as_dict())
    except slots.SlotError as error:
        module.fail_json(msg=str(error))

    for warning in plan.warnings:
        module.warn(warning)
    if plan.changed and not module.check_mode:
        write(module, path, plan.after)
    mode_differs = os.path.exists(path) and module.set_mode_if_different(path, MODE, False)
    module.exit_json(
        changed=plan.changed or mode_differs,
        uuids=plan.uuids,
        slots=[slot.as_dict(number) | memory.get(slot.uuid, {}) for number, slot in enumerate(plan.slots)],
        source=plan.source,
        paste=plan.paste,
        diff={"before": plan.before, "after": plan.after, "before_header": path, "after_header": path},
        msg=f"{len(plan.uuids)} GPU slots, {SAID[plan.source]}.",
    )


if __name__ == "__main__":
    main()
