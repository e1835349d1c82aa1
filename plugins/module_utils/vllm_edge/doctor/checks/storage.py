# SPDX-License-Identifier: Apache-2.0
"""The checks of free disk space."""

from __future__ import annotations

from functools import partial

from ...facts.model import Facts
from ...system.host import Unread
from ...system.space import MIB, STEPS, find_shortage
from ..contract import NotKnown, Verdict, fail, good, warn

WARN_FACTOR = 5
"""Our choice: where a GiB or more has to stay free, less than so many times that, and fewer than 10,000 inodes, may not
be enough for an update."""


def judge_step(step: str, facts: Facts) -> Verdict:
    """Judge the file systems that a step writes to; the worst one decides."""
    spaces = facts.spaces[step]
    if isinstance(spaces, Unread):
        raise NotKnown(spaces.why)
    shows = "'du -xh --max-depth=2 {} | sort -h | tail' shows where it went. " + STEPS[step].hint
    for space in spaces:
        if wrong := find_shortage(space):
            return fail(wrong, shows.format(space.mount))
    for space in (one for one in spaces if one.kept_bytes >= 1024 * MIB):
        if space.free_inodes is not None and space.free_inodes < 10_000:
            return warn(f"{space.where} has {space.free_inodes} inodes left", shows.format(space.mount))
        if space.free_bytes < WARN_FACTOR * space.kept_bytes:
            return warn(f"{space.where} has {space.free_bytes // MIB} MiB free", shows.format(space.mount))
    return good(", ".join(f"{space.where} has {space.free_bytes // MIB} MiB free" for space in spaces))


check_root = partial(judge_step, "system")
check_images = partial(judge_step, "image")
check_data = partial(judge_step, "weights")
check_state = partial(judge_step, "switch")
check_boot = partial(judge_step, "initramfs")
