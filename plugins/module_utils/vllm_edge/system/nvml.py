# SPDX-License-Identifier: Apache-2.0
"""Readings of this host's GPUs through NVML, and NVML's errors as sentences with a remedy.

Memory is in whole MiB, rounded down as nvidia-smi shows it. NVML has two memory calls, which mean different things by
"used":

  v2    total = reserved + used + free: "used" is what was allocated. nvidia-smi shows this one.
  v1    total = used + free: "used" includes what the driver reserves for itself (about 470 MiB on an L4), and v1 does
        not say how much that is.

A reading says which of the two answered. If the figures of a v2 answer add up as those of v1 do (early R525 drivers),
the reserved memory that it states is subtracted from "used". If only v1 answers, `reserved_mib` is None, which means
unknown and not 0.

pynvml is imported when a session opens and not with this file. Modules import this file under the system's Python,
which has no pynvml, to find out that they have to run under another interpreter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

MIB = 1024 * 1024

MemoryVersion = Literal["v1", "v2"]
T = TypeVar("T")


def explain_reset(uuid: str = "<uuid>") -> str:
    """Return how to reset a GPU, as the end of a sentence.

    A reset is refused while anything has the GPU open, and nvidia-persistenced, which the role nvidia_driver enables,
    has all of them open (NVIDIA/NVSentinel#1690, NVIDIA/gpu-operator#118); the reader of the metrics has now and then.
    """
    return (
        "stop the engines ('systemctl stop vllm-edge.target') and whatever else uses it, 'systemctl stop "
        f"nvidia-persistenced vllm-edge-facts', which open every GPU, then 'nvidia-smi --gpu-reset -i {uuid}', or "
        "reboot. 'systemctl start nvidia-persistenced vllm-edge-facts vllm-edge.target' starts them again"
    )


ERRORS: dict[str, tuple[str, str]] = {
    "UNINITIALIZED": (
        "NVML was asked for {gpu} before it was initialized or after it was shut down.",
        "This is a mistake of the program that asked; please report it with the command that was run.",
    ),
    "INVALID_ARGUMENT": (
        "NVML does not accept the handle of {gpu}: the set of GPUs changed while it was being read.",
        "Run again. If it comes back, look for Xid messages in 'journalctl -k' and reseat or replace the card.",
    ),
    "NOT_SUPPORTED": (
        "{gpu} does not support this query (unified memory, MIG or a virtual GPU).",
        "VRAM budgets need a GPU with memory of its own, such as the L4; leave this card out of the profile.",
    ),
    "NO_PERMISSION": (
        "This user may not ask NVML about {gpu}.",
        "Run as root (become: true); in a container, give it the GPU's device.",
    ),
    "NOT_FOUND": (
        "NVML does not find {gpu}.",
        "Compare 'nvidia-smi -L' with gpu_uuids in the inventory; an exchanged card needs its new UUID there.",
    ),
    "INSUFFICIENT_SIZE": (
        "The list of processes on {gpu} grew faster than it could be read.",
        "Run again when the engines have finished starting.",
    ),
    "INSUFFICIENT_POWER": (
        "{gpu} does not get enough power.",
        "Connect the card's power cable and check the power supplies in the server's management controller.",
    ),
    "DRIVER_NOT_LOADED": (
        "The NVIDIA kernel module is not loaded.",
        "Run the host stage of site.yml. If the driver is installed already: 'modprobe nvidia', or reboot; "
        "'dmesg | grep -i nvidia' says why it does not load (Secure Boot, nouveau, another kernel).",
    ),
    "TIMEOUT": (
        "{gpu} did not answer NVML in time.",
        "With persistence mode off a first query can take long: enable nvidia-persistenced and run again. "
        "If it stays, look for Xid messages in 'journalctl -k'.",
    ),
    "IRQ_ISSUE": (
        "The kernel has an interrupt problem with {gpu}.",
        "Look for the cause in 'journalctl -k'; a reboot usually clears it, a firmware update keeps it away.",
    ),
    "LIBRARY_NOT_FOUND": (
        "libnvidia-ml.so.1 is not installed: there is no NVIDIA driver on this host, or not its libraries.",
        "Run the host stage of site.yml, which installs it; 'ldconfig -p | grep nvidia-ml' shows whether it is there.",
    ),
    "FUNCTION_NOT_FOUND": (
        "The installed NVML lacks a function that is needed for {gpu}.",
        "Install a newer driver branch: group_vars/all/versions.yml names the oldest one that is supported.",
    ),
    "CORRUPTED_INFOROM": (
        "The infoROM of {gpu} is corrupted.",
        "The card's own record is damaged: have it replaced; until then leave it out of the profile.",
    ),
    "GPU_IS_LOST": (
        "The GPU is lost: {gpu} has fallen off the bus.",
        "Its engines cannot go on. Look for Xid 79 in 'journalctl -k', check seating, power and temperature, and "
        "reboot; if the card stays away, take it out of gpu_uuids and choose a profile that does not need it.",
    ),
    "RESET_REQUIRED": (
        "{gpu} must be reset before it can be used.",
        f"To reset it, {explain_reset()}.",
    ),
    "OPERATING_SYSTEM": (
        "The operating system blocked NVML's request for {gpu}.",
        "Check the device nodes (/dev/nvidia*), the device cgroup and AppArmor or SELinux denials in 'journalctl -k'.",
    ),
    "LIB_RM_VERSION_MISMATCH": (
        "The driver's libraries and the loaded kernel module are of different versions: the driver was upgraded "
        "underneath running processes, and the old module is still loaded.",
        "Reboot the server (or stop everything that uses a GPU and reload the nvidia modules). The host stage does it "
        "by itself where allow_reboot is true.",
    ),
    "IN_USE": ("Another program holds {gpu} exclusively.", "Find it with 'fuser -v /dev/nvidia*' and stop it."),
    "MEMORY": (
        "NVML got no memory from the system while it asked about {gpu}.",
        "The host is out of RAM: look with 'free -m' and in 'journalctl -k' for the OOM killer.",
    ),
    "ARGUMENT_VERSION_MISMATCH": (
        "The installed NVML does not know the version of a structure that was used for {gpu}.",
        "Install a newer driver branch: group_vars/all/versions.yml names the oldest one that is supported.",
    ),
    "NOT_READY": ("{gpu} is not ready yet.", "The driver is still initializing it; run again in a minute."),
    "GPU_NOT_FOUND": (
        "The driver is loaded but finds no GPU.",
        "Check 'lspci -d 10de:'; a card that is missing there is not seated or not powered.",
    ),
    "INVALID_STATE": ("{gpu} is in a state that does not allow this query.", f"To reset it, {explain_reset()}."),
    "UNKNOWN": (
        "The driver reports an unknown internal error for {gpu}.",
        "Look for Xid messages in 'journalctl -k'; a reboot usually clears it.",
    ),
}
"""A sentence and a remedy by NVML's error name without the prefix NVML_ERROR_. `{gpu}` stands for the card's name."""

ABSENT = frozenset({"DRIVER_NOT_LOADED", "LIBRARY_NOT_FOUND"})
"""Errors that mean that there is no driver yet. On a bare host they stop a prediction, but nothing is wrong."""


class NvmlFailure(Exception):
    """An NVML error for an operator: a stable code, the card if it is known, a sentence and a remedy."""

    def __init__(self, code: str, gpu: str | None = None, *, card: str | None = None, index: int | None = None) -> None:
        """Build the texts from ERRORS.

        `code` is NVML's error name without the prefix NVML_ERROR_, `gpu` the UUID, None if it is unknown or the error
        concerns the host. `card` is what to call it, if there is more to say, `index` NVML's, if that is all we know.
        """
        sentence, self.remedy = ERRORS.get(code, (f"NVML answered {code} for {{gpu}}.", ERRORS["UNKNOWN"][1]))
        self.code = code
        self.gpu = gpu
        self.index = index
        name = card or gpu or ("the host" if index is None else f"the GPU at NVML index {index}")
        self.sentence = sentence.format(gpu=name)
        super().__init__(f"{self.sentence} {self.remedy}")

    @property
    def driver_absent(self) -> bool:
        return self.code in ABSENT

    def as_dict(self) -> dict[str, str | None]:
        return {"code": self.code, "gpu": self.gpu, "sentence": self.sentence, "remedy": self.remedy}


@dataclass(frozen=True)
class ProcessReading:
    pid: int
    used_mib: int | None
    """None if NVML does not report it (virtual GPUs, WSL): unknown, not 0."""


@dataclass(frozen=True)
class GpuIdentity:
    index: int
    """Position in PCI bus order, from 0, whatever order NVML counts in."""
    uuid: str
    name: str
    pci_bus_id: str

    @property
    def card(self) -> str:
        return f"{self.uuid} ({self.name} at {self.pci_bus_id})"


@dataclass(frozen=True)
class MemoryReading:
    total_mib: int
    reserved_mib: int | None
    """What the driver reserves for itself; None if only v1 answered."""
    used_mib: int
    """Without the driver's reserve, unless `reserved_mib` is None: then the reserve is included."""
    free_mib: int
    memory_version: MemoryVersion


@dataclass(frozen=True, kw_only=True)
class GpuReading(GpuIdentity, MemoryReading):
    processes: tuple[ProcessReading, ...] | None
    """None if the GPU cannot list its processes."""
    compute_capability: str | None
    """As in "8.9"; None if NVML does not report it."""

    @property
    def used_includes_reserved(self) -> bool:
        return self.reserved_mib is None


@dataclass(frozen=True)
class StateReading:
    """What a GPU does at a moment. A figure is None if NVML does not report it."""

    power_w: float | None
    energy_j: float | None
    """Counted since the driver was loaded."""
    sm_clock_mhz: int | None
    temperature_c: int | None
    throttle: tuple[str, ...] | None
    """Why the clocks are lowered: values of THROTTLE."""


@dataclass(frozen=True)
class HealthReading:
    """What a GPU counts since long before, and its link; a figure is None if NVML does not report it."""

    ecc_corrected: int | None
    """Over the life of the card, as the other count of ECC errors; None also where ECC is off."""
    ecc_uncorrected: int | None
    pcie_generation: int | None
    """At the moment: an idle card lowers it."""
    pcie_width: int | None
    pcie_replays: int | None
    """Since the driver was loaded, or the card was reset."""
    utilization: float | None
    """The part of the last sample period in which a kernel ran, from 0 to 1."""


@dataclass(frozen=True)
class ModeReading:
    """How a GPU may be used, and what it needs after a fault, in nvidia-smi's words; None if NVML does not say."""

    compute_mode: str | None
    mig: bool | None
    recovery: str | None


# nvmlComputeMode_t and nvmlDeviceGpuRecoveryAction_t (nvml.h); what is not listed is told by its number.
COMPUTE_MODES = {0: "Default", 1: "Exclusive_Thread", 2: "Prohibited", 3: "Exclusive_Process"}
RECOVERY_ACTIONS = dict(enumerate(("None", "Reset", "Reboot", "Drain P2P", "Drain and Reset")))


THROTTLE: dict[int, str] = {
    0x02: "application_clocks",
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}
"""Bits of nvmlClocksEventReasons (nvml.h). Idling, sync boost and a display's clocks are left out."""


@dataclass(frozen=True)
class HostReading:
    driver_version: str
    gpus: tuple[GpuReading, ...]


def interpret_memory(total: int, used: int, free: int, reserved: int | None) -> MemoryReading | None:
    """Convert the bytes of a memory call, whose sum shows which definition of "used" applies.

    `reserved` is None for the v1 call. Returns None if the figures match neither definition. A difference of one MiB is
    tolerated, because some drivers round the parts.
    """
    if reserved is None:
        return MemoryReading(total // MIB, None, used // MIB, free // MIB, "v1")
    if abs(total - (reserved + used + free)) > MIB:
        used -= reserved
    if abs(total - (reserved + used + free)) > MIB:
        return None
    return MemoryReading(total // MIB, reserved // MIB, max(0, used) // MIB, free // MIB, "v2")


def bus_order(pci_bus_id: str) -> tuple[int, ...]:
    """Convert a bus id such as '00000000:17:00.0' to numbers, so that ids with 4 and 8 digits in the domain compare."""
    return tuple(int(part, 16) for part in pci_bus_id.replace(".", ":").split(":"))


def merge_processes(processes: Iterable[ProcessReading]) -> tuple[ProcessReading, ...]:
    """Merge entries by pid: a process that computes and draws is in both of NVML's lists, with the same memory."""
    found: dict[int, ProcessReading] = {}
    for process in processes:
        before = found.get(process.pid)
        if before is None or before.used_mib is None or (process.used_mib or 0) > before.used_mib:
            found[process.pid] = process
    return tuple(found[pid] for pid in sorted(found))


def pynvml_missing() -> bool:
    """Return whether this interpreter lacks nvidia-ml-py. The module can then respawn under one that has it."""
    return importlib.util.find_spec("pynvml") is None


class PynvmlMissing(Exception):
    """No interpreter has nvidia-ml-py. The text says why, without a full stop."""

    remedy = "Run the host stage of site.yml first: its role vllm_edge_host installs that environment."


def require_pynvml(python: str, respawned: bool, respawn: Callable[[str], object]) -> None:
    """Let a module go on under `python`, that of vllm-edge's environment, unless nvidia-ml-py is here.

    `respawned` is whether the module did so before. Raises PynvmlMissing.
    """
    if not pynvml_missing():
        return
    if respawned:
        raise PynvmlMissing(f"nvidia-ml-py is not installed in the environment of {python}")
    if not os.access(python, os.X_OK):
        raise PynvmlMissing(f"there is no interpreter {python}, which has nvidia-ml-py")
    respawn(python)


def find_code(pynvml: Any, error: Any) -> str:
    names: dict[int, str] = {value: name for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_")}
    return names.get(error.value, f"error {error.value}").removeprefix("NVML_ERROR_")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class NvmlSession:
    """An open NVML. GPU handles are taken once, so that a card that is lost between two samples can still be named.

    With `identify` False none is taken, and its owner calls `identify` for each GPU.
    """

    def __init__(self, pynvml: Any, identify: bool = True) -> None:
        self._pynvml = pynvml
        self.driver_version = _text(self._ask(pynvml.nvmlSystemGetDriverVersion))
        self.count: int = self._ask(pynvml.nvmlDeviceGetCount)
        self.lost: tuple[NvmlFailure, ...] = ()
        self._handles: dict[str, Any] = {}
        self.identities: tuple[GpuIdentity, ...] = self._identify_all() if identify else ()

    def _ask(
        self, call: Callable[..., T], *arguments: Any, gpu: GpuIdentity | None = None, index: int | None = None
    ) -> T:
        try:
            return call(*arguments)
        except self._pynvml.NVMLError as error:
            code = find_code(self._pynvml, error)
            raise NvmlFailure(code, gpu.uuid if gpu else None, card=gpu.card if gpu else None, index=index) from error

    def identify(self, index: int) -> GpuIdentity:
        """Take the handle of the GPU at NVML's index, which is the one in the result, too. Raises NvmlFailure."""
        nvml = self._pynvml
        handle = self._ask(nvml.nvmlDeviceGetHandleByIndex, index, index=index)
        uuid = _text(self._ask(nvml.nvmlDeviceGetUUID, handle, index=index))
        name = _text(self._ask(nvml.nvmlDeviceGetName, handle, index=index))
        bus = _text(self._ask(nvml.nvmlDeviceGetPciInfo, handle, index=index).busId)
        self._handles[uuid] = handle
        return GpuIdentity(index, uuid, name, bus)

    def _identify_all(self) -> tuple[GpuIdentity, ...]:
        """Return every GPU that answers. Failures of the others are kept in `lost`, for the caller to judge."""
        lost: list[NvmlFailure] = []
        found: list[GpuIdentity] = []
        for index in range(self.count):
            try:
                found.append(self.identify(index))
            except NvmlFailure as failure:
                lost.append(failure)
        self.lost = tuple(lost)
        found.sort(key=lambda gpu: bus_order(gpu.pci_bus_id))
        return tuple(replace(gpu, index=at) for at, gpu in enumerate(found))

    def _memory(self, gpu: GpuIdentity) -> MemoryReading:
        nvml = self._pynvml
        ask_v2 = functools.partial(nvml.nvmlDeviceGetMemoryInfo, version=nvml.nvmlMemory_v2)
        raw = self._ask_if_supported(ask_v2, gpu, ("FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"))
        if raw is not None:
            reading = interpret_memory(raw.total, raw.used, raw.free, raw.reserved)
            if reading is not None:
                return reading
        raw = self._ask(nvml.nvmlDeviceGetMemoryInfo, self._handles[gpu.uuid], gpu=gpu)
        reading = interpret_memory(raw.total, raw.used, raw.free, None)
        assert reading is not None  # v1 figures are not checked against each other
        return reading

    def _ask_if_supported(
        self, call: Callable[[Any], T], gpu: GpuIdentity, codes: Sequence[str] = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND")
    ) -> T | None:
        """Return what NVML answers about the GPU; None if it does not support the query, which it says by `codes`."""
        try:
            return self._ask(call, self._handles[gpu.uuid], gpu=gpu)
        except NvmlFailure as failure:
            if failure.code in codes:
                return None
            raise

    def _read_processes(self, gpu: GpuIdentity) -> tuple[ProcessReading, ...] | None:
        compute = self._ask_if_supported(self._pynvml.nvmlDeviceGetComputeRunningProcesses, gpu)
        if compute is None:
            return None
        # A desktop's X server uses GPU memory too, and is only in the graphics list.
        graphics = self._ask_if_supported(self._pynvml.nvmlDeviceGetGraphicsRunningProcesses, gpu)
        return merge_processes(
            ProcessReading(int(entry.pid), None if entry.usedGpuMemory is None else int(entry.usedGpuMemory) // MIB)
            for entry in [*compute, *(graphics or ())]
        )

    def _capability(self, gpu: GpuIdentity) -> str | None:
        version = self._ask_if_supported(self._pynvml.nvmlDeviceGetCudaComputeCapability, gpu)
        return None if version is None else "{}.{}".format(*version)

    def read_state(self, gpu: GpuIdentity) -> StateReading:
        """Return power, energy, clock, temperature and throttling of a GPU. Raises NvmlFailure."""
        nvml = self._pynvml
        power = self._ask_if_supported(nvml.nvmlDeviceGetPowerUsage, gpu)
        energy = self._ask_if_supported(nvml.nvmlDeviceGetTotalEnergyConsumption, gpu)
        # nvidia-ml-py before 13 has the former name only.
        ask_reasons = getattr(
            nvml, "nvmlDeviceGetCurrentClocksEventReasons", nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        )
        reasons = self._ask_if_supported(ask_reasons, gpu)
        return StateReading(
            power_w=None if power is None else power / 1000,
            energy_j=None if energy is None else energy / 1000,
            sm_clock_mhz=self._ask_if_supported(lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM), gpu),
            temperature_c=self._ask_if_supported(
                lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU), gpu
            ),
            throttle=None if reasons is None else tuple(name for bit, name in THROTTLE.items() if reasons & bit),
        )

    def read_health(self, gpu: GpuIdentity) -> HealthReading:
        """Return errors, PCIe link and utilization of a GPU. Raises NvmlFailure."""
        nvml = self._pynvml
        rates = self._ask_if_supported(nvml.nvmlDeviceGetUtilizationRates, gpu)

        def count_errors(kind: int) -> int | None:
            ask = functools.partial(
                nvml.nvmlDeviceGetTotalEccErrors, errorType=kind, counterType=nvml.NVML_AGGREGATE_ECC
            )
            return self._ask_if_supported(ask, gpu)

        return HealthReading(
            count_errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            count_errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            self._ask_if_supported(nvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
            self._ask_if_supported(nvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
            self._ask_if_supported(nvml.nvmlDeviceGetPcieReplayCounter, gpu),
            None if rates is None else rates.gpu / 100,
        )

    def read_mode(self, gpu: GpuIdentity) -> ModeReading:
        """Return compute mode, MIG mode and recovery action of a GPU. Raises NvmlFailure."""
        nvml = self._pynvml
        compute = self._ask_if_supported(nvml.nvmlDeviceGetComputeMode, gpu)
        mig = self._ask_if_supported(nvml.nvmlDeviceGetMigMode, gpu)
        field = getattr(nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)  # nvidia-ml-py before 13 has no such name
        values = field and self._ask_if_supported(lambda h: nvml.nvmlDeviceGetFieldValues(h, [field]), gpu)
        recovery = values[0].value.uiVal if values and values[0].nvmlReturn == 0 else None
        return ModeReading(
            None if compute is None else COMPUTE_MODES.get(compute, f"mode {compute}"),
            None if mig is None else bool(mig[0]),
            None if recovery is None else RECOVERY_ACTIONS.get(recovery, f"action {recovery}"),
        )

    def read(self) -> HostReading:
        """Return one sample of every GPU. Raises NvmlFailure, which names the GPU, if one does not answer."""
        if self.lost:
            raise self.lost[0]
        return HostReading(self.driver_version, tuple(self.read_gpu(gpu) for gpu in self.identities))

    def read_gpu(self, gpu: GpuIdentity) -> GpuReading:
        """Return one sample of a GPU. Raises NvmlFailure."""
        return GpuReading(
            **vars(gpu),
            **vars(self._memory(gpu)),
            processes=self._read_processes(gpu),
            compute_capability=self._capability(gpu),
        )


@contextmanager
def open_nvml(identify: bool = True) -> Iterator[NvmlSession]:
    """Open NVML for the duration of a with block, and take the handle of every GPU unless `identify` is False.

    Raises NvmlFailure: NVML could not be initialized; ImportError: nvidia-ml-py is not installed.
    """
    pynvml: Any = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlFailure(find_code(pynvml, error)) from error
    try:
        yield NvmlSession(pynvml, identify)
    finally:
        pynvml.nvmlShutdown()


def name_lost(failure: NvmlFailure, expected: Sequence[GpuIdentity], seen: Sequence[str]) -> NvmlFailure:
    """Return the failure with the card's name, if the expected cards leave only one candidate.

    A GPU that was lost before NVML was opened has no handle and so no UUID: NVML only reports that some index is gone.
    """
    if failure.gpu is not None or failure.index is None:
        return failure
    missing = [gpu for gpu in expected if gpu.uuid not in seen]
    if len(missing) == 1:
        return NvmlFailure(failure.code, missing[0].uuid, card=f"{missing[0].card}, slot {missing[0].index}")
    if missing:
        cards = " or ".join(f"slot {gpu.index}, {gpu.card}" for gpu in missing)
        return NvmlFailure(failure.code, None, card=f"one of {cards}", index=failure.index)
    return failure
