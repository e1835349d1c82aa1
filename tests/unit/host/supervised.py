# SPDX-License-Identifier: Apache-2.0
"""A supervisor in a thread, for tests: its Docker, its engine's answers and what systemd was told."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine import supervisor
from ansible.module_utils.vllm_edge.engine.config import load_engine
from ansible.module_utils.vllm_edge.engine.events import Signalled
from ansible.module_utils.vllm_edge.engine.journal import Journal
from ansible.module_utils.vllm_edge.engine.supervisor import EXIT_FAILED, Supervisor
from ansible.module_utils.vllm_edge.system.docker import Container, DockerUnit
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.sd_notify import Notifier
from fake_docker import FakeDocker
from test_host_engine_config import CONFIG, CREATE, written

LABELS = {"vllm-edge.engine": "e2b", "vllm-edge.generation": "1", "vllm-edge.input-hash": "ab12"}


class Case:
    """A supervisor in a thread, its Docker, its engine's answers and what systemd was told."""

    def __init__(self, root: Path, docker: FakeDocker, patience_s: float = 3, **changes: Any) -> None:
        config = {**CONFIG, "stop_timeout_s": 2, "stall_timeout_s": 20, **changes}
        self.paths = written(root, config=config, create=CREATE)
        self.docker = docker
        self.healthy = threading.Event()
        self.asked: list[str] = []
        self.unit: DockerUnit | None = None
        self.code: int | None = None
        self.told: list[str] = []
        self.output = io.StringIO()
        address = str(root / "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(0.1)
        self.supervisor = Supervisor(
            load_engine("e2b", self.paths),
            self.paths,
            docker,
            Notifier(address),
            Journal(self.output, prefixed=True),
            watchdog_s=0.6,
            docker_wait_s=patience_s,
            unit=lambda: self.unit,
            health=self.health,
        )
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.listener = threading.Thread(target=self.listen, daemon=True)
        self.listener.start()

    def health(self, url: str, timeout_s: float) -> Answer:
        """The published port ends with Docker (its proxy does); the container's own address does not."""
        self.asked.append(url)
        published = url == CONFIG["url"]
        if not self.healthy.is_set() or (published and self.docker.away.is_set()):
            return Answer(None, error="connection refused")
        return Answer(200)

    def run(self) -> None:
        self.code = self.supervisor.run()

    def listen(self) -> None:
        while True:
            try:
                self.told.append(self.socket.recv(65536).decode())
            except TimeoutError:
                continue
            except OSError:
                return

    def start(self) -> Case:
        self.thread.start()
        return self

    def until(self, what: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"{self.told}\n{self.output.getvalue()}"
            time.sleep(0.01)

    def until_ready(self) -> Case:
        self.healthy.set()
        self.until(lambda: any("READY=1" in text for text in self.told))
        return self

    def stop(self) -> None:
        self.supervisor._signal = signal.SIGTERM
        self.supervisor.events.put(Signalled(signal.SIGTERM))

    def ends(self, seconds: float = 60) -> int | None:
        self.thread.join(seconds)
        assert not self.thread.is_alive(), self.output.getvalue()
        return self.code

    def fails(self) -> str:
        """Wait until it has failed, and return the cause that it recorded."""
        assert self.ends() == EXIT_FAILED
        return str(self.state()["last_failure"]["cause"])

    def until_docker_is_missed(self) -> None:
        self.docker.away.set()
        self.until(self.supervisor._docker_away.is_set)

    def fed(self) -> int:
        return sum("WATCHDOG=1" in text for text in self.told)

    def state(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.paths.engine_state("e2b").read_text())
        return data


@pytest.fixture
def docker() -> Iterator[FakeDocker]:
    made = FakeDocker()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "REFUSED_S", 0.6)
    monkeypatch.setattr(supervisor, "RETRY_FIRST_S", 0.2)


@pytest.fixture
def begin(tmp_path: Path, docker: FakeDocker) -> Iterator[Callable[..., Case]]:
    cases: list[Case] = []

    def make(**changes: Any) -> Case:
        case = Case(tmp_path / f"case{len(cases)}", docker, **changes)
        cases.append(case)
        return case

    (tmp_path / "case0").mkdir()
    yield make
    for case in cases:
        case.stop()
        if case.thread.ident is not None:
            case.thread.join(5)
        case.socket.close()


Begin = Callable[..., Case]


def ended(container: Container) -> Container:
    return replace(container, finished_at="2026-11-21T03:00:09.5Z")
