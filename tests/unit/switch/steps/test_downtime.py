# SPDX-License-Identifier: Apache-2.0
"""What clients notice of a switch, as counted by the watch; the servers here are answers by address and time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Generation
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.model import Gap, Phase, PhaseRecord
from ansible.module_utils.vllm_edge.switch.steps import downtime
from ansible.module_utils.vllm_edge.switch.steps.downtime import Role, RoleWatch, addresses, split_by_phase
from ansible.module_utils.vllm_edge.system.http import Answer
from fake_host import models, ok, until
from generations import engine, put, rendered


def record(phase: Phase, began_s: float, seconds: float | None, direction: str = "forward") -> PhaseRecord:
    return PhaseRecord(phase, direction, "2026-11-21T16:40:00Z", began_s, seconds, "done")  # type: ignore[arg-type]


PHASES = (
    record(Phase.DRAIN, 0, 2),
    record(Phase.STOP, 2, 3),
    record(Phase.HEALTHY, 5, 20),
    record(Phase.CANARY, 25, 5),
)


def role(*answers: tuple[float, bool]) -> Role:
    made = Role()
    for at_s, good in answers:
        made.answered(at_s, good)
    return made


def test_gaps_are_from_the_last_good_answer_to_the_next_good_one_by_phase() -> None:
    seen = role(*((at / 2, True) for at in range(60))).result(30, PHASES)
    assert (seen.seconds, seen.gaps, seen.phases, seen.asked) == (0, (), {}, 60)
    seen = role((2.5, True), (3.0, True), (3.5, False), (20.0, False), (24.0, True), (24.5, True)).result(30, PHASES)
    assert seen.gaps == (Gap(3.0, 24.0),) and seen.seconds == 21.0
    assert seen.phases == {"stop": 2.0, "healthy": 19.0}
    seen = role((1, True), (2, False), (3, True), (4, True), (26, False)).result(30, PHASES)
    assert seen.gaps == (Gap(1, 3), Gap(4, None)) and seen.seconds == 2 + 26
    assert seen.phases == {"drain": 1.0, "stop": 2.0, "healthy": 20.0, "canary": 5.0}
    assert role((1, False), (6, True)).result(30, PHASES).gaps == (Gap(0, 6),)
    assert role((1, False)).result(30, PHASES).gaps == (Gap(0, None),)
    # Those of a rollback have names of their own.
    phases = [record(Phase.STOP, 0, 2), record(Phase.STOP, 4, 2, "back"), record(Phase.HEALTHY, 6, None, "back")]
    assert split_by_phase([Gap(1, 9)], phases, 20) == {"stop": 1.0, "back:stop": 2.0, "back:healthy": 3.0}
    assert split_by_phase([Gap(1, None)], phases, 20)["back:healthy"] == 14.0


class Servers:
    """Which names each address lists now; an address that is not here refuses, one of None hangs."""

    def __init__(self) -> None:
        self.lists: dict[str, tuple[str, ...] | None] = {}
        self.shutting_down: set[str] = set()
        self.asked: list[str] = []
        self.hanging = threading.Event()

    def __call__(self, url: str, path: str, timeout_s: float, *, method: str = "GET", payload: object = None) -> Answer:
        if path == "/tokenize":
            return Answer(500, b"cannot schedule new futures after shutdown") if url in self.shutting_down else ok({})
        assert (path, method, payload) == ("/v1/models", "GET", None)
        self.asked.append(url)
        listed = self.lists.get(url, ())
        if listed is None:
            self.hanging.wait(0.3)
            return Answer(None, error="no answer within 5 s")
        return models(*listed) if url in self.lists else Answer(None, error="connection refused")


def see_one_gap(seen: RoleWatch, name: str, fault: Callable[[], object], end: Callable[[], object]) -> None:
    """Wait until a role answers, is down with the fault, and answers again after its end."""
    until(lambda: seen._roles[name].asked > 2 and not seen._roles[name].down)
    fault()
    until(lambda: seen._roles[name].down)
    end()
    until(lambda: not seen._roles[name].down)


def generation(root: Path, *engines: tuple[str, int, list[str]]) -> Generation:
    paths = HostPaths(root / "etc", root / "state", root / "units")
    files = [engine(name, port=port, served_names=roles) for name, port, roles in engines]
    return store.load(paths, put(paths, rendered(*files)))


@pytest.fixture
def former(tmp_path: Path) -> Generation:
    return generation(tmp_path, ("big", 8050, ["architect", "worker"]), ("small", 8070, ["sentry"]))


@pytest.fixture
def wanted(tmp_path: Path) -> Generation:
    return generation(tmp_path, ("one", 8050, ["architect", "worker", "sentry"]))


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downtime, "EVERY_S", 0.01)


URL = "http://127.0.0.1:{}".format


def watch(wanted: Generation, former: Generation | None, servers: Servers) -> RoleWatch:
    return RoleWatch(wanted, former, clock=time.monotonic, ask=servers)


def test_a_role_is_up_while_one_address_of_it_answers(wanted: Generation, former: Generation, tmp_path: Path) -> None:
    assert addresses(wanted, former) == {
        "architect": (URL(8050),),
        "worker": (URL(8050),),
        "sentry": (URL(8070), URL(8050)),
    }
    assert addresses(wanted, None)["sentry"] == (URL(8050),)
    wanted = generation(tmp_path, ("one-0", 8050, ["architect"]), ("one-1", 8051, ["architect"]))
    assert addresses(wanted, former)["architect"] == (URL(8050), URL(8051))
    servers = Servers()
    servers.lists = {URL(8051): ("architect",)}
    seen = watch(wanted, None, servers)
    until(lambda: seen._roles["architect"].asked > 3)
    assert seen.end(())["architect"].seconds == 0


def test_a_role_that_moves_to_another_address_is_up_at_either(wanted: Generation, former: Generation) -> None:
    servers = Servers()
    servers.lists = {URL(8050): ("architect", "worker"), URL(8070): ("sentry",)}
    seen = watch(wanted, former, servers)
    moved = {URL(8050): ("architect", "worker", "sentry")}
    see_one_gap(seen, "architect", lambda: servers.lists.pop(URL(8050)), lambda: servers.lists.update(moved))
    del servers.lists[URL(8070)]
    asked = seen._roles["sentry"].asked
    until(lambda: seen._roles["sentry"].asked > asked + 3)
    found = seen.end([])
    assert set(found) == {"architect", "worker", "sentry"}
    assert found["sentry"].gaps == () and found["sentry"].asked > 6
    assert len(found["architect"].gaps) == 1 and found["architect"].gaps[0].to_s is not None
    assert found["architect"].gaps == found["worker"].gaps


def test_the_address_that_answers_is_asked_first(wanted: Generation, former: Generation) -> None:
    servers = Servers()
    servers.lists = {URL(8050): ("architect", "worker", "sentry"), URL(8070): None}
    seen = watch(wanted, former, servers)
    until(lambda: seen._roles["sentry"].asked > 5)
    servers.hanging.set()
    found = seen.end([])
    assert servers.asked.count(URL(8070)) == 1 and found["sentry"].gaps == ()


def test_answers_that_are_no_list_of_models_are_no_service(wanted: Generation) -> None:
    strange = iter([ok("<html>"), Answer(503, b"{}"), ok({"data": 3})])

    def ask(url: str, path: str, timeout_s: float, **rest: object) -> Answer:
        return ok({}) if path == "/tokenize" else next(strange, models("architect", "worker", "sentry"))

    began = time.monotonic()
    seen = RoleWatch(wanted, None, clock=time.monotonic, ask=ask)
    until(lambda: seen._roles["sentry"].asked > 5)
    found = seen.end([])
    assert len(found["sentry"].gaps) == 1 and -0.001 <= found["sentry"].gaps[0].from_s - began < 20


def test_an_engine_that_lists_its_models_while_it_shuts_down_is_away(wanted: Generation) -> None:
    servers = Servers()
    servers.lists = {URL(8050): ("architect", "worker", "sentry")}
    seen = watch(wanted, None, servers)
    see_one_gap(seen, "sentry", lambda: servers.shutting_down.add(URL(8050)), servers.shutting_down.clear)
    assert len(seen.end([])["sentry"].gaps) == 1


def test_after_a_way_back_the_roles_of_before_count(wanted: Generation, tmp_path: Path) -> None:
    former = generation(tmp_path, ("small", 8070, ["sentry", "reflector"]))
    servers = Servers()
    servers.lists = {URL(8070): ("sentry", "reflector")}
    forward, back = watch(wanted, former, servers), watch(wanted, former, servers)
    until(lambda: back._roles["reflector"].asked > 1 and forward._roles["architect"].asked > 1)
    assert set(forward.end([record(Phase.STOP, 0, 1)])) == {"architect", "worker", "sentry"}
    found = back.end([record(Phase.STOP, 0, 1), record(Phase.START, 1, 1, "back")])
    assert set(found) == {"sentry", "reflector"} and found["reflector"].seconds == 0


def test_it_ends_though_an_engine_hangs(wanted: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downtime, "JOIN_S", 0.05)
    held = threading.Event()

    def ask(url: str, path: str, timeout_s: float, **rest: object) -> Answer:
        held.wait(120)
        return models("architect")

    began = time.monotonic()
    found = RoleWatch(wanted, None, clock=time.monotonic, ask=ask).end([])
    assert time.monotonic() - began < 60
    assert found["architect"].asked == 0
    held.set()


def test_with_a_gateway_its_clients_are_asked(wanted: Generation, former: Generation) -> None:
    """An engine may answer by itself while nobody is let through to it."""
    ready = {"architect", "worker", "sentry"}
    asked: set[str] = set()

    def ask(url: str, path: str, timeout_s: float, **rest: object) -> Answer:
        asked.add(url)
        return Answer(200 if path.removeprefix("/ready/") in ready else 503)

    probe = "unix:/run/vllm-edge-gateway/probe.sock"
    seen = RoleWatch(wanted, former, clock=time.monotonic, ask=ask, gateway=probe)
    see_one_gap(seen, "sentry", lambda: ready.discard("sentry"), lambda: ready.add("sentry"))
    found = seen.end([])
    assert asked == {probe}
    assert len(found["sentry"].gaps) == 1 and found["architect"].gaps == ()
