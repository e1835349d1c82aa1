#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the model hub that the unmodified huggingface_hub client downloads from.

DIR/<owner>/<name>/ is a model repository, its files the content of the branch `main`. The commit of `main` is computed
from that content: the same files are the same commit anywhere, and a changed file is a new one.

Small files are answered with their content, and with their git blob id as ETag. Large files are redirected, as the
hub's LFS files are: to another port, with an address that is signed and expires. That port answers 403 to an address
that is neither, 400 to a request with an Authorization header, as object storage does, and 400 to one for more than
50 GB at once (https://github.com/huggingface/xet-core/issues/238). With xet=True the redirect also offers Xet, of which
there is no more here than the offer: a client that accepts it fails.

What is set while it runs is read on every request from the directory of --state, which need not exist:

<owner>/<name>/  further repositories
gated.json    gated repositories and the token that opens each: {"owner/name": "hf_..."}. A token that opens another
              repository is an account without access (403); one that opens none is no token (401), as at the hub.
faults.json   a list; of those whose "path" (a shell pattern) is the request's, the first that has "times" left acts:
              {"path": "*/a.safetensors", "method": "GET", "times": 1, "break_after_bytes": 100000}
              status             answers with this HTTP status in place of the content, in "retry_after_s" as said
              break_after_bytes  closes the connection after that many bytes of the body; 0 before the answer
              bytes_per_second   is slow
              corrupt            flips the first byte that goes out
              expires_in_s       an address that is given away holds so long (3600)
              Those of the body act where the body goes out, of large files at /cdn/<owner>/<name>/<sha256>/<path>.
              "method" is GET where it is not given, "*" any; without "times" a fault stays. A file that is
              written again starts its counts anew.

Standard library only; one JSON line per request on standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".model", ".pt", ".pth")
LFS_NAMES = ("tokenizer.json",)
# What the hub tells of a model's config.json beside its files.
CONFIG_KEYS = ("architectures", "model_type", "quantization_config")
LFS_BYTES = 10 * 2**20
CHUNK = 2**20
REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"
API = re.compile(rf"^/api/models/{REPOSITORY}(?:/(?P<verb>revision|tree)/(?P<revision>.+))?$")
RESOLVE = re.compile(rf"^/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")
CDN = re.compile(rf"^/cdn/{REPOSITORY}/(?P<sha256>[0-9a-f]{{64}})/(?P<path>.+)$")
SIGNING_KEY = b"known to the hub and to its storage"
RANGE = re.compile(r"^bytes=(?P<first>\d*)-(?P<last>\d*)$")


