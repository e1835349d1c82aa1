# SPDX-License-Identifier: Apache-2.0
"""Ansible module: write the report page of a host, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_page
short_description: Write the report page of a host
version_added: "0.1.0"
description:
  - Writes C(<host>.html), one file without addresses and without scripts, and the plots C(<host>-memory) and
    C(<host>-speed) as SVG and PNG, with mode V(0600). Delegate the task to the controller.
  - Plots need matplotlib in the Python that runs the module. Without it the page has tables instead of plots.
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
      - Exactly one of O(report) and O(index) is required. As for the filter C(render_report), with
        C(plan), the C(engines) that M(edge.vllm_edge.serving_plan) returns, and C(note), a sentence about the host.
    type: dict
  index:
    description: The values of RV(row) of several hosts, for which C(index.html) is written, and nothing else.
    type: list
    elements: dict
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
  delegate_to: localhost
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
missing:
  description: Why there are no plots, and what to do; empty if there are plots.
  type: str
  returned: with O(report)
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.page.data import PageData, complete, read_bench, read_quality
from ..module_utils.vllm_edge.page.pages import FILES, build, build_index


def write(path: Path, content: bytes) -> None:
    """Replace a file that only its owner may read. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    fresh.replace(path)


def write_page(directory: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Write the page of a host and its plots, and return the result of the module. Raises OSError."""
    report = complete(options["report"], options["saved"])
    host = str(report["host"])
    data = PageData(
        report,
        options["made_at"],
        options["status"],
        options["history"],
        read_bench(directory / "bench" / host),
        read_quality(directory / "quality" / host),
        options["reference"],
    )
    built = build(data)
    # Plots of an earlier run are not those of this page.
    for name in FILES:
        for suffix in ("svg", "png"):
            (directory / f"{host}-{name}.{suffix}").unlink(missing_ok=True)
    for name, content in built.plots.items():
        write(directory / f"{host}-{name}", content)
    page = directory / f"{host}.html"
    write(page, built.page.encode())
    missing = built.missing and (
        f"It has tables and no plots ({built.missing}). Plots need matplotlib in the Python that runs Ansible: "
        f"{sys.executable} -m pip install 'matplotlib>=3.10,<4'."
    )
    return {"path": str(page), "row": data.index_row, "missing": missing}


def main() -> None:
    listed = {"type": "list", "elements": "dict", "default": []}
    module = AnsibleModule(
        argument_spec={
            "report": {"type": "dict"},
            "index": {"type": "list", "elements": "dict"},
            "status": {"type": "dict", "default": {}},
            "history": listed,
            "saved": {"type": "dict", "default": {}},
            "reference": listed,
            "made_at": {"type": "str", "default": "unknown"},
            "directory": {"type": "path", "required": True},
        },
        mutually_exclusive=[("report", "index")],
        required_one_of=[("report", "index")],
    )
    directory = Path(module.params["directory"])
    try:
        if module.params["index"] is not None:
            result: dict[str, Any] = {"path": str(directory / "index.html")}
            write(directory / "index.html", build_index(module.params["index"]).encode())
        else:
            result = write_page(directory, module.params)
    except OSError as error:
        module.fail_json(
            msg=f"The report page cannot be written: {error}. Set serving_reports_directory to another place."
        )
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
