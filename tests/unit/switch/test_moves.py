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


@pytest.mark.parametrize(
    ("active", "sub", "running", "expected"),
    [
        ("active", "running", RIGHT, Moves(keep=("e",))),
        ("reloading", "reload", RIGHT, Moves(keep=("e",))),
        ("active", "running", WRONG, Moves(stop=("e",), start=("e",))),
        ("active", "running", None, Moves(stop=("e",), start=("e",))),
        ("activating", "start", RIGHT, Moves(wait=("e",))),
        ("activating", "start-post", RIGHT, Moves(wait=("e",))),
        ("activating", "start", WRONG, Moves(stop=("e",), start=("e",))),
        ("activating", "start", None, Moves(stop=("e",), start=("e",))),
        ("activating", "auto-restart", None, Moves(stop=("e",), start=("e",))),
        ("activating", "auto-restart", RIGHT, Moves(stop=("e",), start=("e",))),
        ("activating", "auto-restart-queued", RIGHT, Moves(stop=("e",), start=("e",))),
        ("deactivating", "stop-sigterm", RIGHT, Moves(stop=("e",), start=("e",))),
        ("failed", "failed", None, Moves(start=("e",))),
        ("failed", "failed", RIGHT, Moves(stop=("e",), start=("e",))),
        ("inactive", "dead", None, Moves(start=("e",))),
        ("inactive", "dead", RIGHT, Moves(stop=("e",), start=("e",))),
    ],
)
def test_an_engine_that_is_wanted(active: str, sub: str, running: str | None, expected: Moves) -> None:
    assert moves_of(active, sub, running) == expected


@pytest.mark.parametrize(
    ("active", "sub", "running", "stopped"),
    [
        ("active", "running", RIGHT, True),
        ("activating", "start", RIGHT, True),
        ("activating", "auto-restart", None, True),
        ("deactivating", "stop-sigterm", None, True),
        ("failed", "failed", RIGHT, True),
        ("inactive", "dead", WRONG, True),
        ("failed", "failed", None, False),
        ("inactive", "dead", None, False),
    ],
)
def test_an_engine_that_is_not_wanted(active: str, sub: str, running: str | None, stopped: bool) -> None:
    assert moves_of(active, sub, running, wanted=False) == Moves(stop=("e",) if stopped else ())


def test_an_engine_that_was_never_seen_is_started() -> None:
    assert decide_moves({"new": RIGHT}, [], (), ()) == Moves(start=("new",))


def test_only_what_differs_moves() -> None:
    seen = [
        SeenEngine("31b-nvfp4", "active", "running", "a"),
        SeenEngine("e4b", "active", "running", "b"),
        SeenEngine("e2b", "active", "running", "c-old"),
    ]
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
