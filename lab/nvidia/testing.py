# SPDX-License-Identifier: Apache-2.0
"""Simulated GPUs for test suites, without a container: a library, boards in a directory, claims, faults.

The unmodified nvidia-ml-py asks the loader for "libnvidia-ml.so.1". Two ways to answer:

  in this process    preload(library) once, before the first nvmlInit(). The loader answers a later request for the
                     name with the library that is already loaded under this soname. The root is read at each
                     nvmlInit() from LAB_GPU_ROOT, so monkeypatch.setenv("LAB_GPU_ROOT", str(lab.path)) chooses it.
                     One process has one library, hence one library version; change the module's instead.
  in a subprocess    subprocess.run(..., env=lab.environment(library)): LD_LIBRARY_PATH and LAB_GPU_ROOT. The loader
                     reads LD_LIBRARY_PATH at start only, so setting it in os.environ of a running process is no use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab.nvidia import compiler
from lab.nvidia.cards import HARDWARE, write_boards
from lab.nvidia.versions import DRIVER_VERSION

SLOTS = tuple(re.findall(r"^[0-9] (GPU-[0-9a-f-]+)", HARDWARE.read_text(), re.MULTILINE))
"""The UUIDs of every slot that a host may have."""
UUIDS = SLOTS[:4]
"""The reference's GPUs by index."""

HOLD = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o644)
fcntl.flock(fd, fcntl.LOCK_EX)
os.ftruncate(fd, 0)
os.write(fd, sys.argv[2].encode())
print("held", flush=True)
sys.stdin.read()
"""
"""What an engine's process does for its memory: lock a file of its own, say how much, keep it until it ends."""


def build_library(directory: Path) -> Path:
    """Compile the library into directory (0.5 s); returns the path of libnvidia-ml.so.1."""
    return compiler.nvml_library(directory / "libnvidia-ml.so.1", DRIVER_VERSION)


def build_cuda(directory: Path) -> Path:
    return compiler.cuda_library(directory / "libcuda.so.1", DRIVER_VERSION)


def build_smi(directory: Path) -> Path:
    return compiler.nvidia_smi(directory / "nvidia-smi")


def preload(library: Path) -> ctypes.CDLL:
    """Make this process's nvidia-ml-py use the library. Refuses when another one is loaded already."""
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libnvidia-ml.so" in line}
    if loaded - {str(library.resolve())}:
        raise RuntimeError(f"{', '.join(loaded)} is loaded in this process already; use a subprocess for another")
    return ctypes.CDLL(str(library.resolve()), mode=ctypes.RTLD_GLOBAL)


@dataclass(frozen=True)
class LabRoot:
    """Boards in a directory. A GPU is named by its index or its UUID."""

    path: Path

    def uuid(self, gpu: int | str) -> str:
        return SLOTS[gpu] if isinstance(gpu, int) else gpu

    def gpu(self, gpu: int | str) -> Path:
        return self.path / "gpus" / self.uuid(gpu)

    def environment(self, library: Path) -> dict[str, str]:
        """The environment of a subprocess that is to see these boards through the library."""
        return {**os.environ, "LAB_GPU_ROOT": str(self.path), "LD_LIBRARY_PATH": str(library.parent)}

    def set_module(self, version: str | None) -> None:
        """The loaded kernel module's version, None for not loaded."""
        if version is None:
            (self.path / "module").unlink(missing_ok=True)
        else:
            (self.path / "module").write_text(f"{version}\n")

    def set_nodes(self, *names: str) -> None:
        """From now on a GPU is there when its node is, and nobody makes a node, as in a container."""
        (self.path / "dev").mkdir(exist_ok=True)
        for name in names:
            (self.path / "dev" / name).touch()
        (self.path / "params").write_text("ModifyDeviceFiles: 0\n")

    def nodes(self) -> set[str]:
        return {path.name for path in (self.path / "dev").iterdir()}

    def set_fault(self, gpu: int | str, name: str, value: object = "") -> None:
        (self.gpu(gpu) / "faults" / name).write_text(f"{value}\n")

    def clear_fault(self, gpu: int | str, name: str) -> None:
        (self.gpu(gpu) / "faults" / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def claim(self, gpu: int | str, mib: int, name: str | None = None) -> Iterator[int]:
        """A process that holds mib MiB on the GPU for the length of the with block; gives its pid."""
        file = self.gpu(gpu) / "claims" / (name or f"claim-{os.urandom(4).hex()}")
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(file), str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            if process.stdout.readline() != "held\n":
                raise RuntimeError("the process that was to hold the claim ended")
            yield process.pid
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def create_root(path: Path, gpus: int | str = 4) -> LabRoot:
    """A directory with so many of the reference's GPUs, or those of a text as in VLLM_EDGE_LAB_GPUS, and the driver's
    module loaded."""
    write_boards(path, gpus if isinstance(gpus, str) else f"{gpus}xL4")
    root = LabRoot(path)
    root.set_module(DRIVER_VERSION)
    return root
