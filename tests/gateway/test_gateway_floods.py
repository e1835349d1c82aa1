# SPDX-License-Identifier: Apache-2.0
"""What other clients and the administrator notice while somebody floods the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from gateway_host import (
    H2,
    H2_PREFACE,
    HEADERS,
    SETTINGS,
    Gateway,
    write_fields,
    write_frame,
    write_request,
)

pytestmark = pytest.mark.slow

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
FLOODS = {
    "answers that nobody reads": Flood(40, write_streams(NO_WINDOW, *[b""] * 100)),
    "slow headers": Flood(505, b"GET /status HTTP/1.1\r\nX-A: ", b"a", 3),
}


async def keep_connected(flood: Flood, address: str, port: int) -> None:
    """One connection after the other, until the task is cancelled."""

    async def drain(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass

    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
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


async def attack(name: str, port: int, seconds: float, addresses: int) -> None:
    """Flood the gateway from so many addresses for some seconds; runs in a process of its own."""
    flood = FLOODS[name]
    places = [f"127.0.0.{2 + last}" for last in range(addresses)]
    tasks = [keep_connected(flood, address, port) for address in places for _ in range(flood.connections)]
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
def flooded(make_gateway: Callable[..., Gateway]) -> Gateway:
    """A gateway for which the addresses of loopback are as many hosts of a network."""
    return make_gateway(edit=("src 127.0.0.0/8", "src 127.9.0.0/16"))


@contextlib.contextmanager
def run_flood(name: str, port: int, addresses: int) -> Iterator[None]:
    flood = subprocess.Popen([sys.executable, __file__, name, str(port), str(SECONDS + 5), str(addresses)])
    time.sleep(1.5)
    try:
        yield
    finally:
        flood.kill()
        flood.wait()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "addresses"), [("answers that nobody reads", 3), ("slow headers", 2)])
def test_a_flood_delays_nobody(
    flooded: Gateway, record_property: Callable[[str, object], None], name: str, addresses: int
) -> None:
    with run_flood(name, flooded.port, addresses):
        noticed, end = Noticed(), time.monotonic() + SECONDS
        while time.monotonic() < end:
            ask_once(flooded, noticed)
        mib = flooded.get_memory_mib()
    seen = f"failures {noticed.failures} of {noticed.requests}, slowest {noticed.slowest:.2f} s"
    cells = [name, f"{addresses} addresses", f"{seen}, admin failures {noticed.admin_failures}, {mib:.0f} MiB"]
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
    asyncio.run(attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
