# SPDX-License-Identifier: Apache-2.0
"""Published checkpoints against vLLM's own model classes, in the image that the lab runs: do the layers and bytes that
the unit tests expect (judged.json) still hold, and does vLLM load every tensor under its name and shape.

`make judged` (VLLM_EDGE_RECORD=1) writes the answers to judged.json, after a family was added to published.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab import images

HERE = Path(__file__).parent
PLANNING = HERE.parent / "unit" / "planning"
sys.path.append(str(PLANNING))

import published

pytestmark = pytest.mark.docker
RECORD = PLANNING / "judged.json"


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    questions = published.questions()
    command = ["docker", "run", "--rm", "--interactive", "--network", "none", f"--volume={HERE}:/judge:ro"]
    command += ["--entrypoint", "python3", images.engine_image(), "/judge/vllm_models.py"]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for asked, told in zip(questions, answers["answers"], strict=True):
        told |= {key: asked[key] for key in ("name", "tensor_parallel_size", "pipeline_rank")}
    if os.environ.get("VLLM_EDGE_RECORD"):
        RECORD.write_text(published.render(answers))
    return answers


def test_vllm_loads_every_checkpoint(judged: dict[str, Any]) -> None:
    assert [each for each in judged["answers"] if "error" in each or each["not_loaded"]] == []


def test_the_recorded_answers_are_those_of_vllm(judged: dict[str, Any]) -> None:
    assert RECORD.read_text() == published.render(judged)
