# SPDX-License-Identifier: Apache-2.0
"""An image gets into the lab's registry as `docker save` of older and of newer Engines writes it."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import lab.registry

CONFIG, BASE, TOP = b'{"rootfs": {}}', b"base" * 1000, b"top"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def registry() -> Iterator[Any]:
    """As much of a registry as takes an image: it checks digests, and that a manifest's blobs are there."""
    blobs: dict[str, bytes] = {}
    manifests: dict[str, Any] = {}
    uploads: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, status: int, location: str = "") -> None:
            self.send_response(status)
            if location:
                self.send_header("Location", location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers["Content-Length"]))

        def do_POST(self) -> None:
            self.answer(202, f"http://127.0.0.1:{made.server_port}/upload/{len(uploads)}?state=a")

        def do_PATCH(self) -> None:
            uploads[self.path] = self.body()
            self.answer(202, f"http://127.0.0.1:{made.server_port}{self.path}")

        def do_PUT(self) -> None:
            if "/manifests/" in self.path:
                manifest = json.loads(self.body())
                wanted = [manifest["config"], *manifest["layers"]]
                known = all(len(blobs.get(item["digest"], b"")) == item["size"] for item in wanted)
                manifests[self.path] = manifest
                self.answer(201 if known else 400)
                return
            place, _, name = self.path.partition("&digest=")
            blobs[name] = uploads[place]
            self.answer(201 if digest(blobs[name]) == name else 400)

        def log_message(self, *_: object) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.blobs, made.manifests = blobs, manifests  # type: ignore[attr-defined]
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def saved(path: Path, layout: str) -> Path:
    """What `docker save` writes of an image whose first layer stands in it twice."""
    with tarfile.open(path, "w") as archive:

        def add(name: str, content: bytes = b"", link: str = "") -> str:
            entry = tarfile.TarInfo(name)
            entry.size, entry.linkname = len(content), link
            entry.type = tarfile.SYMTYPE if link else tarfile.REGTYPE
            archive.addfile(entry, io.BytesIO(content))
            return name

        if layout == "older":
            add("one/VERSION", b"1.0")
            layers = [add("one/layer.tar", BASE), add("two/layer.tar", TOP), "three/layer.tar"]
            add("three/layer.tar", link="../one/layer.tar")
            config = add("0123.json", CONFIG)
            add("repositories", b"{}")
        else:
            names = {content: f"blobs/sha256/{digest(content).partition(':')[2]}" for content in (BASE, TOP, CONFIG)}
            layers = [add(names[BASE], BASE), add(names[TOP], TOP), names[BASE]]
            config = add(names[CONFIG], CONFIG)
            add("index.json", b"{}")
            add("oci-layout", b"{}")
        add("manifest.json", json.dumps([{"Config": config, "Layers": layers}]).encode())
    return path


@pytest.mark.parametrize("layout", ["older", "newer"])
def test_an_image_as_docker_saves_it(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    archive = saved(tmp_path / "image.tar", layout)
    program = "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer)"
    monkeypatch.setattr(lab.registry, "docker_command", lambda: [sys.executable, "-c", program, str(archive)])
    lab.registry.push("image", registry.server_port, "vllm/vllm-openai", "v1")
    (manifest,) = registry.manifests.values()
    assert list(registry.manifests) == ["/v2/vllm/vllm-openai/manifests/v1"]
    assert manifest["config"]["digest"] == digest(CONFIG), "the image keeps its id"
    assert [layer["digest"] for layer in manifest["layers"]] == [digest(BASE), digest(TOP), digest(BASE)]
    assert set(registry.blobs) == {digest(content) for content in (BASE, TOP, CONFIG)}


def test_an_image_that_is_not_there(registry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = saved(tmp_path / "image.tar", "newer")
    program = "import shutil, sys; shutil.copyfileobj(open(sys.argv[1], 'rb'), sys.stdout.buffer); sys.exit(1)"
    monkeypatch.setattr(lab.registry, "docker_command", lambda: [sys.executable, "-c", program, str(archive)])
    with pytest.raises(SystemExit, match="docker save image failed with exit status 1"):
        lab.registry.push("image", registry.server_port, "vllm/vllm-openai", "v1")
    assert registry.manifests == {}, "half an image has no name"
