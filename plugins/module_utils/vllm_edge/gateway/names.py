# SPDX-License-Identifier: Apache-2.0
"""Names of HAProxy's backends, on which the gateway's configuration and the host's program have to agree."""

from __future__ import annotations

import hashlib
import re

PREFIX = "role_"
"""Precedes `backend_name` in haproxy.cfg."""
SERVER = "engine"
"""The server of each such backend that the switch takes away and brings back."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,60}")


def backend_name(served: str) -> str:
    """Return the name of the backend and of the link of a served name: the name itself where it is short and plain."""
    if _PLAIN.fullmatch(served):
        return served
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', served[:40])}-{hashlib.sha256(served.encode()).hexdigest()[:8]}"
