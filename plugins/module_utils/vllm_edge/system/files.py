# SPDX-License-Identifier: Apache-2.0
"""Writing files so that a reader never sees a partial one, even after a power failure, and checking locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .space import UNWRITABLE, describe_full

LOCK_MODE = 0o600
"""flock(2) needs no right to write: whoever may open a file can lock it, and so stop the programs that want to."""


class LockHeld(Exception):
    """Another process holds the lock."""


def make_fresh_name(path: Path) -> Path:
    """Return the temporary name beside `path` under which its new content is written before the rename."""
    return path.with_name(f".{path.name}.new")


@contextlib.contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Put into the error of a full or read-only file system which it is, and the path if the error names none.

    write(2), fsync(2) and posix_fallocate(3) name none. Whatever writes to the host does it in this context.
    """
    try:
        yield
    except OSError as error:
        if error.errno in UNWRITABLE and error.strerror == os.strerror(error.errno):
            error.filename = error.filename or str(path)
            with contextlib.suppress(OSError):
                said = describe_full(error.errno, path.parent / os.fsdecode(error.filename2 or error.filename))
                error.strerror = f"{error.strerror}: {said}"
        raise


def sync(path: Path) -> None:
    """Flush the content of a file, or the entries of a directory, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directories(path: Path, mode: int = 0o755) -> None:
    """Make a directory if it is missing, and those above it with 0755, whatever the umask is. Raises OSError."""
    if not path.is_dir():
        make_directories(path.parent)
        with name_errors(path):
            path.mkdir(mode & 0o700, exist_ok=True)
            path.chmod(mode)


@contextlib.contextmanager
def hold_lock(path: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold an exclusive flock(2) on a file that is for its owner alone, and is made if it is missing.

    The kernel releases the lock when the process dies. No program that is started meanwhile inherits it. Raises
    LockHeld: another process holds it, also after `patience_s`; OSError: the file cannot be made or opened.
    """
    make_directories(path.parent)
    with name_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, LOCK_MODE)
    try:
        os.fchmod(handle, LOCK_MODE)  # a former release or another umask may have made it
        deadline = time.monotonic() + patience_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise LockHeld(str(path)) from error
            time.sleep(0.02)
        try:
            yield
        finally:
            # Closing is not enough: a process that was forked meanwhile has the descriptor until its exec.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether a process holds an exclusive flock(2) on the file; False if there is no such file.

    The test takes a shared lock for a moment, so that two processes may test at the same time. Raises OSError.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def read_foreign(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file in a directory that somebody else may write to.

    Raises OSError if it is no regular file, or longer than `most_bytes`. Links are not followed.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {most_bytes} bytes", str(path))
    return content


def remove_foreign(place: Path, timeout_s: float) -> None:
    """Remove a file or directory that somebody else could write. Raises OSError, also if it takes longer."""
    # Python's rmtree gives up in a tree that is nested deeply enough.
    command = ["rm", "--recursive", "--force", "--one-file-system", "--", str(place)]
    try:
        removed = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{place} could not be removed within {timeout_s:g} s") from error
    if removed.returncode != 0:
        raise OSError(removed.stderr.strip()[:300])


def find_wrong_attributes(path: Path, mode: int) -> str:
    """Return what is wrong with the type, mode or (if this runs as root) owner of a file of root; empty if nothing is.

    `mode` are the permissions that it should have. Raises OSError.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"link {os.readlink(path)}, wanted file"
    wrong = []
    if stat.S_IMODE(found.st_mode) != mode:
        wrong.append(f"mode {stat.S_IMODE(found.st_mode):04o}, wanted {mode:04o}")
    if os.geteuid() == 0 and (found.st_uid, found.st_gid) != (0, 0):
        wrong.append(f"owner {found.st_uid}:{found.st_gid}, wanted 0:0")
    return "; ".join(wrong)


def write_fresh(path: Path, text: str, mode: int, group: int | None = None) -> None:
    """Write and flush the new content of `path` under its temporary name, which `make_fresh_name` returns.

    With `group`, its id, the file belongs to root and that group if this runs as root. Raises OSError.
    """
    fresh = make_fresh_name(path)
    with name_errors(fresh):
        fresh.unlink(missing_ok=True)
        # Readable by its owner only until it has its final mode: the text may be confidential.
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if group is not None and os.geteuid() == 0:
                os.fchown(handle, 0, group)
            os.fchmod(handle, mode)
            os.fsync(file.fileno())


def prune(files: Sequence[Path], kept: int, newest: Path) -> None:
    """Remove all but the last `kept` files, and `newest` in no case: names sort by a wall clock that may have been
    wrong. One file too many does no harm."""
    others = [path for path in files if path != newest]
    for path in others[: max(0, len(others) + 1 - kept)]:
        with contextlib.suppress(OSError):
            path.unlink()


def write_durably(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace the file atomically: readers, and a host after a power failure, see the old or the new content.

    Missing parent directories are created. There may be only one writer at a time: the temporary file of a writer that
    was killed is overwritten. Raises OSError: the file could not be written; the old one is unchanged.
    """
    make_directories(path.parent)
    fresh = make_fresh_name(path)
    try:
        write_fresh(path, text, mode)
        with name_errors(path):
            os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
    sync(path.parent)
