# SPDX-License-Identifier: Apache-2.0
"""Answers of Docker's API that no Docker Engine should give: a sentence, not a traceback, and bounded memory."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system import docker
from ansible.module_utils.vllm_edge.system.docker import LINE_CHARS, DockerEngine, DockerRefused, split_records

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
