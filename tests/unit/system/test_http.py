# SPDX-License-Identifier: Apache-2.0
"""Requests to engines that misbehave, over real sockets: each ends at its deadline, and with bounded memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from ansible.module_utils.vllm_edge.system.http import HEAD_BYTES, request

Script = Callable[[socket.socket, threading.Event], None]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def drip(begin: bytes, piece: bytes) -> Script:
    """An answer that never ends: a beginning, then a piece every 50 ms."""

    def script(client: socket.socket, closing: threading.Event) -> None:
        client.sendall(begin)
        while not closing.wait(0.05):
            client.sendall(piece)

    return script


def flood(begin: bytes, piece: bytes) -> Script:
    """An answer of which as much comes as is taken."""

    def script(client: socket.socket, closing: threading.Event) -> None:
        client.sendall(begin)
        while not closing.is_set():
            client.sendall(piece)

    return script


def answer(text: bytes) -> Script:
    return lambda client, _closing: client.sendall(text)


@contextlib.contextmanager
def engine(script: Script) -> Iterator[str]:
    """The address of an engine that answers one request as the script says."""
    closing = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(5)

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                client.recv(65536)
                script(client, closing)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            closing.set()
            thread.join(5)


@pytest.mark.parametrize(
    "script",
    [
        drip(b"", b"H"),
        drip(b"HTTP/1.1 200 OK\r\n", b"a"),
        drip(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n"),
        drip(b"HTTP/1.1 200 OK\r\nContent-Length: 4000\r\n\r\n", b"x"),
        drip(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        drip(HEAD, b"1\r\nx\r\n"),
        drip(HEAD, b"0"),
        drip(HEAD + b"0\r\n", b"trailer: x\r\n"),
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        lambda client, closing: closing.wait(5) and None,
    ],
    ids=["status", "header", "headers", "body", "to-the-end", "chunks", "size", "trailers", "continue", "silence"],
)
def test_an_answer_that_does_not_end_ends_at_the_deadline(script: Script) -> None:
    with engine(script) as url:
        began = time.monotonic()
        said = request(url, "/metrics", 0.3)
        assert time.monotonic() - began < 1.0
    assert (said.status, said.error) == (None, "no answer within 0.3 s")


@pytest.mark.parametrize(
    "script",
    [
        flood(HEAD + b"-1\r\n", b"x" * 65536),
        flood(HEAD, b"1;" + b"x" * 60000 + b"\r\nx\r\n"),
        flood(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    ],
    ids=["negative-chunk", "extensions", "continue"],
)
def test_no_more_is_read_than_was_asked_for(script: Script) -> None:
    with engine(script) as url:
        said = request(url, "/metrics", 20, limit=1000)
    assert said.status is None
    assert "longer than is read of it" in said.error


@pytest.mark.parametrize("head", [HEAD + b"186a0\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"])
def test_the_body_is_cut_at_the_limit(head: bytes) -> None:
    with engine(answer(head + b"x" * 100_000)) as url:
        said = request(url, "/metrics", 5, limit=1000)
    assert (said.status, len(said.body)) == (200, 1000)
    assert HEAD_BYTES >= 65536, "less than one header, which http.client takes"


def test_an_answer_within_the_deadline_is_whole() -> None:
    with engine(answer(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}')) as url:
        assert request(url, "/v1/models", 5).json() == {"a": 1}


@pytest.mark.parametrize("text", [b"\x1b[2Jx\r\n\r\n", b"HTTP/1.1 \xff\x00 y\r\n\r\n", b"HTTP/1.1 99999 x\r\n\r\n"])
def test_what_is_no_http_is_a_printable_sentence(text: bytes) -> None:
    with engine(answer(text)) as url:
        said = request(url, "/metrics", 5)
    assert said.status is None
    assert said.error.isprintable()
