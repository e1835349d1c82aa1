# SPDX-License-Identifier: Apache-2.0
"""What each host has after the runs: the driver of its own archive, held, loaded, serving; and somebody's things."""

from __future__ import annotations

import re
from base64 import b64encode

import pytest
from conftest import DEBIAN_12, DEBIAN_13, MACHINES, ROOT, UBUNTU, Machine, Run

NAMES = [machine.name for machine in MACHINES]
EXPECTED = {
    "debian12": ("535.", "deb.debian.org/debian", ["libcuda1", "nvidia-kernel-dkms", "nvidia-smi"]),
    "debian13": ("550.", "deb.debian.org/debian", ["libcuda1", "nvidia-kernel-dkms", "nvidia-smi"]),
    "ubuntu2404": (
        "580.",
        "file:/srv/apt/ubuntu",
        ["nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"],
    ),
}


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
def test_packages_of_one_source(machine: Machine) -> None:
    branch, source, packages = EXPECTED[machine.name]
    versions = set()
    for name in packages:
        policy = machine.run(f"apt-cache policy {name}")
        installed = re.search(r"^ \*\*\* (\S+) .*\n((?: {8}.*\n?)+)", policy, re.MULTILINE)
        assert installed and re.match(rf"(\d+:)?{re.escape(branch)}", installed[1]), policy
        assert source in installed[2] or "/debian " in installed[2], policy
        versions.add(installed[1])
    assert len(versions) == 1


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
def test_held_and_left_alone_by_unattended_upgrades(machine: Machine) -> None:
    held = machine.run("apt-mark showhold").split()
    assert {name.split(":")[0] for name in held} >= set(EXPECTED[machine.name][2])
    patterns = re.findall(r'Package-Blacklist:: "(.*)";', machine.run("apt-config dump"))
    assert {"^nvidia-", "^libnvidia-", "^somebodys-"} <= set(patterns)
    # Where modules are prebuilt a newer kernel would start without one.
    assert ("^linux-image-" in patterns) == (machine is UBUNTU)
    assert ("linux-image-generic" in held) == (machine is UBUNTU)


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
def test_loaded_and_serving(machine: Machine) -> None:
    branch = EXPECTED[machine.name][0]
    assert machine.run("cat /sys/module/nvidia/version").startswith(branch)
    assert machine.run("cat /sys/module/nvidia_uvm/version").startswith(branch), "under this name whatever the file's"
    rows = machine.run("nvidia-smi --query-gpu=driver_version,persistence_mode --format=csv,noheader").splitlines()
    assert len(rows) == 4 and all(row.startswith(branch) and row.endswith("Enabled") for row in rows)
    assert machine.run("systemctl is-enabled nvidia-persistenced.service") == "enabled"


def test_signed_where_the_archive_signs() -> None:
    assert UBUNTU.run("modinfo -F signer nvidia") == "Canonical Ltd. Kernel Module Signing"


@pytest.mark.parametrize("machine", [DEBIAN_12, DEBIAN_13], ids=NAMES[:2])
def test_real_packages_of_debian(machine: Machine) -> None:
    """Not made by the lab: their own signatures, sources of the module, a library that speaks of itself."""
    version = machine.run("cat /sys/module/nvidia/version")
    assert machine.run(f"ls /usr/src/nvidia-current-{version}/dkms.conf")
    assert f"nvidia-current/{version}" in machine.run("dkms status")
    library = machine.run("readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so.1")
    assert library.endswith(f"/libcuda.so.{version}")
    assert int(machine.run(f"stat -c %s {library}")) > 1_000_000
    written = machine.run("cat /etc/apt/sources.list.d/vllm-edge-nvidia-driver.sources")
    assert "Components: contrib non-free non-free-firmware" in written


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
def test_the_packages_own_haproxy_runs_only_where_somebody_runs_it(machine: Machine) -> None:
    state = machine.run("systemctl show --property=LoadState,ActiveState --value haproxy.service").split()
    assert state == (["loaded", "active"] if machine is UBUNTU else ["masked", "inactive"])
    started = machine.run("journalctl --unit haproxy.service --output cat --quiet | grep -c Started || true")
    assert started == ("1" if machine is UBUNTU else "0"), "it was never restarted"


@pytest.mark.parametrize("machine", [DEBIAN_13, UBUNTU], ids=NAMES[1:])
def test_the_gateway_runs_beside_it_and_asks_for_a_key(machine: Machine) -> None:
    assert machine.run("systemctl is-active vllm-edge-gateway.service vllm-edge-gateway-sync.timer") == "active\nactive"
    ask = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/v1/models')"
    assert "HTTP Error 401" in machine.ask(f'python3 -c "{ask}"').stderr


@pytest.mark.parametrize("machine, version", [(DEBIAN_12, "2.42."), (DEBIAN_13, "2.53.")], ids=NAMES[:2])
def test_rules_for_prometheus_pass_with_the_promtool_of_the_distribution(machine: Machine, version: str) -> None:
    machine.run("mkdir -p /tmp/rules")
    for name in ("rules.yml", "rules_test.yml"):
        content = b64encode((ROOT / "roles/serving_metrics/files" / name).read_bytes()).decode()
        machine.run(f"echo {content} | base64 --decode > /tmp/rules/{name}")
    assert f"version {version}" in machine.run("promtool --version 2>&1")
    machine.run(
        "cd /tmp/rules && promtool check rules --lint=all --lint-fatal rules.yml && promtool test rules rules_test.yml"
    )


def test_package_that_somebody_released(driver_play: Run) -> None:
    UBUNTU.run("apt-mark unhold nvidia-utils-580-server linux-image-generic")
    result = driver_play(UBUNTU.name)
    assert result.rc == 0, result.output[-3000:]
    held = ["linux-image-generic", "nvidia-utils-580-server"]
    assert result.changed == [f"nvidia_driver : Hold the driver packages ({name})" for name in held]


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
def test_nothing_of_somebody_else_was_touched(machine: Machine) -> None:
    assert machine.somebody() == machine.run("cat /root/somebody")
