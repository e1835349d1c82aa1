# SPDX-License-Identifier: Apache-2.0
"""Processes of this host: their user, their command line, and how to kill one safely."""

from __future__ import annotations

import os
import pwd
import re
import select
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from ..names import ENGINE_USER

PROC = Path("/proc")
KILLED_S = 10.0
"""Seconds that the kernel gets to end a process after SIGKILL."""


def uid_of(pid: int) -> int | None:
    """Return the real user id of the process; None if it has ended or is hidden."""
    try:
        text = (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^Uid:\s+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


def is_hidden(pid: int) -> bool:
    """Return whether a process of which /proc shows nothing is there: its option hidepid hides those of others."""
    if (PROC / str(pid)).exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def command_of(pid: int) -> str:
    """Return the command line, cut to 80 characters.

    "[name]" for a kernel thread, "ended" if the process is gone, "hidden" if /proc does not show it.
    """
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return "hidden" if is_hidden(pid) else "ended"
    words = " ".join(raw.replace(b"\0", b" ").decode("utf-8", "replace").split())
    try:
        text = words or f"[{(PROC / str(pid) / 'comm').read_text(encoding='utf-8', errors='replace').strip()}]"
    except OSError:
        text = "ended"
    return text if len(text) <= 80 else text[:77] + "..."


def get_user_name(uid: int | None) -> str:
    """Return the user's name, the number if it has no name, or "unknown" for None."""
    if uid is None:
        return "unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def engine_uid() -> int | None:
    try:
        return pwd.getpwnam(ENGINE_USER).pw_uid
    except KeyError:
        return None


def end_process(
    pid: int, signals: Sequence[tuple[int, float]], is_still_meant: Callable[[int], bool] = lambda _: True
) -> bool:
    """Send signals to one process until it has ended, through a pidfd: a process that gets the pid later is never hit.

    `signals` are each a signal and the seconds to wait for the end of the process after it. `is_still_meant` is called
    once the pidfd is open; False means that the pid now belongs to another process. Returns whether the process is
    gone: False if it may not be signalled or was still there after the last wait.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        # Check again now that the descriptor pins the process: before that, another process could have received its
        # pid.
        if not is_still_meant(pid):
            return True
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        for number, patience_s in signals:
            signal.pidfd_send_signal(descriptor, number)
            if poll.poll(patience_s * 1000):
                return True
        return False
    except ProcessLookupError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def kill(pid: int, still_ours: Callable[[int], bool]) -> bool:
    return end_process(pid, [(signal.SIGKILL, KILLED_S)], still_ours)
