# SPDX-License-Identifier: Apache-2.0
"""The gateway in the status of a host: addresses, state of its unit, served names, and the end of its certificate."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..engine.api_socket import find_gateway_group
from ..engine.state import stamp
from ..names import EXPORTER_SOCKET, FACTS_UNIT, GATEWAY_UNIT
from ..paths import HostPaths
from ..text import wrapped
from .admin import GatewayDown, HAProxy, Server
from .certificate import read_certificate, server_pem
from .clients import GatewayError
from .fleet import read_fleet
from .names import SERVER, find_link, name_link
from .sync import CONFIGURATION, is_installed, open_proxy, read_keys
from .view import MODELS, parse_text

FACTS_MAX_AGE_S = 60
"""Of facts that the metrics are made of; six rounds of the service that reads them."""


def list_addresses(configuration: str) -> list[str]:
    """Return the URLs at which clients reach the gateway; sockets of this host are left out."""
    lines = (line.split() for line in configuration.splitlines())
    return [
        f"{'https' if 'ssl' in words else 'http'}://{words[1]}"
        for words in lines
        if len(words) > 1 and words[0] == "bind" and "@" not in words[1] and not words[1].startswith("/")
    ]


def list_places(configuration: str) -> set[str]:
    """Return `name_link` of each server of a served name in the configuration."""
    found, backend = set(), ""
    for words in map(str.split, configuration.splitlines()):
        if words[:1] == ["backend"] and len(words) > 1:
            backend = words[1]
        if words[:1] in (["backend"], ["server"]) and len(words) > 1:
            found.add(find_link(backend, SERVER if words[0] == "backend" else words[1]))
    return {link for link in found if link is not None}


def find_metrics_fault(paths: HostPaths) -> str | None:
    """Return why Prometheus gets no figures of this host, or old ones; empty if it does, None if nothing serves any."""
    if not paths.unit_file(FACTS_UNIT).exists():
        return None
    try:
        age_s = time.time() - paths.facts.stat().st_mtime
        found = (socket := paths.exporter_run / "exporter.sock").lstat()
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    if age_s > FACTS_MAX_AGE_S:
        return f"{paths.facts} is {age_s:.0f} s old, and {FACTS_UNIT} writes it every 10 s"
    wanted = (stat.S_IFSOCK | 0o660, 0, find_gateway_group())
    if os.geteuid() == 0 and (found.st_mode, found.st_uid, found.st_gid) != wanted:
        return f"{socket} is not as {EXPORTER_SOCKET} makes it, with mode 0660 for root and the gateway"
    return ""


def describe_gateway(paths: HostPaths, unit: Mapping[str, str], proxy: HAProxy | None = None) -> dict[str, Any] | None:
    """Return the gateway as `status --format json` shows it, as far as this user may see; None if the host has none.

    One that runs without its configuration is a gateway. The state of a role is what HAProxy reaches: `up`,
    `provisional`, `stand-in`, `leaving` and `away` in a switch, `down` where no engine answers; `unknown` if HAProxy
    cannot be asked, or does not know the name yet.
    """
    hidden = paths.gateway.is_dir() and not os.access(paths.gateway, os.X_OK)
    running = unit.get("ActiveState") in ("active", "reloading")
    if not hidden and not running and not is_installed(paths):
        return None
    found: dict[str, Any] = {
        "unit": GATEWAY_UNIT,
        "active_state": unit.get("ActiveState"),
        "addresses": [],
        "roles": {},
        "certificate_ends": None,
        "problem": "the gateway's files are for root" if hidden else None,
    }
    if hidden:
        return found
    try:
        text = (paths.gateway / CONFIGURATION).read_text(encoding="utf-8", errors="replace")
        models = (paths.gateway / MODELS).read_text(encoding="utf-8", errors="replace")
        if server_pem(paths).exists():
            found["certificate_ends"] = stamp(read_certificate(server_pem(paths)).ends)
        wrong = read_keys(paths, stamp())[2]
        try:
            read_fleet(paths)
        except GatewayError as error:
            wrong.append(str(error))
        if fault := find_metrics_fault(paths):
            wrong = [*wrong, f"Prometheus gets no figures of this host: {fault}"]
        found["problem"] = " ".join(wrong).rstrip(".") or None
    except (OSError, ValueError) as error:
        return {**found, "problem": f"the gateway's files cannot be read: {error}: run playbooks/gateway.yml"}
    found["addresses"] = list_addresses(text)
    servers = None
    try:
        servers = (proxy or open_proxy(paths)).list_workers()[0].read_servers()
    except GatewayDown as error:
        if running:
            found["problem"] = f"HAProxy does not say what it reaches: {str(error).rstrip('.')}"
    words = {name: value.split(" ") for name, value in parse_text(models).items()}
    found["roles"] = {
        name: {
            **{"engine": row[1].partition(",")[0], "engines": row[1].split(",")},
            **{"state": _judge_role(name, row, servers), "retry_after_s": int(row[4])},
        }
        for name, row in words.items()
        if len(row) == 6 and row[4].isdigit()
    }
    return found


def _judge_role(name: str, row: Sequence[str], servers: Mapping[str, Server] | None) -> str:
    links = [name_link(name, place) for place in range(len(row[1].split(",")))]
    mine = [servers[link] for link in links if link in servers] if servers is not None else []
    if not mine:  # HAProxy does not answer, or its configuration is from before the name; the doctor says which
        return "unknown"
    return row[2] if row[2] == "away" or any(server.up and not server.away for server in mine) else "down"


def render_gateway(gateway: Mapping[str, Any]) -> list[str]:
    """Return the gateway as one sentence: its addresses, the state of the unit, roles that are not up, certificate."""
    other = [f"{name} {role['state']}" for name, role in gateway["roles"].items() if role["state"] != "up"]
    parts = [
        f"gateway {gateway['active_state'] or 'unknown'}",
        ", ".join(gateway["addresses"]),
        ", ".join(other) or (f"{len(gateway['roles'])} served names up" if gateway["roles"] else ""),
        f"certificate until {gateway['certificate_ends']}" if gateway["certificate_ends"] else "",
        gateway["problem"] or "",
    ]
    return wrapped("; ".join(part for part in parts if part))
