# SPDX-License-Identifier: Apache-2.0
"""The warning about a GPU of which little is left for requests, in plan, status and report."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import parse_engine
from ansible.module_utils.vllm_edge.engine.state import EngineState
from ansible.module_utils.vllm_edge.planning import drift, feasibility, render
from ansible.module_utils.vllm_edge.planning.contract import Verdict
from ansible.module_utils.vllm_edge.status.tables import render as render_report
from checkpoints import DEFAULT, L4, MIB, engine, plan
from test_drift import ENGINE, EXPECTED, LIMITS, PLAN

BESIDE_MIB = 16_600 + 1_172 + 264 + 1_505


@pytest.mark.parametrize(
    ("wanted", "percent", "warned", "mixture"),
    [
        # Whatever the KV cache takes, only what is beside it counts.
        (engine("e2b"), 85, False, False),
        (engine("e2b"), 40, True, False),
        (engine("26b-nvfp4", max_num_seqs=256), 85, True, True),
        (engine("26b-nvfp4", max_num_seqs=256), 100, False, False),
        (engine("26b-nvfp4", 2, max_num_seqs=64), 85, False, False),
    ],
)
def test_a_plan_warns(wanted: dict[str, Any], percent: int, warned: bool, mixture: bool) -> None:
    found = plan(wanted, version=DEFAULT, memory_threshold_percent=percent)
    part = found.engines[0].gpus[0]
    beside, total = (part.total_bytes - part.kv_cache_bytes) / MIB, L4.cuda_total_bytes / MIB
    assert (beside > total * percent / 100) is warned
    assert [sentence.startswith("GPU 0 will hold") for sentence in found.memory_warnings] == [True] * warned
    text = " ".join("\n".join(render.lines(found)).split())
    said = f"warning: GPU 0 will hold {beside:,.0f} of 22,563 MiB ({beside * 100 / total:.0f} %) besides KV caches"
    assert (said in text) is warned
    assert ("keeps every expert in memory" in text) is mixture


def test_a_plan_warns_once_of_gpus_that_are_alike_and_of_none_that_holds_nothing() -> None:
    held, refused = plan(engine("31b-bf16", 4), version=DEFAULT), plan(engine("31b-bf16"), version=DEFAULT)
    (said,) = held.memory_warnings
    assert said.startswith("GPU 0-3 will each hold 19,304 of 22,563 MiB")
    assert refused.verdict is Verdict.OOM_WEIGHTS and refused.memory_warnings == ()
    unsure = plan(engine("31b-bf16", extra_args=["--quantization=fp8"]), version=DEFAULT)
    assert unsure.verdict is Verdict.CANNOT_SAY and unsure.memory_warnings == ()


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_a_share_that_is_none(percent: int) -> None:
    with pytest.raises(ValueError, match="memory_threshold_percent"):
        plan(engine("e2b"), memory_threshold_percent=percent)


@pytest.mark.parametrize(
    ("used_mib", "percent", "logged", "warned"),
    [
        (BESIDE_MIB + 2_448, 85, {}, True),
        (BESIDE_MIB + 2_448, 87, {}, False),
        # Of another program on the GPU, or more KV cache than was planned.
        (BESIDE_MIB + 2_448 + 1000, 87, {}, True),
        (BESIDE_MIB + 2_448 + 1000, 87, {"kv_cache_gib": 3.5}, False),
    ],
)
def test_a_host_warns(used_mib: int, percent: int, logged: dict[str, float], warned: bool) -> None:
    expected = drift.expectation(PLAN, "0.32.0", LIMITS, "warn", percent)
    config = parse_engine(json.dumps({**ENGINE, "gpus": ["GPU-a", "GPU-b"], "plan": expected}), "engine.json")
    boards = [
        {"uuid": "GPU-a", "index": 0, "used_mib": used_mib, "total_mib": 23_034, "reserved_mib": 471},
        {"uuid": "GPU-c", "index": 2, "used_mib": 23_000, "total_mib": 23_034, "reserved_mib": None},
    ]
    state = EngineState("31b", "serving", "2026-11-23T00:00:00Z", input_hash="ab12", log_facts=logged)
    found = feasibility.warn_of_measurement([config], {"31b": state}, boards)
    # No engine uses the other GPU.
    assert [sentence.split(" besides")[0] for sentence in found] == [
        f"GPU 0 holds {used_mib - 2_448:,} of 22,563 MiB ({(used_mib - 2_448) / 225.63:.0f} %)"
    ] * warned
    report = dict.fromkeys(("host", "profile", "generation"), "x") | {key: [] for key in ("engines", "gpus", "pins")}
    lines = render_report({**report, "completions": [], "versions": {}, "memory_warnings": found})
    assert any("Warning: GPU 0 holds" in line for line in lines) is warned


def test_an_engine_of_which_nothing_is_known_is_not_judged() -> None:
    config = parse_engine(json.dumps({**ENGINE, "gpus": ["GPU-a", "GPU-b"], "plan": None}), "engine.json")
    board = {"uuid": "GPU-a", "index": 0, "used_mib": 22_000, "total_mib": 23_034, "reserved_mib": 471}
    assert feasibility.warn_of_measurement([config], {}, [board]) == []
    assert EXPECTED["memory_threshold_percent"] == feasibility.THRESHOLD_PERCENT == 85
