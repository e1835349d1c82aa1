# SPDX-License-Identifier: Apache-2.0
"""Files of a model: what a source lists, what is wanted, and the record of what was brought."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

RECORD_FORMAT = 1


class WeightsError(Exception):
    """Weights cannot be brought or do not verify; the text is for the operator."""


@dataclass(frozen=True)
class Digest:
    """A hash that the source states: ``sha256`` of large files, ``git-sha1`` (a blob's id) of small ones."""

    algorithm: str
    value: str


@dataclass(frozen=True)
class RemoteFile:
    """A file as its source lists it."""

    path: str
    size_bytes: int
    digest: Digest | None = None


@dataclass(frozen=True)
class Listing:
    """All files of one commit."""

    commit: str
    files: tuple[RemoteFile, ...]


@dataclass(frozen=True)
class RecordedFile:
    """A file as it was when it was last verified."""

    size_bytes: int
    sha256: str
    mtime_ns: int
    inode: int
    digest: Digest | None = None


@dataclass(frozen=True)
class Record:
    """What the host knows of one model's weights."""

    model: str
    repo: str
    requested_revision: str
    revision: str
    path: str
    source: str
    files: Mapping[str, RecordedFile]

    @property
    def total_bytes(self) -> int:
        """Size of all files together."""
        return sum(item.size_bytes for item in self.files.values())

    @property
    def manifest_sha256(self) -> str:
        """One hash over names and contents: equal where the weights are equal, whatever host or mtime."""
        lines = "".join(f"{item.sha256}  {path}\n" for path, item in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def to_json(self) -> str:
        """The record as text."""
        data = {
            "format": RECORD_FORMAT,
            **asdict(self),
            "bytes": self.total_bytes,
            "manifest_sha256": self.manifest_sha256,
        }
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


@dataclass(frozen=True)
class Wanted:
    """What the operator asks for."""

    model: str
    repo: str
    revision: str
    path: Path


def parse_record(text: str) -> Record:
    """Reads a record; ValueError where it is not one."""
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
        if not all(safe_relative(path) for path in files):
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
    """The record on the host; None where there is none or none that can be read (the files are then hashed again)."""
    try:
        return parse_record(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def record_fits(record: Record | None, wanted: Wanted) -> bool:
    """Whether the record answers for what is asked for: a branch stays at the commit that it was once resolved to."""
    return (
        record is not None
        and record.repo == wanted.repo
        and record.path == str(wanted.path)
        and wanted.revision in {record.requested_revision, record.revision}
    )


COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def safe_relative(path: str) -> bool:
    """Whether a path that a source names stays below the directory it is put in."""
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and "\0" not in path
