# SPDX-License-Identifier: Apache-2.0
"""Ansible module: which profiles are feasible on a host, and one of them to paste into group_vars."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_advise
short_description: Find the profiles that are feasible on a host, and rank them
description:
  - Plans a main engine of the largest of the models over every number of GPUs, with every dtype of the KV cache and
    several lengths of a request, and smaller models on the GPUs that it leaves. What starts is ranked.
  - Writes the chosen one as entries of C(serving_engines) and C(serving_profiles).
  - Computes as M(serving_plan) does. Needs no host, no GPU and no network, and changes nothing.
  - Two engines on one GPU are not considered.
author: vllm-edge
attributes:
  check_mode:
    description: Changes nothing, so check mode is the same.
    support: full
options:
  models:
    description: Models by name, as C(vllm_models), with C(repo), C(dir), C(revision) and C(facts).
    type: dict
    required: true
  gpus:
    description: The GPUs in the order of their slots.
    type: list
    elements: dict
    required: true
    options:
      name:
        description: Name as NVML has it. Speed is estimated of those that are known by it.
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
  roles:
    description: >-
      Names that the profile serves, as C(serving_roles). Where engines are beside the main one, it has the first two.
    type: list
    elements: str
    required: true
  engines:
    description: >-
      C(serving_engines) of the inventory. Names, ports, chat templates and parsers follow from those, and an engine
      that is the same keeps its name.
    type: dict
    default: {}
  profiles:
    description: C(serving_profiles) of the inventory, whose names are taken.
    type: dict
    default: {}
  by:
    description: >-
      What is ranked by, C(advise_by). V(tok_s) is the estimate for the main engine, V(context) its tokens,
      V(free_gpus) the GPUs without an engine. Where it is equal: the other of them, requests at once, the KV cache as
      the checkpoint has it.
    type: raw
    default: tok_s
  choose:
    description: Rank of the profile that is written, C(advise_choose).
    type: raw
    default: 1
  only:
    description: Names of the models to choose from, C(advise_models); empty for all.
    type: list
    elements: str
    default: []
  min_context:
    description: Tokens that a request to any engine may have at least, C(advise_min_context).
    type: raw
    default: 8192
  main:
    description: >-
      Model of the main engine, C(advise_main). Without it every precision of the largest model that fits.
    type: str
  weights_root:
    description: Directory with the directories of the models.
    type: path
    default: /data/vllm/weights
  facts:
    description: What holds for models that have no C(facts) of their own, as in M(serving_plan).
    type: str
    choices: [files, recorded]
    default: files
  observations:
    description: >-
      What was measured, as C(plan_observations). It counts for an engine with the same model and parallelism; of
      activations and graphs also with the same batch.
    type: dict
    default: {}
  margin_mib:
    description: MiB that stay free on each GPU.
    type: int
    default: 512
  tolerance_mib:
    description: MiB by which a measurement may be above the plan.
    type: int
    default: 300
"""

EXAMPLES = r"""
- name: Find the fastest profile for four NVIDIA L4
  serving_advise:
    models: "{{ vllm_models }}"
    gpus: "{{ [{'nvml_total_mib': 23034}] * 4 }}"
    vllm_version: 0.32.0
    roles: "{{ serving_roles }}"
    engines: "{{ serving_engines }}"
    profiles: "{{ serving_profiles }}"
  register: advice
  delegate_to: localhost

- name: Show it
  show:
    lines: "{{ advice.lines }}"
"""

