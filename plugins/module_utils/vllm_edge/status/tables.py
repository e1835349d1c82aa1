# SPDX-License-Identifier: Apache-2.0
"""Tables of engines, served names and GPUs, for the status of a host and the report of a run.

These are pure functions. Sizes are MiB (2**20 bytes), lines have at most 100 columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ..gateway.describe import render_gateway
from ..planning.drift import COMPONENTS
from ..switch.render import render_switch, summarize_switch
from ..text import WIDTH, shorten, table, wrapped

BAR = 20
NAME = 24
"""Columns for the name of a GPU. A longer name is cut, so that the bar keeps its length."""

Row = Mapping[str, Any]


def mib(value: object) -> str:
    """Return `20,664`, or `?` for a value that is not known, which is not the same as 0."""
    return f"{value:,}" if isinstance(value, int) else "?"


def render_engine_table(heading: str, engines: Sequence[Row]) -> list[str]:
    """Return a line for each engine, which the key `heading` (`unit` or `engine`) names, and notes below it."""
    rows = [
        [
            str(engine[heading]).removesuffix(".service"),
            f"{engine['model']} {engine['precision']}",
            str(engine["tensor_parallel_size"]),
            ",".join(str(slot) for slot in engine["slots"]),
            str(engine.get("port") or "-"),
            str(engine["state"]),
            "-" if engine.get("load_seconds") is None else f"{engine['load_seconds']:.0f} s",
            str(engine.get("since") or "-"),
        ]
        for engine in engines
    ]
    headings = [heading, "model", "TP", "GPUs", "port", "state", "load", "since"]
    return [*table(headings, rows, frozenset({2, 4, 6})), *render_engine_notes(engines)]


ALLOWS_PEERS = {"the IOMMU": "iommu=pt and a reboot", "Access Control Services": "turning these off in the firmware"}
"""What would allow peer-to-peer, by the beginning of a reason of `gpu.topology`."""


def render_engine_notes(engines: Sequence[Row]) -> list[str]:
    """Return why peer-to-peer is off for engines over several GPUs, and what would allow it; then accepted risks, and
    what vLLM warned of at the start."""
    lines = []
    for engine in engines:
        reasons = engine.get("peer_to_peer_off") or []
        remedies = [words for start, words in ALLOWS_PEERS.items() if any(text.startswith(start) for text in reasons)]
        allowed = f"; {' and '.join(remedies)} would allow it, which is faster" if remedies else ""
        if reasons:
            lines += wrapped(f"{engine['engine']}: peer-to-peer is off: {'; '.join(reasons)}{allowed}.")
    for engine in engines:
        if risks := engine.get("accept_risk"):
            lines += wrapped(f"{engine['engine']}: accepted risks: {', '.join(map(str, risks))}.")
    for engine in engines:
        for warning in engine.get("start_warnings") or []:
            lines += wrapped(f"{engine['engine']}: {warning}")
    return lines


def describe_checks(asked: Row) -> str:
    checks = asked.get("checks") or []
    if not checks:
        return "ok" if asked["ok"] else "FAILED"
    passed = sum(check["outcome"] == "passed" for check in checks)
    return f"{'' if asked['ok'] else 'FAILED '}{passed} of {len(checks)}"


def render_check_notes(asked: Sequence[Row]) -> list[str]:
    """Return a note for each check that did not pass; served names with the same note share it."""
    said: dict[tuple[str, str, str], list[str]] = {}
    names = Counter(row["served_name"] for row in asked)
    for row in asked:
        name = f"{row['served_name']} ({row['engine']})" if names[row["served_name"]] > 1 else str(row["served_name"])
        for check in row.get("checks") or []:
            if check["outcome"] != "passed":
                words = str(check["outcome"]).replace("_", " ")
                said.setdefault((words, str(check["check"]), str(check.get("detail") or "")), []).append(name)
        if not row["ok"] and row.get("error"):
            said.setdefault(("FAILED", "", str(row["error"])), []).append(name)
    lines = []
    for (words, check, detail), told in said.items():
        what = f"{check} {words}".strip()
        lines += wrapped(f"{', '.join(told)}: {what}{': ' if detail else ''}{shorten(detail, 400)}")
    return lines


def render_canary_notes(asked: Sequence[Row]) -> list[str]:
    """Return when each engine passed the full canary, and which engines were asked only for one token now."""
    engines = {str(row["engine"]): row for row in asked if row.get("passed_at")}
    since = [row for row in engines.values() if row.get("token_s") is not None]
    told = ", ".join(f"{name} at {row['passed_at']}" for name, row in engines.items())
    lines = wrapped(f"The full canary was passed by {told}.") if told else []
    if since:
        names = ", ".join(str(row["engine"]) for row in since)
        seconds = max(float(row["token_s"]) for row in since)
        lines += wrapped(
            f"Where that container runs since ({names}) this run asked for one token, which took up to "
            f"{seconds:.2f} s; playbooks/verify.yml asks all."
        )
    return lines


def render_role_table(asked: Sequence[Row]) -> list[str]:
    """Return a table with one line for each served name, and notes below it."""
    rows = [
        [
            str(row["served_name"]),
            str(row["engine"]),
            str(row.get("port") or "-"),
            describe_checks(row),
            "-" if row.get("seconds") is None else f"{row['seconds']:.2f} s",
            str(row.get("completion") or row.get("error") or ""),
        ]
        for row in asked
    ]
    headings = ["served name", "engine", "port", "checks", "time", "completion"]
    room = WIDTH - sum(max(len(row[column]) for row in [headings, *rows]) + 2 for column in range(5))
    rows = [[*row[:5], shorten(row[5], max(len("completion"), room))] for row in rows]
    return [*table(headings, rows, frozenset({2, 4})), *render_check_notes(asked), *render_canary_notes(asked)]


def bar(used_mib: int, budget_mib: int, total_mib: int) -> str:
    """Return a bar of a GPU to scale: `#` used, `.` free within the budget, `|` the budget, then spaces."""
    scale = BAR / total_mib
    used, budget = min(BAR, round(used_mib * scale)), min(BAR - 1, round(budget_mib * scale))
    cells = ["#" if cell < used else "." if cell < budget else " " for cell in range(BAR)]
    if budget_mib:
        cells[budget] = "|"
    return "[" + "".join(cells) + "]"


def verdict(gpu: Row) -> str:
    if gpu.get("within_budget") is None:
        return "unknown"
    if not gpu["within_budget"]:
        return "OVER"
    return "within" if gpu["budget_mib"] else "free"


def render_gpu_table(gpus: Sequence[Row]) -> list[str]:
    """Return a table with one line for each GPU, a bar to scale, and totals."""
    rows = [
        [
            str(gpu["index"]),
            shorten(str(gpu["name"]), NAME),
            mib(gpu["used_mib"]),
            mib(gpu.get("budget_mib")),
            mib(gpu.get("foreign_mib")),
            mib(gpu["total_mib"]),
            verdict(gpu),
            bar(int(gpu["used_mib"]), int(gpu.get("budget_mib") or 0), int(gpu["total_mib"])),
        ]
        for gpu in gpus
    ]
    if len(gpus) > 1:
        sums = []
        for key in ("used_mib", "budget_mib", "foreign_mib", "total_mib"):
            values = [gpu.get(key) for gpu in gpus]
            sums.append(mib(None if None in values else sum(int(value or 0) for value in values)))
        rows.append(["", f"{len(gpus)} GPUs", *sums, "", ""])
    return table(
        ["GPU", "name", "used", "budget", "foreign", "total MiB", "verdict", ""], rows, frozenset({0, 2, 3, 4, 5})
    )


def render_drift_table(rows: Sequence[Row], gpus: Sequence[Row]) -> list[str]:
    """Return a line for each row of `planning.drift.compare`."""
    index = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    cells = []
    for row in rows:
        measured = row["measured"]
        far = "-" if measured is None else f"{measured - row['planned']:+,.0f}"
        within = {True: "within", False: "DRIFT", None: "not told"}[row["within"]]
        name = f"GPU {index[row['what']]}" if row["what"] in index else str(row["what"])
        cells.append(
            [
                shorten(name, NAME),
                COMPONENTS[row["component"]].words,
                f"{row['planned']:,.0f}",
                "?" if measured is None else f"{measured:,.0f}",
                far,
                f"{row['tolerance']:,.0f}",
                within,
            ]
        )
    headings = ["plan against measurement", "MiB", "planned", "measured", "drift", "tolerated", ""]
    return table(headings, cells, frozenset({2, 3, 4, 5}))


def render_problems(document: Row) -> list[str]:
    problems = document.get("problems") or ()
    return [*(["", "Problems:"] if problems else ()), *(line for text in problems for line in wrapped(str(text), "  "))]


def render_warnings(document: Row) -> list[list[str]]:
    warnings = [*(document.get("memory_warnings") or []), *(document.get("load_warnings") or [])]
    return [wrapped(f"Warning: {warning}") for warning in warnings]


def render(report: Mapping[str, Any]) -> list[str]:
    """Return the report of a run as lines.

    Args:
        report: `host`, `profile` and `generation`; `engines` of the filter `report_engines`; `completions`,
            results of `vllm-edge canary`; `gpus` of the module vram_budget; `problems`, `drift`, `memory_warnings`,
            `load_warnings`, `gateway` and `last_switch` of `vllm-edge status --format json`; `switch`, the journal of
            this run's switch, if any; `overrides`, why the plan rejected engines that serve; `versions` by name;
            `completed`, lines about what the plan added to engines; `pins`, lines for the inventory.
    """
    lines = [
        f"{report['host']}: profile {report['profile']}, generation {report['generation']}",
        "",
        *render_engine_table("unit", report["engines"]),
        *report.get("completed", ()),
        "",
    ]
    if report["completions"]:
        ports = {engine.get("engine"): engine.get("port") for engine in report["engines"]}
        lines += [*render_role_table([{"port": ports.get(row["engine"]), **row} for row in report["completions"]]), ""]
    if report.get("gateway"):
        lines += [*render_gateway(report["gateway"]), ""]
    lines += render_gpu_table(report["gpus"])
    if report.get("drift"):
        lines += ["", *render_drift_table(report["drift"], report["gpus"])]
    for warning in render_warnings(report):
        lines += warning
    for override in report.get("overrides") or []:
        lines += wrapped(f"plan_override: {override}")
    if report.get("switch"):
        lines += ["", *render_switch(report["switch"])]
    elif report.get("last_switch"):
        lines += ["", *summarize_switch(report["last_switch"])]
    lines += ["", *[f"{name}: {value}" for name, value in report["versions"].items()]]
    lines += render_problems(report)
    if report["pins"]:
        lines += ["", "Recorded at first use; put into the inventory to pin:", *report["pins"]]
    return [line[:WIDTH] for line in lines]
