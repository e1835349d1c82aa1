# SPDX-License-Identifier: Apache-2.0
"""Estimates of activations, CUDA context and CUDA graphs, against what logs say."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning import decode, overhead, planner
from checkpoints import GIB, MIB, NVFP4_TP2, engine, model


@pytest.mark.parametrize(
    ("sequences", "piecewise", "full", "largest"),
    [(256, 51, 35, 512), (128, 35, 19, 256), (32, 11, 7, 64), (8, 5, 4, 16)],
)
def test_captured_sizes_are_as_logs_say(sequences: int, piecewise: int, full: int, largest: int) -> None:
    assert overhead.captures(sequences, 2048) == overhead.Captures(piecewise, full, largest)


@pytest.mark.parametrize(
    ("wanted", "gib", "allowed"),
    [
        pytest.param(NVFP4_TP2, 1.47, 0.01, id="31B over two GPUs, the reference's log, fitted"),
        pytest.param(engine("e4b"), 0.71, 0.05, id="E4B, vLLM 0.22.1, a log that nothing was fitted to"),
    ],
)
def test_graphs(wanted: Mapping[str, Any], gib: float, allowed: float) -> None:
    arguments = planner.arguments_of(wanted)
    found = overhead.graphs(model(wanted["model"]), arguments, 256, 2048, in_budget=True)
    assert found.value / GIB == pytest.approx(gib, rel=allowed)
    assert found.low <= found.value <= found.high
    eager = dataclasses.replace(arguments, enforce_eager=True)
    assert overhead.graphs(model(wanted["model"]), eager, 256, 2048, in_budget=True).value == 0


def test_activations_grow_with_rows_and_vocabulary() -> None:
    chosen = model("31b-bf16")
    few, many = (overhead.activations(chosen, rows, samples=True).value / GIB for rows in (8, 256))
    assert many - few == pytest.approx(0.875 * 248 / 256, rel=0.001)
    assert many == pytest.approx(0.27 + 0.875, rel=0.001)
    half = dataclasses.replace(chosen, vocabulary=chosen.vocabulary // 2)
    assert overhead.activations(half, 256, samples=True).value / GIB == pytest.approx(0.27 + 0.4375, rel=0.001)
    assert overhead.activations(chosen, 256, samples=False).value / GIB == pytest.approx(0.27)


@pytest.mark.parametrize(("ranks", "mib"), [(1, 200), (2, 263.7), (4, 391)])
def test_context(ranks: int, mib: float) -> None:
    assert overhead.context(ranks).value / MIB == pytest.approx(mib, abs=0.1)


def test_every_constant_says_where_it_is_from() -> None:
    figures = {
        name: value
        for module in (overhead, decode)
        for name, value in vars(module).items()
        if isinstance(value, overhead.Uncertain) and name != "NOTHING"
    }
    assert len(figures) >= 12
    for name, figure in figures.items():
        assert figure.low <= figure.value <= figure.high, name
        assert len(figure.source) > 40, name
