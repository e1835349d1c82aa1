# SPDX-License-Identifier: Apache-2.0
"""Put an image of the local Docker Engine into the lab's registry, its layers as they are.

`docker push` compresses each layer with one core, which takes a minute for an image that never leaves this machine, and
every host unpacks it again. Layers may be uncompressed (`rootfs.diff.tar` of the image manifest, version 2, schema 2).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import subprocess
import tarfile
from collections.abc import Iterator
from typing import IO, Any
from urllib.parse import urlsplit

from lab.docker import docker_command

CHUNK = 2**20
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"
# What older and newer Engines write into an archive beside configuration and layers.
NO_BLOBS = ("/VERSION", "/json", "repositories", "index.json", "oci-layout")


class Registry:
    """One repository of a registry on this machine."""

    def __init__(self, port: int, repository: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.path = f"/v2/{repository}"

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> str:
        """Send one request that has to succeed; returns the answer's Location."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(method, path, body=body, headers=named)
        answer = self.connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise SystemExit(f"lab: the registry answered {method} {path} with {answer.status}: {text[:300]!r}")
        return answer.headers.get("Location", "")

    def put_blob(self, source: IO[bytes], size: int) -> dict[str, Any]:
        """Upload `size` bytes of a stream; returns their digest and size."""
        digest = hashlib.sha256()

        def chunks() -> Iterator[bytes]:
            while chunk := source.read(CHUNK):
                digest.update(chunk)
                yield chunk

        place = self.call("POST", f"{self.path}/blobs/uploads/")
        kind = "application/octet-stream"
        place = self.call("PATCH", relative(place), chunks(), Content_Type=kind, Content_Length=str(size))
        name = f"sha256:{digest.hexdigest()}"
        place = relative(place)
        self.call("PUT", f"{place}{'&' if '?' in place else '?'}digest={name}", Content_Length="0")
        return {"digest": name, "size": size}

    def put_manifest(self, tag: str, manifest: dict[str, Any]) -> None:
        """Name an image whose blobs are there."""
        self.call("PUT", f"{self.path}/manifests/{tag}", json.dumps(manifest), Content_Type=MANIFEST)


def relative(location: str) -> str:
    """The registry answers with whole addresses."""
    parts = urlsplit(location)
    return f"{parts.path}?{parts.query}" if parts.query else parts.path


def push(image: str, port: int, repository: str, tag: str) -> None:
    """Copy an image of the local Engine to a repository of the registry on 127.0.0.1."""
    registry = Registry(port, repository)
    blobs: dict[str, dict[str, Any]] = {}
    links: dict[str, str] = {}
    contents: list[dict[str, Any]] = []
    with (
        subprocess.Popen([*docker_command(), "save", image], stdout=subprocess.PIPE) as saving,
        tarfile.open(fileobj=saving.stdout, mode="r|") as archive,
    ):
        for entry in archive:
            file = archive.extractfile(entry) if entry.isreg() else None
            if file is None:
                # A layer that stands in the image twice is stored once.
                links |= {entry.name: entry.linkname} if entry.issym() or entry.islnk() else {}
            elif entry.name == "manifest.json":
                contents = json.load(file)
            elif not entry.name.endswith(NO_BLOBS):
                blobs[entry.name] = registry.put_blob(file, entry.size)
    if saving.returncode != 0 or not contents:
        raise SystemExit(f"lab: docker save {image} failed with exit status {saving.returncode}")

    def blob(name: str) -> dict[str, Any]:
        return blobs[name] if name in blobs else blobs[links[name].removeprefix("../")]

    registry.put_manifest(
        tag,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, **blob(contents[0]["Config"])},
            "layers": [{"mediaType": LAYER, **blob(name)} for name in contents[0]["Layers"]],
        },
    )
