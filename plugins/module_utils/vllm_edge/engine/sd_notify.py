# SPDX-License-Identifier: Apache-2.0
"""systemd's notification protocol without libsystemd: readiness, status text, watchdog and longer timeouts."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from ..text import shorten

STATUS_LIMIT = 480
"""Characters of a status text."""


def read_watchdog_seconds(environ: Mapping[str, str], pid: int) -> float | None:
    """Return the unit's WatchdogSec in seconds; None if systemd does not watch this process."""
    usec = environ.get("WATCHDOG_USEC", "")
    watched = environ.get("WATCHDOG_PID", "")
    if not usec.isdigit() or int(usec) == 0:
        return None
    if watched and watched != str(pid):
        return None
    return int(usec) / 1_000_000


class Notifier:
    """Sends datagrams to NOTIFY_SOCKET; does nothing without that variable, so that the program can be run by hand."""

    def __init__(self, address: str | None) -> None:
        self._address = address or None

    def send(
        self,
        *,
        ready: bool = False,
        stopping: bool = False,
        watchdog: bool = False,
        status: str | None = None,
        extend_s: float | None = None,
    ) -> None:
        """Send one message (sd_notify(3)).

        A message that is lost is not an error: another one follows. `status` is the text for `systemctl status`,
        `extend_s` the seconds during which the current start or stop timeout must not expire.
        """
        given = (("READY=1", ready), ("STOPPING=1", stopping), ("WATCHDOG=1", watchdog))
        fields = [field for field, is_given in given if is_given]
        if status is not None:
            # A field of the protocol ends at a newline.
            fields.append(f"STATUS={shorten(' '.join(status.split()), STATUS_LIMIT)}")
        if extend_s is not None:
            fields.append(f"EXTEND_TIMEOUT_USEC={int(extend_s * 1_000_000)}")
        if not fields or self._address is None:
            return
        # "@" stands for the NUL byte at the start of an abstract socket name on Linux.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.settimeout(2)
            sock.sendto("\n".join(fields).encode(), address)
