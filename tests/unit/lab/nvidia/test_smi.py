# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi in the forms that people and scripts read, and what tests/unit/gpu does not see of the simulated NVML."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab.nvidia import compiler, testing

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.slow
def test_a_holder_in_another_pid_namespace_is_not_listed_but_counts(gpus: testing.LabRoot, nvml_library: Path) -> None:
    if subprocess.run(["unshare", "--fork", "--pid", "--mount-proc", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a pid namespace")
    code = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0);"
        "print(n.nvmlDeviceGetMemoryInfo(h).used >> 20, len(n.nvmlDeviceGetComputeRunningProcesses(h)))"
    )
    with gpus.claim(0, 5000):
        seen = subprocess.run(
            ["unshare", "--fork", "--pid", "--mount-proc", sys.executable, "-c", code],
            capture_output=True, text=True, check=True, env=gpus.environment(nvml_library),
        )  # fmt: skip
    assert seen.stdout.split() == ["5470", "0"]


@pytest.mark.slow
def test_slow_release_starts_anew_for_a_claim_made_again(nvml: ModuleType, gpus: testing.LabRoot) -> None:
    def used_mib() -> int:
        info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0), version=nvml.nvmlMemory_v2)
        return int(info.used) >> 20

    gpus.set_fault(0, "slow-release", 1)
    for _ in range(2):
        with gpus.claim(0, 500, name="engine"):
            assert used_mib() == 500
        assert used_mib() == 500
        time.sleep(2.1)
        assert used_mib() == 0


@pytest.mark.slow
def test_energy_goes_on_from_one_reader_to_the_next(gpus: testing.LabRoot, nvml_library: Path) -> None:
    code = (
        "import pynvml as n; n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0);"
        "print(n.nvmlDeviceGetTotalEnergyConsumption(h))"
    )

    def ask() -> int:
        environment = gpus.environment(nvml_library)
        return int(subprocess.check_output([sys.executable, "-c", code], env=environment, text=True))

    with gpus.claim(0, 500):
        first = ask()
        time.sleep(1)
        busy = ask()
    assert 29_000 < busy - first < 290_000
    assert busy <= ask() < busy + 290_000, "of an idle card from then on, and not since the boot"
    assert (gpus.gpu(0) / "energy").stat().st_mode & 0o777 == 0o644


def test_binaries_run_on_old_systems(nvml_library: Path, smi_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(compiler.needed_glibc, (nvml_library, smi_program))) <= compiler.OLDEST_GLIBC
    monkeypatch.setattr(compiler, "OLDEST_GLIBC", (2, 3))
    with pytest.raises(RuntimeError, match="needs glibc 2"):
        compiler.check_glibc(nvml_library)


# ---- nvidia-smi -----------------------------------------------------------------------------------------------------

MODES = "--query-gpu=compute_mode,mig.mode.current,gpu_recovery_action --format=csv,noheader -i 1"
CLOCKS = "--query-gpu=clocks_event_reasons.active --format=csv,noheader -i 1"
TOTALS = ",".join(f"ecc.errors.uncorrected.{since}.total" for since in ("volatile", "aggregate"))
ERRORS = f"--query-gpu={TOTALS},utilization.gpu --format=csv,noheader -i 1"
PEERS = " \tGPU0\tGPU1\tGPU2\tGPU3\t\n GPU0\tX\tOK\tOK\tOK\t\n GPU1\tOK\tX\tOK\tOK\t\n"
LISTED = "".join(f"GPU {index}: NVIDIA L4 (UUID: {uuid})\n" for index, uuid in enumerate(testing.UUIDS))
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
LOST = (
    "Unable to determine the device handle for GPU1: 00000000:31:00.0: GPU is lost."
    "  Reboot the system to recover this GPU\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "arguments", "text", "status"),
    [
        (None, "-L", LISTED, 0),
        (
            None,
            "'--query-gpu=memory.total, power.limit,compute_cap' --format=csv -i 1",
            "memory.total [MiB], power.limit [W], compute_cap\n23034 MiB, 72.00 W, 8.9\n",
            0,
        ),
        ((0, "no-memory-v2"), "--query-gpu=memory.used --format=csv,noheader,nounits -i 0", "470\n", 0),
        ((0, "nvml-error", "TIMEOUT"), "--query-gpu=index,memory.used --format=csv,noheader -i 0", "0, [Timeout]\n", 0),
        (None, "--query-gpu=colour --format=csv", 'Field "colour" is not a valid field to query.', 2),
        (None, MODES, "Default, [N/A], None\n", 0),
        ((1, "compute-mode", "Exclusive_Process"), MODES, "Exclusive_Process, [N/A], None\n", 0),
        ((1, "mig"), MODES, "Default, Enabled, None\n", 0),
        ((1, "recovery-action", 4), MODES, "Default, [N/A], Drain and Reset\n", 0),
        ((1, "throttled"), CLOCKS, "0x0000000000000020\n", 0),
        (None, ERRORS, "0, 0, 0 %\n", 0),
        ((1, "ecc-error", 3), ERRORS, "3, 3, 0 %\n", 0),
        (None, "topo -p2p r", PEERS, 0),
        ((1, "no-peers"), "topo -p2p r", " GPU1\tCNS\tX\tCNS\tCNS\t\n GPU2\tOK\tCNS\tX\tOK\t\n", 0),
        (None, "topo", "Invalid combination of input arguments", 2),
        (None, "--wings", "Invalid combination of input arguments", 2),
        (None, "-L -i 9", "No devices were found", 6),
        ((None,), "", NO_DRIVER, 9),
        (("570.211.01",), "-L", MISMATCH, 18),
        ((1, "gpu-lost"), "-L", LOST, 15),
    ],
)
def test_answers(
    smi: Run, gpus: testing.LabRoot, fault: tuple[Any, ...] | None, arguments: str, text: str, status: int
) -> None:
    """`fault`: the version of the loaded module, or GPU, name and value of a fault."""
    if fault is not None:
        (gpus.set_module if len(fault) == 1 else gpus.set_fault)(*fault)
    result = smi(*shlex.split(arguments))
    # A text with a line break is all of it, but that of `topo`, which has a legend.
    assert result.stdout == text if text.endswith("\n") and "\t" not in text else text in result.stdout
    assert result.returncode == status
