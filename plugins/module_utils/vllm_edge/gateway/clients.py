# SPDX-License-Identifier: Apache-2.0
"""Reading of `clients.json`: who may use the gateway. Ansible writes it, with the SHA-256 of each key alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..engine.state import stamp
from ..names import ENGINE_NAME
from ..system.files import is_locked, read_foreign
from ..system.records import parse_json, read_record
from ..text import shown

MOST_BYTES = 1024 * 1024
MOST_COUNT = 1_000_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


class GatewayError(Exception):
    """The gateway's files cannot be read or written. The text says which, why, and what to do."""


class GatewayBusy(GatewayError):
    """Another program has held the gateway's lock all the time."""


@dataclass(frozen=True)
class Key:
    """One key of a client. `until` ends a key that was rotated; it is as `engine.state.stamp` formats it."""

    sha256: str
    added_at: str = ""
    until: str | None = None

    def valid(self, now: str) -> bool:
        return self.until is None or self.until > now


@dataclass(frozen=True)
class Client:
    """What one client may do. `requests_per_minute` and `streams` are 0 for no limit."""

    keys: tuple[Key, ...]
    served_names: tuple[str, ...] = ()
    """Names that it may use; none means all, or with `metrics` none."""
    requests_per_minute: int = 0
    streams: int = 0
    metrics: bool = False
    """Whether it may read the metrics of the host, the gateway and the engines."""

    def may(self, names: tuple[str, ...]) -> bool:
        return not (self.served_names or self.metrics) or set(names) <= set(self.served_names)


def _find_errors(clients: Mapping[str, Client]) -> list[str]:
    errors = []
    owners: dict[str, str] = {}
    for name, client in clients.items():
        if not ENGINE_NAME.fullmatch(name):
            errors.append(f"client {shown(name)}: a name is of small letters, digits and '-', at most 63")
        for limit in ("requests_per_minute", "streams"):
            if not 0 <= getattr(client, limit) <= MOST_COUNT:
                errors.append(f"{limit} of {shown(name)} is {getattr(client, limit)}: a number from 0 is expected")
        for key in client.keys:
            if not _SHA256.fullmatch(key.sha256):
                errors.append(f"a key of {shown(name)} is no SHA-256 of 64 small hexadecimal digits")
            elif owners.setdefault(key.sha256, name) != name:
                errors.append(f"{shown(name)} and {shown(owners[key.sha256])} have the same key")
            try:
                good = key.until is None or stamp(datetime.fromisoformat(key.until).replace(tzinfo=UTC)) == key.until
            except ValueError:
                good = False
            if not good:
                errors.append(f"until of a key of {shown(name)} is {shown(key.until)}: write 2026-11-23T09:30:00Z")
    return errors


def read_clients(path: Path) -> dict[str, Client]:
    """Read the clients by name. Raises GatewayError: the file cannot be read, or has mistakes, which are all named."""
    try:
        data = parse_json(read_foreign(path, MOST_BYTES))
        if not isinstance(data, dict):
            raise ValueError("a JSON object is expected")
        clients = {name: read_record(Client, value, shown(name)) for name, value in data.items()}
        errors = _find_errors(clients)
    except (OSError, ValueError) as error:
        errors, clients = [getattr(error, "strerror", "") or str(error)], {}
    if errors:
        raise GatewayError(
            f"{path}: {'; '.join(errors)}. Restore it from a backup; or, without it, "
            "playbooks/clients.yml writes it anew, with the keys that the gateway has in clients.map."
        )
    return clients


def read_temporary(path: Path, now: str) -> dict[str, Client]:
    """Read the clients that a program made for itself; none where it has ended, also by SIGKILL, or its time is over.

    The program holds the file, which has the form of `clients.json`, locked as long as it runs. `now` is a time as
    `stamp` formats it. Raises GatewayError, as `read_clients`.
    """
    try:
        clients = read_clients(path) if is_locked(path) else {}
    except OSError as error:
        raise GatewayError(f"{path}: {error}.") from error
    except GatewayError:
        if os.path.lexists(path):
            raise
        return {}  # its program has ended meanwhile
    return {name: client for name, client in clients.items() if any(key.valid(now) for key in client.keys)}
