# SPDX-License-Identifier: Apache-2.0
"""Contradictions in profiles, engines and models are named with variable, value and way out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.serving import contradictions

SOUND: dict[str, Any] = {
    "profile": "pair",
    "profiles": {"pair": {"engines": ["large", "small"]}},
    "engines": {
        "large": {
            "model": "big",
            "tensor_parallel_size": 2,
            "gpus": [0, 1],
            "port": 8050,
            "served_names": ["architect"],
        },
        "small": {
            "model": "tiny",
            "tensor_parallel_size": 1,
            "gpus": [2],
            "port": 8060,
            "served_names": ["sentry"],
        },
    },
    "models": {"big": {}, "tiny": {}},
    "roles": ["architect", "sentry"],
}


def test_sound_variables_have_no_contradiction() -> None:
    assert contradictions(**SOUND) == []


def small(**values: Any) -> Callable[[dict[str, Any]], None]:
    """A change of the engine `small`."""
    return lambda variables: variables["engines"]["small"].update(values)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: v.update(profile="piar"), ["serving_profile: 'piar'", "did you mean pair?"]),
        (lambda v: v["profiles"]["pair"]["engines"].append("smal"), ["'smal' is not a key", "did you mean small"]),
        (small(model="tniy"), ["serving_engines.small.model: 'tniy'", "did you mean tiny?"]),
        (small(model="zzz"), ["there are: big, tiny."]),
        (small(gpus=[2, 3]), ["are 2 GPUs", "is 1"]),
        (small(gpus=[1]), ["gpus 1 is wanted by large and small"]),
        (small(port=8050), ["port 8050 is wanted by large and small"]),
        (small(port=80), ["serving_engines.small.port: 80", "1024"]),
        (small(served_names=["guard"]), ["role 'sentry'", "nobody"]),
        (small(served_names=["sentry", "architect"]), ["role 'architect'", "2 engines"]),
        (small(tensor_parallel_size=2, gpus=[2, 2]), ["gpus 2 is wanted by small and small"]),
        (small(pipeline_parallel_size=2), ["is 2"]),
    ],
)
def test_contradiction_is_named(change: Callable[[dict[str, Any]], None], expected: list[str]) -> None:
    variables = copy.deepcopy(SOUND)
    change(variables)
    text = " ".join(contradictions(**variables))
    for words in expected:
        assert words in text
