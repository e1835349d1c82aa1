# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge status` and `vllm-edge explain`: what systemd, Docker, NVML and our own files say, side by side."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .containers import Container, Docker, DockerAway, DockerRefused, docker_unit
from .engine_config import (
    ENGINE_NAME,
    LABEL_ENGINE,
    LABEL_GENERATION,
    LABEL_INPUT_HASH,
    EngineConfig,
    EngineConfigError,
    engine_names,
    load_config,
)
from .engine_state import EngineState, read_state
from .host_paths import HostPaths
from .progress import WORDS, Phase
from .report import WIDTH, table

UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "StatusText",
    "Result",
    "NRestarts",
    "StateChangeTimestamp",
)

Json = dict[str, Any]


# -- asking


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """`systemctl show` of several units: blocks of Key=value, divided by blank lines."""
    blocks = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {block["Id"]: block for block in blocks if "Id" in block}


def ask_units(units: Sequence[str]) -> tuple[dict[str, dict[str, str]], str | None]:
    if not units:
        return {}, None
    command = ["systemctl", "show", f"--property={','.join(UNIT_PROPERTIES)}", "--", *units]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, f"systemd cannot be asked: {error}"
    if done.returncode != 0:
        return {}, f"systemd cannot be asked: {done.stderr.strip() or f'exit status {done.returncode}'}"
    return parse_units(done.stdout), None


def ask_containers(docker: Docker, names: Sequence[str]) -> tuple[dict[str, Container], str | None]:
    found: dict[str, Container] = {}
    unit = docker_unit()
    if unit is not None and not unit.active:
        # A question over the socket would start it, and a status changes nothing.
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


def ask_gpus() -> tuple[list[Json], str | None]:
    """Memory of every GPU. The driver may be absent: that is a sentence, not a failure."""
    from .nvml import NvmlFailure, open_nvml, pynvml_missing

    if pynvml_missing():
        return [], "GPUs cannot be read: the Python package nvidia-ml-py is not installed beside this program"
    try:
        with open_nvml() as session:
            reading = session.read()
    except NvmlFailure as failure:
        return [], f"GPUs cannot be read: {failure}"
    keys = ("index", "uuid", "name", "total_mib", "reserved_mib", "used_mib", "free_mib")
    return [{key: getattr(gpu, key) for key in keys} for gpu in reading.gpus], None


