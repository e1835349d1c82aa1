# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints against vLLM's own model classes, in the lab's image or as asked.py says: do the layers and
bytes that the unit tests expect (judged.json) still hold, and does vLLM load every tensor under its name and shape.

`make judged` (VLLM_EDGE_RECORD=1) writes the answers to judged.json, after a family was added to published.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from asked import ask

PLANNING = Path(__file__).parent.parent / "unit" / "planning"
sys.path.append(str(PLANNING))

import published

pytestmark = pytest.mark.docker
RECORD = PLANNING / "judged.json"


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    questions = published.questions()
    answers: dict[str, Any] = ask("vllm_models.py", questions)
    for asked, told in zip(questions, answers["answers"], strict=True):
        told |= {key: asked[key] for key in ("name", "tensor_parallel_size", "pipeline_rank")}
    if os.environ.get("VLLM_EDGE_RECORD"):
        RECORD.write_text(published.render(answers))
    return answers


def test_vllm_loads_every_checkpoint(judged: dict[str, Any]) -> None:
    assert [each for each in judged["answers"] if "error" in each or each["not_loaded"]] == []


def test_the_recorded_answers_are_those_of_vllm(judged: dict[str, Any]) -> None:
    """Whichever release gives them: the first line names it."""
    assert RECORD.read_text().splitlines()[1:] == published.render(judged).splitlines()[1:]
