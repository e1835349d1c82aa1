# SPDX-License-Identifier: Apache-2.0
"""What the gateway costs: streams and requests through it and straight at an engine, in turn."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from gateway_world import KEYS, PATHS, Gateway, write_certificate, write_request

STREAMS, INTERVAL, SECONDS, TURNS = 200, 0.05, 6.0, 10
WORKERS, PAIRS = 32, 5
REQUEST = write_request({"model": "worker", "messages": [{"role": "user", "content": "x" * 2000}]})


async def connect(where: int | str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(where, int):
        return await asyncio.open_connection("127.0.0.1", where)
    return await asyncio.open_unix_connection(where)


async def read_stream(where: int | str, start: float, late: list[float]) -> None:
    """One stream; notes how late each chunk came, in seconds."""
    await asyncio.sleep(start)
    reader, writer = await connect(where)
    chunks = int(SECONDS / INTERVAL)
    writer.write(write_request({"model": "worker", "test": {"chunks": chunks, "interval": INTERVAL}}))
    while line := await reader.readline():
        if line.startswith(b"data: ") and b"DONE" not in line:
            late.append(time.time() - float(line[6:]))
        elif b"DONE" in line:
            break
    writer.close()


async def send_requests(where: int | str, rate: float) -> list[float]:
    """Requests a second and the median wait: as many as are answered, or `rate` whether they are answered or not."""
    loop = asyncio.get_running_loop()
    start, waits = loop.time(), list[float]()

    async def work(number: int) -> None:
        reader, writer = await connect(where)
        while (now := loop.time()) < start + SECONDS:
            due = start + number / rate if rate else now
            await asyncio.sleep(due - now)
            writer.write(REQUEST)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            waits.append(loop.time() - due)
            number += WORKERS
        writer.close()

    await asyncio.gather(*(work(number) for number in range(WORKERS)))
    return [len(waits) / (loop.time() - start), statistics.median(waits)]


def measure(where: int | str) -> None:
    """Read all streams and print how late their chunks came; runs in a process of its own."""

    async def read_all() -> list[float]:
        late: list[float] = []
        await asyncio.gather(*(read_stream(where, number / STREAMS, late) for number in range(STREAMS)))
        return late

    start = time.monotonic()
    late = sorted(asyncio.run(read_all()))
    print(json.dumps([len(late) / (time.monotonic() - start), late[len(late) // 2], late[len(late) * 99 // 100]]))


@pytest.mark.thorough
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="tests beside it would be measured, too")
def test_the_gateway_costs_little(make_gateway: Callable[..., Gateway], capsys: pytest.CaptureFixture[str]) -> None:
    gateway = make_gateway()
    places = {"direct": str(gateway.engines["mid"].path), "gateway": str(gateway.port)}
    results: dict[str, list[list[float]]] = {place: [] for place in places}
    for turn in range(2 * TURNS):
        place = list(places)[(turn + turn // 2) % 2]  # direct, gateway, gateway, direct: what drifts meets both
        done = subprocess.run([sys.executable, __file__, places[place]], capture_output=True, text=True, check=True)
        results[place].append(json.loads(done.stdout))
    pairs = list(zip(results["gateway"], results["direct"], strict=True))
    rate = [there[0] / here[0] for there, here in pairs]
    p50, p99 = ([1000 * (there[which] - here[which]) for there, here in pairs] for which in (1, 2))
    with capsys.disabled():
        print(f"\n{STREAMS} streams of {1 / INTERVAL:.0f} chunks a second; {TURNS} turns of {SECONDS:.0f} s each way")
        added = {f"added latency of a chunk in ms, {name}": found for name, found in (("p50", p50), ("p99", p99))}
        for name, values in ({"throughput, gateway / direct": rate} | added).items():
            print(f"{name}: median {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    assert statistics.median(rate) >= 0.97
    assert statistics.median(p50) < 3


@pytest.mark.thorough
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="tests beside it would be measured, too")
def test_requests_through_the_gateway_and_the_class(
    make_gateway: Callable[..., Gateway], capsys: pytest.CaptureFixture[str]
) -> None:
    """Straight at the engine there is neither the gateway nor the class that judges requests."""
    gateway = make_gateway()
    engine = gateway.engines["mid"]
    places = {"direct": str(engine.path), "gateway": str(gateway.port)}

    def send(place: str, rate: float) -> list[float]:
        engine.judges = place == "gateway"
        words = [sys.executable, __file__, places[place], str(rate)]
        return list(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))

    half = send("gateway", 0)[0] / 2
    for name, rate in ((f"closed loop of {WORKERS}", 0.0), (f"open loop, {half:.0f} a second", half)):
        results: dict[str, list[list[float]]] = {place: [] for place in places}
        for turn in range(2 * PAIRS):
            place = list(places)[(turn + turn // 2) % 2]
            results[place].append(send(place, rate))
        rates, waits = (
            {place: statistics.median(one[which] for one in found) for place, found in results.items()}
            for which in (0, 1)
        )
        with capsys.disabled():
            print(f"\n{name}; {PAIRS} pairs of {SECONDS:.0f} s, medians", end="")
            for place in places:
                print(f"; {place}: {rates[place]:.0f} requests a second, p50 {1000 * waits[place]:.2f} ms", end="")
        if rate:
            assert rates["gateway"] > 0.97 * rates["direct"]
            assert waits["gateway"] - waits["direct"] < 0.003


@pytest.mark.thorough
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="tests beside it would be measured, too")
@pytest.mark.skipif(not shutil.which("h2load"), reason="h2load is not installed: apt-get install nghttp2-client")
def test_requests_by_tls_and_http_2(make_gateway: Callable[..., Gateway], capsys: pytest.CaptureFixture[str]) -> None:
    gateway = make_gateway(tls=True, prepare=lambda etc: write_certificate(etc / "tls/server.pem"))
    body = gateway.root / "body"
    body.write_bytes(REQUEST.partition(b"\r\n\r\n")[2])
    words = ["h2load", "-n", "10000", "-c", "8", "-m", "8", "-d", str(body)]
    words += ["-H", f"authorization: Bearer {KEYS['all']}", f"https://127.0.0.1:{gateway.tls_port}{PATHS[0]}"]
    for path in (PATHS[0], "/status"):  # with an engine in Python, and what the gateway answers by itself
        call = [*words[:-1], words[-1].replace(PATHS[0], path)]
        text = subprocess.run(
            call if path == PATHS[0] else call[:7] + call[9:], capture_output=True, text=True, check=True
        ).stdout
        with capsys.disabled():
            print(
                f"\n{path} by h2load: {re.findall('finished in .*', text)[0]}; {gateway.get_memory_mib():.0f} MiB",
                end="",
            )
        assert "10000 succeeded, 0 failed" in text, text


if __name__ == "__main__":
    place = int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1]
    if sys.argv[2:]:
        print(json.dumps(asyncio.run(send_requests(place, float(sys.argv[2])))))
    else:
        measure(place)
