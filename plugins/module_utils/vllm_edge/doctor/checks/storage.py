# SPDX-License-Identifier: Apache-2.0
"""The checks of free disk space."""

from __future__ import annotations

from functools import partial

from ...facts.model import Facts
from ...system.apt import BOOT_BYTES
from ...system.host import Unread
from ...system.space import STATE_BYTES, find_shortage
from ..contract import NotKnown, Verdict, fail, good, warn

# Thresholds that this project chose: below the first apt, Docker and the journal begin to fail, below the second an
# update may not fit.
SPACE_FAIL_BYTES = 1024**3
SPACE_WARN_BYTES = 5 * 1024**3
INODES_WARN = 10_000


def judge_space(what: str, hint: str, facts: Facts, least_bytes: int | None = None) -> Verdict:
    """Judge the file system whose Space is of `what`. `hint` is appended to the remedy.

    With `least_bytes`, what is written there is small, and only less than that is a failure.
    """
    for space in facts.spaces:
        if isinstance(space, Unread) or space.what != what:
            continue
        wrong = find_shortage(space, SPACE_FAIL_BYTES if least_bytes is None else least_bytes)
        told = f"{space.path} has {space.free_bytes // 1024**2} MiB free"
        remedy = f"'du -xh --max-depth=2 {space.path} | sort -h | tail' shows where it went{hint}."
        if wrong:
            return fail(wrong, remedy)
        if least_bytes is not None:
            return good(told)
        if space.free_inodes is not None and space.free_inodes < INODES_WARN:
            return warn(f"{space.path} has {space.free_inodes} inodes left", remedy)
        return warn(told, remedy) if space.free_bytes < SPACE_WARN_BYTES else good(told)
    raise NotKnown(next((space.why for space in facts.spaces if isinstance(space, Unread)), "nobody looked"))


check_root = partial(judge_space, "/", "")
check_images = partial(judge_space, "images", "; 'docker system df' says what images take")
check_data = partial(judge_space, "weights and caches", "; vllm_edge_host_data_directory names another place")
check_state = partial(judge_space, "state", "; switches and records need it", least_bytes=STATE_BYTES)
check_boot = partial(judge_space, "boot", "; 'apt-get autoremove --purge' removes old kernels", least_bytes=BOOT_BYTES)
