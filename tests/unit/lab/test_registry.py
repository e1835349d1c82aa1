# SPDX-License-Identifier: Apache-2.0
"""An image gets into the lab's registry as `docker save` of older and of newer Engines writes it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

import lab.registry

PROGRAM = ["sh", "-c", 'cat "$0"']
CONFIG, BASE, TOP = b'{"rootfs": {}}', b"base" * 1000, b"top"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Served:
    """What Debian's docker-registry 2.8.2 answers from the directory of its driver `filesystem`."""

    def __init__(self, root: Path, repository: str) -> None:
        self.blobs = root / "docker/registry/v2/blobs"
        self.repository = root / "docker/registry/v2/repositories" / repository

    def read(self, name: str) -> bytes:
        kind, _, value = name.partition(":")
        return (self.blobs / kind / value[:2] / value / "data").read_bytes()

    def manifest(self, tag: str) -> bytes:
        name = (self.repository / "_manifests/tags" / tag / "current/link").read_text()
        assert (self.repository / "_manifests/revisions" / name.replace(":", "/") / "link").read_text() == name
        return self.read(name)

    def blob(self, name: str) -> bytes:
        assert (self.repository / "_layers" / name.replace(":", "/") / "link").read_text() == name
        return self.read(name)


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
def test_an_image_as_docker_saves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    archive = saved(tmp_path / "image.tar", layout)
    monkeypatch.setattr(lab.registry, "docker_command", lambda: [*PROGRAM, str(archive)])
    lab.registry.store("image", tmp_path / "root", "vllm/vllm-openai", "v1")
    served = Served(tmp_path / "root", "vllm/vllm-openai")
    manifest = json.loads(served.manifest("v1"))
    assert manifest["config"]["digest"] == digest(CONFIG), "the image keeps its id"
    assert [layer["digest"] for layer in manifest["layers"]] == [digest(BASE), digest(TOP), digest(BASE)]
    items = [manifest["config"], *manifest["layers"]]
    assert [served.blob(item["digest"]) for item in items] == [CONFIG, BASE, TOP, BASE]
    assert all(item["size"] == len(served.blob(item["digest"])) for item in manifest["layers"])