RETURN = r"""
advice:
  description: All of it.
  type: dict
  returned: success
  contains:
    by:
      description: What is ranked by.
      type: str
    min_context:
      description: Tokens that every engine takes at least.
      type: int
    main_models:
      description: Models that the main engine may have.
      type: list
      elements: str
    profiles:
      description: Every feasible profile, the best first.
      type: list
      elements: dict
      contains:
        rank:
          description: What O(choose) takes.
          type: int
        engines:
          description: >-
            Its engines, the main one first, each with C(model), C(tensor_parallel_size), C(pipeline_parallel_size),
            C(kv_cache_dtype), C(max_model_len), C(max_concurrency), C(served_names) and C(tok_s_estimate).
          type: list
          elements: dict
        gpus_used:
          description: GPUs with an engine.
          type: int
        gpus_free:
          description: GPUs without one.
          type: int
        tok_s_estimate:
          description: >-
            Estimate of the main engine's tokens per second, C(low), C(mid), C(high) and C(ceiling), as M(serving_plan)
            has it.
          type: dict
        context:
          description: Tokens that a request to the main engine may have.
          type: int
        max_concurrency:
          description: Requests of that length that its KV cache holds.
          type: float
        verdict:
          description: V(fits).
          type: str
        advice:
          description: What could be better, or is advised against.
          type: list
          elements: str
    rejected:
      description: >-
        Why other engines do not start, with C(model), C(verdict), C(shapes) and C(reason), one for each model and
        verdict.
      type: list
      elements: dict
    chosen:
      description: >-
        The profile of rank O(choose), with C(profile), C(serving_engines), C(serving_profiles), C(advice) by engine,
        and C(plan) as M(serving_plan) has it.
      type: dict
lines:
  description: The advice for people, at most 100 columns.
  type: list
  elements: str
  returned: success
pasted:
  description: The chosen profile in YAML, which is also a file for C(-e @FILE).
  type: list
  elements: str
  returned: success
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.planning import inputs, planner
from ..module_utils.vllm_edge.planning.advice import model, render, search
from ..module_utils.vllm_edge.planning.advice import model as planning_advice_model
from ..module_utils.vllm_edge.planning.contract import Model


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "models": {"type": "dict", "required": True},
            "gpus": inputs.GPUS_SPEC,
            "vllm_version": {"type": "str", "required": True},
            "roles": {"type": "list", "elements": "str", "required": True},
            "engines": {"type": "dict", "default": {}},
            "profiles": {"type": "dict", "default": {}},
            "by": {"type": "raw", "default": model.By.TOK_S.value},
            "choose": {"type": "raw", "default": 1},
            "only": {"type": "list", "elements": "str", "default": []},
            "min_context": {"type": "raw", "default": planning_advice_model.MIN_CONTEXT_TOKENS},
            "main": {"type": "str"},
            "weights_root": {"type": "path", "default": "/data/vllm/weights"},
            "facts": inputs.FACTS_SPEC,
            "observations": {"type": "dict", "default": {}},
            "margin_mib": {"type": "int", "default": planner.MARGIN_MIB},
            "tolerance_mib": {"type": "int", "default": planner.TOLERANCE_MIB},
        },
        supports_check_mode=True,
    )
    options = module.params
    models: dict[str, Model] = {}
    unreadable: dict[str, str] = {}
    # Whatever is wrong is a ValueError whose message says what, and what would do.
    try:
        asked = search.wish(
            options["models"],
            by=options["by"],
            choose=options["choose"],
            min_context=options["min_context"],
            models=options["only"],
            main=options["main"],
        )
        gpus = [inputs.gpu_of(slot, given, module.warn) for slot, given in enumerate(options["gpus"])]
        for name in asked.models or options["models"]:
            try:
                root = Path(options["weights_root"])
                models[name] = inputs.model_of(name, options["models"][name], root, options["facts"])
            except ValueError as error:
                unreadable[name] = str(error)
        host = model.Host(
            models,
            gpus,
            options["vllm_version"],
            options["roles"],
            options["engines"],
            options["profiles"],
            options["observations"],
            options["margin_mib"],
            options["tolerance_mib"],
        )
        found = search.advise(asked, host, unreadable)
    except ValueError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=False, advice=render.document(found), lines=render.lines(found), pasted=render.pasted(found.chosen)
    )


if __name__ == "__main__":
    main()
