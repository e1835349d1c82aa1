#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A client of every role, on the host itself: asks once a second, and tells afterwards when nobody answered.

    role_client.py --log FILE        asks until SIGTERM or SIGINT; one JSON line per question

Tests read the log with `read` and `find_gaps`.

It runs as root, and asks engines over their sockets, without the gateway, which would keep requests waiting. A role is
where the gateway's link leads; that is looked for again after an answer that failed. A gap is from the moment of the
first question that failed to that of the first good one, on the monotonic clock, which is also the journal's. It needs
nothing but Python, and `ask.py` beside it.
"""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ask import exchange

ROLES = ("architect", "worker", "auditor", "sentry")
RUN = Path("/run/vllm-edge")
TIMEOUT_S = 60.0
"""A question that is given up makes a gap longer, and the first answer of an engine takes long on a busy machine."""
QUESTION = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 1, "temperature": 0}


@dataclass(frozen=True)
class Asked:
    """One question: a line of the log."""

    monotonic_s: float
    """When it was asked."""
    role: str
    error: str
    """Empty for a good answer."""


Recorded = Sequence[Asked]


# ---- asking -----------------------------------------------------------------------------------------------------


def find_mistake(status: int, text: str) -> str:
    """Why this is no good answer: an engine whose numbers went wrong answers 200 with nothing in it."""
    if status != 200:
        return f"HTTP {status}: {text[:200]}"
    try:
        message = json.loads(text)["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        message = {}
    said = any(message.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls"))
    return "" if said else "an answer without text"


class Role:
    """One role and where it was last found."""

    def __init__(self, name: str, run: Path = RUN, timeout_s: float = TIMEOUT_S) -> None:
        self.name, self.run, self.timeout_s = name, run, timeout_s
        self.place: Path | None = None

    def ask(self) -> Asked:
        began, error = time.monotonic(), "no engine has the role"
        place = self.place or (self.run / "roles" / f"{self.name}.sock").resolve()
        if place.parent.parent == self.run / "engines":
            question = json.dumps({"model": self.name, **QUESTION})
            error = find_mistake(*exchange(f"unix:{place}/v1/chat/completions", question, self.timeout_s))
        self.place = None if error else place
        return Asked(round(began, 3), self.name, error)


WRITING = threading.Lock()


def keep_asking(role: Role, file: TextIO, interval_s: float, stop: threading.Event) -> None:
    """At every full interval since the beginning; one that a slow answer has missed is left out."""
    began = time.monotonic()
    while not stop.is_set():
        asked = role.ask()
        with WRITING:
            print(json.dumps(asdict(asked)), file=file, flush=True)
        stop.wait(interval_s - (time.monotonic() - began) % interval_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Asks every role as a client would, until SIGTERM or SIGINT.")
    parser.add_argument("--log", type=Path, required=True, help="lines are appended")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between questions (default 1)")
    given = parser.parse_args()
    stop = threading.Event()
    for word in (signal.SIGTERM, signal.SIGINT):
        signal.signal(word, lambda *_: stop.set())
    with given.log.open("a") as file:
        options = (file, given.interval, stop)
        threads = [threading.Thread(target=keep_asking, args=(Role(name), *options)) for name in ROLES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# ---- telling ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A time without an answer."""

    role: str
    from_s: float
    answered_from_s: float | None
    """When the question that ended it was asked: to answer it may take an engine that has just begun many seconds.
    None: there was none to the end of the log."""
    failed: int
    """Questions."""
    error: str
    """Of the first of them."""


def read(log: Path) -> Recorded:
    """A log; a last line that a killed client left half-written is dropped."""
    return [Asked(**json.loads(line)) for line in log.read_text().splitlines() if line.endswith("}")]


def find_gaps(asked: Iterable[Asked]) -> list[Gap]:
    """All gaps of all roles, in the order in which they began."""
    found: list[Gap] = []
    open_gaps: dict[str, list[Asked]] = {}

    def close(failed: Sequence[Asked], answered_s: float | None) -> None:
        found.append(Gap(failed[0].role, failed[0].monotonic_s, answered_s, len(failed), failed[0].error))

    for question in sorted(asked, key=lambda one: one.monotonic_s):
        if question.error:
            open_gaps.setdefault(question.role, []).append(question)
        elif failed := open_gaps.pop(question.role, None):
            close(failed, question.monotonic_s)
    for failed in open_gaps.values():
        close(failed, None)
    return sorted(found, key=lambda gap: gap.from_s)


def get_span(journal: Mapping[str, Any]) -> tuple[float, float]:
    """Beginning and end of a switch on the monotonic clock."""
    began = journal["began_monotonic_s"]
    return began, began + (journal["seconds"] or 0.0)


if __name__ == "__main__":
    main()
