# SPDX-License-Identifier: Apache-2.0
"""An engine against plain transformers on the tiny model: equal, and named if the chat template is another one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from conftest import Machine

# Of these the tiny model, which rates all its tokens alike, answers the first five tokens without a tie.
QUESTIONS = {
    "count": "Count from 1 to 9, digits and commas only.",
    "balancer": "What does a load balancer do?",
    "capital": "What is the capital of France?",
}
DIRECTORY = "/root/reference"


@pytest.fixture
def engine(machine: Machine) -> Iterator[str]:
    """The engine of the smallest model, whatever profile is active."""
    status = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    (name,) = [one["engine"] for one in status["engines"] if "sentry" in one["served_names"]]
    prompts = [{"case": case, "messages": [{"role": "user", "content": text}]} for case, text in QUESTIONS.items()]
    machine.put(f"{DIRECTORY}/prompts.json", json.dumps(prompts))
    yield name
    machine.run("rm", "-r", DIRECTORY)


def compare(machine: Machine, engine: str, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the record."""
    command = ["vllm-edge", "quality", "reference", "--engine", engine, "--format", "json", *options]
    done = machine.host.run(shlex.join([*command, "--tokens", "5", "--prompts", f"{DIRECTORY}/prompts.json"]))
    assert done.rc in (0, 1), done.stderr
    found = json.loads(done.stdout)
    assert json.loads(machine.run("cat", found["path"]))["cases"] == found["cases"]
    assert PurePosixPath(found["path"]).name == f"{found['run']}.json"
    return done.rc, found


def test_the_engine_answers_as_transformers_does(machine: Machine, engine: str) -> None:
    rc, found = compare(machine, engine)
    findings = [case["finding"] for case in found["cases"]]
    assert (rc, found["device"]) == (0, "cpu"), found["lines"]
    assert len(findings) == len(QUESTIONS)
    assert set(findings) <= {"equal", "tie"}
    assert "equal" in findings


def test_another_chat_template_is_found_and_named(machine: Machine, engine: str) -> None:
    template = machine.run("cat", f"/etc/vllm-edge/engines/{engine}/chat-template.jinja")
    machine.put(f"{DIRECTORY}/other.jinja", template.replace("<|turn>", "<turn|>"))
    rc, found = compare(machine, engine, "--chat-template", f"{DIRECTORY}/other.jinja")
    assert rc == 1
    assert {case["finding"] for case in found["cases"]} == {"template"}
    assert "the engine has '<|turn>user" in found["cases"][0]["text"]
    assert "transformers has '<turn|>user" in found["cases"][0]["text"]
    assert "vllm-edge-reference" not in machine.run("docker", "ps", "--all", "--format", "{{.Names}}")