class Refused(Exception):
    """An answer that is not the one asked for, with the header by which the client tells errors apart."""

    def __init__(self, status: HTTPStatus, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class File:
    name: str
    path: Path
    size: int
    blob_id: str
    sha256: str
    lfs: bool

    @property
    def sibling(self) -> dict[str, Any]:
        return {"rfilename": self.name, "size": self.size, "blobId": self.blob_id, **self.describe_lfs("sha256")}

    @property
    def entry(self) -> dict[str, Any]:
        lfs = self.describe_lfs("oid")
        return {"type": "file", "path": self.name, "size": self.size, "oid": self.blob_id, **lfs}

    def describe_lfs(self, hash_key: str) -> dict[str, Any]:
        pointer = lfs_pointer(self.sha256, self.size)
        return {"lfs": {hash_key: self.sha256, "size": self.size, "pointerSize": len(pointer)}} if self.lfs else {}


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git keeps in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@lru_cache(maxsize=4096)
def read_file(name: str, path: Path, size: int, mtime_ns: int) -> File:
    """Hashes once per content: size and mtime are the key, as they are for everybody who trusts a file system."""
    lfs = path.suffix in LFS_SUFFIXES or path.name in LFS_NAMES or size >= LFS_BYTES
    with path.open("rb", buffering=0) as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    blob_id = git_blob_id(lfs_pointer(sha256, size) if lfs else path.read_bytes())
    return File(name, path, size, blob_id, sha256, lfs)


@dataclass(frozen=True)
class Repository:
    name: str
    files: tuple[File, ...]
    modified: float

    @property
    def commit(self) -> str:
        lines = [self.name, *(f"{file.blob_id} {file.name}" for file in self.files)]
        return hashlib.sha1("\n".join(lines).encode(), usedforsecurity=False).hexdigest()

    def at(self, revision: str) -> Repository:
        if revision not in ("main", "refs/heads/main", self.commit):
            raise Refused(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self

    def file(self, name: str) -> File:
        for file in self.files:
            if file.name == name:
                return file
        raise Refused(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")


def load(roots: Sequence[Path], name: str) -> Repository:
    folder = next((root / name for root in roots if (root / name).is_dir()), None)
    if ".." in name.split("/") or name.startswith(".") or folder is None:
        raise Refused(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
    files, modified = [], 0.0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = path.stat()
        modified = max(modified, status.st_mtime)
        files.append(read_file(str(path.relative_to(folder)), path, status.st_size, status.st_mtime_ns))
    return Repository(name, tuple(files), modified)


@dataclass(frozen=True)
class Fault:
    """What happens to a request; the key tells it from others of the same file."""

    key: tuple[int, int]
    path: str
    method: str = "GET"
    times: int | None = None
    status: int = 0
    break_after_bytes: int | None = None
    bytes_per_second: int = 0
    corrupt: bool = False
    retry_after_s: int | None = None
    expires_in_s: int = 3600

    @property
    def of_body(self) -> bool:
        """Whether it acts on the content instead of on the answer as a whole."""
        return bool(self.break_after_bytes or self.bytes_per_second or self.corrupt)


class Settings:
    """What can be set while the hub runs, by files in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._used: dict[tuple[int, int], int] = {}

    def gates(self) -> dict[str, str]:
        """Gated repositories, and the token that opens each."""
        try:
            found: dict[str, str] = json.loads((self.directory / "gated.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def fault(self, method: str, path: str, of_body: bool) -> Fault | None:
        """What is to happen to this request, or to the content that it gets; it counts as having happened."""
        file = self.directory / "faults.json"
        try:
            text, written = file.read_text(), file.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        with self._lock:
            for index, values in enumerate(json.loads(text)):
                fault = Fault(key=(written, index), **values)
                used = self._used.get(fault.key, 0)
                matches = fault.method in ("*", method) and fnmatchcase(path, fault.path)
                if matches and (fault.times is None or used < fault.times):
                    if fault.of_body != of_body:
                        return None
                    self._used[fault.key] = used + 1
                    return fault
        return None


def check_token(gates: dict[str, str], authorization: str | None) -> None:
    """Like the hub: a token that it does not know is refused everywhere."""
    if authorization and authorization not in {f"Bearer {token}" for token in gates.values()}:
        raise Refused(HTTPStatus.UNAUTHORIZED, "", "Invalid credentials in Authorization header")


def check_gate(gates: dict[str, str], repository: str, authorization: str | None) -> None:
    """Like the hub: what a repository is called and holds is public, its files are not."""
    if repository not in gates or authorization == f"Bearer {gates[repository]}":
        return
    status = HTTPStatus.FORBIDDEN if authorization else HTTPStatus.UNAUTHORIZED
    raise Refused(
        status, "GatedRepo", f"Access to model {repository} is restricted and you are not in the authorized list."
    )


def parse_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte asked for; None for the whole file."""
    match = RANGE.match(header or "")
    if match is None or not (match["first"] or match["last"]):
        return None
    if not match["first"]:
        first, last = max(size - int(match["last"]), 0), size - 1
    else:
        first, last = int(match["first"]), min(int(match["last"] or size - 1), size - 1)
    if first >= size or first > last:
        raise Refused(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange", f"the file has {size} bytes")
    return first, last


def sign(path: str, expires: int) -> str:
    return hmac.new(SIGNING_KEY, f"{path}\n{expires}".encode(), "sha256").hexdigest()


def config_of(repository: Repository) -> dict[str, Any]:
    found = next((file for file in repository.files if file.name == "config.json"), None)
    return dict(json.loads(found.path.read_text())) if found else {}


def describe(repository: Repository, gated: bool, blobs: bool) -> dict[str, Any]:
    siblings = [file.sibling if blobs else {"rfilename": file.name} for file in repository.files]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(repository.modified))
    return {
        "id": repository.name,
        "sha": repository.commit,
        "lastModified": stamp,
        "private": False,
        "gated": "manual" if gated else False,
        "config": {name: value for name, value in config_of(repository).items() if name in CONFIG_KEYS},
        "siblings": siblings,
    }


class Listener(ThreadingHTTPServer):
    """One of the hub's two ports."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], hub: Hub) -> None:
        super().__init__(address, Handler)
        self.hub = hub


class Hub(Listener):
    """The hub's own port. The port of the large files is served from the beginning, by a thread."""

    def __init__(
        self,
        root: Path,
        port: int,
        address: str = "127.0.0.1",
        state: Path | None = None,
        cdn_port: int = 0,
        xet: bool = False,
    ) -> None:
        super().__init__((address, port), self)
        self.roots = [root, state or root]
        self.settings = Settings(self.roots[-1])
        self.log_lock = threading.Lock()
        self.log = sys.stdout
        self.xet = xet
        self.ranges = True
        self.largest_answer_bytes = 50 * 10**9
        self.cdn = Listener((address, cdn_port), self)
        threading.Thread(target=self.cdn.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def server_close(self) -> None:
        self.cdn.shutdown()
        self.cdn.server_close()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Listener
    sent = 0

    def setup(self) -> None:
        super().setup()
        self.hub = self.server.hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.sent = 0
        self.fault: Fault | None = None
        url = urlsplit(self.path)
        path = unquote(url.path)
        try:
            self.fault = self.hub.settings.fault(self.command, path, of_body=False)
            if self.fault is not None and self.fault.break_after_bytes == 0:
                self.close_connection = True
                self.write_log(fault="closed")
                return
            if self.fault is not None and self.fault.status:
                status = HTTPStatus(self.fault.status)
                raise Refused(status, "", status.phrase)
            if self.server is self.hub.cdn:
                self.cdn(path, url.query)
                return
            check_token(self.hub.settings.gates(), self.headers.get("Authorization"))
            if match := API.match(path):
                repository = load(self.hub.roots, match["repo"]).at(match["revision"] or "main")
                gated, blobs = repository.name in self.hub.settings.gates(), "blobs=" in url.query
                tree = [file.entry for file in repository.files]
                self.send_json(tree if match["verb"] == "tree" else describe(repository, gated, blobs))
            elif match := RESOLVE.match(path):
                self.resolve(match["repo"], match["revision"], match["path"])
            elif path == "/healthz":
                self.send_json({"status": "ok"})
            else:
                raise Refused(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        except Refused as refused:
            error = {"error": refused.message}
            more = {"X_Error_Code": refused.code} if refused.code else {}
            if self.fault is not None and self.fault.retry_after_s is not None:
                more["Retry_After"] = str(self.fault.retry_after_s)
            self.send_json(error, refused.status, X_Error_Message=refused.message, **more)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = load(self.hub.roots, name).at(revision)
        check_gate(self.hub.settings.gates(), name, self.headers.get("Authorization"))
        file = repository.file(path)
        headers = {"X-Repo-Commit": repository.commit}
        if not file.lfs:
            self.send_file(file, headers | {"ETag": f'"{file.blob_id}"'})
            return
        headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
        if self.hub.xet:
            route = f"http://{self.headers['Host']}/api/models/{name}/xet-read-token/{repository.commit}"
            headers |= {"X-Xet-Hash": file.sha256, "Link": f'<{route}>; rel="xet-auth"'}
        place = f"/cdn/{name}/{file.sha256}/{quote(file.name)}"
        expires = int(time.time()) + (self.fault or Fault((0, 0), "")).expires_in_s
        host = self.headers["Host"].rpartition(":")[0] or self.headers["Host"]
        query = f"Expires={expires}&Signature={sign(unquote(place), expires)}"
        headers["Location"] = f"http://{host}:{self.hub.cdn.server_address[1]}{place}?{query}"
        self.send_head(HTTPStatus.FOUND, 0, "text/plain", headers)

    def cdn(self, path: str, query: str) -> None:
        """Answers for a large file to whom the hub has sent here."""
        match, given = CDN.match(path), parse_qs(query)
        expires, signature = (given.get(name, ["0"])[0] for name in ("Expires", "Signature"))
        if self.headers.get("Authorization"):
            raise Refused(HTTPStatus.BAD_REQUEST, "", "Only one auth mechanism allowed")
        if match is None or not hmac.compare_digest(signature, sign(path, int(expires))):
            raise Refused(HTTPStatus.FORBIDDEN, "", "The request signature does not match")
        if int(expires) < time.time():
            raise Refused(HTTPStatus.FORBIDDEN, "", "Request has expired")
        file = load(self.hub.roots, match["repo"]).file(match["path"])
        # Object storage has an ETag of its own, which is no hash of the content.
        self.send_file(file, {"ETag": f'"{file.blob_id[:32]}-7"'}, self.hub.largest_answer_bytes)

    def send_file(self, file: File, headers: dict[str, str], limit_bytes: int | None = None) -> None:
        part = parse_range(self.headers.get("Range"), file.size) if self.hub.ranges else None
        first, last = part or (0, file.size - 1)
        length = last - first + 1
        if limit_bytes is not None and length > limit_bytes:
            raise Refused(HTTPStatus.BAD_REQUEST, "", f"An answer has at most {limit_bytes} bytes")
        headers = {**headers, "Accept-Ranges": "bytes"}
        if part:
            headers["Content-Range"] = f"bytes {first}-{last}/{file.size}"
        status = HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK
        self.send_head(status, length, "application/octet-stream", headers)
        if self.command == "HEAD":
            return
        with file.path.open("rb") as handle:
            handle.seek(first)
            self.send_part(handle, length)

    def send_part(self, handle: BinaryIO, length: int) -> None:
        """Sends that much of the file, or what a fault leaves of it."""
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.settings.fault(self.command, path, of_body=True) or Fault((0, 0), "")
        end = length if fault.break_after_bytes is None else min(fault.break_after_bytes, length)
        # Slow means small steps, so that a client that waits for bytes sees some of them.
        step = max(1, fault.bytes_per_second // 10) if fault.bytes_per_second else CHUNK
        while self.sent < end and (chunk := handle.read(min(step, end - self.sent))):
            if fault.corrupt and self.sent == 0:
                chunk = bytes([chunk[0] ^ 0xFF]) + chunk[1:]
            self.wfile.write(chunk)
            self.sent += len(chunk)
            if fault.bytes_per_second:
                time.sleep(len(chunk) / fault.bytes_per_second)
        if end < length:
            self.close_connection = True

    def send_head(self, status: HTTPStatus, length: int, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def send_json(self, content: Any, status: HTTPStatus = HTTPStatus.OK, **headers: str) -> None:
        data = json.dumps(content).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.send_head(status, len(data), "application/json; charset=utf-8", named)
        if self.command != "HEAD":
            self.wfile.write(data)
            self.sent = len(data)

    def handle_one_request(self) -> None:
        self.status = 0
        super().handle_one_request()
        # Logged when it is over, so that the bytes are those that really went out.
        if self.status:
            self.write_log()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        self.status = int(code)

    def log_message(self, format: str, *arguments: Any) -> None:
        self.write_log(message=format % arguments)

    def write_log(self, **more: str) -> None:
        record = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "client": self.client_address[0],
            "method": getattr(self, "command", None),
            "path": getattr(self, "path", None),
            "status": self.status,
            "bytes": self.sent,
            "range": self.headers.get("Range") if hasattr(self, "headers") else None,
            **more,
        }
        with self.hub.log_lock:
            print(json.dumps(record), file=self.hub.log, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serve model repositories to huggingface_hub.")
    parser.add_argument("--root", type=Path, required=True, help="directory of <owner>/<name> repositories")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--cdn-port", type=int, default=8082, help="port to which large files are redirected")
    parser.add_argument("--address", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--state", type=Path, default=Path("/var/lib/hub"), help="directory of what is set meanwhile")
    arguments = parser.parse_args(argv)
    with Hub(arguments.root, arguments.port, arguments.address, arguments.state, arguments.cdn_port) as hub:
        hub.serve_forever()


if __name__ == "__main__":
    main()
