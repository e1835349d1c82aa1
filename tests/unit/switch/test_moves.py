# SPDX-License-Identifier: Apache-2.0
"""What a switch keeps, waits for, stops and starts, by what systemd and Docker show of each engine."""

from __future__ import annotations

import itertools

import pytest
from ansible.module_utils.vllm_edge.generation.model import FileChange, SeenEngine
from ansible.module_utils.vllm_edge.switch.model import Moves
from ansible.module_utils.vllm_edge.switch.moves import decide_moves

RIGHT, WRONG = "sha-right", "sha-wrong"


def moves_of(active: str, sub: str, running: str | None, wanted: bool = True) -> Moves:
    return decide_moves({"e": RIGHT} if wanted else {}, [SeenEngine("e", active, sub, running)], (), ())


KEPT, AWAITED = Moves(keep=("e",)), Moves(wait=("e",))
RESTARTED, STARTED = Moves(stop=("e",), start=("e",)), Moves(start=("e",))


@pytest.mark.parametrize(
    ("active", "sub", "running", "expected"),
    [
        ("active", "running", RIGHT, KEPT),
        ("reloading", "reload", RIGHT, KEPT),
        ("active", "running", WRONG, RESTARTED),
        ("active", "running", None, RESTARTED),
        ("activating", "start", RIGHT, AWAITED),
        ("activating", "start-post", RIGHT, AWAITED),
        ("activating", "start", WRONG, RESTARTED),
        ("activating", "auto-restart", None, RESTARTED),
        ("activating", "auto-restart-queued", RIGHT, RESTARTED),
        ("deactivating", "stop-sigterm", RIGHT, RESTARTED),
        ("deactivating", "stop-sigterm", None, RESTARTED),
        ("failed", "failed", None, STARTED),
        ("failed", "failed", RIGHT, RESTARTED),
        ("inactive", "dead", None, STARTED),
        ("inactive", "dead", WRONG, RESTARTED),
    ],
)
def test_what_becomes_of_an_engine(active: str, sub: str, running: str | None, expected: Moves) -> None:
    assert moves_of(active, sub, running) == expected
    stopped = () if expected is STARTED else ("e",)
    assert moves_of(active, sub, running, wanted=False) == Moves(stop=stopped), "where it is not wanted"


def test_only_what_differs_moves() -> None:
    shown = {"31b-nvfp4": "a", "e4b": "b", "e2b": "c-old"}
    seen = [SeenEngine(name, "active", "running", running) for name, running in shown.items()]
    moves = decide_moves({"31b-w4a16": "d", "e4b": "b", "e2b": "c"}, seen, (), ())
    assert moves == Moves(keep=("e4b",), stop=("31b-nvfp4", "e2b"), start=("31b-w4a16", "e2b"))


def test_files_and_the_targets_state_are_moves_of_their_own() -> None:
    change = FileChange("/etc/systemd/system/vllm-e.service", "old", "new")
    seen = [SeenEngine("e", "active", "running", RIGHT)]
    assert not decide_moves({"e": RIGHT}, seen, (), ())
    assert decide_moves({"e": RIGHT}, seen, [change], ()) == Moves(keep=("e",), files=(change,))
    assert decide_moves({"e": RIGHT}, seen, (), ["not enabled"]) == Moves(keep=("e",), target=("not enabled",))


def test_every_wanted_engine_has_one_place_in_every_state() -> None:
    """Nothing that is wanted is forgotten, and nothing is kept or waited for that is also stopped."""
    states = ["active", "reloading", "activating", "deactivating", "failed", "inactive", "maintenance", "new-in-258"]
    subs = ["running", "start", "auto-restart", "failed", "dead"]
    for active, sub, running in itertools.product(states, subs, [RIGHT, WRONG, None]):
        moves = moves_of(active, sub, running)
        assert len(moves.keep) + len(moves.start) + len(moves.wait) == 1, (active, sub, running)
        assert not set(moves.stop) & {*moves.keep, *moves.wait}, (active, sub, running)
