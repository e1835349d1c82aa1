# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge status` and `vllm-edge explain`: what systemd, Docker, NVML and our own files say, side by side."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
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
from .engine_state import EngineState, read_state, stamp
from .generations import GenerationError, live_changes, load
from .history import running_json, short
from .host_paths import HostPaths
from .journal import history, holder, read_journal
from .planning import drift
from .progress import WORDS, Phase
from .report import drift_table, engine_table, generation_words, gpu_table, switch_table, table, wrapped
from .switching import SWITCH_UNIT, TARGET, FileChange

UNIT_PROPERTIES = (
    "Id",
    "LoadState",
    "ActiveState",
    "SubState",
    "UnitFileState",
    "WantedBy",
    "NeedDaemonReload",
    "StatusText",
    "Result",
    "NRestarts",
    "InactiveExitTimestamp",
    "ActiveEnterTimestamp",
    "StateChangeTimestamp",
)
PROC = Path("/proc")
HISTORY = 10
"""Former switches in the JSON; the newest SHOWN of them in the tables."""
SHOWN = 5

Json = dict[str, Any]
Asked = tuple[list[Json], str | None]


# -- asking


def parse_units(text: str) -> dict[str, dict[str, str]]:
    """`systemctl show` of several units: blocks of Key=value, divided by blank lines."""
    blocks = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {block["Id"]: block for block in blocks if "Id" in block}


def ask_units(units: Sequence[str]) -> tuple[dict[str, dict[str, str]], str | None]:
    command = ["systemctl", "show", "--timestamp=unix", f"--property={','.join(UNIT_PROPERTIES)}", "--", *units]
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


def ask_gpus(budgets: Mapping[str, int | None], paths: HostPaths) -> Asked:
    """Memory of every GPU that answers, held against the budgets by UUID; None is a budget that nobody stated.

    A GPU that does not answer, or a driver that is absent, is a sentence and not a failure.
    """
    from .gpus import read_boards, slots_of
    from .nvml import NvmlFailure, open_nvml, pynvml_missing
    from .owners import find_owners
    from .vram import Limits, evaluate

    if pynvml_missing():
        return [], "GPUs cannot be read: the Python package nvidia-ml-py is not installed beside this program"
    try:
        with open_nvml() as session:
            reading = read_boards(session, slots_of(paths))
    except NvmlFailure as failure:
        return [], f"GPUs cannot be read: {failure}"
    owners = find_owners({process.pid for gpu in reading.gpus for process in gpu.processes or ()})
    limits = Limits({uuid: mib for uuid, mib in budgets.items() if mib is not None}, {}, "ignore")
    boards = []
    for gpu in reading.gpus:
        verdict = evaluate([gpu], owners, limits)
        board = verdict.gpus[0].as_dict() | {"problem": " ".join(verdict.failures) or None}
        if budgets.get(gpu.uuid, 0) is None:
            board |= {"budget_mib": None, "headroom_mib": None, "within_budget": None, "problem": None}
        boards.append({key: value for key, value in board.items() if key not in ("slot", "expected_mib")})
    return boards, " ".join(map(str, reading.lost)) or None


