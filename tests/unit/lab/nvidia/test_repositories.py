# SPDX-License-Identifier: Apache-2.0
"""The vendors' repositories: signed, and complete."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.nvidia import build

NVIDIA = Path(build.__file__).parent

TOOLKIT = "libnvidia-container/stable/deb/amd64"


def unpack(repository: Path, package: str, target: Path) -> Path:
    subprocess.run(["dpkg-deb", "-x", repository / package, target], check=True)
    return target


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "units", "has", "has_not"),
    [
        ("1.18.2", "etc", ["Restart=on-failure", "StartLimitBurst=5"], ["nvidia-smi -L", "create-device-nodes"]),
        ("1.19.0", "etc", ["After=multi-user.target"], ["Restart=", "create-device-nodes"]),
        ("1.20.0", "lib", ["nvidia-smi -L", "Restart=on-failure"], ["After=", "create-device-nodes"]),
        ("1.20.0+8269969f", "lib", ["create-device-nodes --control-devices --load-kernel-modules"], ["After="]),
    ],
)
def test_each_toolkit_has_its_own_units(
    repositories: Path, tmp_path: Path, release: str, units: str, has: list[str], has_not: list[str]
) -> None:
    unpack(repositories / TOOLKIT, f"nvidia-container-toolkit-base_{release}-1_amd64.deb", tmp_path)
    service = (tmp_path / units / "systemd/system/nvidia-cdi-refresh.service").read_text()
    path = (tmp_path / units / "systemd/system/nvidia-cdi-refresh.path").read_text()
    assert "Copyright (c) 2025, NVIDIA CORPORATION" in service and "Licensed under the Apache License" in service
    for text in ("Environment=NVIDIA_CTK_CDI_OUTPUT_FILE_PATH=/var/run/cdi/nvidia.yaml", *has):
        assert text in service
    assert not [text for text in has_not if text in service]
    assert "PathChanged=/lib/modules/%v/modules.dep" in path
    rule = tmp_path / "lib/udev/rules.d/99-nvidia-cdi-refresh.rules"
    assert rule.exists() is ("+" in release)
    version = subprocess.run(
        [sys.executable, tmp_path / "usr/bin/nvidia-ctk", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout == f"NVIDIA Container Toolkit CLI version {release}\n"
