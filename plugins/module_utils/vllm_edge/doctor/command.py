# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge doctor`: runs every check and prints the findings."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from ..facts.model import Expectation
from ..facts.reader import Reader
from ..facts.serving import read_deep
from ..paths import HostPaths
from ..switch.command import refuse_without_write_access
from ..text import print_result
from .registry import examine
from .render import render
from .support import write_report


def run_doctor(
    paths: HostPaths,
    *,
    output: str,
    support_report: str | None = None,
    deep: bool = False,
    expected: str | None = None,
    reader: Reader | None = None,
) -> int:
    """Run `vllm-edge doctor`. `expected` is an Expectation of the inventory as JSON.

    Returns the exit status: 0 all is well, 1 warnings, 2 failures, or the support report could not be written.
    """
    if deep and (refused := refuse_without_write_access(paths, "doctor --deep")):
        return refused
    reader = reader or Reader(paths=paths)
    expectation = Expectation(**json.loads(expected or "{}"))
    facts = reader.read(expectation)
    document = examine(replace(facts, deep=read_deep(paths, expectation)) if deep else facts)
    if support_report:
        try:
            write_report(Path(support_report), reader, document)
        except OSError as error:
            print(f"The support report {support_report} cannot be written: {error}", file=sys.stderr)
            return 2
        print(f"Support report: {support_report}. Read it before you give it away.", file=sys.stderr)
    print_result(output, document, render(document))
    return int(document["exit_status"])
