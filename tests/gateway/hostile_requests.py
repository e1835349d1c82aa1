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
SENTRY = '"messages": [], "model": "sentry"'


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
    slow: float = 0
    """Seconds between the first half of the bytes and a second one that never comes."""


def post(name: str, body: bytes | str | dict[str, Any], *statuses: int, engine: str = "", **more: Any) -> Case:
    """A POST with this body, which is whole and well-formed HTTP."""
    return Case(name, write_request(body.encode() if isinstance(body, str) else body, **more), statuses, engine)


def raw(name: str, head: str, body: bytes, *statuses: int, engine: str = "", path: str = PATHS[0]) -> Case:
    """A POST with these header lines (CR LF is added) and these bytes after them."""
    lines = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEYS['all']}\r\n"
    return Case(name, (lines + head.replace("\n", "\r\n") + "\r\n\r\n").encode("latin-1") + body, statuses, engine)


def chunk(body: bytes, size: str = "") -> bytes:
    """A chunked body of one chunk, whose size may be a lie."""
    return (size or f"{len(body):x}").encode() + b"\r\n" + body + b"\r\n0\r\n\r\n"


def fill(size: int, before: str = '{"model": "worker", "x": "', after: str = '"}') -> bytes:
    """A body of `size` bytes."""
    return before.encode() + b"x" * (size - len(before) - len(after)) + after.encode()


def limit(name: str, members: str, *statuses: int) -> Case:
    """A body with further members, for the engine `mid`."""
    return post(name, '{"model": "worker", ' + members + "}", *statuses, engine="mid" if 200 in statuses else "")


def part(name: str, body: bytes | str, *statuses: int, **more: Any) -> Case:
    """A body from the client that may use only `sentry` of the two names of `small`."""
    return post(name, body, *statuses, key="part", engine="small" if 200 in statuses else "", **more)


def h2(name: str, *statuses: int, engine: str = "") -> Callable[[Callable[[H2], None]], Callable[[H2], None]]:
    """Note a function as a case of HTTP/2; the answer is that of stream 1."""

    def note(send: Callable[[H2], None]) -> Callable[[H2], None]:
        CASES.append(Case("h2: " + name, send, statuses, engine))
        return send

    return note


