# SPDX-License-Identifier: Apache-2.0
"""Packages that cannot be had, one fault of each class: the play says why and leaves the host as it was.

What apt says of other faults is in tests/unit/roles/test_apt.py and test_signed_apt_repository.py. The plays begin with
the role that is asked, which spares the stages before it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator

import pytest
from conftest import Controller, Machine, play_result

DRIVER = "nvidia_driver : Gather the distribution"
RUNTIME = "container_runtime : Gather the distribution"

# dpkg and apt lock with fcntl, and tell the holder's name from its pid.
HOLD = """
import fcntl, sys, time
open("/proc/self/comm", "w").write("unattended-upgr")
files = [open(path, "w") for path in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
time.sleep(300)
"""
FRONTEND, LISTS = "/var/lib/dpkg/lock-frontend", "/var/lib/apt/lists/lock"

SNAPSHOT = """
dpkg-query --show --showformat '${Package} ${db:Status-Abbrev} ${Version}\\n'
find /etc/apt /var/lib/vllm-edge/keys.json -type f -exec sha256sum {} +
dpkg --audit
find /tmp -maxdepth 1 -name 'vllm-edge-apt-*'
"""
OTHERS_REPOSITORY = "{{ nvidia_driver_repository_url | replace('vendors.lab', 'vendors.lab:80') }}"


@contextlib.contextmanager
def locked(machine: Machine, *paths: str) -> Iterator[None]:
    """The locks are held as by unattended-upgrades at work."""
    machine.run("systemd-run", "--quiet", "--collect", "--unit=supply-lock", "python3", "-c", HOLD, *paths)
    ready = "pgrep --exact unattended-upgr && sleep 0.3"
    try:
        machine.wait("the lock to be held", lambda: machine.host.run(ready).rc == 0, 10, every=0.2)
        yield
    finally:
        machine.host.run("systemctl stop supply-lock")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"container_runtime_repository_url": OTHERS_REPOSITORY},
            r"its index is not signed by the key .*(Missing key|NO_PUBKEY).*"
            r"see that container_runtime_repository_url is the right place",
        ),
        (
            {"container_runtime_toolkit_version": "9.9.9-1"},
            r"No repository of this host has nvidia-container-toolkit, .*, libnvidia-container1 9\.9\.9-1 "
            r"\(there is 1\.20\.0\+8269969f-1, 1\.20\.0-1, 1\.19\.0-1, 1\.18\.2-1\): "
            r".*set container_runtime_toolkit_version to what there is",
        ),
    ],
    ids=["release that another key has signed", "version that the repository does not have"],
)
def test_what_cannot_be_had_is_said_and_changes_nothing(
    controller: Controller, machine: Machine, undisturbed: None, variables: dict[str, str], words: str
) -> None:
    before = machine.shell(SNAPSHOT)
    play = controller.play("playbooks/host.yml", f"--start-at-task={RUNTIME}", f"--extra-vars={json.dumps(variables)}")
    assert play.rc != 0 and play.recap["failed"] == 1 and play.changed == [], play.output[-4000:]
    assert machine.shell(SNAPSHOT) == before
    said = " ".join(play.output.split())
    assert re.search(words, said) and "othing was changed" in said, said[-4000:]


def test_a_plain_run_waits_for_a_lock_and_heals_exactly_that(
    controller: Controller, machine: Machine, undisturbed: None
) -> None:
    # The packages are gone, and what apt keeps of them. Of the toolkit it is the one that no running container needs.
    for package in ("nvidia-container-toolkit", "nvidia-persistenced", "docker-buildx"):
        machine.shell(f"dpkg --force-depends --remove {package} && rm --force /var/cache/apt/archives/{package}_*.deb")
    asked = f"journalctl --quiet --since=@{int(machine.now())} --identifier=ansible-apt_packages --lines=1 | grep -q ."
    with locked(machine, LISTS, FRONTEND):
        process = controller.start_play("playbooks/host.yml", f"--start-at-task={DRIVER}")
        machine.wait("apt to be asked for", lambda: machine.host.run(asked).rc == 0, 90)
        time.sleep(2)
        assert process.poll() is None
        assert machine.host.run("dpkg --status nvidia-persistenced | grep -q '^Status: .* installed'").rc != 0
    result = play_result(process)
    assert result.rc == 0, result.output[-4000:]
    assert result.changed == [
        "nvidia_driver : Install the driver packages; lock timeout in seconds - 300",
        "nvidia_driver : Hold the driver packages (nvidia-persistenced)",
        "container_runtime : Install the Docker Engine; lock timeout in seconds - 300",
        "container_runtime : Install the container toolkit; lock timeout in seconds - 300",
        "container_runtime : Hold the container toolkit packages (nvidia-container-toolkit)",
    ]
    # What an operator does next on that host.
    machine.run("apt-get", "update", "--option=APT::Update::Error-Mode=any")
    assert machine.shell("dpkg --audit; apt-get check --quiet=2") == ""
