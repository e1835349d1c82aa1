# SPDX-License-Identifier: Apache-2.0
"""Ansible module: render the report of a run for the terminal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_report
short_description: Render the report of a run
version_added: "0.1.0"
description:
  - Renders the collected results of a run as lines of at most 100 columns. Delegate the task to the controller.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  report:
    description:
      - C(host), C(profile) and C(generation). C(engines), each with C(engine), C(unit), C(model), C(precision),
        C(tensor_parallel_size), C(slots), C(port), C(served_names), C(state), C(load_seconds), C(since),
        C(peer_to_peer_off), why its GPUs do not read each other's memory, and C(accept_risk), the risks that the
        inventory accepts.
      - C(completions), the results of C(vllm-edge canary). C(gpus), as M(edge.vllm_edge.vram_budget) returns them.
      - C(problems), C(drift), C(memory_warnings), C(load_warnings), C(gateway) and C(last_switch), as
        C(vllm-edge status --format json) prints them, and C(switch), the journal of the switch that this run made, if
        any.
      - C(overrides), why the plan rejected engines that serve. C(versions) of the software by name. C(pins), lines for
        the inventory that pin values which were recorded at first use.
      - C(plan) and C(note) are for M(edge.vllm_edge.serving_page), and are not rendered here.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Render the report
  edge.vllm_edge.serving_report:
    report: "{{ report }}"
  delegate_to: localhost
"""

RETURN = r"""
lines:
  description: The report as lines for the terminal.
  type: list
  elements: str
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.status.tables import render


def main() -> None:
    module = AnsibleModule(argument_spec={"report": {"type": "dict", "required": True}}, supports_check_mode=True)
    module.exit_json(changed=False, lines=render(module.params["report"]))


if __name__ == "__main__":
    main()
