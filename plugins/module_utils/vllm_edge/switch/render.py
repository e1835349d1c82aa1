# SPDX-License-Identifier: Apache-2.0
"""Switches as tables and sentences for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..text import WIDTH, cut_line, shorten, table, wrapped

Row = Mapping[str, Any]
PROFILE = 20
"""Columns for number and profile of a generation."""
MOVED = {"kept": "keep", "stopped": "stop", "started": "start"}


def generation_words(number: object, profile: object) -> str:
    """`generation 3 (nvfp4-tp2)`; nothing was committed before the first one."""
    return "nothing" if number is None else f"generation {number}{f' ({profile})' if profile else ''}"


def phase_words(phase: Row) -> str:
    """`healthy`, and `back: healthy` of a rollback."""
    return f"{'back: ' if phase.get('direction') == 'back' else ''}{phase['phase']}"


def phase_line(phase: Row) -> str:
    """One phase as it passes: when it began, how long it took, what it says."""
    seconds = "..." if phase.get("seconds") is None else f"{phase['seconds']:.1f} s"
    failed = "FAILED: " if phase.get("outcome") == "failed" else ""
    return cut_line(
        f"{phase['began_s']:7.1f} s  {phase_words(phase):<15}  {seconds:>8}  {failed}{phase.get('detail') or ''}"
    ).rstrip()


def switch_head(journal: Row) -> list[str]:
    """Whereto, wherefrom, for whom."""
    former = f" from {generation_words(journal['from_generation'], journal['from_profile'])}"
    if journal["from_generation"] == journal["generation"]:
        former = ", which is committed"
    return wrapped(
        f"switch to {generation_words(journal['generation'], journal['profile'])}{former}, "
        f"asked by {journal['asked_by']}"
    )


def switch_moves(journal: Row) -> list[str]:
    """What was kept, stopped and started, on one line where it fits."""
    parts = [f"{words} {', '.join(journal[key])}" for words, key in MOVED.items() if journal.get(key)]
    return wrapped("; ".join(parts)) if parts else []


def downtime_table(downtime: Mapping[str, Row]) -> list[str]:
    """By role: how long nobody answered for it, in how many gaps, and in which phases most of that."""
    rows = []
    for role, down in downtime.items():
        spent = sorted((down.get("phases") or {}).items(), key=lambda item: -item[1])
        gaps = down.get("gaps") or []
        open_end = ", not back" if any(gap.get("to_s") is None for gap in gaps) else ""
        mostly = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in spent[:3])
        rows.append([role, f"{down['seconds']:.1f} s", f"{len(gaps)}{open_end}", mostly or "-"])
    return [line[:WIDTH] for line in table(["role", "down", "gaps", "mostly in"], rows, frozenset({1}))]


def result_words(result: object) -> str:
    """`rolled back`; a switch without a result runs, or was killed."""
    return str(result).replace("_", " ") if result else "unfinished"


def switch_result(journal: Row) -> list[str]:
    """How it ended, for somebody who saw its phases pass."""
    seconds = "" if journal.get("seconds") is None else f" after {journal['seconds']:.1f} s"
    message = f": {journal['message']}" if journal.get("message") else ""
    lines = [*wrapped(f"{result_words(journal['result'])}{seconds}{message}"), *switch_moves(journal)]
    for warning in journal.get("warnings") or []:
        lines += wrapped(f"warning: {warning}")
    if journal.get("downtime"):
        lines += ["", *downtime_table(journal["downtime"])]
    return lines


def switch_block(journal: Row) -> list[str]:
    """A whole switch: what moved, phases with their seconds, downtime by role."""
    lines = [*switch_head(journal), *switch_result({**journal, "downtime": {}})]
    rows = [
        [
            phase_words(phase),
            "-" if phase.get("seconds") is None else f"{phase['seconds']:.1f} s",
            f"{'FAILED: ' if phase.get('outcome') == 'failed' else ''}{phase.get('detail') or ''}",
        ]
        for phase in journal.get("phases") or []
    ]
    if rows:
        lines += ["", *[cut_line(line) for line in table(["phase", "time", "what"], rows, frozenset({1}))]]
    if journal.get("downtime"):
        lines += ["", *downtime_table(journal["downtime"])]
    return lines


def switch_line(switch: Row) -> list[str]:
    """A former switch in a sentence, as `status` has it."""
    former = generation_words(switch["from_generation"], switch["from_profile"])
    down: Mapping[str, float] = switch.get("downtime") or {}
    role = max(down, key=lambda name: down[name], default=None)
    seconds = "" if switch.get("seconds") is None else f" after {switch['seconds']:.0f} s"
    unserved = "" if role is None else f", {role} not served for {down[role]:.0f} s"
    latter = generation_words(switch["generation"], switch["profile"])
    return wrapped(
        f"last switch {switch['started_at']}: from {former} to {latter}, "
        f"{result_words(switch['result'])}{seconds}{unserved}"
    )


def switch_table(switches: Sequence[Row]) -> list[str]:
    """One line for each, as `status` has them."""
    rows = []
    for switch in switches:
        down = switch.get("downtime") or {}
        role = max(down, key=lambda name: float(down[name]), default=None)
        former = "-" if switch["from_generation"] is None else f"{switch['from_generation']} {switch['from_profile']}"
        rows.append(
            [
                str(switch["started_at"]),
                shorten(former, PROFILE),
                shorten(f"{switch['generation']} {switch['profile']}", PROFILE),
                result_words(switch["result"]),
                "-" if switch.get("seconds") is None else f"{switch['seconds']:.0f} s",
                "-" if role is None else f"{down[role]:.0f} s",
                shorten(str(switch["origin"]), 9),
            ]
        )
    return table(["switch", "from", "to", "result", "took", "down", "chosen by"], rows, frozenset({4, 5}))
