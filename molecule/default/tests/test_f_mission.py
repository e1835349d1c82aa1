# SPDX-License-Identifier: Apache-2.0
"""The switch of the mission, while clients ask: the 31B from two GPUs to all four by site.yml, back by its stage."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import openai
import pytest
import role_client
from conftest import (
    AGREE_S,
    BYSTANDER,
    INVENTORY_HOST,
    MONITORING,
    PROFILE,
    ROLES,
    Clients,
    Controller,
    Life,
    Machine,
    Prometheus,
    Provoked,
    life,
    no_gap_beyond,
    play_result,
)
from test_a_gateway import connect, read_environment

ENGINE = "31b-nvfp4-tp2"
THREE = [ENGINE, "e2b", "e4b"]
ALL_FOUR = "31b-bf16-tp4"
PLAYED_S = 1500
WAIT_S = 120
"""serving_gateway_wait_s."""
# On the host: which of vLLM's extensions the processes of a container have loaded.
KERNELS = """
docker top {0} -eo pid | tail -n +2 | while read pid; do
    grep -oh '/vllm/_C[A-Z0-9_]*[.]' /proc/$pid/maps
done | sort -u
"""


class Sent(NamedTuple):
    """A request of the `openai` client to the gateway, and its end."""

    role: str
    seconds: float
    status: int
    retry_after: str


def keep_asking(role: str, sent: list[Sent], stop: threading.Event) -> None:
    """Ask for a role through the gateway, one request after the other, from the machine that runs the lab."""
    question: Any = [{"role": "user", "content": "Say hello."}]
    with connect(read_environment("default")) as client:
        while not stop.wait(4):
            began, status, after = time.time(), 200, ""
            try:
                client.chat.completions.create(model=role, messages=question, max_tokens=2)
            except openai.APIStatusError as error:
                status, after = error.status_code, error.response.headers.get("Retry-After", "")
            except openai.APIConnectionError:
                status = 0
            sent.append(Sent(role, time.time() - began, status, after))


@dataclass
class Mission:
    """nvfp4-tp2 -> bf16-tp4 -> nvfp4-tp2, each role asked every other second throughout, and through the gateway."""

    there: dict[str, Any]
    back: dict[str, Any]
    recorded: role_client.Recorded
    sent: list[Sent]


def bring(machine: Machine, controller: Controller, playbook: str, profile: str) -> dict[str, Any]:
    """The journal of the switch."""
    play = play_result(controller.start_play(playbook, f"--extra-vars=serving_profile={profile}"), PLAYED_S)
    assert play.rc == 0, play.output[-8000:]
    journal: dict[str, Any] = json.loads(machine.host.file("/var/lib/vllm-edge/switch.json").content_string)
    assert (journal["result"], journal["profile"]) == ("committed", profile)
    assert all(gpu["within_budget"] for gpu in journal["gpus"]), journal["gpus"]
    if playbook == "site.yml":
        report = json.loads(machine.host.file("/var/lib/vllm-edge/report.json").content_string)
        assert (report["generation"], report["switch"]["id"]) == (journal["generation"], journal["id"])
    status = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    assert (status["problems"], status["active_profile"]["profile"]) == ([], profile)
    return journal


@pytest.fixture(scope="module")
def mission(
    machine: Machine,
    controller: Controller,
    bystander: Life,
    prometheus: Prometheus,
    tmp_path_factory: pytest.TempPathFactory,
) -> Mission:
    clients = Clients(machine)
    clients.start("--interval", "2")
    sent, stop = list[Sent](), threading.Event()
    threads = [threading.Thread(target=keep_asking, args=(role, sent, stop)) for role in ROLES]
    for thread in threads:
        thread.start()
    try:
        there = bring(machine, controller, "site.yml", "bf16-tp4")
        back = bring(machine, controller, "playbooks/engines.yml", PROFILE)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        recorded = clients.stop(tmp_path_factory.mktemp("mission"))
    return Mission(there, back, recorded, sent)


def test_the_switch_of_the_mission(machine: Machine, mission: Mission, bystander: Life) -> None:
    there, back = mission.there, mission.back
    assert (sorted(there["stop"]), there["start"]) == (THREE, [ALL_FOUR])
    assert (back["stop"], sorted(back["start"])) == ([ALL_FOUR], THREE)
    for journal in (there, back):
        assert {row["served_name"] for row in journal["canary"]} == set(ROLES)
    assert all(gpu["engine_mib"] > 20_000 for gpu in there["gpus"]), "all four GPUs are the 31B's"
    for journal in (there, back):
        (committing,) = (row["began_s"] for row in journal["phases"] if row["phase"] == "commit")
        assert sorted(journal["provisional"]) == sorted(journal["start"])
        assert max(journal["provisional"].values()) < committing
        for role, down in journal["downtime"].items():
            engine = next(row["engine"] for row in journal["canary"] if row["served_name"] == role)
            (gap,) = down["gaps"]
            assert -0.5 < gap["to_s"] - journal["provisional"][engine] < AGREE_S, (role, gap)
    assert life(machine, BYSTANDER) == bystander, "somebody else's container was disturbed"


def test_clients_miss_nothing_beyond_the_journals(mission: Mission) -> None:
    no_gap_beyond([mission.there, mission.back], mission.recorded, [list(ROLES), list(ROLES)])


def test_requests_to_the_gateway_wait_and_are_answered(mission: Mission) -> None:
    """Nobody is sent away before `serving_gateway_wait_s` is over, and then with the time to come again."""
    for role in sorted(ROLES):
        sent = [one for one in mission.sent if one.role == role]
        waited = [one for one in sent if one.seconds > 5]
        assert len(waited) >= 2, f"two switches, and {role} waited {len(waited)} times"
        for one in (one for one in sent if one.status != 200):
            assert (one.status, one.retry_after.isdigit()) == (503, True), one
            assert one.seconds > 0.9 * WAIT_S, one


def test_an_fp8_cache_on_a_cpu_without_avx512(machine: Machine, mission: Mission) -> None:
    """The scenario's lab has such a CPU: what the unit asks for, the log, /metrics and the memory are as planned."""
    kernels = machine.shell(KERNELS.format(f"vllm-{ENGINE}")).split()
    assert kernels == ["/vllm/_C_AVX2."], "vLLM took this machine for what the lab says it is"
    assert "--kv-cache-dtype=fp8\n" in machine.run("cat", f"/etc/vllm-edge/engines/{ENGINE}/docker-create")
    rows = {row["component"]: row for row in mission.back["drift"] if row["what"] == ENGINE}
    for counted in ("kv_cache_tokens", "kv_blocks"):
        assert rows[counted]["measured"] == rows[counted]["planned"] > 0, rows


