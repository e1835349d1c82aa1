# SPDX-License-Identifier: Apache-2.0
"""Taking it all away again, while other people's things live on beside it. The last file: it leaves no engine."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import INVENTORY_HOST, Controller, Machine, Play

# ---- somebody else's things on the host, which no play may touch ------------------------------------------------

PREFIX = "neighbour"
UNIT = "vllm-of-somebody.service"
FILES = {
    "/data/neighbour/results.csv": "1,2,3\n",
    "/data/vllm/weights/neighbours-model/model.safetensors": "weights of somebody else\n",
    "/etc/vllm-edge/notes-of-an-operator.txt": "do not touch\n",
    f"/etc/systemd/system/{UNIT}": "[Service]\nExecStart=/bin/sleep infinity\n",
}
UNTOUCHED = ["/etc/docker/daemon.json", "/etc/apt/sources.list.d", "/etc/apt/keyrings", "/etc/apt/preferences.d"]
"""What site.yml has made and other people may use."""

BUILD = """
set -e
printf 'FROM scratch\\nLABEL neighbour=yes\\nCOPY file /file\\n' > /data/neighbour/Dockerfile
echo neighbour > /data/neighbour/file
docker build --quiet --tag neighbour/image:1 /data/neighbour
"""


class Neighbours:
    """Sets them up, and says what they look like."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def start(self, base: str) -> None:
        self.stop()
        machine = self.machine
        for path, text in FILES.items():
            machine.shell(f"mkdir -p $(dirname {path}) && printf %s {shlex.quote(text)} > {path}")
        machine.shell(BUILD)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "start", UNIT)
        machine.run("docker", "volume", "create", f"{PREFIX}-volume")
        machine.run("docker", "network", "create", "--label=com.example.team=a", f"{PREFIX}-network")
        run = ["docker", "run", "--detach", "--stop-signal=SIGKILL", "--entrypoint=sleep"]
        machine.run(*run, f"--name={PREFIX}-of-the-same-base", base, "infinity")
        labelled = [f"--name={PREFIX}-labelled", "--label=com.example.engine=vllm", f"--network={PREFIX}-network"]
        machine.run(*run, *labelled, f"--volume={PREFIX}-volume:/kept", base, "infinity")
        machine.run("docker", "exec", "--user=0", f"{PREFIX}-labelled", "sh", "-c", "echo kept > /kept/file")
        machine.run("docker", "create", f"--name={PREFIX}-stopped", "--entrypoint=true", base)
        machine.run("docker", "start", "--attach", f"{PREFIX}-stopped")

    def stop(self) -> None:
        run = self.machine.host.run
        run(f"docker ps --all --quiet --filter name={PREFIX} | xargs --no-run-if-empty docker rm --force")
        run(f"docker volume rm {PREFIX}-volume; docker network rm {PREFIX}-network; docker image rm neighbour/image:1")
        run(f"systemctl stop {UNIT}")
        run(f"rm -rf /data/neighbour /data/vllm/weights/neighbours-model {' '.join(FILES)}; systemctl daemon-reload")

    def look(self) -> dict[str, Any]:
        """Everything by which a change could be seen."""
        machine = self.machine
        names = machine.shell(f"docker ps --all --quiet --filter name={PREFIX}").split()
        containers = {
            found["Name"]: [found["Id"], found["Image"], found["State"]["Status"], found["State"]["StartedAt"]]
            for found in json.loads(machine.run("docker", "container", "inspect", *names))
        }
        files = machine.shell(
            f"find {' '.join(FILES)} /data/neighbour {' '.join(UNTOUCHED)} -printf '%p %U:%G %m %s %T@ %i\\n' | sort"
        )
        volume = machine.shell(f"cd /var/lib/docker/volumes/{PREFIX}-volume/_data && sha256sum file && stat -c %Y file")
        return {
            "containers": containers,
            "networks": machine.run("docker", "network", "inspect", "--format={{.Id}}", f"{PREFIX}-network"),
            "volume": volume,
            "images": machine.run("docker", "image", "inspect", "--format={{.Id}} {{.RepoTags}}", "neighbour/image:1"),
            "files": files.splitlines(),
            "unit": machine.unit("ActiveState", "MainPID", "InvocationID", unit=UNIT),
            "docker": machine.unit("MainPID", "InvocationID", unit="docker.service"),
            "packages": machine.shell("dpkg-query --show | sha256sum"),
        }


