# SPDX-License-Identifier: Apache-2.0
"""Parsers by model."""

from __future__ import annotations

import pytest
from ansible.module_utils.vllm_edge.inventory import vllm_arguments
from ansible.module_utils.vllm_edge.planning import parsers


@pytest.mark.parametrize(
    ("architecture", "repo", "found"),
    [
        ("Gemma4ForConditionalGeneration", "google/gemma-4-E2B-it", ("gemma4", "gemma4")),
        ("Qwen3MoeForCausalLM", "Qwen/Qwen3-30B-A3B", ("hermes", "qwen3")),
        ("Qwen3MoeForCausalLM", "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", ("hermes", "")),
        ("Qwen3MoeForCausalLM", "Qwen/Qwen3-Coder-30B-A3B-Instruct", ("qwen3_coder", "")),
        ("LlamaForCausalLM", "meta-llama/Llama-3.1-8B-Instruct", ("llama3_json", "")),
        ("LlamaForCausalLM", "NousResearch/Hermes-3-Llama-3.1-8B", ("", "")),
        ("DeepseekV3ForCausalLM", "deepseek-ai/DeepSeek-V3", ("", "")),
    ],
)
def test_parsers_of_a_checkpoint(architecture: str, repo: str, found: tuple[str, str]) -> None:
    assert tuple(parsers.find_parsers(architecture, repo).get(key, "") for key in parsers.KEYS) == found


def test_vllm_has_the_parsers() -> None:
    release = vllm_arguments.CHANGES["0.32.0"]
    pairs = [*parsers.PARSERS.values(), *parsers._BY_NAME.values()]
    for key, names in zip(("tool_call_parsers", "reasoning_parsers"), zip(*pairs, strict=True), strict=True):
        assert set(names) <= {"", *release[key].split()}
