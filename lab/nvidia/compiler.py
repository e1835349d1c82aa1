# SPDX-License-Identifier: Apache-2.0
"""Compiles the C parts and checks that they run on the oldest system of the lab.

The compiler is the controller's, which may be newer than the containers that load the result. What a program needs of
the C library is decided by the versions of the symbols it binds, so that is looked at, and a build that needs more
than Debian 12 offers is refused instead of failing later inside a container.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / "nvml"
DRIVER = Path(__file__).parent / "driver"
OLDEST_GLIBC = (2, 36)
"""Debian 12's. Ubuntu 24.04 has 2.39, whose headers bind strtol and scanf to 2.38 under _GNU_SOURCE: hence -std=c11."""

FLAGS = ["-std=c11", "-O2", "-fPIC", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=0", "-fno-stack-protector", f"-I{SOURCES}"]


def run(*argv: str | Path) -> str:
    result = subprocess.run([str(arg) for arg in argv], capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, argv))} ended with {result.returncode}:\n{result.stderr.strip()}")
    return result.stdout


def needed_glibc(binary: Path) -> tuple[int, ...]:
    """The newest GLIBC_x.y symbol version that the binary binds."""
    versions = re.findall(r"Name: GLIBC_([0-9.]+)", run("readelf", "--version-info", "--wide", binary))
    return max(tuple(int(part) for part in version.split(".")) for version in versions)


def check_glibc(binary: Path) -> None:
    needed = needed_glibc(binary)
    if needed > OLDEST_GLIBC:
        raise RuntimeError(
            f"{binary.name} needs glibc {'.'.join(map(str, needed))}, "
            f"Debian 12 has {'.'.join(map(str, OLDEST_GLIBC))}: "
            "a newer header bound a newer symbol; readelf --dyn-syms shows which"
        )


def _compile(output: Path, source: Path, *flags: str) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    run("gcc", *FLAGS, *flags, "-o", output, source)
    return output


def nvml_library(output: Path, version: str, cuda_version: int = 13000) -> Path:
    """libnvidia-ml.so.<version>; its soname makes an already loaded copy answer for libnvidia-ml.so.1."""
    return program(
        output, SOURCES / "nvml.c", "-fvisibility=hidden", "-shared", "-Wl,-soname,libnvidia-ml.so.1",
        f'-DDRIVER_VERSION="{version}"', f"-DCUDA_VERSION={cuda_version}",
    )  # fmt: skip


def cuda_library(output: Path, version: str, cuda_version: int = 13000, *, compat: bool = False) -> Path:
    """libcuda.so.<version>: devices, contexts and memory of the boards, and nothing that computes.

    With compat it is an image's forward-compatibility library, which goes with older kernel modules, too.
    """
    return program(
        output, SOURCES / "cuda.c", "-fvisibility=hidden", "-shared", "-Wl,-soname,libcuda.so.1",
        f'-DDRIVER_VERSION="{version}"', f"-DCUDA_VERSION={cuda_version}", *(["-DCOMPAT"] if compat else []),
    )  # fmt: skip


def program(output: Path, source: Path, *flags: str) -> Path:
    _compile(output, source, *flags)
    check_glibc(output)
    return output


def nvidia_smi(output: Path) -> Path:
    return program(output, SOURCES / "nvidia-smi.c", "-ldl")


def driver_program(output: Path) -> Path:
    return program(output, DRIVER / f"{output.name}.c")


def kernel_module(output: Path, name: str, depends: str, version: str) -> Path:
    """A relocatable object with the section that modinfo and depmod read."""
    defines = (f'-DDRIVER_VERSION="{version}"', f'-DMODULE_NAME="{name}"', f'-DMODULE_DEPENDS="{depends}"')
    return _compile(output, DRIVER / "module.c", "-c", *defines)
