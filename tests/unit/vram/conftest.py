# SPDX-License-Identifier: Apache-2.0
"""Who a process belongs to, made up: cgroup files in a directory and a Docker that answers on a socket."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gpu import owners

ENGINE_ID = "e" * 64
FOREIGN_ID = "f" * 64
UNKNOWN_ID = "0" * 64


class FakeDocker(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The two requests that docker-py makes to list containers."""

    daemon_threads = True
    requests = 0
    containers: tuple[dict[str, Any], ...] = (
        {"Id": ENGINE_ID, "Names": ["/vllm-e2b"], "Labels": {"vllm-edge.engine": "e2b"}},
        {"Id": FOREIGN_ID, "Names": ["/someones-notebook"], "Labels": {}},
    )


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeDocker

    def do_GET(self) -> None:
        self.server.requests += 1
        listing = "/containers/json" in self.path
        answer: Any = list(self.server.containers) if listing else {"ApiVersion": "1.44", "Version": "26.1.5"}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Not into the test's output."""


@pytest.fixture
def docker_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDocker]:
    """A Docker Engine's API with one engine of ours and one container of somebody else."""
    path = tmp_path / "docker.sock"
    with FakeDocker(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        yield server
        server.shutdown()


@pytest.fixture
def no_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody-listens.sock")


class Processes:
    """A /proc of which only the cgroup files matter."""

    def __init__(self, proc: Path) -> None:
        self.proc = proc
        self.belongs(1, "/init.scope")

    def belongs(self, pid: int, path: str) -> None:
        (self.proc / str(pid)).mkdir(parents=True, exist_ok=True)
        (self.proc / str(pid) / "cgroup").write_text(f"12:pids:{path}\n1:name=systemd:{path}\n0::{path}\n")

    def engine(self, pid: int) -> None:
        self.belongs(pid, f"/system.slice/docker-{ENGINE_ID}.scope")

    def somebody(self, pid: int) -> None:
        self.belongs(pid, f"/system.slice/docker-{FOREIGN_ID}.scope")


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Processes:
    found = Processes(tmp_path / "proc")
    monkeypatch.setattr(owners, "PROC", found.proc)
    return found
