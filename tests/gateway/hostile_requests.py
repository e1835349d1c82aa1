# SPDX-License-Identifier: Apache-2.0
"""Hostile and broken requests, what each must be answered with, and which engine it may reach."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gateway_world import (
    CONTINUATION,
    DATA,
    H2,
    HEADERS,
    KEYS,
    PATHS,
    RST_STREAM,
    Connection,
    Gateway,
    write_fields,
    write_frame,
    write_request,
)

MIB = 2**20
GOOD: dict[str, Any] = {"model": "worker", "messages": [{"role": "user", "content": "hi"}]}
BODY = json.dumps(GOOD).encode()


@dataclass(frozen=True)
class Case:
    """A request: raw bytes for HTTP/1.1, or a function that speaks HTTP/2.

    `statuses` are the allowed ones (0: the connection ends without an answer); `engine` is the only one that the
    request may reach, and must reach where the answer is 200.
    """

    name: str
    raw: bytes | Callable[[H2], None]
    statuses: tuple[int, ...]
    engine: str = ""


def post(name: str, body: bytes | str | dict[str, Any], *statuses: int, engine: str = "mid", **more: Any) -> Case:
    """A POST with this body, which is whole and well-formed HTTP."""
    return Case(name, write_request(body.encode() if isinstance(body, str) else body, **more), statuses, engine)


def head(name: str, lines: str, body: bytes = b"", *statuses: int) -> Case:
    """A POST with these header lines (CR LF is added) and these bytes after them; 400 where no status is given."""
    text = f"POST {PATHS[0]} HTTP/1.1\nHost: a\nAuthorization: Bearer {KEYS['all']}\n{lines}\n\n"
    return Case(name, text.replace("\n", "\r\n").encode("latin-1") + body, statuses or (400,), "mid")


def chunk(body: bytes, size: str = "") -> bytes:
    """A chunked body of one chunk, whose size may be a lie."""
    return (size or f"{len(body):x}").encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"


def fill(size: int, before: str = '{"model": "worker", "x": "', after: str = '"}') -> bytes:
    """A body of `size` bytes."""
    return before.encode() + b"x" * (size - len(before) - len(after)) + after.encode()


def limit(name: str, members: str, *statuses: int) -> Case:
    """A body with further members."""
    return post(name, '{"model": "worker", ' + members + "}", *statuses)


def part(name: str, body: bytes | str, *statuses: int) -> Case:
    """A body from the client that may use only `sentry` of the two names of `small`."""
    return post(name, body, *statuses, key="part", engine="small")


def key(name: str, header: str = "", **more: Any) -> Case:
    """A request without the key of a client where it has to be."""
    return post(name, GOOD, 401, **{"key": None, "headers": f"{header}\r\n" if header else "", **more})


SMUGGLED = f"POST {PATHS[0]} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode()
TOOL = {"parameters": {"properties": {"model": {"type": "string"}, "n": {"type": "integer"}}}}
CHUNKED = "Transfer-Encoding: chunked"
OTHER_PATHS = [
    "/",
    "/metrics",
    "/ready",
    "/v1/chat%2fcompletions",
    "/V1/completions",
    "/v1/completions/",
    "/v1/x/../completions",
]
NO_BODIES = {
    "array": b'[{"model": "worker"}]',
    "blanks": b"  ",
    "NUL inside": b'{"model": "worker", "a": "\0"}',
    "BOM": b"\xef\xbb\xbf" + BODY,
    "no model": b'{"messages": []}',
    "object as model": b'{"model": {"model": "worker"}}',
    "nested model": b'{"a": {"model": "worker"}}',
    "empty model": b'{"model": ""}',
    "truncated": b'{"messages": [{',
    "truncated model": b'{"model": "worke',
    "model with a NUL": b'{"model": "worker\\u0000"}',
}
MEDIA = {
    '{"url": "http://169.254.169.254/"}': 400,
    '{"detail": "low", "url": "HTTPS:\\/\\/a"}': 400,
    '{"url": "data:,a", "url": "file:///etc/passwd"}': 400,
    '"ftp://a"': 400,
    '{"url": "data:image/png;base64,AAAA"}': 200,
    '{"type": "string"}': 200,
}
CASES: dict[str, list[Case]] = {
    "paths": [
        *(post(path, GOOD, 404, path=path) for path in OTHER_PATHS),
        post("*", GOOD, 400, 404, path="*"),
        post("with a query", GOOD, 200, path=PATHS[0] + "?model=architect&../../x"),
        post("absolute URI of another host", GOOD, 400, path="http://169.254.169.254/v1/chat/completions"),
        post("absolute URI of this host", GOOD, 200, path="http://gateway/v1/chat/completions"),
        post("absolute URI of another scheme", GOOD, 400, 404, path="file:///v1/chat/completions"),
    ],
    "methods": [
        *(post(method, b"", 405, method=method) for method in ("GET", "HEAD", "OPTIONS", "post")),
        post("DELETE on /v1/models", b"", 405, method="DELETE", path="/v1/models"),
        post("CONNECT", b"", 400, 404, 405, method="CONNECT", path="169.254.169.254:80"),
        post("GET of /status with a body", GOOD, 200, method="GET", path="/status", engine=""),
    ],
    "whose request ends where": [
        head("CL and TE", f"Content-Length: 4\n{CHUNKED}", chunk(BODY) + SMUGGLED, 200, 400),
        head("TE and CL", f"{CHUNKED}\nContent-Length: 900", chunk(BODY) + SMUGGLED, 200, 400),
        head("two CL that differ", f"Content-Length: {len(BODY)}\nContent-Length: 2", BODY),
        head("negative CL", "Content-Length: -1", BODY),
        head("TE xchunked", "Transfer-Encoding: xchunked", chunk(BODY), 400, 413),
        head("blank before the colon", "Transfer-Encoding : chunked", chunk(BODY)),
        head("obs-fold", f"X-A: b\n {CHUNKED}"),
        head("chunk size that is no number", CHUNKED, chunk(BODY, "zz")),
        head("chunk longer than its size", CHUNKED, chunk(BODY, "2")),
        head("NUL in a header", "X-A: a\0b"),
        Case("LF only", f"POST {PATHS[0]} HTTP/1.1\nHost: a\nAuthorization: Bearer {KEYS['all']}\n\n".encode(), (400,)),
        Case("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (0, 400)),
        Case("HTTP/0.9", b"GET /v1/models\r\n\r\n", (0, 400)),
        post("HTTP/1.0", GOOD, 200, version="1.0"),
    ],
    "sizes": [
        post("body of 20 MiB", fill(20 * MIB), 200),
        post("body of 20 MiB and a byte", fill(20 * MIB + 1), 413),
        head("chunked body of 2 MiB", CHUNKED, chunk(fill(2 * MIB)), 413),
        head("chunked body of 900 KiB", CHUNKED, chunk(fill(900 * 1024)), 200),
        head("header of 40 KB", "X-A: " + "a" * 40_000),
    ],
    "bodies": [
        *(post(name, body, 400) for name, body in NO_BODIES.items()),
        post("number as model", b'{"model": 5}', 400, 404),
        post("none", b"", 400, method="POST", headers="Content-Length: 0\r\n"),
        post("deeply nested", '{"model": "worker", "x": ' + "[" * 5000 + "]" * 5000 + "}", 200),
        post("model last, 900 KiB", fill(900 * 1024, '{"x": "', '", "model": "worker"}'), 200),
        post("model last, 2 MiB", fill(2 * MIB, '{"x": "', '", "model": "worker"}'), 400),
        post("keys that start as model", b'{"mode": "architect", "models": "architect", "model": "worker"}', 200),
        post("unknown model", b'{"model": "nobody"}', 404),
        post("model in capitals", b'{"model": "Worker"}', 404),
        post("model of 1 KB", json.dumps({"model": "w" * 1000}), 400),
    ],
    "two readings of one body": [
        part("own name", '{"model": "sentry"}', 200),
        part("name of the same engine", '{"model": "auditor"}', 403),
        part("name of another engine", '{"model": "worker"}', 403),
        part("model twice", '{"model": "sentry", "model": "auditor"}', 400),
        part("second model beyond the first MiB", fill(3 * MIB, '{"model": "sentry", "x": "', '", "model": "a"}'), 400),
        part("second model escaped", '{"model": "sentry", "mod\\u0065l": "auditor"}', 400),
        part("only model escaped", '{"mod\\u0065l": "sentry"}', 400),
        part("name escaped", '{"model": "s\\u0065ntry"}', 400),
        part("model twice, 900 KB apart", fill(900_000, '{"model": "sentry", "x": "', '", "model": "auditor"}'), 400),
        part("model in a tool's schema", json.dumps({"model": "sentry", "tools": [TOOL]}), 400),
        part("model in a text", json.dumps({"model": "sentry", "prompt": 'write "model": "auditor"'}), 200),
        post("model twice, all names allowed", '{"model": "worker", "model": "architect"}', 200),
        post("model escaped, all names allowed", '{"model": "worker", "mod\\u0065l": "architect"}', 400),
        post("escaped letters in a text", '{"model": "worker", "prompt": "\\u0041\\" : \\u00e4"}', 200),
    ],
    "keys": [
        key("none"),
        key("foreign", key="vllm-" + "f" * 43),
        key("with a letter more", key=KEYS["all"] + "x"),
        key("empty", "Authorization: Bearer "),
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
        post("Expect: 100-continue", GOOD, 200, headers="Expect: 100-continue\r\n"),
        post("Content-Encoding: gzip", GOOD, 400, headers="Content-Encoding: gzip\r\n"),
        post("Upgrade: websocket", GOOD, 200, 400, headers="Connection: Upgrade\r\nUpgrade: websocket\r\n"),
        post("Connection that names Authorization", GOOD, 200, 401, headers="Connection: authorization\r\n"),
    ],
    "what binds an engine": [
        limit("n 8", '"n": 8', 200),
        *(
            limit(f"n {value}", f'"n": {value}', 400)
            for value in ("9", "10", "1e3", "8.5", "-1", '"100"', '" 9"', '"+9"')
        ),
        limit("n with blanks", '"n" \n:\t 100', 400),
        limit("n escaped", '"\\u006e": 100', 400),
        limit("tools escaped", '"\\u0074ools": []', 400),
        limit("n after 900 KB", '"x": "' + "x" * 900_000 + '", "n": 100', 400),
        limit("n in a text", '"prompt": "\\"n\\": 100"', 200),
        limit("max_tokens 32768", '"max_tokens": 32768', 200),
        limit("max_tokens 32769", '"max_tokens": 32769', 400),
        limit("max_tokens null", '"max_tokens": null', 200),
        *(
            limit(f"{name} 100000", f'"{name}": 100000', 400)
            for name in ("best_of", "max_completion_tokens", "max_output_tokens", "min_tokens", "logprobs")
        ),
        limit("top_logprobs 20", '"logprobs": true, "top_logprobs": 20', 200),
        limit("top_logprobs 21", '"logprobs": true, "top_logprobs": 21', 400),
        limit("prompt_logprobs -1", '"prompt_logprobs": -1', 400),
    ],
    "addresses": [
        limit(value, f'"messages": [{{"content": [{{"image_url": {value}}}]}}]', status)
        for value, status in MEDIA.items()
    ]
    + [limit(kind, f'"{kind}_url": "http://a"', 400) for kind in ("video", "audio", "file")],
    "schemas": [
        limit("100 KB", '"response_format": {"json_schema": {"enum": ["}' + "x" * 100_000 + '"]}}', 200),
        limit(
            "400 tools of 600 bytes", '"tools": ' + json.dumps([TOOL | {"function": {"name": "x" * 480}}] * 400), 200
        ),
        *(
            limit(f"300 KB in {name}", f'"{name}": [{{"enum": ["{{' + "x" * 300_000 + '"]}]', 400)
            for name in ("response_format", "structured_outputs", "text", "tools", "functions")
        ),
        limit("300 KB, together", ", ".join(['"tools": {"a": "' + "x" * 100_000 + '"}'] * 3), 400),
        limit("nested too deeply", '"tools": ' + "[" * 50_000 + "]" * 50_000, 400),
        limit("that does not end", '"tools": [{"a": "' + "x" * 300_000, 400),
        limit("beside a text of 900 KB", '"response_format": {"a": 1}, "prompt": "' + "x" * 900_000 + '"', 200),
    ],
}


def send_big(client: H2) -> None:
    """A body of 10 MiB, as the window allows."""
    body = fill(10 * MIB)
    client.ask(1, end=False, _method="POST", **{"content-length": str(len(body))})
    for start in range(0, len(body), 16_384):
        end = min(start + 16_384, len(body))
        client.read(lambda end=end: min(client.windows.get(stream, 65535) for stream in (0, 1)) >= end)
        client.send(write_frame(DATA, int(end == len(body)), 1, body[start:end]))


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


def send_continuations(client: H2) -> None:
    client.send(write_frame(HEADERS, 0, 1, write_fields((":method", "GET"))))
    for _ in range(10_000):
        client.send(write_frame(CONTINUATION, 0, 1, write_fields(("x", "y" * 100))))


def ask(name: str, *statuses: int, **fields: str) -> Case:
    """A request over HTTP/2 with these fields."""
    return Case(name, functools.partial(H2.ask, stream=1, body=BODY, **fields), statuses, "mid")


CASES["HTTP/2"] = [
    ask("a plain request", 200),
    ask("upper-case letters in a name", 0, 400, X="y"),
    ask(":path without a slash", 0, 400, 404, _path="v1/chat/completions"),
    ask(":path with a blank and a second request", 0, 400, 404, _path="/v1/chat/completions HTTP/1.1\r\nx: y"),
    ask(":authority and Host that differ", 200, 400, host="other"),
    ask("header value with a line break", 0, 400, x="a\r\nTransfer-Encoding: chunked"),
    ask("Transfer-Encoding", 0, 400, **{"transfer-encoding": "chunked"}),
    ask("content-length that is a lie", 0, 400, **{"content-length": "5"}),
    Case("body of 10 MiB", send_big, (200,), "mid"),
    Case("no :path", send_no_path, (0, 400)),
    Case("rapid resets", send_resets, (0, 200, 400), "mid"),
    Case("flood of CONTINUATION", send_continuations, (0,)),
]


def send(gateway: Gateway, case: Case) -> tuple[int, list[str]]:
    """Send the request; returns the status, and the engines that it reached."""
    before = {name: len(engine.seen) for name, engine in gateway.engines.items()}
    if callable(case.raw):
        client = H2(gateway.port)
        case.raw(client)
        client.read(lambda: 1 in client.ended or 1 in client.reset or client.away or client.status.get(1), 5)
        client.read(lambda: 1 in client.ended, 0.2)
        status = client.status.get(1, 0)
        client.close()
    else:
        connection = Connection(gateway.port)
        connection.send(case.raw)
        status = (connection.read_head() if case.raw.startswith(b"HEAD") else connection.read()).status
        connection.close()
    return status, [name for name, engine in gateway.engines.items() if len(engine.seen) > before[name]]
