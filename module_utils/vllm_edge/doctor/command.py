# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge doctor`, and what the module host_doctor returns: the findings as one document and as lines."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine_state import stamp
from ..host_paths import HostPaths
from .contract import STATES, exit_status
from .facts import Facts
from .judge import judge
from .reading import Reader
from .topology import correctness

Document = dict[str, Any]
WIDTH = 120
NAME = 26


def examine(facts: Facts, host: str = "") -> Document:
    """Every check, and what engines over several GPUs need on this host."""
    findings = judge(facts)
    return {
        "host": host or socket.gethostname(),
        "time": stamp(),
        "as_root": facts.as_root,
        "exit_status": exit_status(findings),
        "summary": {state: sum(finding.state == state for finding in findings) for state in STATES},
        "checks": [finding.as_dict() for finding in findings],
        "recommendation": correctness(facts.topology).as_dict(),
    }


def _check(check: Mapping[str, str]) -> list[str]:
    head = f"{check['state']:<8}{check['check']:<{NAME}}"
    indent = " " * len(head)
    lines = _wrapped(check["evidence"], head, indent)
    if check["remedy"]:
        arrow = "advice: " if check["state"] == "ok" else "do: "
        lines += _wrapped(arrow + check["remedy"], indent, indent + "    ")
    return lines


def _wrapped(text: str, first: str, following: str) -> list[str]:
    """Names of packages and units stay whole, so that they can be copied."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_on_hyphens=False,
        break_long_words=False,
    )


def render(document: Mapping[str, Any]) -> list[str]:
    """For people: every check, then what matters again in one line."""
    lines = [line for check in document["checks"] for line in _check(check)]
    told = ", ".join(f"{count} {state}" for state, count in document["summary"].items() if count)
    wrong = [check["check"] for check in document["checks"] if check["state"] == "fail"]
    lines += ["", f"{document['host']}: {told}" + (f"; failed: {', '.join(wrong)}" if wrong else "")]
    if not document["as_root"] and document["summary"]["unknown"]:
        lines.append("Not everything is shown to this user: as root more of what is unknown can be read.")
    return lines


def problems(document: Mapping[str, Any]) -> list[str]:
    """One paragraph for each check that failed."""
    return [
        f"{check['check']}: {check['evidence'].rstrip('.')}. {check['remedy']}"
        for check in document["checks"]
        if check["state"] == "fail"
    ]


def run_doctor(paths: HostPaths, *, output: str, support_report: str | None, reader: Reader | None = None) -> int:
    """Entry of `vllm-edge doctor`; 0 all is well, 1 warnings, 2 failures."""
    reader = reader or Reader(paths=paths)
    document = examine(reader.read())
    if support_report:
        from .support import write_report

        try:
            write_report(Path(support_report), reader, document)
        except OSError as error:
            print(f"The support report {support_report} cannot be written: {error}", file=sys.stderr)
            return 2
        print(f"Support report: {support_report}. Read it before you give it away.", file=sys.stderr)
    if output == "json":
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        print("\n".join(render(document)))
    return int(document["exit_status"])
