# SPDX-License-Identifier: Apache-2.0
"""Recorded checkpoints, the GPU of the reference host, and releases of vLLM."""

from __future__ import annotations

import functools

from ansible.module_utils.vllm_edge.planning import families, model_facts
from ansible.module_utils.vllm_edge.planning.contract import Facts, Gpu, Model

MIB, GIB = 2**20, 2**30
L4 = Gpu("NVIDIA L4", 23_659_151_360)
REFERENCE, DEFAULT = "0.19.0", "0.32.0"
REPOS = {
    "31b-bf16": "google/gemma-4-31B-it",
    "31b-w4a16": "google/gemma-4-31B-it-qat-w4a16-ct",
    "31b-fp8": "RedHatAI/gemma-4-31B-it-FP8-dynamic",
    "31b-nvfp4": "nvidia/Gemma-4-31B-IT-NVFP4",
    "26b-bf16": "google/gemma-4-26B-A4B-it",
    "26b-nvfp4": "nvidia/Gemma-4-26B-A4B-NVFP4",
    "e4b": "google/gemma-4-E4B-it",
    "e2b": "google/gemma-4-E2B-it",
}


def recorded(repo: str) -> Facts:
    facts = model_facts.recorded(repo)
    assert facts is not None, repo
    return facts


@functools.cache
def model(name: str) -> Model:
    """The model of a repository, or of a key of REPOS."""
    return families.interpret(recorded(REPOS.get(name, name)))
