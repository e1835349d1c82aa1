# SPDX-License-Identifier: Apache-2.0
"""The two hosts of the fleet, asked over plain ssh, and the controller, which runs playbooks as an operator does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from load import Gateway

ROOT = Path(__file__).resolve().parents[3]
INVENTORY = ROOT / "molecule/fleet/inventory"
SERVED_S = 240
"""Seconds within which a host serves after its start, on a slow machine beside other tests."""


@dataclass(frozen=True)
class Machine:
    """One host of the fleet."""

    name: str

    @property
    def lab(self) -> str:
        return f"vllm-edge-fleet-{self.name}"

    @property
    def generated(self) -> Path:
        return ROOT / "lab/generated" / self.lab

    @property
    def variables(self) -> dict[str, Any]:
        return dict(json.loads((self.generated / "vars.json").read_text()))

    @property
    def active(self) -> dict[str, Any]:
        return dict(json.loads(self.run("cat /var/lib/vllm-edge/active-profile.json")))

    def run(self, command: str) -> str:
        """Run a command of the shell as root."""
        words = ["ssh", "-F", self.generated / "ssh_config", f"{self.lab}-host", "sudo sh -s"]
        done = subprocess.run(words, input=command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()


A, B = Machine("a"), Machine("b")


@pytest.fixture(scope="session")
def gateways() -> dict[str, Gateway]:
    """The gateway of each host, all with the one key of the client."""
    lines = (A.generated / "clients/lab-default.env").read_text().splitlines()
    client = dict(line.split("=", 1) for line in lines if not line.startswith("#") and "=" in line)
    key, ca = client["OPENAI_API_KEY"], client["SSL_CERT_FILE"]
    return {one.name: Gateway(one.name, one.variables["lab_gateway_port"], key, ca) for one in (A, B)}


def run_lab(*words: str) -> None:
    """Run the lab's command for the second host."""
    place = [f"--name={B.lab}", f"--join={A.lab}", f"--ssh-port={B.variables['ansible_port']}"]
    subprocess.run([sys.executable, "-m", "lab", *place, *words], cwd=ROOT, check=True)


def run_play(playbook: str, *words: str) -> tuple[int, str]:
    """Run a playbook without Molecule's own settings of Ansible; returns its status and the end of its output."""
    operators = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_CALLBACK_PLUGINS": str(ROOT / "tests/callbacks")}
    done = subprocess.run(
        ["ansible-playbook", f"--inventory={INVENTORY}", *words, str(ROOT / playbook)],
        cwd=ROOT,
        env=operators | settings | {"ANSIBLE_NOCOLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=1100,
    )
    return done.returncode, done.stdout[-8000:]


@pytest.fixture
def whole(gateways: dict[str, Gateway]) -> Iterator[None]:
    """Both hosts answer through both gateways before the test, and again after it."""

    def wait() -> None:
        deadline = time.monotonic() + SERVED_S
        for gateway in gateways.values():
            # At the same time, since between equals each gateway takes its own host.
            with ThreadPoolExecutor() as pool:
                while (seen := set(pool.map(gateway.ask, ["chat"] * 6))) != {("a", ""), ("b", "")}:
                    assert time.monotonic() < deadline, f"through {gateway.host}: {seen}"
                    time.sleep(1)

    wait()
    yield
    wait()
