# SPDX-License-Identifier: Apache-2.0
"""Ansible module: find the profiles that fit on a host, rank them, and render one of them for group_vars."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_advise
short_description: Find and rank the profiles that fit on a host
version_added: "0.1.0"
description:
  - Plans as M(edge.vllm_edge.serving_plan) does a main engine with the largest model that fits, for every number of
    GPUs, every dtype of the KV cache, several context lengths and every number of replicas, and engines with smaller
    models on the remaining GPUs, never two on one. Ranks the profiles whose engines all start.
  - Renders the chosen profile, whose name is C(advised), as entries of C(serving_engines) and C(serving_profiles).
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.planning
options:
  roles:
    description: C(serving_roles). If there are further engines, the main engine serves the first two.
    type: list
    elements: str
    required: true
  engines:
    description: C(serving_engines), each with C(engine_defaults) of its model. Chat template and parsers of new engines
      that their model has no defaults for are those of an engine here whose model is of the same family.
    type: dict
    default: {}
  by:
    description: >-
      What to rank the profiles by, as C(advise_by). V(tok_s) is the estimated speed of the main engine, V(context) its
      context length, V(free_gpus) the number of GPUs without an engine, V(together) the estimated speed of eight
      requests for each of its roles together, shared out to its replicas; profiles whose KV cache has neither the
      model's own dtype nor the checkpoint's scales then come last. Equal ones are ranked by speed, KV cache and context
      of the main engine, then by the other engines, the free GPUs and the number of concurrent requests.
    type: raw
    default: tok_s
  choose:
    description: Rank of the profile to render, as C(advise_choose).
    type: raw
    default: 1
  only:
    description: Names of the models to consider, as C(advise_models). An empty list is all of them.
    type: list
    elements: str
    default: []
  min_context:
    description: Minimum context length of every engine in tokens, as C(advise_min_context).
    type: raw
    default: 8192
  main:
    description: Model of the main engine, as C(advise_main).
    type: str
  min_tok_s:
    description: Least estimated speed of one request in tokens per second, as C(advise_min_tok_s). If the largest model
      is too slow for that, a smaller one becomes the main engine.
    type: raw
  max_num_seqs:
    description: Values of C(max_num_seqs) to consider, as C(advise_max_num_seqs).
    type: raw
"""

EXAMPLES = r"""
- name: Find the fastest profile for four NVIDIA L4
  edge.vllm_edge.serving_advise:
    models: "{{ vllm_models }}"
    gpus: "{{ [{'nvml_total_mib': 23034}] * 4 }}"
    vllm_version: 0.32.0
    roles: "{{ serving_roles }}"
    engines: "{{ serving_expanded.engines }}"
  register: advice
  delegate_to: localhost
"""

RETURN = r"""
advice:
  description:
    - All profiles, and the reasons why other engines do not fit. C(by), C(min_context), C(min_tok_s) by role and
      C(max_num_seqs) are what was asked for, C(main_models) the models that were considered for the main engine.
    - C(profiles), the feasible ones, the best first, each with its C(rank) (a value for O(choose)), the C(verdict)
      V(fits), C(gpus_used), C(gpus_free), C(advice), and of the main engine C(context) in tokens, C(max_concurrency),
      the number of requests of this length that fit into its KV caches, C(tok_s_estimate) with C(low), C(mid), C(high)
      and C(ceiling) as M(edge.vllm_edge.serving_plan) returns them, and C(tok_s_together_estimate), the speed of eight
      requests for each of its roles, of all its replicas together, with C(requests), the number that run at once.
      C(engines) are the engines, the main one first, each with C(model), C(tensor_parallel_size),
      C(pipeline_parallel_size), C(replicas), C(kv_cache_dtype), C(max_model_len), C(max_num_seqs), C(max_concurrency)
      of all replicas, C(served_names), C(tok_s_estimate), and C(tok_s_together_estimate) for one replica.
    - C(rejected), one entry for each model and verdict of engines that do not start, with C(model), C(verdict),
      C(shapes) and C(reason).
    - C(chosen), the profile of rank O(choose), with C(profile), C(serving_engines), C(serving_profiles), C(advice) by
      engine, and C(plan) as M(edge.vllm_edge.serving_plan) returns it.
    - C(lost), the best of the next choices of engines, each with its C(rank), its C(label), and the C(reason) why it
      is behind the chosen profile.
  type: dict
  returned: success
lines:
  description: The advice as lines for the terminal, each at most 100 columns wide.
  type: list
  elements: str
  returned: success
pasted:
  description: The chosen profile as lines of YAML. Saved to a file they can be passed as C(-e @FILE).
  type: list
  elements: str
  returned: success
"""

from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.planning import inputs
from ..module_utils.vllm_edge.planning.advice import model, render, search
from ..module_utils.vllm_edge.planning.contract import Model
from ..module_utils.vllm_edge.planning.memory import vllm_versions


def advise(options: dict[str, Any], warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the result of the module. Raises ValueError with the problem and its remedy."""
    asked = search.wish(options["models"], options["roles"], options)
    models: dict[str, Model] = {}
    unreadable: dict[str, str] = {}
    for name in asked.models or options["models"]:
        try:
            models[name] = inputs.read_model(name, options, warn)
        except ValueError as error:
            unreadable[name] = str(error)
    if fallback := vllm_versions.describe_fallback(options["vllm_version"]):
        warn(fallback)
    host = model.Host(
        models,
        [inputs.build_gpu(f"gpus[{slot}]", given, warn) for slot, given in enumerate(options["gpus"])],
        options["vllm_version"],
        options["roles"],
        options["engines"],
        options["observations"],
        options["margin_mib"],
        options["tolerance_mib"],
        options["models"],
    )
    found = search.advise(asked, host, unreadable)
    return {"advice": render.document(found), "lines": render.lines(found), "pasted": render.pasted(found.chosen)}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **inputs.SPEC,
            "roles": {"type": "list", "elements": "str", "required": True},
            "engines": {"type": "dict", "default": {}},
            "by": {"type": "raw", "default": model.By.TOK_S.value},
            "choose": {"type": "raw", "default": 1},
            "only": {"type": "list", "elements": "str", "default": []},
            "min_context": {"type": "raw", "default": model.MIN_CONTEXT_TOKENS},
            "main": {"type": "str"},
            "min_tok_s": {"type": "raw"},
            "max_num_seqs": {"type": "raw"},
        },
        supports_check_mode=True,
    )
    try:
        answer = advise(module.params, module.warn)
    except ValueError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **answer)


if __name__ == "__main__":
    main()
