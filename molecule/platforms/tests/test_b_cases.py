# SPDX-License-Identifier: Apache-2.0
"""States that only a real host has: refused or repaired, each said in words.

Every other state is in tests/unit/roles/test_driver_cases.py and tests/unit/doctor/test_host_facts.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import DEBIAN_12, DEBIAN_13, UBUNTU, Machine, Run

MARK = "/etc/apt/apt.conf.d/52vllm-edge-nvidia-driver"


def test_package_that_somebody_released(driver_play: Run) -> None:
    UBUNTU.run("apt-mark unhold nvidia-utils-580-server linux-image-generic")
    result = driver_play(UBUNTU.name)
    assert result.rc == 0, result.output[-3000:]
    held = ["linux-image-generic", "nvidia-utils-580-server"]
    assert result.changed == [f"nvidia_driver : Hold the driver packages ({name})" for name in held]


def test_driver_of_another_source(driver_play: Run) -> None:
    """As a host that this role never saw: Debian's driver, and NVIDIA's repository is wanted."""
    with DEBIAN_13.broken(f"mv {MARK} /root/mark", f"mv /root/mark {MARK}"):
        said = driver_play(
            DEBIAN_13.name,
            nvidia_driver_source="nvidia",
            nvidia_driver_branch="580",
            nvidia_driver_repository_url="http://vendor.invalid/cuda/",
        ).message
    assert "from another source than http://vendor.invalid/cuda/: libcuda1 550." in said
    assert "To keep that driver, set nvidia_driver_source to distribution. To replace it, remove them" in said


def test_docker_too_old(play: Run, tmp_path: Path) -> None:
    """Debian 12's own, with somebody's container in it: the rest of the host stage is refused, and nothing changed."""
    group = tmp_path / "hosts.yml"
    group.write_text(json.dumps({"gpu_hosts": {"hosts": {DEBIAN_12.name: {}}}}))
    start = "--start-at-task=container_runtime : Gather the distribution"
    said = play("playbooks/host.yml", DEBIAN_12.name, f"--inventory={group}", start).message
    assert "This host has Docker 20.10" in said and "does not support CDI" in said


@pytest.mark.parametrize("machine", [DEBIAN_12, DEBIAN_13, UBUNTU], ids=lambda machine: machine.name)
def test_nothing_of_somebody_else_was_touched_by_that(machine: Machine) -> None:
    assert machine.somebody() == machine.run("cat /root/somebody")
