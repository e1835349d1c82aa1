#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: bring the secrets of engines to the host, beside their files, for the next switch to install."""

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_secrets
short_description: Bring the secrets of engines to a host
version_added: "0.1.0"
description:
  - Writes the secret environment variables of each engine into C(secrets/<engine>.env.other) below
    O(configuration_directory), mode 0600, if they differ from C(secrets/<engine>.env). The next switch exchanges
    the two.
  - Returns keyed hashes of the secrets, which are part of a generation, so that new secrets restart an engine by a
    switch. The key is C(secrets/hash.key) and never leaves the host.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  diff_mode:
    description: Names the files that differ. Secrets are never shown.
options:
  secrets:
    description: Values by environment variable, by engine.
    type: dict
    required: true
  configuration_directory:
    description: Directory of the configuration.
    type: path
    default: /etc/vllm-edge
"""

EXAMPLES = r"""
- name: Bring the secrets of the engines
  edge.vllm_edge.engine_secrets:
    secrets:
      e2b-all:
        STORE_PASSWORD: "{{ vault_store_password }}"
"""

RETURN = r"""
hashes:
  description: Keyed hash (HMAC with SHA-256) of the secrets by engine. In check mode on a host without a key it is
    only different from every other hash.
  type: dict
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.generation import secrets
from ..module_utils.vllm_edge.generation.model import GenerationError
from ..module_utils.vllm_edge.paths import ETC, HostPaths

ARGUMENT_SPEC: dict[str, Any] = {
    "secrets": {"type": "dict", "required": True, "no_log": True},
    "configuration_directory": {"type": "path", "default": ETC},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    paths = HostPaths(etc=Path(module.params["configuration_directory"]))
    try:
        hashes, differ = secrets.prepare(module.params["secrets"], paths, write=not module.check_mode)
    except GenerationError as error:
        module.fail_json(msg=f"{error} Nothing was changed on this host.")
    files = [str(paths.secret_file(engine)) for engine in differ]
    words = {"before": "other secrets", "after": "those of the inventory"}
    diff = [{side: {"path": path, "content": text} for side, text in words.items()} for path in files]
    module.exit_json(changed=bool(differ), hashes=hashes, diff=diff)


if __name__ == "__main__":
    main()
