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

CONFIG, BASE, TOP = b'{"rootfs": {}}', b"base" * 1000, b"top"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


BLOBS = {f"blobs/sha256/{digest(content)}": content for content in (BASE, TOP, CONFIG)}
NEWER = {**BLOBS, "index.json": b"{}", "oci-layout": b"{}"}
OLDER = {"one/VERSION": b"1.0", "one/layer.tar": BASE, "two/layer.tar": TOP, "0123.json": CONFIG, "repositories": b"{}"}
LAYERS = {"newer": [*BLOBS][:2] + [*BLOBS][:1], "older": ["one/layer.tar", "two/layer.tar", "three/layer.tar"]}
"""Of an image whose first layer stands in it twice; the older layout has a link for the second time."""


@pytest.mark.parametrize(("layout", "files", "config"), [("older", OLDER, "0123.json"), ("newer", NEWER, [*BLOBS][2])])
def test_an_image_as_docker_saves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, files: dict[str, bytes], config: str
) -> None:
    contents = json.dumps([{"Config": config, "Layers": LAYERS[layout]}]).encode()
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        for name, content in {**files, "manifest.json": contents}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("three/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, "../one/layer.tar"
        archive.addfile(link)
    monkeypatch.setattr(lab.registry, "docker_command", lambda: ["sh", "-c", 'cat "$0"', str(tmp_path / "image.tar")])
    lab.registry.store("image", tmp_path / "root", "vllm/vllm-openai", "v1")
    # What Debian's docker-registry 2.8.2 reads in the directory of its driver `filesystem`.
    place = tmp_path / "root/docker/registry/v2"
    repository = place / "repositories/vllm/vllm-openai"

    def read(name: str, linked: str) -> bytes:
        assert (repository / linked / name.replace(":", "/") / "link").read_text() == name
        return (place / "blobs/sha256" / name[7:9] / name[7:] / "data").read_bytes()

    manifest = json.loads(read((repository / "_manifests/tags/v1/current/link").read_text(), "_manifests/revisions"))
    items = [manifest["config"], *manifest["layers"]]
    assert [read(item["digest"], "_layers") for item in items] == [CONFIG, BASE, TOP, BASE], "the image keeps its id"
    assert [item["size"] for item in items] == [len(content) for content in (CONFIG, BASE, TOP, BASE)]
