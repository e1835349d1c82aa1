# SPDX-License-Identifier: Apache-2.0
"""VRAM of every GPU compared with its budget: a pure evaluation, and sampling until the memory in use is stable.

Meaning of the figures of a GPU:

  used_mib      what NVML says is allocated (v2), see system/nvml.py
  foreign_mib   memory of processes that are no engines of ours. None if it is unknown, because NVML does not report a
                process's memory or the owner of a process is unknown. It never defaults to 0.
  engine_mib    used minus foreign: our engines, and memory that no process holds any more. The latter counts as ours
                because a crashed engine may leave it behind. It is an upper bound (used_mib) if foreign_mib is None.
  headroom_mib  budget minus engine_mib; negative if the GPU is over budget

vLLM takes its whole share of memory when it starts, so too little memory is a finding as well: far below the expected
amount, something else runs than was planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..system.nvml import GpuReading, HostReading, explain_reset
from .owners import ENDED, Owner

Foreign = Literal["ignore", "warn", "fail"]

IDLE_MIB = 16
"""Memory that may be allocated on a GPU that no engine uses. The driver keeps 0-4 MiB on an idle L4 and rounds per
process; 16 MiB is far below the least that an engine leaves behind (a CUDA context takes about 200)."""

STABLE_MIB = 16
"""Two samples that differ by less than this are equal."""

DEFAULT_TOLERANCE_MIB = 300
"""How far below the expected memory a GPU may be without a warning."""


def estimate_hidden_reserve(gpu: GpuReading) -> int:
    """Return how many MiB of the used memory may be the driver's reserve, which NVML v1 does not tell from it.

    An idle L4 shows 2.04 % of its memory (471 of 23,034 MiB).
    """
    return int(gpu.total_mib * 0.03) if gpu.used_includes_reserved else 0


class BudgetError(ValueError):
    """The budgets are not valid. The text says which, why, and how to correct them."""


@dataclass(frozen=True)
class Limits:
    """What the GPUs are compared with; the maps are by UUID, in MiB."""

    budgets: Mapping[str, int]
    expected: Mapping[str, int]
    foreign: Foreign = "warn"
    """What happens if processes that are not ours use a GPU: nothing, a warning or a failure."""
    tolerance_mib: int = DEFAULT_TOLERANCE_MIB
    """How far below `expected` a GPU may be without a warning."""


@dataclass(frozen=True)
class ProcessUse:
    pid: int
    used_mib: int | None
    container: str | None
    unit: str | None
    owner: str
    reason: str | None

    def __str__(self) -> str:
        memory = "an unknown amount" if self.used_mib is None else f"{self.used_mib} MiB"
        who = [f"pid {self.pid}"]
        if self.container:
            who.append(f"container {self.container}")
        if self.unit:
            who.append(f"unit {self.unit}")
        if self.owner == "unknown":
            who.append(f"owner unknown: {self.reason}")
        elif self.owner == "foreign":
            who.append("not ours")
        return f"{memory} by {', '.join(who)}"


@dataclass(frozen=True)
class GpuVerdict:
    """Figures of one GPU and the comparison with its budget; see the top of this file."""

    reading: GpuReading
    slot: int | None
    budget_mib: int
    expected_mib: int | None
    engine_mib: int
    foreign_mib: int | None
    unattributed_mib: int | None
    """Memory that no process holds; None if a process's memory is unknown."""
    processes: tuple[ProcessUse, ...]

    @property
    def within_budget(self) -> bool:
        return self.engine_mib <= self.budget_mib

    @property
    def headroom_mib(self) -> int:
        return self.budget_mib - self.engine_mib

    @property
    def is_upper_bound(self) -> bool:
        """Whether `engine_mib` may include memory that is not ours."""
        return self.foreign_mib is None or self.reading.used_includes_reserved

    @property
    def releasing(self) -> bool:
        """Whether only memory that no process holds exceeds the budget: the driver may be about to free it."""
        if self.within_budget or self.unattributed_mib is None:
            return False
        return self.engine_mib - self.unattributed_mib <= self.budget_mib

    @property
    def card(self) -> str:
        slot = "no slot" if self.slot is None else f"slot {self.slot}"
        return f"GPU {self.reading.index} ({slot}, {self.reading.name}, {self.reading.uuid})"

    def as_dict(self) -> dict[str, Any]:
        return vars(self.reading) | {
            "slot": self.slot,
            "engine_mib": self.engine_mib,
            "engine_mib_is": "upper bound" if self.is_upper_bound else "exact",
            "foreign_mib": self.foreign_mib,
            "unattributed_mib": self.unattributed_mib,
            "budget_mib": self.budget_mib,
            "expected_mib": self.expected_mib,
            "headroom_mib": self.headroom_mib,
            "within_budget": self.within_budget,
            "processes": [asdict(process) for process in self.processes],
        }


