#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the model hub that the unmodified huggingface_hub client downloads from.

DIR/<owner>/<name>/ is a model repository, its files the content of the branch `main`. The commit of `main` is computed
from that content: the same files are the same commit anywhere, and a changed file is a new one. Large files answer as
the hub's LFS files do (sha256 as ETag), the others with their git blob id.

DIR/gated.json, where it exists, names gated repositories and the token that opens each: {"owner/name": "hf_..."}.
It is read on every request. Standard library only; one JSON line per request on standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".model", ".pt", ".pth")
LFS_NAMES = ("tokenizer.json",)
LFS_BYTES = 10 * 2**20
CHUNK = 2**20
REPOSITORY = r"(?P<repo>[\w.-]+/[\w.-]+)"
API = re.compile(rf"^/api/models/{REPOSITORY}(?:/(?P<verb>revision|tree|paths-info|refs)(?:/(?P<rest>.+))?)?$")
RESOLVE = re.compile(rf"^/{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)$")
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
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.blob_id

    @property
    def sibling(self) -> dict[str, Any]:
        """As model_info lists it."""
        lfs = {"lfs": {"sha256": self.sha256, "size": self.size, "pointerSize": len(self.pointer)}} if self.lfs else {}
        return {"rfilename": self.name, "size": self.size, "blobId": self.blob_id, **lfs}

    @property
    def entry(self) -> dict[str, Any]:
        """As the tree lists it."""
        lfs = {"lfs": {"oid": self.sha256, "size": self.size, "pointerSize": len(self.pointer)}} if self.lfs else {}
        return {"type": "file", "path": self.name, "size": self.size, "oid": self.blob_id, **lfs}

    @property
    def pointer(self) -> bytes:
        return lfs_pointer(self.sha256, self.size)


