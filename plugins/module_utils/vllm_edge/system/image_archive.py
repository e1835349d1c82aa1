# SPDX-License-Identifier: Apache-2.0
"""Reading of an archive of `docker save`, before Docker loads it: which image it holds, and that it holds no other.

`docker image load` takes every name in an archive, and its two image stores read different files of it. So the archive
may hold exactly one image under one name, in members that no two readers can understand differently.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ..text import shorten, shown

MOST_MEMBERS = 4096
LARGEST_DOCUMENT = 8 * 1024 * 1024
"""Bytes of a manifest or configuration, and of an extended header of the archive."""

_FILE = re.compile(
    r"manifest\.json|index\.json|oci-layout|repositories|blobs/sha256/[0-9a-f]{64}"
    r"|[0-9a-f]{64}(\.json|\.tar|/layer\.tar|/json|/VERSION)"
)
_DIRECTORY = re.compile(r"blobs(/sha256)?|[0-9a-f]{64}")
_CONFIG = re.compile(r"(?:blobs/sha256/)?([0-9a-f]{64})(?:\.json)?")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_HUB = re.compile(r"^docker\.io/(library/)?")


class ArchiveError(Exception):
    """The archive must not be loaded. The text says why, as the end of a sentence that begins with its path."""


class _BoundedFile:
    """A file that a reader of archives cannot make to read much at once, as the size in a header asks it to."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LARGEST_DOCUMENT:
            raise ArchiveError(f"has a header of {size} bytes")
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        if offset < 0:
            raise ArchiveError("has a member of a negative size")
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


