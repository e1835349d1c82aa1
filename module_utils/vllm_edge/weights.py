# SPDX-License-Identifier: Apache-2.0
"""Weights of one model on the host: what should be there, what is there, and how the one becomes the other.

A record beside the weights (``/var/lib/vllm-edge/weights/<model>.json``) holds the commit that a branch was resolved to
and, per file, size, mtime, inode and hashes. A run that finds files as the record has them reads neither the network
nor the files. New files arrive in a staging directory on the same file system and replace the old ones only when
verified, so that a good file is never given up for a download that fails.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

COMMIT = re.compile(r"[0-9a-f]{40}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# What vLLM reads. Pickles run code when they are loaded, so they never reach the host.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
CHUNK_BYTES = 8 * 1024 * 1024
RECORD_FORMAT = 1
# Between the tries of one file. The client itself takes a broken connection up again before that: five times in a row
# without a new piece of 10 MiB, a second apart.
PAUSES_S = (2.0, 5.0)
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class WeightsError(Exception):
    """Weights cannot be brought or do not verify; the text is for the operator."""


class HubError(WeightsError):
    """The hub refused or could not be reached; `passing` where another try may go well."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


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


class Source(Protocol):
    """Where files come from."""

    kind: str

    def listing(self, repo: str, revision: str) -> Listing:
        """Resolves the revision and lists the files of its commit."""

    def fetch(self, repo: str, commit: str, path: str, staging: Path) -> Path:
        """Brings one file below the staging directory, over one that is there, and says where it lies."""


# --- names and selection ----------------------------------------------------------------------------------------------


def safe_relative(path: str) -> bool:
    """Whether a path that a source names stays below the directory it is put in."""
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and "\0" not in path


def select(listing: Listing, repo: str) -> tuple[list[RemoteFile], list[str]]:
    """Splits a listing into what is brought and what is left at the source; refuses weights that are pickles only."""
    taken: list[RemoteFile] = []
    left: list[str] = []
    for item in listing.files:
        if not safe_relative(item.path):
            raise WeightsError(
                f"{repo} at {listing.commit} lists the path {item.path!r}, which leaves its directory. Nothing was "
                "brought."
            )
        hidden = any(part.startswith(".") for part in PurePosixPath(item.path).parts)
        if item.path.endswith(ALLOWED_SUFFIXES) and not hidden:
            taken.append(item)
        else:
            left.append(item.path)
    if not any(item.path.endswith(".safetensors") for item in taken):
        pickles = [path for path in left if path.endswith(PICKLE_SUFFIXES)]
        if pickles:
            raise WeightsError(
                f"{repo} at {listing.commit} has its weights as pickles only ({', '.join(sorted(pickles)[:3])}), "
                "which run code when they are loaded; they are never brought. Choose a revision or a repository "
                "with .safetensors files."
            )
        raise WeightsError(f"{repo} at {listing.commit} has no .safetensors file. Check repository and revision.")
    return sorted(taken, key=lambda item: item.path), sorted(left)


# --- hashing ----------------------------------------------------------------------------------------------------------


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> tuple[str, str]:
    """The file's sha256 and its git blob id, in one reading."""
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
    """The file's sha256: a second hash of many GiB is not free."""
    sha256 = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha256.update(chunk)
            if progress is not None:
                progress(len(chunk))
    return sha256.hexdigest()


def mismatch(path: Path, expected: RemoteFile, progress: Callable[[int], None] | None = None) -> tuple[str, str | None]:
    """The file's sha256, and what is wrong with it (None where it is what the source states)."""
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


# --- the record -------------------------------------------------------------------------------------------------------


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


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a file that is never seen half written, also after a power cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.chmod(mode)
    temporary.replace(path)


# --- looking ----------------------------------------------------------------------------------------------------------


@dataclass
class Survey:
    """What a look at the directory found, file by file."""

    good: dict[str, RecordedFile] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    rehashed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def needed(self) -> list[str]:
        """Files that must be brought."""
        return sorted([*self.missing, *self.damaged])


def _regular(path: Path) -> os.stat_result | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def observe(path: Path, sha256: str, digest: Digest | None) -> RecordedFile:
    """A verified file as the record keeps it."""
    found = path.stat()
    return RecordedFile(found.st_size, sha256, found.st_mtime_ns, found.st_ino, digest)


