# SPDX-License-Identifier: Apache-2.0
"""What serves on a host: what systemd, Docker, NVML and the project's own files say, as one JSON document.

The reader of `doctor --deep` also does what takes minutes. It changes nothing on the host, except that a canary that
passed is recorded as always.
"""

from __future__ import annotations

import contextlib
import grp
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from ..answers.canary_command import full_canary
from ..answers.model import read_suites
from ..engine.config import EngineConfig, EngineConfigError, list_engine_names, load_config, sum_budgets
from ..engine.state import EngineState, read_state, stamp
from ..gateway.describe import describe_gateway
from ..gateway.peers import describe_peers
from ..generation.live import describe_file_change, live_changes
from ..generation.model import GenerationError
from ..generation.store import load
from ..gpu.budget import Foreign, Limits, evaluate
from ..gpu.owners import find_owners
from ..names import GATEWAY_UNIT, LABEL_GENERATION, LABEL_INPUT_HASH, TARGET
from ..paths import HostPaths
from ..planning import drift, feasibility
from ..planning.load_time import expect_load, warn_of_load
from ..switch.history import read_switches
from ..switch.steps.gpu_memory import load_slots, read_boards
from ..switch.steps.preflight import check_images
from ..system.docker import (
    Container,
    DockerAway,
    DockerEngine,
    DockerRefused,
    docker_unit,
    explain_unreachable_docker,
)
from ..system.long_run import CommandRefused, watch_moves
from ..system.nvml import NvmlFailure, open_nvml, pynvml_missing
from ..system.space import list_shortages
from ..system.systemd import ask_units
from ..weights.record import load_record
from ..weights.verification import Ownership, find_ownership_faults, verify_recorded
from .model import Deep, Expectation, Weights

Json = dict[str, Any]
Asked = tuple[list[Json], str | None]
CANARY_TIMEOUT_S = 120.0
REPAIR = "'ansible-playbook playbooks/weights.yml -e verify_weights=full'"


def ask_containers(docker: DockerEngine, names: Sequence[str]) -> tuple[dict[str, Container], str | None]:
    """Return the containers that exist, by name, and None or why Docker could not be asked."""
    found: dict[str, Container] = {}
    silent = explain_unreachable_docker(docker.ping, docker_unit(), 3.0)
    try:
        for name in names if silent is None else ():
            if container := docker.find(name):
                found[name] = container
    except (DockerAway, DockerRefused) as error:
        silent = str(error)
    return found, silent and f"the Docker Engine cannot be asked: {silent}"


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
    """Read the memory of every GPU that answers, and compare it with the budgets in MiB by UUID.

    None is a budget that nobody stated; `foreign` is whether processes that are not ours are a problem. Returns a row
    for each GPU, and a sentence on what could not be read, or None: a silent GPU or a missing driver raises nothing.
    """
    if pynvml_missing():
        return [], "GPUs cannot be read: the Python package nvidia-ml-py is not installed beside this program"
    try:
        with open_nvml() as session:
            slots = load_slots(paths)
            reading, lost = read_boards(session, slots)
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
    return boards, " ".join(map(str, lost)) or None


def read_active_profile(paths: HostPaths) -> tuple[Json | None, str | None]:
    """Return the record of the committed generation, and why it could not be read, or None."""
    try:
        data = json.loads(paths.active_profile.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{paths.active_profile} cannot be read: {error}"
    return (data, None) if isinstance(data, dict) else (None, f"{paths.active_profile} holds no JSON object")


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


def judge_state_space(paths: HostPaths) -> list[str]:
    """Return each file system that has no room, where a switch and the engines write."""
    try:
        found = list_shortages("switch", vars(paths))
    except OSError as error:
        found = [f"{error.filename} cannot be read: {error.strerror}"]
    return [f"{wrong}: no switch can begin, and records are not written. Make room there." for wrong in found]


def parse_systemd_time(unit: Mapping[str, str], key: str) -> int | None:
    text = unit.get(key, "").removeprefix("@")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _format_time(unit: Mapping[str, str], key: str) -> str | None:
    seconds = parse_systemd_time(unit, key)
    return None if seconds is None else stamp(datetime.fromtimestamp(seconds, UTC))


def _measure_load_seconds(unit: Mapping[str, str], state: EngineState | None) -> float | None:
    """Return what the supervisor counted; in whole seconds of systemd, if this user may not read its file."""
    if state is not None:
        return state.load_seconds
    began, ready = parse_systemd_time(unit, "InactiveExitTimestamp"), parse_systemd_time(unit, "ActiveEnterTimestamp")
    active = unit.get("ActiveState") == "active"
    return float(ready - began) if active and began is not None and ready is not None and ready >= began else None


SHOWN = {"active_state": "ActiveState", "sub_state": "SubState", "load_state": "LoadState", "result": "Result"}
"""Properties of a unit that the status has as they are, by their keys there."""


def _describe_unit(unit: Mapping[str, str]) -> Json:
    restarts = unit.get("NRestarts", "")
    return {
        **{key: unit.get(name) for key, name in SHOWN.items()},
        "restarts": int(restarts) if restarts.isdigit() else None,
        "status_text": unit.get("StatusText") or None,
        "wanted_by_target": TARGET in unit.get("WantedBy", "").split() if unit else None,
        "need_daemon_reload": unit.get("NeedDaemonReload") == "yes" if unit else None,
        "active_since": _format_time(unit, "ActiveEnterTimestamp") if unit.get("ActiveState") == "active" else None,
        "state_since": _format_time(unit, "StateChangeTimestamp"),
    }


def _describe_container(container: Container | None, engine: str) -> Json:
    """Return what Docker says of the container of an engine. What it runs is only known while it runs."""
    ours = container is not None and container.engine == engine
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
    *("tensor_parallel_size", "gpus", "port", "url", "served_names", "stands_in_for", "vram_budget_mib"),
    *("image", "image_id", "accept_risk"),
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
    """Return one engine as `status --format json` shows it. `unit` is None if systemd does not know it."""
    configured = {key: getattr(config, key) for key in CONFIGURED}
    weights = None
    with contextlib.suppress(OSError):
        weights = load_record(Path(config.weights_record)) if config.weights_record else None
    return {
        **{key: list(value) if isinstance(value, tuple) else value for key, value in configured.items()},
        **_describe_unit(unit or {}),
        **_describe_container(container, config.engine),
        **{key: getattr(state, key, None) for key in RECORDED},
        "load_seconds": _measure_load_seconds(unit or {}, state),
        "load_phases": state.load_phases if state else {},
        "log_facts": state.log_facts if state else {},
        "start_warnings": state.start_warnings if state else [],
        "quantizer": weights.quantizer if weights else "",
        "last_failure": asdict(state.last_failure) if state and state.last_failure else None,
    }


def read_peer_obstacles(config: EngineConfig, paths: HostPaths) -> list[str]:
    """Return why the GPUs of an engine are kept from reading each other's memory, as the header of its unit says."""
    try:
        lines = paths.unit_file(config.unit).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.removeprefix(NO_PEERS).rstrip(".") for line in lines if line.startswith(NO_PEERS)]


