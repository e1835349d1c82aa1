#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: VRAM of every GPU against its budget."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vram_budget
short_description: Measure the VRAM of every GPU and hold it against its budget
version_added: "0.1.0"
description:
  - Reads memory and processes of every GPU from NVML until two samples in a row agree, and compares what the
    engines use with the budget of each GPU.
  - Run it after a first completion. vLLM takes its whole share at start-up, but the first request may still compile
    and allocate.
  - A GPU that O(budgets) does not name has budget 0, so memory that a crashed engine left behind is found.
    Up to 16 MiB on a GPU without an engine count as idle.
  - Processes are followed from the host pid over the container to the unit. One in a container with the label
    C(vllm-edge.engine) is ours, every other one is foreign.
  - What cannot be known is never taken for 0. Where NVML does not give a process's memory, or Docker cannot say
    whose container a process is in,
    RV(gpus[].foreign_mib) is V(null) and RV(gpus[].engine_mib) is an upper bound, all that is used.
  - A GPU that is over budget only by memory that no process holds is watched for all of O(settle_timeout_s), for a
    driver gives memory back some seconds after the process has ended.
author:
  - vllm-edge (@vllm-edge)
attributes:
  check_mode:
    description: Can run in check mode and return the same as without it, for it only reads.
      Where the driver or the host runtime is not installed yet it is skipped with the reason; outside of check mode
        that fails.
    support: full
  diff_mode:
    description: Will return details on what has changed, or would change in check mode. There is nothing that could
      change.
    support: none
  idempotent:
    description: When run twice in a row with the same arguments, the second run changes nothing. It never changes
      anything.
    support: full
requirements:
  - NVIDIA driver with NVML
  - nvidia-ml-py, in the interpreter that runs the module or in the one that O(python) names
  - docker (Python package), to tell whose process it is
options:
  budgets:
    description:
      - How much the engines may use on each GPU, as a mapping from a GPU's UUID or slot to whole MiB, as nvidia-smi
        shows them.
      - An unknown GPU, a GPU that is named twice, and a budget above the GPU's memory are refused.
    type: dict
    required: true
  expected_mib:
    description:
      - What the engines are expected to use on each GPU, keyed as O(budgets).
      - Using less than this by more than O(tolerance_mib) is a warning, since it means that something else runs
        than was planned.
    type: dict
    default: {}
  tolerance_mib:
    description: How far below O(expected_mib) is still as expected, in MiB.
    type: int
    default: 300
  foreign:
    description: What to do about processes that are not ours. Their memory is subtracted in every case.
    type: str
    choices:
      ignore: Say nothing.
      warn: Warn, naming the GPU, the processes and their containers.
      fail: Fail. A process whose owner cannot be found out counts as foreign here.
    default: warn
  settle_timeout_s:
    description: How long to wait, in seconds, until two samples taken one second apart differ by less than 16 MiB
      on every GPU. V(0) takes one sample.
    type: float
    default: 30
  gpu_slots:
    description:
      - UUIDs of the GPUs in the order of their slots, for the keys of O(budgets).
      - When it is not set, the record at O(slots_file) is used; where there is none, PCI bus order.
    type: list
    elements: str
  slots_file:
    description: Record of the GPU slots on the host, made by M(gpu_slots).
    type: path
    default: /var/lib/vllm-edge/gpu-slots.json
  python:
    description: Interpreter with nvidia-ml-py that the module goes on under when its own has none.
    type: path
    default: /opt/vllm-edge/current/venv/bin/python
seealso:
  - module: gpu_slots
    description: Settles which GPU is which slot.
"""

EXAMPLES = r"""
- name: Hold two engines against their budgets
  vram_budget:
    budgets:
      0: 20900
      1: 20800
    expected_mib:
      0: 20600
      1: 20500
  register: vram

- name: Make sure that the GPUs are empty before the engines start
  vram_budget:
    budgets: {}
    foreign: fail

- name: Name GPUs by UUID, wait longer for memory to come back
  vram_budget:
    budgets:
      GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000: 20900
    settle_timeout_s: 90

- name: Show the headroom of every GPU
  ansible.builtin.debug:
    msg: "{{ vram.gpus | items2dict(key_name='uuid', value_name='headroom_mib') }}"