def _unknown(directory: Path, known: Iterable[str]) -> list[str]:
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
    """Compares the directory with the record: size, mtime and inode; content where these differ or where asked for."""
    result = Survey()
    directory = Path(record.path)
    for path, item in sorted(record.files.items()):
        found = _regular(directory / path)
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
    result.unknown = _unknown(directory, record.files)
    return result


def survey_listed(
    directory: Path, files: Iterable[RemoteFile], progress: Callable[[int], None] | None = None
) -> Survey:
    """Compares the directory with a source's listing: what is there already and right need not be brought."""
    result = Survey()
    names = []
    for item in files:
        names.append(item.path)
        target = directory / item.path
        if _regular(target) is None:
            result.missing.append(item.path)
            continue
        sha256, wrong = mismatch(target, item, progress)
        # A source that states no hash cannot vouch for a file that lies there by chance.
        if wrong is None and item.digest is None:
            wrong = "its source states no hash to compare it with"
        if wrong is None:
            result.good[item.path] = observe(target, sha256, item.digest)
            result.rehashed.append(item.path)
        else:
            result.damaged[item.path] = wrong
    result.unknown = _unknown(directory, names)
    return result


@dataclass
class Plan:
    """What has to be done, found out without changing anything."""

    commit: str
    resolved: bool
    record: Record | None
    survey: Survey
    bring: list[RemoteFile]
    expected: dict[str, int]
    source: Source | None = None
    obsolete: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


# --- ownership --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ownership:
    """Who owns the weights and who reads them."""

    uid: int
    gid: int
    file_mode: int = 0o640
    directory_mode: int = 0o750


def _directories(directory: Path, files: Iterable[str]) -> list[Path]:
    found = {directory}
    for path in files:
        for parent in PurePosixPath(path).parents:
            found.add(directory / parent)
    return sorted(found)


def ownership_faults(directory: Path, files: Iterable[str], owner: Ownership) -> dict[Path, str]:
    """Files and directories whose owner or mode is not what it should be, with what it is."""
    names = list(files)
    wanted = [(path, owner.directory_mode) for path in _directories(directory, names)]
    wanted += [(directory / name, owner.file_mode) for name in names]
    faults = {}
    for path, mode in wanted:
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        if (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) != (owner.uid, owner.gid, mode):
            faults[path] = f"{found.st_uid}:{found.st_gid} {stat.S_IMODE(found.st_mode):04o}"
    return faults


def give(path: Path, owner: Ownership) -> None:
    """Sets owner and mode of one file or directory."""
    os.chown(path, owner.uid, owner.gid)
    path.chmod(owner.directory_mode if path.is_dir() else owner.file_mode)


# --- space ------------------------------------------------------------------------------------------------------------


def mib(size_bytes: int) -> str:
    """A size in MiB, for a message."""
    return f"{size_bytes / 1024**2:,.1f} MiB"


def existing_parent(path: Path) -> Path:
    """The nearest directory above that exists: where a directory that is yet to be made will lie."""
    while not path.exists():
        path = path.parent
    return path