def lfs_pointer(sha256: str, size: int) -> bytes:
    """What git keeps in place of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@lru_cache(maxsize=4096)
def read_file(name: str, path: Path, size: int, mtime_ns: int) -> File:
    """Hashes once per content: size and mtime are the key, as they are for everybody who trusts a file system."""
    lfs = path.suffix in LFS_SUFFIXES or path.name in LFS_NAMES or size >= LFS_BYTES
    with path.open("rb") as handle:
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

    def entries(self, folder: str, recursive: bool) -> list[dict[str, Any]]:
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        inside = [file for file in self.files if file.name.startswith(prefix)]
        if prefix and not inside:
            raise Refused(HTTPStatus.NOT_FOUND, "EntryNotFound", f"{folder} does not exist on this revision")
        folders: dict[str, list[File]] = {}
        for file in inside:
            parts = file.name[len(prefix) :].split("/")[:-1]
            for depth in range(1, len(parts) + 1):
                folders.setdefault(prefix + "/".join(parts[:depth]), []).append(file)
        entries = [file.entry for file in inside if recursive or "/" not in file.name[len(prefix) :]]
        for name, content in folders.items():
            if recursive or "/" not in name[len(prefix) :]:
                oid = git_blob_id("".join(file.blob_id for file in content).encode())
                entries.append({"type": "directory", "path": name, "size": 0, "oid": oid})
        return sorted(entries, key=lambda entry: str(entry["path"]))


def load(root: Path, name: str) -> Repository:
    folder = root / name
    if ".." in name.split("/") or name.startswith(".") or not folder.is_dir():
        raise Refused(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
    files, modified = [], 0.0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = path.stat()
        modified = max(modified, status.st_mtime)
        files.append(read_file(str(path.relative_to(folder)), path, status.st_size, status.st_mtime_ns))
    return Repository(name, tuple(files), modified)


def gate(root: Path, repository: str) -> str | None:
    """The token that opens a gated repository; None where it is open to all."""
    try:
        gates = json.loads((root / "gated.json").read_text())
    except FileNotFoundError:
        return None
    token = gates.get(repository)
    return str(token) if token is not None else None


def check_gate(root: Path, repository: str, authorization: str | None) -> None:
    """Like the hub: what a repository is called and holds is public, its files are not."""
    token = gate(root, repository)
    if token is None or authorization == f"Bearer {token}":
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


def describe(repository: Repository, gated: bool, blobs: bool) -> dict[str, Any]:
    siblings = [file.sibling if blobs else {"rfilename": file.name} for file in repository.files]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(repository.modified))
    return {
        "_id": repository.commit[:24],
        "id": repository.name,
        "modelId": repository.name,
        "author": repository.name.split("/")[0],
        "sha": repository.commit,
        "lastModified": stamp,
        "createdAt": stamp,
        "private": False,
        "disabled": False,
        "gated": "manual" if gated else False,
        "downloads": 0,
        "likes": 0,
        "tags": ["transformers", "safetensors"],
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "siblings": siblings,
    }


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path, port: int, address: str = "0.0.0.0") -> None:
        super().__init__((address, port), Handler)
        self.root = root
        self.log_lock = threading.Lock()
        self.log = sys.stdout


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub
    sent = 0

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.sent = 0
        url = urlsplit(self.path)
        path = unquote(url.path)
        # A body that is not read would be taken for the next request.
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode(errors="replace")
        try:
            if match := API.match(path):
                query = parse_qs(url.query, keep_blank_values=True)
                self.send_json(self.api(match["repo"], match["verb"], match["rest"] or "", query, body))
            elif match := RESOLVE.match(path):
                self.resolve(match["repo"], match["revision"], match["path"])
            elif path == "/healthz":
                self.send_json({"status": "ok"})
            else:
                raise Refused(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        except Refused as refused:
            error = {"error": refused.message}
            self.send_json(error, refused.status, X_Error_Code=refused.code, X_Error_Message=refused.message)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def api(self, name: str, verb: str | None, rest: str, query: dict[str, list[str]], body: str) -> Any:
        repository = load(self.server.root, name)
        if verb == "tree":
            revision, _, folder = rest.partition("/")
            recursive = query.get("recursive", ["false"])[0].lower() in ("true", "1")
            return repository.at(revision).entries(folder, recursive)
        if verb == "paths-info":
            wanted = parse_qs(body).get("paths", []) if "=" in body else json.loads(body or "{}").get("paths", [])
            return [file.entry for file in repository.at(rest).files if file.name in wanted]
        if verb == "refs":
            branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commit}
            return {"branches": [branch], "tags": [], "converts": []}
        gated = gate(self.server.root, name) is not None
        return describe(repository.at(rest or "main"), gated, blobs="blobs" in query)

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository = load(self.server.root, name).at(revision)
        check_gate(self.server.root, name, self.headers.get("Authorization"))
        file = repository.file(path)
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.lfs:
            headers |= {"X-Linked-ETag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
        part = parse_range(self.headers.get("Range"), file.size)
        first, last = part or (0, file.size - 1)
        if part:
            headers["Content-Range"] = f"bytes {first}-{last}/{file.size}"
        status = HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK
        self.send_head(status, last - first + 1, "application/octet-stream", headers)
        if self.command == "HEAD":
            return
        with file.path.open("rb") as handle:
            handle.seek(first)
            left = last - first + 1
            while left > 0 and (chunk := handle.read(min(CHUNK, left))):
                self.wfile.write(chunk)
                left -= len(chunk)
                self.sent += len(chunk)

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
        with self.server.log_lock:
            print(json.dumps(record), file=self.server.log, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Serve model repositories to huggingface_hub.")
    parser.add_argument("--root", type=Path, required=True, help="directory of <owner>/<name> repositories")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--address", default="0.0.0.0", help="address to listen on")
    arguments = parser.parse_args(argv)
    with Hub(arguments.root, arguments.port, arguments.address) as hub:
        hub.serve_forever()


if __name__ == "__main__":
    main()
