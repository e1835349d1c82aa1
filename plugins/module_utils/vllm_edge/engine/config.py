# SPDX-License-Identifier: Apache-2.0
"""Strict reading of an engine's two files on the host, `engine.json` and `container.json`.

The program writes both, but a person may have edited them since. All mistakes in a file are reported at once, with the
file, the key, the value and what is expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from ..names import ENGINE_NAME, LABEL_ENGINE, LABEL_GENERATION, LABEL_INPUT_HASH
from ..paths import HostPaths
from ..system.records import read_record
from ..text import shown

CONFIG_FILE = "engine.json"
CONTAINER_FILE = "container.json"
CREATE_FILE = "docker-create"
"""The arguments of `docker create`, one per line, for people: no program reads it."""


class EngineConfigError(ValueError):
    """The engine's files cannot be used; the text says what to correct."""


@dataclass(frozen=True)
class EngineConfig:
    """Content of `engine.json`."""

    engine: str
    unit: str
    container: str
    url: str
    """`unix:/path` of its socket, or `http://host:port`."""
    served_names: tuple[str, ...]
    model: str
    repo: str
    revision: str
    precision: str
    tensor_parallel_size: int
    gpus: tuple[str, ...]
    """UUIDs of the GPUs."""
    input_hash: str
    generation: int
    """Number of the generation in which this input hash first appeared."""
    image: str
    stop_timeout_s: float
    stall_timeout_s: float
    """Seconds without progress in the log after which a loading engine is ended."""
    health_timeout_s: float
    progress_timeout_s: float = 300.0
    """Seconds without progress of running requests after which a serving engine is ended by the watchdog.

    vLLM gives one step of several ranks as long (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS), and each step moves a figure.
    """
    idle_probe_s: float = 300.0
    """Seconds without a request after which an engine is asked for one token; 0 for never."""
    port: int | None = None
    """TCP port on which the gateway answers for this engine alone; None for none."""
    vram_budget_mib: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    image_id: str = ""
    weights_path: str = ""
    weights_record: str = ""
    """Path of the record of the model's files (weights/record.py)."""
    max_model_len: int | None = None
    shutdown_timeout_s: float | None = None
    """vLLM's own --shutdown-timeout if it was set: time to finish requests after SIGTERM."""
    accept_risk: tuple[str, ...] = ()
    """Options and environment variables with which the engine runs although they undo a limit of it."""
    stands_in_for: tuple[str, ...] = ()
    """Served names of other engines that this one answers to while those are away in a switch."""
    secrets_hash: str = ""
    """Keyed hash of the engine's secrets (`generation.secrets.compute_hash`); empty if it has none."""
    plan: Mapping[str, Any] | None = None
    """What the planner predicted for the engine (`expectation` in planning/drift.py); None if nothing was planned."""

    @property
    def socket(self) -> Path | None:
        """The socket on which it serves; None if it has an address."""
        parts = urlsplit(self.url)
        return Path(parts.path) if parts.scheme == "unix" else None


@dataclass(frozen=True)
class Engine:
    config: EngineConfig
    container: tuple[str, ...]
    """Arguments of `docker create` without the labels of generation and input hash."""

    @property
    def arguments(self) -> list[str]:
        return add_labels(self.container, self.config.generation, self.config.input_hash)

    @property
    def vllm_arguments(self) -> tuple[str, ...]:
        image = next(at for at, word in enumerate(self.container) if not word.startswith("-"))
        return self.container[image + 1 :]

    @property
    def devices(self) -> tuple[str, ...]:
        option = "--device=nvidia.com/gpu="
        return tuple(word.removeprefix(option) for word in self.container if word.startswith(option))

    @property
    def uid(self) -> int:
        return int(self.get_option("--user").partition(":")[0])

    def get_option(self, option: str) -> str:
        return next((word.partition("=")[2] for word in self.container if word.startswith(f"{option}=")), "")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_names(value: object) -> bool:
    return _is_texts(value) and value != []


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and value >= least


def _is_seconds(value: object) -> bool:
    return type(value) in (int, float) and cast(float, value) > 0


_BAND = ("low", "mid", "high")


def _is_plan(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("gpus"), list):
        return False
    bands = [value[key] for key in ("load_s", "load_other_s") if value.get(key) is not None]
    return all(isinstance(band, dict) and all(map(_is_seconds, map(band.get, _BAND))) for band in bands)


def _is_url(value: object) -> bool:
    parts = urlsplit(str(value))
    if parts.scheme == "unix":
        return str(value) == f"unix:{parts.path}" and parts.path.startswith("/")
    return parts.scheme == "http" and bool(parts.hostname) and parts.path in ("", "/")


