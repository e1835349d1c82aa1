# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge gateway sync` and `vllm-edge gateway status`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict

from ..generation import store
from ..generation.live import list_live_engines
from ..generation.model import GenerationError
from ..names import GATEWAY_UNIT
from ..paths import HostPaths
from ..system.files import is_locked
from ..system.systemd import ask_units
from ..text import print_result, table
from .admin import HAProxy
from .clients import GatewayError
from .describe import describe_gateway, render_gateway
from .sync import CONFIGURATION, Report, apply, list_leaving, read_map, view_host
from .view import MODELS, SwitchProgress, View

ReadProgress = Callable[[HostPaths], SwitchProgress | None]


def synchronize(
    paths: HostPaths, read_switch_progress: ReadProgress, *, check: bool = False, proxy: HAProxy | None = None
) -> Report:
    """Make the gateway fit the committed generation and a switch that has not ended. See `sync.apply`.

    `read_switch_progress` reads the switch, while nobody else changes the gateway's files. Raises GatewayError: maps
    and links cannot be written.
    """

    def look() -> View | None:
        progress = read_switch_progress(paths)
        # They serve until the switch takes them away, or `vllm-edge stop`, which has no journal.
        if list_leaving(paths) and (progress.phase == "away" if progress else is_locked(paths.switch_lock)):
            return None
        try:
            live = store.load_committed(paths)
        except GenerationError as error:
            raise GatewayError(
                f"The committed generation cannot be read: {error} Clients reach the same names as before. Run "
                "site.yml, which writes it anew."
            ) from error
        if live is None and (list_live_engines(paths) or read_map(paths, MODELS)):
            if progress is not None:
                return None  # the first switch of the host has not committed yet
            raise GatewayError(
                f"{paths.active_profile}, which says what serves, does not exist, and this host has engines or names. "
                "Clients reach the same names as before. Run site.yml, which writes it anew and restarts no engine."
            )
        return view_host(paths, live, progress)

    return apply(paths, look, check=check, proxy=proxy)


def run_sync(paths: HostPaths, read_switch_progress: ReadProgress, *, check: bool, output: str) -> int:
    """Run `vllm-edge gateway sync`. Returns the exit status: 0, or 1 if something could not be done."""
    try:
        report = synchronize(paths, read_switch_progress, check=check)
    except GatewayError as error:
        print(error, file=sys.stderr)
        return 1
    told = "nothing differs"
    if report.changes:
        told = f"{'would change' if check else 'changed'}: {', '.join(report.changes)}"
    print_result(output, {"changed": bool(report.changes), **asdict(report)}, [told])
    for text in report.warnings:
        print(f"warning: {text}", file=sys.stderr)
    return 1 if report.warnings else 0


def run_status(paths: HostPaths, *, output: str) -> int:
    shown, problem = ask_units([GATEWAY_UNIT])
    gateway = describe_gateway(paths, shown.get(GATEWAY_UNIT, {}))
    if gateway is None:
        print(f"This host has no gateway: {paths.gateway / CONFIGURATION} does not exist.", file=sys.stderr)
        return 1
    gateway["problem"] = gateway["problem"] or problem
    rows = [[name, ", ".join(role["engines"]), role["state"]] for name, role in gateway["roles"].items()]
    print_result(output, gateway, [*render_gateway(gateway), "", *table(["served name", "engines", "state"], rows)])
    return 0