@dataclass(frozen=True)
class Evaluation:
    gpus: tuple[GpuVerdict, ...]
    failures: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def passing(self) -> bool:
        """Whether the next sample may well differ: memory is being freed, or a process has just ended."""
        return any(gpu.releasing or any(process.reason == ENDED for process in gpu.processes) for gpu in self.gpus)

    @property
    def only_engines_over(self) -> bool:
        """Whether the only failures are engines of ours that use more than their budgets."""
        over = [gpu for gpu in self.gpus if not gpu.within_budget]
        return len(over) == len(self.failures) and all(gpu.budget_mib and not gpu.releasing for gpu in over)

    @property
    def message(self) -> str:
        if self.failures:
            return " ".join(self.failures)
        parts = [f"GPU {gpu.reading.index}: {gpu.engine_mib} of {gpu.budget_mib} MiB" for gpu in self.gpus]
        return f"Every GPU is within its budget ({'; '.join(parts)})."


def _parse_mib(option: str, key: str, value: object) -> int:
    """Return a number of MiB. Digits as text are accepted, since `-e` passes numbers as text. Raises BudgetError."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]+", value.strip()):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        hint = ""
        if isinstance(value, str) and re.search(r"[gG]i?[bB]?\s*$", value):
            hint = " GB and GiB are never guessed: 20.6 GB read from nvidia-smi is 20600 MiB, 20.6 GiB is 21094."
        elif isinstance(value, float) and 0 < value <= 1:
            hint = " A share of the GPU is no budget: what it means differs between vLLM versions."
        raise BudgetError(f"{option}[{key}] is {value!r}: write a whole number of MiB, as nvidia-smi shows it.{hint}")
    if value < 0:
        raise BudgetError(f"{option}[{key}] is {value}: MiB cannot be negative. A GPU that must stay empty has 0.")
    return value


def _list_known_gpus(gpus: Sequence[GpuReading], slots: Sequence[str]) -> str:
    places = {uuid: f"slot {number}" for number, uuid in enumerate(slots)}
    told = [f"{gpu.uuid} ({places.get(gpu.uuid, 'no slot')}, {gpu.name} at {gpu.pci_bus_id})" for gpu in gpus]
    return ", ".join(told) or "no GPU at all"


def resolve_mib(
    option: str, values: Mapping[Any, object], gpus: Sequence[GpuReading], slots: Sequence[str]
) -> dict[str, int]:
    """Convert {UUID or slot: MiB} to {UUID: MiB}.

    Raises BudgetError: an amount or a key is not valid, or a GPU is named twice.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    resolved: dict[str, int] = {}
    spelled: dict[str, str] = {}
    for raw_key, raw_value in values.items():
        key = str(raw_key).strip()
        mib = _parse_mib(option, key, raw_value)
        if re.fullmatch(r"[0-9]+", key):
            if int(key) >= len(slots):
                raise BudgetError(
                    f"{option} names slot {key}, but this host has "
                    + (f"the slots 0 to {len(slots) - 1}" if slots else "no slots")
                    + f" ({_list_known_gpus(gpus, slots)}). Correct the engine's gpus, or add the card to gpu_uuids."
                )
            uuid = slots[int(key)]
        else:
            uuid = key
        if uuid not in by_uuid:
            what = f"slot {key}, which is {uuid}" if uuid != key else key
            raise BudgetError(
                f"{option} names {what}, but NVML does not see that GPU. It sees {_list_known_gpus(gpus, slots)}. "
                "If the card was exchanged, put the new UUID in its place in gpu_uuids; if it should be there, "
                "look for Xid messages in 'journalctl -k'."
            )
        if uuid in resolved:
            raise BudgetError(
                f"{option} names the same GPU twice, as {spelled[uuid]} and as {key} ({uuid}): keep one of them."
            )
        total = by_uuid[uuid].total_mib
        if mib > total:
            raise BudgetError(
                f"{option}[{key}] is {mib} MiB, but {uuid} ({by_uuid[uuid].name}) has {total} MiB in all, "
                "so it could never be exceeded. Is it in another unit (bytes, KiB), or for another card?"
            )
        resolved[uuid] = mib
        spelled[uuid] = key
    return resolved


