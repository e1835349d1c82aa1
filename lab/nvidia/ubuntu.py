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
from lab.nvidia.versions import UBUNTU_UPDATE, UBUNTU_VERSIONS

SUITE, UPDATES = "noble", "noble-updates"
REVISION = "0ubuntu0.24.04.1"
SIGNER = "Canonical Ltd. Kernel Module Signing"
KERNEL = platform.release()
KERNEL_VERSION = "6.8.0-79.79"
"""Of the packages alone: the real ones are versioned as their kernel is."""
NEWER_KERNEL, NEWER_KERNEL_VERSION = f"{KERNEL}-100", "6.8.0-100.100"
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


def kernel(release: str, version: str) -> Iterator[Package]:
    """A kernel, and the metapackages that bring it to a server."""
    nothing = "Not a kernel: the lab's containers run that of their machine.\n"
    yield Package(
        f"linux-modules-{release}", version, "Linux kernel extra modules",
        files={f"lib/modules/{release}/modules.order": nothing},
    )  # fmt: skip
    yield Package(
        f"linux-image-{release}", version, "Signed kernel image generic", {"Depends": f"linux-modules-{release}"},
        {f"boot/vmlinuz-{release}": nothing},
    )  # fmt: skip
    yield Package("linux-image-generic", version, "Generic Linux kernel image", {"Depends": f"linux-image-{release}"})
    yield Package(
        "linux-generic", version, "Complete Generic Linux kernel", {"Depends": f"linux-image-generic (= {version})"}
    )


def driver(version: str, scratch: Path, kernel: str, kernel_version: str) -> Iterator[Package]:
    """The packages of one release of the branch's server driver, with modules for one kernel, compiled into scratch.

    Who depends on whom is that of debian/control of github.com/canonical/nvidia-graphics-drivers, 580-server-noble;
    elementary/settings-system#233 and linuxmint/mintdrivers#71 show apt asking for one release for packages of modules.
    """
    branch = version.split(".")[0]
    binaries = scratch / f"ubuntu-{version}"
    mine = f"{version}-{REVISION}"
    same = f"(= {mine})"
    common = f"nvidia-kernel-common-{branch}-server"
    of_this_release = f"{common} (<= {version}-1), {common} (>= {version})"
    compiler.nvml_library(binaries / "libnvidia-ml.so", version)
    compiler.cuda_library(binaries / "libcuda.so", version)
    compiler.nvidia_smi(binaries / "nvidia-smi")
    compiler.driver_program(binaries / "nvidia-persistenced")
    modules = {
        name: sign(compiler.kernel_module(binaries / f"{name}.ko", name.replace("-", "_"), depends, version))
        for name, depends in (("nvidia", ""), ("nvidia-uvm", "nvidia"), ("nvidia-modeset", "nvidia"))
    }

    yield Package(
        f"libnvidia-compute-{branch}-server", mine, "NVIDIA libcompute package",
        {"Depends": f"{common}-{version}", **only_one("libnvidia-compute")},
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
    yield Package(f"nvidia-firmware-{branch}-server-{version}", mine, "Firmware files used by the kernel module")
    yield Package(
        common, mine, "Shared files used with the kernel module",
        {
            "Depends": f"kmod, nvidia-firmware-{branch}-server-{version}",
            "Conflicts": "nvidia-kernel-common", "Replaces": "nvidia-kernel-common",
            "Provides": f"nvidia-kernel-common, {common}-{version}",
        },
        {"usr/lib/modprobe.d/nvidia-graphics-drivers.conf": "blacklist nouveau\nalias nouveau off\n"},
    )  # fmt: skip
    yield Package(
        f"nvidia-compute-utils-{branch}-server", mine, "NVIDIA compute utilities",
        {"Depends": f"passwd, libnvidia-compute-{branch}-server", **only_one("nvidia-compute-utils")},
        {
            "usr/bin/nvidia-persistenced": binaries / "nvidia-persistenced",
            "usr/lib/systemd/system/nvidia-persistenced.service": text("driver/ubuntu-persistenced.service"),
        },
        scripts={"postinst": text("driver/ubuntu-persistenced.postinst")},
    )  # fmt: skip
    yield Package(
        f"nvidia-utils-{branch}-server", mine, "NVIDIA Server Driver support binaries",
        {"Depends": f"{common}-{version}", **only_one("nvidia-utils")},
        {"usr/bin/nvidia-smi": binaries / "nvidia-smi"},
    )  # fmt: skip
    yield Package(
        f"nvidia-headless-no-dkms-{branch}-server-open", mine, "NVIDIA headless metapackage - no DKMS",
        {
            "Depends": f"{of_this_release}, libnvidia-compute-{branch}-server {same}, "
            f"nvidia-compute-utils-{branch}-server {same}"
        },
    )  # fmt: skip
    prebuilt = f"linux-modules-nvidia-{branch}-server-open"
    depmod = text("driver/ubuntu-modules.postinst").replace("@KERNEL@", kernel)
    yield Package(
        f"{prebuilt}-{kernel}", kernel_version, f"Linux kernel nvidia modules for version {kernel}",
        {"Depends": f"linux-image-{kernel}, {of_this_release}"},
        {f"lib/modules/{kernel}/kernel/nvidia-{branch}srv-open/{name}.ko": path for name, path in modules.items()},
        scripts={"postinst": depmod, "postrm": depmod},
    )  # fmt: skip
    yield Package(
        f"{prebuilt}-generic", kernel_version, "Extra drivers for nvidia for the generic flavour",
        {"Depends": f"{prebuilt}-{kernel} (= {kernel_version}), {of_this_release}"},
    )  # fmt: skip


def archive(scratch: Path) -> dict[str, dict[str, list[Package]]]:
    """Packages by suite and component: what the release had, and what came later."""
    first, later = (KERNEL, KERNEL_VERSION), (NEWER_KERNEL, NEWER_KERNEL_VERSION)
    return {
        SUITE: {
            "main": list(kernel(*first)),
            "restricted": [package for version in UBUNTU_VERSIONS for package in driver(version, scratch, *first)],
        },
        UPDATES: {"main": list(kernel(*later)), "restricted": list(driver(UBUNTU_UPDATE, scratch, *later))},
    }
