# SPDX-License-Identifier: Apache-2.0
"""Ansible module: predict the GPU memory that the engines of a profile need, before anything is started."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_plan
short_description: Predict the GPU memory that the engines of a profile need
version_added: "0.1.0"
description:
  - Predicts for each engine whether it starts, and if not, why and what to change, its memory on each of its GPUs, the
    maximum context length and the speed, from C(config.json), the headers of the safetensors files, the arguments and
    the vLLM release. It needs no host, no GPU and no network.
  - A profile that cannot be planned at all, for example because nothing is known about a model, is no failure of the
    module, see RV(plans).
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.planning
options:
  profiles:
    description: The profiles by name, each a mapping with C(engines) as in C(serving_engines), each with its C(name),
      in the order in which they start.
    type: dict
    required: true
  completed:
    description: What M(edge.vllm_edge.serving_complete) added to each of the engines, whose reason that is.
    type: dict
    default: {}
  observed:
    description: File with the observations of the host (M(edge.vllm_edge.serving_observations)). The valid ones replace
      predictions; O(observations) takes precedence. Of an engine that has only invalid ones, a warning says why.
    type: path
  image_id:
    description: Id of the image that the engines run, for which an observation must be valid.
    type: str
    default: ""
  drift_tolerances:
    description: Maximum difference between measurement and plan by component, any of C(weights_mib), C(graphs_mib),
      C(kv_cache_mib), C(kv_cache_tokens), C(kv_blocks) and C(total_mib).
    type: dict
    default: {}
  on_drift:
    description: What happens if a measured component differs from the plan by more than its tolerance.
    type: str
    choices: [ignore, warn, fail]
    default: warn
  memory_threshold_percent:
    description: Warn about a GPU of which the engines hold more than this percentage besides their KV caches, compared
      with what CUDA can use of it. From 1 to 100, where 100 never warns.
    type: int
    default: 85
"""

EXAMPLES = r"""
- name: Plan one profile for four NVIDIA L4
  edge.vllm_edge.serving_plan:
    profiles:
      bf16-tp4:
        engines: [{name: 31b, model: 31b-bf16, tensor_parallel_size: 4, gpus: [0, 1, 2, 3], max_model_len: 16384}]
    models: "{{ vllm_models }}"
    gpus: "{{ [{'name': 'NVIDIA L4', 'cuda_total_bytes': 23659151360}] * 4 }}"
    vllm_version: 0.32.0
  register: plan
  delegate_to: localhost
"""