def parse_listeners(text: str) -> dict[int, list[str]]:
    """Addresses that somebody listens on, by port, out of /proc/net/tcp or tcp6."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 4 or words[3] != "0A":
            continue
        digits, _, port = words[1].partition(":")
        # Words of 32 bits, each as this machine keeps it.
        packed = b"".join(int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
        address = ipaddress.ip_address(packed)
        found.setdefault(int(port, 16), []).append(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def ask_listeners() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name in ("tcp", "tcp6"):
        try:
            text = (PROC / "net" / name).read_text(encoding="ascii")
        except OSError:
            continue  # a kernel without IPv6
        for port, addresses in parse_listeners(text).items():
            found.setdefault(port, []).extend(addresses)
    return found


def read_active_profile(paths: HostPaths) -> tuple[Json | None, str | None]:
    try:
        data = json.loads(paths.active_profile.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:
        return None, f"{paths.active_profile} cannot be read: {error}"
    if not isinstance(data, dict):
        return None, f"{paths.active_profile} holds no JSON object"
    # A record of before there were switches says nothing of them.
    return {
        **dict.fromkeys(("inventory_profile", "chosen_at", "previous_generation")),
        "origin": "inventory",
        **data,
    }, None


def read_switches(paths: HostPaths) -> tuple[Json, list[str]]:
    """The running switch, one that was killed and not ended since, and former ones; what cannot be read."""
    found: Json = {"switch": None, "unfinished_switch": None, "history": []}
    try:
        running, last = holder(paths), read_journal(paths)
        if running is None and last is not None and last.result is None:
            running = holder(paths)  # it may have begun between the two questions
        found["history"] = [short(journal) for journal in history(paths, HISTORY)]
    except OSError as error:
        return found, [f"What is known of switches cannot be read: {error}"]
    if running is not None:
        found["switch"] = running_json(running)
    elif last is not None and last.result is None:
        found["unfinished_switch"] = {**running_json(last), "id": last.id, "message": last.message}
    return found, []


def read_live_files(paths: HostPaths, profile: Mapping[str, Any] | None) -> tuple[list[Json] | None, list[str]]:
    """Live files that are not those of the committed generation; None where there is nothing to hold them against."""
    number = (profile or {}).get("generation")
    if not isinstance(number, int) or not (profile or {}).get("digest"):
        return None, []
    try:
        changes = live_changes(load(paths, number), paths)
    except GenerationError as error:
        text = str(error)
        return None, [
            f"{text[0].upper()}{text[1:].rstrip('.')}. A switch that fails goes back to the committed generation and "
            "needs its files: run site.yml."
        ]
    return [{"path": change.path, "how": file_words(change)} for change in changes], []


def file_words(change: FileChange) -> str:
    """How a live file differs from the generation's."""
    if change.after is None:
        return "it is of an engine that is not in it"
    if change.before is None:
        return "it is missing"
    return change.attributes if change.attributes and change.before == change.after else "its content differs"


# -- putting together


def systemd_time(unit: Mapping[str, str] | None, key: str) -> int | None:
    """`@1763730000` of `--timestamp=unix` in seconds since the epoch; None where systemd has none."""
    text = (unit or {}).get(key, "").removeprefix("@")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _stamp(seconds: int | None) -> str | None:
    return None if seconds is None else stamp(datetime.fromtimestamp(seconds, UTC))


def _load_seconds(unit: Mapping[str, str] | None, state: EngineState | None) -> float | None:
    """As the supervisor counted; to whole seconds by systemd's clock where its file is not for this user."""
    if state is not None:
        return state.load_seconds
    began, ready = systemd_time(unit, "InactiveExitTimestamp"), systemd_time(unit, "ActiveEnterTimestamp")
    active = (unit or {}).get("ActiveState") == "active"
    return float(ready - began) if active and began is not None and ready is not None and ready >= began else None


def engine_json(
    config: EngineConfig,
    unit: Mapping[str, str] | None,
    container: Container | None,
    state: EngineState | None,
    listeners: Mapping[int, Sequence[str]] | None = None,
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
        "wanted_by_target": TARGET in unit.get("WantedBy", "").split() if unit else None,
        "need_daemon_reload": unit.get("NeedDaemonReload") == "yes" if unit else None,
        "active_since": _stamp(systemd_time(unit, "ActiveEnterTimestamp"))
        if unit and unit.get("ActiveState") == "active"
        else None,
        "state_since": _stamp(systemd_time(unit, "StateChangeTimestamp")),
        "container": config.container,
        "container_state": container.status if container else "absent",
        "container_id": container.id if container else None,
        "container_ours": ours if container else None,
        "container_started_at": f"{container.started_at[:19]}Z" if container and running else None,
        "container_image_id": container.image_id if container and running else None,
        "published": list(container.published) if container and running else [],
        "listens_on": sorted(set((listeners or {}).get(config.port, ()))),
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
        "load_seconds": _load_seconds(unit, state),
        "log_facts": state.log_facts if state else {},
        "last_failure": asdict(state.last_failure) if state and state.last_failure else None,
    }


def budgets_of(configs: Sequence[EngineConfig]) -> dict[str, int | None]:
    """Budget of each GPU: the sum over its engines; None where one of them states none."""
    budgets: dict[str, int | None] = {}
    for config in configs:
        for uuid in config.gpus:
            before = budgets.get(uuid, 0)
            unstated = before is None or config.vram_budget_mib is None
            budgets[uuid] = None if unstated else (before or 0) + (config.vram_budget_mib or 0)
    return budgets


