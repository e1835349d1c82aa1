# SPDX-License-Identifier: Apache-2.0
"""Phase `healthy`: how long engines are waited for, and what is said of those that do not serve."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from ansible.module_utils.vllm_edge.engine.loads import Load, remember_load
from ansible.module_utils.vllm_edge.engine.state import EngineState, write_state
from ansible.module_utils.vllm_edge.generation.model import Limits
from ansible.module_utils.vllm_edge.switch.model import Done, Moves
from fake_host import OOM, ServingHost, failure
from generations import engine

Shown = dict[str, object]


def wait_healthy(
    host: ServingHost, *names: str, all_of_them: bool = False, limit_s: float = 60, wait: bool = False
) -> Done:
    wanted = replace(host.generation, limits=Limits(healthy_timeout_s=limit_s))
    moves = Moves(wait=names) if wait else Moves(start=names)
    if not wait:
        host.world.start(moves)
    return host.world.healthy(wanted, moves, all_of_them=all_of_them)


UP: Shown = {"ActiveState": "active", "SubState": "running"}
ENDED: Shown = {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code"}
WAITS: Shown = {"SubState": "auto-restart"}


PLANNED = {"gpus": [], "load_s": {"low": 1, "mid": 5, "high": 100}}


def test_a_load_that_is_planned_to_be_longer_raises_the_default_limit(host: ServingHost) -> None:
    host.generation = host.stored(engine("e2b", plan={**PLANNED, "load_s": {"low": 1, "mid": 5, "high": 2000}}))
    default_s = Limits().healthy_timeout_s
    host.loads("e2b", (1900, UP))
    assert "e2b serves after 1900.0 s" in wait_healthy(host, "e2b", limit_s=default_s).detail
    host.loads("e2b")
    assert "does not serve after 2000 s" in failure(lambda: wait_healthy(host, "e2b", limit_s=default_s)).text
    for limit_s in (60, 2400):
        failed = failure(lambda limit_s=limit_s: wait_healthy(host, "e2b", limit_s=limit_s))
        assert f"does not serve after {limit_s} s" in failed.text, "an operator's limit stays"


def test_a_slow_load_is_a_warning(host: ServingHost) -> None:
    host.generation = host.stored(engine("e2b", plan=PLANNED))
    config = host.generation.engines["e2b"].config
    state = EngineState("e2b", "serving", "", input_hash=config.input_hash, load_seconds=150.0)
    write_state(host.paths.engine_state("e2b"), state)
    phases = {"loading-weights": 140.0, "compiling": 10.0}
    load = Load("2026-11-25T02:00:00Z", config.input_hash, config.image_id, "e2b", "main", 150.0, phases)
    remember_load(host.paths.engine_loads("e2b"), load)
    host.loads("e2b", (20, UP))
    done = wait_healthy(host, "e2b")
    assert list(done.warnings) == [
        "Engine e2b took 150 s to load, and 1 to 100 s were expected (the plan; the disk's read rate is not known): "
        "most of it was 'loading weights' with 140 s. 'journalctl -u vllm-e2b.service' shows what it did meanwhile."
    ]


def test_engines_are_waited_for_until_all_serve(host: ServingHost) -> None:
    host.loads("a", (1, {}), (9, UP), ActiveState="inactive", SubState="dead", InvocationID="a-1", Job=17)
    host.loads("b", (4, UP))
    done = wait_healthy(host, "a", "b")
    assert done.detail == "a, b serve after 9.0 s, a last"
    assert done.data["load_seconds"] == {"a": 9.0, "b": 4.0}
    assert host.world.healthy(host.generation, Moves(), all_of_them=False).detail == "no engine has to load"


@pytest.mark.parametrize(
    "end",
    [
        ENDED,
        {**WAITS, "Result": "exit-code"},
        {"NRestarts": 1, "InvocationID": "a-3"},
        {"InvocationID": "a-3"},
        {**UP, "InvocationID": "a-3", "NRestarts": 1},
        {"ActiveState": "inactive", "SubState": "dead"},
    ],
)
def test_the_first_engine_that_ends_fails_the_phase_with_its_explanation(host: ServingHost, end: Shown) -> None:
    host.loads("a", (5, end))
    host.loads("b")
    host.clock.at(5, lambda: host.failed("a"))
    failed = failure(lambda: wait_healthy(host, "a", "b"))
    assert failed.text == "Engine a ended while it was loading. The GPU has too little memory. Lower max_num_seqs."
    assert failed.engines == ("a",) and host.clock.now == 1005


def test_an_engine_that_ended_before_the_first_look(host: ServingHost) -> None:
    host.loads("a", **ENDED)
    host.failed("a")
    assert "The GPU has too little memory" in failure(lambda: wait_healthy(host, "a")).text


def test_an_engine_that_served_and_ended_while_another_loads(host: ServingHost) -> None:
    host.loads("a", (1, UP), (3, {**ENDED, "Result": "watchdog"}))
    host.loads("b")
    failed = failure(lambda: wait_healthy(host, "a", "b"))
    assert "Engine a ended again after it had loaded. systemd says failed, watchdog" in failed.text


def test_an_old_failure_is_not_taken_for_this_one_whatever_the_clock_says(host: ServingHost) -> None:
    host.failed("a", phase="stopped")
    host.loads("a", (2, {**ENDED, "Result": "timeout", "StatusText": "loading weights"}))
    failed = failure(lambda: wait_healthy(host, "a"))
    assert "too little memory" not in failed.text
    assert "Engine a ended while it was loading. loading weights. 'vllm-edge explain a'." in failed.text
    # Of an earlier time than the one known before, and new all the same: the clock went back.
    host.loads("a", (2, WAITS))
    host.failed("a", phase="loading")
    new = replace(OOM, time="2026-11-20T00:00:00Z", reason="no KV cache")
    host.clock.at(2, lambda: host.failed("a", new, phase="loading"))
    assert "No KV cache. Lower max_num_seqs" in failure(lambda: wait_healthy(host, "a")).text


def test_an_engine_that_never_serves(host: ServingHost) -> None:
    host.loads("a", StatusText="capturing graphs, 58 s")
    host.loads("b", **UP)
    failed = failure(lambda: wait_healthy(host, "a", "b", limit_s=60))
    assert "Engine a does not serve after 60 s (capturing graphs, 58 s)" in failed.text
    assert "healthy_timeout_s is 60" in failed.text and failed.engines == ("a",)


def test_an_engine_that_loads_already_is_judged_from_where_it_is(host: ServingHost) -> None:
    host.loads("a", (2, {**UP, "NRestarts": 3}), NRestarts=3)
    assert wait_healthy(host, "a", wait=True).detail == "a serves after 2.0 s"


def test_the_way_back_waits_for_all_and_gives_each_some_more_tries(host: ServingHost) -> None:
    again = {"NRestarts": 1, "InvocationID": "a-3"}
    host.loads("a", (2, WAITS), (7, again), (20, {**again, **UP}))
    host.loads("b", (3, ENDED))
    host.clock.at(3, lambda: host.failed("b"))
    failed = failure(lambda: wait_healthy(host, "a", "b", all_of_them=True))
    assert failed.engines == ("b",) and host.clock.now == 1020


def test_the_way_back_does_not_try_for_ever(host: ServingHost) -> None:
    host.loads("a")
    for tries in range(4):
        host.clock.at(5 + 10 * tries, functools.partial(host.loads, "a", **WAITS, NRestarts=tries))
        again = {"NRestarts": tries + 1, "InvocationID": f"a-{tries + 3}"}
        host.clock.at(10 + 10 * tries, functools.partial(host.loads, "a", **again))
    host.failed("a")
    failed = failure(lambda: wait_healthy(host, "a", all_of_them=True))
    assert "Engine a ended while it was loading" in failed.text and host.clock.now == 1025
