# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge doctor`: runs every check and prints the findings."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from .. import __version__
from ..engine.config import sum_budgets
from ..facts.model import Expectation
from ..facts.reader import Reader
from ..facts.serving import ask_gpus, load_configs, read_deep
from ..paths import HostPaths
from ..switch.command import refuse_without_write_access
from ..system.files import name_errors
from ..text import print_result
from .publish import build
from .registry import examine
from .render import render
from .support import write_report


def run_doctor(
    paths: HostPaths,
    *,
    output: str,
    support_report: str | None = None,
    publish: bool = False,
    deep: bool = False,
    expected: str | None = None,
    reader: Reader | None = None,
) -> int:
    """Run `vllm-edge doctor`. `expected` is an Expectation of the inventory as JSON; with `publish` the support report
    has only what `doctor.publish` allows.

    Returns the exit status: 0 all is well, 1 warnings, 2 failures, or the support report could not be written.
    """
    if publish and not support_report:
        print("--publish: it is not said where to. Write --support-report figures.json --publish.", file=sys.stderr)
        return 2
    if deep and (refused := refuse_without_write_access(paths, "doctor --deep")):
        return refused
    reader = reader or Reader(paths=paths)
    expectation = Expectation(**json.loads(expected or "{}"))
    facts = reader.read(expectation)
    document = examine(replace(facts, deep=read_deep(paths, expectation)) if deep else facts)
    if support_report:
        try:
            if publish and not _write_figures(Path(support_report), reader):
                return 2
            if not publish:
                write_report(Path(support_report), reader, document)
        except OSError as error:
            print(f"The support report {support_report} cannot be written: {error}", file=sys.stderr)
            return 2
        print(f"Support report: {support_report}. Read it before you give it away.", file=sys.stderr)
    print_result(output, document, render(document))
    return int(document["exit_status"])


def _write_figures(path: Path, reader: Reader) -> bool:
    """Write what can be published of the host's engines, and say why others are left out. False if it is nothing."""
    boards, problem = ask_gpus(sum_budgets(load_configs(reader.paths)[0]), reader.paths)
    engines, left = build(reader.paths, boards, reader.plain("sys/module/nvidia/version"))
    for sentence in [problem, *left] if problem else left:
        print(sentence, file=sys.stderr)
    if not engines:
        print(f"Nothing was written into {path}: no engine of this host can be published.", file=sys.stderr)
        return False
    source = f"measured by vllm-edge {__version__} doctor --publish"
    with name_errors(path):
        path.write_text(json.dumps({"source": source, "engines": engines}, indent=2) + "\n", encoding="utf-8")
    return True
