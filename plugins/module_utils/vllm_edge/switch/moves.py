# SPDX-License-Identifier: Apache-2.0
"""Which engines a switch touches, and which keep their process: decided from what is seen, without looking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..generation.model import FileChange, SeenEngine
from .model import Moves

_UP = frozenset({"active", "reloading", "refreshing"})
_RESTING = frozenset({"inactive", "failed", "maintenance"})


def _waits_for_restart(engine: SeenEngine) -> bool:
    return engine.sub_state.startswith("auto-restart")


def _occupies(engine: SeenEngine) -> bool:
    """Whether it runs, will run, or has left a container behind: before its GPUs are used it has to be stopped."""
    return engine.active_state not in _RESTING or engine.running_input_hash is not None


def decide_moves(
    wanted: Mapping[str, str],
    seen: Iterable[SeenEngine],
    files: Iterable[FileChange],
    target: Iterable[str],
) -> Moves:
    """`wanted` is the input hash by engine. One that waits for a restart has failed: it is stopped and started."""
    keep: set[str] = set()
    wait: set[str] = set()
    stop: list[str] = []
    for engine in seen:
        as_wanted = engine.running_input_hash is not None and engine.running_input_hash == wanted.get(engine.name)
        if as_wanted and engine.active_state in _UP:
            keep.add(engine.name)
        elif as_wanted and engine.active_state == "activating" and not _waits_for_restart(engine):
            wait.add(engine.name)
        elif _occupies(engine):
            stop.append(engine.name)
    return Moves(
        keep=tuple(name for name in wanted if name in keep),
        stop=tuple(stop),
        start=tuple(name for name in wanted if name not in keep and name not in wait),
        wait=tuple(name for name in wanted if name in wait),
        files=tuple(files),
        target=tuple(target),
    )
