# SPDX-License-Identifier: Apache-2.0
"""A Docker Engine in this process: what it cannot do here is to go away and come back, which is what these tests need.

The container's main process is a real one, so that the supervisor's own watch over it is the real one too.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ansible.module_utils.vllm_edge.system.docker import Container, ContainerGone, DockerAway, DockerRefused, LogRecord


class FakeDocker:
    def __init__(self, *, live_restore: bool = True) -> None:
        self.away = threading.Event()
        self.live = live_restore
        self.container: Container | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.records: list[LogRecord] = []
        self.calls: list[str] = []
        self.tags: dict[str, str] = {}
        """The id of an image by its name."""
        self.refuse_start = ""
        self.refuse_remove = 0
        self.log_late_s = 0.0
        self.command = ("sleep", "120")
        self.outside: str | None = None
        self.fails: defaultdict[str, list[Exception | None]] = defaultdict(list)
        """What the next calls of a kind meet, in their order; None is a good answer."""

    # -- what a test does to it

    def log(self, line: str) -> None:
        self.records.append(LogRecord(f"2026-11-21T03:00:00.{len(self.records):09d}Z", line))

    def run_container(self, labels: dict[str, str], command: Sequence[str] = ()) -> Container:
        self.process = subprocess.Popen(command or self.command)
        self.container = Container(
            id="c" * 64,
            name="vllm-e2b",
            status="running",
            labels=labels,
            image_id=self.container.image_id if self.container else "",
            pid=self.process.pid,
            started_at=time.strftime("%Y-%m-%dT%H:%M:%S.000000000Z", time.gmtime()),
        )
        return self.container

    def kill_container(self, number: int = 9) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(5)

    def refuse(self, call: str, times: int) -> None:
        """An error of the API that says nothing of the container."""
        self.fails[call] = [DockerRefused(f"{call}: 500 Server Error: context deadline exceeded")] * times

    def cut(self) -> None:
        """Every connection that is open now ends."""
        self.away.set()
        time.sleep(0.3)
        self.away.clear()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(5)

    # -- the interface

    def _answer(self, call: str) -> None:
        self.calls.append(call)
        if self.away.is_set():
            raise DockerAway("connection refused")
        error = self.fails[call].pop(0) if self.fails[call] else None
        if error is not None:
            raise error

    def ping(self, timeout_s: float) -> None:
        self._answer("ping")

    def live_restore(self) -> bool | None:
        self._answer("info")
        return self.live

    def find(self, name: str) -> Container | None:
        self._answer("find")
        if self.container is None:
            return None
        if self.process is not None and self.process.poll() is not None and self.container.running:
            code = self.process.returncode
            self.container = replace(self.container, status="exited", pid=0, exit_code=128 - code if code < 0 else code)
        return self.container

    def create(self, arguments: Sequence[str]) -> str:
        self._answer("create")
        labels = dict(item.removeprefix("--label=").split("=", 1) for item in arguments if item.startswith("--label="))
        image = next(item for item in arguments if not item.startswith("-"))
        image_id = self.tags.get(image, image if image.startswith("sha256:") else "")
        self.container = Container(id="c" * 64, name="vllm-e2b", status="created", labels=labels, image_id=image_id)
        return self.container.id

    def start(self, container_id: str) -> None:
        self._answer("start")
        if self.refuse_start:
            raise DockerRefused(f"docker start: {self.refuse_start}")
        assert self.container is not None
        self.run_container(dict(self.container.labels))

    def wait(self, container_id: str) -> int:
        self._answer("wait")
        assert self.process is not None
        while self.process.poll() is None:
            if self.away.wait(0.02):
                raise DockerAway("connection reset")
        return self.process.returncode

    def logs(self, container_id: str, *, after: str | None, follow: bool, tail: int | None) -> Iterator[LogRecord]:
        self._answer("follow" if follow else "logs")
        time.sleep(self.log_late_s)
        sent = 0
        while True:
            # The list may grow while we are at it; a lost connection ends the stream in the middle.
            while sent < len(self.records):
                record = self.records[sent]
                sent += 1
                if after is None or record.at > after:
                    yield record
            if not follow or self.process is None or self.process.poll() is not None:
                return
            if self.away.wait(0.02):
                raise DockerAway("unexpected EOF")

    def stop(self, container_id: str, timeout_s: float) -> None:
        self._answer("stop")
        if self.process is not None and self.process.poll() is None:
            self.kill_container(15)

    def remove(self, container_id: str) -> None:
        self._answer("remove")
        if self.container is None:
            raise ContainerGone("no such container")
        if self.refuse_remove > 0:
            self.refuse_remove -= 1
            raise DockerRefused("removal of container is already in progress")
        self.close()
        self.container = None

    def killed_from_outside(self, container_id: str, since_s: float) -> str | None:
        self._answer("events")
        return self.outside
