# SPDX-License-Identifier: Apache-2.0
"""Unix sockets in directories that an engine may write: a link in place of a socket is not followed."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def pin(path: Path) -> Iterator[str]:
    """Yield a name under /proc that leads to this very socket, whatever `path` is meanwhile.

    Raises OSError: there is nothing at `path`, or something else than a socket.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISSOCK(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "a file"
            raise OSError(errno.ENOTSOCK, f"it is {kind} and no socket", str(path))
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Return a connection to the socket. Raises OSError; TimeoutError if nobody takes it within `timeout_s` seconds."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # While the queue of the listener is full, connect() waits so long. With a timeout of Python's, which makes the
        # socket a non-blocking one, it would fail at once.
        whole, part = divmod(max(0.001, timeout_s), 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(whole), int(part * 1e6)))
        with pin(path) as place:
            client.connect(place)
    except BlockingIOError as error:
        client.close()
        raise TimeoutError from error
    except BaseException:
        client.close()
        raise
    return client
