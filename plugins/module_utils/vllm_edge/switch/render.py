# SPDX-License-Identifier: Apache-2.0
"""Tables and sentences of switches, for a terminal and the system journal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from ..generation.model import Generation
from ..names import SWITCH_UNIT
from ..text import WIDTH, cut_line, shorten, table, wrapped
from .model import ONWARD, Journal

Row = Mapping[str, Any]
PROFILE = 20
"""Columns for the number and profile of a generation."""
MOVED = {"keep": "kept", "stop": "stopped", "start": "started"}


def describe_generation(number: object, profile: object) -> str:
    """Return `generation 3 (nvfp4-tp2)`, or `nothing`: nothing was committed before the first switch."""
    return "nothing" if number is None else f"generation {number}{f' ({profile})' if profile else ''}"


def phase_words(phase: Row) -> str:
    return f"{'back: ' if phase.get('direction') == 'back' else ''}{phase['phase']}"


def render_phase(phase: Row) -> str:
    seconds = "..." if phase.get("seconds") is None else f"{phase['seconds']:.1f} s"
    failed = "FAILED: " if phase.get("outcome") == "failed" else ""
    return cut_line(
        f"{phase['began_s']:7.1f} s  {phase_words(phase):<15}  {seconds:>8}  {failed}{phase.get('detail') or ''}"
    ).rstrip()


def render_head(journal: Row) -> list[str]:
    """Return the first lines of a switch: where it goes, where it comes from and who asked."""
    former = f" from {describe_generation(journal['from_generation'], journal['from_profile'])}"
    if journal.get("purpose") == "calibration":
        former += ", a calibration that goes back by itself"
    if journal["from_generation"] == journal["generation"]:
        former = ", which is committed"
    return wrapped(
        f"switch to {describe_generation(journal['generation'], journal['profile'])}{former}, "
        f"asked by {journal['asked_by']}"
    )


def describe_moves(moves: Row, words: Mapping[str, str]) -> str:
    return "; ".join(f"{verb} {', '.join(moves[key])}" for key, verb in words.items() if moves.get(key))


def describe_reached(journal: Row) -> str:
    """Return which engines clients reach again before the commit or on the way back; empty if there is none."""
    forward = journal.get("direction") == "forward" and journal.get("phase") not in ONWARD
    provisional = journal.get("provisional") if forward else {}
    told = ", ".join(provisional or journal.get("restored") or ())
    return f"clients reach {told} again{', provisional until the commit' if provisional else ''}" if told else ""


def describe_provisional(journal: Journal) -> str:
    """Return a sentence, after a blank, about the engines that clients could reach before their generation was left."""
    told = ", ".join(f"{name} (from {at_s:.0f} s on)" for name, at_s in journal.provisional.items())
    return f" Clients could already reach {told}." if told else ""


def render_restarts(journal: Row) -> list[str]:
    return [line for text in journal.get("restarts") or () for line in wrapped(text)]


def render_downtime(downtime: Mapping[str, Row]) -> list[str]:
    """Return a table by served name: how long nothing answered, in how many gaps, and mostly in which phases."""
    rows = []
    for role, down in downtime.items():
        spent = sorted((down.get("phases") or {}).items(), key=lambda item: -item[1])
        gaps = down.get("gaps") or []
        open_end = ", not back" if any(gap.get("to_s") is None for gap in gaps) else ""
        mostly = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in spent[:3])
        rows.append([role, f"{down['seconds']:.1f} s", f"{len(gaps)}{open_end}", mostly or "-"])
    return [line[:WIDTH] for line in table(["role", "down", "gaps", "mostly in"], rows, frozenset({1}))]


def describe_result(result: object) -> str:
    return str(result).replace("_", " ") if result else "unfinished"


def render_result(journal: Row) -> list[str]:
    """Return how a switch ended, for somebody who saw its phases pass."""
    seconds = "" if journal.get("seconds") is None else f" after {journal['seconds']:.1f} s"
    message = f": {journal['message']}" if journal.get("message") else ""
    lines = wrapped(f"{describe_result(journal['result'])}{seconds}{message}")
    lines += wrapped(describe_moves(journal, MOVED))
    for warning in journal.get("warnings") or []:
        lines += wrapped(f"warning: {warning}")
    if journal.get("downtime"):
        lines += ["", *render_downtime(journal["downtime"])]
    return lines


def render_switch(journal: Row) -> list[str]:
    """Return a whole switch: what moved, the phases with their seconds, and the downtime by served name."""
    lines = [*render_head(journal), *render_restarts(journal), *render_result({**journal, "downtime": {}})]
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
        lines += ["", *render_downtime(journal["downtime"])]
    return lines


def find_longest(switch: Row) -> tuple[str | None, float]:
    """Return the served name that was not served for the longest time, and its seconds."""
    return max((switch.get("downtime") or {}).items(), key=lambda item: item[1], default=(None, 0.0))


def summarize_switch(switch: Row) -> list[str]:
    """Return a former switch as one sentence, as `status` shows it."""
    former = describe_generation(switch["from_generation"], switch["from_profile"])
    role, down = find_longest(switch)
    seconds = "" if switch.get("seconds") is None else f" after {switch['seconds']:.0f} s"
    unserved = "" if role is None else f", {role} not served for {down:.0f} s"
    latter = describe_generation(switch["generation"], switch["profile"])
    return wrapped(
        f"last switch {switch['started_at']}: from {former} to {latter}, "
        f"{describe_result(switch['result'])}{seconds}{unserved}"
    )


def render_switches(switches: Sequence[Row]) -> list[str]:
    """Return a table of switches with one line each, as `status` shows it."""
    rows = []
    for switch in switches:
        role, down = find_longest(switch)
        former = "-" if switch["from_generation"] is None else f"{switch['from_generation']} {switch['from_profile']}"
        rows.append(
            [
                str(switch["started_at"]),
                shorten(former, PROFILE),
                shorten(f"{switch['generation']} {switch['profile']}", PROFILE),
                describe_result(switch["result"]),
                "-" if switch.get("seconds") is None else f"{switch['seconds']:.0f} s",
                "-" if role is None else f"{down:.0f} s",
                shorten(str(switch["origin"]), 9),
            ]
        )
    return table(["switch", "from", "to", "result", "took", "down", "chosen by"], rows, frozenset({4, 5}))


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line of progress. Errors are ignored: a closed pipe must not end a switch."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=stream, flush=True)


def complain(text: str) -> None:
    say(text, sys.stderr)


def explain_unexpected(what: str, error: Exception) -> str:
    return (
        f"{what} met an unexpected error: {type(error).__name__}: {error}. That is a mistake of this program; "
        f"'journalctl -u {SWITCH_UNIT}' has the traceback"
    )


def to_sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def name_generation(generation: Generation) -> str:
    return describe_generation(generation.number, generation.profile)


def describe_over_budget(generation: Generation, journal: Journal, words: str) -> str:
    return f"{capitalize(name_generation(generation))} {words} over its budget. {' '.join(journal.over_budget)}"


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def describe_route(journal: Journal) -> str:
    """Return the subject of a switch's message: `Switching from generation 3 (nvfp4-tp2) to generation 4
    (bf16-tp4)`."""
    to = describe_generation(journal.generation, journal.profile)
    if journal.purpose == "calibration":
        return f"The calibration of {to}"
    if journal.from_generation is None:
        return f"The first switch of this host, to {to},"
    if journal.from_generation == journal.generation:
        return f"Repairing {to}"
    return f"Switching from {describe_generation(journal.from_generation, journal.from_profile)} to {to}"
