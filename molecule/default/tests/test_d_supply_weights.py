# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while weights come, one fault of each class: connection, secret, disk. It is said, harms nothing,
and the next run goes on from there.

Answers of the hub and damaged files are in tests/unit/weights. The weights of these tests are two repositories of their
own, brought below a directory of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Controller, Machine, Play, module_result

sys.path.insert(0, str(ROOT))

from lab.docker import docker_command

SCRATCH = "/var/tmp/supply"
ENDPOINT = "http://hub.lab:8081"
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
LARGE, SMALL = "lab/large", "lab/small"
MIB = 1024**2
LARGE_MIB = 24

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


class Hub:
    """The lab's hub, whose state is set from the outside while it runs."""

    def __init__(self) -> None:
        self.container = f"{os.environ.get('VLLM_EDGE_LAB_NAME', 'vllm-edge-molecule')}-vendors"
        self.logged = 0

    def shell(self, script: str, *arguments: str) -> str:
        command = [*docker_command(), "exec", self.container, "sh", "-euc", script, "sh", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def write(self, repo: str, path: str, content: str) -> None:
        self.shell('mkdir -p "/var/lib/hub/$1" && printf %s "$3" >"/var/lib/hub/$1/$2"', repo, path, content)

    def sha256(self, repo: str) -> str:
        return self.shell(f"sha256sum /var/lib/hub/{repo}/model.safetensors").split()[0]

    def faults(self, *faults: dict[str, Any]) -> None:
        self.shell('printf %s "$1" >/var/lib/hub/faults.json', json.dumps(faults))

    def gate(self, **gates: str) -> None:
        self.shell('printf %s "$1" >/var/lib/hub/gated.json', json.dumps(gates))

    def gets(self) -> list[dict[str, Any]]:
        """Requests for the content of files since the last question, without those that are redirected."""
        command = [*docker_command(), "logs", self.container]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        new, self.logged = lines[self.logged :], len(lines)
        return [
            {**line, "path": line["path"].partition("?")[0]}
            for line in new
            if line["method"] == "GET" and re.search("/resolve/|^/cdn/", line["path"]) and line["status"] != 302
        ]

    def brought(self) -> list[str]:
        """Names of the files whose content went out since the last question."""
        return sorted(line["path"].rpartition("/")[2] for line in self.gets() if line["status"] < 300)


@pytest.fixture(scope="module")
def hub(machine: Machine) -> Iterator[Hub]:
    """The hub with two repositories more."""
    hub = Hub()
    hub.shell("rm -rf /var/lib/hub && mkdir /var/lib/hub")
    for repo, size_mib in ((LARGE, LARGE_MIB), (SMALL, 1)):
        hub.write(repo, "config.json", '{"model_type": "gemma4"}')
        hub.write(repo, "tokenizer.json", "{}")
        hub.shell(f"head -c {size_mib * MIB} /dev/urandom >/var/lib/hub/{repo}/model.safetensors")
    yield hub
    hub.shell("rm -rf /var/lib/hub")
    machine.host.run(f"umount {SCRATCH}/disk")
    machine.run("rm", "--recursive", "--force", SCRATCH)


@pytest.fixture(autouse=True)
def well(hub: Hub) -> Iterator[None]:
    """No fault of the hub outlives its test, and its log is read from where the test begins."""
    hub.gets()
    yield
    hub.shell("rm -f /var/lib/hub/faults.json /var/lib/hub/gated.json")


class Supply:
    """The stage of the weights for one model of these tests."""

    def __init__(self, operator: Controller, machine: Machine, scratch: Path) -> None:
        self.operator, self.machine, self.scratch = operator, machine, scratch

    def play(self, repo: str, *arguments: str, **variables: Any) -> Play:
        name = repo.partition("/")[2]
        given = {
            "model_weights_models": [{"name": name, "repo": repo, "revision": "main", "dir": name}],
            "model_weights_root": f"{SCRATCH}/weights",
            "model_weights_state_directory": f"{SCRATCH}/records",
            "model_weights_progress_directory": f"{SCRATCH}/progress",
            "model_weights_reserve_mib": 64,
            **variables,
        }
        file = self.scratch / "variables.json"
        file.write_text(json.dumps(given))
        return self.operator.play("playbooks/weights.yml", f"--extra-vars=@{file}", *arguments)

    def start(self, repo: str, **changed: Any) -> subprocess.Popen[str]:
        """The module by itself, where the play adds nothing to what it says."""
        name = repo.partition("/")[2]
        arguments = {
            "name": name,
            "repo": repo,
            "path": f"{SCRATCH}/weights/{name}",
            "state_directory": f"{SCRATCH}/records",
            "endpoint": ENDPOINT,
            "reserve_mib": 64,
            **changed,
        }
        return self.operator.start_module("model_weights", arguments)

    def module(self, repo: str, **changed: Any) -> dict[str, Any]:
        return module_result(self.start(repo, **changed))

    def sha256(self, repo: str) -> str:
        return self.machine.run("sha256sum", f"{SCRATCH}/weights/{repo.partition('/')[2]}/model.safetensors").split()[0]


@pytest.fixture
def supply(operator: Controller, machine: Machine, tmp_path: Path) -> Supply:
    return Supply(operator, machine, tmp_path)


@pytest.mark.thorough
def test_hub_breaks_off_in_the_middle_of_a_file(supply: Supply, hub: Hub) -> None:
    hub.faults({"path": "*/model.safetensors", "times": 1, "break_after_bytes": 15 * MIB})
    play = supply.play(LARGE)
    assert play.rc == 0, play.output[-4000:]
    parts = [(line["range"], line["bytes"]) for line in hub.gets() if line["path"].endswith("model.safetensors")]
    rest = (f"bytes={15 * MIB}-{LARGE_MIB * MIB - 1}", (LARGE_MIB - 15) * MIB)
    assert parts == [(None, 15 * MIB), rest]
    assert supply.sha256(LARGE) == hub.sha256(LARGE)


@pytest.fixture
def forwarder(supply: Supply) -> Iterator[None]:
    """The hub on the host's own loopback."""
    machine = supply.machine
    machine.run("systemd-run", "--quiet", "--collect", "--unit=lab-hub-forward", "python3", "-c", FORWARD)
    machine.wait("the hub on the loopback", lambda: machine.host.socket("tcp://127.0.0.1:8081").is_listening, 15)
    yield
    machine.run("systemctl", "stop", "lab-hub-forward.service")


def test_gated_model_with_a_wrong_token_then_the_right_one(
    supply: Supply, hub: Hub, tmp_path: Path, forwarder: None
) -> None:
    """Neither is printed at -vvv, nor left on the host."""
    machine = supply.machine
    wrong, right = "hf_WrongTokenOfNobody", "hf_RightTokenOfSomebody"
    hub.gate(**{SMALL: right})
    begin = machine.run("date", "+%s").strip()
    (tmp_path / "token").write_text(f"{wrong}\n")
    (tmp_path / "token").chmod(0o600)
    there = {"model_weights_endpoint": LOOPBACK}
    refused = supply.play(SMALL, "-vvv", model_weights_token_file=str(tmp_path / "token"), **there)
    message = reason(refused)
    assert f"{LOOPBACK} does not accept the token (HTTP 401), so it was not asked for {SMALL}" in message
    assert "Replace it where it was given, by model_weights_token_file or model_weights_token." in message
    brought = supply.play(SMALL, "-vvv", model_weights_token=right, **there)
    assert brought.rc == 0, brought.output[-4000:]
    assert supply.sha256(SMALL) == hub.sha256(SMALL)
    for play in (refused, brought):
        assert wrong not in play.output and right not in play.output
    journal = machine.run("journalctl", "--quiet", f"--since=@{begin}")
    assert "model_weights" in journal and wrong not in journal and right not in journal
    places = f"{SCRATCH} /var/lib/vllm-edge /etc/vllm-edge /root /home/ops /tmp /run/vllm-edge-secrets"
    find = f"grep --recursive --files-with-matches --no-messages 'hf_[WR][a-z]*TokenOf' {places}"
    assert machine.host.run(find).stdout == ""


@pytest.fixture
def disk(supply: Supply) -> str:
    """A file system with room for the large model and little else."""
    disk = f"{SCRATCH}/disk"
    supply.machine.run("mkdir", "--parents", disk)
    supply.machine.run("mount", "-t", "tmpfs", "-o", f"size={LARGE_MIB + 12}m", "tmpfs", disk)
    return disk


@pytest.mark.thorough
def test_disk_full_while_files_arrive(supply: Supply, hub: Hub, disk: str) -> None:
    machine = supply.machine
    there = {"path": f"{disk}/large", "state_directory": f"{SCRATCH}/records-disk"}
    hub.faults({"path": "*/model.safetensors", "bytes_per_second": 6 * MIB})
    process = supply.start(LARGE, reserve_mib=0, **there)
    machine.wait("the first files", lambda: machine.host.file(f"{disk}/.incoming").exists, 20, every=0.1)
    machine.host.run(f"head -c {LARGE_MIB * MIB} /dev/zero >{disk}/somebody-elses")
    full = module_result(process)
    assert full["failed"]
    assert f"The file system of {disk}/large became full while files arrived (No space left on device" in full["msg"]
    assert "model_weights_root" in full["msg"] and f"Nothing was put into {disk}/large." in full["msg"]
    left = machine.shell(f"find {disk} -type f -size +1M")
    assert left.split() == [f"{disk}/somebody-elses"], "the part is gone, what is not ours is there"

    machine.run("rm", f"{disk}/somebody-elses")
    hub.faults()
    hub.gets()
    brought = supply.module(LARGE, reserve_mib=0, **there)
    assert not brought["failed"], brought["msg"]
    assert hub.brought() == ["model.safetensors"], "what was whole is not brought again"
    assert machine.run("ls", "--almost-all", disk).split() == ["large"]
    assert machine.run("sha256sum", f"{disk}/large/model.safetensors").split()[0] == hub.sha256(LARGE)
