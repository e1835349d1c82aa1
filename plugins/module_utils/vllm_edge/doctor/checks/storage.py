# SPDX-License-Identifier: Apache-2.0
"""The checks of free disk space."""

from __future__ import annotations

from functools import partial

from ...facts.model import Facts
from ...system.host import Unread
from ...system.space import MIB, STEPS, Space, find_shortage, tell_use
from ..contract import NotKnown, Verdict, fail, good, warn

WARN_FACTOR = 5
"""Our choice: where a GiB or more has to stay free, less than so many times that, and fewer than 10,000 inodes, may not
be enough for an update."""


def judge_steps(steps: tuple[str, ...], facts: Facts) -> Verdict:
    """Judge the file systems that these steps write to; the worst one decides."""
    spaces: list[Space] = []
    for found in map(facts.spaces.__getitem__, steps):
        if isinstance(found, Unread):
            raise NotKnown(found.why)
        spaces += found
    for space in spaces:
        if wrong := find_shortage(space):
            return fail(wrong, _tell_remedy(space))
    for space in (one for one in spaces if one.kept_bytes >= 1024 * MIB):
        if space.free_inodes is not None and space.free_inodes < 10_000:
            return warn(f"{space.where} has {space.free_inodes} inodes left", _tell_remedy(space))
        if space.free_bytes < WARN_FACTOR * space.kept_bytes:
            return warn(f"{space.where} has {space.free_bytes // MIB} MiB free", _tell_remedy(space))
    free = {space.mount: space.free_bytes // MIB for space in spaces}
    return good(", ".join(f"{mount} has {mib} MiB free" for mount, mib in free.items()))


def _tell_remedy(space: Space) -> str:
    return f"{tell_use(space.mount)}. {STEPS[space.step].hint}"


check_root = partial(judge_steps, ("system", "packages"))
check_images = partial(judge_steps, ("image",))
check_data = partial(judge_steps, ("weights",))
check_state = partial(judge_steps, ("switch",))
check_boot = partial(judge_steps, ("initramfs",))