def collect(
    paths: HostPaths,
    docker: Docker,
    units: Callable[[Sequence[str]], tuple[dict[str, dict[str, str]], str | None]] = ask_units,
    gpus: Callable[[Mapping[str, int | None], HostPaths], Asked] = ask_gpus,
    listeners: Callable[[], Mapping[int, Sequence[str]]] = ask_listeners,
    expected_profile: str | None = None,
) -> Json:
    """Everything `status` shows; what is wrong, or could not be asked, is named under `problems`."""
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
    # First of all: what is looked at after it is judged by whether a switch runs.
    switches, switch_problems = read_switches(paths)
    profile, profile_problem = read_active_profile(paths)
    shown, unit_problem = units([*[config.unit for config in configs], TARGET])
    containers, docker_problem = ask_containers(docker, [config.container for config in configs])
    boards, gpu_problem = gpus(budgets_of(configs), paths)
    listening = listeners()
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
        engine = engine_json(config, shown.get(config.unit), containers.get(config.container), state, listening)
        if docker_problem is not None and config.container not in containers:
            engine["container_state"] = "unknown"
        engines.append(engine)
    target = shown.get(TARGET)
    status: Json = {
        "host": socket.gethostname(),
        "active_profile": profile,
        "expected_profile": expected_profile,
        "target": {
            "unit": TARGET,
            "active_state": target.get("ActiveState") if target else None,
            "enabled": target.get("UnitFileState") == "enabled" if target else None,
            "need_daemon_reload": target.get("NeedDaemonReload") == "yes" if target else None,
        },
        **switches,
        "live_files": live_files,
        "engines": engines,
        "gpus": boards,
        "drift": [row.as_dict() for row in drift.of_engines(configs, states, boards)],
        "on_drift": drift.wanted(configs),
    }
    return status | {"problems": [*problems, *judge(status)]}


# -- judging


def judge(status: Mapping[str, Any]) -> list[str]:
    """What of it is wrong: one paragraph each, with the remedy. What a switch that runs is just changing is not."""
    switching = status.get("switch") is not None
    return [
        *switch_problems(status),
        *profile_problems(status),
        *file_problems(status),
        *[problem for engine in status["engines"] for problem in engine_problems(engine, switching=switching)],
        *([] if switching else target_problems(status["target"], bool(status["engines"]))),
        *[str(board["problem"]) for board in status["gpus"] if board.get("problem")],
        *drift_problems(status),
    ]


def switch_problems(status: Mapping[str, Any]) -> list[str]:
    """A switch that was killed, and that nothing has ended since."""
    killed = status.get("unfinished_switch")
    if killed is None:
        return []
    remedy = "'vllm-edge recover' goes back to the committed generation."
    if not killed["started_at"]:  # nothing of its journal can be read
        return [f"{killed['message'].rstrip('.')}. {remedy}"]
    return [
        f"A switch to {generation_words(killed['generation'], killed['profile'])}, which {killed['asked_by']} asked "
        f"for at {killed['started_at']}, was ended in phase {killed['phase'] or 'none'} and left unfinished: {remedy}"
    ]


def drift_problems(status: Mapping[str, Any]) -> list[str]:
    """Plan against measurement, where every engine serves: one that loads holds less than it will."""
    settled = all(
        (engine["active_state"], state_words(engine)) == ("active", "serving") for engine in status["engines"]
    )
    if status.get("switch") is not None or not settled or status.get("on_drift") == "ignore":
        return []
    return drift.sentences(status.get("drift") or [])


CHOSEN = {"inventory": "by the inventory", "-e": "by -e", "host": "on the host"}


def chosen_words(profile: Mapping[str, Any]) -> str:
    """`chosen by -e on 2026-11-21T16:40:00Z`."""
    when = f" on {profile['chosen_at']}" if profile.get("chosen_at") else ""
    return f"chosen {CHOSEN.get(profile.get('origin', 'inventory'), profile.get('origin'))}{when}"


