# SPDX-License-Identifier: Apache-2.0
"""The state of an engine that its supervisor records, in /var/lib/vllm-edge/engines/<engine>.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ..system.files import write_durably
from ..system.records import read_record

TAIL_LINES = 40
"""Log lines that a failure record keeps."""


def stamp(at: datetime | None = None) -> str:
    """Return a time (default: now) as text in UTC with whole seconds, such as 2026-11-23T09:30:00Z."""
    return (at or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Failure:
    """The last failure of the engine. It is kept until the next one, also across successful starts."""

    time: str
    exit_code: int | None
    cause: str
    """Key of the cause, as in signatures.py."""
    reason: str
    remedy: str
    phase: str = ""
    log_tail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class EngineState:
    """Phase of the engine, its start times, its last failure, and what was counted since the engine is on this host.
    Times are as `stamp` formats them."""

    engine: str
    phase: str
    """Value of a `Phase`."""
    since: str
    """When the phase began."""
    container_id: str | None = None
    input_hash: str | None = None
    generation: int | None = None
    started_at: str | None = None
    ready_at: str | None = None
    load_seconds: float | None = None
    """Seconds from the start of the container to the first answer of /health."""
    load_phases: dict[str, float] = field(default_factory=dict)
    """The same seconds by phase (values of `Phase`); empty if they were not seen."""
    log_facts: dict[str, float | int] = field(default_factory=dict)
    start_warnings: list[str] = field(default_factory=list)
    """What vLLM warned of at this start, in sentences."""
    last_failure: Failure | None = None
    starts: int = 0
    """Containers that were started."""
    failures: dict[str, int] = field(default_factory=dict)
    """By cause."""
    standstills: int = 0
    """How often it answered /health while its requests made no progress."""


def read_state(path: Path) -> EngineState | None:
    """Return the recorded state; None if there is none or it is unreadable. The supervisor then relies on Docker."""
    try:
        return read_record(EngineState, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def write_state(path: Path, state: EngineState) -> None:
    # The log tail may contain users' requests, so not everybody may read it.
    write_durably(path, json.dumps(asdict(state), indent=2, ensure_ascii=False) + "\n", 0o640)
