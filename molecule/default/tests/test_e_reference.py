# SPDX-License-Identifier: Apache-2.0
"""The quality suite through its playbook, and an engine against plain transformers on the tiny model: equal."""

from __future__ import annotations

import json
import shlex
from pathlib import PurePosixPath

from conftest import INVENTORY, INVENTORY_HOST, VICTIM, Controller, Machine

# Of these the tiny model, which rates all its tokens alike, answers the first five tokens without a tie.
QUESTIONS = {
    "count": "Count from 1 to 9, digits and commas only.",
    "balancer": "What does a load balancer do?",
    "capital": "What is the capital of France?",
}
DIRECTORY = "/root/reference"


def test_the_engine_answers_as_transformers_does(machine: Machine) -> None:
    prompts = [{"case": case, "messages": [{"role": "user", "content": text}]} for case, text in QUESTIONS.items()]
    machine.put(f"{DIRECTORY}/prompts.json", json.dumps(prompts))
    command = ["vllm-edge", "quality", "reference", "--engine", VICTIM.name, "--format", "json"]
    done = machine.host.run(shlex.join([*command, "--tokens", "5", "--prompts", f"{DIRECTORY}/prompts.json"]))
    machine.run("rm", "-r", DIRECTORY)
    assert done.rc == 0, done.stderr
    found = json.loads(done.stdout)
    assert json.loads(machine.run("cat", found["path"]))["cases"] == found["cases"]
    assert PurePosixPath(found["path"]).name == f"{found['run']}.json"
    findings = [case["finding"] for case in found["cases"]]
    assert found["device"] == "cpu", found["lines"]
    assert len(findings) == len(QUESTIONS)
    assert set(findings) <= {"equal", "tie"}
    assert "equal" in findings


def test_the_suite_passes_fails_and_is_shown_in_the_status(machine: Machine, controller: Controller) -> None:
    """The model writes random words, so it is asked for any and for some that it does not know."""
    case = {"source": "own", "prompt": "Say a word.", "max_tokens": 8}
    easy, hard = {**case, "name": "a-word", "regex": "."}, {**case, "name": "that-word", "exact": "Constantinople"}
    options = {"quality_engines": VICTIM.name, "quality_repeats": 2, "quality_suite": [easy, hard]}
    play = controller.play("playbooks/quality.yml", f"--extra-vars={json.dumps(options)}")
    assert play.rc == 2 and "1 of 2 answers are not as expected" in " ".join(play.output.split()), play.output[-6000:]
    quality = json.loads(machine.run("vllm-edge", "status", "--format", "json"))["quality"]
    assert (quality["passed"], quality["failed"], quality["unsteady"]) == (1, 1, 0)
    record = json.loads((INVENTORY / "reports" / "quality" / INVENTORY_HOST / f"{quality['run']}.json").read_text())
    assert [(one["case"], one["verdict"]) for one in record["cases"]] == [("a-word", "passed"), ("that-word", "failed")]
    assert [len(one["repeats"]) for one in record["cases"]] == [2, 2]
