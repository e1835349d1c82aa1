# SPDX-License-Identifier: Apache-2.0
"""Each hostile or broken request gets one of its answers, and no engine gets what it must not get."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import pytest
from gateway_host import PATHS, Answer, Connection, Gateway, write_request
from hostile_requests import BODIES, CASES, Body, judge, send, send_body

pytestmark = pytest.mark.slow


def is_error(answer: Answer) -> bool:
    """Whether an answer is good, a connection that ended, or an error in OpenAI's format.

    What is no HTTP gets the own answer of HAProxy's parser, which nothing replaces.
    """
    if answer.status < 400 or (answer.status == 405 and not answer.body):  # an answer to HEAD has no body
        return True
    if answer.status in (400, 422) and "x-request-id" not in answer.headers and b"<html>" in answer.body:
        return True
    with contextlib.suppress(ValueError, TypeError):
        error = answer.json["error"]
        return answer.status != 500 and all(error[name] for name in ("message", "type", "code", "request_id"))
    return False


@pytest.mark.parametrize("group", CASES)
def test_a_hostile_request_has_no_effect(gateway: Gateway, group: str) -> None:
    judge(gateway, "all")
    wrong = []
    for case in CASES[group]:
        answer = send(gateway, case)
        faults = judge(gateway, case.key)
        allowed = {*case.statuses, *([0] if 400 in case.statuses else [])}  # the parser may also end the connection
        if faults or answer.status not in allowed or not is_error(answer):
            wrong.append((case.name, answer.status, answer.body[:60], faults))
    assert not wrong, "\n".join(map(str, wrong))


def find_wrong(gateway: Gateway, body: Body, key: str, answer: Answer, statuses: tuple[int, ...]) -> list[Any]:
    """What is wrong with the answer to a body, or with what reached an engine."""
    faults = judge(gateway, key)
    if faults or answer.status not in statuses or not is_error(answer):
        return [(body.name, answer.status, answer.body[:200], faults)]
    return []


@pytest.mark.parametrize("group", BODIES)
def test_a_hostile_body_is_refused(gateway: Gateway, group: str) -> None:
    judge(gateway, "all")
    wrong = []
    for body in BODIES[group]:
        answer = gateway.ask(write_request(body.fill(), key=body.key))
        wrong += find_wrong(gateway, body, body.key, answer, body.statuses)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("role", ["", "sentry"], ids=["by model", "by role"])
def test_nobody_gets_more_beyond_the_first_mib_of_http_2(gateway: Gateway, role: str, sized: bool) -> None:
    judge(gateway, "all")
    wrong = []
    for body in BODIES["two readings of one body"]:
        if "~" in body.text:
            path = f"/roles/{role}{PATHS[0]}" if role else PATHS[0]
            answer = send_body(gateway, path, body.fill(1_200_000), sized)
            good = body.key == "part" and body.statuses == (200,) and role and sized
            wrong += find_wrong(gateway, body, "part", answer, (200,) if good else (200, 400, 401, 403, 404, 413))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("key", ["all", "solo"])
def test_a_port_of_an_engine_leads_to_no_other_engine(gateway: Gateway, key: str) -> None:
    judge(gateway, key)
    for path in (PATHS[0], "/roles/worker" + PATHS[0], "/roles/architect" + PATHS[0]):
        for served in ("architect", "worker"):
            gateway.ask(write_request({"model": served}, path, key), gateway.ports["big"])
            assert not judge(gateway, key, port="big"), (path, served)


FOREIGN = {
    "Set-Cookie": "a=b",
    "Alt-Svc": 'h3=":443"',
    "Strict-Transport-Security": "max-age=9",
    "Access-Control-Allow-Origin": "*",
    "X-Stand-In": "architect",
    "X-Served-By": "other",
    "Location": "http://a",
    "X-Own": "1",
}


def test_an_engine_sets_no_headers_of_its_own(gateway: Gateway) -> None:
    lines = "".join(f"{name}: {value}\r\n" for name, value in FOREIGN.items())
    answer = gateway.ask(write_request({"model": "worker", "test": {"head": lines}}))
    assert (answer.status, answer.headers.pop("x-served-by")) == (200, "mid")
    assert not answer.headers.keys() & {name.lower() for name in FOREIGN}


def test_only_an_engine_gets_a_request_that_waits(make_gateway: Callable[..., Gateway]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # A port that a test may take stands for the one that the configuration names.
        edit = ("hold 127.0.0.1:1 ", f"hold 127.0.0.1:{listener.getsockname()[1]} ")
        gateway = make_gateway(serving_gateway_wait_s=1, edit=edit)
        gateway.send_away("architect")
        listener.settimeout(20)
        client = Connection(gateway.port)
        client.send(write_request({"model": "architect", "secret": "of somebody"}))
        taken, _ = listener.accept()
        taken.settimeout(3)
        with contextlib.suppress(OSError):
            taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        got = b""
        with contextlib.suppress(OSError):
            while part := taken.recv(65536):
                got += part
        taken.close()
        assert b"secret" not in got and b"POST" not in got
        listener.close()
        assert client.read().status == 503


@pytest.mark.parametrize(("key", "body"), [(None, 0), ("all", 25 * 2**20)], ids=["without a key", "too large"])
def test_the_body_of_a_refused_request_is_not_read_as_a_request(gateway: Gateway, key: str | None, body: int) -> None:
    hidden = write_request({"model": "worker"})
    connection = Connection(gateway.port, 1)
    seen = len(gateway.engines["mid"].seen)
    length = f"Content-Length: {max(body, len(hidden))}\r\n"
    connection.send(write_request(hidden, key=key, headers=length))
    assert connection.read().status == (413 if body else 401)
    with contextlib.suppress(TimeoutError):
        assert connection.read().status == 0
    connection.close()
    assert len(gateway.engines["mid"].seen) == seen
