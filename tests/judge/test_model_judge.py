# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints against vLLM's own model classes, in the lab's image or as asked.py says: is the plan for
that release exact, does vLLM load every tensor under its name and shape, and does judged.json still hold, with which
the unit tests compare.

`make judged` (VLLM_EDGE_RECORD=1) writes the answers to judged.json, after a family was added to published.py.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from asked import SOURCES, ask

PLANNING = Path(__file__).parent.parent / "unit" / "planning"
sys.path.append(str(PLANNING))

import published

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
RECORD = PLANNING / "judged.json"
FAILS = re.compile(
    r"AttributeError: 'Qwen3MoeLLMForCausalLM' object has no attribute 'start_layer'"
    r"|^0\.19\.\S+ \S*Ministral"
)
"""Errors of vLLM itself: Qwen3-VL-MoE in a pipeline, up to 0.21, which the plan refuses. 0.19 knows Ministral 3 in
Mistral's own format only; with config.json it takes the classes of transformers, which the judge cannot load."""
TIED = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
"""Up to 0.28 vLLM takes its head for the table of embeddings where transformers 5 says so, and the plan is larger."""


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.rpartition("/")[2])
def judged(request: pytest.FixtureRequest) -> dict[str, Any]:
    questions = published.questions()
    answers: dict[str, Any] = ask("vllm_models.py", questions, request.param)
    for asked, told in zip(questions, answers["answers"], strict=True):
        told |= {key: value for key, value in asked.items() if key not in ("config", "headers")}
    if os.environ.get("VLLM_EDGE_RECORD"):
        RECORD.write_text(published.render(answers))
    return answers


def test_vllm_loads_every_checkpoint(judged: dict[str, Any]) -> None:
    failed = [
        (f"{judged['version']} {each['name']}: {each['error']}" if "error" in each else "", each)
        for each in judged["answers"]
        if each.get("not_loaded", 1)
    ]
    assert [each for error, each in failed if not FAILS.search(error)] == []


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
