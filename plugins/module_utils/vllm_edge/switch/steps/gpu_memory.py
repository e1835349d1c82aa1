# SPDX-License-Identifier: Apache-2.0
"""GPU memory during a switch: waits until it is free, kills what engines left behind, and measures it.

Three rules hold here: a GPU that is lost must not hide the others, memory of ours must be free before an engine starts,
and only processes of ours are ever killed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...generation.model import Generation
from ...gpu import slots as gpu_slots
from ...gpu.budget import Evaluation, Limits, Settled, estimate_hidden_reserve, evaluate, settle
from ...gpu.owners import ENDED, Owner
from ...names import unit_name
from ...paths import HostPaths
from ...planning import drift
from ...system.nvml import GpuReading, HostReading, NvmlFailure, NvmlSession, explain_reset
from ...system.process import command_of, engine_uid, get_user_name, kill, uid_of
from ..model import Done, Moves, PhaseFailed
from ..view import HostView

FREE_MIB = 64
"""Less than a CUDA context, and more than what drivers keep or round for each process."""
KILLED_S = 10.0
SETTLE_S = 30.0
POLL_S = 0.5
PASSING_S = 10.0
"""How long a measurement waits for a GPU that does not answer at the moment."""
# Errors of NVML that do not pass by waiting.
FINAL = frozenset({"GPU_IS_LOST", "DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND", "LIB_RM_VERSION_MISMATCH"})


Lost = tuple[NvmlFailure, ...]


def load_slots(paths: HostPaths) -> tuple[gpu_slots.Slot, ...]:
    """Return the recorded GPU slots of this host, which name GPUs that no longer answer; none without a record."""
    try:
        return gpu_slots.load(str(paths.state / "gpu-slots.json"))
    except (gpu_slots.SlotError, OSError):
        return ()


def read_boards(session: NvmlSession, slots: Sequence[gpu_slots.Slot]) -> tuple[HostReading, Lost]:
    """Read every GPU, and collect those that do not answer instead of raising; the recorded slots name them."""
    lost = gpu_slots.list_lost(session, slots)
    gpus: list[GpuReading] = []
    for identity in session.identities:
        try:
            gpus.append(session.read_gpu(identity))
        except NvmlFailure as failure:
            lost.append(failure)
    return HostReading(session.driver_version, tuple(gpus)), tuple(lost)


def require(boards: HostReading, lost: Lost, needed: Collection[str]) -> None:
    """Check that these GPUs answer; others do not matter. Raises NvmlFailure, or PhaseFailed if one is not there."""
    there = [gpu.uuid for gpu in boards.gpus]
    missing = [uuid for uuid in needed if uuid not in there]
    if not missing:
        return
    named = [failure for failure in lost if failure.gpu in missing]
    if len(named) < len(missing):
        # A GPU that was lost before NVML was opened may have no name. If no failure names the missing GPU, it is that
        # one.
        named += [failure for failure in lost if failure.gpu is None]
    if named:
        raise next((failure for failure in named if failure.code in FINAL), named[0])
    seen = ", ".join(f"{gpu.uuid} ({gpu.name} at {gpu.pci_bus_id})" for gpu in boards.gpus) or "no GPU at all"
    raise PhaseFailed(
        f"NVML does not see {', '.join(missing)}; it sees {seen}. Where the card was exchanged, put its new UUID into "
        "gpu_uuids and run site.yml; where it should be there, look for Xid messages in 'journalctl -k'."
    )


def is_orphan(owner: Owner, uid: int | None) -> bool:
    """Return whether a process of the user `uid` runs as our engines and outside of any container: it has outlived its
    own."""
    ours = engine_uid()
    return owner.kind == "foreign" and owner.container is None and ours is not None and uid == ours


@dataclass(frozen=True)
class Holder:
    """A process on a GPU that should be free. `used_mib` is None if NVML does not say."""

    pid: int
    used_mib: int | None
    container: str | None
    command: str
    user: str

    def __str__(self) -> str:
        memory = "an unknown amount" if self.used_mib is None else f"{self.used_mib} MiB"
        where = f"container {self.container}" if self.container else "in no container"
        return f"pid {self.pid} ({self.command}; user {self.user}; {where}) holds {memory}"


@dataclass(frozen=True)
class Occupied:
    """What uses one GPU that should be free, apart from engines that stay and processes of other people."""

    gpu: GpuReading
    holders: tuple[Holder, ...]
    engine_mib: int
    """Memory in use, without what stays and what belongs to other people."""
    foreign_mib: int
    exact: bool
    """False if NVML does not say how much each process holds. Then only the list of processes can be judged."""
    unknown: tuple[str, ...] = ()
    """Processes in containers that Docker cannot name at the moment: they may be ours."""
    others: tuple[str, ...] = ()
    """Processes of other people, as text."""

    @property
    def free(self) -> bool:
        """Whether no process of ours, or that may be ours, is on the GPU and, if amounts are known, hardly any memory
        is in use."""
        idle_mib = FREE_MIB + estimate_hidden_reserve(self.gpu)
        return not self.holders and not self.unknown and (not self.exact or self.engine_mib < idle_mib)

    @property
    def card(self) -> str:
        return f"GPU {self.gpu.index} ({self.gpu.name}, {self.gpu.uuid})"

    def left_mib(self) -> int:
        return self.gpu.total_mib - (self.gpu.reserved_mib or 0) - self.engine_mib - self.foreign_mib


def look(gpu: GpuReading, owners: Mapping[int, Owner], keep: Collection[str]) -> Occupied:
    """Find out who uses one GPU.

    `owners` are owners by pid, as `find_owners` returns them. `keep` are units of engines that stay; their memory does
    not count.
    """
    holders: list[Holder] = []
    unknown: list[str] = []
    others: list[str] = []
    foreign = kept = 0
    exact = gpu.processes is not None
    for process in gpu.processes or ():
        owner = owners.get(process.pid, Owner("unknown", reason="not looked up"))
        runs_as = uid_of(process.pid)
        holder = Holder(process.pid, process.used_mib, owner.container, command_of(process.pid), get_user_name(runs_as))
        exact = exact and process.used_mib is not None
        if owner.kind == "ours" and owner.unit in keep:
            kept += process.used_mib or 0
        elif owner.kind in ("ours", "sidecar") or is_orphan(owner, runs_as):
            holders.append(holder)
        elif owner.reason != ENDED:
            # A process that is not known to be ours is never killed. If only Docker's answer is missing, the switch
            # waits for it.
            foreign += process.used_mib or 0
            if owner.kind == "unknown":
                unknown.append(f"pid {process.pid} ({holder.command}): {owner.reason}")
            else:
                others.append(str(holder))
    engine_mib = max(0, gpu.used_mib - foreign - kept)
    return Occupied(gpu, tuple(holders), engine_mib, foreign, exact, tuple(unknown), tuple(others))


@dataclass
class Release:
    """Waits until the GPUs of engines that start are free of our processes."""

    host: HostView
    needed: Mapping[str, int]
    """Budget in MiB by UUID, for the GPUs that should be free."""
    keep: Collection[str]
    """Units of engines that stay."""

    def look(self) -> list[Occupied]:
        """Take one sample of the needed GPUs. NVML is opened anew each time, because the driver may be unloaded in
        between."""
        with self.host.nvml() as session:
            boards, lost = read_boards(session, load_slots(self.host.paths))
        require(boards, lost, self.needed)
        gpus = [gpu for gpu in boards.gpus if gpu.uuid in self.needed]
        owners = self.host.owners({process.pid for gpu in gpus for process in gpu.processes or ()})
        return [look(gpu, owners, self.keep) for gpu in gpus]

    def _until_free(self, timeout_s: float) -> tuple[list[Occupied], float]:
        """Return the last sample and how long the wait took. Errors of NVML that may pass are waited for as well."""
        began = self.host.clock()
        while True:
            try:
                seen = self.look()
                if all(gpu.free for gpu in seen):
                    return seen, self.host.clock() - began
                problem = None
            except NvmlFailure as failure:
                if failure.code in FINAL:
                    raise PhaseFailed(f"It is not known whether the GPUs are free: {failure}") from failure
                problem = failure
            if self.host.clock() - began >= timeout_s:
                if problem is not None:
                    raise PhaseFailed(f"It is not known whether the GPUs are free: {problem}") from problem
                return seen, self.host.clock() - began
            self.host.sleep(POLL_S)

    def _still_ours(self, pid: int) -> bool:
        """Return whether a pid is still a process of ours; asked again just before it is killed."""
        owner = self.host.owners({pid}).get(pid)
        if owner is None:
            return False
        ours = owner.kind in ("ours", "sidecar") and owner.unit not in self.keep
        return ours or is_orphan(owner, uid_of(pid))

    def run(self, timeout_s: float) -> Done:
        """Wait until the GPUs are free; after the limit, kill the processes of ours that are left.

        Raises PhaseFailed if an engine would not find the memory of its budget, or NVML does not answer.
        """
        seen, seconds = self._until_free(timeout_s)
        warnings: list[str] = []
        ended: list[Holder] = []
        if not all(gpu.free for gpu in seen):
            ended = list({holder.pid: holder for gpu in seen for holder in gpu.holders}.values())
            for holder in ended:
                gone = kill(holder.pid, self._still_ours)
                warnings.append(
                    f"{holder} {timeout_s:.0f} s after its engine was stopped; it "
                    + ("was ended." if gone else "could not be ended.")
                )
            if ended:
                seen, more = self._until_free(KILLED_S)
                seconds += more
            warnings += self._leftover(seen, seconds)
        names = ", ".join(str(gpu.gpu.index) for gpu in seen)
        detail = f"GPU {names} measured free after {seconds:.1f} s"
        if any(not gpu.free for gpu in seen):
            detail = f"GPU {names} measured free enough after {seconds:.1f} s"
        return Done(detail, warnings=tuple(warnings))

    def _leftover(self, seen: Sequence[Occupied], seconds: float) -> list[str]:
        """Return warnings for memory that could not be freed. Raises PhaseFailed if a budget does not fit beside it.

        If the budget fits, the engine may start: to refuse would leave both the new and the former engine down for
        memory that neither needs.
        """
        warnings: list[str] = []
        failures: list[str] = []
        for gpu in seen:
            if gpu.free:
                continue
            budget = self.needed[gpu.gpu.uuid]
            fits = gpu.left_mib() >= budget
            if gpu.holders:
                failures.append(
                    f"{gpu.card} is still held by a process of ours that was killed and does not end: "
                    f"{'; '.join(map(str, gpu.holders))}. It hangs inside the driver: look for state D in "
                    "'ps -eo pid,stat,wchan,cmd' and for Xid messages in 'journalctl -k', then reboot."
                )
                continue
            if gpu.unknown:
                text = f"{gpu.card} is used by processes that may be ours: {'; '.join(gpu.unknown)}"
                remedy = "They were left alone: 'systemctl status docker.service' shows why Docker does not answer."
            else:
                text = (
                    f"{gpu.card} has {gpu.engine_mib} MiB in use that no process holds, {seconds:.0f} s after the "
                    "engines were stopped"
                )
                remedy = (
                    "A larger vllm_engine_free_timeout_s waits longer for the driver to give it back. Otherwise "
                    f"{explain_reset(gpu.gpu.uuid)}."
                )
            if fits:
                warnings.append(f"{text}; the budget of {budget} MiB fits beside that.")
            else:
                failures.append(
                    f"{text}. The {max(0, gpu.left_mib())} MiB that are left are less than the budget of {budget} MiB. "
                    f"{remedy}"
                )
        if failures:
            raise PhaseFailed(" ".join(failures))
        return warnings


def free(host: HostView, wanted: Generation, moves: Moves) -> Done:
    """Wait until no process of ours uses the GPUs of `moves.start`, except engines that stay.

    After `wanted.limits.free_timeout_s` the processes that still do are named, and those of ours are killed.
    """
    needed = {
        uuid: wanted.budgets_mib.get(uuid, 0) for name in moves.start for uuid in wanted.engines[name].config.gpus
    }
    if not needed:
        return Done("no engine has to start")
    kept = {unit_name(name) for name in (*moves.keep, *moves.wait)}
    return Release(host, needed, kept).run(wanted.limits.free_timeout_s)


def _settle(host: HostView, wanted: Generation, gpus: Collection[str] | None = None) -> tuple[Settled, Lost]:
    """Compare the VRAM of these GPUs, or of all, with their budgets, once it no longer changes.

    Returns the GPUs that do not answer, too. Raises PhaseFailed: a GPU that an engine needs cannot be read.
    """
    slots = load_slots(host.paths)
    limits = Limits(budgets=wanted.budgets_mib, expected={}, foreign=wanted.foreign)
    needed = gpus if gpus is not None else {uuid for engine in wanted.engines.values() for uuid in engine.config.gpus}
    numbers = [slot.uuid for slot in slots]
    lost: Lost = ()

    def judge(reading: HostReading) -> Evaluation:
        pids = {process.pid for gpu in reading.gpus for process in gpu.processes or ()}
        return evaluate(reading.gpus, host.owners(pids), limits, numbers)

    try:
        with host.nvml() as session:

            def read() -> HostReading:
                nonlocal lost
                deadline = host.clock() + PASSING_S
                while True:
                    boards, lost = read_boards(session, slots)
                    try:
                        require(boards, lost, sorted(needed))
                    except NvmlFailure as failure:
                        if failure.code in FINAL or host.clock() >= deadline:
                            raise
                        host.sleep(POLL_S)
                    else:
                        return replace(
                            boards, gpus=tuple(gpu for gpu in boards.gpus if gpus is None or gpu.uuid in gpus)
                        )

            return settle(read, judge, SETTLE_S, clock=host.clock, sleep=host.sleep), lost
    except NvmlFailure as failure:
        raise PhaseFailed(f"VRAM cannot be measured: {failure}") from failure


def _describe_use(evaluation: Evaluation) -> str:
    used = (gpu for gpu in evaluation.gpus if gpu.budget_mib)
    return ", ".join(f"GPU {gpu.reading.index} {gpu.engine_mib} of {gpu.budget_mib} MiB" for gpu in used)


def measure_engine(host: HostView, wanted: Generation, engine: str) -> Done:
    """Compare the VRAM of the GPUs of one engine with their budgets; `measure` does so with all of them, at the end.

    Raises PhaseFailed: one is over its budget or cannot be read.
    """
    result, _ = _settle(host, wanted, set(wanted.engines[engine].config.gpus))
    if result.evaluation.failures:
        rows = [gpu.as_dict() for gpu in result.evaluation.gpus]
        raise PhaseFailed(result.evaluation.message, engines=[engine], data={"gpus": rows})
    return Done(_describe_use(result.evaluation))


def measure(host: HostView, wanted: Generation, *, accept: bool = False) -> Done:
    """Compare the VRAM of every GPU with its budget and the plan, once the values no longer change.

    With `accept` engines that use more than their budgets are no failure; memory on a GPU without an engine, and memory
    that no process holds, always is one. A lost GPU that no engine needs is a warning. Returns rows in `data["gpus"]`,
    `data["drift"]` (the plan), `data["over_budget"]` (what was accepted) and, of a calibration, `data["measured"]`
    (`Journal.measured`). Raises PhaseFailed: a GPU is over its
    budget or cannot be read, or differs from the plan and the operator wants that to fail.
    """
    result, lost = _settle(host, wanted)
    rows = [gpu.as_dict() for gpu in result.evaluation.gpus]
    over = result.evaluation.failures
    if over and not (accept and result.evaluation.only_engines_over):
        raise PhaseFailed(result.evaluation.message, data={"gpus": rows})
    warnings = [*result.evaluation.warnings, *(str(failure) for failure in lost)]
    if not result.settled:
        warnings.append(f"VRAM still moved after {result.waited_s:.0f} s; the last of {result.samples} samples counts.")
    detail = f"{'over' if over else 'within'} budget: {_describe_use(result.evaluation)}"
    configs = [engine.config for engine in wanted.engines.values()]
    states = {config.engine: host.read_state(config.engine) for config in configs}
    differences = drift.compare(configs, states, rows)
    said, on_drift = drift.sentences(differences), drift.wanted(configs)
    data: dict[str, object] = {"gpus": rows, "over_budget": over, "drift": differences}
    if wanted.purpose == "calibration":
        # The way back overwrites the states of the engines.
        images = {container.engine: container.image_id for container in host.list_containers() if container.running}
        data["measured"] = {
            "gpus": rows,
            "engines": [
                {key: getattr(config, key) for key in ("engine", "container", "gpus")}
                | {"container_image_id": images.get(config.engine), "log_facts": state.log_facts if state else {}}
                for config, state in ((config, states[config.engine]) for config in configs)
            ],
        }
    if said and on_drift == "fail":
        raise PhaseFailed(" ".join(said), data=data)
    return Done(detail, data=data, warnings=(*warnings, *(() if on_drift == "ignore" else said)))
