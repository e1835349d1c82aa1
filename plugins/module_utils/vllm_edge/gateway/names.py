# SPDX-License-Identifier: Apache-2.0
"""Names of HAProxy's backends, on which the gateway's configuration and the host's program have to agree."""

from __future__ import annotations

import hashlib
import re

PREFIX = "role_"
"""Precedes `backend_name` in haproxy.cfg."""
SERVER = "engine"
"""The first server of each such backend. The switch takes servers away and brings them back."""
HOST = "host-"
"""Precedes, in such a backend, the name of a server that is another host of the fleet."""
_PLACE = re.compile(rf"{SERVER}(?:-([1-9][0-9]*))?")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,60}")


def backend_name(served: str) -> str:
    """Return the name of the backend and of the link of a served name: the name itself where it is short and plain."""
    if _PLAIN.fullmatch(served):
        return served
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', served[:40])}-{hashlib.sha256(served.encode()).hexdigest()[:8]}"


def host_server(name: str) -> str:
    """Return what HAProxy and its certificate call a host of the inventory in a fleet."""
    return f"{HOST}{backend_name(name)}"


def name_link(served: str, place: int) -> str:
    """Return the name of the link to the engine at a place, from 0; the first one has that of the backend."""
    return f"{backend_name(served)}+{place}" if place else backend_name(served)


def name_server(link: str) -> str:
    backend, _, place = link.partition("+")
    return f"{PREFIX}{backend}/{SERVER}{f'-{place}' if place else ''}"


def find_link(backend: str, server: str) -> str | None:
    """Return the name of the link of a server of HAProxy; None for one whose link nobody moves."""
    found = _PLACE.fullmatch(server)
    if not backend.startswith(PREFIX) or found is None:
        return None
    return backend.removeprefix(PREFIX) + (f"+{found[1]}" if found[1] else "")