def check_space(directory: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Refuses with numbers where the file system has not the room."""
    found = os.statvfs(existing_parent(directory))
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes + reserve_bytes:
        raise WeightsError(
            f"Not enough room below {directory}: {mib(needed_bytes)} must be brought and {mib(reserve_bytes)} are to "
            f"stay free (model_weights_reserve_mib), which makes {mib(needed_bytes + reserve_bytes)}, but "
            f"{mib(free_bytes)} are free. A file that is replaced stays until the new one is verified. Free some "
            "space, put the weights on a larger file system (model_weights_root), or lower the reserve."
        )


def explain_storage_error(error: OSError, directory: Path) -> str:
    """A sentence with a remedy for what the file system refused."""
    what = f"{os.strerror(error.errno)}{f', {error.filename}' if error.filename else ''}" if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = os.statvfs(existing_parent(directory))
        return (
            f"The file system of {directory} became full while files arrived ({what}; "
            f"{mib(found.f_bavail * found.f_frsize)} are free now). Something else wrote there meanwhile, or a quota "
            "holds. Free some space or put the weights on a larger file system (model_weights_root), and run again."
        )
    return (
        f"A file could not be read or written below {directory} ({what}). `findmnt --target {directory}` shows the "
        "file system and whether it is read-only, and `journalctl --dmesg` whether its disk fails. Repair it and run "
        "again."
    )


# --- progress ---------------------------------------------------------------------------------------------------------


def progress_line(model: str, done: int, count: int, have_bytes: int, total_bytes: int, seconds: float) -> str:
    """One line on how far a download is: ``e2b: 3 of 9 files, 41 %, 1.2 of 10.2 GiB, 35 s``."""
    share = 100 * have_bytes // total_bytes if total_bytes else 100
    unit, name = (1024**3, "GiB") if total_bytes >= 1024**3 else (1024**2, "MiB")
    return (
        f"{model}: {done} of {count} files, {min(share, 100)} %, {have_bytes / unit:.1f} of {total_bytes / unit:.1f} "
        f"{name}, {seconds:.0f} s"
    )


class Progress:
    """Writes one line to a file every other second while work is under way: a module cannot stream its output."""

    def __init__(self, path: Path | None, model: str, interval_s: float = 2.0) -> None:
        self._path = path
        self._model = model
        self._interval_s = interval_s
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._hashed_bytes = 0

    def _seconds(self) -> float:
        return time.monotonic() - self._started

    def write(self, text: str) -> None:
        """Replaces the line; a progress that cannot be written is no reason to stop a download."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f".{self._path.name}.new")
            temporary.write_text(text + "\n", encoding="utf-8")
            temporary.replace(self._path)

    def hashing(self, total_bytes: int) -> Callable[[int], None]:
        """A callback that counts hashed bytes and says so now and then."""
        state = {"done": 0, "said": time.monotonic()}

        def count(size: int) -> None:
            with self._lock:
                state["done"] += size
                now = time.monotonic()
                if now - state["said"] < self._interval_s:
                    return
                state["said"] = now
                share = min(100, 100 * int(state["done"]) // total_bytes) if total_bytes else 100
            self.write(
                f"{self._model}: verifying, {share} %, {mib(int(state['done']))} of {mib(total_bytes)}, "
                f"{self._seconds():.0f} s"
            )

        return count

    @contextlib.contextmanager
    def watching(self, staging: Path, files: list[RemoteFile], finished: Callable[[], int]) -> Iterator[None]:
        """Says how much of the files has arrived below the staging directory, until the block ends."""
        total = sum(item.size_bytes for item in files)
        stop = threading.Event()

        def say() -> None:
            self.write(
                progress_line(
                    self._model, finished(), len(files), min(_size_below(staging), total), total, self._seconds()
                )
            )

        def loop() -> None:
            while not stop.wait(self._interval_s):
                say()

        thread = threading.Thread(target=loop, daemon=True)
        say()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            say()


def _size_below(directory: Path) -> int:
    total = 0
    for base, _folders, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(base, name)).st_size
    return total


# --- bringing ---------------------------------------------------------------------------------------------------------


def staging_directory(wanted: Wanted, commit: str) -> Path:
    """Where the files of a commit arrive: beside the weights, so that moving them is a rename."""
    return wanted.path.parent / ".incoming" / f"{wanted.path.name}-{commit[:12]}"


def remove_tree(directory: Path) -> None:
    """Removes a directory with all that is in it."""
    for base, folders, names in os.walk(directory, topdown=False):
        for name in names:
            os.unlink(os.path.join(base, name))
        for name in folders:
            entry = Path(base) / name
            if entry.is_symlink():
                entry.unlink()
            else:
                entry.rmdir()
    with contextlib.suppress(FileNotFoundError):
        directory.rmdir()


def drop_stale_staging(wanted: Wanted, keep: Path | None) -> None:
    """Removes what earlier, interrupted downloads of the same model left behind for other commits."""
    parent = wanted.path.parent / ".incoming"
    pattern = re.compile(re.escape(wanted.path.name) + r"-[0-9a-f]{12}")
    if parent.is_dir():
        for entry in parent.iterdir():
            if pattern.fullmatch(entry.name) and entry != keep and entry.is_dir():
                remove_tree(entry)
        with contextlib.suppress(OSError):
            parent.rmdir()


def clean_staging(wanted: Wanted, commit: str) -> None:
    """Removes what takes room and is of no use any more: other commits, and parts of files that a killed run left.

    The client never takes a part up again: its temporary file has another name in each run.
    """
    staging = staging_directory(wanted, commit)
    drop_stale_staging(wanted, keep=staging)
    for entry in staging.glob(".cache/huggingface/download/**/*.incomplete"):
        entry.unlink()


def staged(wanted: Wanted, commit: str, files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Files that an earlier run has brought and not put in place: by their size, the content is verified later."""
    staging = staging_directory(wanted, commit)
    result = []
    for item in files:
        found = _regular(staging / item.path)
        if found is not None and found.st_size == item.size_bytes and item.digest is not None:
            result.append(item)
    return result


def aftermath(wanted: Wanted, plan: Plan) -> str:
    """What a failure has left: said after its reason, so that nobody has to look whether something was lost."""
    lines = []
    if plan.survey.good or plan.survey.damaged:
        lines.append(f"In {wanted.path} nothing was replaced and nothing deleted.")
    else:
        lines.append(f"Nothing was put into {wanted.path}.")
    if plan.record is not None and plan.record.revision == plan.commit:
        faults = [f"{path}: {why}" for path, why in sorted(plan.survey.damaged.items())]
        faults += [f"{path} is missing" for path in sorted(plan.survey.missing)]
        if faults:
            lines.append(
                f"It is not whole, however ({'; '.join(faults[:3])}{'; ...' if len(faults) > 3 else ''}): an engine "
                "that runs goes on with what it has loaded, but none should be started from it."
            )
    waiting = staged(wanted, plan.commit, plan.bring)
    if waiting:
        lines.append(
            f"{len(waiting)} of {len(plan.bring)} files ({mib(sum(item.size_bytes for item in waiting))}) have arrived "
            f"and wait in {staging_directory(wanted, plan.commit)}; the next run verifies them and brings the rest."
        )
    return " ".join(lines)


def _bring_one(source: Source, wanted: Wanted, commit: str, item: RemoteFile, staging: Path) -> tuple[Path, str]:
    if staged(wanted, commit, [item]):
        sha256, wrong = mismatch(staging / item.path, item)
        if wrong is None:
            return staging / item.path, sha256
    pauses = iter(PAUSES_S)
    for last in (False, True):
        while True:
            try:
                arrived = source.fetch(wanted.repo, commit, item.path, staging)
                break
            except HubError as error:
                pause = next(pauses, None)
                if pause is None or not error.passing:
                    raise
                time.sleep(pause)
        sha256, wrong = mismatch(arrived, item)
        if wrong is None:
            return arrived, sha256
        arrived.unlink()
        if last:
            break
    raise WeightsError(
        f"{item.path} of {wanted.repo} at {commit} does not verify after two downloads: {wrong}. A proxy or mirror "
        "between here and the hub that alters files is the usual cause (model_weights_endpoint, "
        "model_weights_environment); where the files come from a directory, it is that file "
        "(model_weights_source_directory)."
    )


def bring(
    source: Source,
    wanted: Wanted,
    commit: str,
    files: list[RemoteFile],
    owner: Ownership,
    progress: Progress,
    workers: int = 4,
) -> dict[str, RecordedFile]:
    """Brings files, verifies all of them, and only then puts them in place."""
    staging = staging_directory(wanted, commit)
    clean_staging(wanted, commit)
    staging.mkdir(parents=True, exist_ok=True)
    staging.parent.chmod(0o700)
    arrived: dict[str, tuple[Path, str]] = {}

    def one(item: RemoteFile) -> None:
        arrived[item.path] = _bring_one(source, wanted, commit, item, staging)

    with progress.watching(staging, files, lambda: len(arrived)), ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(one, item) for item in files]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise

    result = {}
    for item in files:
        path, sha256 = arrived[item.path]
        target = wanted.path / item.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise WeightsError(
                f"{target} is a directory, but {wanted.repo} has a file of that name. Remove the directory."
            )
        give(path, owner)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
        path.replace(target)
        result[item.path] = observe(target, sha256, item.digest)
    for directory in _directories(wanted.path, result):
        give(directory, owner)
    drop_stale_staging(wanted, keep=None)
    return result


# --- sources ----------------------------------------------------------------------------------------------------------


class DirectorySource:
    """A prepared directory on the host (air gap): what ``hf download --local-dir`` left, or files with SHA256SUMS."""

    kind = "directory"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _metadata(self, path: str) -> tuple[str, Digest] | None:
        """Commit and hash that the hub's client noted when it downloaded the file."""
        note = self._directory / ".cache" / "huggingface" / "download" / f"{path}.metadata"
        try:
            lines = note.read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if len(lines) < 2 or not COMMIT.fullmatch(lines[0].strip()):
            return None
        etag = lines[1].strip()
        if re.fullmatch(r"[0-9a-f]{64}", etag):
            return lines[0].strip(), Digest("sha256", etag)
        if COMMIT.fullmatch(etag):
            return lines[0].strip(), Digest("git-sha1", etag)
        return None

    def _sums(self) -> dict[str, str]:
        try:
            text = (self._directory / "SHA256SUMS").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        found = {}
        for line in text.splitlines():
            match = re.fullmatch(r"([0-9a-f]{64}) [ *](?:\./)?(.+)", line.strip())
            if match:
                found[match[2]] = match[1]
        return found

    def listing(self, repo: str, revision: str) -> Listing:
        """Lists the directory; the commit is the one asked for, or the one that the hub's client noted."""
        if not self._directory.is_dir():
            raise WeightsError(
                f"The source directory {self._directory} for {repo} does not exist on the host. Put the model's "
                "files there (`hf download --local-dir` keeps their hashes beside them), or take the model from the "
                "hub."
            )
        sums = self._sums()
        commits = set()
        files = []
        for path in _unknown(self._directory, ["SHA256SUMS"]):
            note = self._metadata(path)
            digest = Digest("sha256", sums[path]) if path in sums else None
            if note is not None:
                commits.add(note[0])
                digest = digest or note[1]
            found = (self._directory / path).stat()
            files.append(RemoteFile(path, found.st_size, digest))
        if COMMIT.fullmatch(revision):
            if commits - {revision}:
                raise WeightsError(
                    f"The source directory {self._directory} holds {repo} at {', '.join(sorted(commits))}, and "
                    f"{revision} is asked for. Download that revision, or ask for the one that is there."
                )
            return Listing(revision, tuple(files))
        if len(commits) != 1:
            raise WeightsError(
                f"The source directory {self._directory} does not say which commit of {repo} it holds, and "
                f"{revision!r} is a branch or tag that only the hub can resolve. Give the commit as the model's "
                "revision."
            )
        return Listing(commits.pop(), tuple(files))

    def fetch(self, repo: str, commit: str, path: str, staging: Path) -> Path:
        """Copies one file."""
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (self._directory / path).open("rb") as reading, target.open("wb") as writing:
                while chunk := reading.read(CHUNK_BYTES):
                    writing.write(chunk)
        except FileNotFoundError as error:
            raise WeightsError(f"{path} of {repo} is not in the source directory {self._directory}.") from error
        return target


def explain_hub_error(
    status: int | None,
    code: str | None,
    text: str,
    *,
    model: str,
    repo: str,
    revision: str,
    endpoint: str,
    has_token: bool,
    path: str = "",
) -> str:
    """A sentence with a remedy for what the hub answered; `path` is the file that was being brought."""
    variable = f"vllm_models.{model}"
    give = (
        "write a token that may read it into a file on the controller (mode 0600) and name that file by "
        "model_weights_token_file, or set model_weights_token from Vault"
    )
    if code == "GatedRepo" or (status == 403 and code != "RevisionNotFound"):
        return f"{repo} ({variable}.repo) is gated at {endpoint} (HTTP {status}). " + (
            f"The account of the token that was given has no access: accept the terms at {endpoint}/{repo} with that "
            "account, or give the token of one that has (model_weights_token_file or model_weights_token)."
            if has_token
            else f"No token was given. Accept the terms at {endpoint}/{repo}, then {give}."
        )
    if code == "RevisionNotFound":
        return (
            f"{repo} has no revision {revision!r} at {endpoint} (HTTP {status}). Set {variable}.revision to a branch, "
            f"a tag or the 40 digits of a commit that {endpoint}/{repo}/commits/main lists. A commit that was resolved "
            f"from a branch and is gone since is forgotten by removing the model's record on the host, {model}.json."
        )
    if status == 401 and has_token and code != "RepoNotFound":
        return (
            f"{endpoint} does not accept the token (HTTP 401), so it was not asked for {repo}: the token is mistyped, "
            "expired or revoked. Replace it where it was given, by model_weights_token_file or model_weights_token."
        )
    if status == 401:
        return (
            f"{endpoint} refuses {repo} (HTTP 401): there is no such repository, or it is private or gated. Correct "
            f"{variable}.repo, or {give}."
        )
    if code == "RepoNotFound" or status == 404:
        return (
            f"{endpoint} does not know {repo} at {revision!r} (HTTP {status}). Correct {variable}.repo, or the address "
            "of the hub, model_weights_endpoint."
        )
    what = f"{path} of {repo}" if path else repo
    if status == 429:
        return (
            f"{endpoint} limits the rate of requests (HTTP 429) for {what}. Wait some minutes and run again; with a "
            "token the limit is higher (model_weights_token_file)."
        )
    if status is not None:
        return (
            f"{endpoint} answered HTTP {status} for {what} at {revision!r}: {text}. Run again when the hub is well, or "
            "bring the weights from a directory (model_weights_source_directory)."
        )
    return (
        f"{endpoint} {'did not deliver' if path else 'cannot be reached for'} {what}: {text}. Check name resolution, "
        "proxy and CA bundle (model_weights_environment) and run again, or bring the weights from a directory "
        "(model_weights_source_directory)."
    )


class HubSource:
    """The model hub, through ``huggingface_hub``, which must be importable where this is made."""

    kind = "hub"

    def __init__(self, model: str, endpoint: str, token: str | None, home: Path) -> None:
        # Read at import: the client must find neither the token nor the cache of whoever runs this.
        os.environ.update(
            HF_HOME=str(home),
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_UPDATE_CHECK="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_OFFLINE="0",
        )
        import huggingface_hub

        self._hub: Any = huggingface_hub
        self._model = model
        self._endpoint = endpoint.rstrip("/")
        self._token = token

    @contextlib.contextmanager
    def _explained(self, repo: str, revision: str, path: str = "") -> Iterator[None]:
        try:
            yield
        except WeightsError:
            raise
        except Exception as error:
            chain: list[BaseException] = []
            cause: BaseException | None = error
            while cause is not None and cause not in chain:
                chain.append(cause)
                cause = cause.__cause__ or cause.__context__
            for link in chain:
                # The file system's fault, not the hub's.
                if isinstance(link, OSError) and link.errno in STORAGE_ERRNOS:
                    raise OSError(link.errno, link.strerror, link.filename) from error
            status, code = None, None
            for link in chain:
                response = getattr(link, "response", None)
                if response is not None:
                    status = int(response.status_code)
                    code = response.headers.get("X-Error-Code")
                    break
            if status is None and isinstance(chain[-1], (ValueError, TypeError, AttributeError, MemoryError)):
                raise
            text = str(chain[-1]).splitlines()[0] if str(chain[-1]) else type(chain[-1]).__name__
            if self._token:
                text = text.replace(self._token, "***")
            raise HubError(
                explain_hub_error(
                    status,
                    code,
                    text.rstrip("."),
                    model=self._model,
                    repo=repo,
                    revision=revision,
                    endpoint=self._endpoint,
                    has_token=bool(self._token),
                    path=path,
                ),
                passing=status is None or status in PASSING_STATUS,
            ) from error

    def listing(self, repo: str, revision: str) -> Listing:
        """Asks the hub for the commit and its files, with sizes and hashes."""
        with self._explained(repo, revision):
            api = self._hub.HfApi(endpoint=self._endpoint, token=self._token or False)
            info = api.model_info(repo, revision=revision, files_metadata=True)
            files = []
            for item in info.siblings or []:
                digest = (
                    Digest("sha256", item.lfs.sha256)
                    if item.lfs
                    else Digest("git-sha1", item.blob_id)
                    if item.blob_id
                    else None
                )
                size = item.lfs.size if item.lfs else item.size
                if size is None or digest is None:
                    raise HubError(
                        f"{self._endpoint} states neither size nor hash of {item.rfilename} in {repo}, so it could "
                        "not be verified."
                    )
                files.append(RemoteFile(item.rfilename, int(size), digest))
            if not info.sha or not COMMIT.fullmatch(info.sha):
                raise HubError(f"{self._endpoint} did not say which commit {revision!r} of {repo} is.")
            return Listing(str(info.sha), tuple(files))

    def fetch(self, repo: str, commit: str, path: str, staging: Path) -> Path:
        """Downloads one file. Without force_download the client would take what lies there unseen."""
        with self._explained(repo, commit, path):
            return Path(
                self._hub.hf_hub_download(
                    repo,
                    path,
                    revision=commit,
                    local_dir=staging,
                    endpoint=self._endpoint,
                    token=self._token or False,
                    force_download=True,
                )
            )
