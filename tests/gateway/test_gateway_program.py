# SPDX-License-Identifier: Apache-2.0
"""What the host's program does with the running gateway: a switch, many clients, and the client of a benchmark.

The key of a benchmark is valid as long as it runs, and no longer, whatever ends it.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gateway import sync, view
from ansible.module_utils.vllm_edge.gateway.admin import GatewayRefused, HAProxy, Worker
from ansible.module_utils.vllm_edge.gateway.clients import GatewayError
from ansible.module_utils.vllm_edge.gateway.command import synchronize
from ansible.module_utils.vllm_edge.gateway.describe import describe_gateway
from ansible.module_utils.vllm_edge.gateway.sync import Report, open_proxy, publish_phase, view_host
from ansible.module_utils.vllm_edge.gateway.view import SwitchProgress, parse_text
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Generation
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.history import read_switch_progress
from ansible.module_utils.vllm_edge.trials.bench.client import temporary_client
from gateway_host import ENGINES, KEYS, Connection, Gateway, wait_until, write_request
from generations import activate, engine, put, rendered

pytestmark = pytest.mark.slow

WORKER = {"model": "worker"}


def hold_client(paths: HostPaths, key_to: Any) -> None:
    """What a benchmark is for the gateway; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    with temporary_client(paths) as key:
        key_to.send(key)
        time.sleep(60)


@dataclass
class Host:
    """The directories of a host whose gateway is the real one of these tests."""

    gateway: Gateway
    paths: HostPaths
    live: Generation
    coming: Generation

    def ask(self, key: str) -> int:
        return self.gateway.ask(write_request(WORKER, key=key)).status

    def sync(self, **options: bool) -> Report:
        return synchronize(self.paths, read_switch_progress, **options)

    def apply(self, live: Generation, *keep: str) -> Report:
        progress = SwitchProgress("away", keep, self.coming) if live is self.live else None
        return sync.apply(self.paths, lambda: view_host(self.paths, live, progress))

    def map(self, name: str) -> dict[str, str]:
        return parse_text((self.gateway.etc / f"{name}.map").read_text())

    def find(self, text: str) -> list[Path]:
        """The files below all its directories that hold a text."""
        files = [path for path in self.gateway.root.rglob("*") if path.is_file() and not path.is_symlink()]
        return [path for path in files if text.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def host(make_gateway_of_the_file: Callable[..., Gateway]) -> Host:
    """The gateway's maps as the host's program writes them for a committed generation, and one client."""
    gateway = make_gateway_of_the_file()
    paths = HostPaths(gateway.root, gateway.root / "state", gateway.root / "units", gateway.vllm, gateway.run)

    def load(number: int) -> Generation:
        return store.load(paths, number)

    big, mid, small = (
        engine(name, gateway.ports.get(name, 8050), served_names=served, stands_in_for=["architect"][: name == "mid"])
        for name, served in ENGINES.items()
    )
    later = engine("small", gateway.ports["small"], served_names=["architect"])
    live, coming = activate(paths, rendered(big, mid, small)), put(paths, rendered(later, mid, profile="later"))
    clients = {"all": {"keys": [{"sha256": hashlib.sha256(KEYS["all"].encode()).hexdigest()}]}}
    (gateway.etc / "clients.json").write_text(json.dumps(clients))
    return Host(gateway, paths, load(live), load(coming))


@pytest.fixture
def admin(host: Host) -> Iterator[Worker]:
    """The worker of the gateway, whose clients are afterwards as before."""
    clients = (host.gateway.etc / "clients.json").read_text()
    host.sync()
    yield open_proxy(host.paths).list_workers()[0]
    (host.gateway.etc / "clients.json").write_text(clients)
    host.sync()


def test_a_switch_as_a_client_sees_it(host: Host, admin: Worker) -> None:
    connection = Connection(host.gateway.port)

    def ask() -> str:
        connection.send(write_request({"model": "architect"}))
        return str(connection.read().json["engine"])

    def is_away() -> bool:
        return admin.read_servers()["architect"].away

    report = host.sync()
    assert report.answers and report.changes == (), "what HAProxy has read is what the files say"
    assert ask() == "big"
    # An engine stands in: also for a client that had used the other one over the same connection.
    assert "link architect.sock" in host.apply(host.live, "mid").changes
    assert ask() == "mid"
    # Nobody is there: the request waits, and goes to the new engine.
    assert "server of architect away" in host.apply(host.live).changes and is_away()
    assert "server of architect back" in host.sync(check=True).changes and is_away()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask)
        time.sleep(1.2)
        assert not waiting.done()
        host.apply(host.coming)
        assert waiting.result(10) == "small"
    connection.close()
    for name in ("models", "rights", "lists", "state", "clients", "ports"):
        assert admin.read_map(host.gateway.etc / f"{name}.map") == host.map(name)
    publish_phase(host.paths, "clean_up")
    assert (admin.read_map(host.gateway.etc / "state.map") or {})["switch"] == '"clean_up"'