def _read_members(path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members of an uncompressed archive. Only one of them is kept in memory. Raises ArchiveError."""
    if not path.is_file():
        raise ArchiveError("is no archive of `docker save`, or not all of one: no file is there")
    try:
        with path.open("rb") as file, tarfile.open(fileobj=_BoundedFile(file), mode="r:") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                tar.members.clear()
                yield tar, member
    except (OSError, tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise ArchiveError(
            f"is no uncompressed archive of `docker save`, or not all of one: {shorten(str(error), 100)}"
        ) from error


def _list_members(path: Path) -> dict[str, tuple[int, int]]:
    """Return offset and size of each file in an archive, by name. Raises ArchiveError."""
    found: dict[str, tuple[int, int]] = {}
    for tar, member in _read_members(path):
        name = posixpath.normpath(member.name)
        said = shown(shorten(member.name, 60))
        if len(found) >= MOST_MEMBERS:
            raise ArchiveError(f"has more than {MOST_MEMBERS} members")
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
            raise ArchiveError(f"has {said}, which is neither a file nor a directory; write it with Docker 25 or newer")
        if tar.pax_headers or any(key.startswith("GNU.") for key in member.pax_headers):
            raise ArchiveError(f"has {said} with headers that not every reader understands alike")
        known = _DIRECTORY if member.isdir() else _FILE
        if member.size < 0 or ".." in member.name or not known.fullmatch(name):
            raise ArchiveError(f"has {said}, which `docker save` does not write")
        if name in found:
            raise ArchiveError(f"has {said} twice")
        found[name] = (member.offset_data, member.size)
    return found


@dataclass(frozen=True)
class _Archive:
    path: Path
    members: Mapping[str, tuple[int, int]]

    def read(self, name: str) -> bytes:
        """Return the content of a member that is a document. Raises ArchiveError."""
        if name not in self.members:
            raise ArchiveError(f"is no archive of `docker save`, or not all of one: it has no {shorten(name, 80)}")
        offset, size = self.members[name]
        if size > LARGEST_DOCUMENT:
            raise ArchiveError(f"has {name} of {size} bytes")
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def read_blob(self, digest: object) -> tuple[str, Mapping[str, Any]]:
        """Return the digest and the content of a JSON document that is named by its hash. Raises ArchiveError."""
        match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
        if match is None:
            raise ArchiveError(f"names {shown(shorten(str(digest), 60))}, which is no digest")
        content = self.read(f"blobs/sha256/{match[1]}")
        if hashlib.sha256(content).hexdigest() != match[1]:
            raise ArchiveError(f"has another content than its name says in blobs/sha256/{match[1]}")
        return match[0], _parse(content, match[0], dict)


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Docker's own reader of JSON takes a key in any case, and the last one of several.
    if len({key.casefold() for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands in it twice")
    return dict(pairs)


def _parse(content: bytes, name: str, kind: type[Any]) -> Any:
    """Return the list or object in a document. Raises ArchiveError."""
    try:
        data = json.loads(content, object_pairs_hook=_read_pairs)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"has a {name} that is no JSON: {shorten(str(error), 80)}") from error
    if not isinstance(data, kind):
        raise ArchiveError(f"has a {name} of another form than `docker save` writes")
    return data


def _get(data: Mapping[str, Any], key: str, kind: type[Any]) -> Any:
    value = data.get(key)
    return value if isinstance(value, kind) else kind()


def _get_objects(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    return [item for item in _get(data, key, list) if isinstance(item, dict)]


def _check_names(names: list[Any], base: str) -> None:
    """Raise ArchiveError unless the only name is the base image's."""
    short = [_HUB.sub("", name) if isinstance(name, str) else "" for name in names]
    if short != [_HUB.sub("", base)]:
        said = ", ".join(shorten(str(name), 100) for name in names[:5]) or "an image without a name"
        raise ArchiveError(f"holds {said}, and vllm_image_base is {base}: exactly that one name is expected")


def _check_index(archive: _Archive, base: str, config: str) -> str:
    """Return the id that Docker's containerd store gives the image, from index.json.

    Args:
        config: digest of the configuration that manifest.json names

    Raises:
        ArchiveError: index.json names another image than manifest.json
    """
    entries = _get(_parse(archive.read("index.json"), "index.json", dict), "manifests", list)
    if len(entries) != 1 or not isinstance(entries[0], dict):
        raise ArchiveError(f"holds {len(entries)} images according to index.json, exactly one is expected")
    notes = _get(entries[0], "annotations", dict)
    if "io.containerd.image.name" in notes:
        _check_names([notes["io.containerd.image.name"]], base)
    reference = notes.get("org.opencontainers.image.ref.name", base)
    if reference != base.rpartition(":")[2]:
        _check_names([reference], base)
    digest, manifest = archive.read_blob(entries[0].get("digest"))
    manifests = [manifest]
    if "manifests" in manifest:
        # What is not in the archive cannot run, and what is for no system, as an attestation, does not.
        manifests = [
            archive.read_blob(item.get("digest"))[1]
            for item in _get_objects(manifest, "manifests")
            if _get(item, "platform", dict).get("os") != "unknown"
            and f"blobs/sha256/{str(item.get('digest')).removeprefix('sha256:')}" in archive.members
        ]
        if "config" in manifest or "layers" in manifest:
            raise ArchiveError(f"has a {digest} that is an index and an image at once")
    found = {str(_get(item, "config", dict).get("digest")) for item in manifests}
    if found != {config}:
        raise ArchiveError(f"holds another image according to index.json than the {config} of its manifest.json")
    return digest


def read_image_ids(path: Path, base: str) -> list[str]:
    """Return the ids of the only image in an archive: that in Docker's classic store, then in its containerd store.

    The second is missing in an archive that Docker before 25 wrote.

    Args:
        base: name that the image must have, with a tag

    Raises:
        ArchiveError: it cannot be read, holds another image, or holds more than the one image
    """
    archive = _Archive(path, _list_members(path))
    images = _parse(archive.read("manifest.json"), "manifest.json", list)
    if len(images) != 1 or not isinstance(images[0], dict):
        raise ArchiveError(f"holds {len(images)} images according to manifest.json, exactly one is expected")
    _check_names(_get(images[0], "RepoTags", list), base)
    named = str(images[0].get("Config"))
    match = _CONFIG.fullmatch(named)
    if match is None or hashlib.sha256(archive.read(named)).hexdigest() != match[1]:
        raise ArchiveError(f"names the configuration {shown(shorten(named, 90))}, which is not called after its hash")
    config = f"sha256:{match[1]}"
    if "repositories" in archive.members:
        listed = _parse(archive.read("repositories"), "repositories", dict)
        _check_names([f"{name}:{tag}" for name, tags in listed.items() for tag in (tags or [""])], base)
    return list(
        dict.fromkeys([config, *([_check_index(archive, base, config)] if "index.json" in archive.members else [])])
    )