def profile_problems(status: Mapping[str, Any]) -> list[str]:
    """Whether inventory, record and files agree on what this host serves."""
    profile, expected, running = status["active_profile"], status["expected_profile"], status.get("switch")
    if profile is None:
        if expected is None or running is not None:
            return []
        return [f"The inventory says profile {expected}, and no profile is active on this host: run site.yml."]
    runs = profile.get("profile")
    problems = []
    if expected is not None and runs != expected and (running is None or running["profile"] != expected):
        plain = profile.get("origin", "inventory") == "inventory"
        problems.append(
            f"The inventory says profile {expected}, this host runs {runs} ({chosen_words(profile)}): run site.yml"
            f"{'' if plain else f' -e serving_profile={expected}'} to bring {expected}, or put 'serving_profile: "
            f"{runs}' into the inventory to keep what runs."
        )
    recorded = profile.get("engines")
    # With the generation at hand its files are compared one by one.
    if isinstance(recorded, Mapping) and status.get("live_files") is None and running is None:
        there = {engine["engine"]: engine for engine in status["engines"]}
        if there.keys() != recorded.keys():
            problems.append(
                f"Generation {profile.get('generation')} has the engines {', '.join(sorted(recorded)) or 'none'}, and "
                f"configured on this host are {', '.join(sorted(there)) or 'none'}: a run was interrupted, or somebody "
                "removed files. Run site.yml."
            )
        for name, engine in there.items():
            hashed = (recorded.get(name) or {}).get("input_hash", engine["input_hash"])
            if hashed != engine["input_hash"]:
                problems.append(
                    f"The files of engine {name} are not those of generation {profile.get('generation')} (input hash "
                    f"{engine['input_hash'][:12]}, recorded {hashed[:12]}): a run was interrupted. Run site.yml."
                )
    return problems


def file_problems(status: Mapping[str, Any]) -> list[str]:
    """Live files against those of the committed generation. An unfinished switch is its own problem."""
    if status.get("switch") is not None or status.get("unfinished_switch") is not None:
        return []
    generation = (status["active_profile"] or {}).get("generation")
    return [
        f"{row['path']} is not what generation {generation} says: {row['how']}. Run site.yml, or 'vllm-edge switch "
        f"{generation}', to put it back; where the change was meant, put it into the inventory."
        for row in status.get("live_files") or []
    ]


def engine_problems(engine: Mapping[str, Any], *, switching: bool = False) -> list[str]:
    """What is wrong with one engine. During a switch it may stop, load, and differ from its files."""
    unit, problems = engine["unit"], []
    explain = f"'vllm-edge explain {engine['engine']}' and 'journalctl -u {unit}' say why"
    if switching and engine["active_state"] in ("activating", "deactivating", "inactive"):
        pass
    elif engine["active_state"] == "activating" and engine["sub_state"] != "auto-restart":
        problems.append(f"{unit} does not serve yet: {state_words(engine)}. Wait for it; 'systemctl status {unit}'.")
    elif engine["active_state"] == "active" and state_words(engine) != "serving":
        problems.append(f"{unit} is {state_words(engine)}: {explain}; its watchdog restarts it if it stays so.")
    elif engine["active_state"] != "active" and engine["load_state"] == "not-found":
        problems.append(f"{unit} is gone from /etc/systemd/system: run site.yml.")
    elif engine["active_state"] not in ("active", None):
        problems.append(f"{unit} is {state_words(engine)}: {explain}; 'systemctl start {unit}' starts it.")
    if engine["active_state"] is not None and engine["wanted_by_target"] is False and not switching:
        problems.append(f"{unit} is not wanted by {TARGET}, so it does not start at boot: run site.yml.")
    if engine["need_daemon_reload"] and not switching:
        problems.append(f"{unit} was changed on disk and systemd knows the former one: run site.yml.")
    if engine["container_ours"] is False:
        problems.append(
            f"A container named {engine['container']} exists that is not ours; it is left alone, and {unit} cannot "
            "start until somebody renames or removes it."
        )
    if engine["running_input_hash"] not in (None, engine["input_hash"]) and not switching:
        problems.append(
            f"The running container of {unit} was made from other inputs than the files on disk: run site.yml, or "
            f"'systemctl restart {unit}'."
        )
    wide = sorted(
        {address for address in engine["listens_on"] if not is_loopback(address)}
        | {address for address in engine["published"] if not is_loopback(address.rpartition(":")[0])}
    )
    if wide:
        problems.append(
            f"Port {engine['port']} of {engine['engine']} is open beyond the loopback ({', '.join(wide)}): vLLM asks "
            f"nobody who they are. 'ss -ltnp sport = :{engine['port']}' says who listens; run site.yml where it is the "
            "engine's own container."
        )
    return problems


