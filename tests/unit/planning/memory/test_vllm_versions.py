# SPDX-License-Identifier: Apache-2.0
"""What differs between releases of vLLM, and what follows for the batches of an engine."""

from __future__ import annotations

from dataclasses import fields, replace

import checkpoints
import pytest
from ansible.module_utils.vllm_edge.planning import planner, render
from ansible.module_utils.vllm_edge.planning.contract import Arguments, Plan
from ansible.module_utils.vllm_edge.planning.memory import vllm_versions as versions
from kv_models import full, model

DENSE = model([full(0, 8, 128)])
EXPERTS = replace(DENSE, experts=128)


@pytest.mark.parametrize(
    ("release", "graphs", "concurrency"),
    [("0.19.4", False, False), ("0.20.0", True, False), ("0.20.1", True, True), ("0.21", True, True)],
)
def test_behaviour(release: str, graphs: bool, concurrency: bool) -> None:
    found = versions.behaviour(release)
    assert (found.version, found.graphs_in_budget, found.tokens_by_concurrency) == (release, graphs, concurrency)
    for end in ("+cpu", "rc1", ".post1", ".dev3+gabc"):
        assert replace(versions.behaviour(release + end), version=release) == found, end


@pytest.mark.parametrize("version", ["0.18.1", "0.9.2", "latest", "", "0", "0.19.0-", "v0.19.0"])
def test_an_unknown_release_is_refused_with_what_is_known(version: str) -> None:
    with pytest.raises(versions.UnknownVersion, match=r"0\.19 to 0\.33"):
        versions.behaviour(version)


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "0.34.0rc1"])
def test_a_release_after_the_last_examined_is_planned_like_that_and_says_so(version: str) -> None:
    last = versions.behaviour("0.33.0")
    assert replace(versions.behaviour(version), version=last.version, number=last.number) == last
    told = versions.describe_fallback(version)
    assert f"how vLLM {version} uses memory" in told and "a plan for 0.33, the last release" in told
    assert told in " ".join(render.lines(Plan("any", version, (), {})))
    assert versions.describe_fallback("0.33.4") == versions.describe_fallback("0.19.0") == ""


def test_every_change_is_known_and_changes_something() -> None:
    names = {field.name for field in fields(versions.Behaviour)}
    assert [change.since for change in versions.CHANGES] == sorted(change.since for change in versions.CHANGES)
    for change in versions.CHANGES:
        assert versions.FIRST < change.since <= versions.LAST and set(change.sets) <= names and change.source
        *same, number = change.since
        before, after = (versions.behaviour(".".join(map(str, (*same, last)))) for last in (number - 1, number))
        assert all(getattr(before, name) != getattr(after, name) for name in change.sets)


SWITCHED = {"extra_env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}
PROMPT_EMBEDS = {"extra_args": ["--enable-prompt-embeds"]}


@pytest.mark.parametrize(
    ("architecture", "experts", "method", "engine", "first"),
    [
        pytest.param("Qwen3ForCausalLM", 0, "none", {}, "0.22.0", id="dense"),
        pytest.param("Qwen3ForCausalLM", 0, "awq", {}, "0.24.0", id="quantized"),
        pytest.param("LlamaForCausalLM", 0, "none", {}, "0.23.0", id="named a release later"),
        pytest.param("Gemma4ForConditionalGeneration", 0, "none", {}, "0.25.0", id="every dense one"),
        pytest.param("Qwen2MoeForCausalLM", 60, "none", {}, "0.24.0", id="experts that are named"),
        pytest.param("Qwen3MoeForCausalLM", 128, "none", {}, "0.29.0", id="experts"),
        pytest.param("Qwen3ForCausalLM", 0, "none", PROMPT_EMBEDS, "0.29.0", id="an option"),
        pytest.param("Qwen3ForCausalLM", 0, "none", SWITCHED, None, id="switched off"),
    ],
)
def test_the_second_runner_by_release_model_and_option(
    architecture: str, experts: int, method: str, engine: dict[str, object], first: str | None
) -> None:
    """`first` is the release from which on it takes the model. It estimates graphs since 0.29, the first since 0.20."""
    quantization = replace(DENSE.quantization, method=method)
    chosen = replace(DENSE, architecture=architecture, experts=experts, quantization=quantization)
    arguments = planner.arguments_of(engine)
    releases = [f"0.{minor}.0" for minor in range(19, 34)]
    taken = [release for release in releases if versions.uses_second_runner(chosen, arguments, release)]
    assert taken == (releases[releases.index(first) :] if first else [])
    outside = [release for release in releases if not versions.counts_graphs(chosen, arguments, release)]
    assert outside == ["0.19.0", *(release for release in taken if release < "0.29.0")]


@pytest.mark.parametrize(
    "release, pipeline, scheduling, dense, experts",
    [
        ("0.25.1", 1, None, 1, 1),
        ("0.26.0", 1, None, 2, 2),
        ("0.26.0", 1, False, 1, 1),
        ("0.28.0", 2, None, 3, 2),
        ("0.28.0", 2, False, 2, 2),
        ("0.29.0", 2, None, 3, 3),
        ("0.33.0", 4, False, 4, 4),
    ],
)
def test_batches_in_flight(release: str, pipeline: int, scheduling: bool | None, dense: int, experts: int) -> None:
    arguments = Arguments(pipeline_parallel_size=pipeline, async_scheduling=scheduling)
    assert versions.count_batches_in_flight(DENSE, arguments, release) == dense
    assert versions.count_batches_in_flight(EXPERTS, arguments, release) == experts


@pytest.mark.parametrize(
    "name, release, arguments, expected",
    [
        ("31b-bf16", "0.21.0", Arguments(), 2048),
        ("31b-bf16", "0.22.0", Arguments(), 2496),
        ("31b-bf16", "0.22.0", Arguments(language_model_only=True), 2496),
        ("31b-bf16", "0.27.0", Arguments(language_model_only=True), 2048),
        ("31b-bf16", "0.33.0", Arguments(max_num_batched_tokens=1024), 1024),
        ("31b-bf16", "0.33.0", Arguments(max_num_seqs=2, max_model_len=512), 1024),
        # Its images may be cut: only Gemma 4 from 26B on attends within images in both directions.
        ("e4b", "0.33.0", Arguments(), 2048),
    ],
)
def test_default_batched_tokens(name: str, release: str, arguments: Arguments, expected: int) -> None:
    assert versions.max_num_batched_tokens(checkpoints.model(name), arguments, release) == expected


def test_defaults_of_a_request() -> None:
    assert versions.max_num_seqs(DENSE, Arguments(max_num_batched_tokens=64), "0.33.0") == 64
    assert versions.max_model_len(DENSE, Arguments()) == 131072
    assert versions.max_model_len(DENSE, Arguments(max_model_len=4096)) == 4096
