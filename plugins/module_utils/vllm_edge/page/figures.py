# SPDX-License-Identifier: Apache-2.0
"""The figures of the page as data: horizontal bars with marks, and the same values as a table.

Memory is in MiB, speed in tokens per second, time in seconds. A value that is not known is left out of a figure, and is
`unknown` in its table. Colours are those of `style.css`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .data import PageData, Row, list_of, mapping, number

PARTS = {"weights": "blue", "overhead": "violet", "graphs": "amber", "context": "gray", "kv_cache": "green"}
"""Colours of the parts of a plan by the beginnings of their keys, in the order of the bars."""
MEMORY = {
    "blue": "weights",
    "violet": "activations and overhead",
    "amber": "CUDA graphs",
    "gray": "CUDA context",
    "green": "KV cache",
    "slate": "measured",
    "bad": "of others",
    "red": "budget",
    "silver": "all of the GPU",
}
SPEED = {
    "pale": "plan, low to high",
    "link": "plan, middle",
    "slate": "measured directly",
    "steel": "through the gateway",
    "amber": "reference",
}
PHASES = {
    "starting-container": "gray",
    "initializing": "violet",
    "loading-weights": "blue",
    "compiling": "rust",
    "kv-cache": "green",
    "capturing-graphs": "amber",
    "waiting-for-health": "slate",
}
"""The colours of the phases of a load; any other phase is a wait."""
LOADS = {
    "silver": "waiting, or not recorded by phase",
    **{colour: phase.replace("-", " ") for phase, colour in PHASES.items()},
    "link": "plan, middle",
}
SWITCH = {"blue": "phase", "violet": "going back", "bad": "failed", "red": "no answer"}


@dataclass(frozen=True)
class Bar:
    start: float
    length: float
    colour: str


@dataclass(frozen=True)
class Line:
    """A line of a figure: its name, its bars and marks, and the value that is written at its end."""

    name: str
    bars: Sequence[Bar] = ()
    value: str = ""
    marks: Sequence[tuple[float, str]] = ()
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
    lines: Sequence[Line]
    words: Mapping[str, str]
    """What each colour means."""
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int] = field(default_factory=frozenset)
    """Columns of numbers."""

    @property
    def legend(self) -> dict[str, str]:
        """The words of the colours that are shown."""
        shown = {bar.colour for line in self.lines for bar in line.bars if bar.length}
        shown |= {colour for line in self.lines for _, colour in line.marks}
        return {colour: words for colour, words in self.words.items() if colour in shown}

    @property
    def reach(self) -> float:
        """The value at the right end."""
        ends = [bar.start + bar.length for line in self.lines for bar in line.bars]
        return max([*ends, *[place for line in self.lines for place, _ in line.marks]], default=0.0) or 1.0

    @property
    def ticks(self) -> list[float]:
        """At most five round values, from zero."""
        least = self.reach / 4
        scale = 10.0 ** math.floor(math.log10(least))
        step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= least)
        return [step * count for count in range(int(self.reach / step) + 1)]


def amount(value: object, digits: int = 0, sign: str = "") -> str:
    known = number(value)
    return "unknown" if known is None else f"{known:{sign},.{digits}f}"


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


def stack(parts: Iterable[tuple[str, float]]) -> list[Bar]:
    """Return a bar for each colour and length, one behind the other."""
    bars, at = [], 0.0
    for colour, length in parts:
        bars.append(Bar(at, length, colour))
        at += length
    return bars


def draw_memory(data: PageData) -> Figure | None:
    plans = plan_parts(data.plan)
    lines: list[Line] = []
    rows: list[list[str]] = []
    full: list[str] = []
    for gpu in data.gpus:
        slot, name = number(gpu.get("slot", gpu.get("index"))), f"GPU {gpu.get('index')}"
        parts = plans.get(int(slot), {}) if slot is not None else {}
        used, foreign, budget, total = (number(gpu.get(f"{key}_mib")) for key in ("used", "foreign", "budget", "total"))
        marks = [(at, colour) for at, colour in ((budget, "red"), (total, "silver")) if at]
        planned = sum(parts.values()) if parts else None
        if parts:
            lines.append(
                Line(
                    f"{name} plan",
                    stack((colour, parts[part]) for part, colour in PARTS.items() if part in parts),
                    amount(planned),
                    marks,
                    heads=True,
                )
            )
        others = foreign or 0.0
        bars = [] if used is None else stack([("slate", max(0.0, used - others)), ("bad", others)])
        lines.append(Line(f"{name} measured", bars, amount(used), marks, heads=not parts))
        values = [*[parts.get(part) for part in PARTS], planned, used, foreign, budget, total]
        rows.append([name, *[amount(value) for value in values]])
        full.append(f"{name} {amount(used)} of {amount(budget)} MiB")
    if not rows:
        return None
    return Figure(
        "memory",
        "Memory of the GPUs in MiB",
        f"Bars of plan and measurement for each GPU. Used of the budget: {', '.join(full)}.",
        "MiB",
        lines,
        MEMORY,
        ("GPU", *[MEMORY[colour] for colour in PARTS.values()], "planned", "measured", "of others", "budget", "total"),
        rows,
        frozenset(range(1, 11)),
    )


def draw_speed(data: PageData) -> Figure | None:
    lines: list[Line] = []
    rows: list[list[str]] = []
    for name in [str(engine.get("engine")) for engine in data.engines]:
        plan = mapping(data.plan_of(name).get("decode_tok_s"))
        low, mid, high = (number(plan.get(key)) for key in ("low", "mid", "high"))
        if low is not None and high is not None:
            marks = [] if mid is None else [(mid, "link")]
            band = [Bar(low, high - low, "pale")]
            lines.append(Line(f"{name}: plan", band, f"{low:.1f} to {high:.1f}", marks, heads=True))
            rows.append([name, "plan, one stream", "", f"{low:.1f} / {amount(mid, 1)} / {high:.1f}", ""])
        others = {number(row.get("output_tokens")): row for row in data.reference if row.get("engine") == name}
        for taken in data.protocol.get(name, []):
            tokens, speed = number(taken.get("output_tokens")), number(taken.get("tok_s"))
            told = others.pop(tokens, {})
            other = number(told.get("tok_s"))
            gateway = taken.get("through") == "gateway"
            bars = [] if speed is None else [Bar(0.0, speed, "steel" if gateway else "slate")]
            marks = [] if other is None else [(other, "amber")]
            what = f"{amount(tokens)} tokens, {'gateway' if gateway else 'direct'}"
            lines.append(Line(what if lines else f"{name}: {what}", bars, amount(speed, 1), marks))
            source = "" if other is None else f"{amount(other, 1)} ({told.get('source')})"
            way = "through the gateway" if gateway else "asked directly"
            rows.append([name, f"measured, {way}", amount(tokens), amount(speed, 1), source])
        for tokens, told in others.items():
            other = number(told.get("tok_s"))
            if other is not None:
                what = f"{amount(tokens)} tokens, reference"
                lines.append(Line(what, (), f"{other:.1f}", [(other, "amber")]))
                rows.append([name, "reference", amount(tokens), "", f"{other:.1f} ({told.get('source')})"])
    if not rows:
        return None
    return Figure(
        "speed",
        "Speed of one stream in tokens per second",
        "The planned band of each engine, the measurements of the newest benchmark, and reference values. "
        + "; ".join(f"{line.name} {line.value}" for line in lines)
        + ".",
        "tok/s",
        lines,
        SPEED,
        ("engine", "what", "output tokens", "tok/s", "reference"),
        rows,
        frozenset({2, 3}),
    )


def draw_loads(data: PageData) -> Figure | None:
    lines: list[Line] = []
    rows: list[list[str]] = []
    whole: list[str] = []
    for engine in data.status_engines:
        name, total = str(engine.get("engine")), number(engine.get("load_seconds"))
        recorded = {phase: number(seconds) for phase, seconds in mapping(engine.get("load_phases")).items()}
        phases = {phase: seconds for phase, seconds in recorded.items() if seconds is not None}
        bars = stack((PHASES.get(phase, "silver"), seconds) for phase, seconds in phases.items())
        rows += [[name, phase, amount(seconds, 1)] for phase, seconds in phases.items()]
        planned = number(mapping(data.plan_of(name).get("load_s")).get("mid"))
        if total is not None:
            bars = bars or [Bar(0.0, total, "silver")]
            rows.append([name, "whole load", amount(total, 1)])
            whole.append(f"{name} {amount(total, 1)} s")
        if bars:
            marks = [] if planned is None else [(planned, "link")]
            lines.append(Line(name, bars, f"{amount(total, 1)} s", marks, heads=True))
    if not lines:
        return None
    return Figure(
        "loads",
        "Last load of each engine in seconds",
        f"The phases of the last load of each engine. Whole loads: {', '.join(whole) or 'unknown'}.",
        "seconds",
        lines,
        LOADS,
        ("engine", "phase", "seconds"),
        rows,
        frozenset({2}),
    )


def draw_switch(data: PageData) -> Figure | None:
    switch = data.switch
    phases = list_of(switch.get("phases"))
    if not phases:
        return None
    lines: list[Line] = []
    rows: list[list[str]] = []
    for phase in phases:
        began, seconds = number(phase.get("began_s")), number(phase.get("seconds"))
        back = phase.get("direction") == "back"
        outcome = str(phase.get("outcome") or "not finished")
        name = f"{'back: ' if back else ''}{phase.get('phase')}"
        colour = "bad" if outcome == "failed" else "violet" if back else "blue"
        bars = [] if began is None else [Bar(began, seconds or 0.0, colour)]
        lines.append(Line(name, bars, f"{amount(seconds, 1)} s", heads=not lines))
        rows.append([name, amount(began, 1), amount(seconds, 1), outcome, str(phase.get("detail") or "")])
    whole = number(switch.get("seconds"))
    gone = {role: mapping(down) for role, down in mapping(switch.get("downtime")).items()}
    gone = {role: down for role, down in gone.items() if list_of(down.get("gaps"))}
    for position, (role, down) in enumerate(gone.items()):
        gaps, away = [], amount(down.get("seconds"), 1)
        for gap in list_of(down.get("gaps")):
            start, end = number(gap.get("from_s")), number(gap.get("to_s"))
            until = whole if end is None else end
            if start is not None and until is not None:
                gaps.append(Bar(start, max(0.0, until - start), "red"))
            rows.append([f"{role}: no answer", amount(start, 1), away, "not back" if end is None else "back", ""])
        lines.append(Line(str(role), gaps, f"{away} s away", heads=position == 0))
    return Figure(
        "switch",
        "Last switch in seconds since it began",
        f"A timeline of {len(phases)} phases, {amount(whole, 1)} s in all. {switch.get('message') or ''}",
        "seconds",
        lines,
        SWITCH,
        ("phase", "began at s", "seconds", "outcome", "detail"),
        rows,
        frozenset({1, 2}),
    )


def draw_figures(data: PageData) -> dict[str, Figure]:
    found = [draw(data) for draw in (draw_memory, draw_speed, draw_loads, draw_switch)]
    return {figure.name: figure for figure in found if figure is not None}
