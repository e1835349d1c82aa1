# SPDX-License-Identifier: Apache-2.0
"""What an engine's supervisor tells: the journal (its messages and the engine's log), systemd, and the state file."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import TextIO

from ..paths import HostPaths
from .config import EngineConfig
from .lifecycle import EXTEND_BY_S
from .sd_notify import Notifier
from .signatures import Explanation
from .startup import WORDS, Phase
from .state import EngineState, Failure, read_state, stamp, write_state

# The supervisor's own requests, every few seconds, would fill the journal. vLLM's access log does not tell the client,
# so requests that others send as well carry a mark in their query, which vLLM ignores.
OWN_MARK = "?by=vllm-edge"
OWN_PROBE = re.compile(rf'"(?:GET /health|[A-Z]+ /\S+{re.escape(OWN_MARK)}) HTTP/1\.[01]" 200')
_LEVEL = re.compile(
    r"^(?:\x1b\[[\d;]{0,9}m){0,4}(?:\([^)]{0,99}\) {0,4}){0,4}(?:\x1b\[[\d;]{0,9}m){0,4}(CRITICAL|ERROR|WARNING)\b"
)
_PRIORITY = {"CRITICAL": 2, "ERROR": 3, "WARNING": 4}


class Journal:
    """Writes lines to a stream, with the prefix `<priority>` if systemd's journal reads it. Threads may share it."""

    def __init__(self, stream: TextIO, prefixed: bool) -> None:
        self._stream = stream
        self._prefixed = prefixed
        self._lock = threading.Lock()

    def write(self, text: str, priority: int = 6) -> None:
        """Write a message of one or more lines with a syslog priority (3 error, 4 warning, 5 notice, 6 info)."""
        with self._lock:
            for line in text.splitlines():
                prefix = f"<{priority}>" if self._prefixed else ""
                try:
                    self._stream.write(f"{prefix}{line}\n")
                    self._stream.flush()
                except (OSError, ValueError):
                    return  # a reader that has gone must not end the engine

    def write_engine_line(self, line: str) -> None:
        level = _LEVEL.match(line)
        self.write(line, _PRIORITY[level.group(1)] if level else 6)


class Reporter:
    """Tells the journal, systemd and the state file how the engine is doing. Only the main thread uses the last two."""

    def __init__(self, config: EngineConfig, paths: HostPaths, notifier: Notifier, journal: Journal) -> None:
        self.notifier = notifier
        self.journal = journal
        self._path = paths.engine_state(config.engine)
        self._failed = False
        self.previous = read_state(self._path)
        """State that this engine's previous supervisor has recorded."""
        kept = self.previous or EngineState(config.engine, "", "")
        self.state = EngineState(
            engine=config.engine,
            phase=Phase.WAITING_FOR_DOCKER,
            since=stamp(),
            input_hash=config.input_hash,
            generation=config.generation,
            last_failure=kept.last_failure,
            starts=kept.starts,
            failures=kept.failures,
            standstills=kept.standstills,
        )

    def record(self, phase: Phase | None = None, **changes: object) -> None:
        """Change the recorded state. Without a state file the engine goes on; the first error is logged."""
        if phase is not None:
            changes |= {"phase": phase, "since": stamp()}
        if isinstance(failure := changes.get("last_failure"), Failure):
            changes["failures"] = self.state.failures | {failure.cause: self.state.failures.get(failure.cause, 0) + 1}
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
        try:
            write_state(self._path, self.state)
        except OSError as error:
            if not self._failed:
                self.journal.write(f"cannot write {self._path}: {error}; the engine runs on without it", 4)
            self._failed = True

    def enter(self, phase: Phase, status: str | None = None) -> None:
        self.notifier.send(status=status or WORDS[phase], extend_s=EXTEND_BY_S)
        if self.state.phase != phase:
            self.record(phase)

    def note_failure(self, why: Explanation, exit_code: int | None = None, tail: Iterable[str] = ()) -> None:
        self.journal.write(why.sentence(), 3)
        self.notifier.send(status=why.sentence(), extend_s=EXTEND_BY_S)
        failure = Failure(stamp(), exit_code, why.cause, why.reason, why.remedy, self.state.phase, list(tail))
        self.record(Phase.FAILED, last_failure=failure)
