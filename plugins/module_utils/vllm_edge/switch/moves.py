# SPDX-License-Identifier: Apache-2.0
"""The decision which engines a switch stops, starts and keeps, made from what was read of the host.

Nothing here reads or changes the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..generation.model import FileChange, SeenEngine
from .model import Moves

_UP = frozenset({"active", "reloading", "refreshing"})
_RESTING = frozenset({"inactive", "failed", "maintenance"})


def _waits_for_restart(engine: SeenEngine) -> bool:
    """Return whether systemd waits to restart the unit."""
    return engine.sub_state.startswith("auto-restart")


def _occupies(engine: SeenEngine) -> bool:
    """Return whether the engine runs, will run or left a container: it must be stopped before its GPUs are used."""
    return engine.active_state not in _RESTING or engine.running_input_hash is not None


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
        seen: the engines that the host shows.
        files: live files that differ; copied to the result.
        target: what is wrong with the target in systemd; copied to the result.
    """
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
