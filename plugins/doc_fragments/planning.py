# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: options of the modules that compute the memory of engines."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  models:
    description: Models by name, as in C(vllm_models).
    type: dict
    required: true
  gpus:
    description: The GPUs of the host, in the order of their slots. Each needs O(gpus[].cuda_total_bytes),
      O(gpus[].nvml_total_mib) or a O(gpus[].name) that the planner knows, all of whose cards have the same memory.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Name as NVML reports it, or a short one such as V(H100). The planner knows compute capability and
          bandwidth of the NVIDIA cards of the last years; of another one they can be given.
        type: str
      cuda_total_bytes:
        description: Memory that CUDA reports, in bytes, which is NVML's total minus the reserved memory.
        type: int
      nvml_total_mib:
        description: Total memory as nvidia-smi prints it, in MiB, if O(gpus[].cuda_total_bytes) is not set. Of a known
          GPU with this total the planner uses what CUDA reports.
        type: int
      nvml_reserved_mib:
        description: Memory that NVML reports as reserved, in MiB. The plan takes no more than the rest.
        type: int
      compute_capability:
        description: As C(nvidia-smi --query-gpu=compute_cap) prints it, such as V(8.9). Where it is not known and
          decides, the verdict is V(cannot_say).
        type: str
      bandwidth_gb_s:
        description: Bandwidth of the memory in GB/s, of the card's data sheet, for estimates of speed.
        type: float
      free_bytes:
        description: Memory that is free now, in bytes. If it is not set, the GPU is assumed to be empty.
        type: int
  vllm_version:
    description: Release of vLLM, for example V(0.32.0).
    type: str
    required: true
  weights_root:
    description: Directory that contains the directories of the models.
    type: path
    default: /data/vllm/weights
  facts:
    description: Where the facts about a checkpoint are read from, for models that have no C(facts) of their own.
    type: str
    choices:
      files: Files below O(weights_root). If they do not exist, the facts recorded for the repository.
      recorded: The facts recorded for the repository, even if the files exist.
    default: files
  recorded:
    description: Recorded facts of the inventory by repository, as C(plan_recorded_facts).
    type: dict
    default: {}
  observations:
    description: Measured values that replace the predicted ones, as C(plan_observations), by name of the engine
      C(weights_bytes), C(overhead_bytes), C(context_bytes) and C(graphs_bytes). M(edge.vllm_edge.serving_advise)
      applies them to engines with the same model and parallelism, the second and the last only if C(max_num_seqs) and
      C(max_num_batched_tokens) are the same, too.
    type: dict
    default: {}
  margin_mib:
    description: Memory that stays free on each GPU when the module derives C(kv_cache_memory_bytes), in MiB.
    type: int
    default: 512
  tolerance_mib:
    description: Amount by which a measurement may exceed the plan, in MiB. Budgets include it.
    type: int
    default: 300
"""
