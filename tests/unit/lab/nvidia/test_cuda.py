# SPDX-License-Identifier: Apache-2.0
"""libcuda of the lab, and who makes device nodes: cuInit stands or falls with the nodes that its caller can open."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.nvidia import testing

pytestmark = pytest.mark.slow

PROBE = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def read(kind, function, *arguments):
    out = kind()
    code = function(ctypes.byref(out), *arguments)
    return code or out.value
said = {"init": cuda.cuInit(0), "version": read(ctypes.c_int, cuda.cuDriverGetVersion)}
said["count"] = read(ctypes.c_int, cuda.cuDeviceGetCount)
print(said)
"""
ALL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1", "nvidia2", "nvidia3")


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.build_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(cuda_library: Path, gpus: testing.LabRoot) -> Callable[..., Any]:
    """cuda() -> what cuInit, cuDriverGetVersion and cuDeviceGetCount said."""
    command, environment = [sys.executable, "-c", PROBE], gpus.environment(cuda_library)
    return lambda: ast.literal_eval(subprocess.check_output(command, text=True, env=environment))


@pytest.mark.parametrize(
    ("nodes", "init", "count"),
    [
        (ALL, 0, 4),
        (("nvidiactl", "nvidia-uvm", "nvidia2"), 0, 1),
        (("nvidiactl", "nvidia0", "nvidia1", "nvidia2", "nvidia3"), 999, 3),
        (("nvidiactl", "nvidia-uvm"), 100, 3),
        (("nvidia-uvm", "nvidia0"), 100, 3),
    ],
    ids=["all", "one card", "without UVM", "without a card", "without control"],
)
def test_cuinit_stands_or_falls_with_the_nodes_of_a_container(
    cuda: Callable[..., Any], gpus: testing.LabRoot, nodes: tuple[str, ...], init: int, count: int
) -> None:
    gpus.set_nodes(*nodes)
    # Before cuInit everything else answers 3, "not initialized".
    assert cuda() == {"init": init, "version": 13000, "count": count}
    assert gpus.nodes() == set(nodes), "nobody makes a node in a container"


@pytest.mark.parametrize(("module", "init"), [(None, 100), ("580.65.06", 803), ("570.211.01", 803), ("590.48.01", 803)])
def test_cuinit_by_the_module(cuda: Callable[..., Any], gpus: testing.LabRoot, module: str | None, init: int) -> None:
    gpus.set_module(module)
    assert cuda()["init"] == init
