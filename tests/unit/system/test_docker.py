# SPDX-License-Identifier: Apache-2.0
"""Docker's answers, also those that it should not give, in bounded memory; and its absence, which is no refusal."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import docker
from ansible.module_utils.vllm_edge.system.docker import (
    LINE_CHARS,
    DockerAway,
    DockerEngine,
    DockerRefused,
    DockerUnit,
    LogRecord,
    docker_unit,
    find_kill_signal,
    parse_container,
    parse_stamp,
    split_records,
)

INSPECT: dict[str, Any] = {
    "Id": "c" * 64,
    "Name": "/vllm-e2b",
    "Config": {"Labels": {"vllm-edge.engine": "e2b"}, "Image": "vllm:1"},
}
STAMP = "2026-11-21T03:00:00.000000001Z"


@pytest.mark.parametrize(
    ("status", "pid", "code"), [("running", 4711, None), ("exited", 0, 137), ("created", 0, None), ("dead", 0, 137)]
)
def test_a_container_that_does_not_run_has_no_pid(status: str, pid: int, code: int | None) -> None:
    found = parse_container({**INSPECT, "State": {"Pid": 4711, "Status": status, "ExitCode": 137}})
    assert (found.name, found.labels) == ("vllm-e2b", {"vllm-edge.engine": "e2b"})
    assert (found.running, found.pid, found.exit_code) == (bool(pid), pid, code)


def test_records_of_a_log() -> None:
    assert split_records(f"{STAMP} one\n{STAMP} two\n") == [LogRecord(STAMP, "one"), LogRecord(STAMP, "two")]
    assert split_records(f"{STAMP} \n") == [LogRecord(STAMP, "")]
    assert split_records(f"{STAMP}  10%|#\r 20%|##\r 30%|###   \r\n") == [LogRecord(STAMP, " 30%|###")]
    assert split_records("without a stamp", STAMP) == [LogRecord(STAMP, "without a stamp")]


def test_time_stamps() -> None:
    assert [parse_stamp(f"1970-01-01T00:01:{text}Z") for text in ("00", "00.5")] == [60.0, 60.5]
    assert [parse_stamp(text) for text in ("0001-01-01T00:00:00Z", "", "yesterday")] == [None] * 3


def test_who_killed_it() -> None:
    def kill(signal: str) -> dict[str, Any]:
        return {"Action": "kill", "Actor": {"Attributes": {"signal": signal}}}

    assert find_kill_signal([kill("15"), kill("9")]) == "SIGTERM"
    assert find_kill_signal([kill("9")]) == "SIGKILL"
    assert find_kill_signal([kill("1")]) == "signal 1"
    assert find_kill_signal([{"Action": "die"}]) is None


def test_an_absent_engine_is_away(tmp_path: Path) -> None:
    engine = DockerEngine({"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "PATH": "/nonexistent"})
    with pytest.raises(DockerAway):
        engine.ping(1)
    with pytest.raises(DockerAway):
        engine.find("x")
    with pytest.raises(DockerRefused, match="install Docker's client"):
        engine.create(["--name=x", "image"])


@pytest.mark.parametrize(
    ("shown", "active"),
    [
        ("LoadState=loaded\nActiveState=active", True),
        ("LoadState=loaded\nActiveState=activating", True),
        ("LoadState=loaded\nActiveState=inactive", False),
        ("LoadState=loaded\nActiveState=failed", False),
        ("LoadState=not-found\nActiveState=inactive", None),
        ("", None),
    ],
)
def test_docker_by_systemd(shown: str, active: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' 'Id=docker.service' 'InvocationID=0f' '{shown}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    assert docker_unit() == (None if active is None else DockerUnit(active, "0f"))
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    assert docker_unit() is None, "it is not systemd's"


CALLS: dict[str, Callable[[DockerEngine], object]] = {
    "find": lambda engine: engine.find("x"),
    "wait": lambda engine: engine.wait("x"),
    "listed": DockerEngine.listed,
    "image_id": lambda engine: engine.image_id("x"),
    "live_restore": DockerEngine.live_restore,
    "events": lambda engine: engine.killed_from_outside("x", 10),
}


class Answers(http.server.BaseHTTPRequestHandler):
    body = b""
    status = 200

    def answer(self) -> None:
        body = b'{"ApiVersion": "1.45"}' if self.path.endswith("/version") else self.body
        self.send_response(200 if self.path.endswith("/version") else self.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[DockerEngine]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield DockerEngine({"DOCKER_HOST": f"tcp://127.0.0.1:{server.server_address[1]}"}, 5)
    server.shutdown()
    server.server_close()
    Answers.body, Answers.status = b"", 200


@pytest.mark.parametrize("body", [b"[7]", b'"x"', b"7", b'{"State": 7, "Id": 7, "StatusCode": []}', b"[" * 100_000])
@pytest.mark.parametrize("call", CALLS)
def test_an_answer_of_another_form_is_a_refusal(engine: DockerEngine, call: str, body: bytes) -> None:
    Answers.body = body
    try:
        CALLS[call](engine)
    except DockerRefused as error:
        assert str(error).isprintable()
        assert len(str(error)) < 3000


def test_messages_of_docker_are_printable_and_short(engine: DockerEngine) -> None:
    Answers.status, Answers.body = 500, json.dumps({"message": "\x1b[2J\u202e" + "x" * 100_000}).encode()
    with pytest.raises(DockerRefused) as refused:
        engine.find("x")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 3000


def test_a_long_answer_is_not_read_to_its_end(engine: DockerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "ANSWER_BYTES", 100_000)
    Answers.body = b"[" + b'{"Id": "x"},' * 100_000 + b'{"Id": "x"}]'
    with pytest.raises(DockerRefused, match="longer than"):
        engine.listed()
    Answers.body = b'[{"Id": "abc", "State": "running"}]'
    assert [container.id for container in engine.listed()] == ["abc"]


def test_lines_are_cut_where_they_enter() -> None:
    long = "2026-11-21T03:00:00.000000001Z " + "a\r" + "b" * 1_000_000
    assert [len(record.line) for record in split_records(f"{long}\nshort\n")] == [LINE_CHARS, 5]
