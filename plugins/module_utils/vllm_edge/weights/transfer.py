# SPDX-License-Identifier: Apache-2.0
"""Download of one model's weights to the host: selection, disk space, staging, verification and putting in place.

The record beside the weights (`/var/lib/vllm-edge/weights/<model>.json`) holds the commit that a branch was resolved to
and, for each file, size, mtime, inode and hashes. A run that finds the files as recorded reads neither the network nor
the files. New files arrive in a staging directory on the same file system and replace the old ones only when all of
them are verified, so that a failed download never costs a good file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .ownership import Ownership, give, list_directories
from .progress import Progress, mib
from .record import Listing, Record, RecordedFile, RemoteFile, Wanted, WeightsError, is_safe_relative
from .sources import PAUSES_S, HubError, Source
from .survey import Survey, mismatch, observe, stat_regular

# The files that vLLM reads. Pickles run code when they are loaded, so they are never copied to the host.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


# --- names and selection ----------------------------------------------------------------------------------------------


def select(listing: Listing, repo: str) -> tuple[list[RemoteFile], list[str]]:
    """Divide a listing into the files to download and those that are left out.

    Args:
        listing: files of a commit
        repo: name of the repository, for messages

    Returns:
        The files to download and the paths of the others, both sorted by path.

    Raises:
        WeightsError: a path leaves its directory, or there are no .safetensors files (perhaps only pickles)
    """
    taken: list[RemoteFile] = []
    left: list[str] = []
    for item in listing.files:
        if not is_safe_relative(item.path):
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


# --- the record -------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Replace the file atomically, also with respect to a power failure. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.chmod(mode)
    temporary.replace(path)


# --- plan -------------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What a run has to do, determined without any change on the host."""

    commit: str
    resolved: bool
    """Whether a branch or tag was resolved to `commit` in this run."""
    record: Record | None
    """The record on the host, which may be about another commit; None if there is none."""
    survey: Survey
    bring: list[RemoteFile]
    """Files to download."""
    expected: dict[str, int]
    """Sizes in bytes of all files of the model, by path."""
    source: Source | None = None
    """Where to download from; None if nothing has to be downloaded."""
    obsolete: list[str] = field(default_factory=list)
    """Files of the former commit that the new one does not have; they are removed."""
    skipped: list[str] = field(default_factory=list)
    """Files of the source that are not downloaded."""


# --- space ------------------------------------------------------------------------------------------------------------


def find_existing_parent(path: Path) -> Path:
    """Return the path itself or its nearest existing parent: a directory created there is on the same file system."""
    while not path.exists():
        path = path.parent
    return path


def check_space(directory: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Check that the file system has enough space. Raises WeightsError with the figures if not.

    Args:
        directory: directory for the files; it need not exist
        needed_bytes: bytes to download
        reserve_bytes: bytes that must stay free afterwards
    """
    found = os.statvfs(find_existing_parent(directory))
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes + reserve_bytes:
        raise WeightsError(
            f"Not enough room below {directory}: {mib(needed_bytes)} must be brought and {mib(reserve_bytes)} are to "
            f"stay free (model_weights_reserve_mib), which makes {mib(needed_bytes + reserve_bytes)}, but "
            f"{mib(free_bytes)} are free. A file that is replaced stays until the new one is verified. Free some "
            "space, put the weights on a larger file system (model_weights_root), or lower the reserve."
        )


def explain_storage_error(error: OSError, directory: Path) -> str:
    """Return a sentence on an error of the file system, with a remedy."""
    what = f"{os.strerror(error.errno)}{f', {error.filename}' if error.filename else ''}" if error.errno else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        found = os.statvfs(find_existing_parent(directory))
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


# --- transfer ---------------------------------------------------------------------------------------------------------


def staging_directory(wanted: Wanted, commit: str) -> Path:
    """Return where the files of a commit arrive: beside the weights, so that they are moved by a rename."""
    return wanted.path.parent / ".incoming" / f"{wanted.path.name}-{commit[:12]}"


def remove_tree(directory: Path) -> None:
    """Remove a directory with its content, without following links. It need not exist. Raises OSError."""
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
    """Remove staging directories of the same model for other commits, left by interrupted downloads.

    Args:
        wanted: the model
        keep: staging directory that stays; None removes all
    """
    parent = wanted.path.parent / ".incoming"
    pattern = re.compile(re.escape(wanted.path.name) + r"-[0-9a-f]{12}")
    if parent.is_dir():
        for entry in parent.iterdir():
            if pattern.fullmatch(entry.name) and entry != keep and entry.is_dir():
                remove_tree(entry)
        with contextlib.suppress(OSError):
            parent.rmdir()


def clean_staging(wanted: Wanted, commit: str) -> None:
    """Remove what earlier runs left and is useless now: other commits, and partly downloaded files.

    The client never resumes a partly downloaded file: its temporary file has another name in each run.
    """
    staging = staging_directory(wanted, commit)
    drop_stale_staging(wanted, keep=staging)
    for entry in staging.glob(".cache/huggingface/download/**/*.incomplete"):
        entry.unlink()


def staged(wanted: Wanted, commit: str, files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Return the files that an earlier run downloaded but did not put in place.

    They are recognised by their size; `bring` verifies their content. Files without a stated hash are not reused.
    """
    staging = staging_directory(wanted, commit)
    result = []
    for item in files:
        found = stat_regular(staging / item.path)
        if found is not None and found.st_size == item.size_bytes and item.digest is not None:
            result.append(item)
    return result


def describe_aftermath(wanted: Wanted, plan: Plan) -> str:
    """Return sentences on what a failed run has left, so that the operator need not check whether data was lost."""
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
    """Download files, verify all of them, and only then put them in place.

    Args:
        source: where to download from
        wanted: the model
        commit: full commit id
        files: files to download
        owner: owner and permissions of the files
        progress: receives the progress
        workers: number of parallel downloads

    Returns:
        The record entries of the files by path.

    Raises:
        WeightsError: a download failed or does not match its hash (then no file was replaced), or a directory exists in
            the place of a file
        OSError: the file system refused an operation
    """
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
    for directory in list_directories(wanted.path, result):
        give(directory, owner)
    drop_stale_staging(wanted, keep=None)
    return result
