# SPDX-License-Identifier: Apache-2.0
"""Rendering of a generation: its files from what Ansible passes on, and the input hash of each engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..engine.config import EngineConfigError, read_config
from ..engine.render import Settings, describe_engine, list_create_arguments, read_settings
from ..gpu.budget import Foreign
from ..paths import HostPaths
from ..text import nearest, shown
from .model import GenerationError, Limits, Purpose

NEEDED = ("name", "model", "gpus", "tensor_parallel_size", "served_names")
"""Keys without which an engine cannot be rendered."""

OF_NO_ENGINE = ("input_hash", "generation")
"""Keys of engine.json that are added on the host: they follow from the other content and the generation's number."""
REACH_THE_SUPERVISOR = ("image_id", "stop_timeout_s", "stall_timeout_s", "health_timeout_s", "shutdown_timeout_s")
"""Keys of engine.json whose change requires a restart. Others are part of `docker create`, or need no restart."""
ADDED_LATER = ("progress_timeout_s", "idle_probe_s", "secrets_hash")
"""More such keys, which count only where they are present: files of earlier commits keep their hash."""


def join_lines(arguments: Iterable[str]) -> str:
    return "".join(f"{argument}\n" for argument in arguments)


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def input_hash(
    container: Iterable[str], unit: str, config: Mapping[str, Any], chat_template: str | None, manifest_sha256: str
) -> str:
    """Return the hash over everything that affects the container or its supervisor. An engine restarts if it changes.

    `container` are the arguments of `docker create` without the labels that follow from this hash, `manifest_sha256` is
    the hash over the model's files (`weights.record.Record.manifest_sha256`).
    """
    reaches = {key: config.get(key) for key in REACH_THE_SUPERVISOR}
    reaches |= {key: config[key] for key in ADDED_LATER if key in config}
    return _hash([join_lines(container), unit, reaches, chat_template, manifest_sha256])


def with_unit_section(unit: str, other: str) -> str:
    return other.partition("[Service]")[0] + "".join(unit.partition("[Service]")[1:])


def rendered(
    options: Mapping[str, Any], paths: HostPaths, installed: Mapping[str, InstalledHash] | None = None
) -> Rendered:
    """Build a generation from the options of the module `serving_switch`.

    An engine whose unit differs from the installed one only in its section [Unit] keeps the input hash with which it
    runs: systemd applies that section (order, dependencies, limits of starts) at daemon-reload, without a restart.
    `installed` are the hashes of the engines of the committed generation. Raises GenerationError: one error that names
    every mistake.
    """
    engines: dict[str, EngineFiles] = {}
    problems: list[str] = []
    try:
        settings = read_settings(options["settings"])
    except EngineConfigError as error:
        raise GenerationError(f"The rendered generation cannot be used: {error}.") from error
    for row in options["engines"]:
        name = str(row["engine"].get("name"))
        try:
            if name in engines:
                raise EngineConfigError("it is there twice")
            engines[name] = _render_engine(row, options["models"], settings, paths, (installed or {}).get(name))
        except EngineConfigError as error:
            problems.append(f"engine {name}: {error}")
    if problems:
        raise GenerationError(f"The rendered generation cannot be used: {'; '.join(problems)}.")
    # Numbers that came with -e are texts.
    kinds: dict[str, type[Any]] = {item.name: type(item.default) for item in fields(Limits)}
    return Rendered(
        options["profile"],
        engines,
        options["target"],
        {str(uuid): int(mib) for uuid, mib in options["budgets_mib"].items()},
        options["foreign"],
        Limits(**{key: kinds[key](value) for key, value in options["limits"].items()}),
        options.get("quality") or None,
        options.get("purpose") or "serving",
        options.get("early", True),
    )


