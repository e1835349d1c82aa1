# SPDX-License-Identifier: Apache-2.0
"""What the journal of a switch that has not ended means for clients of the gateway."""

from __future__ import annotations

from ..gateway.view import Course
from ..generation import committed, store
from ..generation.model import GenerationError
from ..paths import HostPaths
from .journal import DAMAGED, read_journal
from .model import HARMLESS, ONWARD


def read_course(paths: HostPaths) -> Course | None:
    """Return the switch that runs, or was killed; None if there is none.

    Engines are away from the phase `away` on. With the commit the new ones serve; on the way back, the old ones do with
    the phase `back`.
    """
    journal = read_journal(paths)
    if journal is None or journal.result is not None or journal.id == DAMAGED:
        return None
    begun = journal.phase is not None and (journal.direction == "back" or journal.phase not in HARMLESS)
    if not begun or journal.phase in ONWARD:
        return Course(journal.phase)
    try:
        now = committed.committed(paths)
        if now is not None and now.generation == journal.generation != journal.from_generation:
            return Course(journal.phase)
        wanted = store.load(paths, journal.generation) if journal.direction == "forward" else None
    except GenerationError:
        wanted = None
    return Course(journal.phase, journal.keep, wanted)