def target_problems(target: Mapping[str, Any], needed: bool) -> list[str]:
    """Whether the engines come back after a boot."""
    if not needed or target["active_state"] is None or (target["enabled"] and target["active_state"] == "active"):
        return []
    unit, state = target["unit"], target["active_state"]
    if target["enabled"]:
        return [
            f"{unit} is {state}, as after 'vllm-edge stop': 'systemctl start {unit}' starts its engines, and so does a "
            "boot."
        ]
    return [
        f"{unit} is {state} and not enabled: engines do not all start at boot. 'systemctl enable --now {unit}', or run "
        "site.yml."
    ]


def is_loopback(address: str) -> bool:
    """Whether only this host reaches it."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False  # no address stands for all of them


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


def _gpu_words(uuids: Sequence[str], boards: Sequence[Mapping[str, Any]]) -> list[str]:
    index = {board.get("uuid"): board.get("index") for board in boards}
    return [str(index[uuid]) if uuid in index else uuid.removeprefix("GPU-")[:8] for uuid in uuids]


def engine_lines(engines: Sequence[Mapping[str, Any]], boards: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        {
            **engine,
            "slots": _gpu_words(engine["gpus"], boards),
            "state": state_words(engine),
            "since": engine["active_since"] or engine["state_since"] or engine["since"],
        }
        for engine in engines
    ]
    lines = [*engine_table("engine", rows), ""]
    roles = [[name, engine["engine"], engine["url"]] for engine in engines for name in engine["served_names"]]
    lines += [*table(["served name", "engine", "address"], roles), ""]
    for engine in engines:
        lines += wrapped(f"{engine['unit']}: {engine['status_text'] or 'no status'}")
        since = f" since {engine['container_started_at']}" if engine["container_started_at"] else ""
        lines += wrapped(f"container {engine['container_state']}{since}", "  ")
        failure = engine["last_failure"]
        if failure:
            lines += wrapped(f"last failure {failure['time']}: {failure['reason']}. {failure['remedy']}", "  ")
    return lines


def gpu_lines(boards: Sequence[Mapping[str, Any]]) -> list[str]:
    return [*gpu_table(boards), "", *[f"GPU {board['index']} is {board['uuid']}" for board in boards]]


def choice_lines(status: Mapping[str, Any]) -> list[str]:
    """Who chose the profile, and what the inventory says where that is something else."""
    profile = status["active_profile"]
    inventory = status["expected_profile"] or profile.get("inventory_profile")
    if inventory is not None and inventory != profile.get("profile"):
        return wrapped(f"inventory says {inventory}, host runs {profile.get('profile')} ({chosen_words(profile)})")
    return [chosen_words(profile)]


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """At most 100 columns."""
    profile = status["active_profile"]
    if profile is None:
        lines = ["no profile is active on this host"]
    else:
        lines = [f"profile {profile.get('profile', '?')}, generation {profile.get('generation', '?')}"]
        lines += choice_lines(status)
    running = status["switch"]
    if running is not None:
        back = ", going back" if running["direction"] == "back" else ""
        lines += wrapped(
            f"switching to {generation_words(running['generation'], running['profile'])} for "
            f"{running['seconds']:.0f} s, phase {running['phase'] or 'none yet'}{back}, asked by {running['asked_by']}"
            f"; 'journalctl -fu {SWITCH_UNIT}' follows it"
        )
    lines.append("")
    if status["engines"]:
        lines += engine_lines(status["engines"], status["gpus"])
    else:
        lines.append("no engine is configured on this host")
    if status["gpus"]:
        lines += ["", *gpu_lines(status["gpus"])]
    if status.get("drift"):
        lines += ["", *drift_table(status["drift"], {board["uuid"]: board["index"] for board in status["gpus"]})]
    if status["history"]:
        lines += ["", *switch_table(status["history"][:SHOWN])]
    if status["problems"]:
        lines += ["", "Problems:"]
    for problem in status["problems"]:
        lines += wrapped(problem, "  ")
    return lines


def run_status(paths: HostPaths, *, output: str, expected_profile: str | None = None) -> int:
    """Entry of `vllm-edge status`. Reporting a bad state is a success: 0 unless nothing could be said."""
    from .containers import DockerEngine

    status = collect(paths, DockerEngine(request_timeout_s=10), expected_profile=expected_profile)
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
    lines += wrapped(f"What: {failure.reason}.", "  ")
    lines += wrapped(f"Remedy: {failure.remedy}.", "  ")
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
