# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge stop`: who is stopped, who is not, and what is left for those that come after."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.names import TARGET
from ansible.module_utils.vllm_edge.switch import stop as stop_module
from ansible.module_utils.vllm_edge.switch.journal import take_lock
from ansible.module_utils.vllm_edge.switch.model import Exit
from ansible.module_utils.vllm_edge.switch.stop import run_stop
from ansible.module_utils.vllm_edge.system.systemd import Systemd
from fake_machine import FakeMachine, new_host
from switch_host import SwitchHost


@dataclass
class TargetAlone(Systemd):
    """systemd, of which only the target is asked for."""

    machine: FakeMachine | None = None
    said: str | None = None

    def stop(self, units: Sequence[str], timeout_s: float) -> str | None:
        assert self.machine is not None
        if self.said is None:
            running = [name for name, unit in self.machine.load()["units"].items() if unit["active"] == "active"]
            assert running == [], "the target would take these along, in the middle of their requests"
            assert units == [TARGET]
            self.machine.change(target={"enabled": True, "active": False})
        return self.said


Stop = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def stop(bench: SwitchHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Stop:
    def go(machine: FakeMachine = bench.machine, said: str | None = None) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        monkeypatch.setattr(FakeMachine, "systemd", TargetAlone(machine=machine, said=said), raising=False)
        monkeypatch.setattr(stop_module, "SwitchedHost", lambda paths: machine)
        status = run_stop(machine.paths, output="json")
        told = json.loads(capsys.readouterr().out)
        assert isinstance(told, dict)
        return status, told

    return go


def actions(bench: SwitchHost) -> list[str]:
    return [entry.split("@")[0] for entry in bench.log if not entry.startswith("moves")]


def test_every_engine_leaves_after_its_requests_and_a_switch_brings_them_back(bench: SwitchHost, stop: Stop) -> None:
    assert bench.old is not None
    before = bench.machine.load()
    status, told = stop()
    assert (status, told["status"], told["generation"]) == (Exit.OK, "ok", 1)
    assert set(told["engines"]) == set(bench.old.engines)
    assert actions(bench) == ["hook before_drain", "away", "drain", "stop", "back"]
    after = bench.machine.load()
    assert {unit["active"] for unit in after["units"].values()} == {"inactive"}
    assert after["target"] == {"enabled": True, "active": False}
    assert after["foreign"] == before["foreign"]
    assert after["away"] == [], "an engine that systemctl starts must be reached"
    assert "'vllm-edge switch 1' brings back" in told["message"]
    entries = len(actions(bench))
    status, told = stop()
    assert (status, told["engines"], told["generation"]) == (Exit.OK, [], 1)
    assert told["message"].startswith("no engine ran.")
    assert len(actions(bench)) == entries, "a second time there is nothing to stop"
    bench.switch(bench.old, origin="host")
    assert bench.unlike(bench.old) == []
    assert actions(bench)[-1] == "hook after_commit"


@pytest.mark.parametrize(("action", "moment"), [("drain", "before"), ("away", "after")])
def test_clients_come_back_where_nothing_was_stopped(bench: SwitchHost, stop: Stop, action: str, moment: str) -> None:
    bench.fail(action, "no", bench.old, moment=moment)
    assert stop()[0] == Exit.REFUSED
    assert bench.unlike(bench.old) == []


def test_an_engine_that_does_not_stop(bench: SwitchHost, stop: Stop, capsys: pytest.CaptureFixture[str]) -> None:
    bench.machine.change(quirks={"e4b": "cannot be stopped"})
    status, told = stop()
    assert (status, told["status"]) == (Exit.FAILED, "failed")
    assert told["message"] == ("e4b did not stop. 'vllm-edge switch 1' brings back what is missing and verifies it.")
    assert bench.machine.load()["target"]["active"], "it would have taken the engine along"
    assert run_stop(bench.paths, output="text") == Exit.FAILED
    assert capsys.readouterr() == ("", told["message"] + "\n")


def test_a_target_that_does_not_stop(stop: Stop) -> None:
    status, told = stop(said="Job timed out")
    assert status == Exit.FAILED and f"{TARGET} did not stop: Job timed out." in told["message"]


def test_what_refuses_to_stop_leaves_every_engine(bench: SwitchHost, stop: Stop) -> None:
    with take_lock(bench.paths):
        status, told = stop()
    assert (status, told["status"]) == (Exit.BUSY, "busy")
    assert told["message"].endswith("Nothing was stopped.")
    assert bench.unlike(bench.old) == []
    bench.machine.change(docker_away=1)
    status, told = stop()
    assert (status, told["message"]) == (Exit.REFUSED, "The Docker Engine did not answer.")
    assert bench.unlike(bench.old) == []
    bench.machine.change(failing_hooks=["before_drain"])
    status, told = stop()
    assert (status, told["status"], told["engines"]) == (Exit.REFUSED, "refused", [])
    assert "10-gateway ended with status 1" in told["message"]
    assert bench.unlike(bench.old) == []


def test_after_a_switch_that_was_killed(bench: SwitchHost, stop: Stop) -> None:
    bench.kill("drain")
    entries = len(actions(bench))
    status, told = stop()
    assert status == Exit.REFUSED and "'vllm-edge recover' first" in told["message"]
    assert len(actions(bench)) == entries


def test_where_nothing_is_committed_or_it_cannot_be_read(tmp_path: Path, stop: Stop, bench: SwitchHost) -> None:
    status, told = stop(new_host(tmp_path / "new"))
    assert (status, told["generation"], told["engines"]) == (Exit.OK, None, [])
    (bench.paths.generation_dir(1) / "generation.json").write_text("{")
    status, told = stop()
    assert status == Exit.REFUSED and "Nothing was stopped; site.yml repairs it." in told["message"]
    assert actions(bench) == []
