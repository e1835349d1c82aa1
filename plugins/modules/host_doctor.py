#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check whether a host can serve, and return each problem with its remedy."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_doctor
short_description: Check whether a host can serve
version_added: "0.1.0"
description:
  - Checks the system, the driver, the GPUs, the container runtime, the disks and the engines of a host. Needs only
    Python there, so it can run before anything of vllm-edge is installed. With O(deep) it runs
    C(vllm-edge doctor --deep) on the host, which hashes the weights and sends the canary to every engine too.
  - Checks that need facts which the user may not read report V(unknown), which is not a failure. The module does not
    fail if checks fail, so that the play can print RV(lines).
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  host:
    description: Name of the host in the inventory. If it is empty, the host's own name is used.
    type: str
    default: ""
  gpu_uuids:
    description: UUIDs of the GPUs that the inventory declares. A missing GPU is a failure.
    type: list
    elements: str
    default: []
  gpus:
    description: Number of GPUs that the profile needs. Fewer GPUs are a failure.
    type: int
    default: 0
  data_directory:
    description: Directory of weights and caches.
    type: path
    default: /data/vllm
  deep:
    description: >-
      What else the inventory expects. C(profile), C(weights) (C(name), C(repo) and C(revision) of each model),
      C(group) (of the weights), C(foreign) (see M(edge.vllm_edge.vram_budget)), and C(files) (C(path) of each rendered
      file and C(how) it differs; not set if they could not be compared). If it is set, the deep checks run too.
    type: dict
  support_report:
    description: >-
      Path on the host of a support report (tar.gz) to write as well, which only its owner may read; not in check mode.
      To see whether CUDA works, the report asks it in the containers of the engines, and in a new container on GPUs
      that nobody uses.
    type: path
"""

EXAMPLES = r"""
- name: Check the host
  edge.vllm_edge.host_doctor:
    gpu_uuids: "{{ gpu_uuids | default([]) }}"
  register: doctor
"""

RETURN = r"""
doctor:
  description:
    - The result of all checks, in the same order in every run. C(exit_status) is V(0) if all passed, V(1) if there are
      warnings, V(2) if there are failures; C(summary) is the number of checks by state, C(as_root) whether the module
      ran as root.
    - C(checks), each with C(check), C(group), C(state) (V(ok), V(warn), V(fail) or V(unknown)), C(evidence) and
      C(remedy).
    - C(recommendation) for engines on several GPUs, C(environment), C(arguments) and C(reasons), as
      M(edge.vllm_edge.host_facts) returns them.
  type: dict
  returned: success
problems:
  description: One paragraph for each check that failed.
  type: list
  elements: str
  returned: success
lines:
  description: The result as lines for the terminal.
  type: list
  elements: str
  returned: success
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.doctor.registry import examine
from ..module_utils.vllm_edge.doctor.render import problems, render
from ..module_utils.vllm_edge.doctor.support import write_report
from ..module_utils.vllm_edge.facts.model import DATA, Expectation
from ..module_utils.vllm_edge.facts.reader import Reader


def ask_program(module: AnsibleModule, expected: dict[str, Any]) -> dict[str, Any]:
    """Run `vllm-edge doctor --deep` on this host and return its document."""
    _, out, err = module.run_command(
        ["vllm-edge", "doctor", "--deep", "--format=json", "--expect", json.dumps(expected)]
    )
    if not out.startswith("{"):
        why = err.strip() or "it printed nothing"
        module.fail_json(msg=f"'vllm-edge doctor --deep' did not work: {why}. playbooks/host.yml installs the program.")
    return dict(json.loads(out))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": ""},
            "gpu_uuids": {"type": "list", "elements": "str", "default": []},
            "gpus": {"type": "int", "default": 0},
            "data_directory": {"type": "path", "default": DATA},
            "deep": {"type": "dict"},
            "support_report": {"type": "path"},
        },
        supports_check_mode=True,
    )
    given = module.params
    expected = {"uuids": given["gpu_uuids"], "gpus": given["gpus"], "data": given["data_directory"]}
    if given["deep"] is None:
        document = examine(Reader().read(Expectation(**expected)), given["host"])
    else:
        document = ask_program(module, expected | given["deep"])
        document["host"] = given["host"] or document["host"]
    if given["support_report"] and not module.check_mode:
        try:
            write_report(Path(given["support_report"]), Reader(), document)
        except OSError as error:
            module.fail_json(msg=f"support_report {given['support_report']} cannot be written: {error}")
    module.exit_json(changed=False, doctor=document, problems=problems(document), lines=render(document))


if __name__ == "__main__":
    main()
