# SPDX-License-Identifier: Apache-2.0
"""What real archives do with releases: modules need one of them, and kernels move on.

The Ubuntu host comes here without a driver. noble-updates has a newer kernel, and 580.178.04 with modules for it alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import UBUNTU, Run

SOURCES = "/etc/apt/sources.list.d/ubuntu.sources"
UPDATES = (
    f"cp -p {SOURCES} /root/ubuntu.sources && sed -i 's/^Suites: noble$/& noble-updates/' {SOURCES} && apt-get update"
)
RELEASE = f"cp -p /root/ubuntu.sources {SOURCES} && apt-get update"
UPGRADE = "playbooks/driver_upgrade.yml"
NEWEST = {"driver_newest": "true"}
PREBUILT = "linux-modules-nvidia-580-server-open-"


pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", autouse=True)
def updates() -> Iterator[None]:
    with UBUNTU.broken(UPDATES, RELEASE):
        yield


def driver() -> list[str]:
    listed = UBUNTU.run("dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n' '*nvidia*'").splitlines()
    return [line for line in listed if line.endswith(("ii ", "hi ")) and "container" not in line]


def test_driver_of_the_release_and_then_its_updates(driver_play: Run) -> None:
    """A host that was installed before: its driver is held, and the host stage goes on when the archive has moved."""
    UBUNTU.run(RELEASE)
    # The module of the driver that was removed before is still loaded.
    first = driver_play(UBUNTU.name, nvidia_driver_allow_reboot="true")
    assert first.rc == 0, first.output[-3000:]
    UBUNTU.run(UPDATES)
    again = driver_play(UBUNTU.name)
    # The components of the new suite are enabled, and nothing else.
    assert again.rc == 0, again.output[-3000:]
    assert again.changed == ["edge.vllm_edge.apt_repository : Enable the components of the archive"]
    warned = UBUNTU.ask("vllm-edge doctor --format json").stdout
    assert "linux-image-generic 6.8.0-79.79 is held, and apt has 6.8.0-100.100" in warned
    assert "driver_newest=true" in warned


def test_newest_release_and_kernel_in_one_transaction(play: Run, driver_play: Run) -> None:
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
