# SPDX-License-Identifier: Apache-2.0
"""Rendering of a generation: its files from what Ansible passes on, and the input hash of each engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..engine.config import EngineConfigError, engine_problems, parse_docker_create
from ..names import LABEL_ENGINE, LABEL_GENERATION, LABEL_INPUT_HASH, unit_name
from .model import CREATE_FILE, Foreign, GenerationError, Limits

OF_NO_ENGINE = ("input_hash", "generation")
"""Keys of engine.json that are added on the host: they follow from the other content and the generation's number."""
REACH_THE_SUPERVISOR = ("image_id", "stop_timeout_s", "stall_timeout_s", "health_timeout_s", "shutdown_timeout_s")
"""Keys of engine.json whose change requires a restart. Others are part of `docker create`, or need no restart."""
ADDED_LATER = ("progress_timeout_s", "idle_probe_s", "secrets_hash")
"""More such keys, which count only where they are present: files of earlier commits keep their hash."""


def bare(docker_create: str) -> str:
    """Return the arguments of `docker create` without the two labels that follow from the others."""
    ours = (f"--label={LABEL_GENERATION}=", f"--label={LABEL_INPUT_HASH}=")
    return "".join(line for line in docker_create.splitlines(keepends=True) if not line.startswith(ours))


def labelled(docker_create: str, generation: int, input_hash: str) -> str:
    """Return the arguments of `docker create` with both labels, placed after the label of the engine.

    Args:
        docker_create: arguments without the labels, one per line
        generation: number in which this input hash first appeared
        input_hash: input hash of the engine

    Raises:
        GenerationError: the label of the engine is missing or occurs twice
    """
    lines = docker_create.splitlines(keepends=True)
    places = [number for number, line in enumerate(lines, 1) if line.startswith(f"--label={LABEL_ENGINE}=")]
    if len(places) != 1:
        raise GenerationError(
            f"the line of docker create has {len(places)} arguments --label={LABEL_ENGINE}=..., exactly one is expected"
        )
    labels = [f"--label={LABEL_GENERATION}={generation}\n", f"--label={LABEL_INPUT_HASH}={input_hash}\n"]
    return "".join([*lines[: places[0]], *labels, *lines[places[0] :]])


