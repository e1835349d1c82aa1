# SPDX-License-Identifier: Apache-2.0
"""What the supervisor remembers of an engine, in /var/lib/vllm-edge/engines/<engine>.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..system.files import write_durably

TAIL_LINES = 40


def stamp(at: datetime | None = None) -> str:
    """A time as people and programs read it: UTC, whole seconds."""
    return (at or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Failure:
    """The last death nobody asked for; kept until the next one, also across successful starts."""

    time: str
    exit_code: int | None
    cause: str
    reason: str
    remedy: str
    phase: str = ""
    log_tail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EngineState:
    """Phase, since when, and the last failure."""

    engine: str
    phase: str
    since: str
    container_id: str | None = None
    input_hash: str | None = None
    generation: int | None = None
    started_at: str | None = None
    ready_at: str | None = None
    load_seconds: float | None = None
    log_facts: dict[str, float | int] = field(default_factory=dict)
    last_failure: Failure | None = None


def state_from_json(data: Mapping[str, Any]) -> EngineState:
    """A state of this or an older version of the program; keys it does not know are dropped."""
    known = {item.name for item in fields(EngineState)}
    values = {key: value for key, value in data.items() if key in known}
    failure = values.get("last_failure")
    if isinstance(failure, Mapping):
        keys = {item.name for item in fields(Failure)}
        values["last_failure"] = Failure(**{key: value for key, value in failure.items() if key in keys})
    return EngineState(**values)


def read_state(path: Path) -> EngineState | None:
    """None where there is none, or where it cannot be read: the supervisor then goes by what Docker says."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return state_from_json(data) if isinstance(data, dict) else None
    except (OSError, ValueError, TypeError):
        return None


def write_state(path: Path, state: EngineState) -> None:
    """Atomically: a reader sees the old or the new one, a power cut leaves one of them."""
    # The log tail may carry what users sent: not for everybody.
    write_durably(path, json.dumps(asdict(state), indent=2, ensure_ascii=False) + "\n", 0o640)
