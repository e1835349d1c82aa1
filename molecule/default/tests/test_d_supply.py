# SPDX-License-Identifier: Apache-2.0
"""What cannot be had, one fault of each supply: apt's lock is waited for; a registry that is not reached and a wrong
token of the hub are said, harm nothing, and the next run goes on from there.

Other faults are in tests/unit/weights and in tests/unit/roles: test_apt.py, test_apt_repository.py and
test_vllm_image_role.py. The plays begin with the role that is asked, which spares the stages before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Controller, Machine, Play, play_result

sys.path.insert(0, str(ROOT))

from lab.docker import docker_command

SCRATCH = "/var/tmp/supply"
LOOPBACK = "http://127.0.0.1:8081"
# Passes connections to the loopback on to the hub, as a token is sent to no other address that is not encrypted.
FORWARD = """
import socket, threading

def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)

def listen(port):
    server = socket.create_server(("127.0.0.1", port))
    while True:
        near, far = server.accept()[0], socket.create_connection(("hub.lab", port))
        for ends in ((near, far), (far, near)):
            threading.Thread(target=pump, args=ends, daemon=True).start()

threading.Thread(target=listen, args=(8082,), daemon=True).start()
listen(8081)
"""
GATED = "lab/gated"

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
    end = play.output.rindex("FAILED! => ") + len("FAILED! => ")
    message = str(json.JSONDecoder().raw_decode(play.output[end:])[0]["msg"])
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
        "apt_repository : Install the packages; lock timeout in seconds - 300",
        "apt_repository : Install the packages; lock timeout in seconds - 300",
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


# ---- weights ----------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(machine: Machine) -> Iterator[tuple[str, str]]:
    """A repository of the hub for who has a token, which the host sees on its loopback: the token, and the sha256."""
    lab = os.environ.get("VLLM_EDGE_LAB_NAME", "vllm-edge-molecule")

    def on_hub(script: str, *arguments: str) -> str:
        command = [*docker_command(), "exec", f"{lab}-vendors", "sh", "-euc", f"cd /var/lib; {script}", "sh"]
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True, timeout=60)
        return done.stdout

    token = "hf_RightTokenOfSomebody"
    on_hub('rm -rf hub; mkdir -p "hub/$1"; printf %s "$2" >hub/gated.json', GATED, json.dumps({GATED: token}))
    on_hub("cd hub/$1; echo '{\"model_type\": \"gemma4\"}' >config.json; echo '{}' >tokenizer.json", GATED)
    digest = on_hub("cd hub/$1; head -c 1M /dev/urandom >model.safetensors; sha256sum model.safetensors", GATED)
    machine.run("systemd-run", "--quiet", "--collect", "--unit=lab-hub-forward", "python3", "-c", FORWARD)
    machine.wait("the hub on the loopback", lambda: machine.host.socket("tcp://127.0.0.1:8081").is_listening, 15)
    yield token, digest.split()[0]
    machine.run("systemctl", "stop", "lab-hub-forward.service")
    machine.run("rm", "--recursive", "--force", SCRATCH)
    on_hub("rm -rf hub")


def test_gated_model_with_a_wrong_token_then_the_right_one(
    operator: Controller, machine: Machine, gate: tuple[str, str], tmp_path: Path
) -> None:
    """Neither is printed at -vvv, nor left on the host."""
    wrong, (right, digest) = "hf_WrongTokenOfNobody", gate

    def play(**variables: Any) -> Play:
        """The stage of the weights for the one model of this test, below a directory of its own."""
        (tmp_path / "variables.json").write_text(
            json.dumps(
                {
                    "model_weights_models": [{"name": "gated", "repo": GATED, "revision": "main", "dir": "gated"}],
                    "model_weights_root": f"{SCRATCH}/weights",
                    "model_weights_state_directory": f"{SCRATCH}/records",
                    "model_weights_progress_directory": f"{SCRATCH}/progress",
                    "model_weights_reserve_mib": 64,
                    "model_weights_endpoint": LOOPBACK,
                    **variables,
                }
            )
        )
        return operator.play("playbooks/weights.yml", f"--extra-vars=@{tmp_path}/variables.json", "-vvv")

    begin = machine.run("date", "+%s").strip()
    (tmp_path / "token").write_text(f"{wrong}\n")
    (tmp_path / "token").chmod(0o600)
    refused = play(model_weights_token_file=str(tmp_path / "token"))
    message = reason(refused)
    assert f"{LOOPBACK} does not accept the token (HTTP 401), so it was not asked for {GATED}" in message
    assert "Replace it where it was given, by model_weights_token_file or model_weights_token." in message
    brought = play(model_weights_token=right)
    assert brought.rc == 0, brought.output[-4000:]
    assert machine.host.file(f"{SCRATCH}/weights/gated/model.safetensors").sha256sum == digest
    for played in (refused, brought):
        assert wrong not in played.output and right not in played.output
    journal = machine.run("journalctl", "--quiet", f"--since=@{begin}")
    assert "model_weights" in journal and wrong not in journal and right not in journal
    places = f"{SCRATCH} /var/lib/vllm-edge /etc/vllm-edge /root /home/ops /tmp /run/vllm-edge-secrets"
    find = f"grep --recursive --files-with-matches --no-messages 'hf_[WR][a-z]*TokenOf' {places}"
    assert machine.host.run(find).stdout == ""
