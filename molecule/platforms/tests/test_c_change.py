# SPDX-License-Identifier: Apache-2.0
"""Another branch by the play for it, with a reboot, and the way back to what the distribution had. Last of all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import DRIVER, UBUNTU, Run

UNIT = "vllm-lab.service"
# Two units in the shape of ours, and in place of the host's program one that takes note, stops and starts the unit: no
# engine runs on these hosts. Real ones are in molecule/switch.
PROGRAM = f"""#!/bin/sh
echo "$@" >> /root/asked
case "$1" in
    stop) systemctl stop {UNIT} && echo '{{"generation": 7, "engines": ["lab"], "message": ""}}' ;;
    switch) systemctl start vllm-edge.target {UNIT} ;;
esac
"""
ENGINE = f"""
printf '[Install]\\nWantedBy=multi-user.target\\n' > /etc/systemd/system/vllm-edge.target
printf '[Unit]\\nPartOf=vllm-edge.target\\n[Service]\\nExecStart=/bin/sleep infinity\\n' > /etc/systemd/system/{UNIT}
printf '[Install]\\nWantedBy=vllm-edge.target\\n' >> /etc/systemd/system/{UNIT}
systemctl daemon-reload
systemctl enable --now vllm-edge.target {UNIT}
mv /usr/local/bin/vllm-edge /root/vllm-edge
cat > /usr/local/bin/vllm-edge <<'PROGRAM'
{PROGRAM}PROGRAM
chmod 0755 /usr/local/bin/vllm-edge
"""
CLEAN = f"""
systemctl disable --now vllm-edge.target {UNIT}
rm /etc/systemd/system/vllm-edge.target /etc/systemd/system/{UNIT}
systemctl daemon-reload
mv /root/vllm-edge /usr/local/bin/vllm-edge
"""
UPGRADE = "playbooks/driver_upgrade.yml"
NEWER = {"nvidia_driver_branch": "615"}


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with UBUNTU.broken(ENGINE, CLEAN):
        yield


def unit() -> str:
    return UBUNTU.run(f"systemctl show --property=ActiveState,InvocationID {UNIT}")


def test_upgrade_is_foreseen(play: Run) -> None:
    before = unit()
    result = play(UPGRADE, UBUNTU.name, "--check", **NEWER)
    said = " ".join(result.output.split())
    assert result.rc == 0, result.output[-3000:]
    assert "would replace driver 580.173.02 of ubuntu2404 by 615.*: stop vllm-lab.service, reboot the host" in said
    assert "A reboot also stops somebody." in said
    assert unit() == before


def asked() -> list[str]:
    """What the play told the host's program since it was asked last."""
    return UBUNTU.run("touch /root/asked; cat /root/asked; rm /root/asked").splitlines()


def packages() -> list[str]:
    return UBUNTU.run("dpkg-query -W -f '${Package} ${Version} ${db:Status-Abbrev}\\n' '*nvidia*'").splitlines()


@pytest.mark.thorough
def test_upgrade_whose_packages_cannot_be_fetched(play: Run) -> None:
    """Fails while the engines serve: a file of the archive is not what its index says."""
    pool = "/srv/apt/ubuntu/pool/restricted"
    before, boot, there = unit(), UBUNTU.run("cat /proc/sys/kernel/random/boot_id"), packages()
    file = UBUNTU.run(f"ls {pool}/nvidia-utils-615-server_*")
    damage = (
        f"cp {file} /root/damaged.deb && echo damaged >> /root/damaged.deb && mount --bind /root/damaged.deb {file}"
    )
    with UBUNTU.broken(damage, f"umount {file}"):
        result = play(UPGRADE, UBUNTU.name, driver_upgrade="ubuntu2404", allow_reboot="true", **NEWER)
    assert "The NVIDIA driver could not be installed, and nothing was changed" in result.message
    assert (unit(), UBUNTU.run("cat /proc/sys/kernel/random/boot_id"), packages()) == (before, boot, there)
    assert asked() == []


