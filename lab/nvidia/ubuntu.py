# SPDX-License-Identifier: Apache-2.0
"""Ubuntu's archive as far as a driver goes, by its real names: kernels, prebuilt signed modules, user space.

The kernel is that of the machine which runs the lab, since its containers have no other; Ubuntu's have other names.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator
from pathlib import Path

from lab.nvidia import compiler
from lab.nvidia.packages import LDCONFIG, LIBRARIES, Package, text
from lab.nvidia.versions import UBUNTU_VERSIONS

SUITE = "noble"
REVISION = "0ubuntu0.24.04.1"
SIGNER = "Canonical Ltd. Kernel Module Signing"
KERNEL = platform.release()
KERNEL_VERSION = "6.8.0-79.79"
"""Of the packages alone: the real ones are versioned as their kernel is."""
MAGIC = b"~Module signature appended~\n"


def sign(module: Path, signer: str = SIGNER) -> Path:
    """Append a signature that modinfo reads the signer from. It proves nothing: no kernel loads this module."""
    name, key, signature = signer.encode(), bytes(20), bytes(256)
    # Algorithm (RSA), hash (SHA-512), kind (X.509, which has the name beside it), and the lengths, the last in full.
    tail = struct.pack(">BBBBB3xI", 1, 6, 1, len(name), len(key), len(signature))
    module.write_bytes(module.read_bytes() + name + key + signature + tail + MAGIC)
    return module


def only_one(name: str) -> dict[str, str]:
    """Of the same package of two branches one can be installed."""
    return dict.fromkeys(("Provides", "Conflicts", "Replaces"), name)


def kernel() -> Iterator[Package]:
    """What a server has installed before any driver."""
    yield Package(
        f"linux-image-{KERNEL}", KERNEL_VERSION, "Signed kernel image generic",
        files={f"boot/vmlinuz-{KERNEL}": "Not a kernel: the lab's containers run that of their machine.\n"},
    )  # fmt: skip
    yield Package(
        "linux-image-generic", KERNEL_VERSION, "Generic Linux kernel image", {"Depends": f"linux-image-{KERNEL}"}
    )


def driver(version: str, scratch: Path) -> Iterator[Package]:
    """The packages of one release of the branch's server driver, compiled into scratch."""
    branch = version.split(".")[0]
    binaries = scratch / f"ubuntu-{version}"
    mine = f"{version}-{REVISION}"
    same = f"(= {mine})"
    compiler.nvml_library(binaries / "libnvidia-ml.so", version)
    compiler.cuda_library(binaries / "libcuda.so", version)
    compiler.nvidia_smi(binaries / "nvidia-smi")
    compiler.persistence_daemon(binaries / "nvidia-persistenced")
    modules = {
        name: sign(compiler.kernel_module(binaries / f"{name}.ko", name.replace("-", "_"), depends, version))
        for name, depends in (("nvidia", ""), ("nvidia-uvm", "nvidia"), ("nvidia-modeset", "nvidia"))
    }

    yield Package(
        f"libnvidia-compute-{branch}-server", mine, "NVIDIA libcompute package", only_one("libnvidia-compute"),
        {
            f"{LIBRARIES}/libnvidia-ml.so.{version}": binaries / "libnvidia-ml.so",
            f"{LIBRARIES}/libcuda.so.{version}": binaries / "libcuda.so",
        },
        {
            f"{LIBRARIES}/libnvidia-ml.so.1": f"libnvidia-ml.so.{version}",
            f"{LIBRARIES}/libcuda.so.1": f"libcuda.so.{version}",
            f"{LIBRARIES}/libcuda.so": "libcuda.so.1",
        },
        LDCONFIG,
    )  # fmt: skip
    yield Package(
        f"nvidia-kernel-common-{branch}-server", mine, "Shared files used with the kernel module",
        {"Depends": "kmod", **only_one("nvidia-kernel-common")},
        {"usr/lib/modprobe.d/nvidia-graphics-drivers.conf": "blacklist nouveau\nalias nouveau off\n"},
    )  # fmt: skip
    yield Package(
        f"nvidia-compute-utils-{branch}-server", mine, "NVIDIA compute utilities",
        {"Depends": f"passwd, libnvidia-compute-{branch}-server {same}", **only_one("nvidia-compute-utils")},
        {
            "usr/bin/nvidia-persistenced": binaries / "nvidia-persistenced",
            "usr/lib/systemd/system/nvidia-persistenced.service": text("driver/ubuntu-persistenced.service"),
        },
        scripts={"postinst": text("driver/ubuntu-persistenced.postinst")},
    )  # fmt: skip
    yield Package(
        f"nvidia-utils-{branch}-server", mine, "NVIDIA Server Driver support binaries",
        {"Depends": f"libnvidia-compute-{branch}-server {same}", **only_one("nvidia-utils")},
        {"usr/bin/nvidia-smi": binaries / "nvidia-smi"},
    )  # fmt: skip
    yield Package(
        f"nvidia-headless-no-dkms-{branch}-server-open", mine, "NVIDIA headless metapackage - no DKMS",
        {
            "Depends": f"libnvidia-compute-{branch}-server {same}, nvidia-compute-utils-{branch}-server {same}, "
            f"nvidia-kernel-common-{branch}-server {same}"
        },
    )  # fmt: skip
    prebuilt = f"linux-modules-nvidia-{branch}-server-open"
    yield Package(
        f"{prebuilt}-{KERNEL}", KERNEL_VERSION, f"Linux kernel nvidia modules for version {KERNEL}",
        {"Depends": f"linux-image-{KERNEL}, nvidia-kernel-common-{branch}-server"},
        {f"lib/modules/{KERNEL}/kernel/nvidia-{branch}srv-open/{name}.ko": path for name, path in modules.items()},
        scripts={"postinst": text("driver/ubuntu-modules.postinst").replace("@KERNEL@", KERNEL)},
    )  # fmt: skip
    yield Package(
        f"{prebuilt}-generic", KERNEL_VERSION, "Extra drivers for nvidia for the generic flavour",
        {"Depends": f"{prebuilt}-{KERNEL}"},
    )  # fmt: skip


def archive(scratch: Path) -> dict[str, list[Package]]:
    """Packages by component."""
    return {
        "main": list(kernel()),
        "restricted": [package for version in UBUNTU_VERSIONS for package in driver(version, scratch)],
    }
