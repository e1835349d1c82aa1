# SPDX-License-Identifier: Apache-2.0
"""Somebody else's things on the host: containers, volume, image, network, unit and files, which no play may touch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Controller, Machine, Play

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
        machine.run(
            *run,
            f"--name={PREFIX}-labelled",
            "--label=com.example.engine=vllm",
            f"--network={PREFIX}-network",
            f"--volume={PREFIX}-volume:/kept",
            base,
            "infinity",
        )
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
    """Somebody else's things, for all tests of a file."""
    neighbours = Neighbours(machine)
    base = json.loads(machine.host.file("/var/lib/vllm-edge/image.json").content_string)["base"]
    neighbours.start(base)
    yield Watched(controller, neighbours)
    neighbours.stop()
