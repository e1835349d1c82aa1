# SPDX-License-Identifier: Apache-2.0
"""Processes of this host: whose they are, what they run, how one is ended."""

from __future__ import annotations

import os
import pwd
import select
import signal
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")
KILLED_S = 10.0
"""How long the kernel gets to end a process after SIGKILL."""


def uid_of(pid: int) -> int | None:
    """The user that a process runs as; None when it is gone."""
    try:
        for line in (PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def command_of(pid: int) -> str:
    """A process's command line, as far as it helps to know it again."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return "ended"
    words = " ".join(raw.replace(b"\0", b" ").decode("utf-8", "replace").split())
    try:
        text = words or f"[{(PROC / str(pid) / 'comm').read_text(encoding='utf-8', errors='replace').strip()}]"
    except OSError:
        text = "ended"
    return text if len(text) <= 80 else text[:77] + "..."


def user_name(uid: int | None) -> str:
    if uid is None:
        return "unknown"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def kill(pid: int, still_ours: Callable[[int], bool]) -> bool:
    """Ends one process; True when it is gone. By pidfd, so that a number that was given anew is never hit."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    try:
        # Asked again now that the descriptor holds the process: before, another one could have got its number.
        if not still_ours(pid):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(KILLED_S * 1000))
    except ProcessLookupError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
