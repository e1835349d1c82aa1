# SPDX-License-Identifier: Apache-2.0
"""Strict reading of an engine's two files on the host, `engine.json` and `docker-create`.

Ansible renders both, but a person may have edited them since. All mistakes in a file are reported at once, with the
file, the key, the value and what is expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..names import ENGINE_NAME, LABEL_ENGINE, LABEL_GENERATION, LABEL_INPUT_HASH
from ..paths import HostPaths

# systemd controls the engine, and Docker's own lifecycle options would interfere with it.
_FORBIDDEN = {
    "--rm": "the supervisor removes the container itself, after it has read why it ended",
    "--restart": "systemd restarts the engine; a second judge would hide crashes from it",
    "--gpus": "GPUs are given by CDI: --device=nvidia.com/gpu=<UUID>",
    "--privileged": "an engine needs no privileges on the host",
}


class EngineConfigError(ValueError):
    """The engine's files cannot be used; the text says what to correct."""


@dataclass(frozen=True)
class EngineConfig:
    """Content of `engine.json`."""

    engine: str
    unit: str
    """Name of the systemd unit."""
    container: str
    """Name of the container."""
    url: str
    """`http://host:port` of the published port."""
    served_names: tuple[str, ...]
    model: str
    repo: str
    revision: str
    precision: str
    tensor_parallel_size: int
    gpus: tuple[str, ...]
    """UUIDs of the GPUs."""
    port: int
    input_hash: str
    generation: int
    """Number of the generation in which this input hash first appeared."""
    image: str
    vram_budget_mib: int | None
    stop_timeout_s: float
    stall_timeout_s: float
    """Seconds without progress in the log after which a loading engine is ended."""
    health_timeout_s: float
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    image_id: str = ""
    weights_path: str = ""
    weights_record: str = ""
    """Path of the record of the model's files (weights/record.py)."""
    max_model_len: int | None = None
    shutdown_timeout_s: float | None = None
    """vLLM's own --shutdown-timeout if it was set: time to finish requests after SIGTERM."""
    plan: Mapping[str, Any] | None = None
    """What the planner predicted for the engine (`expectation` in planning/drift.py); None if nothing was planned."""

    @property
    def address(self) -> str:
        """`host:port` of the published port."""
        return urlsplit(self.url).netloc


@dataclass(frozen=True)
class DockerCreate:
    """Content of `docker-create`: the arguments of `docker create`, one per line."""

    arguments: tuple[str, ...]
    name: str
    """Value of --name."""
    labels: Mapping[str, str]
    """Values of --label by key."""


@dataclass(frozen=True)
class Engine:
    """Both files of an engine, consistent with each other."""

    config: EngineConfig
    create: DockerCreate


_STRINGS = ("engine", "unit", "container", "url", "model", "repo", "revision", "precision", "input_hash", "image")
_OPTIONAL_STRINGS = ("tool_call_parser", "reasoning_parser")
_TEXTS = ("image_id", "weights_path", "weights_record")
"""Keys that are missing in files of older generations."""
_POSITIVE = ("stop_timeout_s", "stall_timeout_s", "health_timeout_s")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_names(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) and item for item in value)


def engine_problems(data: Mapping[str, Any]) -> list[str]:
    """Return all mistakes in a parsed `engine.json`, each as a phrase; none if it is valid."""
    found: list[str] = []

    def expect(key: str, good: bool, wanted: str) -> None:
        if key not in data:
            found.append(f"{key} is missing: {wanted}")
        elif not good:
            found.append(f"{key} is {data[key]!r}: {wanted}")

    for key in _STRINGS:
        value = data.get(key)
        expect(key, isinstance(value, str) and value != "", "a text that is not empty")
    for key in ("served_names", "gpus"):
        expect(key, _is_names(data.get(key)), "a list of at least one name")
    expect("tensor_parallel_size", _is_count(data.get("tensor_parallel_size")), "a whole number from 1")
    expect("generation", _is_count(data.get("generation"), 0), "a whole number from 0")
    port = data.get("port")
    expect("port", _is_count(port) and isinstance(port, int) and port <= 65535, "a TCP port, 1 to 65535")
    for key in _POSITIVE:
        value = data.get(key)
        expect(key, _is_number(value) and isinstance(value, int | float) and value > 0, "seconds, more than 0")
    budget = data.get("vram_budget_mib")
    if budget is not None and not _is_count(budget):
        found.append(f"vram_budget_mib is {budget!r}: MiB, a whole number from 1, or null")
    for key in _OPTIONAL_STRINGS:
        value = data.get(key)
        if value is not None and not (isinstance(value, str) and value):
            found.append(f"{key} is {value!r}: a text that is not empty, or null")
    for key in _TEXTS:
        if not isinstance(data.get(key, ""), str):
            found.append(f"{key} is {data[key]!r}: a text")
    longest = data.get("max_model_len")
    if longest is not None and not _is_count(longest):
        found.append(f"max_model_len is {longest!r}: tokens, a whole number from 1, or null")
    patience = data.get("shutdown_timeout_s")
    if patience is not None and not (_is_number(patience) and patience > 0):
        found.append(f"shutdown_timeout_s is {patience!r}: seconds, more than 0, or null")
    plan = data.get("plan")
    if plan is not None and not (isinstance(plan, dict) and isinstance(plan.get("gpus"), list)):
        found.append(f"plan is {plan!r}: an object with gpus, or null")
    name = data.get("engine")
    if isinstance(name, str) and name and not ENGINE_NAME.fullmatch(name):
        found.append(f"engine is {name!r}: small letters, digits and '-', at most 63")
    url = data.get("url")
    if isinstance(url, str) and url:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            found.append(f"url is {url!r}: http://<address>:<port> of the published port")
    return found


