# SPDX-License-Identifier: Apache-2.0
"""Download of one model's weights to the host: plan, disk space, staging, verification and putting in place.

The record beside the weights (`/var/lib/vllm-edge/weights/<model>.json`) holds the commit that a branch was resolved to
and, for each file, size, mtime, inode and hash. A run that finds the files as recorded reads neither the network nor
the files. New files arrive in a staging directory on the same file system and replace the old ones only when all of
them are verified, so that a failed download never costs a good file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ..system.files import make_directories, sync
from ..system.space import MIB, explain_unwritable, list_shortages
from .directory import DirectorySource, UnfitDirectory
from .progress import Progress, mib
from .record import (
    PICKLE_SUFFIXES,
    Listing,
    Record,
    RecordedFile,
    RemoteFile,
    Wanted,
    WeightsError,
    hash_manifest,
    is_wanted,
)
from .sources import HubSource, part_path
from .verification import (
    CountBytes,
    Ownership,
    Verification,
    list_directories,
    mismatch,
    observe,
    stat_regular,
    verify_files,
    verify_recorded,
)

Source = HubSource | DirectorySource


def select(listing: Listing, repo: str) -> tuple[list[RemoteFile], list[str]]:
    """Divide a listing into the files to download and the paths of those that are left out, both sorted by path.

    Raises WeightsError: there are no .safetensors files (perhaps only pickles).
    """
    what = f"{repo} at {listing.commit}"
    taken = sorted((item for item in listing.files if is_wanted(item.path)), key=lambda item: item.path)
    left = sorted(item.path for item in listing.files if not is_wanted(item.path))
    if any(item.path.endswith(".safetensors") for item in taken):
        return taken, left
    pickles = [path for path in left if path.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise WeightsError(
            f"{what} has its weights as pickles only ({', '.join(pickles[:3])}), which run code when they are loaded; "
            "they are never brought. Choose a revision or a repository with .safetensors files."
        )
    raise WeightsError(f"{what} has no .safetensors file. Check repository and revision.")


@dataclass
class Plan:
    """What a run has to do, determined without any change on the host."""

    commit: str
    record: Record | None
    """The record on the host, which may be about another commit; None if there is none."""
    verification: Verification
    files: list[RemoteFile]
    """All files of the model."""
    resolved: bool = False
    """Whether a branch or tag was resolved to `commit` in this run."""
    source: Source | None = None
    """Where to download from; None if nothing has to be downloaded."""
    obsolete: list[str] = field(default_factory=list)
    """Files of the former commit that the new one does not have; they are removed."""
    skipped: list[str] = field(default_factory=list)
    """Files of the source that are not downloaded."""

    @property
    def bring(self) -> list[RemoteFile]:
        return [item for item in self.files if item.path not in self.verification.good]


def plan_recorded(record: Record, progress: Progress, *, full: bool) -> Plan:
    """Plan a run whose weights are recorded; `full` hashes every file. Files to download still need a source."""
    verification = verify_recorded(record, full=full, progress=progress.count(record.total_bytes))
    return Plan(record.revision, record, verification, record.expected)


def plan_listed(wanted: Wanted, record: Record | None, source: Source, progress: Progress) -> Plan:
    """Plan a run whose weights are not in the record, by asking the source. Raises WeightsError."""
    listing = source.listing(wanted.repo, wanted.revision)
    files, skipped = select(listing, wanted.repo)
    verification = verify_files(wanted.path, files, progress.count(sum_bytes(files)))
    former = record.files if record is not None and record.path == str(wanted.path) else {}
    obsolete = [name for name in verification.unknown if name in former]
    verification.unknown = [name for name in verification.unknown if name not in former]
    resolved = listing.commit != wanted.revision
    return Plan(listing.commit, record, verification, files, resolved, source, obsolete, skipped)


def sum_bytes(files: Iterable[RemoteFile]) -> int:
    return sum(item.size_bytes for item in files)


def describe_changes(
    wanted: Wanted, plan: Plan, owner: Ownership, faults: Mapping[Path, str]
) -> tuple[list[str], str, str]:
    """Return what a run changes, one sentence each, and the lines before and after of a diff.

    `faults` are files and directories with a wrong owner or mode, from `find_ownership_faults`.
    """
    actions, before, after = [], [], []
    if plan.bring:
        what = f"{len(plan.bring)} of {len(plan.files)} files, {mib(sum_bytes(plan.bring))}"
        actions.append(f"bring {what}, of {wanted.repo} at {plan.commit} into {wanted.path}")
    for item in plan.bring:
        why = plan.verification.damaged.get(item.path)
        digest = f", {item.algorithm} {item.digest}" if item.digest else ""
        before.append(f"{item.path}: {'damaged, ' + why if why else 'missing'}\n")
        after.append(f"{item.path}: {item.size_bytes} bytes{digest}\n")
    for name in plan.obsolete:
        actions.append(f"remove {name}, which {plan.commit} does not have")
        before.append(f"{name}: of the former revision\n")
    for path, has in faults.items():
        actions.append(f"set owner and mode of {path} from {has} to {owner.describe(path)}")
        before.append(f"{path}: {has}\n")
        after.append(f"{path}: {owner.describe(path)}\n")
    return actions, "".join(before), "".join(after)


def check_space(directory: Path, state: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Check that `needed_bytes` fit below a directory, which need not exist, and `reserve_bytes` stay free, and that
    the record fits into the state directory. Raises WeightsError with the figures if not.
    """
    at, needed, kept = {"data": directory, "state": state}, {"data": needed_bytes}, {"data": reserve_bytes}
    if wrong := list_shortages("weights", at, needed, kept):
        raise WeightsError(
            f"Not enough room for the {mib(needed_bytes)} of {directory} beside the {reserve_bytes // MIB} MiB of "
            f"model_weights_reserve_mib: {'; '.join(wrong)}. A file that is replaced stays until the new one is "
            "verified. Free some space, put the weights on a larger file system (model_weights_root), or lower the "
            "reserve."
        )


