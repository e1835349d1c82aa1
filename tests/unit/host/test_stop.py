# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge stop`: who is stopped, who is not, and what is left for those that come after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.generation.model import Choice
from ansible.module_utils.vllm_edge.names import TARGET
from ansible.module_utils.vllm_edge.switch import journal as journal_module
from ansible.module_utils.vllm_edge.switch import run
from ansible.module_utils.vllm_edge.switch.journal import Lock
from ansible.module_utils.vllm_edge.switch.model import Exit, PhaseFailed
from ansible.module_utils.vllm_edge.switch.stop import run_stop
from ansible.module_utils.vllm_edge.system.systemd import Systemd
from fake_world import FakeWorld, host, new_host, unlike


@dataclass
class TargetAlone(Systemd):
    """systemd, of which only the target is asked for."""

    world: FakeWorld | None = None
    said: str | None = None

    def stop(self, units: Sequence[str], timeout_s: float) -> str | None:
        assert self.world is not None
        if self.said is None:
            running = [name for name, unit in self.world.load()["units"].items() if unit["active"] == "active"]
            assert running == [], "the target would take these along, in the middle of their requests"
            assert units == [TARGET]
            self.world.change(target={"enabled": True, "active": False})
        return self.said


Ended = tuple[int, dict[str, Any]]
Run = Callable[..., Ended]


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr(journal_module, "LOCK_PATIENCE_S", 0.05)
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def go(world: FakeWorld, said: str | None = None) -> Ended:
        capsys.readouterr()
        systemd = TargetAlone(world=world, said=said)
        status = run_stop(world.paths, output="json", open_world=lambda paths: world, systemd=systemd)
        told = json.loads(capsys.readouterr().out)
        assert isinstance(told, dict)
        return status, told

    return go


def log(world: FakeWorld) -> list[str]:
    return [entry.split("@")[0] for entry in world.load()["log"] if not entry.startswith("moves")]


def test_every_engine_leaves_after_its_requests_and_a_switch_brings_them_back(
    tmp_path: Path, stop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, old, _ = host(tmp_path)
    before = world.load()
    status, told = stop(world)
    assert (status, told["status"], told["generation"]) == (Exit.OK, "ok", old.number)
    assert set(told["engines"]) == set(old.engines)
    assert log(world) == ["hook before_drain", "drain", "stop"]
    after = world.load()
    assert {unit["active"] for unit in after["units"].values()} == {"inactive"}
    assert after["target"] == {"enabled": True, "active": False}
    assert after["foreign"] == before["foreign"]
    assert f"'vllm-edge switch {old.number}' brings back" in told["message"]

    monkeypatch.setattr(run, "_open_world", lambda paths: world)
    run.run_switch(world.paths, old.number, Choice())
    assert unlike(world, old) == []
    assert log(world)[-1] == "hook after_commit"


def test_a_second_time_there_is_nothing_to_stop(tmp_path: Path, stop: Run) -> None:
    world, old, _ = host(tmp_path)
    stop(world)
    entries = len(log(world))
    status, told = stop(world)
    assert (status, told["engines"], told["generation"]) == (Exit.OK, [], old.number)
    assert told["message"].startswith("no engine ran.")
    assert len(log(world)) == entries


def test_a_hook_that_says_no_keeps_every_engine(tmp_path: Path, stop: Run) -> None:
    world, old, _ = host(tmp_path)
    world.change(failing_hooks=["before_drain"])
    status, told = stop(world)
    assert (status, told["status"], told["engines"]) == (Exit.REFUSED, "refused", [])
    assert "10-gateway ended with status 1" in told["message"]
    assert unlike(world, old) == []


def test_an_engine_that_does_not_stop_is_named(tmp_path: Path, stop: Run) -> None:
    world, _, _ = host(tmp_path)
    world.change(quirks={"e4b": "cannot be stopped"})
    status, told = stop(world)
    assert (status, told["status"]) == (Exit.FAILED, "failed")
    assert told["message"].startswith("e4b did not stop. 'vllm-edge switch ")
    assert world.load()["target"]["active"], "it would have taken the engine along"


def test_a_target_that_does_not_stop(tmp_path: Path, stop: Run) -> None:
    world, _, _ = host(tmp_path)
    status, told = stop(world, said="Job timed out")
    assert status == Exit.FAILED
    assert f"{TARGET} did not stop: Job timed out." in told["message"]


def test_a_docker_that_is_away_before_anything_was_stopped(tmp_path: Path, stop: Run) -> None:
    world, old, _ = host(tmp_path)
    world.change(docker_away=1)
    status, told = stop(world)
    assert (status, told["message"]) == (Exit.REFUSED, "The Docker Engine did not answer.")
    assert unlike(world, old) == []


def test_while_a_switch_runs(tmp_path: Path, stop: Run) -> None:
    world, old, _ = host(tmp_path)
    with Lock(world.paths):
        status, told = stop(world)
    assert (status, told["status"]) == (Exit.BUSY, "busy")
    assert told["message"].endswith("Nothing was stopped.")
    assert unlike(world, old) == []


def test_after_a_switch_that_was_killed(tmp_path: Path, stop: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _, new = host(tmp_path)

    def killed(name: str, number: int | None) -> None:
        if name == "drain":
            raise SystemExit(137)

    world.before = killed
    monkeypatch.setattr(run, "_open_world", lambda paths: world)
    with pytest.raises(SystemExit):
        run.run_switch(world.paths, new.number, Choice())
    world.before = lambda name, number: None
    entries = len(log(world))
    status, told = stop(world)
    assert status == Exit.REFUSED and "'vllm-edge recover' first" in told["message"]
    assert len(log(world)) == entries


def test_where_nothing_is_committed(tmp_path: Path, stop: Run) -> None:
    world = new_host(tmp_path)
    status, told = stop(world)
    assert (status, told["generation"], told["engines"]) == (Exit.OK, None, [])


def test_a_generation_that_cannot_be_read(tmp_path: Path, stop: Run) -> None:
    world, old, _ = host(tmp_path)
    (old.directory / "generation.json").write_text("{")
    status, told = stop(world)
    assert status == Exit.REFUSED and "Nothing was stopped; site.yml repairs it." in told["message"]
    assert log(world) == []


def test_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str], stop: Run) -> None:
    world, old, _ = host(tmp_path)

    def slow(name: str, number: int | None) -> None:
        if name == "stop":
            raise PhaseFailed("e2b hangs in the driver.")

    world.before = slow
    capsys.readouterr()
    assert run_stop(world.paths, output="text", open_world=lambda paths: world) == Exit.FAILED
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        f"e2b hangs in the driver. 'vllm-edge switch {old.number}' brings back what is missing and verifies it.\n"
    )
