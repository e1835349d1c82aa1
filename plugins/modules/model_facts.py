#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: read the configuration and the tensor headers of a model's checkpoint."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_facts
short_description: Gather facts about a model's checkpoint
version_added: "0.1.0"
description:
  - Reads C(config.json) and the headers of the safetensors files of a model, from a directory or from a hub. It never
    reads the weights themselves. From a hub that is some KiB per file.
  - A model whose architecture the planner does not know, and whose memory has no upper bound, is an error.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
requirements:
  - huggingface_hub (Python package), to read from a hub
options:
  repo:
    description: Repository of the model, as C(owner/name). The facts are recorded under this name.
    type: str
    required: true
  path:
    description: Directory with C(config.json) and safetensors files, or only their index, from which shapes are
      inferred. If it is not set, they are read from the hub.
    type: path
  revision:
    description: Commit, branch or tag; with O(path) it is only recorded. An empty value means V(main) at a hub.
    type: str
    default: ""
  endpoint:
    description: Address of the hub.
    type: str
    default: https://huggingface.co
  token:
    description: Token for gated repositories, sent only to O(endpoint), which must be https or this machine itself.
    type: str
  origin:
    description: Where the facts come from, for the record; by default the commit at the hub, or V(its files).
    type: str
    default: ""
  recorded:
    description: Records of the inventory by repository, which RV(changes) prefers to those that the project ships.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: Read the facts of a model from a directory
  edge.vllm_edge.model_facts:
    repo: google/gemma-4-31B-it
    path: /data/vllm/weights/gemma-4-31B-it
  register: facts
"""

RETURN = r"""
repo:
  description: Repository of the model.
  returned: success
  type: str
revision:
  description: Commit. Empty if a directory was read and O(revision) is not set.
  returned: success
  type: str
architecture:
  description: Architecture as C(config.json) names it.
  returned: success
  type: str
quantization:
  description: Quantization method as vLLM names it.
  returned: success
  type: str
elements:
  description: Number of elements of all tensors. For weights that are not packed this is the number of parameters.
  returned: success
  type: int
checkpoint_bytes:
  description: Size of all tensors in bytes.
  returned: success
  type: int
record:
  description: The facts as they are recorded.
  returned: success
  type: dict
recorded_facts:
  description: Text of the planner's C(planning/checkpoint/recorded_facts.py) with this model added.
  returned: success
  type: str
changes:
  description: Differences from the recorded facts, one line each. Empty if the same facts are already recorded.
  returned: success
  type: list
  elements: str
msg:
  description: A line that summarises what was read, or describes the error and its remedy.
  returned: always
  type: str
"""

import functools
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.planning.checkpoint import families, hub, model_facts, recorded_facts, recording
from ..module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ..module_utils.vllm_edge.planning.contract import UnknownArchitecture
from ..module_utils.vllm_edge.planning.separate_process import read_in_subprocess
from ..module_utils.vllm_edge.weights.access import Secrets

ARGUMENT_SPEC: dict[str, Any] = {
    "repo": {"type": "str", "required": True},
    "path": {"type": "path"},
    "revision": {"type": "str", "default": ""},
    "endpoint": {"type": "str", "default": "https://huggingface.co"},
    "token": {"type": "str", "no_log": True},
    "origin": {"type": "str", "default": ""},
    "recorded": {"type": "dict", "default": {}},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    params: dict[str, Any] = module.params
    repo: str = params["repo"]
    module.no_log_values.update(Secrets(endpoint=params["endpoint"]).texts)
    try:
        if params["path"]:
            read = functools.partial(model_facts.read, Path(params["path"]), repo, params["revision"])
        else:
            read = functools.partial(hub.read, repo, params["revision"], params["endpoint"], params["token"])
        facts = read_in_subprocess(repo, read, drop_root=False)
        model = families.interpret(facts)
    except (FactsError, UnknownArchitecture) as error:
        module.fail_json(msg=str(error))
    if warning := families.warn_of_code(facts):
        module.warn(warning)
    origin = params["origin"] or recording.describe_origin(facts)
    record = recording.record(facts, origin)
    changes = recording.changes(params["recorded"].get(repo) or recorded_facts.RECORDS.get(repo), record)
    elements, size = model_facts.parameters(facts), model_facts.checkpoint_bytes(facts)
    module.exit_json(
        changed=False,
        repo=repo,
        revision=facts.revision,
        architecture=model.architecture,
        quantization=model.quantization.method,
        elements=elements,
        checkpoint_bytes=size,
        record=record,
        recorded_facts=recording.render({**recorded_facts.RECORDS, repo: record}),
        changes=changes,
        msg=f"{repo}: {elements:,} elements in {size / 1e9:.1f} GB.",
    )


if __name__ == "__main__":
    main()