SMUGGLED = f"POST {PATHS[0]} HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{{}}".encode()
DEEP = '{"model": "worker", "x": ' + "[" * 5000 + "]" * 5000 + "}"
TOOL = {"parameters": {"properties": {"model": {"type": "string"}, "n": {"type": "integer"}}}}
CASES: list[Case] = [
    # paths
    *(
        post(f"path {path!r}", GOOD, 404, path=path)
        for path in (
            "/",
            "//v1/chat/completions",
            "/v1/chat%2fcompletions",
            "/v1/chat/completions/",
            "/v1/models/../chat/completions",
            "/V1/chat/completions",
            "/v1/chat/completions;a=b",
            "/v1/chat/completions%00",
            "/v1/load_lora_adapter",
            "/metrics",
            "/ready",
        )
    ),
    post("path *", GOOD, 400, 404, path="*"),
    post("path with a fragment", GOOD, 400, 404, path=PATHS[0] + "#x"),
    post("path with a query", GOOD, 200, path=PATHS[0] + "?model=architect&../../x", engine="mid"),
    post("absolute URI of another host", GOOD, 400, path="http://169.254.169.254/v1/chat/completions"),
    post("absolute URI of this host", GOOD, 200, path="http://gateway/v1/chat/completions", engine="mid"),
    post("absolute URI of another scheme", GOOD, 400, 404, path="file:///v1/chat/completions"),
    post("path of 100 KB", GOOD, 404, path="/" + "a" * 100_000),
    # methods
    *(
        post(f"method {name}", b"", 405, method=name)
        for name in ("GET", "HEAD", "PUT", "OPTIONS", "TRACE", "post", "PATCH")
    ),
    post("method DELETE on /v1/models", b"", 405, method="DELETE", path="/v1/models"),
    post("method CONNECT", b"", 400, 404, 405, method="CONNECT", path="169.254.169.254:80"),
    post("method with a body on /status", GOOD, 200, method="GET", path="/status"),
    # whose request ends where
    raw("CL and TE", "Content-Length: 4\nTransfer-Encoding: chunked", chunk(BODY) + SMUGGLED, 200, 400, engine="mid"),
    raw("TE and CL", "Transfer-Encoding: chunked\nContent-Length: 900", chunk(BODY) + SMUGGLED, 200, 400, engine="mid"),
    raw("two CL that differ", f"Content-Length: {len(BODY)}\nContent-Length: 2", BODY, 400),
    raw("CL list that differs", f"Content-Length: {len(BODY)}, 2", BODY, 400),
    raw("negative CL", "Content-Length: -1", BODY, 400),
    raw("CL with a plus", f"Content-Length: +{len(BODY)}", BODY, 400),
    raw("CL in hex", "Content-Length: 0x10", BODY, 400),
    raw("CL beyond 64 bits", "Content-Length: 99999999999999999999999", BODY, 400),
    raw("TE twice", "Transfer-Encoding: chunked\nTransfer-Encoding: identity", chunk(BODY), 400),
    raw("TE xchunked", "Transfer-Encoding: xchunked", chunk(BODY), 400, 413),
    raw("TE with a tab", "Transfer-Encoding:\tchunked", chunk(BODY) + SMUGGLED, 200, 400, engine="mid"),
    raw("blank before the colon", "Transfer-Encoding : chunked", chunk(BODY), 400),
    raw("obs-fold", "X-A: b\n Transfer-Encoding: chunked", b"", 400),
    raw("chunk size that is no number", "Transfer-Encoding: chunked", chunk(BODY, "zz"), 400),
    raw("chunk size too big", "Transfer-Encoding: chunked", chunk(BODY, "fffffffffffffffff"), 400),
    raw("chunk size negative", "Transfer-Encoding: chunked", chunk(BODY, "-1"), 400),
    raw("chunk longer than its size", "Transfer-Encoding: chunked", chunk(BODY, "2"), 400),
    Case("LF only", f"POST {PATHS[0]} HTTP/1.1\nHost: a\nAuthorization: Bearer {KEYS['all']}\n\n".encode(), (400,)),
    raw("NUL in a header", "X-A: a\0b", b"", 400),
    raw("header without a name", ": x", b"", 400),
    Case("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (0, 400)),
    Case("HTTP/0.9", b"GET /v1/models\r\n\r\n", (0, 400)),
    Case("HTTP/3.0 in clear text", b"GET /v1/models HTTP/3.0\r\n\r\n", (0, 400, 401)),
    post("HTTP/1.0", GOOD, 200, version="1.0", engine="mid"),
    # sizes
    post("body of 20 MiB", fill(20 * MIB), 200, engine="mid"),
    post("body of 20 MiB and a byte", fill(20 * MIB + 1), 413),
    raw("body of 1 TB, declared", "Content-Length: 1000000000000", b"", 413),
    raw("chunked body of 2 MiB", "Transfer-Encoding: chunked", chunk(fill(2 * MIB)), 413),
    raw("chunked body of 900 KiB", "Transfer-Encoding: chunked", chunk(fill(900 * 1024)), 200, engine="mid"),
    raw("chunked body of 21 MiB", "Transfer-Encoding: chunked", chunk(fill(21 * MIB)), 413),
    raw("1000 headers", "\n".join(f"X-{n}: 1" for n in range(1000)), b"", 400),
    raw("header of 40 KB", "X-A: " + "a" * 40_000, b"", 400),
    raw("header of 2 MiB", "X-A: " + "a" * 2 * MIB, b"", 0, 400),
    # slowness
    Case("headers that do not end", b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n", (408,), slow=1),
    Case("a body that does not come", write_request(GOOD)[:-5], (408,), slow=1),
    # bodies
    *(
        post("body: " + name, body, 400)
        for name, body in {
            "array": b'[{"model": "worker"}]',
            "null": b"null",
            "blanks": b"  ",
            "text": b"model=worker",
            "NUL inside": b'{"model": "worker", "a": "\0"}',
            "BOM": b"\xef\xbb\xbf" + BODY,
            "UTF-16": BODY.decode().encode("utf-16"),
            "no model": b'{"messages": []}',
            "null as model": b'{"model": null}',
            "object as model": b'{"model": {"model": "worker"}}',
            "nested model": b'{"a": {"model": "worker"}}',
            "empty model": b'{"model": ""}',
            "truncated": b'{"messages": [{',
            "truncated model": b'{"model": "worke',
            "model with a NUL": b'{"model": "worker\\u0000"}',
            "multipart": b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nworker\r\n--x--',
        }.items()
    ),
    post("body: array as model", b'{"model": ["worker"]}', 400, 404),
    post("body: number as model", b'{"model": 5}', 400, 404),
    post("body: true as model", b'{"model": true}', 400, 404),
    post("no body", b"", 400, method="POST", headers="Content-Length: 0\r\n"),
    post("deeply nested after model", DEEP, 200, engine="mid"),
    post(
        "deeply nested before model",
        DEEP.replace('"model": "worker", ', "")[:-1] + ', "model": "worker"}',
        200,
        400,
        engine="mid",
    ),
    post("model last, 900 KiB", fill(900 * 1024, '{"x": "', '", "model": "worker"}'), 200, engine="mid"),
    post("model last, 2 MiB", fill(2 * MIB, '{"x": "', '", "model": "worker"}'), 400),
    post(
        "model with another key before that starts as it",
        b'{"mode": "architect", "models": "architect", "model": "worker"}',
        200,
        engine="mid",
    ),
    post("unknown model", b'{"model": "nobody"}', 404),
    post("model in capitals", b'{"model": "Worker"}', 404),
    post("model of a map's separator", b'{"model": "all:worker"}', 404),
    post("model that is a path", b'{"model": "../../engines/big/api"}', 404),
    post("model of 1 KB", json.dumps({"model": "w" * 1000}), 400, 404),
    # two readings of one body
    part("own name", '{"model": "sentry"}', 200),
    part("name of the same engine", '{"model": "auditor"}', 403),
    part("name of another engine", '{"model": "worker"}', 403),
    part("model twice, own name first", '{"model": "sentry", "model": "auditor"}', 400),
    part("model twice, own name last", '{"model": "auditor", "model": "sentry"}', 400, 403),
    part(
        "second model beyond the first MiB", fill(3 * MIB, '{"model": "sentry", "x": "', '", "model": "auditor"}'), 400
    ),
    part("second model escaped", '{"model": "sentry", "mod\\u0065l": "auditor"}', 400),
    part("second model escaped, capitals", '{"model": "sentry", "\\u006DODEL": 1, "\\u006Dodel": "auditor"}', 400),
    part("only model escaped", '{"mod\\u0065l": "sentry"}', 400),
    part("name escaped", '{"model": "s\\u0065ntry"}', 400),
    part("second model after a NUL", '{"model": "sentry", "a": "\0", "model": "auditor"}', 400),
    part("model twice, 900 KB apart", fill(900_000, '{"model": "sentry", "x": "', '", "model": "auditor"}'), 400),
    part("model in a tool's schema", json.dumps({"model": "sentry", "tools": [TOOL]}), 400),
    part("model in a text", json.dumps({"model": "sentry", "prompt": 'write "model": "auditor"'}), 200),
    post("model twice, all names allowed", '{"model": "worker", "model": "architect"}', 200, engine="mid"),
    post("model in a tool's schema, all names allowed", GOOD | {"tools": [TOOL]}, 200, engine="mid"),
    post("model escaped, all names allowed", '{"model": "worker", "mod\\u0065l": "architect"}', 400),
    post("escaped letters in a text", '{"model": "worker", "prompt": "\\u0041\\" : \\u00e4"}', 200, engine="mid"),
    # keys
    post("no key", GOOD, 401, key=None),
    post("foreign key", GOOD, 401, key="vllm-" + "f" * 43),
    post("empty key", GOOD, 401, key=None, headers="Authorization: Bearer \r\n"),
    post("key with a letter more", GOOD, 401, key=KEYS["all"] + "x"),
    post("the hash of a key", GOOD, 401, key="0" * 64),
    post("key of 30 KB", GOOD, 401, key="k" * 30_000),
    post("two keys", GOOD, 401, headers=f"Authorization: Bearer {KEYS['part']}\r\n"),
    post("Basic", GOOD, 401, key=None, headers=f"Authorization: Basic {KEYS['all']}\r\n"),
    post("key without a scheme", GOOD, 401, key=None, headers=f"Authorization: {KEYS['all']}\r\n"),
    post("key in X-Api-Key", GOOD, 401, key=None, headers=f"X-Api-Key: {KEYS['all']}\r\n"),
    post("key in Proxy-Authorization", GOOD, 401, key=None, headers=f"Proxy-Authorization: Bearer {KEYS['all']}\r\n"),
    post("key in the query", GOOD, 401, key=None, path=f"{PATHS[0]}?api_key={KEYS['all']}"),
    post("key in a cookie", GOOD, 401, key=None, headers=f"Cookie: Authorization=Bearer {KEYS['all']}\r\n"),
    *(post(f"no key for {path}", b"", 401, key=None, path=path) for path in ("/v1/models", "/status", "/ready/worker")),
    # headers
    post("two Host headers", GOOD, 400, headers="Host: other\r\n"),
    post("Host of a script", GOOD, 200, 400, headers="X-Forwarded-Host: <script>\r\n", engine="mid"),
    post("X-Request-Id of the client", GOOD, 200, headers="X-Request-Id: a\tb<script>\r\n", engine="mid"),
    post("Expect: 100-continue", GOOD, 200, headers="Expect: 100-continue\r\n", engine="mid"),
    post("Expect of something else", GOOD, 200, 400, headers="Expect: tea\r\n", engine="mid"),
    post("Content-Encoding: gzip", b"\x1f\x8b\x08" + b"x" * 50, 400, headers="Content-Encoding: gzip\r\n"),
    post("Upgrade: websocket", GOOD, 200, 400, headers="Connection: Upgrade\r\nUpgrade: websocket\r\n", engine="mid"),
    post(
        "Upgrade: h2c",
        GOOD,
        200,
        headers="Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n",
        engine="mid",
    ),
    post("Connection that names Authorization", GOOD, 200, 401, headers="Connection: authorization\r\n", engine="mid"),
    post("X-HTTP-Method-Override", GOOD, 200, headers="X-HTTP-Method-Override: GET\r\n", engine="mid"),
    # what binds an engine
    limit("n 8", '"n": 8', 200),
    *(limit(f"n {value}", f'"n": {value}', 400) for value in ("9", "10", "1e3", "8.5", "-1", '"100"', '" 9"', '"+9"')),
    limit("n twice", '"n": 1, "n": 100', 400),
    limit("n with blanks", '"n" \n:\t 100', 400),
    limit("n escaped", '"\\u006e": 100', 400),
    limit("n after 900 KB", '"x": "' + "x" * 900_000 + '", "n": 100', 400),
    limit("n in a text", '"prompt": "\\"n\\": 100"', 200),
    limit("best_of 100", '"best_of": 100', 400),
    *(
        limit(f"max_tokens {value}", f'"max_tokens": {value}', status)
        for value, status in (("32768", 200), ("32769", 400), ("null", 200))
    ),
    limit("max_completion_tokens 100000", '"max_completion_tokens": 100000', 400),
    limit("top_logprobs 20", '"logprobs": true, "top_logprobs": 20', 200),
    limit("top_logprobs 21", '"logprobs": true, "top_logprobs": 21', 400),
    limit("prompt_logprobs -1", '"prompt_logprobs": -1', 400),
    *(
        limit(f"media: {value[:40]}", f'"messages": [{{"content": [{{"image_url": {value}}}]}}]', status)
        for value, status in {
            '{"url": "http://169.254.169.254/"}': 400,
            '{"detail": "low", "url": "HTTPS:\\/\\/a"}': 400,
            '{"url": "data:,a", "url": "file:///etc/passwd"}': 400,
            '"ftp://a"': 400,
            '{"url": "data:image/png;base64,AAAA"}': 200,
            '{"type": "string"}': 200,
        }.items()
    ),
    limit("schema of 100 KB", '"response_format": {"json_schema": {"enum": ["}' + "x" * 100_000 + '"]}}', 200),
    limit("400 tools of 600 bytes", '"tools": ' + json.dumps([TOOL | {"function": {"name": "x" * 480}}] * 400), 200),
    limit("schema of 300 KB", '"response_format": {"json_schema": {"enum": ["{' + "x" * 300_000 + '"]}}', 400),
    limit("schemas of 300 KB, together", ", ".join(['"structured_outputs": {"a": "' + "x" * 100_000 + '"}'] * 3), 400),
    limit("schema nested too deeply", '"tools": ' + "[" * 50_000 + "]" * 50_000, 400),
    limit("schema that does not end", '"tools": [{"a": "' + "x" * 300_000, 400),
    limit("text of 900 KB beside a schema", '"response_format": {"a": 1}, "prompt": "' + "x" * 900_000 + '"', 200),
]


for title, statuses, engine, fields in (
    ("a plain request", (200,), "mid", {}),
    ("upper-case letters in a name", (0, 400), "", {"X": "y"}),
    (":path without a slash", (0, 400, 404), "", {"_path": "v1/chat/completions"}),
    (":path with a blank and a second request", (0, 400, 404), "", {"_path": "/v1/chat/completions HTTP/1.1\r\nx: y"}),
    (":authority and Host that differ", (200, 400), "mid", {"host": "other"}),
    ("header value with a line break", (0, 400), "", {"x": "a\r\nTransfer-Encoding: chunked"}),
    ("Transfer-Encoding", (0, 400), "", {"transfer-encoding": "chunked"}),
    ("content-length that is a lie", (0, 400), "", {"content-length": "5"}),
):
    h2(title, *statuses, engine=engine)(functools.partial(H2.ask, stream=1, body=BODY, **fields))


@h2("body of 10 MiB with a length", 200, engine="mid")
def send_big(client: H2) -> None:
    body = fill(10 * MIB)
    client.ask(1, body[:60_000], end=False, **{"content-length": str(len(body))})
    for start in range(60_000, len(body), 16_384):  # as the window allows
        client.wait_for_window(1, min(16_384, len(body) - start), start)
        client.send(write_frame(DATA, int(start + 16_384 >= len(body)), 1, body[start : start + 16_384]))


@h2("no :path", 0, 400)
def send_no_path(client: H2) -> None:
    client.send(write_frame(HEADERS, 5, 1, write_fields((":method", "GET"), (":scheme", "http"))))


@h2(":path twice", 0, 400)
def send_two_paths(client: H2) -> None:
    fields = [(":method", "GET"), (":scheme", "http"), (":path", "/status"), (":path", "/v1/models")]
    client.send(write_frame(HEADERS, 5, 1, write_fields(*fields)))


@h2("CONNECT", 0, 400, 404, 405)
def send_connect(client: H2) -> None:
    client.ask(1, _method="CONNECT", _path="/v1/models")


@h2("1000 rapid resets", 0, 200, 400, engine="mid")
def send_resets(client: H2) -> None:
    for stream in range(3, 2003, 2):
        client.ask(stream, BODY)
        client.send(write_frame(RST_STREAM, 0, stream, b"\0\0\0\x08"))
    client.ask(2003, BODY)
    client.read(lambda: 2003 in client.ended, 5)
    client.status[1] = client.status.get(2003, 0)


@h2("flood of CONTINUATION", 0)
def send_continuations(client: H2) -> None:
    client.send(write_frame(HEADERS, 0, 1, write_fields((":method", "GET"))))
    for _ in range(10_000):
        client.send(write_frame(CONTINUATION, 0, 1, write_fields(("x", "y" * 100))))


@h2("a body beyond the window", 0, 200, engine="mid")
def send_beyond_window(client: H2) -> None:
    client.ask(1, fill(300_000))


@h2("a frame of 1 MiB", 0)
def send_big_frame(client: H2) -> None:
    client.send(write_frame(DATA, 0, 1, b"x" * MIB))


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
        answer = connection.read_head() if case.raw.startswith(b"HEAD") else connection.read()
        connection.close()
        status = answer.status
    return status, [name for name, engine in gateway.engines.items() if len(engine.seen) > before[name]]
