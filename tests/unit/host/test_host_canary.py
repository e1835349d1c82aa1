# SPDX-License-Identifier: Apache-2.0
"""The canary against a real HTTP server that answers well, badly, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.canary import canary, run_canary
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.engine_config import EngineConfig, parse_engine
from ansible.module_utils.vllm_edge.health import get_health
from test_host_engine_config import CONFIG, written

GOOD = {"choices": [{"message": {"content": "Ready."}}], "usage": {"completion_tokens": 3}}


class Server:
    """What each route answers: (status, JSON or bytes); None closes the connection."""

    def __init__(self) -> None:
        self.models: Any = (200, {"data": [{"id": "sentry"}, {"id": "auditor"}]})
        self.completion: Any = (200, GOOD)
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, what: Any) -> None:
                if what is None:
                    self.connection.close()
                    return
                body = what[1] if isinstance(what[1], bytes) else json.dumps(what[1]).encode()
                self.send_response(what[0])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.answer(outer.models if self.path == "/v1/models" else (503, {}))

            def do_POST(self) -> None:
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.answer(outer.completion)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]

    def config(self, *names: str) -> EngineConfig:
        url = f"http://127.0.0.1:{self.port}"
        return parse_engine(json.dumps({**CONFIG, "served_names": list(names or ("sentry",)), "url": url}), "x")


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.http.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_every_served_name_is_asked(server: Server) -> None:
    results = canary(server.config("sentry", "auditor"), 5)
    assert [(r.served_name, r.ok, r.completion, r.tokens, r.error) for r in results] == [
        ("sentry", True, "Ready.", 3, None),
        ("auditor", True, "Ready.", 3, None),
    ]
    assert [asked["model"] for asked in server.asked] == ["sentry", "auditor"]
    assert server.asked[0]["temperature"] == 0 and server.asked[0]["max_tokens"] <= 32


@pytest.mark.parametrize(
    ("models", "completion", "told"),
    [
        ((200, {"data": [{"id": "worker"}]}), (200, GOOD), "does not list 'sentry', but worker"),
        ((200, {"data": []}), (200, GOOD), "but nothing"),
        ((200, b"<html>"), (200, GOOD), "something else than a list of models"),
        ((200, {"models": []}), (200, GOOD), "has no list `data`"),
        ((401, {"error": {"message": "Unauthorized"}}), (200, GOOD), "HTTP 401: Unauthorized"),
        (None, (200, GOOD), "connection closed without an answer"),
        ("same", (500, {"error": {"message": "EngineDeadError"}}), "HTTP 500: EngineDeadError"),
        ("same", (500, b"Internal Server Error"), "HTTP 500: Internal Server Error"),
        ("same", (200, {"choices": []}), "is no chat completion (IndexError"),
        ("same", (200, b"{"), "is no chat completion"),
        (
            "same",
            (200, {"choices": [{"message": {"content": "  \n"}}], "usage": {"completion_tokens": 9}}),
            "(9 tokens)",
        ),
        ("same", None, "connection closed without an answer"),
    ],
)
def test_what_is_no_good_answer(server: Server, models: Any, completion: Any, told: str) -> None:
    server.models = server.models if models == "same" else models
    server.completion = completion
    (result,) = canary(server.config(), 5)
    assert not result.ok and result.error is not None
    assert told in result.error


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_is_text_as_well(server: Server, key: str) -> None:
    server.completion = (200, {"choices": [{"message": {"content": None, key: "Hm."}}]})
    (result,) = canary(server.config(), 5)
    assert result.ok and result.completion == "Hm." and result.tokens is None


def test_nobody_listens(server: Server) -> None:
    config = server.config()
    server.http.shutdown()
    server.http.server_close()
    (result,) = canary(config, 5)
    assert result.error is not None
    for told in ("connection refused", "systemctl status vllm-e2b.service", "vllm-edge explain e2b"):
        assert told in result.error


def test_too_slow(server: Server) -> None:
    server.http.shutdown()  # the kernel still takes connections, nobody answers them
    (result,) = canary(server.config(), 0.2)
    assert result.error is not None and "no answer within 0.2 s" in result.error


def test_health_other_than_200(server: Server) -> None:
    answer = get_health(f"http://127.0.0.1:{server.port}", 2)
    assert not answer.ok and answer.words() == "HTTP 503"


def test_json_for_programs(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path, config={**CONFIG, "url": f"http://127.0.0.1:{server.port}"})
    assert run_canary("e2b", paths, output="json", timeout_s=5) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    (result,) = answer["results"]
    assert set(result) == {"engine", "served_name", "ok", "seconds", "completion", "tokens", "error"}
    server.completion = (500, {})
    assert main(["--etc", str(tmp_path), "canary", "e2b"]) == 1
    assert "sentry: FAILED: the completion of 'sentry' answered HTTP 500" in capsys.readouterr().out
    assert main(["--etc", str(tmp_path), "canary", "nobody"]) == 1
    assert "does not exist" in capsys.readouterr().err
