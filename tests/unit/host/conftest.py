# SPDX-License-Identifier: Apache-2.0
"""For tests of what runs on the host."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.model import Moves
from fake_host import ServingHost, SmallDisk
from switch_host import SwitchHost


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


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwitchHost:
    return SwitchHost(tmp_path, monkeypatch)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwitchHost:
    """A host on which nothing was ever committed."""
    return SwitchHost(tmp_path, monkeypatch, first=True)


@pytest.fixture
def stopped(bench: SwitchHost) -> SwitchHost:
    """The committed generation without e2b."""
    bench.world.towards = 1
    bench.world.stop(Moves(stop=("e2b",)))
    return bench


@pytest.fixture
def host(tmp_path: Path) -> ServingHost:
    return ServingHost(tmp_path)
