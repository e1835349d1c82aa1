# SPDX-License-Identifier: Apache-2.0
"""A real new engine at fault in `vllm-edge switch`, and who serves afterwards.

A fault is meant for one of two generations of one small engine, by its `max_model_len`, so that the other does not meet
it on the way back. What else can go wrong is in tests/unit/switch, in each phase.
"""

from __future__ import annotations

import re

import pytest
from conftest import ROLLED_BACK, Edge, Pair


@pytest.mark.parametrize(
    ("fault", "limits", "phase", "said"),
    [
        (
            "engine-never-healthy",
            {"healthy_timeout_s": 25},
            "healthy",
            r"Engine e2b-all does not serve after 2\d s .*vllm_engine_healthy_timeout_s is 25",
        ),
        ("engine-nan-logits", {}, "canary", r"failed the canary's check.*'vllm-edge canary e2b-all'"),
    ],
)
def test_a_new_engine_at_fault_is_replaced_by_the_former_one(
    edge: Edge, pair: Pair, fault: str, limits: dict[str, float], phase: str, said: str
) -> None:
    number = edge.variant(pair.there, limits=limits) if limits else pair.there
    edge.engine_fault(fault, pair.there_len)
    done = edge.switch(number)
    assert re.search(said, done.message), done.message
    assert (done.rc, done.result) == (ROLLED_BACK, "rolled_back"), done.message
    assert f"failed in phase {phase}" in done.message and "It was undone" in done.message
    assert f"generation {pair.here}" in done.message and "serves again and is verified" in done.message
    assert "\n" not in done.message
    assert [done.phase(name, "back")["outcome"] for name in ("healthy", "canary", "measure")] == ["done"] * 3
    edge.serves(pair.here)
