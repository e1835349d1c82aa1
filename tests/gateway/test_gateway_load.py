# SPDX-License-Identifier: Apache-2.0
"""What the gateway costs: streams through it and straight at an engine, in turn."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from gateway_world import Gateway, write_request

STREAMS, INTERVAL, SECONDS, TURNS = 200, 0.05, 6.0, 10


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


if __name__ == "__main__":
    measure(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
