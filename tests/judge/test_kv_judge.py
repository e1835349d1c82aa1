# SPDX-License-Identifier: Apache-2.0
"""Our arithmetic of the KV cache against vLLM's own code, block for block: in the lab's image, or as asked.py says."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.vllm_edge.planning.memory import vllm_versions
from asked import SOURCES, ask
from kv_configurations import Configuration, configurations, differences

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

FLOAT_SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
# quantization_config of a checkpoint, and what `kv_cache_dtype: auto` becomes with it; `auto` is the model's own dtype.
CHECKPOINTS = (
    ({"quant_method": "modelopt", "kv_cache_scheme": FLOAT_SCHEME}, "fp8"),
    ({"quant_method": "modelopt_fp4", "quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT_SCHEME, "num_bits": 4}}, "nvfp4"),
    ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
    ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, "auto"),
    ({"quant_method": "modelopt", "kv_cache_scheme": {**FLOAT_SCHEME, "dynamic": True}}, "auto"),
    ({"quant_method": "modelopt"}, "auto"),
)


@pytest.fixture(scope="module")
def asked() -> tuple[Configuration, ...]:
    return configurations()


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.rpartition("/")[2])
def judged(asked: tuple[Configuration, ...], request: pytest.FixtureRequest) -> dict[str, Any]:
    """vLLM's answers to all questions, from one container."""
    questions = [each.as_json() for each in asked] + [{"quantization_config": found} for found, _ in CHECKPOINTS]
    answers: dict[str, Any] = ask("vllm_kv.py", questions, request.param)
    return answers


@pytest.fixture
def has_every_rule(judged: dict[str, Any]) -> None:
    """Skips releases that lack a message which the test counts."""
    if (release := vllm_versions.VERSION.match(judged["version"])) and int(release[2]) < 32:
        pytest.skip(f"{judged['version']} does not have every rule")


def test_every_configuration_is_as_vllm_computes_it(asked: tuple[Configuration, ...], judged: dict[str, Any]) -> None:
    answers = judged["answers"][: len(asked)]
    found = [(each, differences(each, told, judged["version"])) for each, told in zip(asked, answers, strict=True)]
    wrong = [(each.family, each.arguments, each.available_bytes, what) for each, what in found if what]
    assert not wrong, (len(wrong), wrong[:3])


@pytest.mark.usefixtures("has_every_rule")
def test_the_configurations_reach_every_verdict(asked: tuple[Configuration, ...], judged: dict[str, Any]) -> None:
    answers = judged["answers"][: len(asked)]
    refusals = [check["refusal"] for told in answers for check in told.get("checks", ())]
    assert len(asked) >= 500 and len({each.family for each in asked}) == 17
    assert sum("No available memory" in refusal for refusal in refusals) > 10
    assert sum("estimated maximum model length" in refusal for refusal in refusals) > 50
    assert sum(not refusal for refusal in refusals) > 100
    assert any("error" in told for told in answers)
    assert any(len(told.get("groups", ())) == 2 for told in answers)


def test_auto_is_resolved_as_vllm_does(asked: tuple[Configuration, ...], judged: dict[str, Any]) -> None:
    told = [answer["kv_cache_dtype"].removesuffix("_e4m3") for answer in judged["answers"][len(asked) :]]
    without = {} if vllm_versions.behaviour(judged["version"]).nvfp4_kv_cache else {"nvfp4": "auto"}
    assert told == [without.get(expected, expected) for _, expected in CHECKPOINTS]
