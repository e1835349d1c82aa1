# SPDX-License-Identifier: Apache-2.0
"""The simulated libnvidia-ml.so.1 as the unmodified nvidia-ml-py sees it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from lab.nvidia import compiler, testing

MIB = 1024 * 1024


def v1(nvml: ModuleType, gpu: int = 0) -> tuple[int, int, int]:
    info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(gpu))
    return info.total // MIB, info.used // MIB, info.free // MIB


def v2(nvml: ModuleType, gpu: int = 0) -> tuple[int, int, int, int]:
    info = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(gpu), version=nvml.nvmlMemory_v2)
    return info.total // MIB, info.reserved // MIB, info.used // MIB, info.free // MIB


def used(nvml: ModuleType, gpu: int = 0) -> int:
    return v2(nvml, gpu)[2]


def processes(nvml: ModuleType, gpu: int = 0) -> dict[int, int | None]:
    """pid -> MiB."""
    found = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(gpu))
    return {process.pid: process.usedGpuMemory and process.usedGpuMemory // MIB for process in found}


def test_four_l4_in_the_order_of_their_bus_ids(nvml: ModuleType) -> None:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    assert [nvml.nvmlDeviceGetUUID(handle) for handle in handles] == list(testing.UUIDS)
    by_uuid = nvml.nvmlDeviceGetHandleByUUID(testing.UUIDS[2])
    assert nvml.nvmlDeviceGetIndex(by_uuid) == 2
    with pytest.raises(nvml.NVMLError_ArgumentVersionMismatch):
        nvml.nvmlDeviceGetMemoryInfo(handles[0], version=0x02000030)
    assert [nvml.nvmlDeviceGetPciInfo(handle).busId for handle in handles] == [
        "00000000:17:00.0", "00000000:31:00.0", "00000000:B1:00.0", "00000000:CA:00.0",
    ]  # fmt: skip
    assert {nvml.nvmlDeviceGetName(handle) for handle in handles} == {"NVIDIA L4"}
    assert [nvml.nvmlDeviceGetMinorNumber(handle) for handle in handles] == [0, 1, 2, 3]
    assert {nvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles} == {(8, 9)}


def test_a_claim_counts_for_its_process_and_ends_with_it(nvml: ModuleType, gpus: testing.LabRoot) -> None:
    with gpus.claim(1, 16000) as pid:
        assert v1(nvml, 1) == (23034, 16470, 6564)
        assert v2(nvml, 1) == (23034, 470, 16000, 6564)
        assert processes(nvml, 1) == {pid: 16000}
        assert processes(nvml, 0) == {}
        assert "python" in nvml.nvmlSystemGetProcessName(pid)
    assert used(nvml, 1) == 0, "a file that nobody locks is no claim"
    assert processes(nvml, 1) == {}
    gpus.set_fault(0, "orphan", 99999)
    assert v2(nvml) == (23034, 470, 22564, 0), "a card holds no more than it has"


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
    gpus.set_fault(0, "slow-release", 1)
    for _ in range(2):
        with gpus.claim(0, 500, name="engine"):
            assert used(nvml) == 500
        assert used(nvml) == 500
        time.sleep(2.1)
        assert used(nvml) == 0


def test_binaries_run_on_old_systems(nvml_library: Path, smi_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(compiler.needed_glibc, (nvml_library, smi_program))) <= compiler.OLDEST_GLIBC
    monkeypatch.setattr(compiler, "OLDEST_GLIBC", (2, 3))
    with pytest.raises(RuntimeError, match="needs glibc 2"):
        compiler.check_glibc(nvml_library)
