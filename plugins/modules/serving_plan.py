# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a profile will take from each GPU, before anything starts."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_plan
short_description: Predict what the engines of a profile will take from each GPU
description:
  - Says for every engine whether it will start, why not and what would do, what it takes of each of its GPUs, how long
    a request may be and how fast one is answered.
  - Computes from config.json and the headers of safetensors files, from the arguments of the engines and from what the
    release of vLLM makes of them. Needs no host, no GPU and no network, and changes nothing.
  - A verdict other than V(fits) is a result and no failure of the module.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
options:
  profile:
    description: The profile. Exactly one of this and O(profiles) is given.
    type: dict
    options:
      name:
        description: Name of the profile.
        type: str
        default: ""
      engines:
        description: Its engines as in C(serving_engines), each with its C(name), in the order in which they start.
        type: list
        elements: dict
        required: true
  profiles:
    description: Several profiles by name, each a mapping with C(engines) as in O(profile). See RV(plans).
    type: dict
  models:
    description:
      - Models by name, as C(vllm_models), with C(repo), C(dir), C(revision) and C(facts).
      - With C(facts=files) the files below O(weights_root) are read where they are there, else what is recorded of the
        repository. With C(facts=recorded) the latter at once.
    type: dict
    required: true
  gpus:
    description: The GPUs in the order of their slots.
    type: list
    elements: dict
    required: true
    options:
      name:
        description: Name as NVML has it. What is not known of a GPU of that name is not claimed.
        type: str
      cuda_total_bytes:
        description: What CUDA has of its memory; NVML's total minus reserved.
        type: int
      nvml_total_mib:
        description: Total as nvidia-smi prints it, for a GPU of which CUDA's total is known.
        type: int
      nvml_reserved_mib:
        description: What NVML calls reserved, which is not in CUDA's total where that is not known.
        type: int
      free_bytes:
        description: What is free now. Without it the GPU counts as empty.
        type: int
  vllm_version:
    description: Release of vLLM, such as C(0.32.0).
    type: str
    required: true
  weights_root:
    description: Directory with the directories of the models.
    type: path
    default: /data/vllm/weights
  facts:
    description: What holds for models that have no C(facts) of their own.
    type: str
    choices: [files, recorded]
    default: files
  observations:
    description: >-
      What was measured of an engine, in place of what is predicted, as a mapping of C(weights_bytes),
      C(overhead_bytes), C(context_bytes) and C(graphs_bytes) by name of the engine.
    type: dict
    default: {}
  margin_mib:
    description: MiB that RV(engines[].derived_kv_cache_memory_bytes) leaves free on each GPU.
    type: int
    default: 512
  tolerance_mib:
    description: MiB by which a measurement may be above the plan, part of RV(budgets_mib).
    type: int
    default: 300
  drift_tolerances:
    description: >-
      How far a component may be from the plan, C(weights_mib), C(graphs_mib), C(kv_cache_mib), C(kv_cache_tokens),
      C(kv_blocks) and C(total_mib), over the defaults.
    type: dict
    default: {}
  on_drift:
    description: What becomes of a component that is farther from the plan.
    type: str
    choices: [ignore, warn, fail]
    default: warn
"""

EXAMPLES = r"""
- name: Plan one profile for four NVIDIA L4
  serving_plan:
    profile:
      name: bf16-tp4
      engines:
        - name: 31b-bf16-tp4
          model: 31b-bf16
          tensor_parallel_size: 4
          gpus: [0, 1, 2, 3]
          max_model_len: 16384
          max_num_seqs: 8
          gpu_memory_utilization: 0.92
          enforce_eager: true
    models: "{{ vllm_models }}"
    gpus: "{{ [{'name': 'NVIDIA L4', 'cuda_total_bytes': 23659151360}] * 4 }}"
    vllm_version: 0.32.0
  register: plan
  delegate_to: localhost

- name: Show it
  show:
    lines: "{{ plan.lines }}"
"""

RETURN = r"""
verdict:
  description: That of the first engine that will not start, else V(fits).
  type: str
  returned: with O(profile)
  sample: fits
engines:
  description: The engines in the order in which they were given.
  type: list
  elements: dict
  returned: with O(profile)
  contains:
    engine:
      description: Name of the engine.
      type: str
    verdict:
      description: >-
        V(fits), V(oom_weights), V(no_kv), V(kv_below_max_model_len), V(not_free), V(oom_warmup), V(unsupported_shape)
        or V(unsupported_engine).
      type: str
    reason:
      description: One sentence with the number that decides.
      type: str
    fix:
      description: The nearest setting with which it fits, spelled as in C(serving_engines); empty where there is none.
      type: str
    kv_cache_dtype:
      description: What the KV cache is made of.
      type: str
    kv_blocks:
      description: Blocks of the KV cache.
      type: int
    kv_cache_tokens:
      description: Tokens as vLLM prints them, C(GPU KV cache size).
      type: int
    max_concurrency:
      description: Requests of max_model_len tokens that the KV cache holds.
      type: float
    max_context:
      description: Tokens of the longest request that the KV cache holds, at most the model's own maximum.
      type: int
    decode_tok_s:
      description: >-
        Estimate of the tokens per second of one sequence at short context, C(low), C(mid), C(high), and the C(ceiling)
        that memory bandwidth sets. V(null) for a GPU whose bandwidth is not known.
      type: dict
    gpus:
      description: What the engine takes of each of its GPUs.
      type: list
      elements: dict
      contains:
        slot:
          description: Slot of the GPU.
          type: int
        weights_bytes:
          description: Weights, as vLLM logs them.
          type: int
        overhead_bytes:
          description: Activations at their peak and growth outside of PyTorch.
          type: int
        context_bytes:
          description: CUDA context and NCCL.
          type: int
        graphs_bytes:
          description: CUDA graphs.
          type: int
        kv_cache_bytes:
          description: KV cache.
          type: int
        warm_up_bytes:
          description: What the sampler's warm-up needs, part of C(overhead_bytes).
          type: int
        total_bytes:
          description: What NVML will show.
          type: int
        free_bytes:
          description: What stays free; negative where it does not fit.
          type: int
    advice:
      description: What is right and could be better, each with its reference.
      type: list
      elements: str
    facts_source:
      description: Where the facts of the checkpoint are from.
      type: str
    derived_kv_cache_memory_bytes:
      description: C(kv_cache_memory_bytes) that leaves O(margin_mib) free on each GPU, or would.
      type: int
    settings:
      description: >-
        What the plan adds to the engine, under the keys of C(serving_engines). C(kv_cache_memory_bytes) and
        C(gpu_memory_utilization) for an engine that sets neither, where the latter is the share that has to be free for
        the plan; C(vram_budget_mib) where it states none; and C(plan), which is what measurements are held against.
      type: dict
    observed:
      description: Figures that are the operator's own.
      type: list
      elements: str
