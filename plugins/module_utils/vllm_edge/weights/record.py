# SPDX-License-Identifier: Apache-2.0
"""Data types for a model's files: what a source offers, what is wanted, and the record of what was downloaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

RECORD_FORMAT = 1
"""Version of the record's format."""


class WeightsError(Exception):
    """Weights cannot be downloaded or do not match their hashes; the text is for the operator."""


@dataclass(frozen=True)
class Digest:
    """A hash that the source states: `sha256` for large files, `git-sha1` (the id of a git blob) for small ones."""

    algorithm: str
    value: str


@dataclass(frozen=True)
class RemoteFile:
    """A file as its source lists it."""

    path: str
    """Relative to the root of the repository."""
    size_bytes: int
    digest: Digest | None = None
    """None if the source states no hash."""


@dataclass(frozen=True)
class Listing:
    """All files of one commit of a repository."""

    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True)
class RecordedFile:
    """A file when it was last verified."""

    size_bytes: int
    sha256: str
    mtime_ns: int
    inode: int
    digest: Digest | None = None
    """The hash that its source stated, if any."""


@dataclass(frozen=True)
class Record:
    """What the host knows of one model's weights."""

    model: str
    repo: str
    requested_revision: str
    """Branch, tag or commit that was asked for."""
    revision: str
    """The commit that it was resolved to."""
    path: str
    """Directory of the files."""
    source: str
    """`hub` or `directory`."""
    files: Mapping[str, RecordedFile]
    """By path below `path`."""

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(item.size_bytes for item in self.files.values())

    @property
    def manifest_sha256(self) -> str:
        """One hash over names and contents: the same weights have the same hash on every host, whatever their mtime."""
        lines = "".join(f"{item.sha256}  {path}\n" for path, item in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the record as JSON text."""
        data = {
            "format": RECORD_FORMAT,
            **asdict(self),
            "bytes": self.total_bytes,
            "manifest_sha256": self.manifest_sha256,
        }
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Wanted:
    """The weights that the inventory asks for."""

    model: str
    repo: str
    revision: str
    """Branch, tag or commit."""
    path: Path
    """Directory for the files."""


def parse_record(text: str) -> Record:
    """Parse the text of a record. Raises ValueError if it is not one."""
    try:
        data = json.loads(text)
        if data["format"] != RECORD_FORMAT:
            raise ValueError(f"format {data['format']}")
        files = {}
        for path, item in data["files"].items():
            digest = item.get("digest")
            files[str(path)] = RecordedFile(
                size_bytes=int(item["size_bytes"]),
                sha256=str(item["sha256"]),
                mtime_ns=int(item["mtime_ns"]),
                inode=int(item["inode"]),
                digest=Digest(str(digest["algorithm"]), str(digest["value"])) if digest else None,
            )
        if not all(is_safe_relative(path) for path in files):
            raise ValueError("a path that leaves its directory")
        return Record(
            model=str(data["model"]),
            repo=str(data["repo"]),
            requested_revision=str(data["requested_revision"]),
            revision=str(data["revision"]),
            path=str(data["path"]),
            source=str(data["source"]),
            files=files,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a record of weights: {error!r}") from error


def load_record(path: Path) -> Record | None:
    """Return the record in the file; None if there is none or it is unreadable, in which case the files are hashed
    again.

    Raises OSError if the file exists but cannot be read.
    """
    try:
        return parse_record(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def record_fits(record: Record | None, wanted: Wanted) -> bool:
    """Return whether the record is about the wanted weights. A branch stays at the commit it was first resolved to."""
    return (
        record is not None
        and record.repo == wanted.repo
        and record.path == str(wanted.path)
        and wanted.revision in {record.requested_revision, record.revision}
    )


COMMIT = re.compile(r"[0-9a-f]{40}")
"""A full commit id."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Names of models."""


def is_safe_relative(path: str) -> bool:
    """Return whether a path that a source names stays within the directory that it is put into."""
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and "\0" not in path
