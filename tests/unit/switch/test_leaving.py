# SPDX-License-Identifier: Apache-2.0
"""A host of a fleet leaves a role only to another one, and the others know it before."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.gateway import sync
from ansible.module_utils.vllm_edge.gateway.admin import Check, GatewayDown, Server
from ansible.module_utils.vllm_edge.gateway.command import synchronize
from ansible.module_utils.vllm_edge.gateway.fleet import LEAVE_S, Fleet, Peer, read_fleet
from ansible.module_utils.vllm_edge.gateway.names import host_server
from ansible.module_utils.vllm_edge.gateway.view import SwitchProgress, parse_text
from ansible.module_utils.vllm_edge.generation.model import Choice
from ansible.module_utils.vllm_edge.switch import run
from ansible.module_utils.vllm_edge.switch.journal import take_lock
from ansible.module_utils.vllm_edge.switch.model import Exit, Moves, Result
from ansible.module_utils.vllm_edge.switch.stop import stop_engines
from fake_host import ServingHost, failure, write
from switch_host import Killed, SwitchHost

FLEET = Fleet("edge", "a", "host-a", "192.0.2.1", 8443, tuple(Peer(n, host_server(n), "192.0.2.2", 8443) for n in "bc"))
LEAVES, STAYS = Moves(stop=("e2b",)), Moves(keep=("e2b",))


@dataclass
class Door:
    """HAProxy of a host in a fleet, whose only role is `e2b`, which b serves, too."""

    host: ServingHost
    up: bool = True
    away: bool = False
    peers: dict[str, bool] = field(default_factory=lambda: {"host-b": True, "host-c": False})
    silent: bool = False
    stopped: bool = False
    told: list[tuple[float, str]] = field(default_factory=list)
    """States of the role, with the seconds since the beginning."""
    pid = 1
    unit = "vllm-edge-gateway.service"

    def list_workers(self) -> list[Door]:
        if self.silent or self.stopped:
            raise GatewayDown("master.sock: no answer.")
        return [self]

    def is_stopped(self) -> bool:
        return self.stopped

    def reload(self) -> bool:
        return False

    def read_servers(self) -> dict[str, Server]:
        return {"e2b": Server(self.away, self.up)}

    def read_checks(self, prefix: str) -> dict[tuple[str, str], Check]:
        return {(f"{prefix}e2b", name): Check(up, "") for name, up in self.peers.items()}

    def read_map(self, path: Path) -> dict[str, str] | None:
        return {} if path.name == "models.map" else None

    def replace_map(self, path: Path, entries: dict[str, str]) -> None:
        self.told.append((self.host.clock.now - 1000, entries["e2b"].split()[2]))

    def set_away(self, link: str, away: bool) -> None:
        self.away = away

    @property
    def fleet(self) -> Path:
        return self.host.paths.gateway / "fleet.json"

    def serves(self) -> bool:
        return (self.host.paths.run / "roles" / "e2b.sock").is_symlink() and not self.away

    @property
    def state(self) -> str:
        return parse_text((self.host.paths.gateway / "models.map").read_text())["e2b"].split()[2]


@pytest.fixture
def door(host: ServingHost, monkeypatch: pytest.MonkeyPatch) -> Door:
    door = Door(host)
    monkeypatch.setattr(sync, "open_proxy", lambda paths: door)
    monkeypatch.setattr(sync, "PATIENCE_S", 0.0)
    write(host.paths.gateway / "haproxy.cfg", "")
    write(door.fleet, json.dumps(asdict(FLEET)))
    host.machine.back(host.generation)
    door.told.clear()
    return door


def leave(door: Door, moves: Moves = LEAVES, *, gap: bool = False) -> Any:
    machine, generation = door.host.machine, door.host.generation
    machine.check_peers(generation, generation, moves, gap=gap)
    return machine.away(generation, generation, moves, gap=gap)


@pytest.mark.parametrize("gap", [False, True])
def test_the_others_know_it_before_a_role_goes_away(door: Door, gap: bool) -> None:
    served = list[bool]()
    door.peers["host-b"] = not gap
    door.host.clock.at(LEAVE_S - 1, lambda: served.append(door.serves()))
    done = leave(door, gap=gap)
    assert door.told == [(0, "leaving"), (LEAVE_S, "away")] and served == [True]
    assert not door.serves() and "e2b" in done.detail and done.warnings == ()
    assert parse_text((door.fleet.parent / "state.map").read_text())["host"] == '"a"'


@pytest.mark.parametrize("act", ["check_peers", "away"])
def test_a_role_that_nobody_else_serves_stays(door: Door, act: str) -> None:
    door.peers["host-b"] = False
    text = failure(lambda: getattr(door.host.machine, act)(door.host.generation, door.host.generation, LEAVES)).text
    assert text.startswith("e2b would be served by nobody") and "(asked: b, c)" in text and "--gap" in text
    assert door.told == [] and door.serves() and door.host.clock.now == 1000


def test_of_two_hosts_that_leave_at_once_none_does(door: Door) -> None:
    door.host.clock.at(2, lambda: door.peers.update({"host-b": False}))
    assert "e2b would be served by nobody" in failure(lambda: leave(door)).text
    assert door.told == [(0, "leaving"), (LEAVE_S, "up")] and door.serves()


@pytest.mark.parametrize("fact", ["no fleet", "no other host", "up=", "away=1", "stopped=1"])
def test_where_nobody_would_notice_nothing_is_asked_or_waited_for(door: Door, fact: str) -> None:
    write(door.fleet, json.dumps({**asdict(FLEET), "peers": asdict(FLEET)["peers"] if "=" in fact else []}))
    if fact == "no fleet":
        door.fleet.unlink()
    elif "=" in fact:
        setattr(door, *fact.split("="))
    door.peers.clear()
    leave(door)
    assert door.state == "away" and door.host.clock.now == 1000
    assert "leaving" not in [state for _, state in door.told]


@pytest.mark.parametrize("damage", ["gateway", "file"])
def test_what_is_not_known_is_a_reason_to_stay_but_not_on_the_way_back(door: Door, damage: str) -> None:
    door.silent = damage == "gateway"
    if damage == "file":
        write(door.fleet, "{}")
        with pytest.raises(sync.GatewayError, match=r"fleet\.json cannot be read"):
            read_fleet(door.host.paths)
    assert "--gap" in failure(lambda: leave(door)).text and door.state == "up"
    done = leave(door, gap=True)
    assert "were not told" in done.warnings[0] and door.state == "away" and door.host.clock.now == 1000


def test_killed_in_the_pause_it_serves_until_a_recovery_shows_it(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(paths: object) -> SwitchProgress:
        return SwitchProgress("away", (), door.host.generation)

    def kill(seconds: float) -> None:
        synchronize(door.host.paths, look)
        raise Killed

    monkeypatch.setattr(door.host.machine, "sleep", kill)
    with pytest.raises(Killed):
        leave(door)
    assert door.state == "leaving" and door.serves(), "also where somebody synchronizes the gateway meanwhile"
    leave(door, STAYS, gap=True)
    assert door.state == "up" and door.serves() and door.host.clock.now == 1000
    door.away = True  # killed later: nobody reaches it, so nobody waits
    leave(door, gap=True)
    synchronize(door.host.paths, look)
    assert door.state == "away"


def test_a_synchronization_leaves_the_pause_of_a_stop_alone_and_ends_that_of_a_killed_one(door: Door) -> None:
    sync.publish_leaving(door.host.paths, ["e2b"])
    with take_lock(door.host.paths):
        synchronize(door.host.paths, lambda _: None)
        assert door.state == "leaving"
    synchronize(door.host.paths, lambda _: None)
    assert door.state != "leaving"


# ---- in a switch ------------------------------------------------------------------------------------------------


def test_a_switch_is_refused_before_anything_unless_it_may_leave_a_gap(bench: SwitchHost) -> None:
    bench.machine.alone = True
    journal = bench.ends(Result.REFUSED)
    assert "refused in phase preflight. No other host" in journal.message
    assert run.run_switch(bench.paths, bench.new.number, Choice(gap=True)) == Exit.OK
    assert bench.unlike(bench.new) == []


def test_a_switch_that_is_left_alone_later_goes_back_and_no_way_back_is_refused(bench: SwitchHost) -> None:
    bench.at("prepare", lambda: setattr(bench.machine, "alone", True))
    assert "failed in phase away. No other host" in bench.ends(Result.ROLLED_BACK).message
    assert not [entry for entry in bench.log if entry.startswith("stop@2")]
    bench.calm()
    bench.machine.alone = False
    bench.fail("canary", "no")
    bench.at("start", lambda: setattr(bench.machine, "alone", True))
    journal = bench.ends(Result.ROLLED_BACK)
    assert "failed in phase canary" in journal.message and journal.warnings == ()
    bench.calm()
    bench.machine.alone = False
    bench.kill("start")
    bench.machine.alone = True
    assert bench.recover() == Exit.OK and bench.unlike(bench.old) == []


def test_engines_that_nobody_else_replaces_are_not_stopped(bench: SwitchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(bench.machine), "systemd", Mock(stop=Mock(return_value=None)), raising=False)
    bench.at("hook before_drain", lambda: setattr(bench.machine, "alone", True), bench.old)
    for _ in range(2):  # alone in the hook, and then before it
        stopped = stop_engines(bench.machine)
        assert (stopped.status, stopped.engines) == (Exit.REFUSED, ()) and "No other host" in stopped.message
    assert bench.unlike(bench.old) == [] and bench.log.count("hook before_drain@1") == 1
    assert stop_engines(bench.machine, gap=True).status == Exit.OK
