# SPDX-License-Identifier: Apache-2.0
"""The script of the reference answer, with the torch and transformers of the lab's image and its tiny model."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.trials.reference import parse_script_answers
from ansible.module_utils.vllm_edge.trials.reference_run import SCRIPT

from lab import images

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]
MODEL = "google/gemma-4-E2B-it"
CASES = [{"case": name, "messages": [{"role": "user", "content": name}], "engine_tokens": [9]} for name in ("a", "b")]
REQUEST: dict[str, Any] = {
    **{"model": "/models/model", "device": "either", "cases": CASES, "chat_template": None, "template_arguments": {}},
    **{"tokens": 3, "top": 5, "timeout_s": 60},
}


def run(job: Path, request: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the script as `trials.sidecar` does."""
    image = images.engine_image()
    (job / "out").mkdir(exist_ok=True)
    (job / "request.json").write_text(json.dumps(request))
    model = images.models(image) / MODEL
    mounts = [f"--volume={model}:/models/model:ro", f"--volume={job}:/job", f"--volume={SCRIPT}:/job/program.py:ro"]
    command = ["docker", "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--env=HOME=/tmp", *mounts]
    return subprocess.run(
        [*command, "--entrypoint=python3", image, "/job/program.py"], capture_output=True, text=True, timeout=300
    )


def test_the_script_answers_greedily_and_rates_the_tokens_of_the_engine(tmp_path: Path) -> None:
    done = run(tmp_path, REQUEST)
    assert done.returncode == 0, done.stderr[-3000:]
    document, answers = parse_script_answers(json.loads((tmp_path / "out" / "answers.json").read_text()))
    assert (document.device, document.dtype, list(answers)) == ("cpu", "bfloat16", ["a", "b"])
    for answer in answers.values():
        assert len(answer.token_ids) == len(answer.logprobs) == 3
        assert answer.prompt_ids[0] == 2, "the template writes <bos>, once"
        for token, top in zip(answer.token_ids, answer.logprobs, strict=True):
            assert max(top.values()) == top[token] < 0, "greedy"
        assert 9 in answer.logprobs[0]
    assert answers["a"].prompt_ids != answers["b"].prompt_ids

    other = run(tmp_path, {**REQUEST, "chat_template": "{{ messages[0].content }}"})
    assert other.returncode == 0, other.stderr[-3000:]
    _, bare = parse_script_answers(json.loads((tmp_path / "out" / "answers.json").read_text()))
    assert len(bare["a"].prompt_ids) == 1

    gpu = run(tmp_path, {**REQUEST, "device": "gpu"})
    assert gpu.returncode == 1
    assert "PyTorch of the image finds no CUDA device" in gpu.stderr
