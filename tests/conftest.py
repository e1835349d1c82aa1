# SPDX-License-Identifier: Apache-2.0
"""What every test needs: module_utils under ansible's name, the lab importable as `lab`, tables in the summary."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import ansible.module_utils
import pytest

ROOT = Path(__file__).resolve().parent.parent

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
if str(ROOT / "plugins" / "module_utils") not in ansible.module_utils.__path__:
    ansible.module_utils.__path__.append(str(ROOT / "plugins" / "module_utils"))

WIDTHS = (22, 48, 76)
"""Columns of a table in the terminal's summary."""


def table_lines(cells: Sequence[str]) -> list[str]:
    """One row; the sentences after its first two cells stand one below the other in the last column."""
    wrap = functools.partial(textwrap.wrap, break_on_hyphens=False)
    columns = [wrap(cell, width) for cell, width in zip(cells[:2], WIDTHS[:2], strict=True)]
    columns.append([line for cell in cells[2:] for line in wrap(cell, WIDTHS[2], subsequent_indent="  ")])
    return [
        "  ".join(
            (column[row] if row < len(column) else "").ljust(width)
            for column, width in zip(columns, WIDTHS, strict=True)
        ).rstrip()
        for row in range(max(map(len, columns)))
    ]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that tests record, row by row, with `record_property(title, cells)`; none with -q."""
    if terminalreporter.verbosity < 0:
        return
    tables: dict[str, list[list[str]]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for title, cells in report.user_properties:
                if isinstance(cells, list):
                    tables.setdefault(title, []).append(cells)
    for title, rows in tables.items():
        terminalreporter.section(title)
        first = [cells[0] for cells in rows]
        # Workers of xdist end their tests in any order.
        for cells in sorted(rows, key=lambda cells: first.index(cells[0])):
            for line in table_lines(cells):
                terminalreporter.write_line(line)
