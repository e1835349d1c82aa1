# SPDX-License-Identifier: Apache-2.0
"""The vendors' packages by their real names: what is in them, and what they ask of each other."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.nvidia import compiler
from lab.nvidia.versions import CUDA_VERSIONS, DRIVER_BRANCHES, DRIVER_VERSIONS, TOOLKIT_VERSIONS

HERE = Path(__file__).parent
LIBRARIES = "usr/lib/x86_64-linux-gnu"
EPOCH = 1_790_000_000
"""Every file's time, so that the same input gives the same package."""


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    description: str
    relations: Mapping[str, str] = field(default_factory=dict)
    """Depends, Recommends, ... as in a control file."""
    files: Mapping[str, Path | str] = field(default_factory=dict)
    """Path in the package -> where the content is, or the content."""
    links: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)
    architecture: str = "amd64"

    @property
    def file_name(self) -> str:
        return f"{self.name}_{self.version}_{self.architecture}.deb"

    @property
    def control(self) -> str:
        fields = {
            "Package": self.name,
            "Version": self.version,
            "Architecture": self.architecture,
            "Section": "non-free/libs" if self.name.startswith("lib") else "non-free/utils",
            "Priority": "optional",
            "Maintainer": "NVIDIA CORPORATION <cudatools@nvidia.com>",
            **self.relations,
            "Description": f"{self.description}\n Simulated: made by vllm-edge's lab, runs no GPU.",
        }
        return "".join(f"{key}: {value}\n" for key, value in fields.items())

    def build(self, directory: Path) -> Path:
        output = directory / self.file_name
        with tempfile.TemporaryDirectory() as scratch:
            tree = Path(scratch)
            tree.chmod(0o755)
            self._write(tree)
            subprocess.run(
                ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", tree, output],
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)},
            )
        return output

    def _write(self, tree: Path) -> None:
        debian = tree / "DEBIAN"
        debian.mkdir()
        (debian / "control").write_text(self.control)
        for name, text in self.scripts.items():
            (debian / name).write_text(text)
            (debian / name).chmod(0o644 if name == "triggers" else 0o755)
        if configuration := [path for path in self.files if path.startswith("etc/") and "systemd" not in path]:
            (debian / "conffiles").write_text("".join(f"/{path}\n" for path in configuration))
        for name, content in self.files.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode() if isinstance(content, str) else content.read_bytes()
            path.write_bytes(data)
            path.chmod(0o755 if data.startswith((b"#!", b"\x7fELF")) and not name.endswith((".ko", ".c")) else 0o644)
        for name, target in self.links.items():
            path = tree / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(target)
        for path in tree.rglob("*"):
            if path.is_dir():
                path.chmod(0o755)


def text(name: str, version: str = "") -> str:
    return (HERE / name).read_text().replace("@VERSION@", version)


LDCONFIG = {"triggers": "activate-noawait ldconfig\n"}


def driver(version: str, scratch: Path) -> Iterator[Package]:
    """The packages of one driver release, compiled into scratch."""
    branch = version.split(".")[0]
    binaries = scratch / version
    debian_version = f"{version}-1"
    same = f"(= {debian_version})"

    compiler.nvml_library(binaries / "libnvidia-ml.so", version, CUDA_VERSIONS[branch])
    compiler.cuda_library(binaries / "libcuda.so", version, CUDA_VERSIONS[branch])
    compiler.nvidia_smi(binaries / "nvidia-smi")
    compiler.driver_program(binaries / "nvidia-persistenced")
    compiler.driver_program(binaries / "nvidia-modprobe")
    modules = {
        name: compiler.kernel_module(binaries / f"{name}.ko", name.replace("-", "_"), depends, version)
        for name, depends in (("nvidia", ""), ("nvidia-uvm", "nvidia"), ("nvidia-modeset", "nvidia"))
    }

    yield Package(
        "libnvidia-ml1", debian_version, "NVIDIA Management Library (NVML) runtime library",
        files={f"{LIBRARIES}/libnvidia-ml.so.{version}": binaries / "libnvidia-ml.so"},
        links={f"{LIBRARIES}/libnvidia-ml.so.1": f"libnvidia-ml.so.{version}"},
        scripts=LDCONFIG,
    )  # fmt: skip
    yield Package(
        "libcuda1", debian_version, "NVIDIA CUDA driver runtime library",
        # Of Debian's contrib, as in debian/control of github.com/NVIDIA/debian-packaging-nvidia-driver.
        {"Depends": "nvidia-support"},
        files={f"{LIBRARIES}/libcuda.so.{version}": binaries / "libcuda.so"},
        links={
            f"{LIBRARIES}/libcuda.so.1": f"libcuda.so.{version}",
            f"{LIBRARIES}/libcuda.so": "libcuda.so.1",
        },
        scripts=LDCONFIG,
    )  # fmt: skip
    yield Package(
        "nvidia-smi", debian_version, "NVIDIA System Management Interface",
        {"Depends": f"libnvidia-ml1 {same}"},
        {"usr/bin/nvidia-smi": binaries / "nvidia-smi"},
    )  # fmt: skip
    yield Package(
        "nvidia-persistenced", debian_version, "Daemon to maintain persistent software state in the NVIDIA driver",
        {"Depends": "passwd"},
        {
            "usr/bin/nvidia-persistenced": binaries / "nvidia-persistenced",
            "usr/lib/systemd/system/nvidia-persistenced.service": text("driver/nvidia-persistenced.service"),
        },
        scripts={"postinst": text("driver/persistenced.postinst"), "prerm": text("driver/persistenced.prerm")},
    )  # fmt: skip
    yield Package(
        "nvidia-modprobe", debian_version, "Utility to load NVIDIA kernel modules and create device nodes",
        {"Depends": "kmod"},
        {"usr/bin/nvidia-modprobe": binaries / "nvidia-modprobe"},
        # A setuid mode needs root to survive the packing.
        scripts={"postinst": "#!/bin/sh\nchmod 4755 /usr/bin/nvidia-modprobe\n"},
    )  # fmt: skip
    yield Package(
        "nvidia-kernel-support", debian_version, "NVIDIA binary kernel module support files",
        {"Depends": "kmod"},
        {
            "usr/lib/modprobe.d/nvidia-blacklists-nouveau.conf": "blacklist nouveau\n",
            "etc/modprobe.d/nvidia-lab.conf": text("driver/nvidia-lab-modprobe.conf"),
            "usr/lib/nvidia/load-module": text("driver/load-module"),
            "usr/lib/nvidia/unload-module": text("driver/unload-module"),
            "usr/lib/systemd/system/nvidia-module-load.service": text("driver/nvidia-module-load.service"),
        },
    )  # fmt: skip
    yield Package(
        "nvidia-kernel-open-dkms", debian_version, "NVIDIA binary kernel module DKMS source (open flavor)",
        # The real one depends on dkms, which brings a compiler; the simulated module is compiled already.
        {"Depends": f"kmod, nvidia-kernel-support {same}", "Provides": f"nvidia-kernel-{version}"},
        {f"usr/src/nvidia-{version}/{name}.ko": path for name, path in modules.items()},
        scripts={"postinst": text("driver/kernel.postinst", version), "prerm": text("driver/kernel.prerm")},
    )  # fmt: skip
    yield Package(
        "nvidia-driver-cuda", debian_version, "NVIDIA driver metapackage (CUDA-related components)",
        {
            "Depends": f"libcuda1 {same}, libnvidia-ml1 {same}, nvidia-smi {same}, nvidia-persistenced {same}, "
            f"nvidia-modprobe {same}",
            "Recommends": f"nvidia-kernel-open-dkms {same}",
        },
    )  # fmt: skip
    yield pin(version, f"{version}-1")


