#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A client of every role, on the host itself: asks once a second, and tells afterwards when nobody answered.

    role_client.py watch --log FILE        asks until SIGTERM, SIGINT or --seconds; one JSON line per question

Tests read the log with `read` and `gaps`.

It runs as root, and asks engines over their sockets, without the gateway, which would keep requests waiting. A role is
where the gateway's link leads, or, where there are no such links, where /v1/models lists it; that is looked for again
after an answer that failed. A gap is from the moment of the first question that failed to the answer of the first good
one, on the monotonic clock, which is also the journal's. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

ROLES = ("architect", "worker", "auditor", "sentry")
SOCKETS = Path("/run/vllm-edge/engines")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MODELS_TIMEOUT_S = 2.0
TOKENS = 1


@dataclass(frozen=True)
class Asked:
    """One question: a line of the log."""

    monotonic_s: float
    """When it was asked."""
    at: str
    role: str
    ok: bool
    seconds: float
    status: int | None
    engine: str | None
    """None: no engine lists the role."""
    error: str = ""


# ---- asking -----------------------------------------------------------------------------------------------------


class Connection(http.client.HTTPConnection):
    """A connection to an engine's socket."""

    def __init__(self, place: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.place = place

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.place))


def exchange(
    place: Path, path: str, timeout_s: float, body: Mapping[str, Any] | None = None
) -> tuple[int | None, Any, str]:
    """HTTP status, the JSON that came, and what was wrong."""
    data = None if body is None else json.dumps(body).encode()
    connection = Connection(place, timeout_s)
    try:
        connection.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            if answer.status >= 400:
                return answer.status, None, f"HTTP {answer.status}: {answer.read(200).decode(errors='replace')}"
            return answer.status, json.load(answer), ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        return None, None, f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def find(role: str, sockets: Path, timeout_s: float) -> Path | None:
    """The socket to which the gateway's link leads; without links the one whose /v1/models lists the role."""
    links = sockets.parent / "roles"
    if links.is_dir():
        place = (links / f"{role}.sock").resolve()
        return place if place.parent.parent == sockets else None
    for place in sorted(sockets.glob("*/api.sock")):
        _, answer, _ = exchange(place, "/v1/models", timeout_s)
        models = answer.get("data", []) if isinstance(answer, dict) else []
        if any(isinstance(model, dict) and model.get("id") == role for model in models):
            return place
    return None


def said_something(answer: Any) -> bool:
    """Whether a completion has any text: an engine whose numbers went wrong answers 200 with nothing in it."""
    try:
        message = answer["choices"][0]["message"]
    except (KeyError, IndexError, TypeError):
        return False
    return any(message.get(key) for key in ("content", "reasoning", "reasoning_content", "tool_calls"))


class Role:
    """One role and where it was last found."""

    def __init__(self, name: str, sockets: Path, timeout_s: float) -> None:
        self.name = name
        self.sockets = sockets
        self.timeout_s = timeout_s
        self.place: Path | None = None

    def ask(self) -> Asked:
        began, at = time.monotonic(), time.time()
        if self.place is None:
            self.place = find(self.name, self.sockets, min(MODELS_TIMEOUT_S, self.timeout_s))
        status, error, ok = None, "no engine lists the role", False
        if self.place is not None:
            messages = [{"role": "user", "content": "Say hello."}]
            question = {"model": self.name, "messages": messages, "max_tokens": TOKENS, "temperature": 0}
            status, answer, error = exchange(self.place, "/v1/chat/completions", self.timeout_s, question)
            ok = status == 200 and said_something(answer)
            error = error if error or ok else "an answer without text"
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at)) + f".{int(at % 1 * 1000):03}Z"
        seconds = round(time.monotonic() - began, 3)
        engine = self.place.parent.name if self.place is not None else None
        asked = Asked(round(began, 3), stamp, self.name, ok, seconds, status, engine, error)
        if not ok:
            self.place = None
        return asked


