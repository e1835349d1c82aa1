# SPDX-License-Identifier: Apache-2.0
"""What serves on a host: what systemd, Docker, NVML and the project's own files say, as one JSON document."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from ..answers.model import read_suites
from ..engine.config import EngineConfig, EngineConfigError, list_engine_names, load_config
from ..engine.state import EngineState, read_state, stamp
from ..gateway.describe import describe_gateway
from ..generation.live import describe_file_change, live_changes
from ..generation.model import GenerationError
from ..generation.store import load
from ..gpu.budget import Foreign, Limits, evaluate
from ..gpu.owners import find_owners
from ..names import GATEWAY_UNIT, LABEL_GENERATION, LABEL_INPUT_HASH, TARGET, EngineIdentity
from ..paths import HostPaths
from ..planning import drift, feasibility
from ..planning.load_time import expect_load, warn_of_load
from ..switch.history import read_switches
from ..switch.steps.gpu_memory import load_slots, read_boards
from ..system.docker import Container, DockerAway, DockerEngine, DockerRefused, docker_unit
from ..system.nvml import NvmlFailure, open_nvml, pynvml_missing
from ..system.systemd import ask_units

Json = dict[str, Any]
Asked = tuple[list[Json], str | None]


def ask_containers(docker: DockerEngine, names: Sequence[str]) -> tuple[dict[str, Container], str | None]:
    """Return the containers that exist, by name, and None or why Docker could not be asked."""
    found: dict[str, Container] = {}
    unit = docker_unit()
    if unit is not None and not unit.active:
        # A request over the socket would start Docker, and a status changes nothing.
        return found, "the Docker Engine cannot be asked: docker.service is not running"
    try:
        docker.ping(3.0)
        for name in names:
            container = docker.find(name)
            if container is not None:
                found[name] = container
    except (DockerAway, DockerRefused) as error:
        return found, f"the Docker Engine cannot be asked: {error}"
    return found, None


def load_configs(paths: HostPaths) -> tuple[list[EngineConfig], list[str]]:
    """Return the configuration of every engine that has a valid one, and what is wrong with the others."""
    configs, problems = [], []
    try:
        for name in list_engine_names(paths):
            try:
                configs.append(load_config(name, paths))
            except EngineConfigError as error:
                problems.append(str(error))
    except OSError as error:
        problems.append(f"{paths.etc} cannot be read: {error}")
    return configs, problems


def ask_gpus(budgets: Mapping[str, int | None], paths: HostPaths, foreign: Foreign = "ignore") -> Asked:
    """Read the memory of every GPU that answers, and compare it with the budgets.

    Args:
        budgets: MiB by UUID; None is a budget that nobody stated.
        foreign: whether processes that are not ours are a problem.

    Returns:
        One row for each GPU, and what could not be read, or None. A GPU that does not answer, or a missing driver, is a
        sentence and raises nothing.
    """
    if pynvml_missing():
        return [], "GPUs cannot be read: the Python package nvidia-ml-py is not installed beside this program"
    try:
        with open_nvml() as session:
            slots = load_slots(paths)
            reading = read_boards(session, slots)
    except NvmlFailure as failure:
        return [], f"GPUs cannot be read: {failure}"
    owners = find_owners({process.pid for gpu in reading.gpus for process in gpu.processes or ()})
    limits = Limits({uuid: mib for uuid, mib in budgets.items() if mib is not None}, {}, foreign)
    boards = []
    for gpu in reading.gpus:
        verdict = evaluate([gpu], owners, limits, [slot.uuid for slot in slots])
        board = verdict.gpus[0].as_dict() | {"problem": " ".join(verdict.failures) or None}
        if budgets.get(gpu.uuid, 0) is None:
            board |= {"budget_mib": None, "headroom_mib": None, "within_budget": None, "problem": None}
        boards.append({key: value for key, value in board.items() if key not in ("slot", "expected_mib")})
    return boards, " ".join(map(str, reading.lost)) or None


def read_active_profile(paths: HostPaths) -> tuple[Json | None, str | None]:
    """Return the record of the committed generation, and why it could not be read, or None."""
    try:
        data = json.loads(paths.active_profile.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{paths.active_profile} cannot be read: {error}"
    if not isinstance(data, dict):
        return None, f"{paths.active_profile} holds no JSON object"
    # A record that was written before there were switches lacks these keys.
    return {
        **dict.fromkeys(("inventory_profile", "chosen_at", "previous_generation")),
        "origin": "inventory",
        **data,
    }, None


def read_live_files(paths: HostPaths, profile: Mapping[str, Any] | None) -> tuple[list[Json] | None, list[str]]:
    """Return the live files that differ from the committed generation, None without one, and what was unreadable."""
    number = (profile or {}).get("generation")
    if not isinstance(number, int) or not (profile or {}).get("digest"):
        return None, []
    stored = paths.state / "generations"
    if stored.is_dir() and not os.access(stored, os.R_OK | os.X_OK):
        return None, [f"{stored} is not for this user: whether files were changed is shown to root"]
    try:
        changes = live_changes(load(paths, number), paths)
    except GenerationError as error:
        text = str(error)
        return None, [
            f"{text[0].upper()}{text[1:].rstrip('.')}. A switch that fails goes back to the committed generation and "
            "needs its files: run site.yml."
        ]
    return [{"path": change.path, "how": describe_file_change(change)} for change in changes], []


def parse_systemd_time(unit: Mapping[str, str], key: str) -> int | None:
    """Convert a time of systemd, such as `@1763730000`, to seconds since the epoch; None if it has none."""
    text = unit.get(key, "").removeprefix("@")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _format_time(unit: Mapping[str, str], key: str) -> str | None:
    seconds = parse_systemd_time(unit, key)
    return None if seconds is None else stamp(datetime.fromtimestamp(seconds, UTC))


def _measure_load_seconds(unit: Mapping[str, str], state: EngineState | None) -> float | None:
    """Return how long the engine took to load, as its supervisor counted.

    If this user may not read the supervisor's file, it is computed from systemd's clock in whole seconds.
    """
    if state is not None:
        return state.load_seconds
    began, ready = parse_systemd_time(unit, "InactiveExitTimestamp"), parse_systemd_time(unit, "ActiveEnterTimestamp")
    active = unit.get("ActiveState") == "active"
    return float(ready - began) if active and began is not None and ready is not None and ready >= began else None


def _describe_unit(unit: Mapping[str, str]) -> Json:
    """Return what systemd says of the unit of an engine; `unit` is empty if systemd does not know it."""
    restarts = unit.get("NRestarts", "")
    return {
        "active_state": unit.get("ActiveState"),
        "sub_state": unit.get("SubState"),
        "load_state": unit.get("LoadState"),
        "result": unit.get("Result"),
        "restarts": int(restarts) if restarts.isdigit() else None,
        "status_text": unit.get("StatusText") or None,
        "wanted_by_target": TARGET in unit.get("WantedBy", "").split() if unit else None,
        "need_daemon_reload": unit.get("NeedDaemonReload") == "yes" if unit else None,
        "active_since": _format_time(unit, "ActiveEnterTimestamp") if unit.get("ActiveState") == "active" else None,
        "state_since": _format_time(unit, "StateChangeTimestamp"),
    }


def _describe_container(container: Container | None, identity: EngineIdentity) -> Json:
    """Return what Docker says of the container of an engine. What it runs is only known while it runs."""
    ours = container is not None and identity.owns(container.labels)
    running = container if container is not None and container.running else None
    labels = running.labels if running is not None and ours else {}
    generation = labels.get(LABEL_GENERATION, "")
    return {
        "container_state": container.status if container else "absent",
        "container_id": container.id if container else None,
        "container_ours": ours if container else None,
        "container_started_at": f"{running.started_at[:19]}Z" if running else None,
        "container_image_id": running.image_id if running else None,
        "running_input_hash": labels.get(LABEL_INPUT_HASH),
        "running_generation": int(generation) if generation.isdigit() else None,
    }


CONFIGURED = (
    *("engine", "unit", "container", "input_hash", "generation", "model", "repo", "revision", "precision"),
    *(
        "tensor_parallel_size",
        "gpus",
        "port",
        "url",
        "served_names",
        "stands_in_for",
        "vram_budget_mib",
        "image",
        "image_id",
    ),
    "accept_risk",
)
"""Values of an engine's configuration that the status has."""
NO_PEERS = "# Its GPUs are kept from reading each other's memory: "
"""Beginning of a line of `vllm-engine.service.j2`, before a reason of `gpu.topology.correctness`."""
RECORDED = ("phase", "since", "started_at", "ready_at")
"""Values of the supervisor's record."""


