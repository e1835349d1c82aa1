# SPDX-License-Identifier: Apache-2.0
"""The socket on which an engine serves, and the directory that is mounted into its container for it.

What runs in the container may write the directory until the socket is there: nothing in it is trusted.
"""

from __future__ import annotations

import grp
import os
from pathlib import Path

from ..names import GATEWAY_USER
from ..system.files import make_directories, remove_foreign
from ..system.sockets import pin

PARENT_MODE = 0o710
"""Of the directory above: who is neither root nor the gateway comes no further."""
MODE = 0o755
SOCKET_MODE = 0o666
REMOVE_S = 60.0


def make_directory(socket: Path, uid: int) -> None:
    """Make the directory of a socket anew, for a container that does not exist yet.

    `uid` is the user id and the group id of the engine. Raises OSError: it could not be removed or made.
    """
    place, root = socket.parent, os.geteuid() == 0
    if not place.parent.is_dir():
        make_directories(place.parent, PARENT_MODE)
        if root:
            os.chown(place.parent, 0, find_gateway_group())
    remove_foreign(place, REMOVE_S)
    place.mkdir()
    place.chmod(MODE)
    if root:
        os.chown(place, uid, uid)


def open_to_gateway(socket: Path) -> None:
    """Let everybody connect who may open the directory above, and take the directory from the engine.

    From then on the engine can neither replace its socket nor fill the file system of /run.

    Raises OSError: there is no socket yet, or something else in its place.
    """
    with pin(socket) as place:
        os.chmod(place, SOCKET_MODE)
    if os.geteuid() == 0:
        os.chown(socket.parent, 0, 0)
    socket.parent.chmod(MODE)


def find_gateway_group() -> int:
    try:
        return grp.getgrnam(GATEWAY_USER).gr_gid
    except KeyError:
        return 0