# ---- as the operator's Prometheus saw it -------------------------------------------------------------------------

ENGINE_UP = f'up{{job="vllm-edge-engine",instance="{INVENTORY_HOST}/%s"}}'
NO_DATA = {
    "vllm_edge_gpu_xid_errors_total": "no kernel writes a log of the lab's host",
    'server=~"host-.+"': "the host is in no fleet",
}
"""In an expression that finds nothing in the lab, and why."""


SCRAPED_EVERY_S = 15


def tell(journal: dict[str, Any], moment: str) -> float:
    return datetime.fromisoformat(journal[moment]).timestamp()


def test_prometheus_follows_the_switch(mission: Mission, prometheus: Prometheus) -> None:
    """Engines that a switch stopped are no targets any more, and those that it started are."""
    lived_from, lived_until = tell(mission.there, "ended_at"), tell(mission.back, "started_at")
    lived = f"max_over_time({ENGINE_UP % ALL_FOUR}[{lived_until - lived_from:.0f}s])"
    assert [one["value"][1] for one in prometheus.series(lived, time=lived_until)] == ["1"]
    for engine in THREE:
        assert prometheus.series(ENGINE_UP % engine, time=lived_until) == []
    prometheus.wait_until_up(THREE)


def test_no_alert_but_those_of_faults(mission: Mission, prometheus: Prometheus, provoked: Provoked) -> None:
    """Those that were provoked ended with their faults, before the switch, and the switch itself is none."""
    seconds = time.time() - tell(mission.there, "started_at")
    fired = prometheus.series(f'max_over_time(ALERTS{{alertstate="firing"}}[{seconds:.0f}s])')
    targets = {"VllmEdgeFirstTokenSlow", "VllmEdgeTokensSlow"}
    assert {one["metric"]["alertname"] for one in fired} <= targets, fired


def test_every_rule_and_every_panel_has_data(mission: Mission, prometheus: Prometheus, provoked: Provoked) -> None:
    """At some time since Prometheus is there. A scrape meets a request here, which it need not in the other tests."""
    question: Any = [{"role": "user", "content": "Say hello."}]
    began = time.monotonic()
    with connect(read_environment("default")) as client:
        while time.monotonic() - began < 2 * SCRAPED_EVERY_S:
            client.chat.completions.create(model="sentry", messages=question, max_tokens=512)
    while not prometheus.series("vllm_edge:engine_planned_share"):
        assert time.monotonic() - began < 180, "no scrape met a request within half a minute"
        time.sleep(2)
    dashboard = (MONITORING / "grafana" / "dashboard.json").read_text()
    panels = [json.loads(text) for text in re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', dashboard)]
    records = re.findall(r"record: (\S+)", (MONITORING / "rules.yml").read_text())
    assert len(panels) > 20 and len(records) > 10
    asked = [expression.replace("$host", ".+") for expression in [*panels, *records]]
    span = {"start": provoked.since, "end": time.time(), "step": 15}
    empty = {}
    for expression, found in zip(asked, prometheus.query(*asked, path="query_range", **span), strict=True):
        values = [] if isinstance(found, str) else [float(value) for one in found for _, value in one["values"]]
        if all(map(math.isnan, values)):
            empty[expression] = found
    assert [one for one in empty if not any(name in one for name in NO_DATA)] == [], empty
