# SPDX-License-Identifier: Apache-2.0
"""Gateways of a fleet: which host answers, what a request of another gateway may do, and whom the listener admits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gateway.admin import Check, HAProxy
from gateway_host import HAPROXY, Answer, Connection, Gateway, get_free_port, wait_until, write_request

pytestmark = pytest.mark.slow

HOSTS = ("a", "b")


def run(*words: str | Path) -> None:
    subprocess.run([*map(str, words)], check=True, capture_output=True)


def make_ca(directory: Path) -> Path:
    """A CA as a host has one: ca.pem and ca.key."""
    directory.mkdir()
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    ends = ("-keyout", directory / "ca.key", "-out", directory / "ca.pem")
    run(*f"openssl req -x509 {key} -subj /CN={directory.name}".split(), *ends)
    return directory


def sign(ca: Path, name: str, usages: str = "serverAuth,clientAuth", days: int = 2) -> Path:
    """Key and certificate of this DNS name in one file. One of 0 days has ended."""
    made = ca / f"{name}-{usages}-{days}"
    (ca / "ext").write_text(f"[x]\nbasicConstraints=CA:FALSE\nextendedKeyUsage={usages}\nsubjectAltName=DNS:{name}\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    run(*f"openssl req {key} -subj /CN={name} -keyout {made}.key -out {made}.csr".split())
    signs = f"openssl x509 -req -CA {ca}/ca.pem -CAkey {ca}/ca.key -CAcreateserial -extfile {ca}/ext -extensions x"
    run(*f"{signs} -in {made}.csr -days {days} -out {made}.crt".split())
    made.write_text(Path(f"{made}.key").read_text() + Path(f"{made}.crt").read_text())
    return made


class Pair:
    """Two gateways as one fleet, with a CA each."""

    def __init__(self, root: Path, **variables: Any) -> None:
        self.cas = {host: make_ca(root / host) for host in HOSTS}
        self.ports = {host: get_free_port() for host in HOSTS}
        self.a, self.b = (self.make(host, **variables) for host in HOSTS)

    def make(self, host: str, **variables: Any) -> Gateway:
        other = "b" if host == "a" else "a"
        here = {"fleet": "f", "host": host, "server": f"host-{host}", "address": "127.0.0.1", "port": self.ports[host]}
        peer = {"name": other, "server": f"host-{other}", "address": "127.0.0.1", "port": self.ports[other]}

        def prepare(etc: Path) -> None:
            (etc / "tls/fleet.pem").write_text(sign(self.cas[host], f"host-{host}").read_text())
            (etc / "tls/fleet-ca.pem").write_text((self.cas[other] / "ca.pem").read_text())

        gateway = Gateway(prepare=prepare, __serving_gateway_fleet={**here, "peers": [peer]}, **variables)
        gateway.start()
        return gateway

    def reaches(self, gateway: Gateway, served: str = "architect") -> bool:
        status = gateway.ask(write_request(path="/status")).json["roles"][served]
        return bool(status["hosts"])

    def restore(self) -> None:
        """Both serve all, and know it of each other."""
        for gateway in (self.a, self.b):
            if gateway.process is None or gateway.process.poll() is not None:
                gateway.log.write_bytes(b"")
                gateway.start()
            for engine in gateway.engines.values():
                if not engine.server:
                    engine.start()
            for served, engine in (("architect", "big"), ("worker", "mid")):
                gateway.bring_back(served, engine)
        wait_until(lambda: self.reaches(self.a) and self.reaches(self.b))

    def open(self, host: str, certificate: Path | None = None, sends: bytes = b"") -> Answer:
        """Ask the listener of a host, with a certificate or without one."""
        context = ssl.create_default_context(cafile=str(self.cas[host] / "ca.pem"))
        if certificate:
            context.load_cert_chain(certificate)
        with socket.create_connection(("127.0.0.1", self.ports[host]), 10) as plain:
            connection = Connection.__new__(Connection)
            connection.socket = context.wrap_socket(plain, server_hostname=f"host-{host}")
            connection.file = connection.socket.makefile("rb")
            connection.send(sends or write_request(path="/fleet", key=None))
            try:
                return connection.read()
            finally:
                connection.close()


@pytest.fixture(scope="module")
def both(haproxy: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("fleet"))
    yield pair
    for gateway in (pair.a, pair.b):
        gateway.stop()


@pytest.fixture
def pair(both: Pair) -> Pair:
    both.restore()
    return both


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(24) as threads:
        yield threads


def ask(gateway: Gateway, model: str = "architect", headers: str = "", key: str = "all", **orders: Any) -> Answer:
    return gateway.ask(write_request({"model": model, "test": orders}, headers=headers, key=key))


def name_servers(answers: list[Future[Answer]]) -> Counter[str]:
    return Counter(str(one.result().headers.get("x-served-by", one.result().status)) for one in answers)


def ask_one_by_one(gateway: Gateway, number: int, headers: str = "") -> set[str]:
    """Ask when the former request has left HAProxy's count, and return who answered."""
    found = set()
    for _ in range(number):
        found.add(ask(gateway, headers=headers).headers["x-served-by"])
        time.sleep(0.05)
    return found


