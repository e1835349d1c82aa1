# SPDX-License-Identifier: Apache-2.0
"""Former switches, and how far the running one is: `vllm-edge history`, `progress`, and what gateway clients meet."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..gateway.view import SwitchProgress
from ..generation import committed, store
from ..generation.model import GenerationError
from ..names import unit_name
from ..paths import HostPaths
from ..system.systemd import ask_units
from ..text import print_result, wrapped
from .journal import DAMAGED, explain_unreadable, history, holder, read_journal, to_json
from .model import HARMLESS, ONWARD, PHASES, Journal, Phase, Result
from .render import describe_reached, render_switches

HISTORY = 10
"""How many former switches the document has; the tables show the newest SHOWN of them."""

Json = dict[str, Any]

SHORT = (
    *("id", "started_at", "from_generation", "from_profile", "generation", "profile"),
    *("origin", "asked_by", "result", "seconds"),
)
TROUBLE = frozenset({Result.OVER_BUDGET, Result.REFUSED, Result.ROLLED_BACK, Result.FAILED})


def short(journal: Journal) -> Json:
    whole = to_json(journal)
    downtime = {role: downtime.seconds for role, downtime in journal.downtime.items()}
    return {key: whole[key] for key in SHORT} | {"downtime": downtime, "message": journal.message}


def count_seconds_since(stamp: str) -> float:
    """Return the seconds since a time such as `2026-11-21T16:40:00Z`, never less than 0; 0 if it cannot be read."""
    try:
        then = datetime.fromisoformat(stamp)
    except ValueError:
        return 0.0
    return max(0.0, (datetime.now(UTC) - then).total_seconds())


def describe_running(journal: Journal) -> Json:
    whole = to_json(journal)
    keys = ["generation", "profile", "purpose", "phase", "direction", "asked_by", "started_at"]
    keys += ["provisional", "restored"]
    return {key: whole[key] for key in keys} | {"seconds": round(count_seconds_since(journal.started_at), 1)}


def render_history(journals: Sequence[Journal]) -> list[str]:
    """Return a table of switches, and the messages of those that failed, were refused or were rolled back."""
    if not journals:
        return ["no switch was made on this host"]
    lines = render_switches([short(journal) for journal in journals])
    for journal in journals:
        if journal.result in TROUBLE and journal.message:
            lines += ["", *wrapped(f"{journal.started_at}: {journal.message}")]
    return lines


def _is_hidden(paths: HostPaths, command: str) -> bool:
    hidden = explain_unreadable(paths)
    if hidden is not None:
        print(f"{hidden}: 'sudo vllm-edge {command}'.", file=sys.stderr)
    return hidden is not None


def run_history(paths: HostPaths, *, output: str) -> int:
    if _is_hidden(paths, "history"):
        return 1
    journals = history(paths)
    print_result(output, [to_json(journal) for journal in journals], render_history(journals))
    return 0


def list_loading_engines(journal: Journal) -> list[str]:
    """Return what the engines that are loading in a switch report through systemd, one line each."""
    # Those that were stopped, too: they load where the switch goes back.
    units = {unit_name(name): name for name in dict.fromkeys((*journal.start, *journal.stop))}
    shown, _ = ask_units(list(units)) if units else ({}, None)
    return [
        f"{units[unit]}: {values.get('StatusText') or 'starting'}"
        for unit, values in shown.items()
        if unit in units and values.get("ActiveState") == "activating"
    ]


def run_progress(paths: HostPaths) -> int:
    if _is_hidden(paths, "progress"):
        return 1
    journal = holder(paths)
    if journal is None or not journal.generation:
        return 0  # nobody switches, or whoever holds the lock has not begun yet
    back = "going back, " if journal.direction == "back" else ""
    lasting = [record for record in journal.phases if record.outcome is None]
    seconds = f" for {count_seconds_since(lasting[-1].began_at):.0f} s" if lasting else ""
    print(f"generation {journal.generation} ({journal.profile}): {back}{journal.phase or 'beginning'}{seconds}")
    before = journal.phase is None or PHASES.index(journal.phase) < PHASES.index(Phase.START)
    reached = describe_reached(to_json(journal))
    for line in [
        *(journal.restarts if before else ()),
        *([reached] if reached else []),
        *list_loading_engines(journal),
    ]:
        print(line)
    return 0


def read_switches(paths: HostPaths) -> tuple[dict[str, Any], list[str]]:
    """Return the running switch, an unfinished one that was killed, and former ones, and what could not be read."""
    found: dict[str, Any] = {"switch": None, "unfinished_switch": None, "history": []}
    hidden = explain_unreadable(paths)
    if hidden is not None:
        return found, [hidden]
    try:
        running, last = holder(paths), read_journal(paths)
        if running is None and last is not None and last.result is None:
            running = holder(paths)  # a switch may have begun between the two reads
        found["history"] = [short(journal) for journal in history(paths, HISTORY)]
    except OSError as error:
        return found, [f"What is known of switches cannot be read: {error}"]
    if running is not None:
        found["switch"] = describe_running(running)
    elif last is not None and last.result is None:
        found["unfinished_switch"] = {**describe_running(last), "id": last.id, "message": last.message}
    return found, []


def list_verified(paths: HostPaths) -> list[int]:
    """Return the generations that a switch verified within their budgets, by the time of their last commit.

    The committed one is always the last of them. Hosts of before have them only in the history of switches. Raises
    GenerationError.
    """
    now = committed.committed(paths)
    ended = [
        journal for journal in reversed(history(paths)) if journal.result in (Result.COMMITTED, Result.OVER_BUDGET)
    ]
    over = {journal.generation: journal.result is Result.OVER_BUDGET for journal in ended}
    found = [journal.generation for journal in ended]
    if now is not None:
        found += [*now.verified, *filter(None, (now.previous_generation,)), now.generation]
        over[now.generation] = False
    return [number for number in dict.fromkeys(reversed(found)) if not over.get(number)][::-1]


def read_switch_progress(paths: HostPaths) -> SwitchProgress | None:
    """Return the switch that runs, or was killed; None if there is none.

    Engines are away from the phase `away` on. With the commit the new ones serve; on the way back, the old ones do with
    the phase `back`.
    """
    journal = read_journal(paths)
    if journal is None or journal.result is not None or journal.id == DAMAGED:
        return None
    begun = journal.phase is not None and (journal.direction == "back" or journal.phase not in HARMLESS)
    if not begun or journal.phase in ONWARD:
        return SwitchProgress(journal.phase)
    try:
        now = committed.committed(paths)
        if now is not None and now.generation == journal.generation != journal.from_generation:
            return SwitchProgress(journal.phase)
        wanted = store.load(paths, journal.generation) if journal.direction == "forward" else None
    except GenerationError:
        wanted = None
    back = (*journal.restored, *(journal.provisional if wanted is not None else ()))
    return SwitchProgress(journal.phase, journal.keep, wanted, back)
