# SPDX-License-Identifier: Apache-2.0
"""The table of all hosts at the end of plays, from what their hosts registered; some have told nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.page.hosts_table import ABSENT, render


def tabulate(kind: str, hosts: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of a play for these hosts; --limit leaves out e."""
    every = {host: {"serving_profile": "p", "serving_fleet": "edge", **hosts[host]} for host in hosts}
    return [" ".join(line.split()) for line in render(kind, [host for host in hosts if host != "e"], every, [*hosts])]


def serve(profile: str = "p", digest: str = "", **roles: str) -> dict[str, Any]:
    """What status.yml registers of a host."""
    told = {
        "active_profile": {"profile": profile, "generation": 7},
        "expected_profile": "p",
        "gateway": {"roles": {"architect": {"state": "leaving"}, **{name: {"state": roles[name]} for name in roles}}},
        "fleet": {"digest": digest},
        "problems": ["one"] * len(roles),
    }
    return {"serving_status_output": {"results": [{"stdout": "text"}, {"stdout": json.dumps(told)}]}}


def plan(*names: str, verdict: str | None = "fits", serial: int = 1) -> dict[str, Any]:
    """What plan.yml registers of a host whose profile has one engine, which serves these names."""
    gpus = [{"free_bytes": 3 << 30}, {"free_bytes": 2 << 30}]
    planned = {"verdict": verdict, "engines": [{"gpus": gpus}] if verdict else []}
    of_engines = {"profiles": {"p": {"engines": ["x"]}}, "engines": {"x": {"served_names": names}}}
    expanded = {"serving_expanded": of_engines | {"roles": ["architect", "worker"]}, "serving_switch_serial": serial}
    return expanded | {"serving_plan_result": {"plans": {"p": planned}}}


CHECKS = [{"check": f"c{number}", "state": state} for number, state in enumerate(("ok", "fail", "fail"))]
DOCTOR = {"serving_doctor": {"doctor": {"summary": {"ok": 30, "warn": 1, "fail": 2}, "checks": CHECKS}}}
MAIN = {"model": "m", "replicas": 2, "tensor_parallel_size": 4, "pipeline_parallel_size": 1}
BEST = {"engines": [MAIN], "tok_s_estimate": {"mid": 12.34}, "context": 16384, "gpus_free": 1}
ADVICE = {"serving_advise_result": {"advice": {"chosen": {"rank": 2}, "profiles": [{}, BEST]}}}
REPORT = {"serving_report": {"profile": "p", "generation": 7}, "serving_fleet": ""}
COMMITTED = REPORT | {"vllm_engine_result": {"result": "committed"}}
ROWS = """status: fleet profile generation roles up away problems note
a edge p 7 1 1 1 worker away
b - - - - - - vllm-edge is not installed
c edge - - - - - ABSENT
3 hosts 1 p 1 1 1
doctor: fleet ok warn fail note
a edge 30 1 2 failed: c1, c2
b - 30 1 2 failed: c1, c2
c edge - - - ABSENT
3 hosts 60 2 4
plan: fleet profile verdict least free MiB note
a edge p fits 2,048
b - p cannot be planned -
c edge - - - ABSENT
3 hosts 2 p 1 fits, 1 cannot be planned
advise: fleet engines (replicas x TP x PP) tok/s context free GPUs note
a edge m 2x4x1 12.3 16,384 1
b - m 2x4x1 12.3 16,384 1
c edge - - - - ABSENT
3 hosts 2
report: fleet profile generation result note
a edge p 7 committed
b - p 7 left a did not commit
c edge - - - ABSENT
3 hosts 2 p 1 committed, 1 left"""


@pytest.mark.parametrize("rows", re.findall(r"(?:.+\n){4}.+", ROWS))
def test_each_host_has_a_line(rows: str) -> None:
    """The first word is the play."""
    kind, expected = rows.replace("ABSENT", ABSENT).split(": ", 1)
    every = DOCTOR | ADVICE
    a = every | serve(worker="away") | plan("worker") | COMMITTED | {"serving_fleet": "edge"}
    b = (
        every
        | plan(verdict=None)
        | REPORT
        | {key: "a did not commit" for key in ("serving_switch_error", "serving_switch_stop")}
    )
    lines = tabulate(kind, {"a": a, "b": b | {"serving_program": {"stat": {"exists": False}}}, "c": {}})
    assert [lines[0], *lines[2:6]] == f"host {expected}".splitlines()


@pytest.mark.parametrize(
    ("variables", "result"),
    [
        (COMMITTED | {"serving_switch_error": "no memory"}, "p 7 failed no memory"),
        (REPORT, "p 7 not switched"),
        ({"nvidia_driver_result": {"awaits_reboot": "Reboot."}}, "- - awaits a reboot"),
        ({"serving_active_file": {"stat": {"exists": False}}}, "- - nothing serves"),
        ({"serving_active_file": {"unreachable": True}}, ABSENT),
    ],
)
def test_the_report_says_what_became_of_each_host(variables: Any, result: str) -> None:
    assert tabulate("report", {"a": variables | {"serving_fleet": ""}})[2] == f"a {result}"


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ((serve(), serve(), {}), ""),
        ((serve(), serve("q")), "Fleet edge: b has q, its inventory p."),
        (
            (serve(), serve(digest="2"), serve()),
            "Fleet edge: a, c and b differ in models, images or arguments of p: run site.yml.",
        ),
        ((serve(), serve(digest="2") | {"serving_fleet": "other"}), ""),
    ],
)
def test_hosts_of_a_fleet_that_serve_another_thing_are_named(hosts: Any, said: str) -> None:
    assert " ".join(tabulate("status", dict(zip("abc", hosts, strict=False)))[len(hosts) + 3 :]) == said


BOTH, UNFIT = plan("architect", "worker"), plan("architect", "worker", verdict="no_kv")
PAIRS = plan("architect", "worker", serial=2)


@pytest.mark.parametrize(
    ("hosts", "served", "advice"),
    [
        ({"a": BOTH, "b": BOTH}, "architect a, b - worker a, b -", []),
        ({"a": BOTH, "b": plan("worker")}, "architect a a worker a, b -", ["a, nobody serves architect"]),
        ({"a": BOTH, "b": UNFIT}, "architect a a worker a a", ["a, nobody serves architect, worker"]),
        (
            {"a": PAIRS, "b": PAIRS, "e": plan("architect", serial=2)},
            "architect a, b, e - worker a, b -",
            ["a, b, nobody serves worker"],
        ),
        ({"a": plan("worker"), "b": plan("worker"), "c": {}}, "architect nobody - worker a, b -", ["no host serves"]),
    ],
)
def test_the_plan_of_a_fleet_names_roles_that_nobody_serves(hosts: Any, served: str, advice: list[str]) -> None:
    """Those that --limit leaves out count, and not those whose plan failed."""
    lines = tabulate("plan", hosts)
    start = lines.index("Fleet edge:") + 3
    said = " ".join(lines[start + 2 :]).replace(" would switch", "").replace("while ", "")
    assert " ".join(lines[start : start + 2]) == served
    assert [words for words in advice if f"advice: {words}" in said] == advice and said.count("advice:") == len(advice)
