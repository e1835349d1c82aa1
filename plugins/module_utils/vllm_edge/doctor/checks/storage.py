# SPDX-License-Identifier: Apache-2.0
"""The check of free disk space."""

from __future__ import annotations

from collections.abc import Callable

from ...facts.model import Facts
from ...system.host import Unread
from ..contract import NotKnown, Verdict, fail, good, warn
from .helpers import GIB

# Thresholds that this project chose: below the first apt, Docker and the journal begin to fail, below the second an
# update may not fit.
SPACE_FAIL_BYTES = 1 * GIB
SPACE_WARN_BYTES = 5 * GIB
INODES_WARN = 10_000


def make_space_check(what: str, variable: str) -> Callable[[Facts], Verdict]:
    """Return the check of one file system.

    Args:
        what: the `what` of its Space.
        variable: a hint that is appended to the remedy, or empty.
    """

    def judge(facts: Facts) -> Verdict:
        for space in facts.spaces:
            if isinstance(space, Unread) or space.what != what:
                continue
            told = f"{space.path} has {space.free_bytes // 1024**2} MiB free"
            remedy = f"'du -xh --max-depth=2 {space.path} | sort -h | tail' shows where it went{variable}."
            if space.free_bytes < SPACE_FAIL_BYTES:
                return fail(told, remedy)
            if space.free_inodes is not None and space.free_inodes < INODES_WARN:
                return warn(f"{space.path} has {space.free_inodes} inodes left", remedy)
            if space.free_bytes < SPACE_WARN_BYTES:
                return warn(told, remedy)
            return good(told)
        raise NotKnown(next((space.why for space in facts.spaces if isinstance(space, Unread)), "nobody looked"))

    return judge