def _sum_mib(processes: Iterable[ProcessUse]) -> int:
    return sum(process.used_mib or 0 for process in processes)


def judge_gpu(gpu: GpuReading, owners: Mapping[int, Owner], limits: Limits, slot: int | None) -> GpuVerdict:
    """Compute the figures of one GPU. `slot` is None if it has none."""
    nobody = Owner("unknown", reason="its owner was not looked up")
    pairs = [(process, owners.get(process.pid, nobody)) for process in gpu.processes or ()]
    processes = tuple(
        ProcessUse(process.pid, process.used_mib, owner.container, owner.unit, owner.kind, owner.reason)
        for process, owner in pairs
    )
    kinds = {process.owner for process in processes}
    memory_known = gpu.processes is not None and all(process.used_mib is not None for process in processes)
    foreign_known = memory_known and "unknown" not in kinds

    foreign_mib = _sum_mib(process for process in processes if process.owner != "ours") if foreign_known else None
    unattributed_mib = max(0, gpu.used_mib - _sum_mib(processes)) if memory_known else None
    engine_mib = max(0, gpu.used_mib - (foreign_mib or 0))

    if foreign_known and "ours" not in kinds and engine_mib <= IDLE_MIB + estimate_hidden_reserve(gpu):
        engine_mib = 0

    return GpuVerdict(
        reading=gpu,
        slot=slot,
        budget_mib=limits.budgets.get(gpu.uuid, 0),
        expected_mib=limits.expected.get(gpu.uuid),
        engine_mib=engine_mib,
        foreign_mib=foreign_mib,
        unattributed_mib=unattributed_mib,
        processes=processes,
    )


def _describe_over_budget(gpu: GpuVerdict) -> str:
    over = -gpu.headroom_mib
    budget = f"its budget of {gpu.budget_mib} MiB" if gpu.budget_mib else "0 MiB, for no engine of the profile uses it"
    measured = f"at most {gpu.engine_mib}" if gpu.is_upper_bound else str(gpu.engine_mib)
    text = f"{gpu.card} is over budget: {measured} MiB are in use where {budget}: {over} MiB too many."
    if gpu.is_upper_bound and gpu.foreign_mib is None:
        text += " What other people's processes hold of it could not be told apart."
    if gpu.reading.used_includes_reserved:
        text += " Only NVML's first memory call answered, so the driver's own reserve is counted in."
    held = [str(process) for process in gpu.processes]
    if gpu.unattributed_mib is not None and gpu.unattributed_mib > IDLE_MIB:
        held.append(f"{gpu.unattributed_mib} MiB by no process")
    return f"{text} Held: {'; '.join(held) if held else 'no process is listed'}. {_advise_over_budget(gpu)}"


def _advise_over_budget(gpu: GpuVerdict) -> str:
    ours = sorted({process.unit for process in gpu.processes if process.owner == "ours" and process.unit})
    if gpu.releasing:
        return (
            "Memory without a process is what a crashed engine leaves when the driver did not clean up: "
            f"{explain_reset(gpu.reading.uuid)}."
        )
    if ours and not gpu.budget_mib:
        return f"Stop what should not run there: 'systemctl stop {' '.join(ours)}'."
    if ours:
        return (
            f"'journalctl -u {' -u '.join(ours)}' shows what vLLM took for weights, KV cache and CUDA graphs; lower "
            "the engine's max_num_seqs, gpu_memory_utilization or kv_cache_memory_bytes. If the budget was wrong, "
            f"accept what is measured, which restarts nothing: {_accept(gpu, ours)} in serving_engines."
        )
    return "Find out who runs these processes ('nvidia-smi', 'docker ps') before anything is stopped."


def _accept(gpu: GpuVerdict, units: Sequence[str]) -> str:
    """Return the lines of the inventory that set the budgets of these units to what is measured, plus a tolerance."""
    total = gpu.reading.total_mib
    held = {unit: _sum_mib(process for process in gpu.processes if process.unit == unit) for unit in units}
    if len(units) == 1:
        held[units[0]] = gpu.engine_mib
    return " and ".join(
        f"'vram_budget_mib: {min(total, mib + DEFAULT_TOLERANCE_MIB)}' of "
        f"{_name_in_inventory(unit[len('vllm-') : -len('.service')])}"
        for unit, mib in held.items()
    )