def pin(pinned: str, version: str) -> Package:
    """A preferences file that keeps apt on a branch ("580") or on one release."""
    pattern = f"{pinned}-*" if "." in pinned else f"{pinned}.*"
    return Package(
        f"nvidia-driver-pinning-{pinned}", version, f"Pin the NVIDIA driver to {pinned}",
        dict.fromkeys(("Provides", "Conflicts", "Replaces"), "nvidia-driver-pinning"),
        {
            # One name for all: apt overlooks a file whose name ends like "-580.173.02", taking ".02" for its kind.
            "etc/apt/preferences.d/nvidia-driver-pinning": (
                "Package: nvidia-* libnvidia-* libcuda1 cuda-drivers*\n"
                f"Pin: version {pattern}\n"
                "Pin-Priority: 1000\n"
            )
        },
        architecture="all",
    )  # fmt: skip


def toolkit(version: str) -> Iterator[Package]:
    """The four packages of one release of the container toolkit, which ask for each other's exact version."""
    debian_version = f"{version}-1"
    # Since 1.20 the units are where debhelper looks for them, and its scripts enable and start them.
    by_debhelper = version.startswith("1.20")
    units = "lib/systemd/system" if by_debhelper else "etc/systemd/system"
    upstream = HERE / "toolkit" / "upstream"
    same = f"(= {debian_version})"
    yield Package(
        "libnvidia-container1", debian_version, "NVIDIA container runtime library",
        files={"usr/share/doc/libnvidia-container1/README": "The lab offers GPUs by CDI, which needs no library.\n"},
    )  # fmt: skip
    yield Package(
        "libnvidia-container-tools", debian_version, "NVIDIA container runtime library (command-line tools)",
        {"Depends": f"libnvidia-container1 {same}"},
        {"usr/bin/nvidia-container-cli": text("toolkit/nvidia-container-cli", version)},
    )  # fmt: skip
    yield Package(
        "nvidia-container-toolkit-base", debian_version, "NVIDIA Container Toolkit Base",
        {"Depends": "python3"},
        {
            "usr/bin/nvidia-ctk": text("toolkit/nvidia-ctk", version),
            "usr/bin/nvidia-cdi-hook": text("toolkit/nvidia-cdi-hook", version),
            "usr/bin/nvidia-container-runtime": text("toolkit/nvidia-container-runtime", version),
            f"{units}/nvidia-cdi-refresh.service": upstream / version / "nvidia-cdi-refresh.service",
            f"{units}/nvidia-cdi-refresh.path": upstream / "nvidia-cdi-refresh.path",
            "etc/nvidia-container-toolkit/nvidia-cdi-refresh.env": upstream / "nvidia-cdi-refresh.env",
        },
        scripts={
            "postinst": text("toolkit/postinst-debhelper" if by_debhelper else "toolkit/postinst"),
            "prerm": text("toolkit/prerm"),
        },
    )  # fmt: skip
    yield Package(
        "nvidia-container-toolkit", debian_version, "NVIDIA Container toolkit",
        {
            "Depends": f"nvidia-container-toolkit-base {same}, libnvidia-container-tools {same}, "
            "libnvidia-container-tools (<< 2.0.0)"
        },
        {"usr/bin/nvidia-container-runtime-hook": text("toolkit/nvidia-container-runtime-hook")},
    )  # fmt: skip


def cuda_repository(scratch: Path) -> Iterator[Package]:
    for version in DRIVER_VERSIONS:
        yield from driver(version, scratch)
    for branch in DRIVER_BRANCHES:
        yield pin(branch, f"{branch}-1")


def toolkit_repository() -> Iterator[Package]:
    for version in TOOLKIT_VERSIONS:
        yield from toolkit(version)
