# SPDX-License-Identifier: Apache-2.0
"""Each hostile or broken request gets one of its answers, and reaches no engine that it should not reach."""

from __future__ import annotations

import contextlib

import pytest
from gateway_world import Connection, Gateway, write_request
from hostile_requests import CASES, send

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("group", CASES)
def test_a_hostile_request_reaches_no_other_engine(gateway: Gateway, group: str) -> None:
    for case in CASES[group]:
        status, engines = send(gateway, case)
        assert status in case.statuses, case.name
        assert engines == ([case.engine] if status == 200 and case.engine else []), case.name


@pytest.mark.parametrize(("key", "body"), [(None, 0), ("all", 25 * 2**20)], ids=["without a key", "too large"])
def test_the_body_of_a_refused_request_is_not_read_as_a_request(gateway: Gateway, key: str | None, body: int) -> None:
    hidden = write_request({"model": "worker"})
    connection = Connection(gateway.port, 3)
    seen = len(gateway.engines["mid"].seen)
    length = f"Content-Length: {max(body, len(hidden))}\r\n"
    connection.send(write_request(hidden, key=key, headers=length))
    assert connection.read().status == (413 if body else 401)
    with contextlib.suppress(TimeoutError):
        assert connection.read().status == 0
    connection.close()
    assert len(gateway.engines["mid"].seen) == seen
