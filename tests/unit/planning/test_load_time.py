# SPDX-License-Identifier: Apache-2.0
"""Load time: what the plan says, what a host's disk and history make of it, and when a load was too slow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine import loads
from ansible.module_utils.vllm_edge.engine.config import EngineConfig, parse_engine
from ansible.module_utils.vllm_edge.engine.loads import Load, remember_load
from ansible.module_utils.vllm_edge.engine.state import EngineState
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.planning import load_time
from ansible.module_utils.vllm_edge.planning.checkpoint import model_facts
from ansible.module_utils.vllm_edge.planning.contract import Arguments
from ansible.module_utils.vllm_edge.planning.load_time import Expected, expect, find_slow_load, plan_load
from ansible.module_utils.vllm_edge.weights.read_rate import ReadRate
from checkpoints import model, recorded
from engine_files import CONFIG

PLAN: dict[str, Any] = {
    "gpus": [],
    "load_s": {"low": 40, "mid": 126, "high": 700},
    "load_other_s": {"low": 30, "mid": 100, "high": 500},
    "load_read_bytes": 10_000_000_000,
}
LOAD = Load("2026-11-25T02:00:00Z", "ab12", "vllm-edge/vllm:1", "e2b", "main", 60.0)


def config(**changes: Any) -> EngineConfig:
    return parse_engine(json.dumps({**CONFIG, "plan": PLAN, **changes}), "engine.json")


@pytest.mark.parametrize(
    ("repo", "arguments", "measured_s"),
    [
        ("google/gemma-4-31B-it", Arguments(tensor_parallel_size=4, enforce_eager=True), (120, 120)),
        ("nvidia/Gemma-4-31B-IT-NVFP4", Arguments(tensor_parallel_size=2), (170, 180)),
        ("google/gemma-4-E4B-it", Arguments(), (150, 150)),
        ("google/gemma-4-E2B-it", Arguments(), (90, 90)),
    ],
)
def test_the_loads_of_the_reference_host_are_within_the_band(
    repo: str, arguments: Arguments, measured_s: tuple[int, int]
) -> None:
    """Two constants were fitted to them, so that only shows that the arithmetic does what its text says."""
    load = plan_load(model(repo), arguments)
    assert load is not None and load.read_bytes == model_facts.checkpoint_bytes(recorded(repo))
    assert load.low < measured_s[0] and measured_s[1] < load.high and load.low < load.mid < load.high
    assert 0.7 < load.mid / measured_s[0] < 1.45


def test_eager_loads_neither_compile_nor_capture() -> None:
    e2b = model("e2b")
    eager, compiled = plan_load(e2b, Arguments(enforce_eager=True)), plan_load(e2b, Arguments())
    assert eager and compiled and compiled.mid - eager.mid == 65
    nothing = replace(e2b, facts=replace(e2b.facts, tensors=()))
    assert plan_load(nothing, Arguments()) is None, "without the sizes of the files nothing can be said"


def test_without_history_the_plan_counts_and_the_disk_narrows_it() -> None:
    assert expect(config(plan=None), [], 1e9) is None
    assert expect(config(plan={"gpus": []}), [], 1e9) is None, "a generation of an earlier release"
    assert expect(config(), [], None) == Expected(40, 126, 700, "the plan; the disk's read rate is not known")
    assert expect(config(), [], 1e9) == Expected(32, 115, 534, "the plan, and 1.0 GB/s from the disk")
    slow = expect(config(), [], 0.1e9)
    assert slow is not None and (slow.low, slow.mid, slow.high) == (32, 243, 834)


def test_history_that_this_user_may_not_read_is_not_taken_for_none(
    paths: HostPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(loads, "read_foreign", refuse)
    found = load_time.expect_load(paths, config())
    assert found and found.basis == "the plan; only root can read earlier loads and the disk's read rate"
    assert load_time.warn_of_load(paths, config(), None) is None


def test_history_of_the_same_inputs_makes_it_narrow() -> None:
    cold = replace(LOAD, seconds=100.0, weights_bytes=10, read_bytes=10)
    found = expect(config(), [LOAD, replace(LOAD, seconds=70.0), cold], None)
    assert found == Expected(42, 70, 165, "3 earlier loads")
    warm = expect(config(), [LOAD], None)
    assert warm == Expected(42, 60, 700, "1 earlier load"), "nobody has seen a load from the disk"
    assert expect(config(plan=None), [LOAD], None) == Expected(42, 60, 105, "1 earlier load")
    # With other arguments it tells less, and of another image nothing.
    other = replace(LOAD, input_hash="other", weights_bytes=10, read_bytes=10)
    assert expect(config(), [other], None) == Expected(24, 60, 165, "1 earlier load with other arguments")
    assert expect(config(), [other, LOAD], None) == expect(config(), [LOAD], None)
    for change in ({"image": "vllm-edge/vllm:0"}, {"model": "e4b"}, {"revision": "c" * 40}):
        assert expect(config(), [replace(other, **change)], None) == expect(config(), [], None)


def test_a_slow_load_is_named_with_the_phase_that_took_long() -> None:
    usual = replace(LOAD, phases={"loading-weights": 20.0, "compiling": 40.0}, weights_bytes=10, read_bytes=10)
    slow = replace(LOAD, seconds=400.0, phases={"loading-weights": 350.0, "compiling": 50.0})
    assert find_slow_load(config(), slow, [usual], None) == (
        "Engine e2b took 400 s to load, and 42 to 105 s were expected (1 earlier load): most of it was 'loading "
        "weights' with 350 s, usually 20 s. 'journalctl -u vllm-e2b.service' shows what it did meanwhile."
    )
    first = find_slow_load(config(), replace(slow, seconds=701.0), [], None)
    assert first and "most of it was 'loading weights' with 350 s. " in first
    unseen = find_slow_load(config(), replace(slow, phases={}), [usual], None)
    assert unseen and "(1 earlier load). 'journalctl" in unseen
    assert find_slow_load(config(), replace(slow, seconds=105.0), [usual], None) is None
    assert find_slow_load(config(), replace(slow, seconds=1.0), [usual], None) is None, "fast is no finding"
    assert find_slow_load(config(plan=None), slow, [], None) is None


# ---- on a host --------------------------------------------------------------------------------------------------


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    (tmp_path / "weights" / "e2b").mkdir(parents=True)
    return HostPaths(etc=tmp_path / "etc", state=tmp_path / "state")


def test_loads_from_the_disk_tell_more_than_its_measurement(
    paths: HostPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = config(weights_path=str(tmp_path / "weights" / "e2b"))
    assert load_time.find_disk_rate(paths, engine) is None
    measured = ReadRate(str(tmp_path / "weights"), "8:1", 2e9, "", 1, "then")
    monkeypatch.setattr(load_time, "find_rate", lambda *_: measured)
    assert load_time.find_disk_rate(paths, engine) == 2e9
    cold = {"weights_bytes": 7_000, "read_bytes": 7_000, "times": {"weights_s": 10.0}}
    other = replace(LOAD, weights_path=str(tmp_path / "weights" / "e4b"), **cold)
    remember_load(paths.engine_loads("e4b"), other)
    remember_load(paths.engine_loads("far"), replace(other, weights_path="/mnt/e4b", times={"weights_s": 1.0}))
    assert load_time.find_disk_rate(paths, engine) == pytest.approx(1_000)
    assert load_time.find_disk_rate(paths, engine, until=LOAD.at) == 2e9, "a load does not explain itself"


def test_the_last_load_is_judged_by_those_before_it(paths: HostPaths) -> None:
    engine = config()
    state = EngineState("e2b", "serving", "", input_hash="ab12", load_seconds=900.0)
    assert load_time.warn_of_load(paths, engine, state) is None, "nothing is recorded"
    cold = replace(LOAD, weights_bytes=10, read_bytes=10)
    for load in (cold, replace(cold, seconds=900.0)):
        remember_load(paths.engine_loads("e2b"), load)
    assert "took 900 s to load, and 42 to 105 s" in (load_time.warn_of_load(paths, engine, state) or "")
    for changed in (replace(state, load_seconds=61.0), replace(state, input_hash="cd34"), None):
        assert load_time.warn_of_load(paths, engine, changed) is None, "it is not the load of this run"
    assert load_time.longest_load_s(paths, [engine]) == 1365.0
    assert load_time.longest_load_s(paths, []) == 0
