# SPDX-License-Identifier: Apache-2.0
"""The simulated libnvidia-ml.so.1 as nvidia-ml-py sees it; its readings are in tests/unit/gpu/test_nvml_reading.py."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from lab.nvidia import compiler, testing


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


def test_binaries_run_on_old_systems(nvml_library: Path, smi_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(map(compiler.needed_glibc, (nvml_library, smi_program))) <= compiler.OLDEST_GLIBC
    monkeypatch.setattr(compiler, "OLDEST_GLIBC", (2, 3))
    with pytest.raises(RuntimeError, match="needs glibc 2"):
        compiler.check_glibc(nvml_library)
