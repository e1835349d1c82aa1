# SPDX-License-Identifier: Apache-2.0
"""Questions to an engine's HTTP server, with the standard library's client, one or several at once."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Answer:
    """An HTTP answer, or why there was none."""

    status: int | None
    body: bytes = b""
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 200

    def words(self) -> str:
        return f"HTTP {self.status}" if self.status is not None else self.error

    def json(self) -> Any:
        return json.loads(self.body)


def explain_oserror(error: Exception, timeout_s: float) -> str:
    """Why a request failed, in words of the operator's world."""
    if isinstance(error, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: nothing listens on the port"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError):
        return "connection closed without an answer: the port is published, but nothing listens behind it yet"
    return f"{type(error).__name__}: {error}"


def request(
    url: str, path: str, timeout_s: float, *, method: str = "GET", payload: object = None, limit: int = 4_000_000
) -> Answer:
    """GET or POST; never raises, since no answer is an answer here."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    headers = {"Connection": "close", "User-Agent": "vllm-edge"}
    body: bytes | None = None
    if payload is not None:
        body = json.dumps(payload).encode()
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(limit))
    except (OSError, http.client.HTTPException) as error:
        return Answer(None, error=explain_oserror(error, timeout_s))
    finally:
        connection.close()


def get_health(url: str, timeout_s: float) -> Answer:
    """vLLM's /health: 200 while the engine's processes live."""
    return request(url, "/health", timeout_s, limit=65_536)


def takes_work(url: str, name: str, timeout_s: float, ask: Callable[..., Answer] = request) -> bool:
    """Whether a request for the model would be taken. From SIGTERM to its end vLLM lists its models and is healthy, and
    answers every request with an error; to count tokens costs it nothing, and tells."""
    question = {"model": name, "messages": [{"role": "user", "content": "."}]}
    answer = ask(url, "/tokenize", timeout_s, method="POST", payload=question)
    # An engine whose chat template does not like the question, or that has no such path, works all the same.
    return answer.status is not None and answer.status < 500


def side_by_side(function: Callable[[Item], Value], items: Iterable[Item]) -> list[Value]:
    """`function` of every item, each in a thread of its own; what one of them raises is raised here.

    Daemon threads, joined in short steps: a signal that ends the program must not wait for an engine's answer.
    """
    given = list(items)
    values: dict[int, Value] = {}
    problems: dict[int, BaseException] = {}

    def run(at: int, item: Item) -> None:
        try:
            values[at] = function(item)
        except BaseException as error:
            problems[at] = error

    threads = [threading.Thread(target=run, args=(at, item), daemon=True) for at, item in enumerate(given)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.2)
    for at in sorted(problems):
        raise problems[at]
    return [values[at] for at in range(len(given))]
