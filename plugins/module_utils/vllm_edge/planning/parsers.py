# SPDX-License-Identifier: Apache-2.0
"""vLLM's parsers of tool calls and of reasoning by model, of vLLM's documents (features/tool_calling.md,
features/reasoning_outputs.md and the recipes). Models that need a chat template of vLLM's examples are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping

KEYS = ("tool_call_parser", "reasoning_parser")
PARSERS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration", "Gemma4ForCausalLM"),
        ("gemma4", "gemma4"),
    ),
    **dict.fromkeys(("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM"), ("hermes", "qwen3")),
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), ("hermes", "qwen3")),
    **dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"), ("qwen3_coder", "qwen3")),
    **dict.fromkeys(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), ("qwen3_coder", "qwen3")
    ),
    "Glm4MoeForCausalLM": ("glm45", "glm45"),
    "Glm4MoeLiteForCausalLM": ("glm47", "glm45"),
    "GptOssForCausalLM": ("openai", "openai_gptoss"),
    "MiniMaxM2ForCausalLM": ("minimax_m2", "minimax_m2_append_think"),
}
"""`tool_call_parser` and `reasoning_parser` by architecture, an empty one if there is none."""
_BY_NAME: Mapping[str, tuple[str, str]] = {
    r"Qwen3\w+ .*coder": ("qwen3_coder", ""),
    # It does not think, and with the parser all that it answers would be reasoning.
    r"Qwen3(Moe|Next|VL|VLMoe)?For\w+ .*-instruct": ("hermes", ""),
    r"Qwen2For\w+ qwen2\.5": ("hermes", ""),
    r"Glm4Moe\w+ glm-4\.7": ("glm47", "glm45"),
    r"DeepseekV3\w+ kimi-k2-instruct": ("kimi_k2", ""),
    r"Llama\w+ (meta-)?llama-3\.[1-3]-.*instruct": ("llama3_json", ""),
    r"(Mistral|Ministral3)\w+ (mistral-7b-instruct-v0\.3|(mistral-small|ministral|devstral)-)": ("mistral", ""),
    r"Granite\w+ granite-3\.[1-3]-": ("granite", ""),
    r"NemotronH\w+ .*nemotron-3-": ("qwen3_coder", "nemotron_v3"),
}
"""The same where checkpoints of one architecture differ: a pattern of the architecture and the repository's name."""


def find_parsers(architecture: str, repo: str) -> dict[str, str]:
    """Return those of `tool_call_parser` and `reasoning_parser` that a checkpoint is known to need."""
    said = f"{architecture} {repo.rpartition('/')[2].lower()}"
    named = (pair for pattern, pair in _BY_NAME.items() if re.match(pattern, said))
    pair = next(named, PARSERS.get(architecture, ("", "")))
    return {key: parser for key, parser in zip(KEYS, pair, strict=True) if parser}
