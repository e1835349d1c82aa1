# SPDX-License-Identifier: Apache-2.0
"""Requests to engines that misbehave, over real sockets: each ends at its deadline, and with bounded memory."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.system.http import HEAD_BYTES, request

Script = Callable[[socket.socket, threading.Event], None]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def drip(begin: bytes, piece: bytes, pause_s: float = 0.05) -> Script:
    """An answer that never ends: a beginning, then pieces."""

    def script(client: socket.socket, closing: threading.Event) -> None:
        client.sendall(begin)
        while not closing.wait(pause_s):
            client.sendall(piece)

    return script


def answer(text: bytes) -> Script:
    return lambda client, _closing: client.sendall(text)


@pytest.fixture
def place() -> Iterator[Path]:
    """Where an engine makes its socket; short, because the path of a socket is."""
    with tempfile.TemporaryDirectory(prefix="s") as directory:
        yield Path(directory) / "api.sock"


@contextlib.contextmanager
def engine(script: Script, place: Path | None = None) -> Iterator[str]:
    """The address of an engine that answers one request as the script says, on a port or on the socket `place`."""
    closing = threading.Event()
    family, where = (socket.AF_INET, ("127.0.0.1", 0)) if place is None else (socket.AF_UNIX, str(place))
    with socket.socket(family) as server:
        server.bind(where)
        server.listen(1)
        server.settimeout(5)

        def serve() -> None:
            with contextlib.suppress(OSError), server.accept()[0] as client:
                client.recv(65536)
                script(client, closing)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"unix:{place}" if place else f"http://127.0.0.1:{server.getsockname()[1]}"
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
@pytest.mark.parametrize("unix", [False, True])
def test_an_answer_that_does_not_end_ends_at_the_deadline(script: Script, place: Path, unix: bool) -> None:
    with engine(script, place if unix else None) as url:
        began = time.monotonic()
        said = request(url, "/metrics", 0.3)
        assert time.monotonic() - began < 1.0
    assert (said.status, said.error) == (None, "no answer within 0.3 s")


@pytest.mark.parametrize(
    "script",
    [
        drip(HEAD + b"-1\r\n", b"x" * 65536, 0),
        drip(HEAD, b"1;" + b"x" * 60000 + b"\r\nx\r\n", 0),
        drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000, 0),
    ],
    ids=["negative-chunk", "extensions", "continue"],
)
def test_no_more_is_read_than_was_asked_for(script: Script, place: Path) -> None:
    with engine(script, place) as url:
        said = request(url, "/metrics", 20, limit=1000)
    assert said.status is None
    assert "longer than is read of it" in said.error


@pytest.mark.parametrize("head", [HEAD + b"186a0\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n"])
def test_the_body_is_cut_at_the_limit(head: bytes) -> None:
    with engine(answer(head + b"x" * 100_000)) as url:
        said = request(url, "/metrics", 5, limit=1000)
    assert (said.status, len(said.body)) == (200, 1000)
    assert HEAD_BYTES >= 65536, "less than one header, which http.client takes"


@pytest.mark.parametrize("unix", [False, True])
def test_an_answer_within_the_deadline_is_whole(place: Path, unix: bool) -> None:
    whole = answer(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}')
    with engine(whole, place if unix else None) as url:
        assert request(url, "/v1/models", 5).json() == {"a": 1}


@pytest.mark.parametrize(
    ("put", "told"),
    [
        (lambda place: None, "api.sock does not exist: the engine makes this socket"),
        (lambda place: place.symlink_to("other.sock"), "it is a link and no socket"),
        (Path.mkdir, "it is a directory and no socket"),
        (os.mkfifo, "it is a file and no socket"),
        (lambda place: os.mknod(place, 0o140666), "connection refused: nothing listens there"),
    ],
    ids=["nothing", "link to nothing", "directory", "pipe", "socket of nobody"],
)
def test_what_stands_in_for_a_socket_is_not_followed(place: Path, put: Callable[[Path], object], told: str) -> None:
    put(place)
    said = request(f"unix:{place}", "/health", 1)
    assert said.status is None and told in said.error and said.error.isprintable()


def test_a_link_in_place_of_the_socket_does_not_lead_to_another_one(place: Path) -> None:
    with engine(answer(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"), place.with_name("other.sock")) as url:
        place.symlink_to("other.sock")
        assert "it is a link and no socket" in request(f"unix:{place}", "/health", 1).error
        assert request(url, "/health", 1).ok


def test_a_listener_that_takes_nobody_ends_at_the_deadline(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as waiting:
        server.bind(str(place))
        server.listen(0)
        for _ in range(2):  # its queue is full then
            client = waiting.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(place))
        said: list[str] = []
        began = time.monotonic()
        asking = threading.Thread(
            target=lambda: said.append(request(f"unix:{place}", "/health", 0.3).error), daemon=True
        )
        asking.start()
        asking.join(3)
    assert said == ["no answer within 0.3 s"] and time.monotonic() - began > 0.2


@pytest.mark.parametrize("text", [b"\x1b[2Jx\r\n\r\n", b"HTTP/1.1 \xff\x00 y\r\n\r\n", b"HTTP/1.1 99999 x\r\n\r\n"])
def test_what_is_no_http_is_a_printable_sentence(text: bytes) -> None:
    with engine(answer(text)) as url:
        said = request(url, "/metrics", 5)
    assert said.status is None
    assert said.error.isprintable()