def explain_storage_error(error: OSError, directory: Path) -> str:
    """Return a sentence on an error of the file system, with a remedy."""
    if told := explain_unwritable(error, directory):
        below = str(directory.parent) in str(error.filename2 or error.filename or directory)
        return f"{told} model_weights_root names another place for the weights." if below else told
    what = f"{os.strerror(error.errno)}{f', {error.filename}' if error.filename else ''}" if error.errno else str(error)
    return (
        f"A file could not be read or written below {directory} ({what}). `findmnt --target {directory}` shows the "
        "file system, and `journalctl --dmesg` whether its disk fails. Repair it and run again."
    )


def staging_directory(wanted: Wanted, commit: str) -> Path:
    """Return where the files of a commit arrive: beside the weights, so that they are moved by a rename."""
    return wanted.path.parent / ".incoming" / f"{wanted.path.name}-{commit[:12]}"


def drop_stale_staging(wanted: Wanted, keep: Path | None, files: Iterable[RemoteFile] = ()) -> None:
    """Remove staging directories of the model that interrupted downloads left, except `keep`, and in that the parts
    of other files than `files`.
    """
    parent = wanted.path.parent / ".incoming"
    pattern = re.compile(re.escape(wanted.path.name) + r"-[0-9a-f]{12}")
    if parent.is_dir():
        for entry in parent.iterdir():
            if pattern.fullmatch(entry.name) and entry != keep and entry.is_dir():
                shutil.rmtree(entry)
        with contextlib.suppress(OSError):
            parent.rmdir()
    if keep is not None:
        parts = {part_path(keep, item) for item in files}
        for entry in keep.rglob("*.part"):
            if entry not in parts or stat_regular(entry) is None:
                entry.unlink()


