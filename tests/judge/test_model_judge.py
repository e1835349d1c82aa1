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
from collections.abc import Callable
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
    r"AttributeError: 'Qwen3(Moe)?LLMForCausalLM' object has no attribute 'start_layer'"
    r"|^0\.19\.\S+ (\S*Ministral|Qwen3\.5-4B, modelopt: AssertionError)"
    "|Quantization method mxfp8 is an override"
    r"|KeyError: .*indexer\.wk_weights_proj\.weight"
)
"""Errors of vLLM itself, which the plan refuses: Qwen3-VL in a pipeline, up to 0.21, DeepSeek V3.2 in one, from 0.20 to
0.22, MXFP8 in 0.24, and in 0.19 multi-token prediction in NVFP4. 0.19 knows Ministral 3 in Mistral's own format only;
with config.json it takes the classes of transformers, which the judge cannot load."""
WITHOUT_LORA = re.compile(r"no LoRA|fused_qkv_a_proj must be a BaseLayer|together with fully_sharded_loras=True")
"""What vLLM says where the plan refuses adapters (feasibility._check_lora)."""
TIED = "mistralai/Mistral-Small-3.1-24B-Instruct-2503"
"""Up to 0.28 vLLM takes its head for the table of embeddings where transformers 5 says so, and the plan is larger."""


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.rpartition("/")[2])
def judged(request: pytest.FixtureRequest) -> dict[str, Any]:
    questions = published.questions()
    answers: dict[str, Any] = ask("vllm_models.py", questions, request.param)
    for asked, told in zip(questions, answers["answers"], strict=True):
        told |= {key: value for key, value in asked.items() if key not in ("config", "headers", "drafter_config")}
    if os.environ.get("VLLM_EDGE_RECORD"):
        RECORD.write_text(published.render(answers))
    return answers


def test_vllm_loads_every_checkpoint(judged: dict[str, Any], record_property: Callable[[str, object], None]) -> None:
    failed = [
        (f"{judged['version']} {each['name']}: {each['error']}" if "error" in each else "", each)
        for each in judged["answers"]
        if each.get("not_loaded", 1)
    ]
    for error, each in failed:
        record_property("what vLLM does not load", [judged["version"], each["name"], error.partition(": ")[2]])
    assert [each for error, each in failed if not FAILS.search(error)] == []


def test_what_takes_no_adapters(judged: dict[str, Any]) -> None:
    said = [size for each in judged["answers"] for size in each.get("lora_bytes", ()) if not isinstance(size, int)]
    assert [error for error in said if not WITHOUT_LORA.search(error)] == []


def test_the_plan_is_exact(judged: dict[str, Any]) -> None:
    """Layers, bytes of parameters, RoPE caches and adapters, by the rules of the release that answers."""
    questions, wrong = published.questions(), {}
    for asked, told in zip(questions, judged["answers"], strict=True):
        if "error" not in told and (found := published.compare(asked, told, judged["version"])):
            wrong[tuple(asked.get(key) for key in published.KEYS)] = found
    tied = int(judged["version"].split(".")[1]) < 29
    assert {case: found for case, found in wrong.items() if not (tied and case[0] == TIED)} == {}


def test_the_recorded_answers_are_those_of_vllm(judged: dict[str, Any]) -> None:
    if f'"version": "{judged["version"]}"' in RECORD.read_text().partition("\n")[0]:
        assert RECORD.read_text() == published.render(judged)
