# SPDX-License-Identifier: Apache-2.0
"""A real HAProxy with the role's template, stand-in engines behind links, and clients that send raw bytes.

The maps are written here by hand, in the format of the contract, so that a mistake of the host's program shows.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "roles/serving_gateway/templates/haproxy.cfg.j2"
HAPROXY = os.environ.get("VLLM_EDGE_HAPROXY") or shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"]
ENGINES = {"big": ["architect"], "mid": ["worker"], "small": ["auditor", "sentry"]}
PORTED = ("big", "small")
"""The engines that have a port of their own."""
CLIENTS = {"all": "", "part": "sentry", "solo": "architect", "slow": "", "narrow": "", "revoked": ""}
"""Each client, and the only name that it may use (empty: all)."""
LIMITS = {"slow": (5, 0), "narrow": (0, 3)}
KEYS = {client: f"vllm-{client:x<43}" for client in CLIENTS}  # pragma: allowlist secret


def load_policy() -> Any:
    """The class that engines judge requests by, from its file alone, as their containers have it."""
    path = ROOT / "plugins/module_utils/vllm_edge/engine/edge_policy.py"
    spec = importlib.util.spec_from_file_location("edge_policy", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Policy


Policy = load_policy()


def wait_until(true: Callable[[], Any], seconds: float = 10) -> Any:
    """The first true answer of `true`, asked every 20 ms; an AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if answer := true():
            return answer
        time.sleep(0.02)
    raise AssertionError(f"not true within {seconds} s")


def get_free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_certificate(path: Path, key: str = "-") -> None:
    """A certificate, and its key in the same file unless it goes elsewhere."""
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=gateway -out - -keyout"
    path.write_bytes(subprocess.run([*words.split(), key], capture_output=True, check=True).stdout)


def name_backend(served: str) -> str:
    """The backend of a served name, as the contract has it."""
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", served):
        return served
    return re.sub(r"[^A-Za-z0-9_.-]", "_", served[:40]) + "-" + hashlib.sha256(served.encode()).hexdigest()[:8]


@dataclass
class Seen:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    given: bytes | None = None
    """The body that vLLM would get; None where the class refused the request."""
    given_headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    sent: int = 0
    left_at: float = 0.0
    """When the engine noticed that the other side was gone."""