"""

RETURN = r"""
gpus:
  description: Every GPU by index. Also returned when the module fails, as far as they could be read.
  returned: always
  type: list
  elements: dict
  contains:
    index:
      description: Number of the GPU in PCI bus order.
      type: int
      sample: 0
    slot:
      description: Slot of the GPU, V(null) when it has none.
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
      description: CUDA compute capability, V(null) when NVML does not say.
      type: str
      sample: "8.9"
    memory_version:
      description: The NVML memory call that answered. With V(v1), RV(gpus[].used_mib) includes the driver's reserve.
      type: str
      sample: v2
    total_mib:
      description: All memory of the GPU in MiB.
      type: int
      sample: 23034
    reserved_mib:
      description: What the driver reserves for itself in MiB. V(null) when only the first memory call answered,
        which does not say.
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
      description: Used minus foreign, in MiB. This is what is held against the budget.
      type: int
      sample: 20612
    engine_mib_is:
      description: V(exact), or V(upper bound) when foreign memory or the driver's reserve could not be told apart.
      type: str
      sample: exact
    foreign_mib:
      description: Memory of processes that are not ours, in MiB. V(null) when it cannot be known.
      type: int
      sample: 0
    unattributed_mib:
      description: Used memory that no process holds, in MiB. V(null) when a process's memory is unknown.
      type: int
      sample: 0
    budget_mib:
      description: Budget of the GPU in MiB.
      type: int
      sample: 20900
    expected_mib:
      description: Expected memory of the GPU in MiB, V(null) when none is given.
      type: int
      sample: 20600
    headroom_mib:
      description: Budget minus what the engines use, in MiB. Negative when over budget.
      type: int
      sample: 288
    within_budget:
      description: Whether the engines use at most the budget.
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
          description: Memory of the process in MiB, V(null) when NVML does not say.
          type: int
          sample: 20612
        container:
          description: Name of the process's container, or the start of its id when Docker does not know it. V(null)
            when it is in none.
          type: str
          sample: vllm-e2b
        unit:
          description: systemd unit of the engine, or of a process that is in no container.
          type: str
          sample: vllm-e2b.service
        owner:
          description: V(ours), V(foreign) or V(unknown).
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
  description: How many samples were taken.
  returned: when NVML answered
  type: int
  sample: 2
waited_s:
  description: How long it took until memory stood still, in seconds.
  returned: when NVML answered
  type: float
  sample: 1.0
failures:
  description: What is wrong, one paragraph for each GPU; empty where every GPU is within its budget.
  returned: when NVML answered
  type: list
  elements: str
  sample: []
nvml:
  description: The NVML error, when there was one.
  returned: when NVML gave an error
  type: dict
  sample:
    code: GPU_IS_LOST
    gpu: GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000
    sentence: "The GPU is lost: GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000 (NVIDIA L4 at 00000000:17:00.0) has fallen
      off the bus."
    remedy: "Its engines cannot go on. Look for Xid 79 in 'journalctl -k'."
skipped:
  description: Present and true when check mode could not measure, with the reason in RV(msg).
  returned: in check mode, before the driver or the host runtime is installed
  type: bool
  sample: true
msg:
  description: One paragraph that says what was found, and on failure what to do.
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
    slot_identities,
)
from ..module_utils.vllm_edge.gpu.owners import find_owners
from ..module_utils.vllm_edge.releases import find_interpreter
from ..module_utils.vllm_edge.system.nvml import (
    RUNTIME_REMEDY,
    HostReading,
    NvmlFailure,
    NvmlSession,
    name_lost,
    open_nvml,
    where_to_run,
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
    """One run of the module; keeps the last sample, so that a failure can still show what was read before."""

    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params
        self.limits = Limits({}, {})
        self.slots: list[str] = []
        self.last: HostReading | None = None
        """Only once the budgets are known to make sense: without them there is no verdict to show."""

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
        if session.lost:
            expected = slot_identities([(slot.uuid, slot.name, slot.pci_bus_id) for slot in slots])
            raise name_lost(session.lost[0], expected, [gpu.uuid for gpu in session.identities])
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

    place, reason = where_to_run(python, respawned=has_respawned())
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