def parse_engine(text: str, source: str) -> EngineConfig:
    """Parse `engine.json`.

    Args:
        text: its content
        source: its path, for messages

    Raises:
        EngineConfigError: one error that names every mistake
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise EngineConfigError(f"{source}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineConfigError(f"{source}: holds {type(data).__name__}, a JSON object is expected")
    problems = engine_problems(data)
    if problems:
        raise EngineConfigError(f"{source}: {'; '.join(problems)}")
    return EngineConfig(
        **{key: data[key] for key in _STRINGS},
        served_names=tuple(data["served_names"]),
        tensor_parallel_size=data["tensor_parallel_size"],
        gpus=tuple(data["gpus"]),
        port=data["port"],
        generation=data["generation"],
        vram_budget_mib=data.get("vram_budget_mib"),
        stop_timeout_s=float(data["stop_timeout_s"]),
        stall_timeout_s=float(data["stall_timeout_s"]),
        health_timeout_s=float(data["health_timeout_s"]),
        tool_call_parser=data.get("tool_call_parser"),
        reasoning_parser=data.get("reasoning_parser"),
        **{key: data.get(key, "") for key in _TEXTS},
        max_model_len=data.get("max_model_len"),
        shutdown_timeout_s=None if data.get("shutdown_timeout_s") is None else float(data["shutdown_timeout_s"]),
        plan=data.get("plan"),
    )


def _get_option_values(lines: Sequence[str], option: str) -> list[str]:
    """Return the values of `--option=value` lines, the only form that the file uses: one argument per line."""
    return [line.removeprefix(f"{option}=") for line in lines if line.startswith(f"{option}=")]


def parse_docker_create(text: str, source: str) -> DockerCreate:
    """Parse the argument file. The arguments after the image are vLLM's and are not checked here.

    Args:
        text: its content
        source: its path, for messages

    Raises:
        EngineConfigError: a line is blank, an option is not allowed, or name or image are missing
    """
    lines = text.removesuffix("\n").split("\n")
    blank = [number for number, line in enumerate(lines, 1) if line.strip() == ""]
    if blank:
        raise EngineConfigError(
            f"{source}: line {blank[0]} is blank: every line is one argument of `docker create`, blank ones are not"
        )
    image = next((number for number, line in enumerate(lines) if not line.startswith("-")), None)
    if image is None:
        raise EngineConfigError(f"{source}: names no image: one line that does not begin with '-' is expected")
    options = lines[:image]
    for line in options:
        reason = _FORBIDDEN.get(line.split("=", 1)[0])
        if reason is not None:
            raise EngineConfigError(f"{source}: {line} must not stand here: {reason}")
    names = _get_option_values(options, "--name")
    if len(names) != 1:
        raise EngineConfigError(f"{source}: {len(names)} lines `--name=...` before the image, exactly one is expected")
    labels = dict(item.split("=", 1) for item in _get_option_values(options, "--label") if "=" in item)
    return DockerCreate(arguments=tuple(lines), name=names[0], labels=labels)


def check_together(config: EngineConfig, create: DockerCreate, source: str) -> None:
    """Check that both files describe the same container. Raises EngineConfigError.

    Otherwise the supervisor would start one thing and supervise another.
    """
    expected = {
        "--name": (create.name, config.container),
        f"--label={LABEL_ENGINE}": (create.labels.get(LABEL_ENGINE), config.engine),
        f"--label={LABEL_INPUT_HASH}": (create.labels.get(LABEL_INPUT_HASH), config.input_hash),
        f"--label={LABEL_GENERATION}": (create.labels.get(LABEL_GENERATION), str(config.generation)),
    }
    wrong = [f"{key} is {have!r}, engine.json says {want!r}" for key, (have, want) in expected.items() if have != want]
    if wrong:
        raise EngineConfigError(f"{source}: {'; '.join(wrong)}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise EngineConfigError(
            f"{path} does not exist: is the engine's name right (see `vllm-edge status`), has the host been configured?"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise EngineConfigError(f"{path} cannot be read: {error}") from error


def load_config(engine: str, paths: HostPaths) -> EngineConfig:
    """Read and check `engine.json` of one engine. Raises EngineConfigError."""
    if not ENGINE_NAME.fullmatch(engine):
        raise EngineConfigError(f"{engine!r} is no engine name: small letters, digits and '-', at most 63")
    source = paths.engine_dir(engine) / "engine.json"
    config = parse_engine(_read(source), str(source))
    if config.engine != engine:
        raise EngineConfigError(
            f"{source}: describes engine {config.engine!r}, but lies in the directory of {engine!r}"
        )
    return config


def load_engine(engine: str, paths: HostPaths) -> Engine:
    """Read and check both files of one engine. Raises EngineConfigError."""
    config = load_config(engine, paths)
    source = paths.engine_dir(engine) / "docker-create"
    create = parse_docker_create(_read(source), str(source))
    check_together(config, create, str(source))
    return Engine(config, create)


def list_engine_names(paths: HostPaths) -> list[str]:
    """Return the names of the engines that have live files on this host, sorted. Raises OSError."""
    root = paths.etc / "engines"
    try:
        return sorted(entry.name for entry in root.iterdir() if (entry / "engine.json").is_file())
    except FileNotFoundError:
        return []