class Watched:
    """Runs plays as the controller does, and looks at the neighbours before and after each."""

    def __init__(self, controller: Controller, neighbours: Neighbours) -> None:
        self.controller = controller
        self.neighbours = neighbours
        self.before = neighbours.look()

    def play(self, playbook: str, *arguments: str) -> Play:
        played = self.controller.play(playbook, *arguments)
        self.unharmed()
        return played

    def unharmed(self) -> None:
        now = self.neighbours.look()
        for what, before in self.before.items():
            assert now[what] == before, f"somebody else's {what} changed"


@pytest.fixture(scope="module")
def watched(machine: Machine, controller: Controller) -> Iterator[Watched]:
    neighbours = Neighbours(machine)
    base = json.loads(machine.host.file("/var/lib/vllm-edge/image.json").content_string)["base"]
    neighbours.start(base)
    yield Watched(controller, neighbours)
    neighbours.stop()


# ---- ours -------------------------------------------------------------------------------------------------------

TEARDOWN = "playbooks/teardown.yml"
NAMED = ["-e", f"teardown={INVENTORY_HOST}"]
NOTES = "/etc/vllm-edge/notes-of-an-operator.txt"
HOOK = "/etc/vllm-edge/hooks/after_commit.d/50-notify"
"""An operator's."""


def told(play: Play) -> dict[str, list[str]]:
    """The last lines of the play: what went, what was kept, what is not ours."""
    lines = play.output.splitlines()
    begin = next(
        at for at, line in enumerate(lines) if re.match(rf"{INVENTORY_HOST}: (would remove|removed|nothing)", line)
    )
    found: dict[str, list[str]] = {}
    heading = ""
    for line in [re.sub(r"^\S+: ", "", lines[begin]), *lines[begin + 1 : lines.index("", begin)]]:
        if line.startswith("    "):
            found[heading][-1] += " " + line.strip()
        elif line.startswith("  "):
            found[heading].append(line.strip())
        else:
            heading = line
            found[heading] = []
    return found


def containers(machine: Machine) -> str:
    return machine.shell("docker ps --all --format '{{.ID}} {{.Names}} {{.State}}' --filter label=vllm-edge.engine")


def weights(machine: Machine) -> str:
    """Every file of ours there, so that a download, or a second hashing into a record, could be seen."""
    return machine.shell(
        "find /data/vllm/weights /var/lib/vllm-edge/weights -type f "
        "-not -path '*/neighbours-model/*' -not -name '*.lock' -printf '%p %s %i %T@ %u:%g\\n' | sort"
    )


@pytest.fixture(scope="module")
def before(machine: Machine) -> dict[str, Any]:
    """The host as it serves at first."""
    status: dict[str, Any] = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    assert status["engines"], "these tests begin on a host with engines"
    machine.shell(f"printf '#!/bin/sh\\n' > {HOOK}; chmod 0755 {HOOK}")
    base = json.loads(machine.host.file("/var/lib/vllm-edge/image.json").content_string)["base"]
    return status | {"base": base, "weights": weights(machine)}


def test_refuses_a_host_that_was_not_named(machine: Machine, watched: Watched, before: dict[str, Any]) -> None:
    running = containers(machine)
    play = watched.play(TEARDOWN, "-e", "teardown=another-host")
    assert play.rc != 0 and play.recap["changed"] == 0
    words = " ".join(play.output.split())
    assert "Nothing was removed, as teardown is 'another-host' and does not name this host" in words
    assert f"`-e teardown={INVENTORY_HOST}` removes it" in words
    assert containers(machine) == running


def test_refuses_while_a_switch_runs(machine: Machine, watched: Watched, before: dict[str, Any]) -> None:
    """It holds its lock for its whole life."""
    running, holder = containers(machine), "switch-of-somebody.service"
    lock = "/var/lib/vllm-edge/switch.lock"
    machine.run("systemd-run", f"--unit={holder}", "flock", lock, "sleep", "300")
    try:
        machine.wait("the lock", lambda: machine.host.run(f"flock --nonblock {lock} true").rc != 0, 10)
        play = watched.play(TEARDOWN, *NAMED)
    finally:
        machine.run("systemctl", "stop", holder)
    assert play.rc != 0 and play.recap["changed"] == 0
    assert f"A switch runs on {INVENTORY_HOST}. Nothing was removed." in " ".join(play.output.split())
    assert containers(machine) == running


@pytest.fixture(scope="module")
def foreseen(watched: Watched, machine: Machine, before: dict[str, Any]) -> list[str]:
    """What `--check` says would go; it touches nothing."""
    running, kept = containers(machine), weights(machine)
    play = watched.play(TEARDOWN, "--check")
    assert play.rc == 0, play.output[-5000:]
    assert (containers(machine), weights(machine)) == (running, kept)
    assert all(machine.host.file(path).exists for path in ("/opt/vllm-edge", "/etc/vllm-edge/engines"))
    return told(play)["would remove"]


