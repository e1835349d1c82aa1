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
  - A GPU that is not in O(budgets) has the budget 0, so that memory left behind by a crashed engine is found. Up to 16
    MiB on a GPU without an engine are tolerated.
  - A process is attributed by its pid on the host, its container and its systemd unit. A process in a container with
    the label C(vllm-edge.engine) belongs to an engine; every other process is foreign.
  - Unknown values are never treated as 0. If NVML does not report the memory of a process, or Docker cannot name the
    container of a process, RV(gpus[].foreign_mib) is V(null), and RV(gpus[].engine_mib) is an upper bound, all of the
    memory in use.
  - If a GPU is over its budget only because of memory that no process holds, it is watched for the whole
    O(settle_timeout_s), because the driver may release memory some seconds after a process has ended.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.nvml
  - edge.vllm_edge.foreign
attributes:
  check_mode:
    support: full
    description: The module changes nothing, so check mode makes no difference. If the driver or the host runtime is not
      installed yet, it is skipped with the reason; outside of check mode that is an error.
requirements:
  - docker (Python package), to determine the owners of processes
options:
  budgets:
    description:
      - Memory that the engines may use on each GPU. A mapping from a GPU's UUID or slot to whole MiB, as nvidia-smi
        prints them.
      - An unknown GPU, a GPU that is named twice, or a budget above the memory of the GPU is an error.
    type: dict
    required: true
  expected_mib:
    description:
      - Memory that the engines are expected to use on each GPU in MiB, with the same keys as O(budgets).
      - If the engines use less than this by more than O(tolerance_mib), the module warns, because something else is
        running than was planned.
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
    description:
      - UUIDs of the GPUs in the order of their slots, for the keys of O(budgets).
      - If it is not set, the record at O(slots_file) is used. If there is no record, the GPUs are ordered by PCI bus
        id.
    type: list
    elements: str
  slots_file:
    description: Record of the GPU slots on the host, written by M(edge.vllm_edge.gpu_slots).
    type: path
    default: /var/lib/vllm-edge/gpu-slots.json
seealso:
  - module: edge.vllm_edge.gpu_slots
    description: Determine which GPU has which slot.
  - module: edge.vllm_edge.serving_plan
    description: Predict the memory that engines need, and compute their budgets.
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
  register: vram

- name: Ensure that the GPUs are empty before the engines start
  edge.vllm_edge.vram_budget:
    budgets: {}
    foreign: fail

- name: Name the GPUs by UUID, and wait longer for memory to be released
  edge.vllm_edge.vram_budget:
    budgets:
      GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000: 20900
    settle_timeout_s: 90

- name: Print the headroom of every GPU
  ansible.builtin.debug:
    msg: "{{ vram.gpus | items2dict(key_name='uuid', value_name='headroom_mib') }}"
"""

RETURN = r"""
gpus:
  description: All GPUs by index. Also returned on failure, as far as they could be read.
  returned: always
  type: list
  elements: dict
  contains:
    index:
      description: Index of the GPU in PCI bus order.
      type: int
      sample: 0
    slot:
      description: Slot of the GPU. V(null) if it has none.
      type: int
      sample: 0
    uuid:
      description: UUID of the GPU.
      type: str
      sample: GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000
    name:
      description: Model of the GPU.
      type: str
      sample: NVIDIA L4
    pci_bus_id:
      description: PCI bus id of the GPU.
      type: str
      sample: "00000000:17:00.0"
    compute_capability:
      description: CUDA compute capability. V(null) if NVML does not report it.
      type: str
      sample: "8.9"
    memory_version:
      description: Version of the NVML memory call that was used. With V(v1), RV(gpus[].used_mib) includes the memory
        that the driver reserves.
      type: str
      sample: v2
    total_mib:
      description: Total memory of the GPU in MiB.
      type: int
      sample: 23034
    reserved_mib:
      description: Memory that the driver reserves for itself, in MiB. V(null) if only version 1 of the memory call is
        available, which does not report it.
      type: int
      sample: 470
    used_mib:
      description: Allocated memory in MiB.
      type: int
      sample: 20612
    free_mib:
      description: Free memory in MiB.
      type: int
      sample: 1952
    engine_mib:
      description: Used memory minus foreign memory, in MiB. This value is compared with the budget.
      type: int
      sample: 20612
    engine_mib_is:
      description: V(exact), or V(upper bound) if foreign memory or the driver's reserve could not be separated.
      type: str
      sample: exact
    foreign_mib:
      description: Memory of foreign processes in MiB. V(null) if it is not known.
      type: int
      sample: 0
    unattributed_mib:
      description: Used memory that no process holds, in MiB. V(null) if the memory of a process is not known.
      type: int
      sample: 0
    budget_mib:
      description: Budget of the GPU in MiB.
      type: int
      sample: 20900
    expected_mib:
      description: Expected memory in use on the GPU in MiB. V(null) if O(expected_mib) does not contain it.
      type: int
      sample: 20600
    headroom_mib:
      description: Budget minus the memory that the engines use, in MiB. Negative if the GPU is over its budget.
      type: int
      sample: 288
    within_budget:
      description: Whether the engines use no more than the budget.
      type: bool
      sample: true
    processes:
      description: Processes on the GPU.
      type: list
      elements: dict
      contains:
        pid:
          description: Process id on the host.
          type: int
          sample: 4711
        used_mib:
          description: Memory of the process in MiB. V(null) if NVML does not report it.
          type: int
          sample: 20612
        container:
          description: Name of the container of the process, or the first digits of its id if Docker does not know it.
            V(null) if the process is not in a container.
          type: str
          sample: vllm-e2b
        unit:
          description: systemd unit of the engine, or of a process that is not in a container.
          type: str
          sample: vllm-e2b.service
        owner:
          description: V(ours) for an engine, V(foreign) or V(unknown).
          type: str
          sample: ours
        reason:
          description: Why the owner is unknown.
          type: str
          sample: null