def test_upgrade_that_fails_with_the_engines_stopped(play: Run) -> None:
    """They come back with the driver of before, and the play says both."""
    before, there = unit(), packages()
    hook = "/etc/apt/apt.conf.d/99zz-somebody"
    with UBUNTU.broken(f"echo 'DPkg::Pre-Install-Pkgs {{ /bin/false; }};' > {hook}", f"rm {hook}"):
        result = play(UPGRADE, UBUNTU.name, driver_upgrade="ubuntu2404", allow_reboot="true", **NEWER)
    said = " ".join(result.output.split())
    assert result.rc != 0
    assert "The NVIDIA driver could not be installed" in said and "The engines serve again and are verified." in said
    assert asked() == ["stop --format json", "switch 7"]
    assert "ActiveState=active" in unit() and unit() != before
    assert packages() == there


def test_upgrade(play: Run) -> None:
    boot, before = UBUNTU.run("cat /proc/sys/kernel/random/boot_id"), unit()
    result = play(UPGRADE, UBUNTU.name, driver_upgrade="ubuntu2404", allow_reboot="true", **NEWER)
    assert result.rc == 0, result.output[-5000:]
    assert UBUNTU.run("cat /proc/sys/kernel/random/boot_id") != boot
    assert UBUNTU.run("cat /sys/module/nvidia/version /sys/module/nvidia_uvm/version").split() == ["615.71.09"] * 2
    assert [line for line in packages() if "-580-" in line and not line.endswith(("un ", "rc "))] == []
    held = UBUNTU.run("apt-mark showhold").split()
    assert {"nvidia-utils-615-server", "linux-image-generic"} <= set(held)
    assert "ActiveState=active" in unit() and unit() != before
    assert asked() == ["stop --format json", "stop", "switch 7"]
    assert "615.71.09" in UBUNTU.run("cat /var/run/cdi/nvidia.yaml")
    assert "ubuntu2404: driver 615.71.09" in " ".join(result.output.split())


def test_removal_without_packages(play: Run) -> None:
    result = play("playbooks/driver_remove.yml", UBUNTU.name, driver_remove="ubuntu2404")
    assert result.rc == 0, result.output[-3000:]
    held = UBUNTU.run("apt-mark showhold").split()
    assert [name for name in held if "nvidia" in name or "linux" in name] == [
        name for name in held if "container" in name
    ]
    assert "busybox-static" in held
    left = UBUNTU.run("find /etc/apt /etc/modules-load.d -name '*vllm-edge*' -type f")
    left += UBUNTU.run("find /etc/systemd/system -path '*/nvidia-persistenced.service.d/*vllm-edge*'")
    assert [path for path in left.splitlines() if "container-toolkit" not in path] == []
    assert UBUNTU.run("dpkg-query -W -f '${db:Status-Abbrev}' nvidia-utils-615-server") == "ii"


def test_taken_up_again_and_removed_with_its_packages(play: Run, driver_play: Run) -> None:
    result = driver_play(UBUNTU.name, **NEWER)
    assert result.rc == 0, result.output[-3000:]
    arguments = {"driver_remove": "ubuntu2404", "driver_remove_packages": "true"}
    refused = play("playbooks/driver_remove.yml", UBUNTU.name, **arguments)
    assert "its engines need the driver's packages. Nothing was changed." in refused.message
    UBUNTU.run("systemctl stop vllm-edge.target")
    result = play("playbooks/driver_remove.yml", UBUNTU.name, **arguments)
    assert result.rc == 0, result.output[-3000:]
    assert [line for line in packages() if line.endswith("ii ") and "container" not in line] == []

    foreseen = play("playbooks/host.yml", UBUNTU.name, f"--start-at-task={DRIVER}", "--check", **NEWER)
    assert foreseen.rc == 0, foreseen.output[-3000:]
    assert "would install the NVIDIA driver, branch 615" in " ".join(foreseen.output.split())
    assert [line for line in packages() if line.endswith("ii ") and "container" not in line] == []