def _render_engine(
    row: Mapping[str, Any],
    models: Mapping[str, Mapping[str, Any]],
    settings: Settings,
    paths: HostPaths,
    former: InstalledHash | None,
) -> EngineFiles:
    """Return the files of one engine of the options. Raises EngineConfigError."""
    engine, unit, chat = row["engine"], row["unit"], row["chat_template"]
    if missing := [key for key in NEEDED if not engine.get(key)]:
        raise EngineConfigError(f"it has no {', no '.join(missing)}")
    if engine["model"] not in models:
        offered = nearest(engine["model"], models).rstrip(".")
        raise EngineConfigError(f"its model is {shown(engine['model'])}; {offered}")
    if wrong := [slot for slot in engine["gpus"] if slot not in range(len(settings.gpu_uuids))]:
        raise EngineConfigError(f"gpus has the slot {shown(wrong[0])}, the host has {len(settings.gpu_uuids)} GPUs")
    ranks = int(engine["tensor_parallel_size"]) * int(engine.get("pipeline_parallel_size") or 1)
    if len(engine["gpus"]) != ranks:
        raise EngineConfigError(
            f"gpus is {shown(engine['gpus'])}: one slot is needed for each of tensor_parallel_size x "
            f"pipeline_parallel_size, which is {ranks}"
        )
    model = models[engine["model"]]
    config = describe_engine(engine, model, settings, paths)
    container = tuple(list_create_arguments(engine, model, settings, paths, chat_template=chat is not None))
    hashed = content = input_hash(container, unit, config, chat, model["manifest_sha256"])
    if former is not None:
        like_before = with_unit_section(unit, former.unit)
        if former.content_hash in (content, input_hash(container, like_before, config, chat, model["manifest_sha256"])):
            hashed = former.input_hash
    read_config({**config, "input_hash": hashed, "generation": 1})
    return EngineFiles(container, unit, config, chat, hashed, "" if content == hashed else content)


@dataclass(frozen=True)
class InstalledHash:
    input_hash: str
    """Hash with which it runs."""
    content_hash: str
    """Hash over its files."""
    unit: str
    """Text of its unit; empty if it cannot be read."""


@dataclass(frozen=True)
class EngineFiles:
    """Files of one engine, independent of the generation's number."""

    container: Sequence[str]
    """Arguments of `docker create` without the labels of generation and input hash."""
    unit: str
    config: Mapping[str, Any]
    """engine.json without `input_hash` and `generation`."""
    chat_template: str | None
    input_hash: str
    """Hash with which the engine runs, or will run."""
    content_hash: str = ""
    """Hash over these files; empty unless the section [Unit] changed since the engine started."""

    @property
    def content(self) -> dict[str, Any]:
        return {
            "docker_create": join_lines(self.container),
            "unit": self.unit,
            "config": dict(self.config),
            "chat_template": self.chat_template,
            "input_hash": self.input_hash,
        }


@dataclass(frozen=True)
class Rendered:
    """A generation without a number."""

    profile: str
    engines: Mapping[str, EngineFiles]
    target: str
    budgets_mib: Mapping[str, int]
    foreign: Foreign = "warn"
    limits: Limits = field(default_factory=Limits)
    quality: Mapping[str, Any] | None = None
    """As `Generation.quality`."""
    purpose: Purpose = "serving"
    early: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """What generation.json says beside engines and numbers."""
        return {
            "profile": self.profile,
            "budgets_mib": dict(self.budgets_mib),
            "foreign": self.foreign,
            "limits": asdict(self.limits),
            # Generations of before have none of them, and their recorded hash stays right.
            **({"quality": dict(self.quality)} if self.quality else {}),
            **({"purpose": self.purpose} if self.purpose != "serving" else {}),
            **({} if self.early else {"early": False}),
        }

    @property
    def digest(self) -> str:
        engines = {name: engine.content for name, engine in self.engines.items()}
        return _hash({**self.settings, "engines": engines, "target": self.target})

    @property
    def hashes(self) -> dict[str, str]:
        return {name: engine.input_hash for name, engine in self.engines.items()}
