# SPDX-License-Identifier: Apache-2.0
"""What other clients and the administrator notice while somebody floods the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from gateway_world import (
    H2,
    H2_PREFACE,
    HEADERS,
    SETTINGS,
    Gateway,
    get_free_port,
    write_certificate,
    write_fields,
    write_frame,
    write_request,
)

pytestmark = pytest.mark.slow

PING = 6
SECONDS = 60 if os.environ.get("VLLM_EDGE_THOROUGH") else 5


@dataclass(frozen=True)
class Flood:
    """What each connection of each address sends at once, and then again and again with a pause."""

    connections: int
    start: bytes
    again: bytes = b""
    pause: float = 0.0


def write_streams(settings: bytes = b"", *fields: bytes) -> bytes:
    """A connection of HTTP/2, with a request without a key for each of these further fields."""
    head = write_fields((":method", "GET"), (":scheme", "http"), (":authority", "a"), (":path", "/nothing"))
    frames = [write_frame(HEADERS, 5, 2 * number + 1, head + more) for number, more in enumerate(fields)]
    return H2_PREFACE + write_frame(SETTINGS, 0, 0, settings) + b"".join(frames)


NO_WINDOW = b"\0\4\0\0\0\0"
LONG = b"\x40" + write_fields(("a", "x" * 3700))[1:]
"""A field that later requests of the connection mean by one byte."""
FLOODS = {
    "answers that nobody reads": Flood(40, write_streams(NO_WINDOW, *[b""] * 100)),
    "slow headers": Flood(505, b"GET /status HTTP/1.1\r\nX-A: ", b"a", 3),
    "slow headers of many": Flood(40, b"GET /status HTTP/1.1\r\nX-A: ", b"a", 3),
    "SETTINGS": Flood(16, write_streams(), write_frame(SETTINGS, 0, 0) * 1000),
    "PING": Flood(16, write_streams(), write_frame(PING, 0, 0, bytes(8)) * 1000),
    "headers of 30 KB": Flood(64, write_streams(NO_WINDOW, LONG, *[b"\xbe" * 7] * 99)),
    "wrong keys": Flood(24, b"", write_request(path="/v1/models", key="vllm-" + "f" * 43) * 10),
}
OWN, OTHER, SIX = "127.0.0.1", "127.0.0.2", "::1"
"""The good client's own address, and others."""
TWO, THREE, MANY = (" ".join(f"127.0.0.{last}" for last in range(2, 2 + count)) for count in (2, 3, 10))


async def keep_connected(flood: Flood, address: str, port: int, tls: ssl.SSLContext | None) -> None:
    """One connection after the other, until the task is cancelled."""

    async def drain(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass

    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(
                "::1" if ":" in address else "127.0.0.1", port, ssl=tls, local_addr=(address, 0)
            )
            ended = asyncio.ensure_future(drain(reader))
            try:
                writer.write(flood.start)
                while not ended.done():
                    writer.write(flood.again)
                    async with asyncio.timeout(5):
                        await writer.drain()
                    await asyncio.wait([ended], timeout=flood.pause if flood.again else 60)
            finally:
                ended.cancel()
                writer.transport.abort()
        await asyncio.sleep(0.5)


async def attack(name: str, port: int, seconds: float, addresses: list[str], tls: bool) -> None:
    """Flood the gateway for some seconds; runs in a process of its own."""
    context = ssl.create_default_context() if tls else None
    if context:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
    flood = FLOODS[name]
    tasks = [keep_connected(flood, address, port, context) for address in addresses for _ in range(flood.connections)]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*tasks)


@dataclass
class Noticed:
    """What a good client and the administrator noticed."""

    requests: int = 0
    failures: int = 0
    slowest: float = 0.0
    admin_failures: int = 0


