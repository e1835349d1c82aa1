# SPDX-License-Identifier: Apache-2.0
"""The medium of an air gap: which variables its file air-gap.yml may set, and whether its files are those staged.

The medium comes from outside. Its file is JSON with plain values (which is YAML too), so nothing in it is a template,
and its hash, which operators carry by another way, covers the hashes of all other files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .openpgp import parse_fingerprints

FORMAT = 1
SUMS = "SHA256SUMS"
MAX_BYTES = 16 * 1024**2
"""Our choice for air-gap.yml and SHA256SUMS; a medium with 10,000 files has 1.5 MB of hashes."""
HASH = re.compile(r"[0-9a-f]{64}")
COMMIT = re.compile(r"[0-9a-f]{40}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}/[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
IMAGE = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]{0,300}:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
URL = re.compile(r"(?:file|https?)://[A-Za-z0-9._~:/%\[\]-]*")

Record = Mapping[str, Sequence[Any]]
"""What was verified: by path the hash, and what identifies the file's content since (`identify`)."""


class MediumError(ValueError):
    """The medium, or its file air-gap.yml, is not usable. The message is one sentence or several."""


def _show(value: object) -> str:
    return ascii(value)[:300]


def read_plain_file(path: Path) -> bytes:
    """Return the content of a small regular file, without following a link at its end. Raises MediumError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise MediumError(f"{_show(str(path))} cannot be read: {error.strerror}.") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MediumError(f"{_show(str(path))} is not a regular file.")
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise MediumError(f"{_show(str(path))} has more than {MAX_BYTES} bytes.")
    return data


def check_path(value: object) -> str:
    """Return a path relative to the medium that cannot leave it. Raises MediumError."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9._+~:@,=() -][A-Za-z0-9._+~:@,=()/ -]*", value):
        raise MediumError(f"{_show(value)} is not a relative path of plain characters.")
    if any(part in ("", ".", "..") for part in value.rstrip("/").split("/")):
        raise MediumError(f"{_show(value)} leaves the medium, or is written in another way than the shortest.")
    return value


def _match(pattern: re.Pattern[str]) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise MediumError(f"{_show(value)} does not have the form {pattern.pattern}.")
        return value

    return check


def _check_fingerprints(value: object) -> object:
    try:
        if isinstance(value, str) and parse_fingerprints(value):
            return value
    except ValueError as error:
        raise MediumError(f"{error}.") from error
    raise MediumError(f"{_show(value)} is no fingerprint; the staged keys have at least one each.")


def _check_fields(value: object, fields: Mapping[str, Callable[[object], object]], what: str) -> dict[str, Any]:
    """Return a mapping that has exactly these fields, each checked. Raises MediumError."""
    if not isinstance(value, dict) or value.keys() != fields.keys():
        given = sorted(map(str, value)) if isinstance(value, dict) else value
        raise MediumError(f"{what} has {_show(given)}; expected are {', '.join(fields)}.")
    return {name: check(value[name]) for name, check in fields.items()}


def _check_repositories(value: object) -> object:
    if not isinstance(value, list):
        raise MediumError(f"{_show(value)} is no list.")
    fields = {"path": check_path, "suite": _match(WORD), "component": _match(WORD)}
    return [_check_fields(entry, fields, "an entry") for entry in value]


def _check_mapping(names: re.Pattern[str], check: Callable[[object], object]) -> Callable[[object], object]:
    def check_all(value: object) -> object:
        if not isinstance(value, dict) or not all(names.fullmatch(name) for name in value):
            raise MediumError(f"{_show(value)} is no mapping of names like {names.pattern}.")
        return {name: check(entry) for name, entry in value.items()}

    return check_all


def _check_model(value: object) -> object:
    return _check_fields(value, {"repo": _match(REPOSITORY), "revision": _match(COMMIT)}, "a model")


REPOSITORY_PREFIXES = ("nvidia_driver", "container_runtime", "container_runtime_docker")
CHECKS: Mapping[str, Callable[[object], object]] = {
    "vllm_edge_host_distribution_repositories": _check_repositories,
    "vllm_edge_host_wheels_directory": check_path,
    "vllm_image_base": _match(IMAGE),
    "vllm_image_base_id": _match(re.compile(r"sha256:[0-9a-f]{64}")),
    "vllm_image_base_archive": check_path,
    "vllm_image_wheels_directory": check_path,
    "vllm_image_wheel_hashes": _check_mapping(WORD, _match(HASH)),
    "models": _check_mapping(WORD, _check_model),
    **{f"{prefix}_repository_{name}": check_path for prefix in REPOSITORY_PREFIXES for name in ("url", "key_url")},
    **{f"{prefix}_repository_key_fingerprint": _check_fingerprints for prefix in REPOSITORY_PREFIXES},
}
"""The names that air-gap.yml may have. Paths are relative to the medium."""
REQUIRED = ("vllm_image_base", "vllm_image_base_id", "vllm_image_base_archive", "vllm_edge_host_wheels_directory")


