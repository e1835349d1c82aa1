# SPDX-License-Identifier: Apache-2.0
"""The record of an engine's last loads: what is kept, and what becomes of a damaged file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine.config import parse_engine
from ansible.module_utils.vllm_edge.engine.loads import (
    KEPT,
    Load,
    describe_load,
    find_longest,
    read_loads,
    remember_load,
)
from engine_files import CONFIG

TIMES, PHASES = {"weights_s": 10.0}, {"loading-weights": 20.5, "compiling": 40.0}
WEIGHTS = "/data/vllm/weights/e2b"
LOAD = Load("2026-11-25T02:00:00Z", "ab12", "sha256:11", "e2b", "main", 60.5, PHASES, TIMES, WEIGHTS, 10_000, 9_500)


def test_the_newest_loads_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "e2b.loads.json"
    assert read_loads(path) == []
    for number in range(KEPT + 3):
        remember_load(path, replace(LOAD, seconds=float(number + 1)))
    assert [load.seconds for load in read_loads(path)] == [float(number) for number in range(4, KEPT + 4)]
    assert read_loads(path)[-1] == replace(LOAD, seconds=KEPT + 3.0)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["", "{", "[]", '{"loads": 7}', '{"loads": [{}, 3, null]}', '{"loads": [[]]}'])
def test_a_damaged_file_is_no_history_and_is_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e2b.loads.json"
    path.write_text(text)
    assert read_loads(path) == []
    remember_load(path, LOAD)
    assert read_loads(path) == [LOAD]


def test_a_damaged_entry_does_not_cost_the_others(tmp_path: Path) -> None:
    path = tmp_path / "e2b.loads.json"
    rows = [asdict(LOAD), {**asdict(LOAD), "seconds": "long"}, {**asdict(LOAD), "seconds": 0.0, "newer": 1}]
    path.write_text(json.dumps({"loads": rows}))
    assert read_loads(path) == [LOAD]
    (tmp_path / "link").symlink_to(path)
    assert read_loads(tmp_path / "link") == []


@pytest.mark.parametrize(
    ("read_bytes", "cached", "rate"),
    [(0, True, None), (1_000, True, None), (5_000, None, None), (9_000, False, 1_000.0), (None, None, None)],
)
def test_if_the_weights_were_in_the_page_cache(read_bytes: int | None, cached: bool | None, rate: float | None) -> None:
    load = replace(LOAD, read_bytes=read_bytes)
    assert (load.cached, load.disk_bytes_per_s) == (cached, rate)
    assert replace(load, weights_bytes=None).cached is None
    by_phase = replace(load, times={}).disk_bytes_per_s
    assert by_phase == (None if rate is None else pytest.approx(10_000 / 20.5))


def test_what_is_recorded_of_a_load() -> None:
    config = parse_engine(json.dumps({**CONFIG, "image_id": "sha256:11"}), "engine.json")
    load = describe_load(config, LOAD.at, 60.5, LOAD.phases, {"model_gib": 9.9, "weights_s": 10.0, "graphs_s": 3})
    assert load == replace(
        LOAD, times={"weights_s": 10.0, "graphs_s": 3.0}, weights_path="", weights_bytes=None, read_bytes=None
    )


def test_the_longest_time_that_a_start_may_need(tmp_path: Path) -> None:
    path = tmp_path / "e2b.loads.json"
    planned = {**CONFIG, "plan": {"gpus": [], "load_s": {"low": 40, "mid": 100, "high": 600}}}
    bare, config = (parse_engine(json.dumps(value), "engine.json") for value in (CONFIG, planned))
    assert (find_longest(path, bare), find_longest(path, config)) == (0.0, 600.0)
    remember_load(path, replace(LOAD, seconds=900.0))
    remember_load(path, replace(LOAD, seconds=4000.0, input_hash="other"))
    assert (find_longest(path, bare), find_longest(path, config)) == (900.0, 900.0)
