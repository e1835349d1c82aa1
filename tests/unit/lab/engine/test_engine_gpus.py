# SPDX-License-Identifier: Apache-2.0
"""What an engine has of the simulated GPUs: claims that go with their process, and torch's sentences without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import ROOT
from vllm_edge_lab import gpus

from lab.nvidia import testing
from lab.nvidia.testing import UUIDS, LabRoot

MIB = 2**20
HOLD = """
import sys
from vllm_edge_lab import gpus
claim = gpus.Claim(gpus.visible_gpus()[0], sys.argv[1])
try:
    claim.grow(int(sys.argv[2]) * gpus.MIB, 0)
except gpus.OutOfMemory as error:
    print("refused", error, flush=True)
else:
    print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(name: str, mib: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that claims and stays."""
    command = [sys.executable, "-c", HOLD, name, str(mib)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "lab/engine")}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [(None, [0, 1, 2, 3]), ("", []), ("2,0", [2, 0]), (UUIDS[3], [3]), ("GPU-84be", [1]), ("0,9,1", [0])],
)
def test_cuda_visible_devices_as_cuda_reads_it(
    lab_gpu_root: LabRoot, monkeypatch: pytest.MonkeyPatch, wanted: str | None, indices: list[int]
) -> None:
    if wanted is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    assert [(gpu.index, gpu.uuid) for gpu in gpus.visible_gpus()] == [(index, UUIDS[index]) for index in indices]


def test_a_claim_lives_as_long_as_its_process(lab_gpu_root: LabRoot) -> None:
    gpu = gpus.visible_gpus()[0]
    with holder("engine", 5000) as process:
        assert said(process) == "held"
        assert gpus.used_mib(gpu) == 5000
        # As the NVML library attributes it: the lock belongs to that very process.
        inode = (gpu.path / "claims" / "engine").stat().st_ino
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        assert [int(lock[4]) for lock in locks if lock[5].endswith(f":{inode}")] == [process.pid]
        process.kill()
        process.wait()
        assert gpus.used_mib(gpu) == 0
    assert gpus.used_mib(gpus.visible_gpus()[1]) == 0


def test_what_does_not_fit_is_refused_in_the_words_of_torch(lab_gpu_root: LabRoot) -> None:
    gpu = gpus.visible_gpus()[0]
    with holder("first", 20_000) as first, holder("second", 3_000) as second:
        assert {said(first).split()[0], said(second).split()[0]} == {"held", "refused"}
    with holder("alone", 20_000) as process:
        assert said(process) == "held"
        claim = gpus.Claim(gpu, "mine")
        claim.grow(1000 * MIB, 0)
        with pytest.raises(gpus.OutOfMemory) as refused:
            claim.grow(2000 * MIB, 0)
        assert str(refused.value) == (
            "CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 22.03 GiB of which "
            "1.53 GiB is free. Including non-PyTorch memory, this process has 1000.00 MiB memory in use."
        )
        assert (gpu.path / "claims" / "mine").read_text().strip() == "1000"
        os.close(claim._descriptor)


# ---- a worker where CUDA cannot be used -----------------------------------------------------------------------------

NODES = ("nvidiactl", "nvidia-uvm", "nvidia0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "fault", "said"),
    [
        (NODES, "", ""),
        (("nvidiactl", "nvidia0"), "", "CUDA unknown error - this may be due to an incorrectly set up environment"),
        (("nvidiactl", "nvidia-uvm"), "", "No CUDA GPUs are available"),
        (("nvidia-uvm", "nvidia0"), "", "No CUDA GPUs are available"),
        (NODES, "35", "The NVIDIA driver on your system is too old (found version 12040)"),
        (NODES, "module 570.211.01", "Error 803: system has unsupported display driver / cuda driver combination"),
    ],
)
def test_a_worker_ends_with_torchs_sentence(tmp_path: Path, nodes: tuple[str, ...], fault: str, said: str) -> None:
    root = testing.create_root(tmp_path / "gpus", gpus=1)
    root.set_nodes(*nodes)
    if fault.startswith("module"):
        root.set_module(fault.split()[1])
    elif fault:
        root.set_fault(0, "cuda-init-fails", fault)
    environment = root.environment(testing.build_cuda(tmp_path)) | {"PYTHONPATH": str(ROOT / "lab/engine")}
    command = [sys.executable, "-c", "from vllm_edge_lab import cuda; cuda.initialise()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == (1 if said else 0)
    assert root.nodes() == set(nodes), "nobody makes a node in a container"
    assert said in done.stderr and ("RuntimeError: " in done.stderr) is bool(said)


@pytest.mark.slow
def test_a_worker_without_a_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from vllm_edge_lab import cuda; cuda.initialise('libcuda-absent.so.1')"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "lab/engine")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "RuntimeError: Found no NVIDIA driver on your system." in done.stderr
