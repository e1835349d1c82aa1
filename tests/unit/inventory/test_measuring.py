# SPDX-License-Identifier: Apache-2.0
"""Variables of the benchmark and of the quality suite, as `-e` passes them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge import cli
from ansible.module_utils.vllm_edge.inventory import measuring
from ansible.module_utils.vllm_edge.inventory.variables import load
from helpers import ROOT

DEFAULTS = yaml.safe_load((ROOT / "group_vars/all/switches.yml").read_text())
SPECS = load(ROOT).variables
ENGINES, ACTIVE, MODELS = ["31b", "e2b", "e4b"], {"31b": "31b-nvfp4", "e2b": "e2b"}, ["31b-nvfp4", "31b-bf16", "e2b"]


def read(**changed: Any) -> dict[str, Any]:
    given = {name: DEFAULTS.get(name, "") for name in measuring.NAMES} | {"bench_cases": "protocol,sweep"}
    return measuring.read_variables(given | changed, SPECS)


def find(play: str, **changed: Any) -> list[str]:
    return [*measuring.FINDERS[play](read(**changed), ENGINES, ACTIVE, MODELS)]


def test_defaults_and_texts_are_taken() -> None:
    assert find("bench") == [] and find("quality") == []
    assert find("bench", bench_engines="e2b, 31b", bench_soak_minutes="0.5", bench_limit_minutes="2") == []
    assert find("quality", quality_reference="e2b", quality_compare="a,b", quality_engines="e2b") == []
    # Another precision of the same model has no engine of its own.
    assert find("quality", quality_reference="31b-bf16", quality_reference_engine="31b") == []


def test_options_are_those_of_the_program() -> None:
    given = read(bench_engines="e2b, 31b", bench_soak_minutes="0.5", bench_allow_load="yes", quality_compare=["a", "b"])
    bench = cli.build_parser().parse_args(["bench", *measuring.write_options("bench", given)])
    assert (bench.engine, bench.case, bench.soak_minutes) == (["e2b", "31b"], ["protocol", "sweep"], 0.5)
    assert (bench.allow_load, bench.output_tokens, bench.limit_minutes) == (True, (128, 256, 512), 60)
    assert "--allow-load" not in measuring.write_options("bench", read(bench_allow_load="no"))
    quality = cli.build_parser().parse_args(["quality", *measuring.write_options("compare", given)])
    assert quality.compare == ["a", "b"]
    words = ["quality", "reference", *measuring.write_options("reference", given)]
    assert cli.build_parser().parse_args(words).timeout == 600
    assert cli.build_parser().parse_args(["quality", *measuring.write_options("quality", given)]).repeats == 3


@pytest.mark.parametrize(
    ("play", "changed", "words"),
    [
        ("bench", {"bench_limit_minutes": "60", "bench_soak_minutes": 30}, "(30 for each of 2), such as 120."),
        ("bench", {"bench_reference": [{"engine": "e2b", "output_tokens": 1}]}, "each row has engine, output_tokens"),
        ("bench", {"bench_reference": "none"}, 'bench_reference: ["none"]; each row'),
        (
            "quality",
            {"quality_engines": "e3"},
            "quality_engines: 'e3' is no engine of the inventory; there are: 31b, e2b, e4b.",
        ),
        ("quality", {"quality_compare": ["one"]}, "such as nvfp4-tp2,bf16-tp4."),
        ("quality", {"quality_reference": "31b-bf16"}, "serves 31b-bf16 itself, so name the one to compare: -e qua"),
        ("quality", {"quality_reference_engine": "e4b"}, "'e4b'; no active engine has this name"),
        ("quality", {"quality_reference_chat_template": "/none.jinja"}, "this machine has no such file"),
        ("quality", {"quality_reference": "e3b", "quality_reference_engine": "e2b"}, "'e3b'; the models of vllm_mod"),
    ],
)
def test_what_cannot_be_used_is_named(play: str, changed: dict[str, Any], words: str) -> None:
    (sentence,) = find(play, **({"quality_reference": "e2b"} if play == "quality" else {}) | changed)
    assert words in sentence
