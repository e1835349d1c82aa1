# SPDX-License-Identifier: Apache-2.0
"""Which files of a model's directory are good, missing, damaged or unknown, and which have a wrong owner."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .record import Record, RecordedFile, RemoteFile

CHUNK_BYTES = 8 * 1024 * 1024
"""Bytes to read at a time."""

CountBytes = Callable[[int], None]
"""Is called with the number of bytes of each piece that was hashed or has arrived."""


@dataclass(frozen=True)
class Ownership:
    """Owner, group and permissions that the files and directories should have."""

    uid: int
    gid: int
    file_mode: int = 0o640
    directory_mode: int = 0o750

    def describe(self, path: Path) -> str:
        return f"{self.uid}:{self.gid} {self.directory_mode if path.is_dir() else self.file_mode:04o}"

    def apply(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid)
        path.chmod(self.directory_mode if path.is_dir() else self.file_mode)


def list_directories(directory: Path, files: Iterable[str]) -> list[Path]:
    """Return the directory and every directory in it that is a parent of the files, parents first."""
    return sorted({directory, *(directory / parent for path in files for parent in PurePosixPath(path).parents)})


def find_ownership_faults(directory: Path, files: Iterable[str], owner: Ownership) -> dict[Path, str]:
    """Return what files and directories with a wrong owner, group or mode have instead, as `uid:gid mode`.

    `files` are paths below the directory of the model; those that do not exist are skipped.
    """
    names = list(files)
    faults = {}
    for path in [*list_directories(directory, names), *(directory / name for name in names)]:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        has = f"{found.st_uid}:{found.st_gid} {stat.S_IMODE(found.st_mode):04o}"
        if has != owner.describe(path):
            faults[path] = has
    return faults


def hash_file(path: Path, progress: CountBytes | None = None, *, git: bool = False) -> tuple[str, str]:
    """Return the file's SHA-256 and, for `git`, its git blob id (else an empty text), from one pass over the file."""
    hashes = [hashlib.sha256()]
    with path.open("rb") as stream:
        if git:
            # git hashes a header with the length before the content.
            header = f"blob {os.fstat(stream.fileno()).st_size}\0".encode()
            hashes.append(hashlib.sha1(header, usedforsecurity=False))
        while chunk := stream.read(CHUNK_BYTES):
            for each in hashes:
                each.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return hashes[0].hexdigest(), hashes[1].hexdigest() if git else ""


def mismatch(path: Path, expected: RemoteFile, progress: CountBytes | None = None) -> tuple[str, str | None]:
    """Return a file's SHA-256 (empty if the size is wrong), and how it differs from what is expected (None: it does
    not).
    """
    size = path.stat().st_size
    if size != expected.size_bytes:
        return "", f"it has {size} bytes, {expected.size_bytes} are expected"
    git = expected.algorithm == "git-sha1"
    sha256, git_sha1 = hash_file(path, progress, git=git)
    found = git_sha1 if git else sha256
    if expected.digest not in (None, found):
        return sha256, f"its {expected.algorithm} is {found}, {expected.digest} is expected"
    return sha256, None


@dataclass
class Verification:
    """Result of the verification, by path below the directory."""

    good: dict[str, RecordedFile] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with each damaged file."""
    rehashed: list[str] = field(default_factory=list)
    """Good files whose content was hashed again."""
    unknown: list[str] = field(default_factory=list)
    """Files in the directory that do not belong to the model."""


def stat_regular(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; None if there is none (links and directories count as none)."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def observe(path: Path, sha256: str) -> RecordedFile:
    found = path.stat()
    return RecordedFile(found.st_size, sha256, found.st_mtime_ns, found.st_ino)


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


def verify_files(
    directory: Path,
    files: Iterable[RemoteFile],
    progress: CountBytes | None = None,
    *,
    unread: Mapping[str, RecordedFile] | None = None,
) -> Verification:
    """Compare the directory with the files that it should have.

    `unread` are recorded files by path: one whose size, mtime and inode are as recorded is not read.
    """
    result = Verification()
    names = []
    for item in files:
        names.append(item.path)
        target = directory / item.path
        found = stat_regular(target)
        known = (unread or {}).get(item.path)
        if found is None:
            result.missing.append(item.path)
        elif known and known == RecordedFile(found.st_size, known.sha256, found.st_mtime_ns, found.st_ino):
            result.good[item.path] = known
        else:
            sha256, wrong = mismatch(target, item, progress)
            # Without a hash from the source, a file that happens to be there cannot be verified.
            if wrong is None and item.digest is None:
                wrong = "its source states no hash to compare it with"
            if wrong is None:
                result.good[item.path] = observe(target, sha256)
                result.rehashed.append(item.path)
            else:
                result.damaged[item.path] = wrong
    result.unknown = list_unknown(directory, names)
    return result


def verify_recorded(record: Record, *, full: bool, progress: CountBytes | None = None) -> Verification:
    """Compare the directory with the record; only `full` reads files of the recorded size, mtime and inode."""
    return verify_files(Path(record.path), record.expected, progress, unread={} if full else record.files)