def test_a_revoked_key_is_refused_whatever_else_is_broken(host: Host, admin: Worker) -> None:
    """Also by the worker that a reload has left with its connections, whose streams go on."""
    clients, late = json.loads((host.gateway.etc / "clients.json").read_text()), KEYS["revoked"]
    key = {"keys": [{"sha256": hashlib.sha256(late.encode()).hexdigest()}]}
    (host.gateway.etc / "clients.json").write_text(json.dumps(clients | {"late": key}))
    host.sync()
    stream = Connection(host.gateway.port)
    stream.send(write_request({"model": "worker", "test": {"chunks": 12, "interval": 0.1}}))
    assert stream.read_head().status == 200 and host.ask("revoked") == 200
    host.gateway.reload()
    assert len(open_proxy(host.paths).list_workers()) == 2
    record = host.paths.active_profile.read_text()
    host.paths.active_profile.write_text("{")
    (host.gateway.etc / "clients.json").write_text(json.dumps(clients))
    report = host.sync()
    host.paths.active_profile.write_text(record)
    assert "The committed generation cannot be read" in report.warnings[0] and len(report.warnings) == 1
    assert host.ask("revoked") == 401 and host.ask("all") == 200
    assert (admin.read_map(host.gateway.etc / "clients.map") or {}).keys() == host.map("clients").keys()
    assert b"".join(stream.read_chunks()).endswith(b"[DONE]\n\n")
    host.gateway.reload()
    assert host.ask("revoked") == 401


def test_a_name_without_an_engine_is_down(host: Host, admin: Worker) -> None:
    def state() -> str:
        gateway = describe_gateway(host.paths, {"ActiveState": "active"})
        assert gateway and gateway["problem"] is None
        return str(gateway["roles"]["architect"]["state"])

    assert state() == "up"
    host.gateway.engines["big"].stop()
    connection = Connection(host.gateway.port)
    connection.send(write_request({"model": "architect"}))
    wait_until(lambda: state() == "down")
    connection.close()
    host.gateway.engines["big"].start()
    wait_until(lambda: state() == "up")


def test_many_clients_are_replaced_at_once(host: Host, admin: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    file = host.gateway.etc / "clients.json"
    file.write_text(json.dumps({f"c{number}": {"keys": []} for number in range(400)}))
    changes = host.sync().changes
    assert "lists.map in the running gateway" in changes and "models.map in the running gateway" not in changes
    assert len(host.map("lists")) == 400 * 5 + 4
    for name in ("lists", "rights"):
        assert admin.read_map(host.gateway.etc / f"{name}.map") == host.map(name)
    # An entry that is longer than the buffer: HAProxy hangs up.
    file.write_text(json.dumps({"c": {"keys": []}}))
    with monkeypatch.context() as patch:
        patch.setattr(view, "_list_models", lambda roles: "x" * 2_000_000)
        report = host.sync()
    assert report.answers and "systemctl reload" in report.warnings[0]
    unknown = host.gateway.etc / "unknown.map"
    assert admin.read_map(unknown) is None, "the configuration has no such map"
    with pytest.raises(GatewayRefused, match="Unknown map identifier"):
        admin.replace_map(unknown, {"a": "b"})


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill -9"])
def test_a_process_that_is_killed_takes_its_client_along(host: Host, number: signal.Signals) -> None:
    key_from, key_to = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold_client, args=(host.paths, key_to))
    process.start()
    key = key_from.recv()
    assert host.ask(key) == 200
    assert process.pid
    os.kill(process.pid, number)
    process.join(10)
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


def test_a_taken_name_or_no_gateway_is_refused(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = host.gateway.etc / "clients.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), "bench": {"keys": []}}))
    with pytest.raises(GatewayError, match="-e revoke=bench"), temporary_client(host.paths):
        pass
    file.write_text("{")
    with pytest.raises(GatewayError, match=r"clients\.json"), temporary_client(host.paths):
        pass
    file.write_text(before)
    monkeypatch.setattr(HAProxy, "is_stopped", lambda self: True)
    down = HostPaths(host.paths.etc, host.paths.state, host.paths.units, host.paths.run, tmp_path)
    with pytest.raises(GatewayError, match="The gateway does not run"), temporary_client(down):
        pass
    bare = HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units", tmp_path / "run", tmp_path)
    with pytest.raises(GatewayError, match="This host has no gateway"), temporary_client(bare):
        pass
    assert not host.paths.temporary_clients.exists() and not bare.temporary_clients.exists()
    assert host.sync().warnings == ()