def read_quality(paths: HostPaths) -> Json | None:
    """Return the newest run of the quality suite; None if there is none that this user may read."""
    newest = None
    with contextlib.suppress(CommandRefused):
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
    """Collect what `vllm-edge status` shows and judges. `problems` lists what could not be asked."""
    configs, problems = load_configs(paths)
    # Read this first: whether a switch runs decides how everything after it is judged.
    switches, switch_problems = read_switches(paths)
    profile, profile_problem = read_active_profile(paths)
    shown, unit_problem = units([*[config.unit for config in configs], TARGET, GATEWAY_UNIT])
    containers, docker_problem = ask_containers(docker, [config.container for config in configs])
    boards, gpu_problem = gpus(sum_budgets(configs), paths)
    live_files, file_problems = read_live_files(paths, profile)
    problems += [text for text in (profile_problem, unit_problem, docker_problem, gpu_problem) if text]
    problems += [*switch_problems, *file_problems, *judge_state_space(paths)]
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
        "at": stamp(),
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
        "fleet": describe_peers(paths),
        "gpus": boards,
        "drift": drift.compare(configs, states, boards),
        "on_drift": drift.wanted(configs),
        "quality": read_quality(paths),
        "memory_warnings": feasibility.warn_of_measurement(configs, states, boards),
        "load_warnings": [text for config in configs if (text := warn_of_load(paths, config, states[config.engine]))],
        "problems": problems,
    }


def hash_weights(model: str, repo: str, revision: str, group: str, state: Path) -> Weights:
    """Hash every file of a model, and compare files, owners and modes with the record."""
    what = f"The weights of {model}"
    try:
        record = load_record(state / f"{model}.json")
        if record is None:
            return Weights(model, problems=(f"{what} ({repo}) are not recorded: run site.yml.",))
        if record.repo != repo or revision not in (record.requested_revision, record.revision):
            wrong = f"{what} on this host are {record.repo} at {record.revision}, wanted are {repo} at {revision}"
            return Weights(model, problems=(f"{wrong}: run site.yml to bring those.",))
        verification = verify_recorded(record, full=True)
        owner = Ownership(0, grp.getgrnam(group).gr_gid)
        faults = find_ownership_faults(Path(record.path), verification.good, owner)
    except (OSError, KeyError) as error:
        return Weights(model, problems=(f"{what} could not be verified: {error}.",))
    problems = [
        f"{record.path}/{name} of model {model} is damaged: {why}. {REPAIR} brings this file again; an engine that "
        "runs has read it already and needs a restart if it was damaged before that."
        for name, why in sorted(verification.damaged.items())
    ]
    problems += [
        f"{record.path}/{name} of model {model} is missing. {REPAIR} brings it." for name in verification.missing
    ]
    problems += [
        f"{path} of model {model} has owner and mode {was}: engines may not be able to read it, or somebody else may "
        f"change it. {REPAIR} sets them."
        for path, was in sorted(faults.items())
    ]
    return Weights(model, len(record.files), record.total_bytes, record.revision, tuple(problems))


def read_deep(paths: HostPaths, expected: Expectation) -> Deep:
    """Collect the status, hash the weights, look for the images, and send the canary to every engine that runs.

    Where the inventory expects no weights, those of the engines on the host are hashed.
    """
    find_moves = watch_moves(paths.run)
    docker = DockerEngine(request_timeout_s=10)
    configs, _ = load_configs(paths)  # what is wrong with the others is in the status
    status = collect(paths, docker, gpus=partial(ask_gpus, foreign=expected.foreign), expected_profile=expected.profile)
    active = {engine["engine"] for engine in status["engines"] if engine["active_state"] == "active"}
    models = {config.model: (config.repo, config.revision) for config in configs}
    if expected.weights:
        models = {model["name"]: (model["repo"], model.get("revision", "main")) for model in expected.weights}
    return Deep(
        expected=expected,
        status=status,
        images=tuple(check_images(configs, docker)),
        weights=tuple(
            hash_weights(name, *source, group=expected.group, state=paths.state / "weights")
            for name, source in models.items()
        ),
        canary={
            config.engine: full_canary(config, paths, docker, CANARY_TIMEOUT_S)
            for config in configs
            if config.engine in active
        },
        moved=find_moves(),
    )
