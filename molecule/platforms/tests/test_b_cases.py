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
LAST_GPU = "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003"
BOARDS = "/var/lib/lab-gpu/gpus"


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


def test_half_installed(driver_play: Run) -> None:
    with DEBIAN_13.broken(
        "cd /tmp && apt-get download -q nvidia-smi && dpkg --unpack nvidia-smi_*.deb", "dpkg --configure -a"
    ):
        said = driver_play(DEBIAN_13.name).message
    assert "dpkg left nvidia-smi half installed" in said and '"dpkg --configure -a"' in said


@pytest.mark.thorough
def test_card_swapped(driver_play: Run) -> None:
    other = LAST_GPU.replace("f52a6b98", "00000000")

    def swap(one: str, two: str) -> str:
        return f"mv {BOARDS}/{one} {BOARDS}/{two} && sed -i s/{one}/{two}/ {BOARDS}/{two}/board"

    with UBUNTU.broken(swap(LAST_GPU, other), swap(other, LAST_GPU)):
        said = driver_play(UBUNTU.name).message
    assert LAST_GPU in said
    # The specification of the containers was made for the other card meanwhile.
    assert driver_play(UBUNTU.name).rc == 0


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
