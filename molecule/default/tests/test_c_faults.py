# SPDX-License-Identifier: Apache-2.0
"""What breaks by itself: provoked, seen as an operator sees it, over again.

In the order that needs the fewest loads of the engine: each test provokes its own fault from whatever state the one
before left, and the last ones leave a host on which everything serves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from conftest import (
    CONTAINER,
    LOADED_S,
    SERVED_NAMES,
    Machine,
    life,
)

# Three faults of another GPU begin here, of which Prometheus has to tell once the bench is over.
pytestmark = pytest.mark.usefixtures("provoked")

WATCHDOG_S = 30
STABLE = ("InvocationID", "MainPID", "NRestarts", "ActiveState")


@pytest.fixture(autouse=True)
def calm(machine: Machine) -> Iterator[None]:
    """No fault outlives its test."""
    yield
    machine.host.run(f"docker unpause {CONTAINER}")


def wait_for_the_end(machine: Machine, cursor: str, seconds: float = LOADED_S) -> float:
    return machine.wait("the unit's end", lambda: machine.unit_ended_at(cursor) is not None, seconds)


def test_docker_restarted_with_live_restore(machine: Machine, undisturbed: None) -> None:
    before, unit, cursor = life(machine), machine.unit(*STABLE), machine.cursor()
    assert before is not None and unit["ActiveState"] == "active"
    machine.run("systemctl", "restart", "docker.service")
    machine.wait("the supervisor to see Docker again", lambda: "Docker Engine is back" in machine.journal(cursor), 30)
    machine.wait_until_serving(30)
    assert (life(machine), machine.unit(*STABLE)) == (before, unit)
    assert machine.complete("sentry")[0] == 200
    assert re.search(r"the Docker Engine is back after \d+ s", machine.journal(cursor))


def test_engine_hangs(machine: Machine, undisturbed: None) -> None:
    before, cursor, begin = life(machine), machine.cursor(), machine.now()
    assert before is not None
    machine.run("docker", "pause", CONTAINER)
    machine.wait(
        "the status to tell it", lambda: "not answering /health" in machine.run("vllm-edge", "status"), WATCHDOG_S
    )
    wait_for_the_end(machine, cursor, WATCHDOG_S + 30)
    ended = machine.unit_ended_at(cursor)
    assert ended is not None and WATCHDOG_S - 12 < ended - begin < WATCHDOG_S + 15
    why = re.search(r"The engine has not answered /health for \d+ s.*ended it", machine.journal(cursor))
    assert why, machine.journal(cursor)
    assert "Watchdog timeout" in machine.journal(cursor)
    machine.wait_until_serving()
    # Nobody has asked this engine yet. It takes any length after a single token, as the supervisor's probe sends.
    for tokens in (1, 32):
        probe = {"model": SERVED_NAMES[0], "prompt": [5] * tokens, "max_tokens": 1}
        assert machine.ask("/v1/completions", probe)[0] == 200, machine.journal(cursor)
    after = life(machine)
    assert after is not None and after.id != before.id
    assert machine.run("docker", "ps", "--all", "--quiet", "--filter", f"name={CONTAINER}").split() == [after.id[:12]]
