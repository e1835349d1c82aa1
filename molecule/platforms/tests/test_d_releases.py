# SPDX-License-Identifier: Apache-2.0
"""What real archives do with releases: modules need one of them, kernels move on, and branches are not there.

The Ubuntu host comes here without a driver. noble-updates has a newer kernel, and 580.178.04 with modules for it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from conftest import UBUNTU, Run

Seen = Callable[[str], None]
SOURCES = "/etc/apt/sources.list.d/ubuntu.sources"
UPDATES = (
    f"cp -p {SOURCES} /root/ubuntu.sources && sed -i 's/^Suites: noble$/& noble-updates/' {SOURCES} && apt-get update"
)
RELEASE = f"cp -p /root/ubuntu.sources {SOURCES} && apt-get update"
UPGRADE = "playbooks/driver_upgrade.yml"
NEWEST = {"driver_newest": "true"}
PREBUILT = "linux-modules-nvidia-580-server-open-"
LATER = "/srv/apt/cuda/repos/debian13-from-590/x86_64"


@pytest.fixture(scope="module", autouse=True)
def updates() -> Iterator[None]:
    with UBUNTU.broken(UPDATES, RELEASE):
        yield


def driver() -> list[str]:
    listed = UBUNTU.run("dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n' '*nvidia*'").splitlines()
    return [line for line in listed if line.endswith(("ii ", "hi ")) and "container" not in line]


def test_first_install_on_a_kernel_that_is_not_the_newest(driver_play: Run, seen: Seen) -> None:
    """apt would say "unmet dependencies"; the remedy is another kernel."""
    running = UBUNTU.run("cat /proc/sys/kernel/osrelease")
    said = driver_play(UBUNTU.name).message
    assert f"{PREBUILT}{running} of the archive of Ubuntu-24.04 is built for driver 580.173.02" in said
    assert f'boot the newest kernel first ("apt-get install linux-image-generic" brings {running}-100' in said
    assert driver() == []
    seen(said)


def test_repository_that_begins_at_590(driver_play: Run, seen: Seen) -> None:
    """NVIDIA's for Debian 13 did. The branch of the default is not there."""
    key = UBUNTU.run("ls /srv/apt/cuda/repos/debian13/x86_64/*.pub")
    said = driver_play(
        UBUNTU.name,
        nvidia_driver_source="nvidia",
        nvidia_driver_repository_url=f"file:{LATER}/",
        nvidia_driver_repository_key_url=f"file://{key}",
        nvidia_driver_repository_key_fingerprint="",
    ).message
    assert "has nvidia-driver-pinning-580 (there is 590): set nvidia_driver_branch to what there is" in said
    UBUNTU.run(
        "rm /etc/apt/sources.list.d/vllm-edge-nvidia-driver.sources /etc/apt/keyrings/vllm-edge-nvidia-driver.gpg"
    )
    seen(said)


@pytest.mark.thorough
def test_branch_that_the_archive_does_not_have(driver_play: Run, seen: Seen) -> None:
    said = driver_play(UBUNTU.name, nvidia_driver_branch="599").message
    assert "nvidia-headless-no-dkms-599-server-open" in said and "(there is 615, 580)" in said
    seen(said)


@pytest.mark.thorough
def test_driver_of_the_release_and_then_its_updates(driver_play: Run, seen: Seen) -> None:
    """A host that was installed before: its driver is held, and the host stage goes on when the archive has moved."""
    UBUNTU.run(RELEASE)
    # The module of the driver that was removed before is still loaded.
    first = driver_play(UBUNTU.name, nvidia_driver_allow_reboot="true")
    assert first.rc == 0, first.output[-3000:]
    UBUNTU.run(UPDATES)
    again = driver_play(UBUNTU.name)
    # The components of the new suite are enabled, and nothing else.
    assert again.rc == 0, again.output[-3000:]
    assert again.changed == ["nvidia_driver : Enable the archive components that hold the driver or what it depends on"]
    warned = UBUNTU.ask("vllm-edge doctor --format json").stdout
    assert "linux-image-generic 6.8.0-79.79 is held, and apt has 6.8.0-100.100" in warned
    assert "driver_newest=true" in warned
    seen("the host stage goes on, and the doctor warns of the held kernel")


@pytest.mark.thorough
def test_kernel_installed_by_hand_needs_another_release(driver_play: Run, seen: Seen) -> None:
    """The metapackage was released and upgraded. The module of its kernel does not fit the held driver."""
    running = UBUNTU.run("cat /proc/sys/kernel/osrelease")
    UBUNTU.run("apt-mark unhold linux-image-generic && apt-get install --yes linux-image-generic")
    said = driver_play(UBUNTU.name).message
    assert (
        f"{PREBUILT}{running}-100 of the archive of Ubuntu-24.04 is built for driver 580.178.04, and the driver of"
        in said
    )
    assert f"{UPGRADE} -e driver_upgrade=ubuntu2404 -e driver_newest=true -e allow_reboot=true moves kernel" in said
    UBUNTU.run(
        f"apt-get purge --yes linux-image-{running}-100 linux-modules-{running}-100 "
        f"&& rm -rf /lib/modules/{running}-100 "
        "&& apt-get install --yes --allow-downgrades linux-image-generic=6.8.0-79.79 linux-generic=6.8.0-79.79"
    )
    seen(said)


@pytest.mark.thorough
def test_newest_release_and_kernel_in_one_transaction(play: Run, driver_play: Run, seen: Seen) -> None:
    running, before = UBUNTU.run("cat /proc/sys/kernel/osrelease"), driver()
    foreseen = play(UPGRADE, UBUNTU.name, "--check", **NEWEST)
    words = f"would replace driver 580.173.02 of ubuntu2404 by 580.178.04 with kernel {running}-100"
    assert foreseen.rc == 0 and words in " ".join(foreseen.output.split()), foreseen.output[-3000:]
    assert driver() == before
    result = play(UPGRADE, UBUNTU.name, driver_upgrade="ubuntu2404", allow_reboot="true", **NEWEST)
    assert result.rc == 0, result.output[-5000:]
    assert UBUNTU.run("cat /proc/sys/kernel/osrelease") == f"{running}-100"
    assert UBUNTU.run("cat /sys/module/nvidia/version") == "580.178.04"
    assert {line.split()[1].split("-")[0] for line in driver() if line.startswith(("lib", "nvidia"))} == {"580.178.04"}
    held = UBUNTU.run("apt-mark showhold").split()
    assert {"linux-image-generic", f"{PREBUILT}{running}-100", "nvidia-utils-580-server", "busybox-static"} <= set(held)
    # One call of apt installed all of it: kernel, modules and user space.
    history = UBUNTU.run("grep -A6 '^Commandline:.*linux-image-generic' /var/log/apt/history.log | tail -n 12")
    assert all(name in history for name in (f"linux-image-{running}-100", "linux-generic", "nvidia-utils-580-server"))
    assert f"{PREBUILT}{running}:amd64" in history.partition("Remove:")[2]
    again = play(UPGRADE, UBUNTU.name, driver_upgrade="ubuntu2404", allow_reboot="true", **NEWEST)
    assert again.rc == 0 and again.changed == [] and "there is nothing to change here" in " ".join(again.output.split())
    assert (driver_play(UBUNTU.name).rc, driver_play(UBUNTU.name).changed) == (0, [])
    seen(f"driver 580.178.04 and kernel {running}-100 by one transaction, held again; a second run changes nothing")
