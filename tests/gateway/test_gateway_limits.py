# SPDX-License-Identifier: Apache-2.0
"""Keys, what a client may use of the gateway, TLS, and what attackers cost."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import pytest
from gateway_host import CLIENTS, H2, KEYS, LIMITS, Connection, Gateway, wait_until, write_certificate, write_request
from hostile_requests import MIB, fill

pytestmark = pytest.mark.slow

WORKER = {"model": "worker"}
STREAM = {"model": "worker", "test": {"chunks": 40, "interval": 0.05}}


@pytest.fixture
def clients(gateway: Gateway) -> Iterator[Gateway]:
    """The gateway; afterwards each client is as before."""
    before = dict(LIMITS), dict(CLIENTS)
    yield gateway
    LIMITS.update(before[0])
    CLIENTS.update(before[1])
    gateway.commit("clients")


def test_a_client_sends_no_more_requests_a_minute(clients: Gateway) -> None:
    statuses = [clients.ask(write_request(WORKER, key="slow")).status for _ in range(7)]
    refused = clients.ask(write_request(WORKER, key="slow"))
    assert statuses == [200] * 5 + [429] * 2
    assert refused.headers["retry-after"] == "10" and refused.json["error"]["type"] == "rate_limit_error"
    assert clients.ask(write_request(WORKER)).status == 200
    LIMITS["slow"] = (100, 0)
    clients.commit("clients")
    assert clients.ask(write_request(WORKER, key="slow")).status == 200


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_a_client_has_no_more_streams_at_once(clients: Gateway, version: str) -> None:
    seen = clients.engines["mid"].seen
    before = len(seen)
    if version == "2":
        client = H2(clients.port)
        for stream in (1, 3, 5, 7):
            client.ask(stream, json.dumps(STREAM).encode(), authorization=f"Bearer {KEYS['narrow']}")
        client.read(lambda: len(client.status) == 4)
        assert sorted(client.status.values()) == [200, 200, 200, 429]
        client.close()
    else:
        connections = [Connection(clients.port) for _ in range(4)]
        for number, connection in enumerate(connections):
            connection.send(write_request(STREAM, key="narrow"))
            if number < 3:
                wait_until(lambda number=number: len(seen) == before + number + 1)
        answer = connections[3].read()
        assert (answer.status, answer.json["error"]["code"]) == (429, "too_many_streams")
        LIMITS["narrow"] = (0, 4)
        clients.commit("clients")
        connections[3].send(write_request(WORKER, key="narrow"))
        assert connections[3].read().status == 200
        for connection in connections:
            connection.close()
    wait_until(lambda: clients.ask(write_request(WORKER, key="narrow")).status == 200)


@pytest.mark.parametrize("reload", [False, True], ids=["at run time", "and a reload"])
def test_a_revoked_key_is_refused_on_open_connections(clients: Gateway, reload: bool) -> None:
    h1, h2 = Connection(clients.port), H2(clients.port)
    h1.send(write_request(WORKER, key="revoked"))
    h2.ask(1, b'{"model": "worker"}', authorization=f"Bearer {KEYS['revoked']}")
    h2.ask(3, json.dumps(STREAM).encode(), authorization=f"Bearer {KEYS['revoked']}")
    assert h1.read().status == 200 and h2.read(lambda: 1 in h2.ended and 3 in h2.data)
    del CLIENTS["revoked"]
    if reload:
        clients.write("clients")
        clients.reload()
    else:
        clients.commit("clients")
    h1.send(write_request(WORKER, key="revoked"))
    assert h1.read().status in ((0, 401) if reload else (401,))
    h2.ask(5, b'{"model": "worker"}', authorization=f"Bearer {KEYS['revoked']}")
    h2.read(lambda: h2.status.get(5) or h2.away, 3)
    assert h2.status.get(5, 0) in ((0, 401) if reload else (401,))
    assert h2.read(lambda: 3 in h2.ended), "a stream that runs goes on"
    assert clients.ask(write_request(WORKER, key="revoked")).status == 401


def connect_tls(
    port: int, *protocols: str, newest: ssl.TLSVersion | None = None, ciphers: str = "ALL:@SECLEVEL=0"
) -> ssl.SSLSocket:
    """A connection with TLS that believes every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(list(protocols))
    if newest:
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, newest
        context.set_ciphers(ciphers)
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), 10))


def get_certificate(connection: ssl.SSLSocket) -> str:
    return ssl.DER_cert_to_PEM_cert(connection.getpeercert(True) or b"")