_Rule = tuple[Callable[[object], bool], str]
_TEXT: _Rule = (_is_text, "a text that is not empty")
_NAMES: _Rule = (_is_names, "a list of at least one name")
_SECONDS: _Rule = (_is_seconds, "seconds, more than 0")
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("engine", "unit", "container", "url", "model", "repo", "revision", "precision"), _TEXT),
    **dict.fromkeys(("input_hash", "image"), _TEXT),
    **dict.fromkeys(("served_names", "gpus"), _NAMES),
    "tensor_parallel_size": (_is_count, "a whole number from 1"),
    "generation": (partial(_is_count, least=0), "a whole number from 0"),
    **dict.fromkeys(("stop_timeout_s", "stall_timeout_s", "health_timeout_s"), _SECONDS),
    "port": (lambda value: _is_count(value) and cast(int, value) <= 65535, "a TCP port, 1 to 65535"),
    "vram_budget_mib": (_is_count, "MiB, a whole number from 1"),
    **dict.fromkeys(("tool_call_parser", "reasoning_parser"), _TEXT),
    "max_model_len": (_is_count, "tokens, a whole number from 1"),
    "shutdown_timeout_s": _SECONDS,
    "plan": (_is_plan, "an object with gpus, whose load_s is null or has low, mid and high in seconds"),
    **dict.fromkeys(
        ("image_id", "weights_path", "weights_record", "secrets_hash"), (lambda value: isinstance(value, str), "a text")
    ),
    **dict.fromkeys(("accept_risk", "stands_in_for"), (_is_texts, "a list of names")),
    "progress_timeout_s": _SECONDS,
    "idle_probe_s": (lambda value: value == 0 or _is_seconds(value), "seconds, 0 for never"),
}
"""What a key must be, as a test and in words. One with a default may be missing, and null if that is the default."""
_FORMS: dict[str, _Rule] = {
    "engine": (lambda value: bool(ENGINE_NAME.fullmatch(str(value))), "small letters, digits and '-', at most 63"),
    "url": (_is_url, "unix:/<path of its socket>, or http://<address>:<port>"),
}
"""Forms that texts must have besides."""
_DEFAULTS = {field.name: field.default for field in fields(EngineConfig)}


def engine_problems(data: Mapping[str, Any]) -> list[str]:
    """Return all mistakes in a parsed `engine.json`, each as a phrase; none if it is valid."""
    needed = {key: wanted for key, (_, wanted) in _RULES.items() if _DEFAULTS[key] is MISSING}
    forms = {key: rule for key, rule in _FORMS.items() if _is_text(data.get(key))}
    wrong = [
        f"{key} is {data[key]!r}: {wanted}{', or null' if _DEFAULTS[key] is None else ''}"
        for key, (good, wanted) in (*_RULES.items(), *forms.items())
        if key in data and not good(data[key]) and not (data[key] is None and _DEFAULTS[key] is None)
    ]
    return [f"{key} is missing: {wanted}" for key, wanted in needed.items() if key not in data] + wrong


def parse_engine(text: str, source: str) -> EngineConfig:
    """Parse `engine.json`. Raises EngineConfigError: one error that names every mistake."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise EngineConfigError(f"{source}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise EngineConfigError(f"{source}: holds {type(data).__name__}, a JSON object is expected")
    problems = engine_problems(data)
    if problems:
        raise EngineConfigError(f"{source}: {'; '.join(problems)}")
    return read_record(EngineConfig, data)


def add_labels(arguments: Sequence[str], generation: int, input_hash: str) -> list[str]:
    place = next((at for at, word in enumerate(arguments, 1) if word.startswith(f"--label={LABEL_ENGINE}=")), 0)
    labels = (f"--label={LABEL_GENERATION}={generation}", f"--label={LABEL_INPUT_HASH}={input_hash}")
    return [*arguments[:place], *labels, *arguments[place:]]


def read_container(directory: Path) -> tuple[str, ...]:
    """Return the arguments of `docker create` in a directory, without `add_labels`. Raises EngineConfigError."""
    source = directory / CONTAINER_FILE
    try:
        arguments = json.loads(_read(source))["arguments"]
    except (ValueError, TypeError, KeyError) as error:
        raise EngineConfigError(f"{source}: not JSON with a list `arguments`: {error}") from error
    if not _is_names(arguments):
        raise EngineConfigError(f"{source}: arguments is {shown(str(arguments))}: {_NAMES[1]}")
    return tuple(arguments)


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
    source = paths.engine_dir(engine) / CONFIG_FILE
    config = parse_engine(_read(source), str(source))
    if config.engine != engine:
        raise EngineConfigError(
            f"{source}: describes engine {config.engine!r}, but lies in the directory of {engine!r}"
        )
    return config


def load_engine(engine: str, paths: HostPaths) -> Engine:
    """Read the files of one engine. Raises EngineConfigError."""
    return Engine(load_config(engine, paths), read_container(paths.engine_dir(engine)))


def list_engine_names(paths: HostPaths) -> list[str]:
    """Return the names of the engines that have live files on this host, sorted. Raises OSError."""
    root = paths.etc / "engines"
    try:
        return sorted(entry.name for entry in root.iterdir() if (entry / CONFIG_FILE).is_file())
    except FileNotFoundError:
        return []
