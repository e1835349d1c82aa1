# SPDX-License-Identifier: Apache-2.0
"""The supervisor as systemd runs it: a process of its own, a notification socket, a real Docker Engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine_files import CAGE, CONFIG

ROOT = Path(__file__).resolve().parents[2]
FAKE = Path(__file__).with_name("fake_engine.py")
IMAGE = os.environ.get("VLLM_EDGE_TEST_IMAGE", "vllm-edge-lab/host:latest")

PATIENCE_S = 60.0
"""Seconds for what comes at once on a quiet machine; a test that is about time measures it."""

# Who is not root cannot give the directory of the socket away.
USER = 8050 if os.geteuid() == 0 else os.geteuid()
PROGRAM = "import sys; from vllm_edge import cli; sys.exit(cli.main(sys.argv[1:]))"


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 or not check, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout.strip()


def why_not() -> str | None:
    """Why these tests cannot run here, or None."""
    try:
        version = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no Docker client: {error}"
    if version.returncode != 0:
        return f"no Docker Engine: {version.stderr.strip()}"
    if docker("image", "ls", "--quiet", IMAGE) == "":
        return f"the image {IMAGE} (with python3) is not here; VLLM_EDGE_TEST_IMAGE names another"
    return None


@dataclass
class Message:
    """One datagram to the notification socket."""

    at: float
    fields: dict[str, str]


@dataclass
class Run:
    """A running supervisor and everything it said."""

    process: subprocess.Popen[str]
    socket: socket.socket
    messages: list[Message] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def listen(self) -> None:
        self.socket.settimeout(0.2)
        while True:
            try:
                data = self.socket.recv(65536)
            except TimeoutError:
                if self.process.poll() is not None:
                    return
                continue
            except OSError:
                return
            pairs = dict(line.split("=", 1) for line in data.decode().splitlines())
            self.messages.append(Message(time.monotonic(), pairs))

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def has(self, key: str, value: str | None = None) -> bool:
        return any(key in m.fields and (value is None or value in m.fields[key]) for m in self.messages)

    def until(self, what: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < deadline, f"did not happen in {seconds} s; it said:\n{self.text}\n{self.messages}"
            time.sleep(0.02)

    def until_ready(self) -> Run:
        self.until(lambda: self.has("READY") or self.process.poll() is not None)
        assert self.has("READY"), f"ended before READY:\n{self.text}"
        return self

    def stop(self) -> int:
        """Ask it to stop, as systemd does; its exit status."""
        self.process.terminate()
        return self.ends()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def ends(self) -> int:
        code = self.process.wait(PATIENCE_S)
        time.sleep(0.05)
        return code

    def statuses(self) -> list[str]:
        return [m.fields["STATUS"] for m in self.messages if "STATUS" in m.fields]


@dataclass
class Host:
    """A configuration and a state tree for one engine, and its container's name."""

    engine: str
    root: Path
    runs: list[Run] = field(default_factory=list)

    @property
    def container(self) -> str:
        return f"vllm-{self.engine}"

    @property
    def place(self) -> Path:
        """The engine's socket."""
        return self.root / "run" / "engines" / self.engine / "api.sock"

    @property
    def url(self) -> str:
        return f"unix:{self.place}"

    def state(self) -> dict[str, object]:
        data: dict[str, object] = json.loads((self.root / "state" / "engines" / f"{self.engine}.json").read_text())
        return data

    def failure(self) -> dict[str, object]:
        failure = self.state()["last_failure"]
        assert isinstance(failure, dict)
        return failure

    def configure(self, *arguments: str, options: tuple[str, ...] = (), image: str = IMAGE, **changes: object) -> None:
        directory = self.root / "etc" / "engines" / self.engine
        directory.mkdir(parents=True, exist_ok=True)
        config: dict[str, object] = CONFIG | {
            "engine": self.engine,
            "unit": f"vllm-{self.engine}.service",
            "container": self.container,
            "url": self.url,
            "image": image,
            "stop_timeout_s": 2,
            "stall_timeout_s": 30,
            "health_timeout_s": 1,
        }
        (directory / "engine.json").write_text(json.dumps({**config, **changes}))
        lines = [
            f"--name={self.container}",
            f"--label=vllm-edge.engine={self.engine}",
            *(f"--user={USER}:{USER}" if line.startswith("--user=") else line for line in CAGE),
            f"--mount=type=bind,source={self.place.parent},target=/run/api",
            f"--mount=type=bind,source={FAKE},target=/fake_engine.py,readonly",
            "--entrypoint=python3",
            *options,
            image,
            "/fake_engine.py",
            *arguments,
        ]
        (directory / "container.json").write_text(json.dumps({"arguments": lines}))

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT / "plugins" / "module_utils"),
            "VLLM_EDGE_ETC": str(self.root / "etc"),
            "VLLM_EDGE_STATE": str(self.root / "state"),
            "VLLM_EDGE_RUN": str(self.root / "run"),
        }

    def start(self, *, watchdog_s: float | None = None) -> Run:
        address = self.root / f"notify-{uuid.uuid4().hex[:6]}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.bind(str(address))
        env = {**self.environment(), "NOTIFY_SOCKET": str(address)}
        if watchdog_s is not None:
            env["WATCHDOG_USEC"] = str(int(watchdog_s * 1_000_000))
        words = [sys.executable, "-c", PROGRAM, "run-engine", self.engine]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        run = Run(process, sock)
        for target in (run.listen, run.read):
            threading.Thread(target=target, daemon=True).start()
        self.runs.append(run)
        return run

    def serve(self, *arguments: str, watchdog_s: float | None = None, **changes: object) -> Run:
        """Configure the engine and start it; returns when it is ready."""
        self.configure(*arguments, **changes)  # type: ignore[arg-type]
        return self.start(watchdog_s=watchdog_s).until_ready()

    def container_id(self) -> str:
        return docker("ps", "--all", "--quiet", "--no-trunc", f"--filter=name=^{self.container}$")

    def running(self) -> bool:
        return docker("ps", "--quiet", f"--filter=name=^{self.container}$") != ""
