# SPDX-License-Identifier: Apache-2.0
"""For tests of what runs on the host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from fake_host import SmallDisk


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    return HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield SmallDisk(disk)
    subprocess.run(["umount", str(disk)], timeout=20, check=True)