RETURN = r"""
plans:
  description: The plans by name of the profile. If one cannot be planned, its C(verdict) is V(null) and its C(refusals)
    contain the reason.
  type: dict
  returned: success
  contains:
    verdict:
      description: Verdict of the first engine that does not start, or V(fits).
      type: str
      returned: success
    engines:
      description:
        - The engines in the order in which they were given, each with the name C(engine), its C(model), the
          C(precision) of its weights, and a C(verdict), V(fits),
          V(oom_weights), V(no_kv), V(kv_below_max_model_len), V(not_free), V(oom_warmup), V(unsupported_shape),
          V(unsupported_engine) or V(cannot_say), where an argument is not counted. C(reason) is one sentence with what
          decided, C(fix) the cheapest change with which the engine fits, written as in C(serving_engines), or empty.
        - "C(fixes), all changes that were found, the cheapest first: C(change) is spelled like C(fix), C(settings) are
          the same as keys of C(serving_engines), C(costs) what is lost, in words, and C(max_model_len),
          C(max_concurrency) and C(decode_tok_s) are what the engine has then."
        - "Of the KV cache: C(kv_cache_dtype), C(kv_blocks), C(kv_cache_tokens) as vLLM prints it (C(GPU KV cache
          size)), C(max_concurrency), the number of requests of C(max_model_len) tokens that fit into it, C(at_once),
          the number of requests of 8192 and of 32768 tokens that do, at most C(max_num_seqs), and C(max_context), the
          tokens of the longest request that does, at most the model's own maximum."
        - "Of the speed, in tokens per second with C(low), C(mid) and C(high), V(null) if the bandwidth of the GPU is
          not known: C(decode_tok_s) of one sequence at short context, with the C(ceiling) that the memory bandwidth
          sets, and C(decode_together_tok_s) of several C(requests) with C(context_tokens) each, added up; V(null) also
          if the engine takes one request at a time."
        - "C(gpus), what the engine needs on each of its GPUs, by C(slot), in bytes: C(weights_bytes) as vLLM logs them,
          C(overhead_bytes) (the peak of the activations, growth outside of PyTorch, and the C(warm_up_bytes) of the
          sampler), C(context_bytes) of CUDA and NCCL, C(graphs_bytes), C(kv_cache_bytes), the C(total_bytes) that NVML
          is expected to show, and the C(free_bytes) that stay, negative if the engine does not fit. C(uncertainty_mib)
          is by how many MiB what is beside the KV cache may be less, and more. C(free_uncertainty_mib) has what the
          plan cannot know, in MiB by name: C(compile_cache), what compiling may take of the KV cache, and C(pcie), what
          tensor parallelism over PCIe may take."
        - C(settings), what the plan adds to the engine, with keys as in C(serving_engines). C(kv_cache_memory_bytes)
          and C(gpu_memory_utilization), then what has to be free for the plan, if the engine sets neither of them;
          C(vram_budget_mib) if the engine does not set it; C(plan), the predictions that measurements are compared
          with.
        - C(derived_kv_cache_memory_bytes), which leaves (or would leave) O(margin_mib) free on each GPU; C(advice),
          what could be better, each with a reference; C(facts_source), where the facts about the checkpoint come from;
          C(observed), the figures that were taken from O(observations); C(inherited), the arguments that the engine has
          from its model, by the variable that states them; C(reasons), why it has each argument.
      type: list
      elements: dict
      returned: success
    budgets_mib:
      description: Memory that the engines may use on each GPU, by slot, in MiB. V(0) for a GPU without an engine.
      type: dict
      returned: success
    memory_warnings:
      description: One sentence for each GPU above O(memory_threshold_percent), or for several that hold the same.
      type: list
      elements: str
      returned: success
    lines:
      description: The plan as lines for the terminal, each at most 100 columns wide; RV(legend) explains their letters.
      type: list
      elements: str
      returned: success
    refusals:
      description: One line for each engine that does not start, with changes and what they cost.
      type: list
      elements: str
      returned: success
overview:
  description: A table of the profiles with the reasons of those that do not start, as lines for the terminal.
  type: list
  elements: str
  returned: success
legend:
  description: Explanation of the letters in RV(plans.lines).
  type: list
  elements: str
  returned: success
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.engine.reasons import explain_completed
from ..module_utils.vllm_edge.inventory.replicas import find_inherited
from ..module_utils.vllm_edge.planning import drift, feasibility, inputs, observations, planner, render
from ..module_utils.vllm_edge.planning.checkpoint.quantization import name_precision
from ..module_utils.vllm_edge.planning.contract import Model, Plan
from ..module_utils.vllm_edge.planning.memory import vllm_versions


def describe_plan(
    plan: Plan,
    models: Sequence[tuple[str, Model]],
    tolerances: Mapping[str, float],
    on_drift: drift.OnDrift,
    percent: int,
) -> dict[str, Any]:
    document = render.document(plan)
    for engine, row, (name, model) in zip(plan.engines, document["engines"], models, strict=True):
        row |= {"model": name, "precision": name_precision(model.dtype, model.quantization)}
        row["settings"]["plan"] = drift.expectation(engine, plan.vllm_version, tolerances, on_drift, percent)
    return document | {"lines": render.lines(plan), "refusals": render.refusals(plan)}


def describe_error(name: str, version: str, error: str) -> dict[str, Any]:
    """Return the result for one of several profiles that cannot be planned, with the same keys."""
    lines = [f"profile {name}, vLLM {version}: cannot be planned", "", *render.wrap(error)]
    return render.document(Plan(name, version, (), {})) | {"verdict": None, "lines": lines, "refusals": [error]}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "profiles": {"type": "dict", "required": True},
            **inputs.SPEC,
            "observed": {"type": "path"},
            "image_id": {"type": "str", "default": ""},
            "completed": {"type": "dict", "default": {}},
            "drift_tolerances": {"type": "dict", "default": {}},
            "on_drift": {"type": "str", "choices": list(drift.ON_DRIFT), "default": "warn"},
            "memory_threshold_percent": {"type": "int", "default": feasibility.THRESHOLD_PERCENT},
        },
        supports_check_mode=True,
    )
    options = module.params
    version, models = options["vllm_version"], dict[str, Model]()
    if fallback := vllm_versions.describe_fallback(version):
        module.warn(fallback)
    plans: dict[str, Plan | None] = {}
    answers: dict[str, dict[str, Any]] = {}
    # All errors are a ValueError whose message contains the problem and its remedy.
    try:
        tolerances = drift.tolerances(options["drift_tolerances"], options["tolerance_mib"])
        known = observations.read(Path(options["observed"])) if options["observed"] else []
        gpus = [inputs.build_gpu(f"gpus[{k}]", given, module.warn) for k, given in enumerate(options["gpus"])]
    except ValueError as error:
        module.fail_json(msg=str(error))

    def plan_profile(name: str, engines: Sequence[Mapping[str, Any]]) -> Plan:
        for model in dict.fromkeys(str(engine.get("model")) for engine in engines):
            if model in options["models"] and model not in models:
                models[model] = inputs.read_model(model, options, module.warn)
        host = observations.Host(options["image_id"], options["models"], tuple(gpu.name for gpu in gpus))
        observed, ignored = observations.merge(options["observations"], known, engines, host)
        for sentence in ignored:
            module.warn(sentence)
        plan = planner.plan(
            name,
            engines,
            models,
            gpus,
            version,
            observations=observed,
            margin_mib=options["margin_mib"],
            tolerance_mib=options["tolerance_mib"],
            memory_threshold_percent=options["memory_threshold_percent"],
        )
        planned = zip(plan.engines, engines, strict=True)
        found = [
            replace(
                one,
                inherited=find_inherited(engine, options["models"]),
                reasons={**one.reasons, **explain_completed(options["completed"].get(one.engine, {}))},
            )
            for one, engine in planned
        ]
        return replace(plan, engines=tuple(found))

    for name, profile in options["profiles"].items():
        try:
            plan = plans[name] = plan_profile(name, profile.get("engines") or [])
            of_engines = [(engine["model"], models[engine["model"]]) for engine in profile.get("engines") or []]
            percent = options["memory_threshold_percent"]
            answers[name] = describe_plan(plan, of_engines, tolerances, options["on_drift"], percent)
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            # The latter three are of a profile in another form, which must not take the plans of the others.
            said = str(error) if isinstance(error, ValueError) else f"profile {name} has another form: {error!r}."
            plans[name] = None
            answers[name] = describe_error(name, version, said)
    why = {name: answer["refusals"] for name, answer in answers.items()}
    overview = [*render.describe_release(version), *render.overview(plans, why)]
    module.exit_json(changed=False, legend=render.legend(), overview=overview, plans=answers)


if __name__ == "__main__":
    main()