def ask_once(gateway: Gateway, noticed: Noticed) -> None:
    """Ask as a client, and each process as the administrator."""
    start = time.monotonic()
    noticed.requests += 1
    try:
        noticed.failures += gateway.ask(write_request({"model": "worker"}), timeout=20).status != 200
    except OSError:
        noticed.failures += 1
    noticed.slowest = max(noticed.slowest, time.monotonic() - start)
    for path in gateway.root.glob("**/admin.sock"):
        try:
            with socket.socket(socket.AF_UNIX) as admin:
                admin.settimeout(2)
                admin.connect(str(path))
                admin.sendall(b"show info\n")
                noticed.admin_failures += not admin.recv(4)
        except OSError:
            noticed.admin_failures += 1
    time.sleep(max(0.0, start + 1 - time.monotonic()))


@pytest.fixture
def ports() -> dict[str, int]:
    return {kind: get_free_port() for kind in ("plain", "six", "tls")}


@pytest.fixture
def flooded(make_gateway: Callable[..., Gateway], ports: dict[str, int]) -> Gateway:
    """A gateway on IPv4, IPv6 and with TLS, where the addresses of loopback are as many hosts of a network."""
    gateway = make_gateway(
        serving_gateway_listen=[
            {"address": "127.0.0.1", "port": ports["plain"], "tls": False},
            {"address": "::1", "port": ports["six"], "tls": False},
            {"address": "127.0.0.1", "port": ports["tls"], "tls": True},
        ],
        prepare=lambda etc: write_certificate(etc / "tls/server.pem"),
        edit=("src 127.0.0.0/8", "src 127.9.0.0/16"),
    )
    gateway.port = ports["plain"]
    return gateway


@contextlib.contextmanager
def run_flood(name: str, port: int, addresses: str, tls: bool = False) -> Iterator[None]:
    """Flood a port."""
    words = [sys.executable, __file__, name, str(port), str(SECONDS + 5), addresses, "1" * tls]
    flood = subprocess.Popen(words)
    time.sleep(1.5)
    try:
        yield
    finally:
        flood.kill()
        flood.wait()


alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="tests beside it would be delayed, too")


def thorough(name: str, addresses: str, kind: str = "plain") -> object:
    return pytest.param(name, addresses, kind, marks=[pytest.mark.thorough, alone])


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "addresses", "kind"),
    [
        ("answers that nobody reads", THREE, "plain"),
        ("slow headers", TWO, "plain"),
        thorough("answers that nobody reads", OWN),
        thorough("answers that nobody reads", MANY),
        thorough("answers that nobody reads", SIX, "six"),
        thorough("answers that nobody reads", THREE, "tls"),
        thorough("slow headers of many", MANY),
        thorough("SETTINGS", OTHER),
        thorough("PING", OTHER),
        thorough("headers of 30 KB", OTHER),
        thorough("wrong keys", OTHER),
    ],
)
def test_a_flood_delays_nobody(
    flooded: Gateway,
    ports: dict[str, int],
    record_property: Callable[[str, object], None],
    name: str,
    addresses: str,
    kind: str,
) -> None:
    with run_flood(name, ports[kind], addresses, kind == "tls"):
        noticed, end = Noticed(), time.monotonic() + SECONDS
        while time.monotonic() < end:
            ask_once(flooded, noticed)
        mib = flooded.get_memory_mib()
    whose = addresses if " " not in addresses else f"{addresses.count(' ') + 1} addresses"
    seen = f"failures {noticed.failures} of {noticed.requests}, slowest {noticed.slowest:.2f} s"
    cells = [name, f"{whose}, {kind}", f"{seen}, admin failures {noticed.admin_failures}, {mib:.0f} MiB"]
    record_property("What a good client noticed of a flood", cells)
    assert not noticed.failures and not noticed.admin_failures and noticed.slowest < 2, cells


def test_every_stream_of_a_connection_is_answered(flooded: Gateway) -> None:
    """More streams than strangers may have: a client's library opens as many as it has requests."""
    client = H2(flooded.port)
    streams = range(1, 129, 2)
    for stream in streams:
        client.ask(stream, json.dumps({"model": "worker", "test": {"silent": 0.2}}).encode())
    client.read(lambda: len(client.ended) == len(streams), 20)
    client.close()
    assert client.status == dict.fromkeys(streams, 200)


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4].split(), bool(sys.argv[5])))
