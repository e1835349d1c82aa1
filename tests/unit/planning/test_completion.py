# SPDX-License-Identifier: Apache-2.0
"""What an engine gets that leaves its GPUs and its context to the plan."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gpu.models import L4, L4_CUDA_MIB
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.completion import complete, describe
from ansible.module_utils.vllm_edge.planning.contract import Gpu, Model

ONE = Gpu(L4, int(L4_CUDA_MIB * 2**20))
E2B, WHOLE, EXPERTS = "google/gemma-4-E2B-it", "google/gemma-4-31B-it", "nvidia/Gemma-4-26B-A4B-NVFP4"
PARSERS = {"tool_call_parser": "gemma4", "reasoning_parser": "gemma4"}


def read(repo: str) -> Model:
    facts = model_facts.recorded(repo)
    assert facts is not None
    return families.interpret(facts)


def sized(size: int, context: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": size, "gpus": [*range(size)], "max_model_len": context, **PARSERS, **more}


@pytest.mark.parametrize(
    ("repo", "count", "margins", "engine", "added"),
    [
        (E2B, 1, [512], {}, sized(1, 131072)),
        (WHOLE, 4, [512], {}, sized(4, 79872)),
        (E2B, 1, [20000, 512], {}, sized(1, 131072)),
        (WHOLE, 1, [512], {}, sized(1, 8192)),
        # On one GPU less than 8,192 tokens fit; on two all.
        (EXPERTS, 1, [2000], {}, sized(1, 2048)),
        (EXPERTS, 2, [2000], {}, sized(2, 262144)),
        (E2B, 4, [512], {"replicas": 2}, sized(1, 131072, gpus=[0, 1])),
        (
            *(E2B, 4, [512]),
            {"gpus": [2, 3], "max_model_len": 4096, "tool_call_parser": "own"},
            {"tensor_parallel_size": 2, "reasoning_parser": "gemma4"},
        ),
    ],
)
def test_what_is_added(repo: str, count: int, margins: list[int], engine: Any, added: Any) -> None:
    assert complete({"model": "m", **engine}, read(repo), [ONE] * count, "0.32.0", margins) == added


def test_sizes_beyond_the_gpus_are_refused_and_what_was_added_is_told() -> None:
    with pytest.raises(ValueError, match="needs more GPUs"):
        complete({"tensor_parallel_size": 4}, read(E2B), [ONE], "0.32.0", [512])
    said = "chat: tensor_parallel_size 1, gpus [0], max_model_len 8: the plan's; tool_call_parser gemma4, "
    assert describe("chat", sized(1, 8)) == said + "reasoning_parser gemma4: of the family of its model."
