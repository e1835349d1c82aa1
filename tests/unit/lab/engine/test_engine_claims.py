# SPDX-License-Identifier: Apache-2.0
"""Claims on the simulated GPUs: held by processes, gone with them."""

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