def _hash(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def input_hash(
    docker_create: str, unit: str, config: Mapping[str, Any], chat_template: str | None, manifest_sha256: str
) -> str:
    """Return the hash over everything that affects the container or its supervisor. An engine restarts if it changes.

    Args:
        docker_create: arguments of `docker create`, one per line
        unit: text of the systemd unit
        config: content of engine.json
        chat_template: text of the chat template, if any
        manifest_sha256: hash over the model's files (`weights.record.Record.manifest_sha256`)
    """
    reaches = {key: config.get(key) for key in REACH_THE_SUPERVISOR}
    reaches |= {key: config[key] for key in ADDED_LATER if key in config}
    return _hash([bare(docker_create), unit, reaches, chat_template, manifest_sha256])


def with_unit_section(unit: str, other: str) -> str:
    """Return the text of a unit with everything before its section [Service] taken from another unit."""
    return other.partition("[Service]")[0] + "".join(unit.partition("[Service]")[1:])


def rendered(options: Mapping[str, Any], installed: Mapping[str, InstalledHash] | None = None) -> Rendered:
    """Build a generation from the options of the module `serving_switch`.

    An engine whose unit differs from the installed one only in its section [Unit] keeps the input hash with which it
    runs: systemd applies that section (order, dependencies, limits of starts) at daemon-reload, without a restart.

    Args:
        options: options of the module
        installed: hashes of the engines of the committed generation, by engine

    Raises:
        GenerationError: one error that names every mistake
    """
    engines: dict[str, EngineFiles] = {}
    problems: list[str] = []
    for row in options["engines"]:
        name = str(row["name"])
        found = ["it is there twice"] if name in engines else []
        engines[name] = _read_engine(name, row, (installed or {}).get(name), found)
        problems += [f"engine {name}: {text}" for text in found]
    budgets = {str(uuid): _read_number(str(mib), int) for uuid, mib in options["budgets_mib"].items()}
    problems += [
        f"budgets_mib of {uuid} is {options['budgets_mib'][uuid]!r}: MiB, a whole number from 0"
        for uuid, mib in budgets.items()
        if mib is None or mib < 0
    ]
    kinds = {item.name: type(item.default) for item in fields(Limits)}
    limits = {key: _read_number(value, kinds.get(key, float)) for key, value in options["limits"].items()}
    for key, number in limits.items():
        if number is None:
            problems.append(f"limits: {key} is {options['limits'][key]!r}, a number is expected")
        if key not in kinds:
            problems.append(f"limits: {key} is none of {', '.join(kinds)}")
    if problems:
        raise GenerationError(f"The rendered generation cannot be used: {'; '.join(problems)}.")
    return Rendered(
        options["profile"],
        engines,
        options["target"],
        budgets,
        options["foreign"],
        Limits(**limits),
        options.get("quality") or None,
    )


def _read_engine(name: str, row: Mapping[str, Any], former: InstalledHash | None, problems: list[str]) -> EngineFiles:
    """Return the files of one engine of the options, and append what is wrong with it."""
    config = {key: value for key, value in row["config"].items() if key not in OF_NO_ENGINE}
    create, unit, chat = bare(row["docker_create"]), row["unit"], row["chat_template"]
    hashed = content = input_hash(create, unit, config, chat, row["manifest_sha256"])
    if former is not None:
        like_before = with_unit_section(unit, former.unit)
        if former.content_hash in (content, input_hash(create, like_before, config, chat, row["manifest_sha256"])):
            hashed = former.input_hash
    problems += engine_problems({**config, "input_hash": hashed, "generation": 1})
    problems += [
        f"{key} is {config.get(key)!r}, {expected!r} is expected"
        for key, expected in (("engine", name), ("unit", unit_name(name)))
        if config.get(key) != expected
    ]
    try:
        parse_docker_create(labelled(create, 1, hashed), CREATE_FILE)
    except (EngineConfigError, GenerationError) as error:
        problems.append(str(error))
    return EngineFiles(create, unit, config, chat, hashed, "" if content == hashed else content)


def _read_number(value: object, kind: type[Any]) -> Any:
    try:
        return kind(value)
    except (ValueError, TypeError):
        return None


@dataclass(frozen=True)
class InstalledHash:
    """Hashes of an engine of the committed generation."""

    input_hash: str
    """Hash with which it runs."""
    content_hash: str
    """Hash over its files."""
    unit: str
    """Text of its unit; empty if it cannot be read."""


@dataclass(frozen=True)
class EngineFiles:
    """Files of one engine, independent of the generation's number."""

    docker_create: str
    """Without the labels of generation and input hash."""
    unit: str
    config: Mapping[str, Any]
    """engine.json without `input_hash` and `generation`."""
    chat_template: str | None
    input_hash: str
    """Hash with which the engine runs, or will run."""
    content_hash: str = ""
    """Hash over these files; empty unless the section [Unit] changed since the engine started."""


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

    @property
    def digest(self) -> str:
        """Hash of the whole content."""
        # Generations of before have no quality gate, and their recorded hash stays right.
        added = {"quality": dict(self.quality)} if self.quality else {}
        return _hash(
            {
                **added,
                "profile": self.profile,
                "engines": {
                    name: {key: value for key, value in asdict(engine).items() if key != "content_hash"}
                    for name, engine in self.engines.items()
                },
                "target": self.target,
                "budgets_mib": dict(self.budgets_mib),
                "foreign": self.foreign,
                "limits": asdict(self.limits),
            }
        )

    @property
    def hashes(self) -> dict[str, str]:
        """Input hash by engine."""
        return {name: engine.input_hash for name, engine in self.engines.items()}