def test_tls_with_http_2_and_a_renewed_certificate(make_gateway: Callable[..., Gateway]) -> None:
    gateway = make_gateway(tls=True, prepare=lambda etc: write_certificate(etc / "tls/server.pem"))
    file = gateway.etc / "tls/server.pem"
    running = connect_tls(gateway.tls_port, "h2", "http/1.1")
    assert running.selected_alpn_protocol() == "h2" and get_certificate(running) in file.read_text()
    client = H2(0, running)
    client.ask(1, json.dumps(STREAM).encode())
    assert client.read(lambda: 1 in client.data)
    write_certificate(file)
    gateway.reload()
    renewed = connect_tls(gateway.tls_port, "http/1.1")
    assert renewed.selected_alpn_protocol() == "http/1.1" and get_certificate(renewed) in file.read_text()
    assert client.read(lambda: 1 in client.ended) and b"[DONE]" in client.data[1]
    with pytest.raises(ssl.SSLError):
        connect_tls(gateway.tls_port, "h2", newest=ssl.TLSVersion.TLSv1_1)
    for suite in ("ECDHE-ECDSA-AES256-SHA", "ECDHE-ECDSA-CHACHA20-POLY1305"):
        with pytest.raises(ssl.SSLError):
            connect_tls(gateway.tls_port, "h2", newest=ssl.TLSVersion.TLSv1_2, ciphers=suite)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        connect_tls(gateway.port, "h2")


@pytest.mark.parametrize(
    ("timeout", "request_"),
    [
        ("http-request 10s", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"),
        ("time 20s", write_request(WORKER)[:-5]),
    ],
)
def test_a_slow_request_ends(make_gateway: Callable[..., Gateway], timeout: str, request_: bytes) -> None:
    gateway = make_gateway(edit=(timeout, f"{timeout.split()[0]} 1s"))
    start = time.monotonic()
    assert gateway.ask(request_).status == 408 and time.monotonic() - start < 3


def test_one_address_has_not_all_connections(make_gateway: Callable[..., Gateway]) -> None:
    gateway = make_gateway()

    def connect(address: str) -> Connection:
        return Connection(gateway.port, source=address)

    def is_served(connection: Connection, key: str | None) -> bool:
        connection.send(write_request(path="/v1/models", key=key))
        return connection.read().status == (200 if key else 401)

    # What is not 127.0.0.1 is one address, as a local user has all of them.
    opened = [connect(f"127.0.0.{2 + number % 9}") for number in range(64)]
    wait_until(lambda: "conn_cur=64" in gateway.command("show table addresses"))
    with pytest.raises((ConnectionError, AssertionError)):  # it may be refused before a byte was sent
        assert is_served(connect("127.0.0.3"), "all")
    assert is_served(connect("127.0.0.1"), None)
    assert is_served(opened[0], "all")
    more = connect("127.0.0.3")
    assert is_served(more, "all"), "an address that has shown a key may have more"
    for one in [*opened, more]:
        one.close()


@pytest.mark.parametrize("version", ["1.1", "2"])
def test_a_connection_without_a_key_gets_few_answers(gateway: Gateway, version: str) -> None:
    if version == "2":
        client = H2(gateway.port)
        for stream in range(1, 21, 2):
            client.ask(stream, _path="/status", authorization="Bearer wrong")
        client.read(lambda: len(client.reset) + len(client.ended) == 10 or client.away, 3)
        assert list(client.status.values()) == [401] * 2
        client.ask(21, _path="/status")
        client.close()
    else:
        stranger = Connection(gateway.port)
        stranger.send(write_request(path="/status", key=None) * 10)
        assert [stranger.read().status for _ in range(3)] == [401] * 2 + [0]
        stranger.close()
    line = wait_until(lambda: [one for one in gateway.read_log() if one["status"] == 401])[-1]
    assert (line["address"], line["client"]) == ("127.0.0.1", "-")
    assert line["wrong_keys"] > 0 or version == "1.1", "it counts the keys that the address has sent"


def test_a_damaged_map_is_an_error_for_its_role_only(clients: Gateway) -> None:
    for entry in ("role_x", "x", "nobody big up - 5 -", "architect big", "architect"):
        clients.commit("models", clients.map("models") | {"architect": entry})
        answer = clients.ask(write_request({"model": "architect"}, key="solo"))
        others = [clients.ask(write_request({"model": served})).status for served in ("worker", "sentry")]
        clients.commit("models")
        assert answer.status in (200, 503) and others == [200, 200], entry
        assert answer.status == 200 or answer.headers["retry-after"] in ("5", "10"), entry


ATTACKS = {
    "slow": (write_request(fill(8 * MIB))[:MIB], 1.5),
    "headers": (b"GET /status HTTP/1.1\r\nX-A: " + b"a" * MIB, 1.25),
    "without a key": (write_request(fill(8 * MIB), key=None), 0.25),
}
"""What each of 64 connections sends, and the MiB of memory that it may cost."""


@pytest.mark.parametrize("kind", ATTACKS)
def test_memory_stays_bounded(make_gateway: Callable[..., Gateway], kind: str) -> None:
    gateway = make_gateway()
    request, mib = ATTACKS[kind]
    assert gateway.ask(write_request(path="/status")).status == 200, "a known address may have more connections"
    before = gateway.get_memory_mib()
    connections = [Connection(gateway.port) for _ in range(64)]
    for connection in connections:
        connection.send(request)
    assert gateway.ask(write_request(path="/status"), timeout=20).status == 200
    after = gateway.get_memory_mib()
    for connection in connections:
        connection.close()
    print(f"{kind}: {before:.0f} MiB before, {after:.0f} MiB after")
    assert after - before < 64 * mib
    wait_until(lambda: gateway.ask(write_request(WORKER)).status == 200)
