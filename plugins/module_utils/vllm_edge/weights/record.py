# SPDX-License-Identifier: Apache-2.0
"""Data types for a model's files: what a source offers, what is wanted, and the record of what was downloaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ..system.files import read_foreign
from ..system.records import RecordError, parse_json, read_record
from ..text import shown

RECORD_FORMAT = 1
"""Version of the record's format."""
COMMIT = re.compile(r"[0-9a-f]{40}")
"""A full commit id."""
SHA256 = re.compile(r"[0-9a-f]{64}")
MOST_FILES = 10_000
MOST_BYTES = 2**50
"""What a source may state for one file, and for all of them together."""

MOST_CONFIG_BYTES = 16 * 2**20
_NAME, _VERSION = re.compile(r"[A-Za-z][\w.+-]{0,39}"), re.compile(r"\d[\w.+-]{0,39}")
"""Of the program that quantized a checkpoint."""

# The files that vLLM reads. Pickles run code when they are loaded, so they are never copied to the host.
ALLOWED_SUFFIXES = (".safetensors", ".json", ".txt", ".model", ".jinja", ".md")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


class WeightsError(Exception):
    """Weights cannot be downloaded or do not match their hashes; the text is for the operator."""


@dataclass(frozen=True)
class RemoteFile:
    path: str
    """Relative to the root of the repository."""
    size_bytes: int
    digest: str | None = None
    """The hash that the source states, if any: SHA-256 for large files, the id of a git blob for small ones."""

    @property
    def algorithm(self) -> str:
        return "git-sha1" if self.digest is not None and COMMIT.fullmatch(self.digest) else "sha256"


@dataclass(frozen=True)
class Listing:
    commit: str
    files: tuple[RemoteFile, ...]


def is_wanted(path: str) -> bool:
    """Return whether vLLM reads a file of this name; hidden files and directories are left out."""
    return path.endswith(ALLOWED_SUFFIXES) and not any(part.startswith(".") for part in PurePosixPath(path).parts)


def check_path(origin: str, path: Any) -> str:
    """Return a path that a source states. Raises WeightsError if it could lead elsewhere, or cannot be printed."""
    if not isinstance(path, str) or not path:
        raise WeightsError(f"{origin} lists the path {shown(path)}, which is no text. Nothing was brought.")
    if not is_safe_relative(path) or str(PurePosixPath(path)) != path:
        raise WeightsError(f"{origin} lists the path {shown(path)}, which leaves its directory. Nothing was brought.")
    parts = path.encode("utf-8", "replace").split(b"/")
    long = sum(map(len, parts)) > 1024 or max(map(len, parts)) > 200  # the names of parts that arrive are longer
    if long or not path.isprintable():
        why = "is too long for a file" if long else "has characters that cannot be printed"
        raise WeightsError(f"{origin} lists the path {shown(path)}, which {why}. Nothing was brought.")
    return path


def check_listing(origin: str, commit: Any, files: Iterable[tuple[Any, Any, Any]]) -> Listing:
    """Return what a source says of a commit, checked: every path, number and hash.

    `origin` is who says it, for messages. `files` are path, size in bytes and digest of each file; a digest is the
    SHA-256 or the id of the git blob, and None only for a file that is not brought. Raises WeightsError: something is
    not as a well-formed source states it; the message quotes it, shortened.
    """
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise WeightsError(f"{origin} did not say which commit it is: {shown(commit)} is not 40 hexadecimal digits.")
    items: list[RemoteFile] = []
    places: dict[str, str] = {}
    for path, size, digest in files:
        check_path(origin, path)
        if len(items) == MOST_FILES:
            raise WeightsError(f"{origin} lists more than {MOST_FILES:,} files. No checkpoint has so many; check repo.")
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
            raise WeightsError(f"{origin} states the size {shown(size)} of {path}, which is no number of bytes.")
        hashed = isinstance(digest, str) and (COMMIT.fullmatch(digest) or SHA256.fullmatch(digest))
        if digest is not None and not hashed:
            raise WeightsError(f"{origin} states the hash {shown(digest)} of {path}, which is no SHA-256 or git id.")
        items.append(RemoteFile(path, size, digest))
        if is_wanted(path):
            if digest is None:
                raise WeightsError(f"{origin} states no hash of {path}, so the file could not be verified.")
            # Names that differ in case or spelling alone are one file on some file systems.
            key = unicodedata.normalize("NFC", path).casefold()
            if key in places:
                raise WeightsError(f"{origin} lists {path} and {places[key]}, which may be one file. Check repo.")
            places[key] = path
    inside = {str(parent) for key in places for parent in PurePosixPath(key).parents}
    if both := sorted(inside & places.keys()):
        raise WeightsError(f"{origin} lists {places[both[0]]} as a file and as a directory. Nothing was brought.")
    if sum(item.size_bytes for item in items) > MOST_BYTES:
        raise WeightsError(f"{origin} lists files of more than {MOST_BYTES:,} bytes together. Check repo.")
    return Listing(commit, tuple(items))


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
    quantizer: str = ""
    """The program that quantized it, with its version (`read_quantizer`); empty if the files do not say."""

    @property
    def total_bytes(self) -> int:
        return sum(item.size_bytes for item in self.files.values())

    @property
    def manifest_sha256(self) -> str:
        return hash_manifest(self.files)

    @property
    def expected(self) -> list[RemoteFile]:
        """The files with the hashes that they had when they were verified, sorted by path."""
        return [RemoteFile(path, item.size_bytes, item.sha256) for path, item in sorted(self.files.items())]

    def to_json(self) -> str:
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
    model: str
    repo: str
    revision: str
    """Branch, tag or commit."""
    path: Path
    """Directory for the files."""
    manifest_sha256: str = ""
    """The hash over names and contents that the files must have; empty: any."""

    def check_manifest(self, found: str) -> None:
        """Check the hash of the files that are, or will be, in place. Raises WeightsError if another is pinned."""
        if self.manifest_sha256 and found != self.manifest_sha256:
            raise WeightsError(
                f"vllm_models.{self.model}.manifest_sha256 is {self.manifest_sha256}, and the files of {self.repo} at "
                f"{self.revision} have {found}: they are not the files that were pinned. Find out which are right; if "
                "the model was changed on purpose, pin the new value."
            )

    def is_recorded(self, record: Record) -> bool:
        """Return whether the record is about these weights. A branch stays at the commit it was first resolved to."""
        same = (record.repo, record.path) == (self.repo, str(self.path))
        return same and self.revision in (record.requested_revision, record.revision)


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
    try:
        return parse_record(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def is_safe_relative(path: str) -> bool:
    """Return whether a path that a source names stays within the directory that it is put into."""
    pure = PurePosixPath(path)
    return bool(path) and not pure.is_absolute() and ".." not in pure.parts and "\\" not in path and "\0" not in path


def read_quantizer(directory: Path) -> str:
    """Return name and version, such as `modelopt 0.37.0`; empty if the files in the directory do not tell both."""
    for file in ("config.json", "hf_quant_config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            document = parse_json(read_foreign(directory / file, MOST_CONFIG_BYTES))
            config = document.get("quantization_config", document)
            # compressed-tensors writes its version beside quant_method; AWQ's `version` is a layout, such as gemm.
            version = config.get("version") or config.get("autoround_version")
            producer = config.get("producer") or {"name": config.get("quant_method"), "version": version}
            name, version = str(producer.get("name")), str(producer.get("version"))
            if _NAME.fullmatch(name) and _VERSION.fullmatch(version):
                return f"{name} {version}"
    return ""
