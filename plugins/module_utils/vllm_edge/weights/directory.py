# SPDX-License-Identifier: Apache-2.0
"""Weights from a directory on the host (air gap). What it holds may come from strangers, and root reads it.

No link is followed, nothing but regular files is opened, and every file that is brought has a hash.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from ..system.files import make_directories, name_errors
from ..text import shown
from .record import COMMIT, MOST_FILES, Listing, RemoteFile, WeightsError, check_listing, check_path, is_wanted
from .verification import CountBytes

DEEPEST = 16
"""Directories in each other."""
SUMS = "SHA256SUMS"
SUMS_BYTES = 2**22
NOTE_BYTES = 4096
COPY_BYTES = 2**22
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: to open a FIFO would wait for a writer.
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a directory"}
SUM_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?([^\\]+)")
NOTE = re.compile(r"([0-9a-f]{40})\s+([0-9a-f]{40}|[0-9a-f]{64})\s.*", re.DOTALL)


class UnfitDirectory(WeightsError):
    """The directory has something that a prepared directory does not have, or changes while it is read."""


class DirectorySource:
    """A prepared directory on the host: the result of `hf download --local-dir`, or files with SHA256SUMS."""

    kind = "directory"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _refuse(self, path: str, why: str) -> UnfitDirectory:
        return UnfitDirectory(
            f"The source directory {self._directory} has {shown(path)}, which {why}. Nothing was brought. Put the "
            "files themselves there, for example with `hf download --local-dir`."
        )

    def _open(self, path: str) -> tuple[int, os.stat_result]:
        """Open a regular file below the directory without following a link; return descriptor and status.

        Raises FileNotFoundError, OSError, UnfitDirectory.
        """
        parts = PurePosixPath(path).parts
        folder = os.open(self._directory, FOLDER)
        try:
            for part in parts[:-1]:
                inner = os.open(part, FOLDER, dir_fd=folder)
                os.close(folder)
                folder = inner
            # A device must not be opened at all: to open one may do something.
            found = os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                raise self._refuse(path, f"is {KINDS.get(stat.S_IFMT(found.st_mode), 'a device')}")
            handle = os.open(parts[-1], FILE, dir_fd=folder)
        except NotADirectoryError:  # what the kernel also says of a link
            raise self._refuse(path, "is reached through a link or a file") from None
        finally:
            os.close(folder)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise self._refuse(path, "became another kind of file while it was read")
        return handle, found

    def _read_text(self, path: str, most_bytes: int) -> str | None:
        """Return a small file of the directory; None if it is not there. Raises OSError, UnfitDirectory."""
        try:
            handle, _found = self._open(path)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as stream:
            raw = stream.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise self._refuse(path, f"is longer than {most_bytes:,} bytes")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._refuse(path, "is no text in UTF-8") from None

    def _read_note(self, path: str) -> tuple[str, str] | None:
        found = NOTE.fullmatch(self._read_text(f".cache/huggingface/download/{path}.metadata", NOTE_BYTES) or "")
        return (found[1], found[2]) if found else None

    def _read_sums(self) -> dict[str, str]:
        sums: dict[str, str] = {}
        for number, line in enumerate((self._read_text(SUMS, SUMS_BYTES) or "").splitlines(), 1):
            found = SUM_LINE.fullmatch(line)
            if found is None:
                raise self._refuse(SUMS, f"is not as sha256sum writes it in line {number}, {shown(line)}")
            if found[2] in sums:
                raise self._refuse(SUMS, f"names {shown(found[2])} twice")
            sums[found[2]] = found[1]
        return sums

    def _list_files(self, place: str = "", folder: int | None = None, depth: int = 0) -> Iterator[tuple[str, int]]:
        """Yield path and size of all files but hidden directories and SHA256SUMS. Raises UnfitDirectory, OSError."""
        if depth > DEEPEST:
            raise self._refuse(place, f"is more than {DEEPEST} directories deep")
        handle = os.open(self._directory if folder is None else PurePosixPath(place).name, FOLDER, dir_fd=folder)
        try:
            with os.scandir(handle) as entries:
                for number, entry in enumerate(entries):
                    path = check_path(f"The source directory {self._directory}", f"{place}/{entry.name}".lstrip("/"))
                    found = entry.stat(follow_symlinks=False)
                    if number > MOST_FILES:
                        raise self._refuse(path, f"is one of more than {MOST_FILES:,} in its directory")
                    if stat.S_ISDIR(found.st_mode):
                        if not entry.name.startswith("."):
                            yield from self._list_files(path, handle, depth + 1)
                    elif not stat.S_ISREG(found.st_mode):
                        raise self._refuse(path, f"is {KINDS.get(stat.S_IFMT(found.st_mode), 'a device')}")
                    elif path != SUMS:
                        yield path, found.st_size
        finally:
            os.close(handle)

    def _find_digest(self, path: str, noted: str | None, summed: str | None) -> str | None:
        """Return the hash of a file by its note and SHA256SUMS, which must agree. Raises UnfitDirectory."""
        if noted and summed and len(noted) == len(summed) and noted != summed:
            raise self._refuse(path, f"has another hash in {SUMS} than in the note of the hub's client")
        if not (noted or summed) and is_wanted(path):
            find = r"find . -type f ! -path '*/.*' ! -name SHA256SUMS -exec sha256sum {} +"
            raise UnfitDirectory(
                f"The source directory {self._directory} has no hash of {path}, so the file could not be verified. "
                "Take the directory as `hf download --local-dir` made it, with .cache, or, where you know that the "
                f"files are right, run: cd {shlex.quote(str(self._directory))} && {find} > SHA256SUMS"
            )
        return summed or noted

    def listing(self, repo: str, revision: str) -> Listing:
        """List the directory. The commit is the requested one, or the one that the hub's client stored."""
        if self._directory.is_symlink() or not self._directory.is_dir():
            raise WeightsError(
                f"The source directory {self._directory} for {repo} does not exist on the host, or is a link. Put the "
                "model's files there (`hf download --local-dir` keeps their hashes beside them), or take the model "
                "from the hub."
            )
        sums, commits, files = self._read_sums(), set(), []
        for number, (path, size) in enumerate(self._list_files()):
            if number == MOST_FILES:
                raise self._refuse(path, f"is one of more than {MOST_FILES:,} files")
            note = self._read_note(path)
            commits |= {note[0]} if note else set()
            files.append((path, size, self._find_digest(path, note[1] if note else None, sums.get(path))))
        if COMMIT.fullmatch(revision):
            if commits - {revision}:
                raise WeightsError(
                    f"The source directory {self._directory} holds {repo} at {', '.join(sorted(commits)[:3])}, and "
                    f"{revision} is asked for. Download that revision, or ask for the one that is there."
                )
            commits = {revision}
        if len(commits) != 1:
            raise WeightsError(
                f"The source directory {self._directory} does not say which commit of {repo} it holds, and "
                f"{revision!r} is a branch or tag that only the hub can resolve. Give the commit as the model's "
                "revision."
            )
        return check_listing(f"The source directory {self._directory}", commits.pop(), sorted(files))

    def fetch(self, repo: str, commit: str, item: RemoteFile, staging: Path, count: CountBytes) -> Path:
        """Copy one file, exactly as many bytes as were listed."""
        target = staging / item.path
        make_directories(target.parent)
        try:
            handle, found = self._open(item.path)
        except FileNotFoundError as error:
            raise WeightsError(f"{item.path} of {repo} is not in the source directory {self._directory}.") from error
        left = item.size_bytes
        try:
            with name_errors(target), os.fdopen(handle, "rb", buffering=0) as source, target.open("wb") as copy:
                while left > 0 and (block := source.read(min(left, COPY_BYTES))):
                    copy.write(block)
                    left -= len(block)
                    count(len(block))
                changed = left or source.read(1) or found.st_size != item.size_bytes
        except OSError:
            target.unlink(missing_ok=True)  # it would count as room that the next run lacks
            raise
        if changed:
            target.unlink()
            raise self._refuse(item.path, f"has not the {item.size_bytes:,} bytes that were listed: it changes")
        return target
