# SPDX-License-Identifier: Apache-2.0
"""The figures of the page as data: horizontal bars with marks, and the same values as a table.

Memory is in MiB, speed in tokens per second, time in seconds. A value that is not known is left out of a figure, and is
`unknown` in its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .data import PageData, list_of, mapping, newest_protocol, number

Row = Mapping[str, Any]

PARTS = {
    "weights": "weights",
    "overhead": "activations and overhead",
    "graphs": "CUDA graphs",
    "context": "CUDA context",
    "kv_cache": "KV cache",
}
"""Parts of a plan by the beginnings of their keys, in the order of the bars."""
PHASES = {
    "waiting-for-docker": "wait",
    "waiting-for-gpus": "wait",
    "waiting-to-try-again": "wait",
    "clearing": "wait",
    "starting-container": "container",
    "initializing": "initialize",
    "loading-weights": "weights",
    "compiling": "compile",
    "kv-cache": "kv_cache",
    "capturing-graphs": "graphs",
    "waiting-for-health": "health",
}
"""The colour of each phase of a load."""


@dataclass(frozen=True)
class Bar:
    start: float
    length: float
    colour: str


@dataclass(frozen=True)
class Line:
    """A line of a figure: its name, its bars and marks, and the value that is written at its end."""

    name: str
    bars: tuple[Bar, ...] = ()
    value: str = ""
    marks: tuple[tuple[float, str], ...] = ()
    """Places and colours."""
    heads: bool = False
    """Whether it begins a group."""


@dataclass(frozen=True)
class Figure:
    name: str
    title: str
    text: str
    """What it shows, for those who cannot see it."""
    unit: str
    lines: tuple[Line, ...]
    legend: tuple[tuple[str, str], ...]
    """Words and colours."""
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    right: frozenset[int] = field(default_factory=frozenset)


def amount(value: float | None, digits: int = 0) -> str:
    return "unknown" if value is None else f"{value:,.{digits}f}"


def plan_parts(engines: Sequence[Row]) -> dict[int, dict[str, float]]:
    """Return the MiB of each part of the plan by slot; engines that share a GPU are added up."""
    found: dict[int, dict[str, float]] = {}
    for engine in engines:
        for gpu in list_of(engine.get("gpus")):
            slot = number(gpu.get("slot"))
            if slot is None:
                continue
            parts = found.setdefault(int(slot), {})
            for part in PARTS:
                size = number(gpu.get(f"{part}_bytes"))
                if size is not None:
                    parts[part] = parts.get(part, 0.0) + size / 2**20
    return found


def draw_memory(data: PageData) -> Figure | None:
    plans = plan_parts(data.plan)
    lines: list[Line] = []
    rows: list[tuple[str, ...]] = []
    for gpu in data.gpus:
        slot, name = number(gpu.get("slot", gpu.get("index"))), f"GPU {gpu.get('index')}"
        parts = plans.get(int(slot), {}) if slot is not None else {}
        used, budget, total = (number(gpu.get(key)) for key in ("used_mib", "budget_mib", "total_mib"))
        marks = tuple((at, colour) for at, colour in ((budget, "budget"), (total, "total")) if at)
        bars, at = [], 0.0
        for part in PARTS:
            if parts.get(part):
                bars.append(Bar(at, parts[part], part))
                at += parts[part]
        planned = at if parts else None
        if parts:
            lines.append(Line(f"{name} plan", tuple(bars), f"{at:,.0f}", marks, heads=True))
        measured = []
        foreign = number(gpu.get("foreign_mib")) or 0.0
        if used is not None:
            measured = [Bar(0.0, max(0.0, used - foreign), "measured")]
            if foreign:
                measured.append(Bar(used - foreign, foreign, "foreign"))
        lines.append(Line(f"{name} measured", tuple(measured), amount(used), marks, heads=not parts))
        rows.append(
            (
                name,
                *[amount(parts.get(part)) for part in PARTS],
                *[amount(value) for value in (planned, used, number(gpu.get("foreign_mib")), budget, total)],
            )
        )
    if not rows:
        return None
    shown = {bar.colour for line in lines for bar in line.bars}
    legend = [(words, part) for part, words in PARTS.items() if part in shown]
    legend += [(words, key) for key, words in (("measured", "measured"), ("foreign", "of others")) if key in shown]
    full = ", ".join(
        f"GPU {gpu.get('index')} {row[7]} of {row[9]} MiB" for gpu, row in zip(data.gpus, rows, strict=True)
    )
    return Figure(
        "memory",
        "Memory of the GPUs in MiB",
        f"Bars of plan and measurement for each GPU. Used of the budget: {full}.",
        "MiB",
        tuple(lines),
        (*legend, ("budget", "budget"), ("all of the GPU", "total")),
        ("GPU", *PARTS.values(), "planned", "measured", "of others", "budget", "total"),
        tuple(rows),
        frozenset(range(1, 11)),
    )


def draw_speed(data: PageData) -> Figure | None:
    lines: list[Line] = []
    rows: list[tuple[str, ...]] = []
    names = [str(engine.get("engine")) for engine in data.engines]
    for name in names:
        plan = mapping(data.plan_of(name).get("decode_tok_s"))
        low, mid, high = (number(plan.get(key)) for key in ("low", "mid", "high"))
        if low is not None and high is not None:
            marks = () if mid is None else ((mid, "mid"),)
            words = f"{low:.1f} to {high:.1f}"
            lines.append(Line(f"{name}: plan", (Bar(low, high - low, "band"),), words, marks, heads=True))
            rows.append((name, "plan, one stream", "", f"{amount(low, 1)} / {amount(mid, 1)} / {amount(high, 1)}", ""))
        others = {number(row.get("output_tokens")): row for row in data.reference if row.get("engine") == name}
        for taken in newest_protocol(data.bench, name):
            tokens, speed = number(taken.get("output_tokens")), number(taken.get("tok_s"))
            told = others.pop(tokens, {})
            other = number(told.get("tok_s"))
            way = "through the gateway" if taken.get("through") == "gateway" else "asked directly"
            short = "gateway" if taken.get("through") == "gateway" else "direct"
            bars = () if speed is None else (Bar(0.0, speed, "measured" if short == "direct" else "gateway"),)
            marks = () if other is None else ((other, "reference"),)
            what = f"{amount(tokens)} tokens, {short}"
            lines.append(Line(what if lines else f"{name}: {what}", bars, amount(speed, 1), marks))
            source = "" if other is None else f"{amount(other, 1)} ({told.get('source')})"
            rows.append((name, f"measured, {way}", amount(tokens), amount(speed, 1), source))
        for tokens, told in others.items():
            other = number(told.get("tok_s"))
            if other is not None:
                what = f"{amount(tokens)} tokens, reference"
                lines.append(Line(what, (), f"{other:.1f}", ((other, "reference"),)))
                rows.append((name, "reference", amount(tokens), "", f"{amount(other, 1)} ({told.get('source')})"))
    if not rows:
        return None
    used = {bar.colour for line in lines for bar in line.bars} | {colour for line in lines for _, colour in line.marks}
    legend = (
        ("plan, low to high", "band"),
        ("plan, middle", "mid"),
        ("measured directly", "measured"),
        ("through the gateway", "gateway"),
        ("reference", "reference"),
    )
    return Figure(
        "speed",
        "Speed of one stream in tokens per second",
        "The planned band of each engine, the measurements of the newest benchmark, and reference values. "
        + "; ".join(f"{line.name} {line.value}" for line in lines)
        + ".",
        "tokens per second",
        tuple(lines),
        tuple((said, colour) for said, colour in legend if colour in used),
        ("engine", "what", "output tokens", "tok/s", "reference"),
        tuple(rows),
        frozenset({2, 3}),
    )


def draw_loads(data: PageData) -> Figure | None:
    lines: list[Line] = []
    rows: list[tuple[str, ...]] = []
    for engine in data.status_engines:
        phases = {
            str(name): seconds
            for name, value in mapping(engine.get("load_phases")).items()
            if (seconds := number(value)) is not None
        }
        total = number(engine.get("load_seconds"))
        bars, at = [], 0.0
        for name, seconds in phases.items():
            bars.append(Bar(at, seconds, PHASES.get(name, "wait")))
            at += seconds
            rows.append((str(engine.get("engine")), name, amount(seconds, 1)))
        load = mapping(data.plan_of(str(engine.get("engine"))).get("load_s"))
        marks = tuple((at_s, "ink") for at_s in [number(load.get("mid"))] if at_s is not None)
        if not bars and total is not None:
            bars = [Bar(0.0, total, "wait")]
        if total is not None:
            rows.append((str(engine.get("engine")), "whole load", amount(total, 1)))
        if bars:
            lines.append(Line(str(engine.get("engine")), tuple(bars), f"{amount(total, 1)} s", marks, heads=True))
    if not lines:
        return None
    shown = {bar.colour for line in lines for bar in line.bars}
    groups: dict[str, list[str]] = {}
    for name, colour in PHASES.items():
        if colour in shown:
            groups.setdefault(colour, []).append(name)
    words = {"wait": "waiting, or not recorded by phase"}
    legend = [(words.get(colour, names[0].replace("-", " ")), colour) for colour, names in groups.items()]
    if any(line.marks for line in lines):
        legend.append(("plan, middle", "ink"))
    longest = ", ".join(f"{row[0]} {row[2]} s" for row in rows if row[1] == "whole load")
    return Figure(
        "loads",
        "Last load of each engine in seconds",
        f"The phases of the last load of each engine. Whole loads: {longest or 'unknown'}.",
        "seconds",
        tuple(lines),
        tuple(legend),
        ("engine", "phase", "seconds"),
        tuple(rows),
        frozenset({2}),
    )


def draw_switch(data: PageData) -> Figure | None:
    switch = data.switch
    phases = list_of(switch.get("phases"))
    if not phases:
        return None
    lines: list[Line] = []
    rows: list[tuple[str, ...]] = []
    for phase in phases:
        began, seconds = number(phase.get("began_s")), number(phase.get("seconds"))
        back = phase.get("direction") == "back"
        failed = phase.get("outcome") == "failed"
        name = f"{'back: ' if back else ''}{phase.get('phase')}"
        bars = (
            () if began is None else (Bar(began, seconds or 0.0, "failed" if failed else "back" if back else "phase"),)
        )
        lines.append(Line(name, bars, f"{amount(seconds, 1)} s", heads=not lines))
        outcome = str(phase.get("outcome") or "not finished")
        rows.append((name, amount(began, 1), amount(seconds, 1), outcome, str(phase.get("detail") or "")))
    whole = number(switch.get("seconds"))
    gone = {role: down for role, down in mapping(switch.get("downtime")).items() if list_of(mapping(down).get("gaps"))}
    for position, (role, down) in enumerate(gone.items()):
        gaps, away = [], number(mapping(down).get("seconds"))
        for gap in list_of(mapping(down).get("gaps")):
            start, end = number(gap.get("from_s")), number(gap.get("to_s"))
            until = whole if end is None else end
            if start is not None and until is not None:
                gaps.append(Bar(start, max(0.0, until - start), "gap"))
            rows.append(
                (f"{role}: no answer", amount(start, 1), amount(away, 1), "not back" if end is None else "back", "")
            )
        lines.append(Line(str(role), tuple(gaps), f"{amount(away, 1)} s away", heads=position == 0))
    used = {bar.colour for line in lines for bar in line.bars}
    words = (("phase", "phase"), ("going back", "back"), ("failed", "failed"), ("no answer", "gap"))
    return Figure(
        "switch",
        "Last switch in seconds since it began",
        f"A timeline of {len(phases)} phases, {amount(whole, 1)} s in all. {switch.get('message') or ''}",
        "seconds",
        tuple(lines),
        tuple((said, colour) for said, colour in words if colour in used),
        ("phase", "began at s", "seconds", "outcome", "detail"),
        tuple(rows),
        frozenset({1, 2}),
    )


DRAWN = (draw_memory, draw_speed, draw_loads, draw_switch)


def list_figures(data: PageData) -> dict[str, Figure]:
    return {figure.name: figure for draw in DRAWN if (figure := draw(data)) is not None}
