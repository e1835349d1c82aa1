# SPDX-License-Identifier: Apache-2.0
"""lab-gpu: faults, foreign processes and the module, as the library then sees them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pynvml
import pytest

from lab.nvidia import testing
from lab.nvidia.versions import DRIVER_VERSION

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


def used_mib(gpu: int) -> int:
    info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu), version=pynvml.nvmlMemory_v2)
    return int(info.used) // 1024 // 1024


def test_faults_are_listed_and_cleared(lab_gpu: Run, gpus: testing.LabRoot) -> None:
    fault = "engine-grows=900,model=google/gemma-4-E2B-it,max_model_len=2048"
    assert lab_gpu("fault", "set", "--gpu", testing.UUIDS[3], fault).returncode == 0
    assert lab_gpu("fault", "list").stdout == f"GPU 3 {testing.UUIDS[3]}: {fault}\n"
    lab_gpu("fault", "set", "--gpu", "all", "no-process-memory")
    lab_gpu("fault", "set", "library-mismatch")
    assert len(lab_gpu("fault", "list").stdout.splitlines()) == 6
    lab_gpu("fault", "clear")
    assert lab_gpu("fault", "list").stdout == ""
    assert (gpus.path / "module").read_text().strip() == DRIVER_VERSION


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "0", "bogus"), "there is no fault 'bogus'"),
        (("--gpu", "9", "gpu-lost"), "there is no GPU '9'"),
        (("gpu-lost",), "name it with --gpu"),
        (("--gpu", "0", "orphan"), "orphan needs a value"),
        (("--gpu", "0", "orphan=many"), "a whole number"),
        (("--gpu", "0", "cuda-init-fails=7"), "802, 803 or 804"),
        (("--gpu", "0", "compute-mode=Default"), "Prohibited or Exclusive_Process"),
        (("--gpu", "0", "orphan=30,max_model_len=2048"), "only a fault of engines has conditions"),
        (("--gpu", "0", "engine-grows=30,max_model_len"), "'max_model_len' is no condition"),
        (("--gpu", "0", "engine-hangs=30"), "takes conditions alone"),
    ],
)
def test_refused_faults(lab_gpu: Run, arguments: tuple[str, ...], said: str) -> None:
    result = lab_gpu("fault", "set", *arguments)
    assert result.returncode == 1
    assert said in result.stderr


def test_xids_are_never_written_into_the_log_of_the_machine(lab_gpu: Run) -> None:
    result = lab_gpu("xid", "--gpu", "1", "79")
    assert (result.returncode, "has no kernel's log" in result.stderr) == (1, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
def test_an_orphan_is_a_process_of_the_engines_user(nvml: ModuleType, lab_gpu: Run, gpus: testing.LabRoot) -> None:
    # Another user reaches the boards, as it does on the host.
    for directory in (gpus.path, *list(gpus.path.parents)[:-2]):
        directory.chmod(directory.stat().st_mode | 0o001)
    result = lab_gpu("orphan-process", "start", "--gpu", "1", "--mib", "900", "--user", "nobody")
    assert result.returncode == 0, result.stderr
    pid = int(result.stdout)
    try:
        (process,) = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(1))
        assert (process.pid, used_mib(1)) == (pid, 900)
        assert Path(f"/proc/{pid}").owner() == "nobody"
        assert Path(f"/proc/{pid}/cmdline").read_text().startswith("VLLM::Worker")
        assert lab_gpu("foreign", "stop", "all").returncode == 0
        assert used_mib(1) == 900
        assert lab_gpu("orphan-process", "stop", str(pid)).returncode == 0
        assert used_mib(1) == 0
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    assert "no user 'vllm-edge'" in lab_gpu("orphan-process", "start", "--gpu", "1", "--mib", "1").stderr