@dataclass(frozen=True)
class Document:
    sums_sha256: str
    values: Mapping[str, Any]


def parse_document(data: bytes) -> Document:
    """Return the content of air-gap.yml. Raises MediumError."""

    def refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            raise MediumError("It has a name twice.")
        return dict(pairs)

    try:
        text = re.sub(r"\A(?:#[^\n]*\n)+", "", data.decode("ascii"))
        found = json.loads(text, object_pairs_hook=refuse_twice, parse_int=str, parse_float=str, parse_constant=str)
    except MediumError:
        raise
    except (ValueError, RecursionError) as error:
        raise MediumError(
            "It is not the JSON that playbooks/stage.yml writes; stage again with this release."
        ) from error
    if isinstance(found, dict) and found.get("air_gap_format") != str(FORMAT):
        raise MediumError(f"air_gap_format is {_show(found.get('air_gap_format'))}, and this release reads {FORMAT}.")
    top: dict[str, Callable[[object], object]] = {
        "air_gap_format": str,
        "sums_sha256": _match(HASH),
        "variables": lambda value: value,
    }
    fields = _check_fields(found, top, "It")
    given = fields["variables"]
    if not isinstance(given, dict) or (unknown := sorted(given.keys() - CHECKS.keys())):
        raise MediumError(f"It sets {_show(unknown if isinstance(given, dict) else given)}, which no medium sets.")
    if missing := [name for name in REQUIRED if name not in given]:
        raise MediumError(f"It does not set {', '.join(missing)}.")
    values = {}
    for name, value in given.items():
        try:
            values[name] = CHECKS[name](value)
        except MediumError as error:
            raise MediumError(f"{name}: {error}") from error
    return Document(fields["sums_sha256"], values)


def read_document(file: Path, expected: str) -> Document:
    """Return the content of the file air-gap.yml, whose hash operators carried by another way. Raises MediumError."""
    if not HASH.fullmatch(expected):
        raise MediumError(
            f"air_gap_sha256 is {_show(expected)}: set it to the 64 digits that playbooks/stage.yml printed, carried "
            f"by another way than the medium (-e air_gap={file} -e air_gap_sha256=...)."
        )
    data = read_plain_file(file)
    if (found := hashlib.sha256(data).hexdigest()) != expected:
        raise MediumError(
            f"{file} has the SHA-256 {found}, and air_gap_sha256 is {expected}: the file was changed since it was "
            f"staged, or the hash belongs to another medium. Nothing of it was used. Compare both with what "
            f"playbooks/stage.yml printed, and copy the medium again."
        )
    try:
        return parse_document(data)
    except MediumError as error:
        raise MediumError(f"{file}: {error} Nothing of it was used.") from error


def resolve(document: Document, controller: Path, host: str, url: str) -> dict[str, Any]:
    """Return the variables of the roles, with the medium's paths as controller and host see them.

    Args:
        controller: the medium's directory on the controller
        host: the medium's directory on the host
        url: address of that directory for apt; empty for the directory itself

    Raises:
        MediumError: a directory or an address is not usable
    """
    if not re.fullmatch(r"/[A-Za-z0-9._+~@/-]*", host) or ".." in host.split("/"):
        raise MediumError(f"air_gap_host_directory is {_show(host)}: set an absolute path of plain characters.")
    url = (url or f"file://{host}").rstrip("/")
    if not URL.fullmatch(url):
        raise MediumError(f"air_gap_url is {_show(url)}: set an address that begins with file:, http: or https:.")
    found: dict[str, Any] = {"vllm_image_base_digest": "", "vllm_image_base_archive_on_host": True}
    for name, value in document.values.items():
        if name == "vllm_edge_host_distribution_repositories":
            found[name] = [{"url": f"{url}/{entry.pop('path')}", **entry} for entry in map(dict, value)]
        elif name.endswith(("_repository_url", "_key_url")):
            found[name] = f"{url}/{value}"
        elif name == "vllm_image_base_archive":
            found[name] = f"{host}/{value}"
        elif name.endswith("_wheels_directory"):
            found[name] = str(controller / value)
        elif name != "models":
            found[name] = value
    found |= {name.replace("_url", "_file"): "" for name in found if name.endswith("_key_url")}
    if "vllm_image_wheels_directory" in found:
        found["vllm_image_pip_source"] = "directory"
    if "models" in document.values:
        found["model_weights_source_directory"] = f"{host}/weights"
    return found