def test_check_mode_lists_what_would_go(foreseen: list[str], before: dict[str, Any]) -> None:
    for engine in before["engines"]:
        assert f"container {engine['container']}" in foreseen
        assert f"/etc/systemd/system/{engine['unit']}" in foreseen
    assert {
        "/etc/tmpfiles.d/vllm-edge.conf",
        "/run/vllm-edge/",
        "/run/vllm-edge-exporter/",
        "/var/lib/vllm-edge/metrics.json",
        "user vllm-edge-exporter",
        "user vllm-edge-gateway",
        "/opt/vllm-edge/",
        "/usr/local/bin/vllm-edge",
        "/data/vllm/cache/",
    } <= {*foreseen}
    assert f"image {before['engines'][0]['image']}" in foreseen
    assert not any(path.startswith("/data/vllm/weights") for path in foreseen)
    assert not any(before["base"] in line for line in foreseen)


def test_interrupted_and_finished_by_the_next_run(
    machine: Machine, watched: Watched, before: dict[str, Any], foreseen: list[str]
) -> None:
    process = watched.controller.start_play(TEARDOWN, *NAMED)
    assert process.stdout is not None
    seen, begin = "", time.monotonic()
    for line in process.stdout:
        seen += line
        assert time.monotonic() - begin < 120, seen[-3000:]
        if "TASK [vllm_engine : Remove the units]" in line:
            break
    process.terminate()
    process.wait(30)
    watched.unharmed()
    assert containers(machine) == "" and machine.host.file("/opt/vllm-edge").exists, "it was ended in the middle"

    play = watched.play(TEARDOWN, *NAMED)
    assert play.rc == 0, play.output[-5000:]
    found = told(play)
    assert {*found["removed"]} <= {*foreseen}, "nothing goes that check mode did not name"
    assert [path for path in foreseen if path.startswith("/") and machine.host.file(path).exists] == []
    assert (
        machine.shell("systemctl list-units --all --plain --no-legend 'vllm-*'").split()[0]
        == "vllm-of-somebody.service"
    )
    images = machine.run("docker", "images", "--format={{.Repository}}:{{.Tag}}").split()
    assert before["base"] in images and not any(image.startswith("vllm-edge/") for image in images)
    assert machine.shell("docker network ls --quiet --filter label=vllm-edge.network") == ""
    assert weights(machine) == before["weights"], "weights and their records stay"
    assert machine.host.user("vllm-edge").exists
    assert any("weights in /data/vllm/weights/" in line and "remove_weights=true" in line for line in found["kept"])
    assert any("NVIDIA driver, Docker" in line for line in found["kept"])
    assert found["not ours, left alone"] == [
        f"{HOOK}: vllm-edge did not create it",
        f"{NOTES}: vllm-edge did not create it",
    ]


def test_the_rest_of_the_host_still_works(machine: Machine) -> None:
    assert len(machine.gpu_memory()) == 4 and set(machine.gpu_memory().values()) == {0}
    assert json.loads(machine.run("docker", "info", "--format={{json .LiveRestoreEnabled}}")) is True


def test_nothing_is_left_and_a_second_run_changes_nothing(machine: Machine, watched: Watched) -> None:
    """Once other people's files are gone, so are directories, user and group."""
    watched.neighbours.stop()
    machine.run("rm", HOOK)
    first = watched.controller.play(TEARDOWN, *NAMED, "-e", "remove_weights=true")
    assert first.rc == 0, first.output[-5000:]
    assert {"user vllm-edge", "group vllm-edge", "/etc/vllm-edge/", "/data/vllm/"} <= {*told(first)["removed"]}
    second = watched.controller.play(TEARDOWN, *NAMED, "-e", "remove_weights=true")
    assert (second.rc, second.recap["changed"]) == (0, 0), second.output[-5000:]
    assert f"{INVENTORY_HOST}: nothing of vllm-edge is left to remove" in second.output.splitlines()
    assert not machine.host.user("vllm-edge").exists and not machine.host.group("vllm-edge").exists
    traces = machine.shell(
        "find /etc /opt /usr/local /var/lib /data -name '*vllm*' -not -path '/var/lib/docker/*' | sort"
    ).split()
    apt = [path for path in traces if path.startswith(("/etc/apt/", "/var/lib/apt/"))]
    kept = {*apt, "/etc/modules-load.d/vllm-edge-nvidia.conf"}
    assert {*traces} == kept, "apt repositories and the driver stay"
    assert not machine.host.file("/etc/systemd/system/haproxy.service").exists, "it was masked"