def list_staged(wanted: Wanted, commit: str, files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Return the files that an earlier run downloaded but did not put in place.

    They are recognised by their size; `bring` verifies their content. Files without a stated hash are not reused.
    """
    staging = staging_directory(wanted, commit)
    found = [(item, stat_regular(staging / item.path)) for item in files if item.digest is not None]
    return [item for item, status in found if status is not None and status.st_size == item.size_bytes]


def sum_parts(staging: Path, files: Iterable[RemoteFile]) -> tuple[int, int]:
    """Return how many of the files have arrived in part, and the size of these parts in bytes."""
    parts = [(item, stat_regular(part_path(staging, item))) for item in files]
    sizes = [min(status.st_size, item.size_bytes) for item, status in parts if status is not None and status.st_size]
    return len(sizes), sum(sizes)


def describe_aftermath(wanted: Wanted, plan: Plan) -> str:
    """Return sentences on what a failed run has left, so that the operator need not check whether data was lost."""
    lines = [f"Nothing was put into {wanted.path}."]
    if plan.verification.good or plan.verification.damaged:
        lines = [f"In {wanted.path} nothing was replaced and nothing deleted."]
    if plan.record is not None and plan.record.revision == plan.commit:
        faults = [f"{path}: {why}" for path, why in sorted(plan.verification.damaged.items())]
        faults += [f"{path} is missing" for path in sorted(plan.verification.missing)]
        if faults:
            lines.append(
                f"It is not whole, however ({'; '.join(faults[:3])}{'; ...' if len(faults) > 3 else ''}): an engine "
                "that runs goes on with what it has loaded, but none should be started from it."
            )
    waiting, staging = list_staged(wanted, plan.commit, plan.bring), staging_directory(wanted, plan.commit)
    parts, parts_bytes = sum_parts(staging, plan.bring)
    if waiting or parts:
        lines.append(
            f"{len(waiting)} of {len(plan.bring)} files ({mib(sum_bytes(waiting))})"
            f"{f' and {mib(parts_bytes)} of {parts} more' if parts else ''} have arrived "
            f"and wait in {staging}; the next run verifies them and brings the rest."
        )
    return " ".join(lines)


def _bring_one(
    source: Source, wanted: Wanted, commit: str, item: RemoteFile, staging: Path, count: CountBytes
) -> tuple[Path, str]:
    """Download and verify one file into the staging directory; return its path there and its SHA-256."""
    if list_staged(wanted, commit, [item]):
        sha256, wrong = mismatch(staging / item.path, item)
        if wrong is None:
            count(item.size_bytes)
            return staging / item.path, sha256
    for _attempt in range(2):
        arrived = source.fetch(wanted.repo, commit, item, staging, count)
        sha256, wrong = mismatch(arrived, item)
        if wrong is None:
            return arrived, sha256
        arrived.unlink()
    raise WeightsError(
        f"{item.path} of {wanted.repo} at {commit} does not verify after two downloads: {wrong}. A proxy or mirror "
        "between here and the hub that alters files is the usual cause (model_weights_endpoint, "
        "model_weights_environment); where the files come from a directory, it is that file "
        "(model_weights_source_directory)."
    )


def bring(
    source: Source,
    wanted: Wanted,
    plan: Plan,
    owner: Ownership,
    progress: Progress,
    *,
    state: Path,
    reserve_bytes: int,
    workers: int,
) -> dict[str, RecordedFile]:
    """Download the files of a plan, verify all of them, and only then put them in place.

    Returns the record entries of the files by path. `reserve_bytes` stay free on the file system, and the record will
    be written into `state`. Raises WeightsError: there is not enough space, a download failed or does not match its
    hash (then no file was replaced), or a directory exists in the place of a file; OSError: the file system refused an
    operation.
    """
    staging = staging_directory(wanted, plan.commit)
    files = plan.bring
    drop_stale_staging(wanted, staging, files)
    needed_bytes = sum_bytes(files) - sum_bytes(list_staged(wanted, plan.commit, files))
    check_space(wanted.path, state, needed_bytes - sum_parts(staging, files)[1], reserve_bytes)
    make_directories(staging)
    staging.parent.chmod(0o700)
    arrived: dict[str, tuple[Path, str]] = {}
    count = progress.count(sum_bytes(files), lambda: f"{len(arrived)} of {len(files)} files")
    count(0)

    def download(item: RemoteFile) -> None:
        arrived[item.path] = _bring_one(source, wanted, plan.commit, item, staging, count)

    try:
        with ThreadPoolExecutor(max_workers=workers) as pool:
            # If one fails, those that have not begun are cancelled.
            list(pool.map(download, files))
        count(0)
    except UnfitDirectory:
        drop_stale_staging(wanted, keep=None)  # what else came from there is not trusted
        raise
    brought = {path: RecordedFile(0, sha256, 0, 0) for path, (_place, sha256) in arrived.items()}
    wanted.check_manifest(hash_manifest({**plan.verification.good, **brought}))

    result = {}
    for item in files:
        path, sha256 = arrived[item.path]
        target = wanted.path / item.path
        make_directories(target.parent)
        if target.is_dir() and not target.is_symlink():
            raise WeightsError(
                f"{target} is a directory, but {wanted.repo} has a file of that name. Remove the directory."
            )
        owner.apply(path)
        sync(path)
        path.replace(target)
        result[item.path] = observe(target, sha256)
    for directory in list_directories(wanted.path, result):
        owner.apply(directory)
        sync(directory)
    sync(wanted.path.parent)
    drop_stale_staging(wanted, keep=None)
    return result
