# SPDX-License-Identifier: Apache-2.0
"""The report of a run: what serves, what it was asked, what each GPU holds. Pure; sizes in MiB (2**20 bytes)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 100
BAR = 20


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Aligned lines of a table; columns in `right` are aligned to the right."""
    cells = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return [line(cells[0]), "  ".join("-" * width for width in widths), *[line(row) for row in cells[1:]]]


def bar(used_mib: int, budget_mib: int, total_mib: int) -> str:
    """A bar of a GPU to scale: `#` used, `.` free within the budget, `|` the budget, spaces beyond it."""
    scale = BAR / total_mib
    used, budget = min(BAR, round(used_mib * scale)), min(BAR - 1, round(budget_mib * scale))
    cells = ["#" if cell < used else "." if cell < budget else " " for cell in range(BAR)]
    if budget_mib:
        cells[budget] = "|"
    return "[" + "".join(cells) + "]"


def engine_rows(engines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row for each engine."""
    return [
        [
            str(engine["unit"]),
            f"{engine['model']} {engine['precision']}",
            str(engine["tensor_parallel_size"]),
            ",".join(str(slot) for slot in engine["slots"]),
            str(engine["port"]),
            str(engine["state"]),
            "-" if engine.get("load_seconds") is None else f"{engine['load_seconds']:.0f} s",
        ]
        for engine in engines
    ]


def completion_rows(completions: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row for each served name that was asked for a completion."""
    return [
        [
            str(asked["served_name"]),
            str(asked["engine"]),
            f"{asked['seconds']:.2f} s" if asked.get("seconds") is not None else "-",
            "ok" if asked["ok"] else "FAILED",
            shorten(str(asked.get("completion") or asked.get("error") or ""), 48),
        ]
        for asked in completions
    ]


def gpu_rows(gpus: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row for each GPU: used, budget and total in MiB, and a bar to scale."""
    return [
        [
            str(gpu["index"]),
            str(gpu["name"]),
            str(gpu["used_mib"]),
            str(gpu["budget_mib"]),
            str(gpu["total_mib"]),
            "within" if gpu["within_budget"] else "OVER",
            bar(int(gpu["used_mib"]), int(gpu["budget_mib"]), int(gpu["total_mib"])),
        ]
        for gpu in gpus
    ]


def shorten(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, printable ones only."""
    line = "".join(character if character.isprintable() else " " for character in text).strip()
    return line if len(line) <= width else line[: width - 3] + "..."


def render(report: Mapping[str, Any]) -> list[str]:
    """The report as lines for a terminal, at most 100 columns."""
    lines = [
        f"{report['host']}: profile {report['profile']}, generation {report['generation']}",
        "",
        *table(["unit", "model", "TP", "GPUs", "port", "state", "load"], engine_rows(report["engines"])),
        "",
    ]
    if report["completions"]:
        lines += [
            *table(["served name", "engine", "time", "", "completion"], completion_rows(report["completions"])),
            "",
        ]
    lines += table(
        ["GPU", "name", "used", "budget", "total MiB", "verdict", ""], gpu_rows(report["gpus"]), frozenset({0, 2, 3, 4})
    )
    lines += ["", *[f"{name}: {value}" for name, value in report["versions"].items()]]
    if report["pins"]:
        lines += ["", "Recorded at first use; put into the inventory to pin:", *report["pins"]]
    return [line[:WIDTH] for line in lines]
