# SPDX-License-Identifier: Apache-2.0
"""Recorded checkpoints, the GPU and engines of the reference host, and their plans."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ansible.module_utils.vllm_edge.planning import planner
from ansible.module_utils.vllm_edge.planning.checkpoint import families, model_facts
from ansible.module_utils.vllm_edge.planning.contract import EnginePlan, Facts, Gpu, Model, Plan

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


FUSENAI = "FusenAI/gemma-4-26B-A4B-it-NVFP4"
"""As its model card describes it: as NVIDIA's of the same model, with the dense MLPs in NVFP4 too."""


def recorded(repo: str) -> Facts:
    facts = model_facts.recorded(REPOS["26b-nvfp4"] if repo == FUSENAI else repo)
    assert facts is not None, repo
    if repo != FUSENAI:
        return facts
    tensors = []
    for tensor in facts.tensors:
        if ".mlp." in tensor.name:
            rows, columns = tensor.shape
            scale = replace(tensor, name=f"{tensor.name}_scale", dtype="F8_E4M3", shape=(rows, columns // 16))
            tensors += [replace(tensor, dtype="U8", shape=(rows, columns // 2)), scale]
        else:
            tensors.append(tensor)
    ignore = [name for name in facts.quantization["ignore"] if not name.endswith(".mlp*")]
    return replace(facts, repo=repo, tensors=tuple(tensors), quantization={**facts.quantization, "ignore": ignore})


@functools.cache
def model(name: str) -> Model:
    """The model of a repository, or of a key of REPOS."""
    return families.interpret(recorded(REPOS.get(name, name)))


def engine(name: str, tensor_parallel_size: int = 1, **more: Any) -> dict[str, Any]:
    ranks = tensor_parallel_size * more.get("pipeline_parallel_size", 1)
    return {
        "name": "engine",
        "model": name,
        "tensor_parallel_size": tensor_parallel_size,
        "gpus": list(range(ranks)),
        "max_model_len": 4096,
    } | more


def plan(*engines: Mapping[str, Any], version: str = REFERENCE, gpus: int = 4, **more: Any) -> Plan:
    models = {str(engine["model"]): model(engine["model"]) for engine in engines}
    return planner.plan("profile", engines, models, [L4] * gpus, version, **more)


def plan_of(wanted: Mapping[str, Any], version: str = REFERENCE, gpus: int = 4, **more: Any) -> EnginePlan:
    return plan(wanted, version=version, gpus=gpus, **more).engines[0]


BF16_TP4 = engine("31b-bf16", 4, gpu_memory_utilization=0.92, max_model_len=16384, max_num_seqs=8, enforce_eager=True)
NVFP4_TP2 = engine("31b-nvfp4", 2, gpu_memory_utilization=0.90)