driver_version:
  description: Version of the NVIDIA driver.
  returned: when NVML answered
  type: str
  sample: 580.173.02
settled:
  description: Whether the last two samples agreed.
  returned: when NVML answered
  type: bool
  sample: true
samples:
  description: Number of samples that were taken.
  returned: when NVML answered
  type: int
  sample: 2
waited_s:
  description: Time in seconds until the samples agreed, or until the module stopped waiting.
  returned: when NVML answered
  type: float
  sample: 1.0
failures:
  description: One paragraph for each GPU with a problem. Empty if all GPUs are within their budgets.
  returned: when NVML answered
  type: list
  elements: str
  sample: []
nvml:
  description: The error that NVML returned.
  returned: when NVML returned an error
  type: dict
  sample:
    code: GPU_IS_LOST
    gpu: GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000
    sentence: "The GPU is lost: GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000 (NVIDIA L4 at 00000000:17:00.0) has fallen
      off the bus."
    remedy: "Its engines cannot go on. Look for Xid 79 in 'journalctl -k'."
skipped:
  description: V(true) if the GPUs could not be measured in check mode. RV(msg) contains the reason.
  returned: in check mode, before the driver or the host runtime is installed
  type: bool
  sample: true
msg:
  description: One paragraph that summarises the result, or describes the error and its remedy.
  returned: always
  type: str
  sample: "Every GPU is within its budget (GPU 0: 20612 of 20900 MiB; GPU 1: 0 of 0 MiB)."
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, respawn_module

from ..module_utils.vllm_edge.gpu import slots as gpu_slots
from ..module_utils.vllm_edge.gpu.budget import (
    BudgetError,
    Evaluation,
    Limits,
    Settled,
    check_slots,
    evaluate,
    resolve_mib,
    settle,
)
from ..module_utils.vllm_edge.gpu.owners import find_owners
from ..module_utils.vllm_edge.paths import find_interpreter
from ..module_utils.vllm_edge.system.nvml import (
    RUNTIME_REMEDY,
    HostReading,
    NvmlFailure,
    NvmlSession,
    decide_where_to_run,
    open_nvml,
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
        seen = {gpu.uuid: gpu for gpu in session.identities}
        recorded = () if given else gpu_slots.load(self.params["slots_file"])
        if recorded:
            return recorded
        return tuple(
            gpu_slots.Slot(uuid, getattr(seen.get(uuid), "name", None), getattr(seen.get(uuid), "pci_bus_id", None))
            for uuid in given or seen
        )

    def run(self, session: NvmlSession) -> Settled:
        slots = self.known_slots(session)
        self.slots = [slot.uuid for slot in slots]
        check_slots(self.slots)
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
    python = find_interpreter(module.params["python"])

    place, reason = decide_where_to_run(python, respawned=has_respawned())
    if place == "respawn":
        respawn_module(python)
    if place == "nowhere":
        if module.check_mode:
            module.exit_json(
                skipped=True,
                gpus=[],
                msg=f"Would measure the VRAM of every GPU against {module.params['budgets']}; not yet, for {reason}.",
            )
        module.fail_json(msg=f"VRAM cannot be measured: {reason}. {RUNTIME_REMEDY}", gpus=[])

    for option in ("settle_timeout_s", "tolerance_mib"):
        if module.params[option] < 0:
            module.fail_json(msg=f"{option} is {module.params[option]}: it cannot be negative.", gpus=[])

    measurement = Measurement(module.params)
    try:
        with open_nvml() as session:
            result = measurement.run(session)
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
