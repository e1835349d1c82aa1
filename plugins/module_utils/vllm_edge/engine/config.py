# SPDX-License-Identifier: Apache-2.0
"""An engine's two files on the host, `engine.json` and `container.json`.

The program writes both, but a person may have edited them since: what they have instead is named with its file and key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..names import ENGINE_NAME, LABEL_ENGINE, LABEL_GENERATION, LABEL_INPUT_HASH
from ..paths import HostPaths
from ..system.records import RecordError, read_record

CONFIG_FILE = "engine.json"
CONTAINER_FILE = "container.json"
CREATE_FILE = "docker-create"
"""The arguments of `docker create`, one per line, for people: no program reads it."""


PASSED = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "enforce_eager",
    "limit_mm_per_prompt",
    "reasoning_parser",
    "tool_call_parser",
)
"""Arguments of an engine that `vllm serve` gets unchanged, under vLLM's own names, in this order."""


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

    @property
    def cache(self) -> Path | None:
        """The directory of what vLLM compiles; None for a container without one."""
        head, end = "--mount=type=bind,source=", ",target=/cache"
        mounts = (word.removeprefix(head).removesuffix(end) for word in self.container if word.endswith(end))
        return next(map(Path, mounts), None)

    def get_option(self, option: str) -> str:
        return next((word.partition("=")[2] for word in self.container if word.startswith(f"{option}=")), "")


_POSITIVE = frozenset(
    {"tensor_parallel_size", "vram_budget_mib", "max_model_len", "stop_timeout_s", "stall_timeout_s"}
    | {"health_timeout_s", "progress_timeout_s", "shutdown_timeout_s"}
)


def read_config(data: object) -> EngineConfig:
    """Read parsed `engine.json`. Raises EngineConfigError, which names keys, their values and what is expected."""
    try:
        config = read_record(EngineConfig, data)
    except RecordError as error:
        raise EngineConfigError(str(error)) from error
    wrong: list[str] = []
    for field in fields(config):
        key, value = field.name, getattr(config, field.name)
        if value == field.default:
            continue
        if value in ("", ()):
            wrong.append(f"{key} is {value!r}, a value is expected")
        elif key in _POSITIVE and value <= 0:
            wrong.append(f"{key} is {value!r}, more than 0 is expected")
        elif key == "port" and not 0 < value <= 65535:
            wrong.append(f"port is {value}, a TCP port from 1 to 65535 is expected")
    if wrong:
        raise EngineConfigError("; ".join(wrong))
    return config


def parse_engine(text: str, source: str) -> EngineConfig:
    """Parse `engine.json`. Raises EngineConfigError."""
    try:
        return read_config(json.loads(text))
    except EngineConfigError as error:
        raise EngineConfigError(f"{source}: {error}") from error
    except ValueError as error:
        raise EngineConfigError(f"{source}: not JSON: {error}") from error


@dataclass(frozen=True)
class _Container:
    arguments: tuple[str, ...]


def add_labels(arguments: Sequence[str], generation: int, input_hash: str) -> list[str]:
    place = next((at for at, word in enumerate(arguments, 1) if word.startswith(f"--label={LABEL_ENGINE}=")), 0)
    labels = (f"--label={LABEL_GENERATION}={generation}", f"--label={LABEL_INPUT_HASH}={input_hash}")
    return [*arguments[:place], *labels, *arguments[place:]]


def read_container(directory: Path) -> tuple[str, ...]:
    """Return the arguments of `docker create` in a directory, without `add_labels`. Raises EngineConfigError."""
    source = directory / CONTAINER_FILE
    try:
        return read_record(_Container, json.loads(_read(source))).arguments
    except EngineConfigError:
        raise
    except ValueError as error:
        raise EngineConfigError(f"{source}: {error}") from error


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
    return Engine(load_config(engine, paths), read_container(paths.engine_dir(engine)))


def list_engine_names(paths: HostPaths) -> list[str]:
    """Return the names of the engines that have live files on this host, sorted. Raises OSError."""
    root = paths.etc / "engines"
    try:
        return sorted(entry.name for entry in root.iterdir() if (entry / CONFIG_FILE).is_file())
    except FileNotFoundError:
        return []


def sum_budgets(configs: Sequence[EngineConfig]) -> dict[str, int | None]:
    """Return the budget of each GPU in MiB: the sum over its engines, or None if one of them states none."""
    budgets: dict[str, int | None] = {}
    for config in configs:
        for uuid in config.gpus:
            before = budgets.get(uuid, 0)
            unstated = before is None or config.vram_budget_mib is None
            budgets[uuid] = None if unstated else (before or 0) + (config.vram_budget_mib or 0)
    return budgets


def list_passed(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys of PASSED that an engine of the inventory states, each with its argument of `vllm serve`."""
    for name in PASSED:
        value, flag = engine.get(name), f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            yield from [(name, flag)] if value else []
        elif value is not None:
            yield name, f"{flag}={json.dumps(value, sort_keys=True) if isinstance(value, Mapping) else value}"
