#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: measure the memory of every GPU and compare it with its budget."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vram_budget
short_description: Check the memory in use on every GPU against its budget
version_added: "0.1.0"
description:
  - Reads memory and processes of every GPU from NVML until two consecutive samples agree, and compares the memory that
    the engines use with the budget of each GPU. Fails if a GPU is over its budget.
  - Run it after the first completion. vLLM allocates its whole share at start-up, but the first request may still
    compile kernels and allocate memory.
  - A GPU that is not in O(budgets) has the budget 0, and up to 16 MiB in use on it are tolerated.
  - A process in a container with the label C(vllm-edge.engine) belongs to an engine; every other process is foreign. If
    NVML does not report the memory of a process, or Docker cannot name its container, C(foreign_mib) is V(null), and
    C(engine_mib) an upper bound, all of the memory in use.
  - A GPU that is over its budget only because of memory that no process holds is watched for the whole
    O(settle_timeout_s), because the driver may release it late.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.nvml
  - edge.vllm_edge.foreign
attributes:
  check_mode:
    description: If the driver or the host runtime is not installed yet, the module is skipped with the reason; outside
      of check mode that is an error.
requirements:
  - docker (Python package), to determine the owners of processes
options:
  budgets:
    description: Memory that the engines may use on each GPU. A mapping from a GPU's UUID or slot to whole MiB, at most
      the memory of the GPU.
    type: dict
    required: true
  expected_mib:
    description: Memory that the engines are expected to use on each GPU in MiB, with the same keys as O(budgets). If
      they use less by more than O(tolerance_mib), the module warns that something else runs than was planned.
    type: dict
    default: {}
  tolerance_mib:
    description: How far the memory in use may be below O(expected_mib), in MiB.
    type: int
    default: 300
  settle_timeout_s:
    description: Maximum time in seconds to wait until two samples, taken one second apart, differ by less than 16 MiB
      on every GPU. V(0) takes one sample.
    type: float
    default: 30
  gpu_slots:
    description: UUIDs of the GPUs in the order of their slots, for the keys of O(budgets). By default the record at
      O(slots_file), or the order of their PCI bus ids.
    type: list
    elements: str
  slots_file:
    description: Record of the GPU slots on the host, written by M(edge.vllm_edge.gpu_slots).
    type: path
    default: /var/lib/vllm-edge/gpu-slots.json
"""

EXAMPLES = r"""
- name: Check two engines against their budgets
  edge.vllm_edge.vram_budget:
    budgets:
      0: 20900
      1: 20800
    expected_mib:
      0: 20600
      1: 20500
"""

RETURN = r"""
gpus:
  description:
    - All GPUs by C(index), in the order of the PCI bus; also returned on failure, as far as they could be read. Each
      has its C(slot), C(uuid), C(name), C(pci_bus_id) and C(compute_capability), and V(null) where NVML reports none.
    - "In MiB: C(total_mib), C(used_mib), C(free_mib), and C(reserved_mib), which the driver keeps for itself, V(null)
      where NVML has only version 1 of the call (C(memory_version)), whose C(used_mib) contains it; C(foreign_mib) of
      foreign processes and C(unattributed_mib) that no process holds, V(null) if they are not known; C(engine_mib),
      used memory minus foreign memory, which is compared with C(budget_mib), and C(engine_mib_is), V(exact) or
      V(upper bound); C(expected_mib), V(null) if O(expected_mib) does not contain it; C(headroom_mib), negative over
      the budget, and C(within_budget)."
    - "C(processes), each with its C(pid) on the host, C(used_mib) (V(null) if NVML does not report it), C(container)
      (its name, or the first digits of its id if Docker does not know it; V(null) without one), systemd C(unit),
      C(owner) (V(ours), V(foreign) or V(unknown)) and the C(reason) why the owner is unknown."
  returned: always
  type: list
  elements: dict
driver_version:
  description: Version of the NVIDIA driver.
  returned: when NVML answered
  type: str
settled:
  description: Whether the last two samples agreed.
  returned: when NVML answered
  type: bool
samples:
  description: Number of samples that were taken.
  returned: when NVML answered
  type: int
waited_s:
  description: Time in seconds until the samples agreed, or until the module stopped waiting.
  returned: when NVML answered
  type: float
failures:
  description: One paragraph for each GPU with a problem. Empty if all GPUs are within their budgets.
  returned: when NVML answered
  type: list
  elements: str
nvml:
  description: The error that NVML returned, C(code), C(gpu), C(sentence) and C(remedy).
  returned: when NVML returned an error
  type: dict
msg:
  description: One paragraph that summarises the result, or describes the error and its remedy.
  returned: always
  type: str
