# SPDX-License-Identifier: Apache-2.0
"""apt's lock is waited for.

Other faults of what is downloaded are in tests/unit/weights, and in test_apt.py, test_apt_repository.py and
test_vllm_image_role.py of tests/unit/roles.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from conftest import Controller, Machine, play_result

# dpkg and apt lock with fcntl, and tell the holder's name from its pid.
HOLD = """
import fcntl, sys, time
open("/proc/self/comm", "w").write("unattended-upgr")
files = [open(path, "w") for path in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
time.sleep(300)
"""
LOCKS = ["/var/lib/apt/lists/lock", "/var/lib/dpkg/lock-frontend"]


@contextlib.contextmanager
def locked(machine: Machine) -> Iterator[None]:
    """The locks are held as by unattended-upgrades at work."""
    machine.run("systemd-run", "--quiet", "--collect", "--unit=supply-lock", "python3", "-c", HOLD, *LOCKS)
    ready = "pgrep --exact unattended-upgr && sleep 0.3"
    try:
        machine.wait("the lock to be held", lambda: machine.host.run(ready).rc == 0, 10, every=0.2)
        yield
    finally:
        machine.host.run("systemctl stop supply-lock")


def test_a_plain_run_waits_for_a_lock_and_heals_exactly_that(
    controller: Controller, machine: Machine, undisturbed: None
) -> None:
    # The packages are gone, and what apt keeps of them. Of the toolkit it is the one that no running container needs.
    for package in ("nvidia-container-toolkit", "nvidia-persistenced", "docker-buildx"):
        machine.shell(f"dpkg --force-depends --remove {package} && rm --force /var/cache/apt/archives/{package}_*.deb")
    journal = f"journalctl --quiet --since=@{int(machine.now())} --identifier=ansible-ansible.legacy.command"
    asked = f"{journal} | grep -q update"
    with locked(machine):
        process = controller.start_play("playbooks/host.yml", "--start-at-task=nvidia_driver : Gather the distribution")
        machine.wait("apt to be asked for", lambda: machine.host.run(asked).rc == 0, 90)
        time.sleep(2)
        assert process.poll() is None
        assert machine.host.run("dpkg --status nvidia-persistenced | grep -q '^Status: .* installed'").rc != 0
    result = play_result(process)
    assert result.rc == 0, result.output[-4000:]
    assert result.changed == [
        "edge.vllm_edge.apt_repository : Change the packages as foretold; lock timeout in seconds - 300",
        "nvidia_driver : Hold the driver packages (nvidia-persistenced)",
        "edge.vllm_edge.apt_repository : Install the packages; lock timeout in seconds - 300",
        # The toolkit, by a task that was named above.
        "container_runtime : Hold the container toolkit packages (nvidia-container-toolkit)",
    ]
    # What an operator does next on that host.
    machine.run("apt-get", "update", "--option=APT::Update::Error-Mode=any")
    assert machine.shell("dpkg --audit; apt-get check --quiet=2") == ""
