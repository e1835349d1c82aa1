# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge gateway sync` and `vllm-edge gateway status`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..engine.state import stamp
from ..generation import store
from ..generation.model import GenerationError
from ..names import GATEWAY_UNIT
from ..paths import HostPaths
from ..system.systemd import ask_units
from ..text import table, wrapped
from .admin import GatewayDown
from .certificate import read_certificate, server_pem
from .clients import GatewayError
from .names import backend_name
from .sync import CONFIGURATION, Report, apply, is_installed, open_admin, view_host
from .view import MODELS, Course, View, parse_text

ReadCourse = Callable[[HostPaths], Course | None]
_BIND = re.compile(r"^\s*bind\s+(\S+)(.*)$", re.MULTILINE)


def synchronize(paths: HostPaths, read_course: ReadCourse, *, check: bool = False) -> Report:
    """Make the gateway fit the committed generation and a switch that has not ended. See `sync.apply`.

    Args:
        read_course: reads the switch; called while nobody else changes the gateway's files

    Raises:
        GatewayError: the generation cannot be read, or maps and links cannot be written
    """

    def look() -> View:
        course = read_course(paths)
        try:
            return view_host(paths, store.load_committed(paths), course)
        except GenerationError as error:
            raise GatewayError(f"The committed generation cannot be read: {error}") from error

    return apply(paths, look, check=check)


def run_sync(paths: HostPaths, read_course: ReadCourse, *, check: bool, output: str) -> int:
    """Run `vllm-edge gateway sync`. Returns the exit status: 0, or 1 if something could not be done."""
    try:
        report = synchronize(paths, read_course, check=check)
    except GatewayError as error:
        print(error, file=sys.stderr)
        return 1
    if output == "json":
        print(json.dumps({"changed": bool(report.changes), **asdict(report)}, indent=2, ensure_ascii=False))
    else:
        would = "would change" if check else "changed"
        print(f"{would}: {', '.join(report.changes)}" if report.changes else "nothing differs")
    for text in report.warnings:
        print(f"warning: {text}", file=sys.stderr)
    return 1 if report.warnings else 0


def describe_gateway(paths: HostPaths, unit: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the gateway as `status --format json` shows it, as far as this user may see; None if the host has none.

    Args:
        unit: properties of its unit; empty if systemd does not know it
    """
    hidden = paths.gateway.is_dir() and not os.access(paths.gateway, os.X_OK)
    if not hidden and not is_installed(paths):
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
    except (OSError, ValueError) as error:
        return {**found, "problem": f"the gateway's files cannot be read: {error}"}
    found["addresses"] = [
        f"{'https' if ' ssl' in options else 'http'}://{address}"
        for address, options in _BIND.findall(text)
        if "@" not in address and not address.startswith("/")
    ]
    words = {name: value.split(" ") for name, value in parse_text(models).items()}
    found["roles"] = {
        name: {"engine": row[1], "state": row[2], "retry_after_s": int(row[4])}
        for name, row in words.items()
        if len(row) == 6 and row[4].isdigit()
    }
    return found


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


def run_status(paths: HostPaths, *, output: str) -> int:
    """Run `vllm-edge gateway status` and return the exit status: 1 if the host has no gateway."""
    shown, problem = ask_units([GATEWAY_UNIT])
    gateway = describe_gateway(paths, shown.get(GATEWAY_UNIT, {}))
    if gateway is None:
        print(f"This host has no gateway: {paths.gateway / CONFIGURATION} does not exist.", file=sys.stderr)
        return 1
    try:
        servers: dict[str, bool] | None = open_admin(paths).read_servers()
    except GatewayDown as down:
        servers, problem = None, problem or f"The gateway does not answer: {down}"
    for name, role in gateway["roles"].items():
        away = None if servers is None else servers.get(backend_name(name))
        role["server"] = None if away is None else "away" if away else "ready"
    if problem:
        gateway["problem"] = "; ".join(text for text in (gateway["problem"], problem) if text)
    if output == "json":
        print(json.dumps(gateway, indent=2, ensure_ascii=False))
        return 0
    rows = [
        [name, role["engine"], role["state"], role["server"] or "unknown"] for name, role in gateway["roles"].items()
    ]
    print("\n".join([*render_gateway(gateway), "", *table(["served name", "engine", "state", "server"], rows)]))
    return 0
