# SPDX-License-Identifier: Apache-2.0
"""`fleet.json`: the fleet of this host, and the other hosts of it that this gateway may ask. Ansible writes it."""

from __future__ import annotations

from dataclasses import dataclass

from ..paths import HostPaths
from ..system.files import read_foreign
from ..system.records import parse_json, read_record
from .clients import MOST_BYTES, GatewayError

FILE = "fleet.json"
CHECK_S = 2.0
"""Seconds between two questions of a gateway for a role of another host."""
LEAVE_S = 2 * CHECK_S + 1
"""Seconds for which a role says that it leaves before it does: every other gateway has asked by then."""


@dataclass(frozen=True)
class Peer:
    name: str
    server: str
    """As HAProxy calls the host (`names.host_server`)."""
    address: str
    port: int


@dataclass(frozen=True)
class Fleet:
    """The fleet, this host in it, and the hosts beside it."""

    fleet: str
    host: str
    server: str
    address: str
    port: int
    peers: tuple[Peer, ...] = ()


def read_fleet(paths: HostPaths) -> Fleet | None:
    """Return the fleet of this host, None if it is in none. Raises GatewayError: the file is damaged."""
    path = paths.gateway / FILE
    try:
        return read_record(Fleet, parse_json(read_foreign(path, MOST_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise GatewayError(
            f"{path} cannot be read: {error}. Run playbooks/gateway.yml, which writes it anew."
        ) from error
