# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints against vLLM's own model classes, in the lab's image or as asked.py says: is the plan for
that release exact, does vLLM load every tensor under its name and shape, and does judged.json still hold, with which
the unit tests compare. It ends with the table of families.

`make judged` (VLLM_EDGE_RECORD=1) writes the answers to judged.json, after a family was added to published.py.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asked import SOURCES, ask

PLANNING = Path(__file__).parent.parent / "unit" / "planning"
sys.path.append(str(PLANNING))

import published

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
RECORD = PLANNING / "judged.json"
FAILS = re.compile(r"AttributeError: 'Qwen3MoeLLMForCausalLM' object has no attribute 'start_layer'")
"""Errors of vLLM itself: Qwen3-VL-MoE in a pipeline, up to 0.21, which the plan refuses."""
TIED = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
"""Up to 0.28 vLLM takes its head for the table of embeddings where transformers 5 says so, and the plan is larger."""
Case = tuple[str, dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.rpartition("/")[2])
def judged(request: pytest.FixtureRequest, seen: list[Case]) -> dict[str, Any]:
    questions = published.questions()
    answers: dict[str, Any] = ask("vllm_models.py", questions, request.param)
    for asked, told in zip(questions, answers["answers"], strict=True):
        told |= {key: value for key, value in asked.items() if key not in ("config", "headers")}
        seen.append((answers["version"], asked, told))
    if os.environ.get("VLLM_EDGE_RECORD"):
        RECORD.write_text(published.render(answers))
    return answers


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Iterator[list[Case]]:
    """Every case of every release; printed at the end."""
    cases: list[Case] = []
    yield cases
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("\n" + table(cases))


def table(cases: list[Case]) -> str:
    """Families: checkpoints, cases, exact ones, the largest error of parameters, releases."""
    rows: dict[str, list[Any]] = {}
    for version, asked, told in cases:
        if "error" in told:
            continue
        name = published.first_layers(asked["name"]).family
        row = rows.setdefault(name, [set(), 0, 0, 0.0, set()])
        wrong = published.compare(asked, told, version)
        sizes = [line.partition(": ")[2].split(", ") for line in wrong if line.startswith(("parameters", "RoPE"))]
        off = sum(int(ours) - int(theirs) for ours, theirs in sizes) / (told["parameters_bytes"] + told["rope_bytes"])
        row[:] = [
            row[0] | {asked["name"]}, row[1] + 1, row[2] + (not wrong), max(row[3], off, key=abs), row[4] | {version}
        ]  # fmt: skip
    lines = ["| family | checkpoints | cases | exact | largest error | releases |", "|---|---|---|---|---|---|"]
    for name, (checkpoints, count, exact, off, versions) in rows.items():
        ordered = sorted(versions, key=lambda version: [int(part) for part in version.split("+")[0].split(".")])
        spread = ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]} ({len(ordered)})"
        lines.append(f"| {name} | {len(checkpoints)} | {count} | {exact} | {off:.2%} | {spread} |")
    return "\n".join(lines)


def test_vllm_loads_every_checkpoint(judged: dict[str, Any]) -> None:
    bad = [each for each in judged["answers"] if not FAILS.search(each.get("error", "")) and each.get("not_loaded", 1)]
    assert bad == []


def test_the_plan_is_exact(judged: dict[str, Any]) -> None:
    """Layers, bytes of parameters and of RoPE caches, by the rules of the release that answers."""
    questions, wrong = published.questions(), {}
    for asked, told in zip(questions, judged["answers"], strict=True):
        if "error" not in told and (found := published.compare(asked, told, judged["version"])):
            wrong[tuple(value for key, value in asked.items() if key not in ("config", "headers"))] = found
    tied = int(judged["version"].split(".")[1]) < 29
    assert {case: found for case, found in wrong.items() if not (tied and case[0] == TIED)} == {}


def test_the_recorded_answers_are_those_of_vllm(judged: dict[str, Any]) -> None:
    if f'"version": "{judged["version"]}"' in RECORD.read_text().partition("\n")[0]:
        assert RECORD.read_text() == published.render(judged)
