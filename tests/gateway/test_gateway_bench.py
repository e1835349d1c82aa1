# SPDX-License-Identifier: Apache-2.0
"""The client of a benchmark: its key is valid as long as the benchmark runs, and no longer, whatever ends it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.bench.client import temporary_client
from ansible.module_utils.vllm_edge.gateway.clients import GatewayError
from ansible.module_utils.vllm_edge.gateway.command import synchronize
from ansible.module_utils.vllm_edge.gateway.sync import Report
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.course import read_course
from gateway_world import ENGINES, KEYS, ROOT, Gateway, wait_until, write_request
from generations import activate, engine, rendered

WORKER = {"model": "worker"}
RUN = """
import sys, time
from pathlib import Path
from vllm_edge.bench.client import temporary_client
from vllm_edge.paths import HostPaths
with temporary_client(HostPaths(**dict(zip(("etc", "state", "run", "gateway_run"), map(Path, sys.argv[1:]))))) as key:
    print(key, flush=True)
    time.sleep(60)
"""


@dataclass
class Host:
    """The directories of a host whose gateway is the real one of these tests."""

    gateway: Gateway
    paths: HostPaths

    def ask(self, key: str) -> int:
        return self.gateway.ask(write_request(WORKER, key=key)).status

    def sync(self, **options: bool) -> Report:
        return synchronize(self.paths, read_course, **options)

    def start(self) -> tuple[subprocess.Popen[str], str]:
        """A process that has the client, and its key."""
        places = (self.paths.etc, self.paths.state, self.paths.run, self.paths.gateway_run)
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, places)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils")},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout
        return process, process.stdout.readline().strip()

    def find(self, text: str) -> list[Path]:
        """The files below all its directories that hold a text."""
        files = [path for path in self.gateway.root.rglob("*") if path.is_file() and not path.is_symlink()]
        return [path for path in files if text.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def host(make_gateway: Callable[..., Gateway]) -> Host:
    """The gateway's maps as the host's program writes them for a committed generation, and one client."""
    gateway = make_gateway()
    paths = HostPaths(gateway.root, gateway.root / "state", gateway.root / "units", gateway.vllm, gateway.run)
    activate(
        paths,
        rendered(
            *(engine(name, gateway.ports.get(name, 8050), served_names=served) for name, served in ENGINES.items())
        ),
    )
    clients = {"all": {"keys": [{"sha256": hashlib.sha256(KEYS["all"].encode()).hexdigest()}]}}
    (gateway.etc / "clients.json").write_text(json.dumps(clients))
    return Host(gateway, paths)


def test_the_key_is_valid_in_the_block_only_and_nowhere_to_be_read(host: Host) -> None:
    host.sync()
    before = [(host.gateway.etc / f"{name}.map").read_bytes() for name in ("clients", "rights", "lists")]
    written = (host.gateway.etc / "clients.json").read_bytes()
    with temporary_client(host.paths) as key:
        assert host.ask(key) == host.ask("all") == 200
        assert (host.sync(check=True).changes, host.sync().changes) == ((), ()), "it is no drift"
        assert host.find(key) == [], "only its hash is in a file"
        assert host.paths.temporary_clients.stat().st_mode & 0o777 == 0o600
        host.gateway.reload()
        assert host.ask(key) == 200, "a reload reads the files"
        wait_until(lambda: [one["client"] for one in host.gateway.read_log()].count("bench") == 2)
        assert key not in host.gateway.log.read_text()
        # A second benchmark does not take the client away.
        with pytest.raises(GatewayError, match="Another benchmark has the client bench"), temporary_client(host.paths):
            pass
        assert host.ask(key) == 200
    assert host.ask(key) == 401 and host.ask("all") == 200
    assert host.sync(check=True).changes == () and not host.paths.temporary_clients.exists()
    assert [(host.gateway.etc / f"{name}.map").read_bytes() for name in ("clients", "rights", "lists")] == before
    assert host.find("bench") == [host.gateway.log]
    assert (host.gateway.etc / "clients.json").read_bytes() == written


def test_an_exception_revokes_it(host: Host) -> None:
    with pytest.raises(KeyboardInterrupt), temporary_client(host.paths) as key:
        assert host.ask(key) == 200
        raise KeyboardInterrupt
    assert host.ask(key) == 401


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_a_process_that_is_killed_takes_its_client_along(host: Host, number: signal.Signals) -> None:
    process, key = host.start()
    assert host.ask(key) == 200
    process.send_signal(number)
    process.wait(10)
    if number == signal.SIGKILL:  # nobody has told the gateway yet: the timer does
        assert host.ask(key) == 200 and host.paths.temporary_clients.exists()
        assert "clients.map" in host.sync().changes
    assert host.ask(key) == 401 and host.sync(check=True).changes == ()
    with temporary_client(host.paths) as other:  # what was left is in nobody's way
        assert (host.ask(other), host.ask(key)) == (200, 401)


def test_its_time_ends_although_its_process_lives(host: Host) -> None:
    with temporary_client(host.paths, valid_s=2) as key:
        assert host.ask(key) == 200

        def is_over() -> bool:
            host.sync()
            return host.ask(key) == 401

        wait_until(is_over)
        assert "bench:worker" not in (host.gateway.etc / "rights.map").read_text()


def test_a_client_of_an_operator_and_a_gateway_that_is_down_are_refused(host: Host, tmp_path: Path) -> None:
    file = host.gateway.etc / "clients.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "bench": {"keys": []}}))
    with pytest.raises(GatewayError, match="-e revoke=bench"), temporary_client(host.paths):
        pass
    file.write_text("{")
    with pytest.raises(GatewayError, match=r"clients\.json"), temporary_client(host.paths):
        pass
    file.write_text(before)
    down = HostPaths(host.paths.etc, host.paths.state, host.paths.units, host.paths.run, tmp_path)
    with pytest.raises(GatewayError, match="The gateway does not run"), temporary_client(down):
        pass
    bare = HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units", tmp_path / "run", tmp_path)
    with pytest.raises(GatewayError, match="This host has no gateway"), temporary_client(bare):
        pass
    assert not host.paths.temporary_clients.exists() and not bare.temporary_clients.exists()
    assert host.sync().warnings == ()
