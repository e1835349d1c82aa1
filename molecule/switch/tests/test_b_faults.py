# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in a switch: provoked on the host, and who serves afterwards.

All of it by `vllm-edge switch` between two generations of one small engine. A fault of an engine is meant for one of
the two, by its `max_model_len`, so that the other does not meet it on the way back.
"""

from __future__ import annotations

import re

import pytest
from conftest import (
    CONTAINER,
    GPU,
    REFUSED,
    ROLLED_BACK,
    UNIT,
    Edge,
    Pair,
    default,
)

# ---- known before anything is touched ---------------------------------------------------------------------------


def test_refused_before_anything_is_touched(edge: Edge, pair: Pair) -> None:
    """Somebody else's process is on the GPU; the other reasons are in tests/unit/switch/steps/test_preflight.py."""
    container, unit = default.life(edge, CONTAINER), edge.unit("InvocationID", "MainPID", unit=UNIT)
    pid = edge.run("lab-gpu", "foreign", "start", "--gpu", "3", "--mib", "1900").strip()
    try:
        done = edge.switch(pair.there)
        assert edge.host.run(f"test -d /proc/{pid}").rc == 0, "somebody else's process is left alone"
    finally:
        edge.run("lab-gpu", "foreign", "stop", pid)
    assert (done.rc, done.result, done.failed_in()) == (REFUSED, "refused", "preflight"), done.message
    said = r"GPU 3 .* is used by others: pid \d+ \(foreign-cuda-job .*less than the budget of 20900 MiB"
    assert re.search(said, done.message) and "Nothing was touched" in done.message, done.message
    assert (default.life(edge, CONTAINER), edge.unit("InvocationID", "MainPID", unit=UNIT)) == (container, unit)
    edge.serves(pair.here)


# ---- the new engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "value", "limits", "phase", "said"),
    [
        (
            "engine-never-healthy",
            "",
            {"healthy_timeout_s": 25},
            "healthy",
            r"Engine e2b-all does not serve after 2\d s .*vllm_engine_healthy_timeout_s is 25",
        ),
        ("engine-nan-logits", "", {}, "canary", r"failed the canary's check.*'vllm-edge canary e2b-all'"),
        # Within its budget when it has loaded, beyond it after its first requests.
        ("engine-grows", "1500", {}, "measure", rf"{GPU}\) is over budget.*its budget of 20900 MiB"),
    ],
    ids=["never healthy", "answers nonsense", "grows over its budget"],
)
def test_a_new_engine_at_fault_is_replaced_by_the_former_one(
    edge: Edge, pair: Pair, fault: str, value: str, limits: dict[str, float], phase: str, said: str
) -> None:
    """The former generation comes back. Other faults of a new engine are in tests/unit/switch/test_switch.py."""
    number = edge.variant(pair.there, limits=limits) if limits else pair.there
    edge.engine_fault(fault, pair.there_len, value)
    done = edge.switch(number)
    assert re.search(said, done.message), done.message
    assert (done.rc, done.result, done.failed_in()) == (ROLLED_BACK, "rolled_back", phase), done.message
    assert f"failed in phase {phase}" in done.message and "It was undone" in done.message
    assert f"generation {pair.here}" in done.message and "serves again and is verified" in done.message
    assert "\n" not in done.message
    assert [done.phase(name, "back")["outcome"] for name in ("healthy", "canary", "measure")] == ["done"] * 3
    edge.serves(pair.here)