def read_active_profile(paths: HostPaths) -> tuple[Json | None, str | None]:
    try:
        data = json.loads(paths.active_profile.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{paths.active_profile} cannot be read: {error}"
    return (data, None) if isinstance(data, dict) else (None, f"{paths.active_profile} holds no JSON object")


# -- putting together


def engine_json(
    config: EngineConfig, unit: Mapping[str, str] | None, container: Container | None, state: EngineState | None
) -> Json:
    """One engine as `status --format json` shows it."""
    ours = container is not None and container.labels.get(LABEL_ENGINE) == config.engine
    labels = container.labels if container is not None and ours else {}
    running = container is not None and container.running
    generation = labels.get(LABEL_GENERATION, "")
    return {
        "engine": config.engine,
        "unit": config.unit,
        "active_state": unit.get("ActiveState") if unit else None,
        "sub_state": unit.get("SubState") if unit else None,
        "load_state": unit.get("LoadState") if unit else None,
        "result": unit.get("Result") if unit else None,
        "restarts": int(unit["NRestarts"]) if unit and unit.get("NRestarts", "").isdigit() else None,
        "status_text": (unit.get("StatusText") or None) if unit else None,
        "container": config.container,
        "container_state": container.status if container else "absent",
        "container_id": container.id if container else None,
        "container_ours": ours if container else None,
        "running_input_hash": labels.get(LABEL_INPUT_HASH) if running else None,
        "running_generation": int(generation) if running and generation.isdigit() else None,
        "input_hash": config.input_hash,
        "generation": config.generation,
        "model": config.model,
        "repo": config.repo,
        "revision": config.revision,
        "precision": config.precision,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpus": list(config.gpus),
        "port": config.port,
        "url": config.url,
        "served_names": list(config.served_names),
        "vram_budget_mib": config.vram_budget_mib,
        "image": config.image,
        "phase": state.phase if state else None,
        "since": state.since if state else None,
        "started_at": state.started_at if state else None,
        "ready_at": state.ready_at if state else None,
        "load_seconds": state.load_seconds if state else None,
        "log_facts": state.log_facts if state else {},
        "last_failure": asdict(state.last_failure) if state and state.last_failure else None,
    }


def collect(
    paths: HostPaths,
    docker: Docker,
    units: Callable[[Sequence[str]], tuple[dict[str, dict[str, str]], str | None]] = ask_units,
    gpus: Callable[[], tuple[list[Json], str | None]] = ask_gpus,
) -> Json:
    """Everything `status` shows; what could not be asked is named under `problems`."""
    problems: list[str] = []
    configs: list[EngineConfig] = []
    try:
        names = engine_names(paths)
    except OSError as error:
        names = []
        problems.append(f"{paths.etc} cannot be read: {error}")
    for name in names:
        try:
            configs.append(load_config(name, paths))
        except EngineConfigError as error:
            problems.append(str(error))
    profile, profile_problem = read_active_profile(paths)
    shown, unit_problem = units([config.unit for config in configs])
    containers, docker_problem = ask_containers(docker, [config.container for config in configs])
    boards, gpu_problem = gpus()
    problems += [text for text in (profile_problem, unit_problem, docker_problem, gpu_problem) if text]
    engines = []
    for config in configs:
        state = read_state(paths.engine_state(config.engine))
        engine = engine_json(config, shown.get(config.unit), containers.get(config.container), state)
        if docker_problem is not None and config.container not in containers:
            engine["container_state"] = "unknown"
        engines.append(engine)
    return {"active_profile": profile, "engines": engines, "gpus": boards, "problems": problems}


# -- words


def state_words(engine: Mapping[str, Any]) -> str:
    """One word or two: what an operator wants to know first."""
    active, phase = engine["active_state"], engine["phase"]
    if active == "active":
        return "not answering" if phase == Phase.UNHEALTHY else "serving"
    if active == "activating":
        if engine["sub_state"] == "auto-restart":
            return "restarting"
        return WORDS[Phase(phase)] if phase in list(Phase) else "starting"
    return str(active or phase or "unknown")


def _gpu_words(uuids: Sequence[str], boards: Sequence[Mapping[str, Any]]) -> str:
    index = {board.get("uuid"): board.get("index") for board in boards}
    return ",".join(str(index[uuid]) if uuid in index else uuid.removeprefix("GPU-")[:8] for uuid in uuids)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def engine_lines(engines: Sequence[Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            engine["engine"],
            state_words(engine),
            f"{engine['model']} {engine['precision']}",
            str(engine["tensor_parallel_size"]),
            _gpu_words(engine["gpus"], boards),
            str(engine["port"]),
            "-" if engine["load_seconds"] is None else f"{engine['load_seconds']:.0f} s",
            engine["since"] or "-",
        ]
        for engine in engines
    ]
    lines = table(["engine", "state", "model", "TP", "GPU", "port", "load", "since"], rows, frozenset({3, 5, 6}))
    lines.append("")
    for engine in engines:
        lines += _wrapped(f"{engine['unit']}: {engine['status_text'] or 'no status'}", "")
        lines += _wrapped(f"served names {', '.join(engine['served_names'])}; container {engine['container_state']}")
        if engine["running_input_hash"] not in (None, engine["input_hash"]):
            lines += _wrapped(
                "the running container was made from other inputs than the files on disk: restart the unit"
            )
        if engine["container_ours"] is False:
            lines += _wrapped(f"a container named {engine['container']} exists that is not ours; it is left alone")
        failure = engine["last_failure"]
        if failure:
            lines += _wrapped(f"last failure {failure['time']}: {failure['reason']}. {failure['remedy']}")
    return lines


def gpu_lines(boards: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            str(board["index"]),
            str(board["name"]),
            str(board["uuid"]),
            *(f"{board[key]:,}" if board.get(key) is not None else "?" for key in ("used_mib", "total_mib")),
        ]
        for board in boards
    ]
    return table(["GPU", "name", "uuid", "used MiB", "total MiB"], rows, frozenset({0, 3, 4}))


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """At most 100 columns."""
    profile = status["active_profile"]
    if profile is None:
        lines = ["no profile is active on this host"]
    else:
        lines = [f"profile {profile.get('profile', '?')}, generation {profile.get('generation', '?')}"]
    lines.append("")
    if status["engines"]:
        lines += engine_lines(status["engines"], status["gpus"])
    else:
        lines.append("no engine is configured on this host")
    if status["gpus"]:
        lines += ["", *gpu_lines(status["gpus"])]
    for problem in status["problems"]:
        lines += ["", *_wrapped(problem, "")]
    return lines


def run_status(paths: HostPaths, *, output: str) -> int:
    """Entry of `vllm-edge status`. Reporting a bad state is a success: 0 unless nothing could be said."""
    from .containers import DockerEngine

    status = collect(paths, DockerEngine(request_timeout_s=10))
    if output == "json":
        print(json.dumps(status, indent=2, ensure_ascii=False))
    else:
        print("\n".join(status_lines(status)))
    return 0


def explain_lines(engine: str, state: EngineState | None) -> list[str]:
    """The last failure, in words, with the engine's last lines."""
    if state is None:
        return [f"{engine}: nothing is known; it has not been started on this host since its state was last removed"]
    now = f"{engine}: {WORDS[Phase(state.phase)] if state.phase in list(Phase) else state.phase} since {state.since}"
    failure = state.last_failure
    if failure is None:
        return [now, "No failure has been recorded."]
    status = "" if failure.exit_code is None else f", exit status {failure.exit_code}"
    during = WORDS[Phase(failure.phase)] if failure.phase in list(Phase) else failure.phase
    lines = [now, f"Last failure: {failure.time} (while: {during or 'unknown'}{status})"]
    lines += _wrapped(f"What: {failure.reason}.")
    lines += _wrapped(f"Remedy: {failure.remedy}.")
    if failure.log_tail:
        lines += ["The engine's last lines:", *(f"  | {line}" for line in failure.log_tail)]
    return lines


def run_explain(engine: str, paths: HostPaths, *, output: str) -> int:
    """Entry of `vllm-edge explain`."""
    known = ENGINE_NAME.fullmatch(engine) is not None
    state = read_state(paths.engine_state(engine)) if known else None
    if not known or (state is None and engine not in engine_names(paths)):
        there = ", ".join(engine_names(paths)) or "none"
        print(f"{engine!r} is no engine of this host; there are: {there}", file=sys.stderr)
        return 1
    if output == "json":
        failure = state.last_failure if state else None
        print(json.dumps({"engine": engine, "last_failure": asdict(failure) if failure else None}, indent=2))
    else:
        print("\n".join(explain_lines(engine, state)))
    return 0
