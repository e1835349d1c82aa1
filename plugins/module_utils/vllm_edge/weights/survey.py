# SPDX-License-Identifier: Apache-2.0
"""Survey of a model's directory: which files are good, missing, damaged or unknown."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .record import Digest, Record, RecordedFile, RemoteFile

CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes to read at a time."""


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> tuple[str, str]:
    """Return the file's SHA-256 and its git blob id, from one pass over the file.

    Args:
        path: file to read
        progress: called with the number of bytes of each piece
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        # git hashes a header with the length before the content.
        git = hashlib.sha1(f"blob {os.fstat(stream.fileno()).st_size}\0".encode(), usedforsecurity=False)
        while chunk := stream.read(CHUNK_BYTES):
            sha256.update(chunk)
            git.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return sha256.hexdigest(), git.hexdigest()


def hash_sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the file's SHA-256 only, which is faster than `hash_file` for files of many GiB."""
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha256.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return sha256.hexdigest()


def mismatch(path: Path, expected: RemoteFile, progress: Callable[[int], None] | None = None) -> tuple[str, str | None]:
    """Compare a file with what its source states.

    Args:
        path: the file
        expected: size and hash according to the source
        progress: called with the number of bytes of each piece that was hashed

    Returns:
        The file's SHA-256 (empty if the size is wrong), and what is wrong with it; None if it is correct.
    """
    size = path.stat().st_size
    if size != expected.size_bytes:
        return "", f"it has {size} bytes, {expected.size_bytes} were stated"
    if expected.digest is not None and expected.digest.algorithm == "git-sha1":
        sha256, git = hash_file(path, progress)
        found = git
    else:
        sha256 = found = hash_sha256(path, progress)
    if expected.digest is not None and found != expected.digest.value:
        return sha256, f"its {expected.digest.algorithm} is {found}, {expected.digest.value} was stated"
    return sha256, None


@dataclass
class Survey:
    """Result of the survey, by path below the directory."""

    good: dict[str, RecordedFile] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with each damaged file."""
    rehashed: list[str] = field(default_factory=list)
    """Good files whose content was hashed again."""
    unknown: list[str] = field(default_factory=list)
    """Files in the directory that do not belong to the model."""

    @property
    def needed(self) -> list[str]:
        """Files that must be downloaded."""
        return sorted([*self.missing, *self.damaged])


def stat_regular(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; None if there is none (links and directories count as none)."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def observe(path: Path, sha256: str, digest: Digest | None) -> RecordedFile:
    """Return the record entry of a file that was just verified."""
    found = path.stat()
    return RecordedFile(found.st_size, sha256, found.st_mtime_ns, found.st_ino, digest)


def list_unknown(directory: Path, known: Iterable[str]) -> list[str]:
    """Return the files in the directory that are not among the known ones. Hidden directories are skipped."""
    expected = set(known)
    found = []
    for base, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            relative = (Path(base) / name).relative_to(directory).as_posix()
            if relative not in expected:
                found.append(relative)
    return found


def survey_recorded(record: Record, *, full: bool, progress: Callable[[int], None] | None = None) -> Survey:
    """Compare the directory with the record.

    A file whose size, mtime and inode are as recorded is not read, unless `full` is set.

    Args:
        record: the record
        full: hash every file
        progress: called with the number of bytes of each piece that was hashed
    """
    result = Survey()
    directory = Path(record.path)
    for path, item in sorted(record.files.items()):
        found = stat_regular(directory / path)
        if found is None:
            result.missing.append(path)
        elif found.st_size != item.size_bytes:
            result.damaged[path] = f"it has {found.st_size} bytes, {item.size_bytes} were recorded"
        elif not full and (found.st_mtime_ns, found.st_ino) == (item.mtime_ns, item.inode):
            result.good[path] = item
        else:
            sha256 = hash_sha256(directory / path, progress)
            if sha256 == item.sha256:
                result.good[path] = observe(directory / path, sha256, item.digest)
                result.rehashed.append(path)
            else:
                result.damaged[path] = f"its sha256 is {sha256}, {item.sha256} was recorded"
    result.unknown = list_unknown(directory, record.files)
    return result


def survey_listed(
    directory: Path, files: Iterable[RemoteFile], progress: Callable[[int], None] | None = None
) -> Survey:
    """Compare the directory with a source's listing, by hashing the files, so that good files need no download.

    Args:
        directory: directory of the model
        files: the files that the source lists
        progress: called with the number of bytes of each piece that was hashed
    """
    result = Survey()
    names = []
    for item in files:
        names.append(item.path)
        target = directory / item.path
        if stat_regular(target) is None:
            result.missing.append(item.path)
            continue
        sha256, wrong = mismatch(target, item, progress)
        # Without a hash from the source, a file that happens to be there cannot be verified.
        if wrong is None and item.digest is None:
            wrong = "its source states no hash to compare it with"
        if wrong is None:
            result.good[item.path] = observe(target, sha256, item.digest)
            result.rehashed.append(item.path)
        else:
            result.damaged[item.path] = wrong
    result.unknown = list_unknown(directory, names)
    return result
