#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: what a checkpoint says of itself."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_facts
short_description: Read what a checkpoint says of itself
version_added: "0.1.0"
description:
  - Reads config.json and the headers of the safetensors files of a model, from a directory or from a hub, and never
    the weights. From a hub that is some KiB for each file.
  - Returns them, and the text of the planner's file of recorded facts with this model in it. It writes nothing.
  - A model that the planner does not know is refused, for facts of it would be of no use.
author:
  - vllm-edge (@vllm-edge)
attributes:
  check_mode:
    description: Can run in check mode and return the same as without it, for it only reads.
    support: full
  diff_mode:
    description: Will return details on what has changed, or would change in check mode. There is nothing that could
      change.
    support: none
  idempotent:
    description: When run twice in a row with the same arguments, the second run changes nothing. It never changes
      anything.
    support: full
requirements:
  - huggingface_hub (Python package), to read from a hub
options:
  repo:
    description: Repository whose facts these are, V(owner/name). They are recorded under this name.
    type: str
    required: true
  path:
    description: Directory with config.json and safetensors files. Without it they are read from the hub.
    type: path
  revision:
    description: Commit, branch or tag. The hub is asked for its commit; of a directory it is what the caller knows.
    type: str
    default: ""
  endpoint:
    description: The hub.
    type: str
    default: https://huggingface.co
  token:
    description: Token for the hub, for repositories that ask for one.
    type: str
  origin:
    description: Where the facts are from, for the record. Without it, the commit at the hub, or V(its files).
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Read the facts of a model that is here
  model_facts:
    repo: google/gemma-4-31B-it
    path: /data/vllm/weights/gemma-4-31B-it
  register: facts

- name: Read the facts of a model at the hub
  model_facts:
    repo: Qwen/Qwen3-8B
    revision: main
  register: facts
"""

RETURN = r"""
repo:
  description: Repository.
  returned: success
  type: str
  sample: google/gemma-4-31B-it
revision:
  description: Commit; empty where the files do not tell.
  returned: success
  type: str
  sample: ""
architecture:
  description: Architecture as config.json names it.
  returned: success
  type: str
  sample: Gemma4ForConditionalGeneration
quantization:
  description: Quantization method as vLLM names it.
  returned: success
  type: str
  sample: none
elements:
  description: Elements of all tensors; for weights that are not packed, the number of parameters.
  returned: success
  type: int
  sample: 31273088876
checkpoint_bytes:
  description: Bytes of all tensors.
  returned: success
  type: int
  sample: 62546177752
record:
  description: What is recorded of the model.
  returned: success
  type: dict
  sample: {}
recorded_facts:
  description: Text of module_utils/vllm_edge/planning/recorded_facts.py with this model in it.
  returned: success
  type: str
  sample: ""
changes:
  description: How this differs from what is recorded, one line each; empty where it is recorded as it is.
  returned: success
  type: list
  elements: str
  sample: ["new: 39 kinds of tensors"]
msg:
  description: One line that says what was read, and on failure what to do.
  returned: always
  type: str
  sample: "google/gemma-4-31B-it: 31,273,088,876 elements in 62.5 GB."
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.planning import families, model_facts, recorded_facts, recording
from ..module_utils.vllm_edge.planning.contract import Facts, UnknownArchitecture

ARGUMENT_SPEC: dict[str, Any] = {
    "repo": {"type": "str", "required": True},
    "path": {"type": "path"},
    "revision": {"type": "str", "default": ""},
    "endpoint": {"type": "str", "default": "https://huggingface.co"},
    "token": {"type": "str", "no_log": True},
    "origin": {"type": "str", "default": ""},
}


def from_hub(repo: str, revision: str, endpoint: str, token: str | None) -> Facts:
    """Facts of a repository at a hub, of one commit. Raises FactsError."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import EntryNotFoundError, SafetensorsParsingError
    except ImportError as error:
        raise model_facts.FactsError(
            f"The hub's client is needed to read {repo} there ({error}). Install huggingface_hub, or give path."
        ) from error
    api = HfApi(endpoint=endpoint, token=token or None)
    try:
        commit = str(api.model_info(repo, revision=revision or "main").sha)
        with tempfile.TemporaryDirectory() as directory:

            def document(name: str) -> dict[str, Any]:
                path = api.hf_hub_download(repo, name, revision=commit, local_dir=directory)
                return dict(json.loads(Path(path).read_text("utf-8")))

            config = document("config.json")
            quantization = None
            if not model_facts.quantization_of(config):
                try:
                    quantization = document("hf_quant_config.json")
                except EntryNotFoundError:
                    quantization = None
        files = api.get_safetensors_metadata(repo, revision=commit).files_metadata
    except SafetensorsParsingError as error:
        raise model_facts.FactsError(f"{repo} at {endpoint} has a damaged safetensors file: {error}.") from error
    except Exception as error:  # the client's, and those of the HTTP library below it, which changes
        raise model_facts.FactsError(
            f"{repo} cannot be read at {endpoint}: {error}. Is the name right, the hub within reach, the licence "
            "accepted and the token given? With the files at hand, give path."
        ) from error
    headers = ((name, tensor.dtype, tensor.shape) for file in files.values() for name, tensor in file.tensors.items())
    return model_facts.from_headers(repo, commit, config, headers, quantization, endpoint)


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    params: dict[str, Any] = module.params
    repo: str = params["repo"]
    try:
        if params["path"]:
            facts = model_facts.read(Path(params["path"]), repo, params["revision"])
        else:
            facts = from_hub(repo, params["revision"], params["endpoint"], params["token"])
        model = families.interpret(facts)
    except (model_facts.FactsError, UnknownArchitecture) as error:
        module.fail_json(msg=str(error))
    origin = params["origin"] or (f"{facts.source}, commit {facts.revision}" if not params["path"] else "its files")
    record = recording.record(facts, origin)
    changes = recording.changes(recorded_facts.RECORDS.get(repo), record)
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
