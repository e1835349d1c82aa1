# SPDX-License-Identifier: Apache-2.0
"""Who a process belongs to, made up: cgroup files in a directory and a list of containers."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.gpu import owners
from ansible.module_utils.vllm_edge.system.docker import Container, DockerEngine, parse_listed

ENGINE_ID = "e" * 64
FOREIGN_ID = "f" * 64


@pytest.fixture
def docker_api(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Docker lists one engine of ours and one container of somebody else. A list of what it was asked."""
    asked: list[str] = []
    ours = parse_listed({"Id": ENGINE_ID, "Names": ["/vllm-e2b"], "Labels": {"vllm-edge.engine": "e2b"}})
    theirs = parse_listed({"Id": FOREIGN_ID, "Names": ["/someones-notebook"], "Labels": {}})

    def listed(engine: DockerEngine) -> list[Container]:
        asked.append("listed")
        return [ours, theirs]

    monkeypatch.setattr(DockerEngine, "listed", listed)
    return asked


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