def count_reached(gateway: Gateway) -> int:
    """The engines here and the other hosts that HAProxy reaches for `architect`."""
    rows = map(str.split, gateway.command("show servers state role_architect").splitlines())
    return sum(row[3].startswith(("engine", "host-")) and row[5] == "2" for row in rows if len(row) > 5)


def kill(gateway: Gateway) -> None:
    workers = gateway.get_workers()
    assert gateway.process
    gateway.process.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    gateway.process.wait(5)


def test_requests_of_clients_are_spread_by_number_and_one_alone_stays(pair: Pair, pool: ThreadPoolExecutor) -> None:
    assert ask_one_by_one(pair.a, 6) == {"a/big"}
    at_b = [pool.submit(ask, pair.b, silent=1.5) for _ in range(8)]
    time.sleep(0.5)
    # Four of them are at the engine here, and no reason to leave it.
    assert ask_one_by_one(pair.a, 3) == {"a/big"}
    assert name_servers(at_b) == {"a/big": 4, "b/big": 4}


def test_a_role_that_is_away_here_is_asked_for_there(pair: Pair, pool: ThreadPoolExecutor) -> None:
    pair.a.send_away("architect")
    began = time.monotonic()
    assert ask(pair.a).headers["x-served-by"] == "b/big"
    assert time.monotonic() - began < 1
    log = [line for line in pair.a.read_log() if line["role"] == "architect"][-1]
    assert log["engine"] == "b/big" and log["client"] == "all"
    assert pair.b.get_log(log["request_id"])["client"] == "all"
    for gateway, state, hosts in ((pair.a, "away", ["b"]), (pair.b, "up", [])):
        seen = wait_until(
            lambda gateway=gateway, hosts=hosts: (
                (role := gateway.ask(write_request(path="/status")).json["roles"]["architect"])["hosts"] == hosts
                and role
            )
        )
        assert seen["state"] == state
        assert gateway.ask(write_request(path="/ready/architect")).status == 200


def test_haproxy_says_which_hosts_it_reaches(pair: Pair) -> None:
    """A server that tracks another one is up with it."""
    worker = HAProxy("haproxy.service", pair.a.run / "master.sock").list_workers()[0]
    for up, result in ((True, "L7OK"), (False, "L7STS")):
        wait_until(lambda up=up: pair.reaches(pair.a) == up)
        assert worker.read_checks("peers_architect") == {("peers_architect", "host-b"): Check(up, result)}
        assert worker.read_checks("role_architect")["role_architect", "host-b"].up == up
        pair.b.send_away("architect")


def test_where_no_host_serves_a_role_requests_wait_for_the_first_that_does(
    pair: Pair, pool: ThreadPoolExecutor
) -> None:
    for gateway in (pair.a, pair.b):
        gateway.send_away("architect")
    wait_until(lambda: not pair.reaches(pair.a))
    assert pair.a.ask(write_request(path="/ready/architect")).status == 503
    waits = pool.submit(ask, pair.a)
    time.sleep(1)
    assert not waits.done()
    pair.b.bring_back("architect", "big")
    assert waits.result(10).headers["x-served-by"] == "b/big"


def forward(client: str, model: str = "architect", path: str = "/v1/chat/completions", **orders: Any) -> bytes:
    headers = f"X-Vllm-Edge-Client: {client}\r\nX-Vllm-Edge-Models: {model}\r\nX-Request-Id: 4711\r\n"
    return write_request({"model": model, "test": orders}, path=path, key=None, headers=headers)


