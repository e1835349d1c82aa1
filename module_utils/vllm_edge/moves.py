# SPDX-License-Identifier: Apache-2.0
"""Which engines a switch touches, and which keep their process: decided from what is seen, without looking."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .switching import FileChange, Moves


@dataclass(frozen=True)
class SeenEngine:
    """An engine of ours as systemd and Docker show it."""

    name: str
    active_state: str
    """systemd's ActiveState: `active`, `activating`, `deactivating`, `failed`, `inactive`, ..."""
    sub_state: str
    """systemd's SubState: `running`, `start`, `auto-restart`, ..."""
    running_input_hash: str | None
    """Label of the container that runs; None without one."""


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
