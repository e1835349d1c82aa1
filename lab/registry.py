# SPDX-License-Identifier: Apache-2.0
"""Put an image of the local Docker Engine into the directory that the lab's registry serves, its layers as they are.

Nothing is pushed, so the registry takes nothing from anybody. `docker push` would also compress each layer with one
core, which takes a minute for an image that never leaves this machine, and every host would unpack it again. Layers may
be uncompressed (`rootfs.diff.tar` of the image manifest, version 2, schema 2). The directory is that of the registry's
driver `filesystem` (distribution/distribution, registry/storage/paths.go).
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import IO, Any

from lab.docker import docker_command

CHUNK = 2**20
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar"
# What older and newer Engines write into an archive beside configuration and layers.
NO_BLOBS = ("/VERSION", "/json", "repositories", "index.json", "oci-layout")


class Repository:
    """One repository below the root directory of a registry."""

    def __init__(self, root: Path, name: str) -> None:
        self.blobs = root / "docker/registry/v2/blobs/sha256"
        self.place = root / "docker/registry/v2/repositories" / name

    def put(self, source: IO[bytes]) -> dict[str, Any]:
        """Store a stream as a blob; returns its digest and size."""
        self.blobs.mkdir(parents=True, exist_ok=True)
        total = hashlib.sha256()
        partial = self.blobs / "partial"
        with partial.open("wb") as file:
            while chunk := source.read(CHUNK):
                total.update(chunk)
                file.write(chunk)
        size = partial.stat().st_size
        target = self.blobs / total.hexdigest()[:2] / total.hexdigest() / "data"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(target)
        return {"digest": f"sha256:{total.hexdigest()}", "size": size}

    def link(self, place: str, digest: str) -> None:
        """Let a name of this repository stand for a blob."""
        link = self.place / place / "link"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.write_text(digest)

    def put_manifest(self, tag: str, manifest: dict[str, Any]) -> None:
        """Name an image whose blobs are there; the tag comes last, so that it never names half an image."""
        for blob in (manifest["config"], *manifest["layers"]):
            self.link(f"_layers/{blob['digest'].replace(':', '/')}", blob["digest"])
        digest = self.put(io.BytesIO(json.dumps(manifest).encode()))["digest"]
        for place in ("_manifests/revisions", f"_manifests/tags/{tag}/index"):
            self.link(f"{place}/{digest.replace(':', '/')}", digest)
        self.link(f"_manifests/tags/{tag}/current", digest)


def store(image: str, root: Path, repository: str, tag: str) -> None:
    """Copy an image of the local Engine to a repository below the registry's root directory."""
    target = Repository(root, repository)
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
                blobs[entry.name] = target.put(file)
    if saving.returncode != 0 or not contents:
        raise SystemExit(f"lab: docker save {image} failed with exit status {saving.returncode}")

    def blob(name: str) -> dict[str, Any]:
        return blobs[name] if name in blobs else blobs[links[name].removeprefix("../")]

    target.put_manifest(
        tag,
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, **blob(contents[0]["Config"])},
            "layers": [{"mediaType": LAYER, **blob(name)} for name in contents[0]["Layers"]],
        },
    )
