# SPDX-License-Identifier: Apache-2.0
"""Ansible module: record what was measured of engines, so that plans on the host use it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_observations
short_description: Record the measured GPU memory of engines on the host
version_added: "0.1.0"
description:
  - Keeps in O(path) what vLLM's log and NVML show of engines that were started with C(gpu_memory_utilization), for
    M(edge.vllm_edge.serving_plan). An observation is valid for one image, one model of GPU and the arguments that
    affect memory. Without O(status) the module only returns which engines have a valid one.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  idempotent:
    description: Engines that have a valid observation are measured again only if O(observe) names them.
options:
  engines:
    description: The engines of the profile as in C(serving_engines), each with its C(name), without what a plan adds.
    type: list
    elements: dict
    required: true
  models:
    description: The models as in C(vllm_models).
    type: dict
    required: true
  gpus:
    description: The GPUs of the host by slot, each with C(name), the model of the GPU.
    type: list
    elements: dict
    required: true
  image_id:
    description: Id of the image that the engines run.
    type: str
    required: true
  observe:
    description: Names of the engines to measure. They must be running with C(gpu_memory_utilization).
    type: list
    elements: str
    default: []
  status:
    description: Output of C(vllm-edge status --format json). Required to measure the engines in O(observe).
    type: dict
  planned:
    description: The engines as M(edge.vllm_edge.serving_plan) returns them, with which RV(lines) compares.
    type: list
    elements: dict
    default: []
  path:
    description: File that contains the observations.
    type: path
    default: /var/lib/vllm-edge/observations.json
"""

EXAMPLES = r"""
- name: Find the engines without a valid observation
  edge.vllm_edge.serving_observations:
    engines: "{{ serving_active_engines }}"
    models: "{{ vllm_models }}"
    gpus: "{{ serving_host_gpus }}"
    image_id: "{{ vllm_image_result.id }}"
  register: observed
"""

RETURN = r"""
missing:
  description: Names of the engines that have no valid observation.
  type: list
  elements: str
  returned: success
observations:
  description: The valid observations by name of the engine, as in C(plan_observations).
  type: dict
  returned: success
lines:
  description: The comparison with O(planned), and the observations as YAML for C(plan_observations).
  type: list
  elements: str
  returned: success
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.paths import STATE
from ..module_utils.vllm_edge.planning import observations
from ..module_utils.vllm_edge.planning.memory.overhead import MIB, OBSERVABLE, ObservationError
from ..module_utils.vllm_edge.system.files import write_durably
from ..module_utils.vllm_edge.text import table

PARTS = {
    "weights_bytes": "weights",
    "overhead_bytes": "activations, sampler, memory outside of torch",
    "context_bytes": "CUDA context, NCCL",
    "graphs_bytes": "CUDA graphs",
    "kv_cache_bytes": "KV cache",
    "total_bytes": "NVML",
}


def compare(observed: Sequence[observations.Observation], planned: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of what was planned and measured of the engines, for their fullest GPU, in MiB."""
    gpus = {str(plan["engine"]): plan["gpus"] for plan in planned if plan.get("gpus")}
    cells = []
    for item in (item for item in observed if item.engine in gpus):
        total = max(item.nvml_mib.values(), default=0) * MIB
        measured = {**item.components, "kv_cache_bytes": item.kv_cache_bytes, "total_bytes": total}
        for part in (part for part in PARTS if part in measured):
            was, now = max(gpu[part] for gpu in gpus[item.engine]) / MIB, measured[part] / MIB
            cells.append([item.engine, PARTS[part], f"{was:,.0f}", f"{now:,.0f}", f"{now - was:+,.0f}"])
    headings = ["calibration", "MiB", "planned", "measured", "difference"]
    return [*table(headings, cells, frozenset({2, 3, 4})), ""] if cells else []


def list_yaml(valid: Mapping[str, observations.Observation]) -> Iterator[str]:
    yield "plan_observations:"
    for name, item in valid.items():
        yield f"  # {item.gpu}, image {item.image_id}"
        yield f"  {name}:"
        yield from (f"    {part}: {item.components[part]}" for part in OBSERVABLE if part in item.components)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engines": {"type": "list", "elements": "dict", "required": True},
            "models": {"type": "dict", "required": True},
            "gpus": {"type": "list", "elements": "dict", "required": True},
            "image_id": {"type": "str", "required": True},
            "observe": {"type": "list", "elements": "str", "default": []},
            "status": {"type": "dict"},
            "planned": {"type": "list", "elements": "dict", "default": []},
            "path": {"type": "path", "default": f"{STATE}/observations.json"},
        },
        supports_check_mode=True,
    )
    given, path = module.params, Path(module.params["path"])
    host = observations.Host(
        given["image_id"], given["models"], tuple(str(gpu.get("name") or "") for gpu in given["gpus"])
    )
    status = given["status"] or {"engines": [], "gpus": []}
    running = {engine["engine"]: engine for engine in status["engines"]}
    try:
        before = observations.read(path)
        new = []
        for engine in given["engines"]:
            if given["status"] and engine["name"] in given["observe"]:
                if engine["name"] not in running:
                    raise ObservationError(f"Engine {engine['name']} is not on this host, so nothing was measured.")
                new.append(observations.observe(engine, running[engine["name"]], status["gpus"], host))
        after = observations.replace_matching(before, new)
        changed = after != before
        if changed and not module.check_mode:
            write_durably(path, observations.render(after))
    except (ObservationError, OSError) as error:
        module.fail_json(msg=str(error))
    found = {str(engine["name"]): host.find(engine, after) for engine in given["engines"]}
    valid = {name: item for name, item in found.items() if item is not None}
    module.exit_json(
        changed=changed,
        missing=[name for name, item in found.items() if item is None],
        observations={name: dict(item.components) for name, item in valid.items()},
        lines=[*compare(new, given["planned"]), *list_yaml(valid)] if valid else [],
        diff={
            "before": observations.render(before) if before else "",
            "after": observations.render(after) if after else "",
            "before_header": str(path),
            "after_header": str(path),
        },
    )


if __name__ == "__main__":
    main()