def describe_engine(
    config: EngineConfig,
    unit: Mapping[str, str] | None,
    container: Container | None,
    state: EngineState | None,
) -> Json:
    """Return one engine as `status --format json` shows it.

    Args:
        unit: properties of its unit, or None if systemd does not know it.
    """
    configured = {key: getattr(config, key) for key in CONFIGURED}
    return {
        **{key: list(value) if isinstance(value, tuple) else value for key, value in configured.items()},
        **_describe_unit(unit or {}),
        **_describe_container(container, EngineIdentity(config.engine)),
        **{key: getattr(state, key, None) for key in RECORDED},
        "load_seconds": _measure_load_seconds(unit or {}, state),
        "load_phases": state.load_phases if state else {},
        "log_facts": state.log_facts if state else {},
        "last_failure": asdict(state.last_failure) if state and state.last_failure else None,
    }


def read_peer_obstacles(config: EngineConfig, paths: HostPaths) -> list[str]:
    """Return why the GPUs of an engine are kept from reading each other's memory, as the header of its unit says."""
    try:
        lines = paths.unit_file(config.unit).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.removeprefix(NO_PEERS).rstrip(".") for line in lines if line.startswith(NO_PEERS)]


def sum_budgets(configs: Sequence[EngineConfig]) -> dict[str, int | None]:
    """Return the budget of each GPU in MiB: the sum over its engines, or None if one of them states none."""
    budgets: dict[str, int | None] = {}
    for config in configs:
        for uuid in config.gpus:
            before = budgets.get(uuid, 0)
            unstated = before is None or config.vram_budget_mib is None
            budgets[uuid] = None if unstated else (before or 0) + (config.vram_budget_mib or 0)
    return budgets


