# SPDX-License-Identifier: Apache-2.0
"""Several engines of a served name: who gets a request, and what clients see when one or all of them go."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from gateway_host import Answer, Gateway, wait_until, write_request

pytestmark = pytest.mark.slow

ALL = "big,mid,small"


@pytest.fixture(scope="module")
def many(make_gateway_of_the_file: Callable[..., Gateway]) -> Gateway:
    """A gateway with four servers for `architect`, of which three have an engine, and three for `worker`."""
    gateway = make_gateway_of_the_file(
        serving_gateway_replicas={"architect": 4, "worker": 3}, serving_gateway_waiting=20
    )
    bring_all(gateway)
    return gateway


def bring_all(gateway: Gateway) -> None:
    """Let the three engines serve two names. A server that was not taken away is up with its next check."""
    for served in ("architect", "worker"):
        gateway.bring_back(served, ALL)
    wait_until(lambda: get_states(gateway).count(" 2") == 6)


@pytest.fixture
def pool(many: Gateway) -> Iterator[ThreadPoolExecutor]:
    """Threads for requests; afterwards all engines serve again."""
    with ThreadPoolExecutor(40) as threads:
        yield threads
    for engine in many.engines.values():
        if not engine.server:
            engine.start()
    bring_all(many)


def get_states(gateway: Gateway) -> str:
    """The operational states of the engines' servers, 2 for one that is up."""
    text = "".join(gateway.command(f"show servers state role_{served}") for served in ("architect", "worker"))
    rows = [line.split() for line in text.splitlines()]
    return "".join(f" {row[5]}" for row in rows if len(row) > 5 and row[3].startswith("engine"))


def ask(gateway: Gateway, pool: ThreadPoolExecutor, **orders: float) -> Future[Answer]:
    return pool.submit(gateway.ask, write_request({"model": "architect", "test": orders}))


def count_streams(gateway: Gateway) -> int:
    return sum(one.sent > 0 for engine in gateway.engines.values() for one in engine.seen)


def count_engines(answers: list[Future[Answer]]) -> Counter[str]:
    """How many answers came from each engine. All are good, and say so."""
    found = [answer.result(30) for answer in answers]
    assert {answer.status for answer in found} == {200}
    return Counter(answer.headers["x-served-by"] for answer in found)


@pytest.mark.parametrize("order", [["architect"], ["architect", "architect", "worker"]])
def test_the_engine_with_least_requests_gets_the_next(
    many: Gateway, pool: ThreadPoolExecutor, order: list[str]
) -> None:
    before, streams = count_streams(many), []
    for number in range(6):
        body = {"model": order[number % len(order)], "test": {"chunks": 30, "interval": 0.1}}
        streams.append(pool.submit(many.ask, write_request(body)))
        wait_until(lambda number=number: count_streams(many) > before + number)
    status = many.ask(write_request(path="/status")).json["roles"]["architect"]
    assert status["waiting"] == 0 and many.ask(write_request(path="/ready/architect")).status == 200
    assert count_engines(streams) == dict.fromkeys(("big", "mid", "small"), 2)
    names = Counter(many.get_log(one.result().headers["x-request-id"])["engine"] for one in streams)
    assert names == dict.fromkeys(("big", "mid", "small"), 2)


@pytest.mark.parametrize("gone", ["mid", "big"])
def test_an_engine_that_dies_leaves_requests_to_the_others(many: Gateway, pool: ThreadPoolExecutor, gone: str) -> None:
    many.engines[gone].stop()
    many.engines[gone].path.unlink(missing_ok=True)
    found = count_engines([ask(many, pool, silent=0.1) for _ in range(12)])
    assert sum(found.values()) == 12 and gone not in found
    assert many.ask(write_request(path="/ready/architect")).status == 200


def test_a_switch_that_keeps_one_engine_takes_nobody_away(many: Gateway, pool: ThreadPoolExecutor) -> None:
    streams = [ask(many, pool, chunks=20, interval=0.1) for _ in range(6)]
    wait_until(lambda: all(e.seen and e.seen[-1].sent for e in many.engines.values()))
    many.bring_back("architect", "small")
    assert count_engines([ask(many, pool) for _ in range(6)]) == {"small": 6}
    assert many.ask(write_request(path="/ready/architect")).status == 200
    assert all(b"[DONE]" in one.result(30).body for one in streams)


@pytest.mark.parametrize("way", ["told", "not told", "a reload"])
def test_requests_wait_while_no_engine_is_there(many: Gateway, pool: ThreadPoolExecutor, way: str) -> None:
    many.send_away("architect", live=way != "not told")
    waiting = [ask(many, pool, silent=0.3) for _ in range(12)]
    time.sleep(1.6)
    assert not any(one.done() for one in waiting)
    assert many.ask(write_request(path="/status")).json["roles"]["architect"]["waiting"] == 12
    assert many.ask(write_request(path="/ready/architect")).status == 503
    if way == "a reload":
        many.reload()
    many.bring_back("architect", ALL)
    found = [one.result(30) for one in waiting]
    assert {one.status for one in found} == {200}
    if way == "told":
        assert all(one.headers["x-served-by"] == one.json["engine"] for one in found)
        assert len({one.json["engine"] for one in found}) == 3, "the engines share what waited"