def pin_models(document: Document, models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inventory's models with the commits that the medium has. Raises MediumError where a pin differs."""
    found = dict(models)
    for name, staged in document.values.get("models", {}).items():
        model = found.get(name)
        if model is None or model.get("repo") != staged["repo"]:
            continue
        pinned = str(model.get("revision", "main"))
        if COMMIT.fullmatch(pinned) and pinned != staged["revision"]:
            raise MediumError(
                f"vllm_models.{name}.revision pins {pinned}, and the medium has the commit {staged['revision']}: stage "
                f"again with this inventory, or pin the staged commit."
            )
        found[name] = {**model, "revision": staged["revision"]}
    return found


def read_sums(root: Path, expected: str) -> dict[str, str]:
    """Return the hashes in SHA256SUMS by path. Raises MediumError."""
    data = read_plain_file(root / SUMS)
    if hashlib.sha256(data).hexdigest() != expected:
        raise MediumError(
            f"{root / SUMS} was changed since it was staged, or belongs to another medium than air-gap.yml. Nothing of "
            f"the medium was used: copy it again."
        )
    found: dict[str, str] = {}
    for line in data.decode("utf-8", "replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  \./(.+)", line)
        if not match or match[2] in found:
            raise MediumError(
                f"{root / SUMS} has the line {_show(line)}, which names no file, or one that it has twice."
            )
        found[check_path(match[2])] = match[1]
    return found


def _walk(root: Path, name: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file below a directory of the medium, without following links. Raises MediumError."""
    there = os.lstat(root / name)
    if stat.S_ISDIR(there.st_mode):
        for entry in sorted(os.listdir(root / name)):
            yield from _walk(root, f"{name}/{entry}")
    elif stat.S_ISREG(there.st_mode):
        yield name, there
    else:
        kind = "a link" if stat.S_ISLNK(there.st_mode) else "neither a file nor a directory"
        raise MediumError(f"{_show(str(root / name))} is {kind}, which staging writes nowhere. Nothing of it was used.")


def identify(there: os.stat_result) -> list[int]:
    """Return what changes with a file's content. A user cannot set the change time (ctime) of a file."""
    return [there.st_dev, there.st_ino, there.st_size, there.st_mtime_ns, there.st_ctime_ns]


def _hash(path: Path) -> tuple[str, list[int]]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise MediumError(f"{_show(str(path))} was replaced while it was read.")
        digest, left = hashlib.sha256(), os.fstat(descriptor).st_size
        # A file that grows while it is read has another hash than the one that is expected.
        while left >= 0 and (block := file.read(min(4 * 1024**2, left + 1))):
            digest.update(block)
            left -= len(block)
        return digest.hexdigest(), identify(os.fstat(descriptor))


def verify(root: Path, sums: Mapping[str, str], below: Sequence[str], known: Record) -> dict[str, list[Any]]:
    """Verify the files of the medium below some of its directories.

    Args:
        sums: the expected hashes by path
        below: directories; one that does not exist is left out, because the medium may be divided
        known: what was verified before; files that are the same since are not read again

    Returns:
        What was verified now, with what was known of other directories.

    Raises:
        MediumError: a file was changed, is missing, was added, or is a link
    """
    found = {name: list(entry) for name, entry in known.items()}
    for directory in map(check_path, below):
        if not os.path.lexists(root / directory):
            continue
        try:
            files = dict(_walk(root, directory))
            for name, there in files.items():
                if name not in sums:
                    raise MediumError(f"{_show(str(root / name))} is not in {SUMS}: it was added after staging.")
                if found.get(name) == [sums[name], *identify(there)]:
                    continue
                digest, identity = _hash(root / name)
                if digest != sums[name]:
                    raise MediumError(
                        f"{_show(str(root / name))} was changed since it was staged: it has the SHA-256 {digest}, and "
                        f"{SUMS} has {sums[name]}. Copy it again from where it was staged."
                    )
                found[name] = [digest, *identity]
        except OSError as error:
            raise MediumError(f"{_show(error.filename)} cannot be read: {error.strerror}.") from error
        if missing := sorted(name for name in sums if name.startswith(f"{directory}/") and name not in files):
            raise MediumError(
                f"{_show(str(root / missing[0]))} is missing, and {SUMS} lists it: copy the medium again."
            )
    return found