def test_a_request_of_a_gateway_is_answered_here_or_not_at_all(pair: Pair) -> None:
    own = sign(pair.cas["b"], "host-b")
    answer = pair.open("a", own, forward("part", "sentry"))
    assert answer.headers["x-served-by"] == "a/small"
    seen = pair.a.engines["small"].seen[-1]
    assert seen.headers["x-request-id"] == "4711" and seen.headers["x-vllm-edge-models"] == "sentry"
    assert pair.open("a", own, forward("part", "architect")).status == 403, "the rights are those of this host"
    assert pair.open("a", own, forward("nobody", "sentry")).status == 403
    for path in ("/status", "/v1/models", "/metrics/host", "/v1/score"):
        assert pair.open("a", own, forward("all", path=path)).status == 404
    pair.a.send_away("architect")
    before, began = len(pair.b.engines["big"].seen), time.monotonic()
    answer = pair.open("a", own, forward("all"))
    assert (answer.status, answer.headers["retry-after"]) == (503, "55")
    assert time.monotonic() - began < 1 and len(pair.b.engines["big"].seen) == before
    assert pair.open("a", own, write_request(path="/ready/architect", key=None)).status == 503
    assert pair.open("a", own, write_request(path="/ready/worker", key=None)).status == 200
    told = pair.open("a", own).json
    assert told["host"] == "h1" and abs(told["now"] - time.time()) < 5


def test_a_client_cannot_name_another_one(pair: Pair) -> None:
    headers = "X-Vllm-Edge-Client: all\r\nX-Vllm-Edge-Models: architect\r\n"
    assert ask(pair.a, headers=headers, key="part").status == 403
    pair.a.send_away("sentry")
    try:
        answer = ask(pair.a, "sentry", headers=headers, key="part")
        assert answer.headers["x-served-by"] == "b/small"
        assert pair.b.get_log(answer.headers["x-request-id"])["client"] == "part"
    finally:
        pair.a.bring_back("sentry", "small")


def test_a_role_that_leaves_serves_on_and_is_not_ready_for_others(pair: Pair) -> None:
    pair.a.bring_back("architect", "big", "leaving")
    own = sign(pair.cas["b"], "host-b")
    assert pair.open("a", own, write_request(path="/ready/architect", key=None)).status == 503
    assert pair.open("a", own, forward("all")).headers["x-served-by"] == "a/big"
    assert pair.a.ask(write_request(path="/status")).json["roles"]["architect"]["back_in_s"] is None
    assert {ask(pair.a).headers["x-served-by"] for _ in range(3)} == {"b/big"}, "its own clients go there already"
    pair.b.send_away("architect")
    wait_until(lambda: not pair.reaches(pair.a))
    assert ask(pair.a).headers["x-served-by"] == "a/big"


def test_a_session_stays_at_one_host_until_that_is_much_fuller(pair: Pair, pool: ThreadPoolExecutor) -> None:
    header = "X-Session: one and the same\r\n"
    (home,) = {ask(gateway, headers=header).headers["x-served-by"] for gateway in (pair.a, pair.b) for _ in range(4)}
    spread = Counter(ask(pair.a, headers=f"X-Session: {number}\r\n").headers["x-served-by"] for number in range(24))
    assert min(spread["a/big"], spread["b/big"]) >= 4
    crowd = name_servers([pool.submit(ask, pair.a, headers=header, silent=1.5) for _ in range(14)])
    assert crowd[home] - crowd.total() / 2 == pytest.approx(2, abs=1) and len(crowd) == 2
    gateway = pair.b if home == "b/big" else pair.a
    gateway.send_away("architect")
    wait_until(lambda: ask(pair.a, headers=header).headers["x-served-by"] != home)


@pytest.mark.parametrize("why", ["none", "foreign", "ended", "for servers only", "former"])
def test_the_listener_admits_gateways_of_the_fleet_alone(pair: Pair, why: str, tmp_path: Path) -> None:
    own = pair.cas["b"]
    certificate = {
        "none": lambda: None,
        "foreign": lambda: sign(make_ca(tmp_path / "b"), "host-b"),
        "ended": lambda: sign(own, "host-b", days=0),
        "for servers only": lambda: sign(own, "host-b", usages="serverAuth"),
        "former": lambda: sign(own, "host-b"),
    }[why]()
    if why == "former":  # as after a run without that host
        assert pair.open("a", certificate).status == 200
        file = pair.a.etc / "tls/fleet-ca.pem"
        former = file.read_text()
        file.write_text((make_ca(tmp_path / "c") / "ca.pem").read_text())
        pair.a.reload()
    try:
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert pair.open("a", certificate).status == 0
    finally:
        if why == "former":
            file.write_text(former)
            pair.a.reload()


@pytest.mark.parametrize("why", ["another CA", "another name"])
def test_a_host_with_a_foreign_certificate_gets_no_request(pair: Pair, why: str, tmp_path: Path) -> None:
    file = pair.b.etc / "tls/fleet.pem"
    good = file.read_text()
    ca, name = (make_ca(tmp_path / "b"), "host-b") if why == "another CA" else (pair.cas["b"], "host-c")
    file.write_text(sign(ca, name).read_text())
    pair.b.reload()
    try:
        wait_until(lambda: not pair.reaches(pair.a))
        pair.a.send_away("architect")
        assert pair.a.ask(write_request(path="/ready/architect")).status == 503
    finally:
        file.write_text(good)
        pair.b.reload()


