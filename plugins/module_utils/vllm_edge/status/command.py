# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge status` and `vllm-edge explain`: print the status of the host, and why an engine failed last."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..engine.config import list_engine_names
from ..engine.state import EngineState, read_state
from ..facts.serving import collect
from ..gateway.describe import render_gateway
from ..gateway.peers import render_fleet
from ..names import ENGINE_NAME, SWITCH_UNIT
from ..paths import HostPaths
from ..switch.render import describe_generation, describe_reached, render_switches
from ..text import print_result, printable, table, wrapped
from .problems import add_problems, chosen_words, describe_state, is_unrecorded, name_phase
from .tables import render_drift_table, render_engine_table, render_gpu_table, render_problems, render_warnings

SHOWN = 5


def render_engines(engines: Sequence[Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tables of engines and served names, and what each engine reports."""
    index = {board["uuid"]: str(board["index"]) for board in boards}
    rows = [
        {
            **engine,
            "slots": [index.get(uuid, uuid.removeprefix("GPU-")[:8]) for uuid in engine["gpus"]],
            "state": describe_state(engine),
            "since": engine["active_since"] or engine["state_since"] or engine["since"],
        }
        for engine in engines
    ]
    lines = [*render_engine_table("engine", rows), ""]
    roles = [[name, engine["engine"]] for engine in engines for name in engine["served_names"]]
    lines += [*table(["served name", "engine"], roles), ""]
    for engine in engines:
        lines += wrapped(f"{engine['unit']}: {engine['status_text'] or 'no status'}")
        since = f" since {engine['container_started_at']}" if engine["container_started_at"] else ""
        lines += wrapped(f"container {engine['container_state']}{since}", "  ")
        lines += render_load(engine)
        if quantizer := engine.get("quantizer"):
            lines += wrapped(f"weights: quantized by {quantizer}", "  ")
        failure = engine["last_failure"]
        if failure:
            lines += wrapped(f"last failure {failure['time']}: {failure['reason']}. {failure['remedy']}", "  ")
    return lines


def render_load(engine: Mapping[str, Any]) -> list[str]:
    """Return the phases of an engine's last load, longest first, and how long the next one will take."""
    phases = sorted((engine.get("load_phases") or {}).items(), key=lambda item: -item[1])
    told = [f"{name_phase(name)} {seconds:.0f} s" for name, seconds in phases]
    lines = wrapped(f"load: {', '.join(told)}", "  ") if told else []
    expected = engine.get("load_expected_s")
    if expected:
        band = f"{expected['low']:.0f} to {expected['high']:.0f} s, probably {expected['mid']:.0f}"
        lines += wrapped(f"next load: {band} ({expected['basis']})", "  ")
    return lines


def render_choice(status: Mapping[str, Any]) -> list[str]:
    profile = status["active_profile"]
    inventory = status["expected_profile"] or profile.get("inventory_profile")
    if inventory is not None and inventory != profile.get("profile"):
        return wrapped(f"inventory says {inventory}, host runs {profile.get('profile')} ({chosen_words(profile)})")
    return [chosen_words(profile)]


def render_status(status: Mapping[str, Any]) -> list[str]:
    """Return the status as text of at most 100 columns."""
    lines = ["no profile is active on this host"]
    if profile := status["active_profile"]:
        over = ", committed over its budget" if profile.get("over_budget") else ""
        lines = [f"profile {profile.get('profile', '?')}, generation {profile.get('generation', '?')}{over}"]
        lines += render_choice(status)
    if running := status["switch"]:
        back = ", going back" if running["direction"] == "back" else ""
        calibration = running.get("purpose") == "calibration"
        lines += wrapped(
            f"{'calibration of' if calibration else 'switching to'} "
            f"{describe_generation(running['generation'], running['profile'])} for "
            f"{running['seconds']:.0f} s, phase {running['phase'] or 'none yet'}{back}, asked by {running['asked_by']}"
            f"{', goes back to the committed generation by itself' if calibration else ''}"
            f"{f'; {reached}' if (reached := describe_reached(running)) else ''}"
            f"; 'journalctl -fu {SWITCH_UNIT}' follows it"
        )
    lines.append("")
    if status["engines"]:
        lines += render_engines(status["engines"], status["gpus"])
    else:
        lines.append("no engine is configured on this host")
    if status.get("gateway"):
        lines += ["", *render_gateway(status["gateway"])]
    if status.get("fleet"):
        lines += render_fleet(status["fleet"])
    if status["gpus"]:
        lines += ["", *render_gpu_table(status["gpus"]), ""]
        lines += [f"GPU {board['index']} is {board['uuid']}" for board in status["gpus"]]
    if status.get("drift"):
        lines += ["", *render_drift_table(status["drift"], status["gpus"])]
    if quality := status.get("quality"):
        verdicts = ", ".join(f"{quality[word]} {word}" for word in ("passed", "failed", "unsteady"))
        lines += ["", *wrapped(f"quality of {quality['profile']} at {quality['at']}: {verdicts}")]
    for warning in render_warnings(status):
        lines += ["", *warning]
    if status["history"]:
        lines += ["", *render_switches(status["history"][:SHOWN])]
    return [*lines, *render_problems(status)]


def run_status(paths: HostPaths, *, output: str, expected_profile: str | None = None) -> int:
    """Print the status. To report a bad state is a success, with the exit status 0; it is 1 where engines run and it
    is lost what they are compared with."""
    from ..system.docker import DockerEngine

    status = add_problems(collect(paths, DockerEngine(request_timeout_s=10), expected_profile=expected_profile))
    print_result(output, status, [] if output == "json" else render_status(status))
    return 1 if is_unrecorded(status) else 0


def render_explanation(engine: str, state: EngineState | None) -> list[str]:
    """Return the last failure of an engine as text, with the last lines of its log."""
    if state is None:
        return [f"{engine}: nothing is known; it has not been started on this host since its state was last removed"]
    now = f"{engine}: {name_phase(state.phase)} since {state.since}"
    failure = state.last_failure
    if failure is None:
        return [now, "No failure has been recorded."]
    status = "" if failure.exit_code is None else f", exit status {failure.exit_code}"
    lines = [now, f"Last failure: {failure.time} (while: {name_phase(failure.phase) or 'unknown'}{status})"]
    lines += wrapped(f"What: {failure.reason}.", "  ")
    lines += wrapped(f"Remedy: {failure.remedy}.", "  ")
    if failure.log_tail:
        lines += ["The engine's last lines:", *("  | " + printable(line, "\t") for line in failure.log_tail)]
    return lines


def run_explain(engine: str, paths: HostPaths, *, output: str) -> int:
    """Print the last failure of an engine. The exit status is 1 if there is no such engine, or it cannot be read."""
    known = ENGINE_NAME.fullmatch(engine) is not None
    place = paths.engine_state(engine)
    state = read_state(place) if known else None
    if known and state is None and os.path.lexists(place):
        why = "is damaged" if os.access(place, os.R_OK) else f"is for root: 'sudo vllm-edge explain {engine}'"
        print(f"{place} {why}, so it is not known why {engine} failed last.", file=sys.stderr)
        return 1
    if not known or (state is None and engine not in list_engine_names(paths)):
        there = ", ".join(list_engine_names(paths)) or "none"
        print(f"{engine!r} is no engine of this host; there are: {there}", file=sys.stderr)
        return 1
    failure = asdict(state.last_failure) if state and state.last_failure else None
    print_result(output, {"engine": engine, "last_failure": failure}, render_explanation(engine, state))
    return 0
