# SPDX-License-Identifier: Apache-2.0
"""Hostile and broken requests, what each must be answered with, and what no engine may ever get."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gateway_host import (
    CLIENTS,
    CONTINUATION,
    H2,
    HEADERS,
    KEYS,
    PATHS,
    RST_STREAM,
    Answer,
    Connection,
    Gateway,
    Seen,
    write_fields,
    write_frame,
    write_request,
)

MIB = 2**20
GOOD: dict[str, Any] = {"model": "worker", "messages": [{"role": "user", "content": "hi"}]}
BODY = json.dumps(GOOD).encode()


@dataclass(frozen=True)
class Case:
    """Raw bytes for HTTP/1.1, or a function that speaks HTTP/2, and the allowed statuses.

    0 is a connection that ends without an answer.
    """

    name: str
    raw: bytes | Callable[[H2], None]
    statuses: tuple[int, ...]
    key: str | None = "all"


@dataclass(frozen=True)
class Body:
    """A well-formed request with this body; `~` in it is where a filling may be."""

    name: str
    text: str
    statuses: tuple[int, ...]
    key: str = "all"

    def fill(self, size: int = 0) -> bytes:
        """The body, with so much filling that it has `size` bytes; as it is if it has more, or no place for it."""
        before, place, after = self.text.encode("utf-8", "surrogatepass").partition(b"~")
        filling = b'"x": "' + b"x" * (size - len(before) - len(after) - 9) + b'", ' if size and place else b""
        return before + filling + after


def post(name: str, body: bytes | dict[str, Any], *statuses: int, key: str | None = "all", **more: Any) -> Case:
    """A POST with this body, which is whole and well-formed HTTP."""
    return Case(name, write_request(body, key=key, **more), statuses, key)


def head(name: str, lines: str, body: bytes = b"", *statuses: int) -> Case:
    """A POST with these header lines (CR LF is added) and these bytes after them; 400 where no status is given."""
    text = f"POST {PATHS[0]} HTTP/1.1\nHost: a\nAuthorization: Bearer {KEYS['all']}\n{lines}\n\n"
    return Case(name, text.replace("\n", "\r\n").encode("latin-1") + body, statuses or (400,))


def chunk(body: bytes, size: str = "") -> bytes:
    """A chunked body of one chunk, whose size may be a lie."""
    return (size or f"{len(body):x}").encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"


def fill(size: int, before: str = '{"model": "worker", "x": "', after: str = '"}') -> bytes:
    """A body of `size` bytes."""
    return before.encode() + b"x" * (size - len(before) - len(after)) + after.encode()


def part(name: str, text: str, *statuses: int) -> Body:
    """A body from the client that may use only `sentry` of the two names of `small`."""
    return Body(name, text, statuses, "part")


def lie(length: str, *statuses: int) -> list[Case]:
    """A length that is not that of the body, in both protocols."""
    text = json.dumps({"model": "sentry"}).encode()
    h1 = write_request(text, key="part", headers=f"Content-Length: {length}\r\n")
    fields = {"content-length": length, "authorization": f"Bearer {KEYS['part']}"}
    h2 = functools.partial(H2.ask, stream=1, body=text, end=False, **fields)
    return [
        Case(f"Content-Length: {length}", h1, statuses, "part"),
        Case(f"HTTP/2, {length}", h2, (0, *statuses), "part"),
    ]


def key(name: str, header: str = "", **more: Any) -> Case:
    """A request without the key of a client where it has to be."""
    return post(name, GOOD, 401, **{"key": None, "headers": f"{header}\r\n" if header else "", **more})


SMUGGLED = f"POST {PATHS[0]} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode()
TRAILERS = {
    "authorization": f"Bearer {KEYS['all']}",
    "x-data-parallel-rank": "9",
    "x-vllm-edge-limits": "n=1000,logprobs=1000,tokens=1000000,prompts=1000,schema=10000000",
    "x-vllm-edge-models": "auditor",
}
"""What a client must not say: as a header it is removed, and a trailer of this name reaches no application."""
TOOL = {"parameters": {"properties": {"model": {"type": "string"}}}}
CHUNKED = "Transfer-Encoding: chunked"


OTHER_PATHS = [
    "/",
    "/metrics",
    "/ready",
    "/v1/chat%2fcompletions",
    "/V1/completions",
    "/v1/x/../completions",
    "//v1/completions",
    "/roles/worker/v1",
    "/roles//v1/completions",
    "/roles/worker//v1/completions",
    "/roles/worker/../v1/completions",
    "/roles/worker%2f..%2farchitect/v1/completions",
    "/roles/worker/metrics",
    "/roles/worker/status",
    "/roles/role_worker/v1/completions",
]
NO_BODIES = {
    "array": '[{"model": "worker"}]',
    "NUL inside": '{"model": "worker", "a": "\0"}',
    "no UTF-8": '{"model": "worker", "a": "\ud800"}',
    "no model": '{"messages": []}',
    "nested model": '{"a": {"model": "worker"}}',
    "empty model": '{"model": ""}',
    "truncated model": '{"model": "worke',
    "model with a NUL": '{"model": "worker\\u0000"}',
}
CASES: dict[str, list[Case]] = {
    "paths": [
        *(post(path, GOOD, 404, path=path) for path in OTHER_PATHS),
        post("with a query", GOOD, 200, path=PATHS[0] + "?model=architect&../../x"),
        post("absolute URI of another host", GOOD, 400, path="http://169.254.169.254/v1/chat/completions"),
        post("absolute URI of another scheme", GOOD, 400, 404, path="file:///v1/chat/completions"),
    ],
    "methods": [
        *(post(method, b"", 405, method=method) for method in ("GET", "HEAD", "OPTIONS", "post")),
        post("DELETE on /v1/models", b"", 405, method="DELETE", path="/v1/models"),
        post("CONNECT", b"", 400, 404, 405, method="CONNECT", path="169.254.169.254:80"),
        post("GET of /status with a body", GOOD, 200, method="GET", path="/status"),
    ],
    "whose request ends where": [
        head("CL and TE", f"Content-Length: 4\n{CHUNKED}", chunk(BODY) + SMUGGLED, 200, 400),
        head("TE and CL", f"{CHUNKED}\nContent-Length: 900", chunk(BODY) + SMUGGLED, 200, 400),
        head("two CL that differ", f"Content-Length: {len(BODY)}\nContent-Length: 2", BODY),
        head("TE gzip, chunked", "Transfer-Encoding: gzip, chunked", chunk(BODY), 400, 422),
        head("blank before the colon", "Transfer-Encoding : chunked", chunk(BODY)),
        head("chunk longer than its size", CHUNKED, chunk(BODY, "2")),
        Case("LF only", f"POST {PATHS[0]} HTTP/1.1\nHost: a\nAuthorization: Bearer {KEYS['all']}\n\n".encode(), (400,)),
        Case("HTTP/0.9", b"GET /v1/models\r\n\r\n", (0, 400)),
        post("HTTP/1.0", GOOD, 200, version="1.0"),
    ],
    "sizes": [
        post("body of 20 MiB", fill(20 * MIB), 200),
        post("body of 20 MiB and a byte", fill(20 * MIB + 1), 413),
        head("chunked body of 2 MiB", CHUNKED, chunk(fill(2 * MIB)), 413),
        head("chunked body of 900 KiB", CHUNKED, chunk(fill(900 * 1024)), 200),
        head("header of 40 KB", "X-A: " + "a" * 40_000),
        *lie(str(2**63 + 5), 400, 413),
        *lie(str(2**64), 400, 413),
        *lie("100000000", 413),
        *lie("+5", 400, 413),
    ],
    "keys": [
        key("none"),
        key("foreign", key="vllm-" + "f" * 43),
        key("with a letter more", key=KEYS["all"] + "x"),
        key("two", f"Authorization: Bearer {KEYS['part']}", key="all"),
        key("Basic", f"Authorization: Basic {KEYS['all']}"),
        key("without a scheme", f"Authorization: {KEYS['all']}"),
        *(
            post(f"none for {path}", b"", 401, key=None, path=path)
            for path in ("/v1/models", "/status", "/ready/worker")
        ),
    ],
    "headers": [
        post("two Host headers", GOOD, 400, headers="Host: other\r\n"),
        post("X-Request-Id of the client", GOOD, 200, headers="X-Request-Id: a\tb<script>\r\n"),
        *(
            post(f"{spelling}: of the client", {"model": "sentry"}, 200, key="part", headers=f"{spelling}: {value}\r\n")
            for name, value in TRAILERS.items()
            for spelling in (name, name.title(), name.upper(), name.replace("-", "_"))
            if name != "authorization"
        ),
        *(
            post(
                f"{name} as a trailer", {"model": "sentry"}, 200, 400, 403, key="part", trailers=f"{name}: {value}\r\n"
            )
            for name, value in TRAILERS.items()
        ),
        post("Expect: 100-continue", GOOD, 200, headers="Expect: 100-continue\r\n"),
        post("Content-Encoding: gzip", GOOD, 400, headers="Content-Encoding: gzip\r\n"),
        post("Upgrade: websocket", GOOD, 200, 400, headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        post("Connection that names Authorization", GOOD, 200, 401, headers="Connection: authorization\r\n"),
    ],
}
BODIES: dict[str, list[Body]] = {
    "bodies": [
        *(Body(name, text, (400,)) for name, text in NO_BODIES.items()),
        Body("number as model", '{"model": 5}', (400, 404)),
        Body("deeply nested", '{"model": "worker", ~"x": ' + "[" * 5000 + "]" * 5000 + "}", (400,)),
        Body("model last", '{~"model": "worker"}', (200,)),
        Body("keys that start as model", '{"mode": "architect", "models": "architect", "model": "worker"}', (200,)),
        Body("model in capitals", '{"model": "Worker"}', (404,)),
        Body("model of 1 KB", json.dumps({"model": "w" * 1000}), (400,)),
    ],
    "two readings of one body": [
        part("own name", '{"model": "sentry", ~"a": 1}', 200),
        part("name of the same engine", '{"model": "auditor", ~"a": 1}', 403),
        part("name of another engine", '{"model": "worker"}', 403),
        part("model twice", '{"model": "sentry", ~"model": "auditor"}', 403),
        part("second model escaped", '{"model": "sentry", ~"mod\\u0065l": "auditor"}', 403),
        part("only model escaped", '{~"mod\\u0065l": "sentry"}', 200, 400),
        part("name escaped", '{"model": "s\\u0065ntry", ~"a": 1}', 200, 400, 404),
        part("second model is a list", '{"model": "sentry", ~"model": ["auditor"]}', 400),
        part("model in a tool's schema", json.dumps({"model": "sentry", "tools": [TOOL]}), 200),
        part("model in a text", json.dumps({"model": "sentry", "prompt": 'write "model": "auditor"'}), 200),
        Body("model twice, all names allowed", '{"model": "worker", ~"model": "architect"}', (403,)),
        Body("escaped letters in a text", '{"model": "worker", ~"prompt": "\\u0041\\" : \\u00e4"}', (200,)),
    ],
    "what binds an engine": [  # tests/unit/engine/test_edge_policy.py has each limit of the class
        Body("n 8", '{"model": "worker", ~"n": 8}', (200,)),
        Body("n 9", '{"model": "worker", ~"n": 9}', (400,)),
        Body("n after 900 KB", '{"model": "worker", "x": "' + "x" * 900_000 + '", "n": 100}', (400,)),
        Body("max_tokens 32769", '{"model": "worker", ~"max_tokens": 32769}', (400,)),
        Body("address", '{"model": "worker", ~"messages": [{"image_url": {"url": "http://a"}}]}', (400,)),
        Body("300 KB of tools", '{"model": "worker", "tools": [{"enum": ["' + "x" * 300_000 + '"]}]}', (400,)),
    ],
}


def send_trailer(name: str, value: str) -> Case:
    """A request of HTTP/2 with a trailer."""
    fields = {"authorization": f"Bearer {KEYS['part']}"}
    raw = functools.partial(H2.ask, stream=1, body=b'{"model": "sentry"}', trailers=((name, value),), **fields)
    return Case(f"{name} as a trailer", raw, (0, 200, 400, 403), "part")


def send_no_path(client: H2) -> None:
    client.send(write_frame(HEADERS, 5, 1, write_fields((":method", "GET"), (":scheme", "http"))))


def send_resets(client: H2) -> None:
    """500 requests that are taken back at once, and one that is not."""
    for stream in range(3, 1003, 2):
        client.ask(stream, BODY)
        client.send(write_frame(RST_STREAM, 0, stream, b"\0\0\0\x08"))
    client.ask(1003, BODY)
    client.read(lambda: 1003 in client.ended, 5)
    client.status[1] = client.status.get(1003, 0)
    client.ended.add(1)


def send_continuations(client: H2) -> None:
    client.send(write_frame(HEADERS, 0, 1, write_fields((":method", "GET"))))
    for _ in range(10_000):
        client.send(write_frame(CONTINUATION, 0, 1, write_fields(("x", "y" * 100))))


def ask(name: str, *statuses: int, **fields: str) -> Case:
    """A request over HTTP/2 with these fields."""
    return Case(name, functools.partial(H2.ask, stream=1, body=BODY, **fields), statuses)


CASES["HTTP/2"] = [
    ask("a plain request", 200),
    ask(":path without a slash", 0, 400, 404, _path="v1/chat/completions"),
    ask(":path with a blank and a second request", 0, 400, 404, _path="/v1/chat/completions HTTP/1.1\r\nx: y"),
    ask("header value with a line break", 0, 400, x="a\r\nTransfer-Encoding: chunked"),
    ask("Transfer-Encoding", 0, 400, **{"transfer-encoding": "chunked"}),
    ask("content-length that is a lie", 0, 400, **{"content-length": "5"}),
    ask("header of 40 KB", 0, 400, x="a" * 40_000),
    *(send_trailer(name, value) for name, value in TRAILERS.items()),
    Case("no :path", send_no_path, (0, 400)),
    Case("rapid resets", send_resets, (0, 200, 400)),
    Case("flood of CONTINUATION", send_continuations, (0,)),
]


def read_h2(client: H2) -> Answer:
    """The answer on the first stream."""
    client.read(lambda: 1 in client.ended or 1 in client.reset or client.away, 5)
    client.close()
    return Answer(client.status.get(1, 0), body=client.data.get(1, b""))


def send(gateway: Gateway, case: Case) -> Answer:
    """Send a request as it is."""
    if callable(case.raw):
        client = H2(gateway.port)
        case.raw(client)
        return read_h2(client)
    connection = Connection(gateway.port)
    connection.send(case.raw)
    answer = connection.read_head() if case.raw.startswith(b"HEAD") else connection.read()
    connection.close()
    return answer


def send_body(gateway: Gateway, path: str, body: bytes, sized: bool) -> Answer:
    """Send a well-formed request of the client `part` over HTTP/2, with its length or without."""
    client = H2(gateway.port)
    length = {"content-length": str(len(body))} if sized else {}
    client.ask(1, body, _path=path, authorization=f"Bearer {KEYS['part']}", **length)
    return read_h2(client)


# ---- what no engine may get: written without a look at the class that refuses it -----------------------------------

HARMLESS = {"host", "content-type", "content-length", "accept", "user-agent", "x-request-id"}
OWN = {"connection", "transfer-encoding", "x-vllm-edge-models", "x-vllm-edge-limits"}
"""Headers between the gateway and an engine; the class keeps them from the application."""


def find_faults(gateway: Gateway, client: str | None, engine: str, seen: Seen, port: str = "") -> Iterator[str]:
    names = [served for served in gateway.names if client in CLIENTS and CLIENTS[client] in ("", served)]
    if not names:
        yield "a request of nobody"
    if seen.method != "POST" or seen.target not in PATHS:
        yield f"{seen.method} {seen.target}"
    if foreign := set(seen.headers) - HARMLESS - OWN:
        yield f"headers {foreign}"
    if int(seen.headers.get("content-length", "0")) > 20 * MIB or len(seen.body) > 20 * MIB:
        yield "more than 20 MiB"
    if seen.given is None:
        return
    if foreign := {name.decode() for name, _ in seen.given_headers} - HARMLESS:
        yield f"headers {foreign} for the application"
    model = json.loads(seen.given)["model"]
    if model not in names or engine not in gateway.names[model].split(",") or port not in ("", engine):
        yield f"model {model!r}"


def judge(gateway: Gateway, client: str | None, port: str = "") -> list[str]:
    """What the engines got of this client since the last call and must not get; `port` is the engine whose it used."""
    faults = []
    for name, engine in gateway.engines.items():
        seen, engine.seen[:] = engine.seen[:], []
        faults += [fault for one in seen for fault in find_faults(gateway, client, name, one, port)]
    return faults
