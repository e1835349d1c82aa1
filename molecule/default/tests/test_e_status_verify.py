# SPDX-License-Identifier: Apache-2.0
"""Looking without touching: status says what serves, verify (the deep doctor) finds everything that is wrong at once.

Whatever profile is active. One engine is stopped once, and status is asked while it loads again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import INVENTORY_HOST, Machine
from neighbours import Watched, watched

__all__ = ["watched"]  # a fixture

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


def ask(machine: Machine) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    return status


@pytest.fixture(scope="module")
def status(machine: Machine) -> dict[str, Any]:
    """The host as it serves at first, by its own program."""
    found = ask(machine)
    assert found["problems"] == [], "these tests begin on a host that serves"
    return found


@pytest.fixture(scope="module")
def profile(status: dict[str, Any]) -> str:
    """What runs, said to the plays, so that the inventory is right whatever it says."""
    return f"--extra-vars=serving_profile={status['active_profile']['profile']}"


@pytest.fixture(scope="module")
def victim(status: dict[str, Any]) -> dict[str, Any]:
    """The engine with the smallest model, which loads fastest."""
    (found,) = [engine for engine in status["engines"] if "sentry" in engine["served_names"]]
    return dict(found)


def lives(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {engine["engine"]: (engine["container_id"], engine["container_started_at"]) for engine in status["engines"]}


# ---- status -----------------------------------------------------------------------------------------------------


def test_status_in_tables(watched: Watched, status: dict[str, Any], profile: str) -> None:
    play = watched.play("playbooks/status.yml", profile)
    assert (play.rc, play.recap["changed"]) == (0, 0), play.output[-4000:]
    lines = play.output.splitlines()
    active = status["active_profile"]
    assert f"{INVENTORY_HOST}: profile {active['profile']}, generation {active['generation']}" in lines
    for engine in status["engines"]:
        assert f"  container running since {engine['container_started_at']}" in lines
    for gpu in status["gpus"]:
        (line,) = [line for line in lines if re.match(rf"\s+{gpu['index']}  {gpu['name']}", line)]
        assert f"{gpu['used_mib']:,}" in line and f"{gpu['budget_mib']:,}" in line
    assert "Problems:" not in lines


# ---- verify -----------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(machine: Machine, status: dict[str, Any], victim: dict[str, Any]) -> Iterator[dict[str, str]]:
    """One engine stopped, a byte of its weights turned around, a file of it opened to everybody.

    The other engines, where there are any, get a budget of 1 MiB.
    """
    record = json.loads(machine.host.file(f"/var/lib/vllm-edge/weights/{victim['model']}.json").content_string)
    weights = f"{record['path']}/model.safetensors"
    create = f"/etc/vllm-edge/engines/{victim['engine']}/docker-create"
    mode = oct(machine.host.file(create).mode)[2:]
    machine.run("systemctl", "stop", victim["unit"])
    machine.run("python3", "-c", FLIP, weights)
    machine.run("chmod", "0666", create)
    others = [engine["engine"] for engine in status["engines"] if engine["engine"] != victim["engine"]]
    for name in others:
        config = f"/etc/vllm-edge/engines/{name}/engine.json"
        machine.run("cp", "--preserve", config, f"/run/{name}.json")
        machine.run("sed", "-Ei", r's/("vram_budget_mib": *)[0-9]+/\11/', config)
    yield {"weights": weights, "create": create}
    for name in others:
        machine.run("mv", f"/run/{name}.json", f"/etc/vllm-edge/engines/{name}/engine.json")
    machine.run("python3", "-c", FLIP, weights)
    machine.run("chmod", mode, create)
    machine.run("systemctl", "start", "--no-block", victim["unit"])


def test_verify_names_everything_that_is_wrong_at_once(
    machine: Machine,
    watched: Watched,
    status: dict[str, Any],
    profile: str,
    victim: dict[str, Any],
    damaged: dict[str, str],
) -> None:
    """A weight byte with size and times kept, an engine that is down, a mode, and a budget that is too small."""
    others = [engine for engine in status["engines"] if engine["engine"] != victim["engine"]]
    play = watched.play("playbooks/verify.yml", profile)
    assert (play.rc != 0, play.recap["changed"]) == (True, 0), play.output[-6000:]
    told = " ".join(play.output.split())
    assert f"{victim['unit']} is inactive: 'vllm-edge explain {victim['engine']}'" in told
    assert f"{damaged['weights']} of model {victim['model']} is damaged: its sha256 is" in told
    assert "verify_weights=full" in told
    assert f"{damaged['create']} is not what the inventory renders: mode 0666, wanted 0640" in told
    over = re.findall(r"GPU \d \(slot \d[^)]*\) is over budget", told)
    assert len(set(over)) == sum(len(engine["gpus"]) for engine in others)
    assert re.search(r"\b3 fail\b.*; failed: deep\.status, deep\.weights, deep\.files$", play.output, re.MULTILINE)
    assert "does not answer as it should" not in told, "what is down is not said to be silent, too"
    assert f"{damaged['create']} is not what generation" not in told, "a file is named once"
    now = ask(machine)
    named = f"{damaged['create']} is not what generation {status['active_profile']['generation']} says: mode 0666"
    assert [problem for problem in now["problems"] if named in problem], "by the host's own program, too"
    kept = {name: life for name, life in lives(status).items() if name != victim["engine"]}
    assert {name: life for name, life in lives(now).items() if name != victim["engine"]} == kept


def test_verify_a_host_that_is_right(machine: Machine, watched: Watched, profile: str, victim: dict[str, Any]) -> None:
    machine.wait(
        "the engine to serve again",
        lambda: machine.unit("ActiveState", unit=victim["unit"])["ActiveState"] == "active",
        120,
    )
    play = watched.play("playbooks/verify.yml", profile)
    assert (play.rc, play.recap["changed"]) == (0, 0), play.output[-6000:]
    told = " ".join(play.output.split())
    assert "; failed: " not in told and not re.search(r"\bunknown deep\.", told)
    for engine in ask(machine)["engines"]:
        for name in engine["served_names"]:
            assert f"{name} ({engine['engine']}) in " in told
