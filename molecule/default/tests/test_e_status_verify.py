# SPDX-License-Identifier: Apache-2.0
"""Looking without touching: status says what serves, verify (the deep doctor) finds everything that is wrong at once.

One engine is stopped once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ENGINES, ROLES, VICTIM, Controller, Machine

# On the host: turns one byte of a file around and leaves size and times as they are. Twice is as before.
FLIP = """
import os, sys
path = sys.argv[1]
found = os.stat(path)
with open(path, "r+b") as file:
    file.seek(found.st_size // 2)
    byte = file.read(1)[0]
    file.seek(found.st_size // 2)
    file.write(bytes([byte ^ 255]))
os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
"""


OTHERS = [engine for engine in ENGINES if engine is not VICTIM]
CREATE = f"{VICTIM.etc}/docker-create"
WEIGHTS = f"{VICTIM.weights}/model.safetensors"


def ask(machine: Machine) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    return status


# ---- verify -----------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(machine: Machine) -> Iterator[None]:
    """One engine stopped, a byte of its weights turned around, a file of it opened to everybody.

    The other engines get a budget of 1 MiB.
    """
    machine.run("systemctl", "stop", VICTIM.unit)
    machine.run("python3", "-c", FLIP, WEIGHTS)
    machine.run("chmod", "0666", CREATE)
    for engine in OTHERS:
        machine.run("cp", "--preserve", f"{engine.etc}/engine.json", f"/run/{engine.name}.json")
        machine.run("sed", "-Ei", r's/("vram_budget_mib": *)[0-9]+/\11/', f"{engine.etc}/engine.json")
    yield
    for engine in OTHERS:
        machine.run("mv", f"/run/{engine.name}.json", f"{engine.etc}/engine.json")
    machine.run("python3", "-c", FLIP, WEIGHTS)
    machine.run("chmod", "0640", CREATE)
    machine.run("systemctl", "start", "--no-block", VICTIM.unit)


def test_verify_names_everything_that_is_wrong_at_once(
    machine: Machine, controller: Controller, undisturbed: None, damaged: None
) -> None:
    """A weight byte with size and times kept, an engine that is down, a mode, and a budget that is too small."""
    play = controller.play("playbooks/verify.yml")
    assert (play.rc != 0, play.recap["changed"]) == (True, 0), play.output[-6000:]
    told = " ".join(play.output.split())
    assert f"{VICTIM.unit} is inactive: 'vllm-edge explain {VICTIM.name}'" in told
    assert f"{WEIGHTS} of model {VICTIM.model} is damaged: its sha256 is" in told
    assert "verify_weights=full" in told
    assert f"{CREATE} is not what the inventory renders: mode 0666, wanted 0640" in told
    over = re.findall(r"GPU \d \(slot \d[^)]*\) is over budget", told)
    assert len(set(over)) == sum(len(engine.gpus) for engine in OTHERS)
    assert re.search(r"\b3 fail\b.*; failed: deep\.status, deep\.weights, deep\.files$", play.output, re.MULTILINE)
    assert "does not answer as it should" not in told, "what is down is not said to be silent, too"
    assert f"{CREATE} is not what generation" not in told, "a file is named once"
    now = ask(machine)
    named = f"{CREATE} is not what generation {now['active_profile']['generation']} says: mode 0666"
    assert [problem for problem in now["problems"] if named in problem], "by the host's own program, too"


def test_verify_a_host_that_is_right(machine: Machine, controller: Controller, undisturbed: None) -> None:
    machine.wait_until_serving()
    play = controller.play("playbooks/verify.yml")
    assert (play.rc, play.recap["changed"]) == (0, 0), play.output[-6000:]
    told = " ".join(play.output.split())
    assert "; failed: " not in told and not re.search(r"\bunknown deep\.", told)
    assert [name for name, engine in ROLES.items() if f"{name} ({engine.name}) in " not in told] == []
