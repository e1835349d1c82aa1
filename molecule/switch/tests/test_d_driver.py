# SPDX-License-Identifier: Apache-2.0
"""Work on the host under an engine: it leaves when its requests are done, and comes back verified. Last of all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import CONTAINER, ENGINE, OK, PYTHON, SETTINGS, SOCKETS, UNIT, Bystanders, Edge, Pair, default, play

NOTE = 'echo "$VLLM_EDGE_HOOK $VLLM_EDGE_FROM_GENERATION $VLLM_EDGE_GENERATION" >> /run/hooks-noted'
WORDS = 300
"""Tokens of an answer that takes some seconds."""
IN_WORK = """
import sys, time
from vllm_edge.engine.metrics import requests_in_work
from vllm_edge.system.http import request
deadline = time.monotonic() + 60
while not requests_in_work(request(sys.argv[1], "/metrics", 5).body.decode()):
    if time.monotonic() > deadline:
        sys.exit("no request was seen at work")
    time.sleep(0.05)
"""


def hooks(edge: Edge) -> list[str]:
    """What hooks took note of since they were asked last."""
    return edge.shell("touch /run/hooks-noted; cat /run/hooks-noted; rm /run/hooks-noted").splitlines()


def note(edge: Edge) -> None:
    hooks(edge)
    for name in ("before_drain", "after_commit"):
        edge.hook(name, NOTE)


def test_stop_finishes_what_runs(edge: Edge, pair: Pair) -> None:
    """`vllm-edge stop` in the middle of an answer."""
    note(edge)
    role = edge.engines(pair.here)[ENGINE]["served_names"][0]
    question = {
        "model": role,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": WORDS,
        "min_tokens": WORDS,
        "temperature": 0,
    }
    url = f"{SOCKETS}/{ENGINE}/api.sock"
    asking = edge.begin("python3", "-c", default.ASK, f"{url}/v1/chat/completions", json.dumps(question), "120")
    edge.python(IN_WORK, url, interpreter=PYTHON)
    stopped = json.loads(edge.run("vllm-edge", "stop", "--format", "json"))
    answer = json.loads(asking.process.communicate(timeout=120)[0])
    assert answer[0] == 200, answer
    assert json.loads(answer[1])["usage"]["completion_tokens"] == WORDS
    assert (stopped["status"], stopped["generation"], stopped["engines"]) == ("ok", pair.here, [ENGINE])
    assert edge.unit("ActiveState", unit=UNIT)["ActiveState"] == "inactive"
    assert edge.unit("ActiveState", unit="vllm-edge.target")["ActiveState"] == "inactive"
    assert default.life(edge, CONTAINER) is None
    assert edge.number() == pair.here
    assert hooks(edge) == [f"before_drain {pair.here} {pair.here}"]
    back = edge.switch(pair.here)
    assert back.rc == OK, back.message
    assert hooks(edge) == [f"after_commit {pair.here} {pair.here}"]
    edge.serves(pair.here)


@pytest.mark.thorough
def test_driver_is_replaced_under_an_engine(edge: Edge, controller: Any, bystanders: Bystanders, pair: Pair) -> None:
    """The real program and a real engine, over a reboot; docs/operate.md says what the play does."""
    note(edge)
    boot = edge.run("cat", "/proc/sys/kernel/random/boot_id")
    given = ["--extra-vars=driver_upgrade=xr7620-lab", "--extra-vars=allow_reboot=true"]
    branch = '--extra-vars={"nvidia_driver_branch": "590"}'
    done = play(controller, "playbooks/driver_upgrade.yml", SETTINGS, branch, *given)
    edge.forget_connection()
    assert done.rc == 0, done.output[-6000:]
    bystanders.again()
    assert edge.run("cat", "/proc/sys/kernel/random/boot_id") != boot
    assert edge.run("cat", "/sys/module/nvidia/version").strip() == "590.48.01"
    assert hooks(edge) == [f"before_drain {pair.here} {pair.here}", f"after_commit {pair.here} {pair.here}"]
    last = edge.history()[0]
    assert (last["result"], last["generation"]) == ("committed", pair.here)
    words = " ".join(done.output.split())
    assert "xr7620-lab: driver 590.48.01" in words
    edge.serves(pair.here)
    again = play(controller, "playbooks/driver_upgrade.yml", SETTINGS, branch, *given)
    assert (again.rc, again.recap["changed"]) == (0, 0), again.output[-3000:]
    assert "there is nothing to change here" in " ".join(again.output.split())