budgets_mib:
  description: By slot, what the engines may use; 0 for a GPU without an engine.
  type: dict
  returned: with O(profile)
lines:
  description: The plan for people, at most 100 columns.
  type: list
  elements: str
  returned: with O(profile)
refusals:
  description: One line for each engine that will not start.
  type: list
  elements: str
  returned: with O(profile)
plans:
  description: >-
    All of the above by name of the profile. Of one that cannot be planned, C(verdict) is V(null) and C(refusals) says
    why.
  type: dict
  returned: with O(profiles)
legend:
  description: What the letters in RV(lines) mean.
  type: list
  elements: str
  returned: success
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.planning import drift, inputs, planner, render
from ..module_utils.vllm_edge.planning.contract import Model, Plan


def described(plan: Plan, tolerances: Mapping[str, float], on_drift: drift.OnDrift) -> dict[str, Any]:
    """What the module says of one profile."""
    document = render.document(plan)
    for engine, row in zip(plan.engines, document["engines"], strict=True):
        row["settings"]["plan"] = drift.expectation(engine, plan.vllm_version, tolerances, on_drift)
    return document | {"lines": render.lines(plan), "refusals": render.refusals(plan)}


def unplanned(name: str, version: str, error: str) -> dict[str, Any]:
    """What it says of one among several that cannot be planned, with the keys of the others."""
    head = f"profile {name}, vLLM {version}: cannot be planned"
    return {
        "profile": name,
        "vllm_version": version,
        "verdict": None,
        "engines": [],
        "budgets_mib": {},
        "lines": [head, "", *textwrap.wrap(error, render.WIDTH, break_on_hyphens=False)],
        "refusals": [error],
    }


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "profile": {
                "type": "dict",
                "options": {
                    "name": {"type": "str", "default": ""},
                    "engines": {"type": "list", "elements": "dict", "required": True},
                },
            },
            "profiles": {"type": "dict"},
            "models": {"type": "dict", "required": True},
            "gpus": inputs.GPUS_SPEC,
            "vllm_version": {"type": "str", "required": True},
            "weights_root": {"type": "path", "default": "/data/vllm/weights"},
            "facts": inputs.FACTS_SPEC,
            "observations": {"type": "dict", "default": {}},
            "margin_mib": {"type": "int", "default": planner.MARGIN_MIB},
            "tolerance_mib": {"type": "int", "default": planner.TOLERANCE_MIB},
            "drift_tolerances": {"type": "dict", "default": {}},
            "on_drift": {"type": "str", "choices": list(drift.ON_DRIFT), "default": "warn"},
        },
        mutually_exclusive=[("profile", "profiles")],
        required_one_of=[("profile", "profiles")],
        supports_check_mode=True,
    )
    options = module.params
    root, version = Path(options["weights_root"]), options["vllm_version"]
    models: dict[str, Model] = {}

    def planned(name: str, engines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        for model in dict.fromkeys(str(engine.get("model")) for engine in engines):
            if model in options["models"] and model not in models:
                models[model] = inputs.model_of(model, options["models"][model], root, options["facts"])
        plan = planner.plan(
            name,
            engines,
            models,
            gpus,
            version,
            observations=options["observations"],
            margin_mib=options["margin_mib"],
            tolerance_mib=options["tolerance_mib"],
        )
        return described(plan, tolerances, options["on_drift"])

    # Whatever is wrong is a ValueError whose message says what, and what would do.
    try:
        tolerances = drift.tolerances(options["drift_tolerances"], options["tolerance_mib"])
        gpus = [inputs.gpu_of(slot, given, module.warn) for slot, given in enumerate(options["gpus"])]
        if options["profile"]:
            answer = planned(options["profile"]["name"], options["profile"]["engines"])
    except ValueError as error:
        module.fail_json(msg=str(error))
    if options["profiles"]:
        answer = {"plans": {}}
        for name, profile in options["profiles"].items():
            try:
                answer["plans"][name] = planned(name, profile.get("engines") or [])
            except ValueError as error:
                answer["plans"][name] = unplanned(name, version, str(error))
    module.exit_json(changed=False, legend=render.legend(), **answer)


if __name__ == "__main__":
    main()
