# SPDX-License-Identifier: Apache-2.0
"""The decision which engines a switch stops, starts and keeps, made from what was read of the host.

Nothing here reads or changes the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from ..generation.model import FileChange, Generation, SeenEngine
from .model import Moves

_UP = frozenset({"active", "reloading", "refreshing"})
_RESTING = frozenset({"inactive", "failed", "maintenance"})


def _waits_for_restart(engine: SeenEngine) -> bool:
    return engine.sub_state.startswith("auto-restart")


def _occupies(engine: SeenEngine) -> bool:
    """Return whether the engine runs, will run or left a container: it must be stopped before its GPUs are used."""
    return engine.active_state not in _RESTING or engine.running_input_hash is not None


def _decide(engine: SeenEngine, wanted: str | None) -> Literal["keep", "wait", "stop"] | None:
    """Return what happens to an engine of which this input hash (or nothing) is wanted; None if it does not run."""
    if engine.running_input_hash is not None and engine.running_input_hash == wanted:
        if engine.active_state in _UP:
            return "keep"
        if engine.active_state == "activating" and not _waits_for_restart(engine):
            return "wait"
    return "stop" if _occupies(engine) else None


def explain_restarts(former: Generation | None, wanted: Generation, moves: Moves) -> tuple[str, ...]:
    """Return which engines stop and start again, and which of their options differ, engines with the same together."""
    reasons: dict[str, list[str]] = {}
    for name in moves.start:
        if former is None or name not in moves.stop or former.hashes.get(name) in (None, wanted.hashes[name]):
            continue
        differ = {*former.engines[name].container} ^ {*wanted.engines[name].container}
        options = {
            word.removeprefix("--env=").partition("=")[0] if word.startswith("-") else "image, model or names"
            for word in differ
        }
        reasons.setdefault(", ".join(sorted(options)) or "its unit, its files or a time limit", []).append(name)
    return tuple(f"{', '.join(names)}: restart because of {why}" for why, names in reasons.items())


def decide_moves(
    wanted: Mapping[str, str],
    seen: Iterable[SeenEngine],
    files: Iterable[FileChange],
    target: Iterable[str],
) -> Moves:
    """Decide what has to change so that the host is as wanted.

    An engine that waits for a restart has failed: it is stopped and started.

    Args:
        wanted: input hash by name of engine.
        files, target: live files that differ, and what is wrong with the target in systemd; copied to the result.
    """
    found = {engine.name: _decide(engine, wanted.get(engine.name)) for engine in seen}

    def select(kind: str) -> tuple[str, ...]:
        return tuple(name for name in wanted if found.get(name) == kind)

    stop = tuple(name for name, kind in found.items() if kind == "stop")
    start = tuple(name for name in wanted if found.get(name) in (None, "stop"))
    return Moves(select("keep"), stop, start, select("wait"), tuple(files), tuple(target))
