#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: compute what engines leave to the plan."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_complete
short_description: Compute what engines leave to the plan
version_added: "0.1.0"
description:
  - Returns for engines that do not say on which GPUs they run the tensor parallelism, slots, context and parsers that
    they get. Facts of a checkpoint that is neither recorded nor below O(weights_root) are read from a hub.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
  - edge.vllm_edge.planning
requirements:
  - huggingface_hub (Python package), to read from a hub
options:
  engines:
    description: The engines by name, as in C(serving_engines) with the defaults of their models.
    type: dict
    required: true
  required:
    description: Names of the engines without which the module fails. Of another one RV(lines) says what is wrong.
    type: list
    elements: str
    default: []
  endpoint:
    description: Address of the hub. Empty reads from none.
    type: str
    default: ""
  token:
    description: Token for gated repositories, sent only to O(endpoint), which must be https or this machine itself.
    type: str
"""

EXAMPLES = r"""
- name: Complete an engine
  edge.vllm_edge.serving_complete:
    engines:
      chat: {model: chat}
    models:
      chat: {repo: google/gemma-4-E2B-it}
    gpus: [{name: L4}]
    vllm_version: 0.32.0
  register: completion
  delegate_to: localhost
"""

RETURN = r"""
engines:
  description: What is added to each engine, with keys as in C(serving_engines).
  type: dict
  returned: success
records:
  description: Facts that were read from the hub by repository, as C(playbooks/record_facts.yml) records them.
  type: dict
  returned: success
lines:
  description: What was added to each engine, as lines for the terminal.
  type: list
  elements: str
  returned: success
"""

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.planning import completion, inputs, render
from ..module_utils.vllm_edge.planning.checkpoint import hub, recording
from ..module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ..module_utils.vllm_edge.planning.contract import Facts
from ..module_utils.vllm_edge.planning.separate_process import read_in_subprocess
from ..module_utils.vllm_edge.weights.access import Secrets


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            **inputs.SPEC,
            "engines": {"type": "dict", "required": True},
            "required": {"type": "list", "elements": "str", "default": []},
            "endpoint": {"type": "str", "default": ""},
            "token": {"type": "str", "no_log": True},
        },
        supports_check_mode=True,
    )
    options: dict[str, Any] = module.params
    module.no_log_values.update(Secrets(endpoint=options["endpoint"]).texts)
    records: dict[str, Any] = {}

    def fetch(model: Mapping[str, Any]) -> Facts | None:
        if not options["endpoint"]:
            return None
        asked = (model["repo"], model.get("revision", "main"), options["endpoint"], options["token"])
        try:
            found = read_in_subprocess(asked[0], lambda: hub.read(*asked), drop_root=False)
        except FactsError as error:
            raise FactsError(f"{error} Or record its facts from its files with playbooks/record_facts.yml.") from error
        records[found.repo] = recording.record(found, recording.describe_origin(found))
        return found

    # What the host measures may differ from the plan.
    margins = [options["margin_mib"] + options["tolerance_mib"], options["margin_mib"]]
    engines: dict[str, Any] = {}
    lines = []
    try:
        gpus = [inputs.build_gpu(f"gpus[{k}]", given, lambda sentence: None) for k, given in enumerate(options["gpus"])]
    except ValueError as error:
        module.fail_json(msg=str(error))
    for name, engine in options["engines"].items():
        try:
            model = inputs.read_model(engine["model"], options, module.warn, fetch)
            found = completion.complete(engine, model, gpus, options["vllm_version"], margins)
        except ValueError as error:
            if name in options["required"]:
                module.fail_json(msg=f"{name} cannot be completed. {error}")
            lines += render.wrap(f"{name} cannot be completed. {error}")
            continue
        engines[name] = found
        lines += render.wrap(completion.describe(name, found), "  ")
    module.exit_json(changed=False, engines=engines, records=records, lines=lines)


if __name__ == "__main__":
    main()
