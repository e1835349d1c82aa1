# SPDX-License-Identifier: Apache-2.0
"""The hand-written switch and what it is compared for."""

from __future__ import annotations

import os
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import compare
import pytest
from compare import Pair, Run


def pair(ours: float, script: float, again: float, load: float = 30.0) -> Pair:
    return Pair(Run(ours, load), Run(script, load), Run(again, load))


@pytest.mark.parametrize(
    ("pairs", "good", "said"),
    [
        ([pair(33, 32, 33), pair(35, 33, 32)], True, "median 1.05, range 1.03 to 1.06"),
        ([pair(39, 32, 33), pair(39.5, 33, 32)], False, "TOO SLOW"),
        # As far from the script as the script is from itself.
        ([pair(39, 32, 26), pair(39, 32, 33)], True, "the script against itself: 0.81 to 1.23"),
        ([pair(41, 39, 39), pair(35, 39, 39)], False, "TOO MUCH"),
    ],
)
def test_the_verdict(pairs: list[Pair], good: bool, said: str) -> None:
    found, sentences = compare.verdict(pairs)
    assert found is good
    assert said in " ".join(sentences)


def test_dockers_time_stamps() -> None:
    began = compare.moment("2026-11-21T17:10:07.123456789Z")
    assert compare.moment("2026-11-21T17:10:09.5Z") - began == pytest.approx(2.376544, abs=1e-5)
    assert compare.moment("2026-11-21T17:10:09Z") - began == pytest.approx(1.876544, abs=1e-5)


class Health(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        asked: list[str] = self.server.asked  # type: ignore[attr-defined]
        asked.append(self.path)
        self.send_response(503 if len(asked) == 1 else 200)
        self.end_headers()


def generation(directory: Path, engine: str, port: int) -> Path:
    files = directory / "engines" / engine
    files.mkdir(parents=True)
    lines = [f"--name=vllm-{engine}", f"--publish=127.0.0.1:{port}:8000", "--env=WORDS=two words", "image", "/models/x"]
    (files / "docker-create").write_text("\n".join(lines) + "\n")
    return directory


def test_the_script_removes_runs_and_waits(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\nprintf "%s|" "$@" >> {calls}\necho >> {calls}\n')
    docker.chmod(0o755)
    server = HTTPServer(("127.0.0.1", 0), Health)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    old = generation(tmp_path / "1", "e2b", 8070)
    new = generation(tmp_path / "2", "e2b-all", server.server_port)
    try:
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        subprocess.run([compare.SCRIPT, new, old], check=True, timeout=30, env=environment)
    finally:
        server.shutdown()
        server.server_close()
    assert calls.read_text().splitlines() == [
        "rm|--force|vllm-e2b|",
        f"run|--detach|--name=vllm-e2b-all|--publish=127.0.0.1:{server.server_port}:8000|--env=WORDS=two words|image|"
        "/models/x|",
    ]
    assert server.asked == ["/health", "/health"]  # type: ignore[attr-defined]
