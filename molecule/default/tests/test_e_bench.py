# SPDX-License-Identifier: Apache-2.0
"""playbooks/bench.yml on one engine, directly and through the gateway.

That nobody can read the key of its client is in tests/gateway/test_gateway_program.py.
"""

from __future__ import annotations

import json
import time

from conftest import INVENTORY, INVENTORY_HOST, PROFILE, Controller, Machine

OPTIONS = {
    "bench_engines": "e2b",
    "bench_cases": "protocol",
    "bench_input_tokens": "32",
    "bench_output_tokens": "32",
    "bench_requests": "2",
    # Calls are repeated for 12 s; what each needs before its first request is not among its seconds.
    "bench_soak_minutes": "0.2",
    "bench_gate": "warn",
}


def test_one_engine_is_measured_directly_and_through_the_gateway(machine: Machine, controller: Controller) -> None:
    began = time.time()
    play = controller.play("playbooks/bench.yml", f"--extra-vars={json.dumps(OPTIONS)}")
    assert play.rc == 0, play.output[-6000:]
    directory = INVENTORY / "reports" / "bench" / INVENTORY_HOST
    fetched = max(directory.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    assert fetched.stat().st_mtime >= began
    run, *measured, end = [json.loads(line) for line in fetched.read_text().splitlines()]
    assert (run["kind"], run["profile"], list(run["engines"]), end["error"]) == ("run", PROFILE, ["e2b"], "")
    protocol = {(one["through"], one["output_tokens"]) for one in measured if one["case"] == "protocol"}
    assert protocol == {("engine", 32), ("gateway", 32)}
    for one in measured:
        assert (one["failed"], one["error"]) == (0, "") and one["completed"] > 0 and one["tok_s"] > 0, one
        assert one["ttft_ms"]["p50"] > 0 and [gpu["slot"] for gpu in one["gpus"]] == [3]
    soak = [one for one in measured if one["case"] == "soak"]
    assert sum(one["seconds"] for one in soak) >= 5 and {one["through"] for one in soak} == {"engine"}
    # Its client and its container were there for the run only.
    assert machine.host.run("grep -q ' bench ' /etc/vllm-edge/gateway/clients.map").rc != 0
    assert machine.host.run("ls /run/vllm-edge/clients.json").rc != 0
    assert machine.run("docker", "ps", "-aq", "--filter", "label=vllm-edge.companion") == ""