def _name_in_inventory(engine: str) -> str:
    """Return the name of an engine, and that of the engine with replicas whose replica it may be."""
    whole, _, number = engine.rpartition("-")
    return f"{engine} (of {whole}, if that has replicas)" if whole and number.isdecimal() else engine


def _describe_foreign(gpu: GpuVerdict) -> str | None:
    others = [process for process in gpu.processes if process.owner not in ("ours", "sidecar")]
    if others:
        return f"{gpu.card} is also used by others: {'; '.join(str(process) for process in others)}."
    if gpu.reading.processes is None:
        return f"{gpu.card} does not list its processes, so memory of others cannot be told from ours."
    return None


def evaluate(
    gpus: Iterable[GpuReading], owners: Mapping[int, Owner], limits: Limits, slots: Sequence[str] = ()
) -> Evaluation:
    """Compare every GPU with its budget. A GPU that `limits.budgets` does not name has a budget of 0.

    `gpus` has one sample per GPU.
    """
    verdicts = tuple(
        judge_gpu(gpu, owners, limits, slots.index(gpu.uuid) if gpu.uuid in slots else None) for gpu in gpus
    )
    failures = [_describe_over_budget(gpu) for gpu in verdicts if not gpu.within_budget]
    warnings: list[str] = []
    for gpu in verdicts:
        foreign = _describe_foreign(gpu)
        if foreign and limits.foreign == "fail":
            failures.append(f"{foreign} foreign is fail: stop them, or let the profile use other GPUs.")
        elif foreign and limits.foreign == "warn":
            warnings.append(foreign)
        if gpu.expected_mib is not None and gpu.engine_mib < gpu.expected_mib - limits.tolerance_mib:
            warnings.append(
                f"{gpu.card} uses {gpu.engine_mib} MiB, {gpu.expected_mib - gpu.engine_mib} MiB less than the expected "
                f"{gpu.expected_mib}. vLLM takes its whole share at start-up, so something else runs than was planned: "
                "compare the engine's model, max_model_len and gpu_memory_utilization with the profile."
            )
        if gpu.reading.used_includes_reserved:
            warnings.append(
                f"{gpu.card} answers only NVML's first memory call: used_mib includes the driver's own reserve, which "
                "is not known (about 470 MiB on an L4), so the check is stricter than the budget by that much."
            )
    seen = {gpu.reading.uuid for gpu in verdicts}
    for number, uuid in enumerate(slots):
        if uuid not in seen:
            warnings.append(f"NVML does not see slot {number}, {uuid}; nothing is known about it.")
    return Evaluation(verdicts, tuple(failures), tuple(warnings))


@dataclass(frozen=True)
class Settled:
    """The last sample, its evaluation, and whether the memory was stable."""

    reading: HostReading
    evaluation: Evaluation
    settled: bool
    samples: int
    waited_s: float


def is_same_memory(before: HostReading, after: HostReading) -> bool:
    """Return whether the used memory of every GPU changed by less than STABLE_MIB between two samples."""
    used = {gpu.uuid: gpu.used_mib for gpu in before.gpus}
    return len(before.gpus) == len(after.gpus) and all(
        gpu.uuid in used and abs(gpu.used_mib - used[gpu.uuid]) < STABLE_MIB for gpu in after.gpus
    )


def settle(
    read: Callable[[], HostReading],
    judge: Callable[[HostReading], Evaluation],
    timeout_s: float,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Settled:
    """Take samples until two in a row agree, and evaluate the last one.

    If a GPU is over budget only by memory that no process holds, sampling goes on until the timeout: the driver frees
    such memory some seconds after the process has ended, and the figures do not change until then. Times are seconds;
    after `timeout_s` the last sample is evaluated in any case.
    """
    start = clock()
    last = read()
    samples = 1
    still = False
    while True:
        waited = clock() - start
        if waited >= timeout_s:
            return Settled(last, judge(last), still, samples, waited)
        sleep(min(1.0, timeout_s - waited))
        current = read()
        samples += 1
        still = is_same_memory(last, current)
        if still:
            evaluation = judge(current)
            if not evaluation.passing:
                return Settled(current, evaluation, True, samples, clock() - start)
        last = current
