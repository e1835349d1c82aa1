# SPDX-License-Identifier: Apache-2.0
"""HTTP requests to an engine with the standard library's client, one at a time or several in parallel."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..text import printable
from . import sockets
from .records import parse_json


@dataclass(frozen=True)
class Answer:
    """An HTTP response, or the reason why there was none."""

    status: int | None
    """HTTP status; None if there was no response."""
    body: bytes = b""
    error: str = ""
    """Why there was no response; empty if there was one."""

    @property
    def ok(self) -> bool:
        return self.status == 200

    def words(self) -> str:
        return f"HTTP {self.status}" if self.status is not None else self.error

    def json(self) -> Any:
        return parse_json(self.body)


MOST_TEXT = 300
"""Characters of an error that are quoted; http.client's have what the engine sent."""
HEAD_BYTES = 1_000_000
"""Bytes that an answer may have beside its body: status lines, headers, sizes of chunks."""


class _BoundedSocket(socket.socket):
    """A connected socket that reads until a deadline, and not more than so many bytes.

    A timeout of a socket counts for each part of an answer, so an engine that sends a byte now and then would hold the
    caller forever.
    """

    deadline: float
    bytes_left: int

    def recv_into(self, *arguments: Any) -> int:
        """Read a part of the answer. Raises TimeoutError after the deadline, OSError after too many bytes."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)
        count = super().recv_into(*arguments)
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise OSError("the answer is longer than is read of it")
        return count


class _Connection(http.client.HTTPConnection):
    """A connection of which connecting, sending and the whole answer together end at a deadline."""

    limit = 0
    path: Path | None = None
    """Unix socket to connect to, in place of host and port."""

    def connect(self) -> None:
        """Connect. Raises OSError."""
        timeout_s = float(self.timeout or 0)
        deadline = time.monotonic() + timeout_s
        if self.path is not None:
            plain = sockets.connect(self.path, timeout_s)
        else:
            plain = socket.create_connection((self.host, self.port), timeout_s)
        self.sock = _BoundedSocket(fileno=plain.detach())
        self.sock.deadline, self.sock.bytes_left = deadline, self.limit + HEAD_BYTES
        self.sock.settimeout(max(0.001, deadline - time.monotonic()))


def explain_oserror(error: Exception, timeout_s: float) -> str:
    """Return why a request failed, in an operator's terms."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens there"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        return "connection closed without an answer"
    if isinstance(error, FileNotFoundError):
        return printable(f"{error.filename} does not exist: the engine makes this socket when it starts", "")
    if isinstance(error, PermissionError) and error.filename:
        return printable(f"{error.filename} is for root and the gateway", "")
    return printable(f"{type(error).__name__}: {error}"[:MOST_TEXT], "")


def request(
    url: str, path: str, timeout_s: float, *, method: str = "GET", payload: object = None, limit: int = 4_000_000
) -> Answer:
    """Send one GET or POST request. It does not raise for a failed request: `Answer.error` then says why.

    Args:
        url: `http://host:port`, or `unix:/path` of a socket; a link in place of the socket is not followed
        path: path below it, with a leading slash
        timeout_s: seconds that the connection, the request and the whole response may take together
        payload: value sent as JSON; None sends no body
        limit: bytes of the body to read at most; the rest of a longer one is left out
    """
    parts = urlsplit(url)
    connection = _Connection(parts.hostname or "localhost", parts.port or 80, timeout=timeout_s)
    connection.limit = limit
    if parts.scheme == "unix":
        connection.path = Path(parts.path)
    headers = {"Connection": "close", "User-Agent": "vllm-edge"}
    body: bytes | None = None
    if payload is not None:
        body = json.dumps(payload).encode()
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(limit))
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Answer(None, error=explain_oserror(error, timeout_s))
    finally:
        connection.close()


def get_health(url: str, timeout_s: float) -> Answer:
    """Request vLLM's /health, which is 200 as long as the engine's processes are alive."""
    return request(url, "/health", timeout_s, limit=65_536)


def takes_work(url: str, name: str, timeout_s: float, ask: Callable[..., Answer] = request) -> bool:
    """Return whether the engine would accept a request for the model.

    Between SIGTERM and its end vLLM still lists its models and reports itself healthy, but answers every request with
    an error. So the engine is asked to count tokens, which costs it nothing and shows the difference.
    """
    question = {"model": name, "messages": [{"role": "user", "content": "."}]}
    answer = ask(url, "/tokenize", timeout_s, method="POST", payload=question)
    # An engine whose chat template rejects the question (4xx), or that has no such path, works nevertheless.
    return answer.status is not None and answer.status < 500
