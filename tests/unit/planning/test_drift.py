# SPDX-License-Identifier: Apache-2.0
"""Plan against measurement: what goes to the host, what is compared there, and what is said where it differs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import test_plan_render
from ansible.module_utils.vllm_edge.engine.config import parse_engine
from ansible.module_utils.vllm_edge.engine.state import EngineState
from ansible.module_utils.vllm_edge.planning import drift
from ansible.module_utils.vllm_edge.planning.checkpoint.generic import describe_generic
from ansible.module_utils.vllm_edge.planning.contract import GpuPlan, LoadTime, Seconds
from ansible.module_utils.vllm_edge.status.tables import render_drift_table
from engine_files import CONFIG


def gpu(slot: int, graphs_mib: int = 1505) -> GpuPlan:
    parts = {"weights": 16_600, "overhead": 1_172, "context": 264, "graphs": graphs_mib, "kv_cache": 2_448}
    return test_plan_render.gpu(slot, **parts)


PLAN = test_plan_render.engine(gpus=(gpu(0), gpu(1)), pinned=True, kv_blocks=3_917, kv_cache_tokens=14_982)
LIMITS = drift.tolerances({}, 300)
EXPECTED = drift.expectation(PLAN, "0.32.0", LIMITS, "warn")
LOGGED = {"model_gib": 16.21, "graphs_gib": 1.47, "kv_cache_gib": 2.39, "kv_cache_tokens": 14_982, "kv_blocks": 3_917}
Row = Mapping[str, Any]
UUIDS = ("GPU-a", "GPU-b")
ENGINE = CONFIG | {"engine": "31b", "tensor_parallel_size": 2}


def test_the_host_is_given_whole_mib_for_each_gpu_and_the_load_time_with_what_it_was_made_of() -> None:
    assert [part["total_mib"] for part in EXPECTED["gpus"]] == [21_989, 21_989]
    assert EXPECTED["gpus"][0]["kv_cache_mib"] == 2_448
    assert (EXPECTED["verdict"], EXPECTED["on_drift"], EXPECTED["tolerances"]["total_mib"]) == ("fits", "warn", 1_068)
    assert EXPECTED["load_s"] is None and "load_read_bytes" not in EXPECTED
    load = LoadTime(40, 126, 700, read_bytes=10_000, other=Seconds(30, 100, 500))
    found = drift.expectation(dataclasses.replace(PLAN, load_s=load), "0.32.0", LIMITS, "warn")
    assert found["load_s"] == {"low": 40, "mid": 126, "high": 700} and found["load_read_bytes"] == 10_000
    assert found["load_other_s"] == {"low": 30, "mid": 100, "high": 500}
    assert parse_engine(json.dumps({**ENGINE, "gpus": list(UUIDS), "plan": found}), "engine.json").plan == found


@pytest.mark.parametrize("pinned", [True, False])
def test_bounds_of_an_unknown_architecture_are_no_drift(pinned: bool) -> None:
    """An engine may have fewer weights and more tokens than the upper bounds."""
    source = describe_generic("NewForCausalLM", "files")
    generic = dataclasses.replace(PLAN, facts_source=source, uncertainty_mib=(1500, 300), pinned=pinned)
    limits = drift.expectation(generic, "0.32.0", LIMITS, "warn")["tolerances"]
    exact = drift.expectation(dataclasses.replace(PLAN, pinned=pinned), "0.32.0", LIMITS, "warn")["tolerances"]
    more = {name: limits[name] - exact[name] for name in limits if limits[name] != exact[name]}
    assert more.pop("kv_cache_tokens") + exact["kv_cache_tokens"] == 100 * PLAN.kv_cache_tokens
    assert more.pop("kv_blocks") + exact["kv_blocks"] == 100 * PLAN.kv_blocks
    assert more == dict.fromkeys(("weights_mib", "total_mib", *(() if pinned else ("kv_cache_mib",))), 1500)


def compare(
    *engines: tuple[str, tuple[str, ...], Any, dict[str, Any]],
    boards: Sequence[Row] = (),
    phase: str = "serving",
    input_hash: str = CONFIG["input_hash"],
) -> list[Row]:
    """Engines by name, GPUs, plan and what they logged."""
    configs, states = [], {}
    for name, uuids, plan, logged in engines:
        changed = {"engine": name, "gpus": uuids, "plan": plan, "tensor_parallel_size": len(uuids)}
        configs.append(parse_engine(json.dumps(CONFIG | changed), "engine.json"))
        states[name] = EngineState(name, phase, "", input_hash=input_hash, log_facts=logged)
    return drift.compare(configs, states, boards)


def rows(
    logged: dict[str, Any] | None = None, measured: tuple[int | None, ...] = (21_950, 22_050), **expected: Any
) -> dict[tuple[str, str], Row]:
    boards = [{"uuid": uuid, "engine_mib": mib} for uuid, mib in zip(UUIDS, measured, strict=True)]
    found = compare(("31b", UUIDS, {**EXPECTED, **expected}, {**LOGGED, **(logged or {})}), boards=boards)
    return {(row["what"], row["component"]): row for row in found}


@pytest.mark.parametrize(
    ("logged", "measured", "key"),
    [
        ({"model_gib": 16.40}, (21_950, 22_050), ("31b", "weights_mib")),
        ({"kv_cache_gib": 2.50}, (21_950, 22_050), ("31b", "kv_cache_mib")),
        ({"kv_cache_tokens": 14_981}, (21_950, 22_050), ("31b", "kv_cache_tokens")),
        ({"kv_blocks": 3_918}, (21_950, 22_050), ("31b", "kv_blocks")),
        ({"graphs_gib": 0.5}, (21_950, 22_050), ("31b", "graphs_mib")),
        ({}, (21_950, 23_058), ("GPU-b", "total_mib")),
        ({}, (20_920, 22_050), ("GPU-a", "total_mib")),
    ],
)
def test_one_component_that_drifts_is_named(
    logged: dict[str, Any], measured: tuple[int, int], key: tuple[str, str]
) -> None:
    found = rows(logged, measured)
    assert [place for place, row in found.items() if row["within"] is False] == [key]
    (said,) = drift.sentences(found.values())
    assert key[0] in said and f"planned {found[key]['planned']:,.0f}" in said


def test_what_nobody_told_is_neither_right_nor_wrong() -> None:
    silent = compare(("31b", UUIDS, EXPECTED, {}))
    assert len(silent) == 7 and {row["within"] for row in silent} == {None} and drift.sentences(silent) == []
    assert compare(("31b", UUIDS, EXPECTED, LOGGED), input_hash="other") == silent, "a log of other inputs"
    eager = drift.expectation(dataclasses.replace(PLAN, gpus=(gpu(0, 0), gpu(1, 0))), "0.32.0", LIMITS, "warn")
    without = {key: value for key, value in LOGGED.items() if key != "graphs_gib"}
    assert "graphs_mib" not in [row["component"] for row in compare(("31b", UUIDS, eager, without))]


@pytest.mark.parametrize(
    ("phase", "judged"),
    [("serving", True), ("not-answering", True), ("stopped", False), ("failed", False), ("loading-weights", False)],
)
def test_a_gpu_whose_engine_is_away_is_not_held_against_the_plan(phase: str, judged: bool) -> None:
    boards = [{"uuid": uuid, "engine_mib": 0} for uuid in UUIDS]
    found = compare(("31b", UUIDS, EXPECTED, LOGGED), boards=boards, phase=phase)
    assert [row["within"] for row in found if row["component"] == "total_mib"] == [False if judged else None] * 2
    assert [row["within"] for row in found if row["component"] == "weights_mib"] == [True]


def test_engines_on_one_gpu_are_added_up_and_one_without_a_plan_makes_its_gpu_unknown() -> None:
    small = {**EXPECTED, "gpus": [{**EXPECTED["gpus"][0], "total_mib": 5_000}]}
    both = compare(("31b", UUIDS, EXPECTED, {}), ("small", ("GPU-b",), small, {}))
    totals = {row["what"]: (row["planned"], row["tolerance"]) for row in both if row["component"] == "total_mib"}
    assert totals == {"GPU-a": (21_989, 1_068), "GPU-b": (26_989, 2_136)}
    mixed = compare(("31b", UUIDS, EXPECTED, {}), ("other", ("GPU-b",), None, {}))
    assert [row["what"] for row in mixed if row["component"] == "total_mib"] == ["GPU-a"]


def test_a_share_of_the_gpu_leaves_the_kv_cache_to_the_other_components() -> None:
    shared = drift.expectation(dataclasses.replace(PLAN, pinned=False), "0.32.0", LIMITS, "warn")["tolerances"]
    assert shared["kv_cache_mib"] == 160 + 768 + 300
    assert shared["kv_cache_tokens"] == pytest.approx(14_982 * 1228 / 2448, abs=1)
    assert shared["kv_blocks"] == pytest.approx(3_917 * 1228 / 2448, abs=1)
    assert (EXPECTED["tolerances"]["kv_cache_tokens"], EXPECTED["tolerances"]["kv_blocks"]) == (0, 0)


def test_tolerances_of_an_operator() -> None:
    assert drift.tolerances({"weights_mib": 10}, 250) == {**drift.TOLERANCES, "weights_mib": 10, "total_mib": 250}
    with pytest.raises(ValueError, match=r"plan_drift_tolerances\.graphs_mib: -1 is not a number from 0"):
        drift.tolerances({"graphs_mib": -1}, 300)


def test_the_table() -> None:
    gpus = [{"uuid": "GPU-a", "index": 0}, {"uuid": "GPU-b", "index": 1}]
    lines = render_drift_table(list(rows({"graphs_gib": 0.5}, (None, 22_000)).values()), gpus)
    assert max(map(len, lines)) <= 100
    assert [line.split()[-1] for line in lines[2:]] == ["within", "DRIFT", *["within"] * 3, "told", "within"]
    assert lines[-1].startswith("GPU 1") and "+11" in lines[-1]
