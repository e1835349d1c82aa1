# SPDX-License-Identifier: Apache-2.0
"""What a worker says where CUDA cannot be used: torch's sentences, which operators find in the engine's log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from lab.nvidia import testing

pytestmark = pytest.mark.slow

NODES = ("nvidiactl", "nvidia-uvm", "nvidia0")


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
    gpus = testing.create_root(tmp_path / "gpus", gpus=1)
    gpus.set_nodes(*nodes)
    if fault.startswith("module"):
        gpus.set_module(fault.split()[1])
    elif fault:
        gpus.set_fault(0, "cuda-init-fails", fault)
    environment = gpus.environment(testing.build_cuda(tmp_path)) | {"PYTHONPATH": str(ROOT / "lab/engine")}
    command = [sys.executable, "-c", "from vllm_edge_lab import cuda; cuda.initialise()"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == (1 if said else 0)
    assert gpus.nodes() == set(nodes), "nobody makes a node in a container"
    assert said in done.stderr and ("RuntimeError: " in done.stderr) is bool(said)


def test_a_worker_without_a_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from vllm_edge_lab import cuda; cuda.initialise('libcuda-absent.so.1')"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "lab/engine")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "RuntimeError: Found no NVIDIA driver on your system." in done.stderr
