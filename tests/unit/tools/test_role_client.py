# SPDX-License-Identifier: Apache-2.0
"""The client: what counts as an answer, where a role is found again, and which gaps a log tells."""

from __future__ import annotations

import json
import socketserver
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, load_file

role_client = load_file(ROOT / "tests/tools/role_client.py")
Asked, Gap = role_client.Asked, role_client.Gap


class Engine(socketserver.ThreadingUnixStreamServer):
    """Lists its roles on a socket of its own, and answers each with `text`."""

    daemon_threads = True

    def __init__(self, sockets: Path, *roles: str) -> None:
        self.name = f"e{len(list(sockets.iterdir()))}"
        (sockets / self.name).mkdir()
        super().__init__(str(sockets / self.name / "api.sock"), Handler)
        self.roles = roles
        self.text: str | None = "hello"
        self.delay_s = 0.0
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that waited no longer is no error of the engine's."""


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, content: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        self.answer(200, {"data": [{"id": role} for role in self.server.roles]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.delay_s)
        known = asked["model"] in self.server.roles
        content = {"choices": [{"message": {"content": self.server.text}}]}
        self.answer(200 if known else 404, content if known else {"error": "no such model"})


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="s") as directory:  # the path of a socket is short
        yield Path(directory)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.shutdown()
        engine.server_close()


def test_a_role_is_asked_where_it_is_listed(engines: list[Engine], sockets: Path) -> None:
    engines += [Engine(sockets, "architect", "worker"), Engine(sockets, "sentry")]
    asked = role_client.Role("sentry", sockets, 2.0).ask()
    assert (asked.ok, asked.status, asked.engine, asked.error) == (True, 200, engines[1].name, "")
    nowhere = role_client.Role("auditor", sockets, 2.0).ask()
    assert not nowhere.ok and nowhere.status is nowhere.engine is None
    assert nowhere.error == "no engine lists the role"


def test_a_role_that_moves_is_found_again_after_one_failure(engines: list[Engine], sockets: Path) -> None:
    engines += [Engine(sockets, "sentry"), Engine(sockets, "auditor")]
    role = role_client.Role("sentry", sockets, 2.0)
    assert role.ask().ok
    engines[0].roles, engines[1].roles = ("auditor",), ("sentry",)
    assert [(asked.ok, asked.status) for asked in (role.ask(), role.ask())] == [(False, 404), (True, 200)]
    assert role.place is not None and role.place.parent.name == engines[1].name


def test_an_answer_without_text_or_in_time_is_none(engines: list[Engine], sockets: Path) -> None:
    engines.append(Engine(sockets, "sentry"))
    for engines[0].text in ("", None):
        asked = role_client.Role("sentry", sockets, 2.0).ask()
        assert (asked.ok, asked.status, asked.error) == (False, 200, "an answer without text")
    engines[0].text, engines[0].delay_s = "hello", 1.0
    late = role_client.Role("sentry", sockets, 0.2).ask()
    assert (late.ok, late.status) == (False, None)
    assert "timed out" in late.error and late.seconds < 0.9


# ---- what a log tells -------------------------------------------------------------------------------------------


def asked(at: float, role: str = "sentry", ok: bool = True, seconds: float = 0.2) -> Any:
    stamp = f"2026-11-21T10:00:{int(at) % 60:02}.000Z"
    return Asked(at, stamp, role, ok, seconds, 200 if ok else None, "e2b", "" if ok else "refused")


def test_a_gap_is_from_the_first_failure_to_the_first_good_answer() -> None:
    log = [asked(1), asked(2, ok=False, seconds=5), asked(7, ok=False), asked(8), asked(9)]
    log += [asked(3, "worker"), asked(8, "worker", ok=False)]
    assert role_client.gaps(reversed(log)) == [
        Gap("sentry", 2, 8.2, "2026-11-21T10:00:02.000Z", 2, "refused", 8),
        Gap("worker", 8, None, "2026-11-21T10:00:08.000Z", 1, "refused"),
    ]


def test_a_log_of_two_boots_is_refused(tmp_path: Path) -> None:
    heading = {"interval_s": 1.0, "timeout_s": 5.0}
    log = tmp_path / "log"
    log.write_text("\n".join(json.dumps({"boot_id": boot, **heading}) for boot in ("one", "other")))
    with pytest.raises(SystemExit, match="over a reboot"):
        role_client.read(log)
