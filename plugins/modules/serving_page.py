# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_page
short_description: Write the report page of a host
version_added: "0.1.0"
description:
  - Writes C(<host>.html) and its row of the index, C(<host>.row.json), with mode V(0600), on the controller. The page
    is one file without addresses and without scripts.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  check_mode:
    support: none
  diff_mode:
    support: none
  idempotent:
    details: The same arguments and records give the same files. They count as no change.
options:
  report:
    description:
      - Exactly one of O(report) and O(index) is required. What C(playbooks/tasks/report.yml) collects for the terminal,
        with C(plan), the C(engines) of M(edge.vllm_edge.serving_plan), and C(note), a sentence about the host.
    type: dict
  index:
    description:
      - Write C(index.html) and no page, with the C(<host>.row.json) of all pages and hosts of C(gpu_hosts) without one.
        A host of the play that has written no page is shown, and recorded in its row, as not reached.
    type: bool
  status:
    description: What C(vllm-edge status --format json) prints.
    type: dict
    default: {}
  history:
    description: What C(vllm-edge history --format json) prints.
    type: list
    elements: dict
    default: []
  saved:
    description: The report of the last complete run. Its completions and versions are shown where O(report) has none.
    type: dict
    default: {}
  reference:
    description: Measurements from elsewhere, each with C(engine), C(output_tokens), C(tok_s) and C(source).
    type: list
    elements: dict
    default: []
  made_at:
    description: Time of the page, such as V(2026-11-25T02:30:00Z).
    type: str
    default: unknown
  directory:
    description:
      - Directory of the pages. Records of benchmarks are read from C(bench/<host>/) in it, those of quality from
        C(quality/<host>/).
    type: path
    required: true
"""

EXAMPLES = r"""
- name: Write the page
  edge.vllm_edge.serving_page:
    report: "{{ report }}"
    made_at: "2026-11-25T02:30:00Z"
    directory: reports
"""

RETURN = r"""
path:
  description: The page.
  type: str
  returned: success
row:
  description: The line of the host for the index, C(host), C(profile), C(verdict), C(good), C(note) and C(made_at).
  type: dict
  returned: with O(report)
"""
