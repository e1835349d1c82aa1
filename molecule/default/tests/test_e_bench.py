# SPDX-License-Identifier: Apache-2.0
"""playbooks/bench.yml on one engine, directly and through the gateway."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from conftest import INVENTORY, INVENTORY_HOST, PROFILE, Controller, Machine, Play, play_result

KEY = re.compile(r"vllm-[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
OPTIONS = {
    "bench_engines": "e2b",
    "bench_cases": "protocol",
    "bench_input_tokens": "32",
    "bench_output_tokens": "16,32",
    "bench_requests": "2",
    # Calls are repeated for 24 s; what each needs before its first request is not among its seconds.
    "bench_soak_minutes": "0.4",
    "bench_gate": "warn",
}


@dataclass
class Ran:
    """The play, its record, and what was seen of the client while it ran."""

    play: Play
    lines: list[dict[str, Any]] = field(default_factory=list)
    admitted: bool = False
    seen: list[str] = field(default_factory=list)
    """Everything that other users could have read: command lines, and the container's description."""
    drift: set[str] = field(default_factory=set)


def is_admitted(machine: Machine) -> bool:
    return machine.host.run("grep -q ' bench ' /etc/vllm-edge/gateway/clients.map").rc == 0


def read_drift(machine: Machine) -> str:
    report = json.loads(machine.run("vllm-edge", "gateway", "sync", "--check", "--format", "json"))
    return ", ".join(report["changes"])


@pytest.fixture(scope="module")
def ran(machine: Machine, controller: Controller) -> Ran:
    began = time.time()
    process = controller.start_play("playbooks/bench.yml", f"--extra-vars={json.dumps(OPTIONS)}")
    looked = Ran(Play(0, "", []))
    while process.poll() is None and time.time() - began < 900 and not looked.admitted:
        time.sleep(1)
        looked.admitted = is_admitted(machine)
    if looked.admitted:
        looked.drift.add(read_drift(machine))
        looked.seen.append(machine.run("ps", "axww", "-o", "args"))
        looked.seen.append(machine.host.run("docker inspect vllm-edge-bench").stdout)
    looked.play = play_result(process)
    directory = INVENTORY / "reports" / "bench" / INVENTORY_HOST
    fetched = max(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime, default=None)
    if fetched and fetched.stat().st_mtime >= began:
        looked.lines = [json.loads(line) for line in fetched.read_text().splitlines()]
    return looked


def test_one_engine_is_measured_directly_and_through_the_gateway(ran: Ran) -> None:
    assert ran.play.rc == 0 and ran.lines, ran.play.output[-6000:]
    run, *measured, end = ran.lines
    assert (run["kind"], run["profile"], list(run["engines"]), end["error"]) == ("run", PROFILE, ["e2b"], "")
    protocol = {(one["through"], one["output_tokens"]) for one in measured if one["case"] == "protocol"}
    assert protocol == {(way, tokens) for way in ("engine", "gateway") for tokens in (16, 32)}
    for one in measured:
        assert (one["failed"], one["error"]) == (0, "") and one["completed"] > 0 and one["tok_s"] > 0, one
        assert one["ttft_ms"]["p50"] > 0 and [gpu["slot"] for gpu in one["gpus"]] == [3]
    soak = [one for one in measured if one["case"] == "soak"]
    assert sum(one["seconds"] for one in soak) >= 10 and {one["through"] for one in soak} == {"engine"}


def test_the_client_was_there_for_the_run_only(machine: Machine, ran: Ran) -> None:
    assert ran.admitted and ran.drift == {""}, "the gateway knew the client, and nothing saw it as drift"
    assert len(ran.seen) == 2 and not any(KEY.search(text) for text in ran.seen), "a key can be read by others"
    assert not is_admitted(machine) and read_drift(machine) == ""
    assert machine.host.run("ls /run/vllm-edge/clients.json").rc != 0
    assert machine.run("docker", "ps", "-aq", "--filter", "label=vllm-edge.companion") == ""