@pytest.mark.parametrize("dies", ["gateway", "engine"])
def test_a_host_that_dies_takes_only_what_it_had(pair: Pair, pool: ThreadPoolExecutor, dies: str) -> None:
    streams = [pool.submit(ask, pair.a, chunks=60, interval=0.1) for _ in range(6)]
    wait_until(lambda: sum(one.sent > 3 for one in pair.b.engines["big"].seen[-3:]) == 3)
    if dies == "gateway":
        kill(pair.b)
    else:
        pair.b.engines["big"].stop()
    lost = sum(ask(pair.a).status != 200 for _ in range(40))
    assert lost <= (dies == "engine"), "a refused connection is tried elsewhere, and after a 503 nobody goes there"
    if dies == "gateway":
        assert Counter(one.result().whole for one in streams) == {True: 3, False: 3}


def test_a_host_that_answers_checks_only_gets_no_more_than_its_share(pair: Pair, pool: ThreadPoolExecutor) -> None:
    before = len(pair.b.engines["big"].seen)
    pair.a.send_away("architect")
    hang = pool.submit(ask, pair.a, silent=2.5)
    wait_until(lambda: len(pair.b.engines["big"].seen) > before)
    pair.a.bring_back("architect", "big")
    wait_until(lambda: count_reached(pair.a) == 2)
    assert ask_one_by_one(pair.a, 10) == {"a/big"}
    assert not hang.done() and hang.result().headers["x-served-by"] == "b/big"


def test_large_bodies_and_streams_pass_between_hosts(pair: Pair) -> None:
    pair.a.send_away("architect")
    text = "x" * 10_000_000
    body = json.dumps({"model": "architect", "test": {}, "messages": [{"role": "user", "content": text}]}).encode()
    assert pair.a.ask(write_request(body)).headers["x-served-by"] == "b/big"
    assert len(pair.b.engines["big"].seen[-1].body) == len(body)
    answer = ask(pair.a, chunks=30, interval=0.1)
    assert answer.whole and answer.body.endswith(b"data: [DONE]\n\n")


def test_both_restart_at_once(pair: Pair) -> None:
    threads = [threading.Thread(target=kill, args=[gateway]) for gateway in (pair.a, pair.b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pair.restore()
    assert {ask(gateway).status for gateway in (pair.a, pair.b)} == {200}


def test_a_host_of_an_older_release_is_not_asked(pair: Pair) -> None:
    kill(pair.b)  # it has no such listener: nothing listens there
    wait_until(lambda: not pair.reaches(pair.a))
    assert [ask(pair.a).headers["x-served-by"] for _ in range(4)] == ["a/big"] * 4


def test_a_benchmark_measures_its_own_host(pair: Pair, pool: ThreadPoolExecutor) -> None:
    for name in ("clients", "rights"):
        entries = {key: value.replace("all", "bench", 1) for key, value in pair.a.map(name).items()}
        if name == "rights":
            entries = {key.replace("all:", "bench:"): value for key, value in entries.items()}
        pair.a.commit(name, entries)
    try:
        assert name_servers([pool.submit(ask, pair.a, silent=0.5) for _ in range(6)]) == {"a/big": 6}
    finally:
        for name in ("clients", "rights"):
            pair.a.commit(name)


def test_replicas_share_what_other_gateways_send(haproxy: None, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    """Two engines at one host: a request from a gateway goes to the one with fewer requests of anybody."""
    pair = Pair(tmp_path, serving_gateway_replicas={"architect": 2})
    try:
        for gateway in (pair.a, pair.b):
            gateway.bring_back("architect", "big,mid")
        wait_until(lambda: count_reached(pair.a) == 3)
        own = sign(pair.cas["b"], "host-b")
        sent = [pool.submit(pair.open, "a", own, forward("all", silent=1.5)) for _ in range(6)]
        assert name_servers(sent) == {"a/big": 3, "a/mid": 3}
    finally:
        for gateway in (pair.a, pair.b):
            gateway.stop()


def test_without_a_fleet_there_is_nothing_of_one(haproxy: None) -> None:
    assert HAPROXY
    gateway = Gateway()
    try:
        text = gateway.render()
        assert not any(word in text for word in ("frontend fleet", "here_", "peers_", "host-", "X-Vllm-Edge-Client"))
    finally:
        gateway.stop()
