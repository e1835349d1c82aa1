# SPDX-License-Identifier: Apache-2.0
"""The generic plan of an unknown architecture: published checkpoints under another architecture's name are compared
with the exact plan of their own, which vLLM's model classes confirmed (test_published.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import checkpoints
import kv_models
import published
import pytest
from ansible.module_utils.vllm_edge.planning import planner
from ansible.module_utils.vllm_edge.planning.checkpoint import families
from ansible.module_utils.vllm_edge.planning.checkpoint.generic import LEAST_OF_WEIGHTS, MOST_OF_WEIGHTS
from ansible.module_utils.vllm_edge.planning.contract import (
    Arguments,
    EnginePlan,
    Facts,
    Gpu,
    Model,
    Tensor,
    UnknownArchitecture,
    Verdict,
)
from ansible.module_utils.vllm_edge.planning.memory import weights

RELEASE, GIB = "0.32.0", 2**30
QWEN = "Qwen/Qwen2.5-7B-Instruct"
REPOS = (
    "google/gemma-2-9b-it",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "microsoft/Phi-4-mini-instruct",
    "LGAI-EXAONE/EXAONE-4.0-32B",
    "Qwen/Qwen2.5-7B-Instruct-AWQ",
    "Qwen2.5-7B-Instruct, FP8 by channel",
    "google/gemma-3-27b-it",
    "google/gemma-4-31B-it",
    "nvidia/Gemma-4-31B-IT-NVFP4",
    "RedHatAI/gemma-4-26B-A4B-it-FP8-dynamic",
    "Qwen/Qwen3-30B-A3B",
)


def facts_of(repo: str) -> Facts:
    return published.facts(repo) if repo in published.CONFIGS else checkpoints.recorded(repo)


def rename(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, config={**facts.config, "architectures": ["NewForCausalLM"], **changes})


def generic(repo: str, **changes: Any) -> Model:
    return families.interpret(rename(facts_of(repo), **changes))


def plan(model: Model, gpu_gib: float, size: int = 1, **more: Any) -> EnginePlan:
    gpus = [Gpu("NVIDIA L4", int(gpu_gib * GIB))] * (size * more.get("pipeline_parallel_size", 1))
    engine = checkpoints.engine("m", size, max_num_seqs=16, **more)
    return planner.plan("p", [engine], {"m": model}, gpus, RELEASE).engines[0]


@pytest.mark.parametrize("repo", REPOS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weights_and_kv_cache_are_upper_bounds(repo: str, size: int) -> None:
    known, found = families.interpret(facts_of(repo)), generic(repo)
    arguments = Arguments(tensor_parallel_size=size)
    exact, bound = (weights.per_rank(each, arguments, RELEASE)[0].bytes for each in (known, found))
    assert 1.01 < bound * MOST_OF_WEIGHTS / exact < 1.11
    whole = weights.per_rank(found, Arguments(), RELEASE)[0].bytes
    assert exact * size / whole > 0.97 > LEAST_OF_WEIGHTS
    for tokens in (100, 2000, 32768):
        asked = replace(arguments, max_model_len=tokens)
        assert kv_models.needed(found, asked, RELEASE) >= kv_models.needed(known, asked, RELEASE)


def test_a_weight_that_no_rule_knows_is_on_every_gpu() -> None:
    facts = rename(facts_of(QWEN))
    strange = Tensor("model.layers.*.self_attn.indexer.weight", "BF16", (64, 64), (0, 1))
    found = families.interpret(replace(facts, tensors=(*facts.tensors, strange)))
    before, after = (
        weights.per_rank(each, Arguments(tensor_parallel_size=4), RELEASE)[0].bytes for each in (generic(QWEN), found)
    )
    assert after - before == 2 * 64 * 64 * 2


def test_layers_beyond_those_of_config_json_count() -> None:
    """Layers for speculative decoding."""
    facts = facts_of(QWEN)
    more = tuple(replace(tensor, layers=(*tensor.layers, 28)) if tensor.layers else tensor for tensor in facts.tensors)
    assert len(families.interpret(rename(replace(facts, tensors=more))).layers) == 29


@pytest.mark.parametrize(
    ("name", "shape", "changes", "why"),
    [
        ("model.layers.*.x.A_log", (64,), {}, "A_log belongs to state-space or linear attention"),
        ("model.layers.*.linear_attn.in_proj.weight", (64, 64), {}, "belongs to state-space or linear attention"),
        ("model.layers.*.encoder_attn.k_proj.weight", (64, 64), {}, "belongs to an encoder"),
        ("model.layers.*.self_attn.kv_b_proj.weight", (4096, 512), {}, r"belongs to latent attention \(MLA\)"),
        ("model.layers.*.self_attn.*.o_proj.weight", (64, 64), {}, "belongs to several attentions"),
        ("model.layers.*.attn.k_proj.weight", (4096, 3584), {}, r"k_proj\.weight has 3584 outputs, and .* says 512"),
        ("model.layers.*.norm.weight", (64,), {"vocab_size": None}, "config.json lacks vocab_size"),
    ],
)
def test_what_has_no_upper_bound_is_refused(
    name: str, shape: tuple[int, ...], changes: Mapping[str, Any], why: str
) -> None:
    facts = rename(facts_of(QWEN), **changes)
    with pytest.raises(UnknownArchitecture, match=f"^{QWEN} is a NewForCausalLM, which .* is not possible: .*{why}"):
        families.interpret(replace(facts, tensors=(*facts.tensors, Tensor(name, "BF16", shape, (0,)))))


WITHOUT = {"openai/gpt-oss-20b": "mxfp4", "google/gemma-4-E4B-it": "1024 outputs, and config.json says 512"}


@pytest.mark.parametrize("repo", WITHOUT)
def test_sizes_that_config_json_does_not_have_are_refused(repo: str) -> None:
    with pytest.raises(UnknownArchitecture, match=WITHOUT[repo]):
        generic(repo)


@pytest.mark.parametrize(
    ("gpu_gib", "size", "more", "verdict", "said"),
    [
        (22.0, 1, {}, Verdict.FITS, "MiB stay free"),
        (14.7, 1, {}, Verdict.CANNOT_SAY, "NewForCausalLM, and weights and KV .* it would be oom_weights"),
        (11.0, 1, {}, Verdict.OOM_WEIGHTS, "Weights need"),
        (15.4, 1, {}, Verdict.CANNOT_SAY, "With them it would be no_kv: "),
        (15.8, 1, {}, Verdict.CANNOT_SAY, "it would be kv_below_max_model_len: "),
        (22.0, 1, {"pipeline_parallel_size": 2}, Verdict.CANNOT_SAY, "each stage of its pipeline has is not known"),
        (22.0, 3, {}, Verdict.UNSUPPORTED_SHAPE, "is not divisible by tensor_parallel_size 3"),
        (22.0, 1, {"extra_args": ["--enable-lora"]}, Verdict.CANNOT_SAY, "The plan does not count .*enable-lora"),
    ],
)
def test_verdicts(gpu_gib: float, size: int, more: Mapping[str, Any], verdict: Verdict, said: str) -> None:
    found = plan(generic(QWEN), gpu_gib, size, **more)
    assert found.verdict is verdict
    assert re.search(said, found.reason)
    assert found.advice[0].startswith("this plan is approximate: generic, because the planner does not know NewForC")
    changes = [fix.change for fix in found.fixes]
    assert "kv_below" not in found.reason or (changes[0], changes[-1]) == ("max_num_seqs: 8", "max_model_len: 3072")


def test_encoders_are_bounded_for_text_only() -> None:
    found = generic("mistralai/Mistral-Small-3.1-24B-Instruct-2503")
    unsure = plan(found, 70.0)
    assert (unsure.verdict, unsure.fix) == (Verdict.CANNOT_SAY, "limit_mm_per_prompt of 0 for each")
    text_only = dict.fromkeys(("image", "video", "audio"), 0)
    assert plan(found, 70.0, limit_mm_per_prompt=text_only).verdict is Verdict.FITS


def test_inferred_facts_are_named_in_the_source() -> None:
    facts = replace(rename(facts_of(QWEN)), source="recorded: approximate: 15.2 GB by config.json")
    source = families.interpret(facts).facts.source
    assert source.startswith("approximate: generic, because the planner does not know NewForCausalLM")
    assert "(15.2 GB by config.json)" in source
