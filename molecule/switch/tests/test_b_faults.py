# SPDX-License-Identifier: Apache-2.0
"""A real new engine at fault in `vllm-edge switch`. What else can go wrong is in tests/unit/switch, in each phase."""

from __future__ import annotations

from conftest import ROLLED_BACK, Edge, Pair


def test_a_new_engine_at_fault_is_replaced_by_the_former_one(edge: Edge, pair: Pair) -> None:
    """It answers nonsense. The fault is meant for the new engine, and not met on the way back."""
    edge.engine_fault("engine-nan-logits", pair.there_len)
    done = edge.switch(pair.there)
    assert (done.rc, done.result) == (ROLLED_BACK, "rolled_back"), done.message
    assert "failed in phase canary. Role " in done.message and "'vllm-edge canary e2b-all'" in done.message
    assert f"It was undone: generation {pair.here}" in done.message and "\n" not in done.message
    assert [done.phase(name, "back")["outcome"] for name in ("healthy", "canary", "measure")] == ["done"] * 3
    edge.serves(pair.here)
