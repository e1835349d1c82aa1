# SPDX-License-Identifier: Apache-2.0
"""libcuda of the lab, and who makes device nodes: cuInit stands or falls with the nodes that its caller can open."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

from lab.nvidia import compiler, testing
from lab.nvidia.versions import DRIVER_VERSION

pytestmark = pytest.mark.slow

PROBE = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def read(kind, function, *arguments):
    out = kind()
    code = function(ctypes.byref(out), *arguments)
    return code or out.value
said = {"init": cuda.cuInit(0), "version": read(ctypes.c_int, cuda.cuDriverGetVersion)}
said["count"] = read(ctypes.c_int, cuda.cuDeviceGetCount)
print(said, flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""
Cuda = Callable[..., subprocess.CompletedProcess[str]]
ALL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia0", "nvidia1", "nvidia2", "nvidia3")


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.build_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def cuda(cuda_library: Path, gpus: testing.LabRoot) -> Callable[..., Any]:
    """cuda(expression...) -> what cuInit, cuDriverGetVersion and cuDeviceGetCount said, then each expression."""

    def probe(*expressions: str, library: Path = cuda_library) -> Any:
        result = subprocess.run(
            [sys.executable, "-c", PROBE],
            input="".join(f"{text}\n" for text in expressions),
            capture_output=True,
            text=True,
            env=gpus.environment(library),
            check=True,
        )
        answers = [ast.literal_eval(line) for line in result.stdout.splitlines()]
        return answers if expressions else answers[0]

    return probe


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
def test_cuinit_needs_the_module_of_its_own_version(
    cuda: Callable[..., Any], gpus: testing.LabRoot, module: str | None, init: int
) -> None:
    gpus.set_module(module)
    assert cuda()["init"] == init


@pytest.mark.parametrize(("module", "init"), [("570.211.01", 0), (DRIVER_VERSION, 0), ("615.71.09", 803)])
def test_the_compat_library_goes_with_older_branches(
    cuda: Callable[..., Any], gpus: testing.LabRoot, tmp_path: Path, module: str, init: int
) -> None:
    gpus.set_module(module)
    assert cuda(library=testing.build_cuda(tmp_path, "590.48.01", compat=True))["init"] == init


def used_mib(gpu: int) -> int:
    pynvml.nvmlInit()
    info = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu), version=pynvml.nvmlMemory_v2)
    pynvml.nvmlShutdown()
    return int(info.used) // 1024 // 1024


RETAIN = "[c := ctypes.c_void_p(), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 2), cuda.cuCtxSetCurrent(c)][1:]"
ALLOCATE = (
    "[p := ctypes.c_ulonglong(), "
    "(lambda size: cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(size)))({} * 2**20)][1]"
)
FREE = (
    "(lambda f, t: (cuda.cuMemGetInfo_v2(ctypes.byref(f), ctypes.byref(t)), f.value >> 20))"
    "(ctypes.c_size_t(), ctypes.c_size_t())"
)


def test_contexts_and_allocations_are_simulated_memory(
    cuda: Callable[..., Any], gpus: testing.LabRoot, cuda_library: Path
) -> None:
    with gpus.claim(2, 20_000):
        answers = cuda(
            "cuda.cuDevicePrimaryCtxRelease_v2(2)",
            RETAIN,
            ALLOCATE.format(16),
            FREE,
            "cuda.cuMemFree_v2(p)",
            ALLOCATE.format(3000),
            FREE,
            "cuda.cuDevicePrimaryCtxRelease_v2(2)",
            ALLOCATE.format(1),
        )[1:]
    # 22,563 MiB, of which 20,000 are another process's and 200 the context's.
    assert answers == [201, [0, 0], 0, (0, 2347), 0, 2, (0, 2363), 0, 201]
    command = [sys.executable, "-c", PROBE]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=gpus.environment(cuda_library)
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{RETAIN}\n")
        process.stdin.flush()
        process.stdout.readline()
        assert process.stdout.readline() == "[0, 0]\n"
        assert used_mib(2) == 200
        process.kill()
        process.wait()
        assert used_mib(2) == 0


def test_a_card_without_a_context(cuda: Callable[..., Any], gpus: testing.LabRoot) -> None:
    gpus.set_fault(2, "cuda-context-fails")
    assert cuda(RETAIN)[1][0] == 46
    gpus.set_fault(2, "gpu-lost")
    assert cuda(RETAIN)[1][0] == 999


def test_cuda_and_nvml_name_the_same_cards(cuda: Callable[..., Any], gpus: testing.LabRoot) -> None:
    gpus.set_nodes("nvidiactl", "nvidia-uvm", "nvidia1", "nvidia3")
    (_, *uuids) = cuda(
        *[f"[u := (ctypes.c_ubyte * 16)(), cuda.cuDeviceGetUuid_v2(u, {at}), bytes(u).hex()][1:]" for at in (0, 1, 2)]
    )
    assert uuids[:2] == [[0, testing.UUIDS[at].removeprefix("GPU-").replace("-", "")] for at in (1, 3)]
    assert uuids[2][0] == 101


@pytest.mark.skipif("os.geteuid() != 0", reason="others make nodes through a setuid program")
def test_only_those_make_nodes_who_do_in_reality(
    cuda: Callable[..., Any],
    gpus: testing.LabRoot,
    lab_gpu: Cuda,
    smi: Cuda,
    nvml_library: Path,
    tmp_path: Path,
) -> None:
    cards = {"nvidiactl", "nvidia0", "nvidia1", "nvidia2", "nvidia3"}
    uvm = {"nvidia-uvm", "nvidia-uvm-tools"}
    gpus.set_module(None)
    gpus.set_nodes(on_host=True)
    assert lab_gpu("module", "load", DRIVER_VERSION).returncode == 0
    assert gpus.nodes() == set(), "loading the module makes no node"
    assert smi("-L").stdout.count("NVIDIA L4") == 4
    assert gpus.nodes() == cards, "NVML makes those that it needs"
    assert cuda()["init"] == 999, "the module nvidia-uvm is not loaded"
    assert lab_gpu("module", "load", DRIVER_VERSION, "--name", "nvidia_uvm").returncode == 0
    assert gpus.nodes() == cards
    run = {"env": gpus.environment(nvml_library), "check": True}
    modprobe = compiler.modprobe_program(tmp_path / "nvidia-modprobe")
    subprocess.run([modprobe, "-u"], **run)
    assert gpus.nodes() == cards, "-u alone loads the module"
    subprocess.run([modprobe, "-c0", "-u"], **run)
    assert gpus.nodes() == cards | uvm
    for name in uvm:
        (gpus.path / "dev" / name).unlink()
    assert cuda() == {"init": 0, "version": 13000, "count": 4}
    assert gpus.nodes() == cards | uvm, "on the host CUDA makes them itself"


def test_a_module_in_use_by_another_stays(lab_gpu: Cuda, gpus: testing.LabRoot) -> None:
    lab_gpu("module", "load", DRIVER_VERSION, "--name", "nvidia_uvm")
    assert "in use. (by nvidia_uvm)" in lab_gpu("module", "unload").stderr
    lab_gpu("fault", "set", "module-not-loaded")
    assert not (gpus.path / "sys" / "nvidia_uvm").exists()
    lab_gpu("fault", "clear")
    assert (gpus.path / "sys" / "nvidia_uvm" / "version").read_text() == f"{DRIVER_VERSION}\n"
    assert lab_gpu("module", "unload", "--name", "nvidia_uvm").returncode == 0
    assert lab_gpu("module", "unload").returncode == 0


def test_the_module_may_load_late(lab_gpu: Cuda, gpus: testing.LabRoot) -> None:
    gpus.set_module(None)
    assert "needs a value" in lab_gpu("fault", "set", "module-loads-late").stderr
    assert lab_gpu("fault", "set", "module-loads-late=3600").returncode == 0
    assert lab_gpu("fault", "list").stdout == "host: module-loads-late=3600\n"
    assert (
        "could not insert 'nvidia_uvm': No such device"
        in lab_gpu("module", "load", DRIVER_VERSION, "--name", "nvidia_uvm").stderr
    )
    with pytest.raises(pynvml.NVMLError_DriverNotLoaded):
        pynvml.nvmlInit()
    lab_gpu("fault", "set", "module-loads-late=1")
    # As udev does it: at boot, when the card turns up.
    assert lab_gpu("module", "load", DRIVER_VERSION, "--boot").returncode == 0
    assert (gpus.path / "module").read_text() == f"{DRIVER_VERSION}\n"
    lab_gpu("fault", "clear")
    assert lab_gpu("fault", "list").stdout == ""
