# SPDX-License-Identifier: Apache-2.0
"""States of a host that the role meets: refused or repaired, each said in words. docs/driver.md has the whole list."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import DEBIAN_12, DEBIAN_13, UBUNTU, Machine, Run

Seen = Callable[[str], None]
MARK = "/etc/apt/apt.conf.d/52vllm-edge-nvidia-driver"
LAST_GPU = "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003"
BOARDS = "/var/lib/lab-gpu/gpus"
EFI = "/sys/firmware/efi/efivars"
# sysfs takes no files: a tmpfs over it does.
SECURE_BOOT = (
    f"mount -t tmpfs tmpfs /sys/firmware && mkdir -p {EFI} && "
    f"printf '\\006\\000\\000\\000\\001' > {EFI}/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
)


def test_package_that_somebody_released(driver_play: Run, seen: Seen) -> None:
    UBUNTU.run("apt-mark unhold nvidia-utils-580-server linux-image-generic")
    result = driver_play(UBUNTU.name)
    assert result.rc == 0, result.output[-3000:]
    held = ["linux-image-generic", "nvidia-utils-580-server"]
    assert result.changed == [f"nvidia_driver : Hold the driver packages ({name})" for name in held]
    seen("it is held again")


def test_driver_of_another_source(driver_play: Run, seen: Seen) -> None:
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
    seen(said)


def test_source_changed_in_the_inventory(driver_play: Run, seen: Seen) -> None:
    said = driver_play(
        UBUNTU.name, nvidia_driver_source="nvidia", nvidia_driver_repository_url="http://vendor.invalid/cuda/"
    ).message
    assert "from the source distribution; nvidia_driver_source is nvidia now" in said
    assert "playbooks/driver_remove.yml -e driver_remove=ubuntu2404" in said
    seen(said)


def test_half_installed(driver_play: Run, seen: Seen) -> None:
    with DEBIAN_13.broken(
        "cd /tmp && apt-get download -q nvidia-smi && dpkg --unpack nvidia-smi_*.deb", "dpkg --configure -a"
    ):
        said = driver_play(DEBIAN_13.name).message
    assert "dpkg left nvidia-smi half installed" in said and '"dpkg --configure -a"' in said
    seen(said)


def test_newer_branch_wanted(driver_play: Run, seen: Seen) -> None:
    said = driver_play(UBUNTU.name, nvidia_driver_branch="615").message
    assert (
        "615.* is requested" in said and "Nothing was changed: playbooks/driver_upgrade.yml stops the engines" in said
    )
    assert UBUNTU.ask("dpkg --status nvidia-utils-615-server").returncode != 0
    seen(said)


def test_library_newer_than_the_module(driver_play: Run, seen: Seen) -> None:
    with UBUNTU.broken("lab-gpu fault set library-mismatch=570.211.01", "lab-gpu fault clear library-mismatch"):
        said = driver_play(UBUNTU.name).message
    assert "until it is rebooted: the loaded kernel module is 570.211.01, user space is 580.173.02" in said
    seen(said)


def test_nouveau_loaded(driver_play: Run, seen: Seen) -> None:
    with UBUNTU.broken("mkdir /sys/module/nouveau", "rmdir /sys/module/nouveau"):
        said = driver_play(UBUNTU.name).message
    assert "until it is rebooted: nouveau holds the GPUs" in said
    seen(said)


def test_kernel_updated_without_a_module(driver_play: Run, seen: Seen) -> None:
    kernel = "6.99.0-1-generic"
    with UBUNTU.broken(
        f"mkdir /lib/modules/{kernel} && touch /boot/vmlinuz-{kernel}",
        f"rmdir /lib/modules/{kernel} && rm /boot/vmlinuz-{kernel}",
    ):
        said = driver_play(UBUNTU.name).message
    assert f"Kernel {kernel} is installed without a module" in said and "would have no GPU" in said
    seen(said)


def test_secure_boot_with_signed_modules(driver_play: Run, seen: Seen) -> None:
    with UBUNTU.broken(SECURE_BOOT, "umount /sys/firmware"):
        result = driver_play(UBUNTU.name)
    assert (result.rc, result.changed) == (0, []), result.output[-3000:]
    seen("nothing: the module is signed by Canonical")


def test_secure_boot_without_signed_modules(driver_play: Run, seen: Seen) -> None:
    """The module is not loaded, as on a host that never had one."""
    with DEBIAN_13.broken(
        f"lab-gpu fault set module-not-loaded && {SECURE_BOOT}", "umount /sys/firmware; lab-gpu fault clear"
    ):
        said = driver_play(DEBIAN_13.name).message
    assert said.startswith("Secure Boot is on, and the archive of Debian-13 has modules that DKMS builds and signs")
    assert "Nothing was installed. Either enrol the key of DKMS" in said
    seen(said)


@pytest.mark.parametrize(
    ("boards", "words"),
    [
        (LAST_GPU, "NVML names 3 GPUs, and 4 are expected"),
        ("*", "NVML does not answer: No devices were found"),
    ],
    ids=["fewer than the profile needs", "none"],
)
def test_gpus(driver_play: Run, seen: Seen, boards: str, words: str) -> None:
    with UBUNTU.broken(
        f"mkdir /var/lib/lab-gpu/away && mv {BOARDS}/{boards} /var/lib/lab-gpu/away/",
        f"mv /var/lib/lab-gpu/away/* {BOARDS}/ && rmdir /var/lib/lab-gpu/away",
    ):
        said = driver_play(UBUNTU.name).message
    assert words in said
    seen(said)


def test_card_swapped(driver_play: Run, seen: Seen) -> None:
    other = LAST_GPU.replace("f52a6b98", "00000000")

    def swap(one: str, two: str) -> str:
        return f"mv {BOARDS}/{one} {BOARDS}/{two} && sed -i s/{one}/{two}/ {BOARDS}/{two}/board"

    with UBUNTU.broken(swap(LAST_GPU, other), swap(other, LAST_GPU)):
        said = driver_play(UBUNTU.name).message
    assert LAST_GPU in said
    seen(said)
    # The specification of the containers was made for the other card meanwhile.
    assert driver_play(UBUNTU.name).rc == 0


def test_docker_too_old(play: Run, seen: Seen, tmp_path: Path) -> None:
    """Debian 12's own, with somebody's container in it: the rest of the host stage is refused, and nothing changed."""
    group = tmp_path / "hosts.yml"
    group.write_text(json.dumps({"gpu_hosts": {"hosts": {DEBIAN_12.name: {}}}}))
    start = "--start-at-task=container_runtime : Gather the distribution"
    said = play("playbooks/host.yml", DEBIAN_12.name, f"--inventory={group}", start).message
    assert "This host has Docker 20.10" in said and "does not support CDI" in said
    seen(said)


@pytest.mark.parametrize("machine", [DEBIAN_12, DEBIAN_13, UBUNTU], ids=lambda machine: machine.name)
def test_nothing_of_somebody_else_was_touched_by_that(machine: Machine) -> None:
    assert machine.somebody() == machine.run("cat /root/somebody")