class Log:
    """The file, a line per question, written by several threads."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, line: Mapping[str, Any]) -> None:
        with self._lock:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()


def keep_asking(role: Role, log: Log, interval_s: float, stop: threading.Event) -> None:
    """At every full interval since the beginning; one that a slow answer has missed is left out."""
    began = time.monotonic()
    while not stop.is_set():
        log.write(asdict(role.ask()))
        passed = time.monotonic() - began
        stop.wait(interval_s - passed % interval_s)


def watch(log: Path, roles: Sequence[str], sockets: Path, interval_s: float, timeout_s: float, for_s: float) -> None:
    stop = threading.Event()
    for word in (signal.SIGTERM, signal.SIGINT):
        signal.signal(word, lambda *_: stop.set())
    with log.open("a", encoding="utf-8") as file:
        written = Log(file)
        written.write({"boot_id": BOOT_ID.read_text().strip(), "interval_s": interval_s, "timeout_s": timeout_s})
        threads = [
            threading.Thread(target=keep_asking, args=(Role(name, sockets, timeout_s), written, interval_s, stop))
            for name in roles
        ]
        for thread in threads:
            thread.start()
        stop.wait(for_s or None)
        stop.set()
        for thread in threads:
            thread.join()


# ---- telling ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A time without an answer; `to_s` None: there was none to the end of the log."""

    role: str
    from_s: float
    to_s: float | None
    began_at: str
    failed: int
    """Questions."""
    error: str
    """Of the first of them."""
    answered_from_s: float | None = None
    """When the question that ended it was asked: to answer it may take an engine that has just begun many seconds."""


@dataclass(frozen=True)
class Recorded:
    """A log that was read."""

    boot_id: str
    interval_s: float
    asked: tuple[Asked, ...]


def read(log: Path) -> Recorded:
    """A log of one boot; a last line that a killed client left half-written is dropped."""
    heading: dict[str, Any] = {}
    asked: list[Asked] = []
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if "boot_id" not in entry:
            asked.append(Asked(**entry))
        elif heading and heading["boot_id"] != entry["boot_id"]:
            raise SystemExit(
                f"{log} was written over a reboot, and the clock of its questions began anew there: "
                "give each boot a log of its own"
            )
        else:
            heading = entry
    if not heading:
        raise SystemExit(f"{log} has no line that says when it was written: it is no log of `watch`")
    return Recorded(heading["boot_id"], heading["interval_s"], tuple(asked))


def gaps(asked: Iterable[Asked]) -> list[Gap]:
    """All gaps of all roles, in the order in which they began."""
    found: list[Gap] = []
    open_gaps: dict[str, list[Asked]] = {}
    for question in sorted(asked, key=lambda one: one.monotonic_s):
        if not question.ok:
            open_gaps.setdefault(question.role, []).append(question)
        elif failed := open_gaps.pop(question.role, None):
            found.append(gap_of(failed, question))
    found += [gap_of(failed, None) for failed in open_gaps.values()]
    return sorted(found, key=lambda gap: gap.from_s)


def gap_of(failed: Sequence[Asked], answered: Asked | None) -> Gap:
    first = failed[0]
    to_s = None if answered is None else round(answered.monotonic_s + answered.seconds, 3)
    answered_from_s = None if answered is None else answered.monotonic_s
    return Gap(first.role, first.monotonic_s, to_s, first.at, len(failed), first.error, answered_from_s)


def span(journal: Mapping[str, Any]) -> tuple[float, float]:
    """Beginning and end of a switch on the monotonic clock."""
    began = journal["began_monotonic_s"]
    return began, began + (journal["seconds"] or 0.0)


# ---- the command ------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description="Asks every role as a client would, and tells when nobody answered.")
    commands = top.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("watch", help="ask until SIGTERM or SIGINT")
    asking.add_argument("--log", type=Path, required=True, help="lines are appended")
    asking.add_argument("--roles", nargs="+", default=ROLES)
    asking.add_argument("--sockets", type=Path, default=SOCKETS, help="where engines have their directories")
    asking.add_argument("--interval", type=float, default=1.0, help="seconds between questions (default 1)")
    # A question that is given up makes a gap longer, and the first answer of an engine takes long on a busy machine.
    asking.add_argument("--timeout", type=float, default=60.0, help="seconds that an answer may take (default 60)")
    asking.add_argument("--seconds", type=float, default=0.0, help="end after so long")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    watch(given.log, given.roles, given.sockets, given.interval, given.timeout, given.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
