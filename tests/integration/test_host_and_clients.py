# SPDX-License-Identifier: Apache-2.0
"""The host of a switch against a real Docker Engine and real HTTP servers."""

from __future__ import annotations

import json
import socketserver
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.downtime import RoleWatch
from ansible.module_utils.vllm_edge.switch.host import HostWorld
from ansible.module_utils.vllm_edge.switch.model import Moves
from ansible.module_utils.vllm_edge.system.docker import Container, DockerEngine
from ansible.module_utils.vllm_edge.system.systemd import Ran, Systemd
from harness import IMAGE, docker

# -- Docker


@dataclass
class Made:
    """A container of ours and one of somebody else."""

    engine: str
    ours: str
    foreign: str


@pytest.fixture
def made(docker_ready: None) -> Iterator[Made]:
    name = f"t{uuid.uuid4().hex[:8]}"
    run = ["run", "--detach", "--init", "--entrypoint", "sleep"]
    labels = ["--label", f"vllm-edge.engine={name}", "--label", "vllm-edge.input-hash=ab12"]
    ours = docker(*run, "--name", f"vllm-{name}", *labels, IMAGE, "300")
    foreign = docker(*run, "--name", f"vllm-{name}-of-somebody", IMAGE, "300")
    try:
        yield Made(name, ours, foreign)
    finally:
        docker("rm", "--force", "--volumes", ours, foreign, check=False)


def find(container_id: str) -> Container | None:
    return next((one for one in DockerEngine().listed() if one.id == container_id), None)


def test_containers_as_a_real_docker_lists_them(made: Made) -> None:
    ours, foreign = find(made.ours), find(made.foreign)
    assert ours is not None and foreign is not None
    assert (ours.name, ours.engine, ours.input_hash) == (f"vllm-{made.engine}", made.engine, "ab12")
    assert ours.running
    assert foreign.engine is None and foreign.running


def test_images_by_name(docker_ready: None) -> None:
    assert DockerEngine().image_id(IMAGE) == docker("image", "inspect", "--format", "{{.Id}}", IMAGE)
    assert DockerEngine().image_id("vllm-edge/no-such-image:1") is None


def test_a_container_that_outlives_its_unit_is_removed_and_the_neighbour_stays(made: Made, tmp_path: Path) -> None:
    def systemctl(command: Any, timeout_s: float) -> Ran:
        return Ran(0, f"Id=vllm-{made.engine}.service\nLoadState=not-found\nActiveState=inactive\n")

    paths = HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units")
    world = HostWorld(paths, systemd=Systemd(systemctl), docker_unit=lambda: None)
    done = world.stop(Moves(stop=(made.engine,)))
    assert f"Container vllm-{made.engine} outlived its unit and was removed." in done.warnings
    assert find(made.ours) is None
    left = find(made.foreign)
    assert left is not None and left.running


def test_a_container_is_ended_at_once(made: Made) -> None:
    began = time.monotonic()
    DockerEngine().kill(made.ours)
    ended = find(made.ours)
    assert ended is not None and not ended.running and time.monotonic() - began < 10
    left = find(made.foreign)
    assert left is not None and left.running


# -- a client's view


class Handler(BaseHTTPRequestHandler):
    names: tuple[str, ...] = ("architect",)
    answered_s: list[float]
    """When each request was answered, by the monotonic clock; the watch sends two of them to know whether one is up."""

    def do_GET(self) -> None:
        # A server that closes before it has read a request breaks the client's connection, although it answered.
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.dumps({"data": [{"id": name} for name in self.names]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.answered_s.append(time.monotonic())
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def serve(place: Path) -> socketserver.ThreadingUnixStreamServer:
    place.unlink(missing_ok=True)
    server = socketserver.ThreadingUnixStreamServer(str(place), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def end(server: socketserver.ThreadingUnixStreamServer) -> None:
    server.shutdown()
    server.server_close()


@pytest.fixture
def place() -> Iterator[Path]:
    Handler.answered_s = []
    with tempfile.TemporaryDirectory(prefix="s") as directory:  # the path of a socket is short
        yield Path(directory) / "api.sock"


def test_a_server_that_goes_away_and_comes_back_is_one_gap(place: Path) -> None:
    config = SimpleNamespace(url=f"unix:{place}")
    generation: Any = SimpleNamespace(roles={"architect": "a"}, engines={"a": SimpleNamespace(config=config)})
    server = serve(place)
    watch = RoleWatch(generation, generation, clock=time.monotonic)
    time.sleep(1.2)
    end(server)
    down = time.monotonic()
    before = list(Handler.answered_s)
    time.sleep(2.0)
    up = time.monotonic()
    server = serve(place)
    while len(Handler.answered_s) < len(before) + 4:
        assert time.monotonic() < up + 30, "the watch does not ask any more"
        time.sleep(0.1)
    seen = watch.end([])["architect"]
    end(server)
    assert len(seen.gaps) == 1, seen
    gap = seen.gaps[0]
    assert gap.to_s is not None
    # At least as long as the time without service, and at either end at most one question longer. The last request
    # before it may be the first half of a question, and a busy machine notes an answer later than it came.
    after = Handler.answered_s[len(before) :]
    assert before[-2] <= gap.from_s <= down + 0.5 and up <= gap.to_s < after[3]
    assert seen.seconds == pytest.approx(gap.to_s - gap.from_s)
    assert seen.asked >= 4