def read_quality(paths: HostPaths) -> Json | None:
    """Return the newest run of the quality suite; None if there is none that this user may read."""
    newest = next(read_suites(paths), None)
    keys = ("run", "at", "profile", "generation", "passed", "failed", "unsteady", "note")
    return {key: getattr(newest, key) for key in keys} if newest else None


def collect(
    paths: HostPaths,
    docker: DockerEngine,
    units: Callable[[Sequence[str]], tuple[dict[str, dict[str, str]], str | None]] = ask_units,
    gpus: Callable[[Mapping[str, int | None], HostPaths], Asked] = ask_gpus,
    expected_profile: str | None = None,
) -> Json:
    """Collect everything that `vllm-edge status` shows and judges.

    Returns:
        The status document before it is judged: `problems` lists what could not be asked.
    """
    configs, problems = load_configs(paths)
    # Read this first: whether a switch runs decides how everything after it is judged.
    switches, switch_problems = read_switches(paths)
    profile, profile_problem = read_active_profile(paths)
    shown, unit_problem = units([*[config.unit for config in configs], TARGET, GATEWAY_UNIT])
    containers, docker_problem = ask_containers(docker, [config.container for config in configs])
    boards, gpu_problem = gpus(sum_budgets(configs), paths)
    live_files, file_problems = read_live_files(paths, profile)
    problems += [text for text in (profile_problem, unit_problem, docker_problem, gpu_problem) if text]
    problems += [*switch_problems, *file_problems]
    engines = []
    states: dict[str, EngineState | None] = {}
    for config in configs:
        path = paths.engine_state(config.engine)
        states[config.engine] = state = read_state(path)
        if state is None and path.exists() and not os.access(path, os.R_OK):
            problems.append(f"{path} is not for this user: phases and failures of {config.engine} are shown to root")
        engine = describe_engine(config, shown.get(config.unit), containers.get(config.container), state)
        engine["peer_to_peer_off"] = read_peer_obstacles(config, paths)
        expected = expect_load(paths, config)
        engine["load_expected_s"] = asdict(expected) if expected else None
        if docker_problem is not None and config.container not in containers:
            engine["container_state"] = "unknown"
        engines.append(engine)
    target = shown.get(TARGET, {})
    return {
        "host": socket.gethostname(),
        "active_profile": profile,
        "expected_profile": expected_profile,
        "target": {
            "unit": TARGET,
            "active_state": target.get("ActiveState"),
            "enabled": target.get("UnitFileState") == "enabled" if target else None,
            "need_daemon_reload": target.get("NeedDaemonReload") == "yes" if target else None,
        },
        **switches,
        "live_files": live_files,
        "engines": engines,
        "gateway": describe_gateway(paths, shown.get(GATEWAY_UNIT, {})),
        "gpus": boards,
        "drift": drift.compare(configs, states, boards),
        "on_drift": drift.wanted(configs),
        "quality": read_quality(paths),
        "memory_warnings": feasibility.warn_of_measurement(configs, states, boards),
        "load_warnings": [text for config in configs if (text := warn_of_load(paths, config, states[config.engine]))],
        "problems": problems,
    }
