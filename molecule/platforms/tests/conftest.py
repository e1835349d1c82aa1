# SPDX-License-Identifier: Apache-2.0
"""The three hosts, asked over plain ssh, and the controller, which runs playbooks as an operator does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INVENTORY = ROOT / "molecule/platforms/inventory"
LAB = os.environ.get("VLLM_EDGE_LAB_NAME", "vllm-edge-platforms")
DRIVER = "nvidia_driver : Gather the distribution"
"""Plays begin here, which spares the roles before it."""


@dataclass(frozen=True)
class Machine:
    """One platform's host."""

    name: str

    def ask(self, command: str) -> subprocess.CompletedProcess[str]:
        """A command line of the shell, as root."""
        config = ROOT / "lab/generated" / f"{LAB}-{self.name}" / "ssh_config"
        words = ["ssh", "-F", str(config), f"{LAB}-{self.name}-host", "sudo", "sh", "-c", shlex.quote(command)]
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)

    def run(self, command: str) -> str:
        done = self.ask(command)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    @contextlib.contextmanager
    def broken(self, harm: str, repair: str) -> Iterator[None]:
        """Something is wrong for as long as the test looks."""
        self.run(harm)
        try:
            yield
        finally:
            self.run(repair)

    def somebody(self) -> str:
        """What somebody else has there."""
        script = (ROOT / "molecule/platforms/tests/somebody.sh").read_text()
        return self.run(f"sh -c {shlex.quote(script)}")


@dataclass(frozen=True)
class Play:
    """One run of ansible-playbook, as it looks on the operator's terminal."""

    rc: int
    output: str
    changed: list[str] = field(default_factory=list)

    @property
    def message(self) -> str:
        """What the failed task said, on one line."""
        found = re.search(r"^fatal: .*?^    msg: (.*?)(?=^\S|^    \S+:|\Z)", self.output, re.MULTILINE | re.DOTALL)
        assert found, self.output[-3000:]
        return " ".join(found[1].split()).strip("'\"").replace("''", "'")


def changed_tasks(output: str) -> list[str]:
    """What ansible's default output says was changed."""
    changed, task = [], ""
    for line in output.splitlines():
        if heading := re.match(r"^(?:TASK|RUNNING HANDLER) \[(.*)\] \**$", line):
            task = heading.group(1)
        elif mark := re.match(r"^changed: \[[^\]]+\](?: => \(item=(.*)\))?", line):
            changed.append(f"{task} ({mark.group(1)})" if mark.group(1) else task)
    return changed


Run = Callable[..., Play]


@pytest.fixture(scope="session")
def play() -> Run:
    """play(playbook, host, *arguments, **variables)"""

    def run(playbook: str, host: str, *arguments: str, **variables: object) -> Play:
        operators = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        environment = operators | {
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests" / "callbacks"),
        }
        words = ["ansible-playbook", f"--inventory={INVENTORY}", f"--limit={host}", "--diff", *arguments]
        done = subprocess.run(
            [*words, f"--extra-vars={json.dumps(variables)}", str(ROOT / playbook)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=500,
        )
        return Play(done.returncode, done.stdout, changed_tasks(done.stdout))

    return run


@pytest.fixture(scope="session")
def driver_play(play: Run) -> Run:
    """driver_play(host, **variables): the host stage from the driver's role on."""

    def run(host: str, **variables: object) -> Play:
        return play("playbooks/host.yml", host, f"--start-at-task={DRIVER}", **variables)

    return run


DEBIAN_12, DEBIAN_13, UBUNTU = Machine("debian12"), Machine("debian13"), Machine("ubuntu2404")
MACHINES = [DEBIAN_12, DEBIAN_13, UBUNTU]