class Engine:
    """A stand-in for an engine on a Unix socket; `test` in the body says how it answers.

    It judges by the class of real engines, with trailers among the headers, as httptools has them.
    `chunks` (number of chunks of a stream), `interval` (seconds between them), `silent` (seconds before the answer),
    `die` (chunks after which the connection breaks off), `break` (it does so before the answer), `data` (text of each
    chunk instead of the time), `head` (further lines of the answer's head).
    """

    def __init__(self, name: str, path: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.name, self.path, self.loop, self.seen = name, path, loop, list[Seen]()
        self.server: asyncio.Server | None = None

    def start(self) -> None:
        """Listen; the directory is made anew, as the supervisor does it."""
        shutil.rmtree(self.path.parent, ignore_errors=True)
        self.path.parent.mkdir(parents=True)
        starting = asyncio.start_unix_server(self.answer, self.path, limit=2**25, backlog=512)
        self.server = asyncio.run_coroutine_threadsafe(starting, self.loop).result(5)

    def stop(self) -> None:
        """Stop listening; after this, the kernel refuses a connection."""

        async def close(server: asyncio.Server) -> None:
            server.close()

        if self.server:
            asyncio.run_coroutine_threadsafe(close(self.server), self.loop).result(5)
            self.server = None

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of a connection, until one of them asks to close it."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self.work(reader, writer):
                pass
        writer.close()

    async def work(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a request, record it, answer it; returns whether another one may follow."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = lines[0].split(" ")
        pairs = [(name.lower(), value) for name, value in (line.split(": ", 1) for line in lines[1:] if line)]
        headers = dict(pairs)
        if target == "/health":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return False
        seen = Seen(method, target, headers, b"")
        self.seen.append(seen)
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                seen.body += (await reader.readexactly(size + 2))[:-2]
            while line := (await reader.readline()).decode("latin-1").strip():
                pairs.append((line.partition(":")[0].lower(), line.partition(":")[2].strip()))
        if not await self.judge(seen, pairs, reader, writer):
            return False
        orders: dict[str, Any] = {}
        with contextlib.suppress(ValueError, AttributeError, RecursionError):
            orders = json.loads(seen.given or b"").get("test", {})
        gone = asyncio.ensure_future(reader.read(1))
        gone.add_done_callback(lambda done: done.cancelled() or setattr(seen, "left_at", time.time()))
        await asyncio.wait([gone], timeout=orders.get("silent", 0))
        if orders.get("break"):
            return False
        if "chunks" not in orders:
            body = json.dumps({"engine": self.name}).encode()
            writer.write(
                b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nX-Request-Id: engine\r\nContent-Type: application/json\r\n"
                + orders.get("head", "").encode()
            )
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            gone.cancel()
            await asyncio.wait([gone])
            return headers.get("connection") != "close"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        start = self.loop.time()
        for number in range(orders["chunks"]):
            if number == orders.get("die", -1):
                writer.transport.abort()
                return False
            data = f"data: {orders.get('data') or f'{time.time():.6f}'}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
            seen.sent += 1
            await asyncio.wait([gone], timeout=max(0, start + (number + 1) * orders["interval"] - self.loop.time()))
            if gone.done():
                return False
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return False

    async def judge(
        self,
        seen: Seen,
        pairs: list[tuple[str, str]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        """Let the class judge a request; returns whether vLLM would get it. Otherwise the class has answered."""
        left = int(seen.headers.get("content-length", 0)) if not seen.body else 0
        answer: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            nonlocal left
            part = seen.body if not left else await reader.read(min(left, 2**20))
            if left:
                seen.body, left = seen.body + part, left - len(part)
                if not part:
                    return {"type": "http.disconnect"}
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message: dict[str, Any]) -> None:
            answer.append(message)

        async def serve(scope: dict[str, Any], receive: Callable[[], Any], send: Any) -> None:
            seen.given, seen.given_headers = (await receive())["body"], scope["headers"]

        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
        path = seen.target.partition("?")[0]
        await Policy(serve)({"type": "http", "method": seen.method, "path": path, "headers": fields}, receive, send)
        if answer:
            lines = [f"HTTP/1.1 {answer[0]['status']} Refused".encode()]
            lines += [name + b": " + value for name, value in answer[0]["headers"]]
            writer.write(b"\r\n".join([*lines, b"", answer[1]["body"]]))
            await writer.drain()
        return seen.given is not None


@dataclass
class Answer:
    """What a client got; `status` 0 is a connection that was closed without an answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = True
    """False where the connection ended inside the body."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A client's connection that sends raw bytes and reads answers of HTTP/1.1."""

    def __init__(self, port: int, timeout: float = 30, source: str = "") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.file = self.socket.makefile("rb")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.file.close()
        self.socket.close()

    def send(self, raw: bytes) -> None:
        """Send; a gateway that closes early is no error."""
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(raw)

    def read_head(self) -> Answer:
        """The status and the headers of the next answer, without those of 100 Continue."""
        try:
            line = self.file.readline()
            if not line.startswith(b"HTTP/1"):
                return Answer(0, body=line)
            answer = Answer(int(line.split()[1]))
            for line in iter(self.file.readline, b"\r\n"):
                name, _, value = line.decode("latin-1").strip().partition(": ")
                answer.headers[name.lower()] = value
            return self.read_head() if answer.status == 100 else answer
        except ConnectionError:
            return Answer(0)

    def read_chunks(self) -> Iterator[bytes]:
        """The chunks of a body; without a closing chunk it ends with an EOFError."""
        while True:
            line = self.file.readline()
            if not line:
                raise EOFError
            if not (size := int(line, 16)):
                self.file.readline()
                return
            yield self.file.read(size + 2)[:-2]

    def read(self) -> Answer:
        answer = self.read_head()
        try:
            if answer.headers.get("transfer-encoding") == "chunked":
                for chunk in self.read_chunks():
                    answer.body += chunk
            elif answer.status:
                length = int(answer.headers.get("content-length", 0))
                answer.body = self.file.read(length)
                answer.whole = len(answer.body) == length
        except (EOFError, ConnectionError):
            answer.whole = False
        return answer


def write_request(
    body: bytes | dict[str, Any] = b"",
    path: str = PATHS[0],
    key: str | None = "all",
    method: str = "",
    headers: str = "",
    version: str = "1.1",
    trailers: str | None = None,
) -> bytes:
    """An HTTP/1 request; `headers` are lines that end in CR LF. With `trailers`, which may be empty, it is chunked."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    method = method or ("POST" if data else "GET")
    authorization = f"Authorization: Bearer {KEYS.get(key, key)}\r\n" if key else ""
    length = f"Content-Length: {len(data)}\r\n" if data and "Content-Length" not in headers else ""
    if trailers is not None:
        length = "Transfer-Encoding: chunked\r\n"
        chunks = [data[start : start + 65536] for start in range(0, len(data), 65536)]
        spelt = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
        data = spelt + f"0\r\n{trailers}\r\n".encode("latin-1")
    head = f"{method} {path} HTTP/{version}\r\nHost: gateway\r\n{authorization}{length}{headers}\r\n"
    return head.encode("latin-1") + data


H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 7, 8, 9


def write_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def write_block(stream: int, block: bytes, end: bool = True) -> bytes:
    """The fields of a request, or its trailers, in as many frames as they need."""
    parts = [block[start : start + 16_384] for start in range(0, len(block), 16_384)]
    last = len(parts) - 1
    return b"".join(
        write_frame(CONTINUATION if at else HEADERS, 4 * (at == last) | (end and not at), stream, part)
        for at, part in enumerate(parts)
    )


def write_fields(*fields: tuple[str, str]) -> bytes:
    """Header fields for HTTP/2, each spelt out (HPACK: literal without indexing, without Huffman's code)."""
    return b"".join(b"\x00" + b"".join(write_text(text.encode("latin-1")) for text in field) for field in fields)


def write_text(text: bytes) -> bytes:
    """A text for HPACK. Its length takes one byte, or from 127 on seven bits in each further byte."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, more = len(text) - 127, bytearray()
    while rest > 127:
        more.append(128 | rest & 127)
        rest >>= 7
    return bytes([127, *more, rest]) + text


class H2:
    """A client of HTTP/2 in clear text that may break the protocol."""

    def __init__(self, port: int, connection: Any = None) -> None:
        self.connection = connection or socket.create_connection(("127.0.0.1", port), 30)
        self.status: dict[int, int] = {}
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()
        self.reset: set[int] = set()
        self.away = False
        self.first_window = 65535
        self.windows = {0: 65535}
        """What may still be sent on the connection, and on each stream."""
        self.send(H2_PREFACE + write_frame(SETTINGS, 0, 0))

    def send(self, raw: bytes) -> None:
        """Send; a gateway that closes early is no error."""
        with contextlib.suppress(OSError):
            self.connection.sendall(raw)

    def ask(
        self,
        stream: int,
        body: bytes = b"",
        end: bool = True,
        trailers: tuple[tuple[str, str], ...] = (),
        **pseudo: str | None,
    ) -> None:
        """Send a request; `pseudo` replaces or adds fields (None: leaves out), `_` before a name is a colon."""
        fields = {"_method": "POST" if body else "GET", "_scheme": "http", "_path": PATHS[0], "_authority": "gateway"}
        fields |= {"authorization": f"Bearer {KEYS['all']}"} | pseudo
        spelt = [(name.replace("_", ":", 1), value) for name, value in fields.items() if value is not None]
        self.send(write_block(stream, write_fields(*spelt), end and not body and not trailers))
        self.write_body(stream, body, end and not trailers)
        if trailers:
            self.send(write_block(stream, write_fields(*trailers)))

    def write_body(self, stream: int, body: bytes, end: bool = True) -> None:
        """Send a body of any size in frames, as the windows allow; stops where the gateway has answered."""
        start = 0

        def get_window() -> int:
            return min(16_384, self.windows[0], self.windows.setdefault(stream, self.first_window))

        while start < len(body):
            self.read(lambda: get_window() > 0 or stream in self.ended | self.reset or self.away, 20)
            if stream in self.ended | self.reset or self.away or (size := get_window()) <= 0:
                return
            part = body[start : start + size]
            start += len(part)
            for one in (0, stream):
                self.windows[one] -= len(part)
            self.send(write_frame(DATA, int(end and start == len(body)), stream, part))

    def read(self, until: Callable[[], Any], seconds: float = 10) -> bool:
        """Read frames until something is so; False where the gateway closed or the time is over."""
        end = time.monotonic() + seconds
        while not until():
            self.connection.settimeout(max(0.01, end - time.monotonic()))
            try:
                head = self.receive(9)
                payload = self.receive(int.from_bytes(head[:3], "big"))
            except (OSError, EOFError):
                return bool(until())
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:9], "big")
            if kind == HEADERS:
                indexed = {0x88: 200, 0x8C: 400, 0x8D: 404, 0x8E: 500}
                while payload[0] >> 5 == 1:  # a new size of the dynamic table
                    payload = payload[1:]
                self.status[stream] = indexed.get(payload[0]) or int(payload[2:5])
            elif kind == DATA and payload:
                self.data[stream] = self.data.get(stream, b"") + payload
                size = len(payload).to_bytes(4, "big")
                self.send(write_frame(WINDOW_UPDATE, 0, 0, size) + write_frame(WINDOW_UPDATE, 0, stream, size))
            elif kind == SETTINGS and not flags & 1:
                for at in range(0, len(payload), 6):
                    if payload[at : at + 2] == b"\0\4":  # SETTINGS_INITIAL_WINDOW_SIZE
                        new = int.from_bytes(payload[at + 2 : at + 6], "big")
                        self.windows |= {
                            one: left + new - self.first_window for one, left in self.windows.items() if one
                        }
                        self.first_window = new
                self.send(write_frame(SETTINGS, 1, 0))
            elif kind == RST_STREAM:
                self.reset.add(stream)
            elif kind == GOAWAY:
                self.away = True
            elif kind == WINDOW_UPDATE:
                self.windows[stream] = self.windows.get(stream, self.first_window) + int.from_bytes(payload, "big")
            if kind in (HEADERS, DATA) and flags & 1:
                self.ended.add(stream)
        return True

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := self.connection.recv(count - len(data))):
                raise EOFError
            data += part
        return data

    def close(self) -> None:
        self.connection.close()


class Gateway:
    """HAProxy with the role's configuration in a directory of its own, and its engines."""

    def __init__(self, **variables: Any) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="gw-", dir="/tmp"))  # a path of a socket has 107 characters at most
        self.etc, self.run, self.vllm = self.root / "gateway", self.root / "run", self.root / "vllm"
        for path in (self.etc / "tls", self.run, self.vllm / "roles"):
            path.mkdir(parents=True)
        write_certificate(self.etc / "tls/nobody.pem", "/dev/null")  # nobody has the key, as the role makes it
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.engines = {name: Engine(name, self.vllm / f"engines/{name}/api.sock", self.loop) for name in ENGINES}
        self.names = {served: engine for engine, names in ENGINES.items() for served in names}
        self.names |= variables.pop("names", {})
        self.states = dict.fromkeys(self.names, "up")
        self.port, self.tls_port = get_free_port(), get_free_port()
        self.ports = {engine: get_free_port() for engine in PORTED}
        tls = variables.pop("tls", False)
        prepare: Callable[[Path], None] = variables.pop("prepare", lambda etc: None)
        self.edit: tuple[str, str] = variables.pop("edit", ("", ""))
        self.variables: dict[str, Any] = {
            "ansible_managed": "Ansible managed",
            "serving_gateway_listen": [{"address": "127.0.0.1", "port": self.port, "tls": False}]
            + ([{"address": "127.0.0.1", "port": self.tls_port, "tls": True}] if tls else []),
            "serving_gateway_ports": list(self.ports.values()),
            "serving_gateway_names": sorted([*self.names, "idle name/of another profile"]),
            "serving_gateway_roles": sorted(self.names),
            "serving_gateway_paths": PATHS,
            "serving_gateway_wait_s": 30,
            "serving_gateway_waiting": 4,
            "serving_gateway_replicas": {},
            "serving_gateway_engines": [*ENGINES, "absent"],
            "__serving_gateway_asked": "[fd00::1]:8443",
            "__serving_gateway_fleet": {},
            "serving_gateway_max_tokens": 32768,
            **variables,
        }
        prepare(self.etc)
        for served in self.names:
            self.link(served)
        for name in ("models", "clients", "rights", "lists", "state", "ports"):
            self.write(name)
        (self.etc / "haproxy.cfg").write_text(self.render())
        self.log = self.root / "log"
        self.process: subprocess.Popen[bytes] | None = None

    def render(self) -> str:
        """The configuration, with the paths of this test and without the change of user."""
        environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
        environment.filters["edge.vllm_edge.backend_name"] = name_backend
        text = environment.from_string(TEMPLATE.read_text()).render(self.variables)
        places = {"/etc/vllm-edge/gateway": self.etc, "/run/vllm-edge-gateway": self.run}
        for place, here in (places | {"/run/vllm-edge-exporter": self.root / "exporter"}).items():
            text = text.replace(place, str(here))
        text = text.replace(*self.edit)
        return re.sub("^ +(user|group) .*\n", "", text.replace("/run/vllm-edge/", f"{self.vllm}/"), flags=re.M)

    def map(self, name: str) -> dict[str, str]:
        names = self.names
        engines = {*ENGINES, *names.values()}
        ports = {engine: str(self.ports.get(engine, "-")) for engine in engines}
        allowed = {client: [one for one in names if only in ("", one)] for client, only in CLIENTS.items()}

        def list_models(*names: str) -> str:
            return json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

        return {
            "models": {
                served: f"{name_backend(served)} {engine} {self.states[served]} "
                f"{served if self.states[served] == 'stand-in' else '-'} 55 {ports[engine]}"
                for served, engine in names.items()
            },
            "clients": {
                hashlib.sha256(KEYS[client].encode()).hexdigest(): "{} {} {}".format(
                    client, *LIMITS.get(client, (0, 0))
                )
                for client in CLIENTS
            },
            "rights": {f"{client}:{served}": "1" for client in CLIENTS for served in allowed[client]},
            "lists": {client: list_models(*allowed[client]) for client in CLIENTS}
            | {f":{one}": list_models(one) for one in names}
            | {
                f"{client}:": ", ".join(f"/roles/{name_backend(one)}/v1" for one in allowed[client])
                for client in CLIENTS
            },
            "state": {"host": '"h1"', "profile": '"p\\"1"', "generation": "7", "switch": "null"}
            | {f"role:{served}": f'"engine":"{engine}"' for served, engine in names.items()},
            "ports": {str(port): engine for engine, port in self.ports.items()},
        }[name]

    def write(self, name: str, content: dict[str, str] | None = None) -> str:
        entries = self.map(name) if content is None else content
        text = "".join(f"{key} {value}\n" for key, value in entries.items())
        (self.etc / f"{name}.map").write_text(text)
        return text

    def commit(self, name: str, content: dict[str, str] | None = None) -> None:
        text, path = self.write(name, content), self.etc / f"{name}.map"
        version = self.command(f"prepare map {path}").rpartition(":")[2].strip()
        if text:  # a payload of no line is an error
            assert self.command(f"add map @{version} {path} <<\n{text}").strip() == ""
        assert self.command(f"commit map @{version} {path}").strip() == ""

    def command(self, text: str) -> str:
        with socket.socket(socket.AF_UNIX) as admin:
            admin.settimeout(5)
            admin.connect(str(self.run / "admin.sock"))
            admin.sendall(text.encode() + b"\n")
            return b"".join(iter(lambda: admin.recv(65536), b"")).decode()

    def link(self, served: str) -> None:
        """Let the links of a name lead to its engines, which a comma separates."""
        for place, engine in enumerate(self.names[served].split(",")):
            path = self.vllm / f"roles/{name_backend(served)}{f'+{place}' if place else ''}.sock"
            new = path.with_suffix(".new")
            new.symlink_to(f"../engines/{engine}/api.sock")
            new.replace(path)

    def send_away(self, served: str, live: bool = True) -> None:
        """What the host's program does when a role's engine stops (without `live`: what a crash leaves)."""
        for path in self.vllm.glob(f"roles/{name_backend(served)}*.sock"):
            path.unlink()
        if live:
            self.states[served] = "away"
            self.commit("models")
            self.set_servers(served, 0)

    def bring_back(self, served: str, engine: str, state: str = "up") -> None:
        """What the host's program does when a role is back; a comma separates several engines."""
        self.names[served], self.states[served] = engine, state
        self.link(served)
        for name in ("models", "state", "rights"):
            self.commit(name)
        self.set_servers(served, len(engine.split(",")))

    def set_servers(self, served: str, ready: int) -> None:
        """Tell HAProxy how many of the servers of a name have an engine."""
        for place in range(self.variables["serving_gateway_replicas"].get(served, 1)):
            server = f"role_{name_backend(served)}/engine{f'-{place}' if place else ''}"
            assert self.command(f"set server {server} state {'ready' if place < ready else 'maint'}").strip() == ""

    def start(self) -> None:
        """Start the engines and HAProxy as its unit does."""
        for engine in self.engines.values():
            engine.start()
        words = [str(HAPROXY), "-Ws", "-S", str(self.run / "master.sock"), "-f", str(self.etc / "haproxy.cfg")]
        self.process = subprocess.Popen(words, stdout=self.log.open("wb"), stderr=subprocess.STDOUT)
        wait_until(lambda: b"Loading success" in self.log.read_bytes() or (self.process and self.process.poll()))
        assert self.process.poll() is None, self.log.read_text()
        wait_until(lambda: "architect" in self.command("show servers state"))

    def reload(self) -> None:
        """What `systemctl reload` does; it returns when the new worker answers, and no other does."""
        assert self.process
        old = self.get_workers()
        # A master that has just started executes itself once more, and may lose a signal meanwhile.
        for _ in range(6):
            before = self.log.read_bytes().count(b"Loading success")
            self.process.send_signal(signal.SIGUSR2)
            with contextlib.suppress(AssertionError):
                wait_until(lambda before=before: self.log.read_bytes().count(b"Loading success") > before, 4)
                wait_until(lambda: not any(map(self.is_listening, old)))
                return
        raise AssertionError(self.log.read_text())

    def is_listening(self, worker: int) -> bool:
        """Whether a process takes commands on the admin socket, which old and new workers share for a moment."""
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        sockets = {f"socket:[{row[6]}]" for row in rows if row[-1].startswith(f"{self.run}/admin.sock")}
        try:
            return any(str(file.readlink()) in sockets for file in Path(f"/proc/{worker}/fd").iterdir())
        except FileNotFoundError:  # it has ended, or closed a file meanwhile
            return Path(f"/proc/{worker}/fd").exists()

    def get_workers(self) -> list[int]:
        assert self.process
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return sorted(map(int, path.read_text().split()))

    def get_memory_mib(self) -> float:
        """The resident memory of all workers."""
        text = "".join(Path(f"/proc/{worker}/status").read_text() for worker in self.get_workers())
        return sum(map(int, re.findall(r"VmRSS:\s+(\d+)", text))) / 1024

    def get_log(self, request_id: str) -> dict[str, Any]:
        lines = wait_until(lambda: [one for one in self.read_log() if one["request_id"] == request_id])
        return dict(lines[0])

    def read_log(self) -> list[dict[str, Any]]:
        """The access log; each of its lines must be JSON."""
        text = self.log.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith("{")]

    def ask(self, raw: bytes, port: int = 0, timeout: float = 30) -> Answer:
        """Send one request on a connection of its own and read the answer."""
        connection = Connection(port or self.port, timeout)
        try:
            connection.send(raw)
            return connection.read()
        finally:
            connection.close()

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.stop()
        if self.process:
            workers = self.get_workers() if self.process.poll() is None else []
            self.process.terminate()
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            self.process.wait(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        shutil.rmtree(self.root)
