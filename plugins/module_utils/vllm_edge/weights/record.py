# SPDX-License-Identifier: Apache-2.0
"""Data types for a model's files: what a source offers, what is wanted, and the record of what was downloaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from ..system.records import RecordError, read_record

RECORD_FORMAT = 1
"""Version of the record's format."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A full commit id."""


class WeightsError(Exception):
    """Weights cannot be downloaded or do not match their hashes; the text is for the operator."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as its source lists it."""

    path: str
    """Relative to the root of the repository."""
    size_bytes: int
    digest: str | None = None
    """The hash that the source states, if any: SHA-256 for large files, the id of a git blob for small ones."""

    @property
    def algorithm(self) -> str:
        """Name of the digest's algorithm, which its length tells."""
        return "git-sha1" if self.digest is not None and COMMIT.fullmatch(self.digest) else "sha256"


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
        """One hash over names and contents."""
        return hash_manifest(self.files)

    @property
    def expected(self) -> list[RemoteFile]:
        """The files with the hashes that they had when they were verified, sorted by path."""
        return [RemoteFile(path, item.size_bytes, item.sha256) for path, item in sorted(self.files.items())]

    def to_json(self) -> str:
        """Return the record as JSON text."""
        data = {
            "format": RECORD_FORMAT,
            **asdict(self),
            "bytes": self.total_bytes,
            "manifest_sha256": self.manifest_sha256,
        }
        return json.dumps(data, indent=2, sort_keys=True) + "\n"


def hash_manifest(files: Mapping[str, RecordedFile]) -> str:
    """Return one hash over names and contents: the same weights have the same hash on every host."""
    lines = "".join(f"{item.sha256}  {path}\n" for path, item in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True)
class Wanted:
    """The weights that the inventory asks for."""

    model: str
    repo: str
    revision: str
    """Branch, tag or commit."""
    path: Path
    """Directory for the files."""

    def is_recorded(self, record: Record | None) -> bool:
        """Return whether the record is about these weights. A branch stays at the commit it was first resolved to."""
        return (
            record is not None
            and record.repo == self.repo
            and record.path == str(self.path)
            and self.revision in {record.requested_revision, record.revision}
        )


def parse_record(text: str) -> Record:
    """Parse the text of a record. Raises ValueError if it is not one."""
    data = json.loads(text)
    record = read_record(Record, data)
    if data.get("format") != RECORD_FORMAT:
        raise RecordError(f"format is {data.get('format')!r}, {RECORD_FORMAT} is expected")
    for path in record.files:
        if not is_safe_relative(path):
            raise RecordError(f"the path {path!r} leaves its directory")
    return record


def load_record(path: Path) -> Record | None:
    """Return the record in the file; None if there is none or it is damaged. Raises OSError if it cannot be read."""
    try:
        return parse_record(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def is_safe_relative(path: str) -> bool:
    """Return whether a path that a source names stays within the directory that it is put into."""
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and "\0" not in path