"""

import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, respawn_module

from ..module_utils.vllm_edge.gpu import slots as gpu_slots
from ..module_utils.vllm_edge.gpu.budget import (
    BudgetError,
    Evaluation,
    Limits,
    Settled,
    evaluate,
    resolve_mib,
    settle,
)
from ..module_utils.vllm_edge.gpu.owners import find_owners
from ..module_utils.vllm_edge.paths import RUN, find_interpreter
from ..module_utils.vllm_edge.system.long_run import watch_moves
from ..module_utils.vllm_edge.system.nvml import (
    HostReading,
    NvmlFailure,
    NvmlSession,
    PynvmlMissing,
    open_nvml,
    require_pynvml,
)

ARGUMENT_SPEC: dict[str, Any] = {
    "budgets": {"type": "dict", "required": True},
    "expected_mib": {"type": "dict", "default": {}},
    "tolerance_mib": {"type": "int", "default": 300},
    "foreign": {"type": "str", "choices": ["ignore", "warn", "fail"], "default": "warn"},
    "settle_timeout_s": {"type": "float", "default": 30},
    "gpu_slots": {"type": "list", "elements": "str"},
    "slots_file": {"type": "path", "default": gpu_slots.RECORD_PATH},
    "python": {"type": "path", "default": "/opt/vllm-edge/current/venv/bin/python"},
}


class Measurement:
    """One run of the module. Keeps the last sample, so that a failure can still show it."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.limits = Limits({}, {})
        self.slots: list[str] = []
        self.last: HostReading | None = None
        """Set after the budgets were checked. Without valid budgets a sample cannot be evaluated."""

    def known_slots(self, session: NvmlSession) -> tuple[gpu_slots.Slot, ...]:
        given: list[str] | None = self.params["gpu_slots"]
        if not given and (recorded := gpu_slots.load(self.params["slots_file"])):
            return recorded
        seen = {gpu.uuid: gpu_slots.Slot(gpu.uuid, gpu.name, gpu.pci_bus_id) for gpu in session.identities}
        return tuple(seen.get(uuid, gpu_slots.Slot(uuid)) for uuid in given or seen)

    def run(self, session: NvmlSession) -> Settled:
        slots = self.known_slots(session)
        self.slots = [slot.uuid for slot in slots]
        gpu_slots.refuse_duplicates(self.slots, "gpu_slots")
        for failure in gpu_slots.list_lost(session, slots):
            raise failure
        first = session.read()
        gpus = first.gpus
        self.limits = Limits(
            budgets=resolve_mib("budgets", self.params["budgets"], gpus, self.slots),
            expected=resolve_mib("expected_mib", self.params["expected_mib"], gpus, self.slots),
            foreign=self.params["foreign"],
            tolerance_mib=self.params["tolerance_mib"],
        )

        self.last = first

        def read() -> HostReading:
            self.last = session.read()
            return self.last

        return settle(read, self.judge, self.params["settle_timeout_s"], clock=time.monotonic, sleep=time.sleep)

    def judge(self, reading: HostReading) -> Evaluation:
        pids = {process.pid for gpu in reading.gpus for process in gpu.processes or ()}
        return evaluate(reading.gpus, find_owners(pids), self.limits, self.slots)

    @property
    def gpus(self) -> list[dict[str, Any]]:
        return [gpu.as_dict() for gpu in self.judge(self.last).gpus] if self.last else []


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    for option in ("settle_timeout_s", "tolerance_mib"):
        if module.params[option] < 0:
            module.fail_json(msg=f"{option} is {module.params[option]}: it cannot be negative.", gpus=[])

    measurement, find_moves = Measurement(module.params), watch_moves(Path(RUN))
    try:
        require_pynvml(find_interpreter(module.params["python"]), has_respawned(), respawn_module)
        with open_nvml() as session:
            result = measurement.run(session)
    except PynvmlMissing as missing:
        if module.check_mode:
            module.exit_json(
                skipped=True,
                gpus=[],
                msg=f"Would measure the VRAM of every GPU against {module.params['budgets']}; not yet, for {missing}.",
            )
        module.fail_json(msg=f"VRAM cannot be measured: {missing}. {missing.remedy}", gpus=[])
    except NvmlFailure as failure:
        if failure.driver_absent and module.check_mode:
            module.exit_json(
                skipped=True,
                gpus=[],
                nvml=failure.as_dict(),
                msg=f"Would measure the VRAM of every GPU; not yet: {failure.sentence}",
            )
        module.fail_json(msg=f"VRAM cannot be measured: {failure}", nvml=failure.as_dict(), gpus=measurement.gpus)
    except (BudgetError, gpu_slots.SlotError) as error:
        module.fail_json(msg=str(error), gpus=measurement.gpus)

    if why := find_moves():
        again = f"VRAM was not judged, because {why}. Measure again when it has ended."
        module.fail_json(msg=f"{again} Seen was: {result.evaluation.message}", gpus=measurement.gpus)
    for warning in result.evaluation.warnings:
        module.warn(warning)
    if not result.settled and module.params["settle_timeout_s"] > 0:
        module.warn(
            f"VRAM still moved after {result.waited_s:.0f} s ({result.samples} samples); the last sample was judged. "
            "Is an engine still loading? A longer settle_timeout_s waits for it."
        )
    outcome: dict[str, Any] = {
        "gpus": [gpu.as_dict() for gpu in result.evaluation.gpus],
        "driver_version": result.reading.driver_version,
        "settled": result.settled,
        "samples": result.samples,
        "waited_s": round(result.waited_s, 1),
        "failures": list(result.evaluation.failures),
        "msg": result.evaluation.message,
    }
    if result.evaluation.failures:
        module.fail_json(**outcome)
    module.exit_json(changed=False, **outcome)


if __name__ == "__main__":
    main()
