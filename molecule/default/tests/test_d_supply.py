# SPDX-License-Identifier: Apache-2.0
"""What cannot be had: apt's lock is waited for, and a registry that is not reached is said and harms nothing.

Other faults are in tests/unit/weights and in tests/unit/roles: test_apt.py, test_apt_repository.py and
test_vllm_image_role.py. The plays begin with the role that is asked, which spares the stages before it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator

import pytest
from conftest import Controller, Machine, Play, play_result

# Everything that a failure of a supply must leave as it is: containers, images, records, weights.
STATE = r"""
docker container ls --all --no-trunc --format '{{.ID}} {{.Names}} {{.State}}' | sort
docker container ls --quiet | xargs --no-run-if-empty docker container inspect --format '{{.Id}} {{.State.StartedAt}}'
docker image ls --all --no-trunc --format '{{.ID}} {{.Repository}}:{{.Tag}}' | sort
find /data/vllm/weights -printf '%p %s %T@ %i %m %u:%g\n' | sort
sha256sum /var/lib/vllm-edge/image.json /var/lib/vllm-edge/weights/*.json
find /var/lib/vllm-edge/build
"""


@pytest.fixture(autouse=True)
def unharmed(machine: Machine, undisturbed: None) -> Iterator[None]:
    """Containers run on, and images, records and weights of the host are the same afterwards."""
    before = machine.shell(STATE)
    yield
    assert machine.shell(STATE) == before


@pytest.fixture(scope="module")
def operator() -> Controller:
    """A controller whose failures can be read back: as JSON."""
    controller = Controller()
    controller.environment["ANSIBLE_CALLBACK_RESULT_FORMAT"] = "json"
    return controller


def reason(play: Play) -> str:
    """The message of the task that ended the play; one paragraph, and no traceback anywhere."""
    assert play.rc != 0, play.output[-4000:]
    assert "Traceback" not in play.output, play.output[-4000:]
    # An entry of a loop is `failed: [host] (item=name) => {...}`.
    (*_, start) = re.finditer(r"^(?:fatal|failed): \[[^]]+\].*? => (?=\{)", play.output, re.MULTILINE)
    message = str(json.JSONDecoder().raw_decode(play.output[start.end() :])[0]["msg"])
    assert "\n" not in message.strip(), message
    return message


# ---- packages ---------------------------------------------------------------------------------------------------

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


def test_a_plain_run_waits_for_a_lock_and_heals_exactly_that(controller: Controller, machine: Machine) -> None:
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
        "apt_repository : Change the packages as foretold; lock timeout in seconds - 300",
        "nvidia_driver : Hold the driver packages (nvidia-persistenced)",
        # Docker and the toolkit, by the task that was named above.
        "container_runtime : Hold the container toolkit packages (nvidia-container-toolkit)",
    ]
    # What an operator does next on that host.
    machine.run("apt-get", "update", "--option=APT::Update::Error-Mode=any")
    assert machine.shell("dpkg --audit; apt-get check --quiet=2") == ""


# ---- image ------------------------------------------------------------------------------------------------------


def test_registry_that_cannot_be_reached(operator: Controller) -> None:
    base = "registry.lab:9/vllm/vllm-openai:v0.32.0"
    message = reason(operator.play("playbooks/image.yml", f"--extra-vars=vllm_image_base={base}"))
    assert "The image that the host had is kept, and engines that run go on." in message, message
    reached = f"The host does not reach the registry registry.lab:9. Check the name in vllm_image_base (now {base})"
    assert reached in message and "connection refused" in message and "vllm_image_base_archive" in message
