#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the vendors' apt repositories of the lab, and the part of Ubuntu's archive that has drivers.

    python3 lab/nvidia/build.py --out DIR

DIR then holds what the vendors' site serves at its root:
    cuda/repos/debian13/x86_64/            driver packages, <short id>.pub
    cuda/repos/debian13-from-590/x86_64/   the same without the branches before 590
    libnvidia-container/stable/deb/amd64/  container toolkit packages
    libnvidia-container/gpgkey
    ubuntu/                                Ubuntu's archive as far as a driver goes, and its key archive-keyring.asc
    fingerprints.json                      of the two signing keys, with their paths
The keys are made once, in DIR/../keys. Nothing is done when nothing that goes into the packages has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from lab.nvidia import repository, ubuntu
from lab.nvidia.packages import cuda_repository, toolkit_repository

BUILD_PACKAGES = ("gcc", "libc6-dev", "binutils", "dpkg", "gnupg")
"""The Debian (or Ubuntu) packages that this needs."""

CUDA = "cuda/repos/debian13/x86_64"
CUDA_LATER = "cuda/repos/debian13-from-590/x86_64"  # pragma: allowlist secret (a path)
"""A repository that was begun late, as NVIDIA's for Debian 13 was (NVIDIA/cuda-repo-management#38)."""
TOOLKIT = "libnvidia-container"
UBUNTU = "ubuntu"
STAMP = ".inputs"


def inputs_digest(*keys: repository.Key) -> str:
    """Of everything that goes into the repositories: these sources, the compiler's machine and kernel, the keys."""
    digest = hashlib.sha256(f"{platform.machine()} {ubuntu.KERNEL}".encode())
    for path in sorted(path for path in HERE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{path.relative_to(HERE)}\0".encode() + path.read_bytes())
    for key in keys:
        digest.update(key.secret.read_bytes())
    return digest.hexdigest()


def build(scratch: Path, cuda_key: repository.Key, toolkit_key: repository.Key, archive_key: repository.Key) -> None:
    with tempfile.TemporaryDirectory() as binaries:
        cuda = list(cuda_repository(Path(binaries)))
        later = [package for package in cuda if package.version.startswith("590")]
        for path, packages in ((CUDA, cuda), (CUDA_LATER, later)):
            repository.write(scratch / path, packages, cuda_key, "NVIDIA")
        for suite, components in ubuntu.archive(Path(binaries)).items():
            repository.write_archive(scratch / UBUNTU, suite, components, archive_key, "Ubuntu")
    (scratch / UBUNTU / "archive-keyring.asc").write_bytes(archive_key.public())
    toolkit_packages = list(toolkit_repository())
    repository.write(scratch / TOOLKIT / "stable/deb/amd64", toolkit_packages, toolkit_key, "https://nvidia.github.io")

    cuda_fingerprint, toolkit_fingerprint = cuda_key.fingerprint, toolkit_key.fingerprint
    cuda_public = f"{CUDA}/{cuda_fingerprint[-8:].lower()}.pub"
    toolkit_public = f"{TOOLKIT}/gpgkey"
    (scratch / cuda_public).write_bytes(cuda_key.public())
    (scratch / toolkit_public).write_bytes(toolkit_key.public())
    fingerprints = {
        "cuda": {"fingerprint": cuda_fingerprint, "key": cuda_public},
        "libnvidia-container": {"fingerprint": toolkit_fingerprint, "key": toolkit_public},
    }
    (scratch / "fingerprints.json").write_text(json.dumps(fingerprints, indent=2) + "\n")


def publish(scratch: Path, out: Path) -> None:
    """Bring out to scratch's content file by file: a server that has out mounted keeps the same directories."""
    wanted = {path.relative_to(scratch) for path in scratch.rglob("*") if path.is_file()}
    for name in sorted(wanted, key=lambda name: name.name in ("InRelease", "Release", "Release.gpg")):
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(f".{target.name}.new")
        shutil.copyfile(scratch / name, staged)
        staged.chmod(0o644)
        staged.replace(target)
    for path in out.rglob("*"):
        if path.is_file() and path.relative_to(out) not in wanted:
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the lab's driver and toolkit repositories.")
    parser.add_argument("--out", type=Path, required=True, help="the web root to write")
    out = parser.parse_args().out.resolve()

    if platform.machine() != "x86_64":
        print(f"the lab's driver packages are for x86-64, this machine is {platform.machine()}", file=sys.stderr)
        return 1
    missing = [tool for tool in ("gcc", "readelf", "dpkg-deb", "gpg") if shutil.which(tool) is None]
    if missing:
        print(f"{', '.join(missing)} not found: apt-get install {' '.join(BUILD_PACKAGES)}", file=sys.stderr)
        return 1

    keys = out.parent / "keys"
    cuda_key = repository.Key(keys / "cuda.asc", "cudatools (vllm-edge lab) <cudatools@lab.invalid>")
    toolkit_key = repository.Key(keys / "libnvidia-container.asc", "toolkit (vllm-edge lab) <toolkit@lab.invalid>")
    archive_key = repository.Key(keys / "ubuntu.asc", "Ubuntu Archive (vllm-edge lab) <archive@lab.invalid>")
    for key in (cuda_key, toolkit_key, archive_key):
        key.ensure()

    stamp = out / STAMP
    digest = inputs_digest(cuda_key, toolkit_key, archive_key)
    if stamp.exists() and stamp.read_text() == digest:
        return 0
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        build(Path(scratch), cuda_key, toolkit_key, archive_key)
        publish(Path(scratch), out)
    stamp.write_text(digest)
    os.chmod(out, 0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())
