# SPDX-License-Identifier: Apache-2.0
"""The border to what an image, or Docker about an image, says: nothing of it is used before it was read here.

Names and versions of an image become lines of files that pip and Docker read on the controller and on the host, so each
function accepts only what its pattern allows, of a limited size, and otherwise raises ImageAnswerError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ..system import records
from ..text import shorten, shown

LONGEST_TEXT = 4 * 1024 * 1024
"""Characters of an answer. A report of pip has the long descriptions of packages."""
DEEPEST = 8
"""Levels of objects and lists in an answer."""
MOST_PACKAGES = 2000
MOST_PLATFORMS = 100
MOST_FAILURES = 100
MOST_WHEELS = 200

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,98}[a-z0-9])?", re.ASCII)
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!_-]{0,99}", re.ASCII)
_PYTHON = re.compile(r"3\.[0-9]{1,3}", re.ASCII)
_PLATFORM = re.compile(r"(manylinux[0-9_]{0,20}|linux)_[a-z0-9_]{1,40}", re.ASCII)
_DEBIAN = tuple(
    re.compile(pattern, re.ASCII)
    for pattern in (r"[a-z0-9][a-z0-9+.-]{0,99}", r"[0-9A-Za-z][0-9A-Za-z.+~:-]{0,99}", r"[a-z0-9-]{1,20}")
)
_WORD = re.compile(r"[a-z]{1,30}", re.ASCII)
_PATH = re.compile(r"/[A-Za-z0-9/._+-]{1,300}", re.ASCII)
_ID = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_USER = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]{0,62}(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,62})?)?", re.ASCII)
_WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{1,250}\.whl", re.ASCII)
_CUDA = re.compile(r"[0-9]{1,3}(\.[0-9]{1,5}){0,3}", re.ASCII)


class ImageAnswerError(Exception):
    """An answer cannot be used. The text says what is wrong with it, as the end of a sentence."""


def _reject(value: object, what: str, wanted: str) -> ImageAnswerError:
    text = shorten(value, 60) if isinstance(value, str) else str(type(value).__name__)
    return ImageAnswerError(f"{what} is {shown(text)}, expected is {wanted}")


def _match(value: object, pattern: re.Pattern[str], what: str, wanted: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _reject(value, what, wanted)
    return value


def _read_version(value: object, what: str) -> str:
    version = _match(value, _VERSION, what, "a version as PEP 440 writes one")
    try:
        Version(version)
    except InvalidVersion as error:
        raise _reject(value, what, "a version as PEP 440 writes one") from error
    return version


def parse_json(text: str) -> Any:
    """Parse JSON of others.

    Raises ImageAnswerError: it is no JSON, longer than LONGEST_TEXT, deeper than DEEPEST, or has a key twice.
    """
    if not isinstance(text, str) or len(text) > LONGEST_TEXT:
        raise ImageAnswerError(f"it has more than {LONGEST_TEXT} characters")
    try:
        return records.parse_json(text, DEEPEST)
    except ValueError as error:
        raise ImageAnswerError(f"it is no JSON: {shorten(str(error), 80)}") from error


def _read_object(value: object, what: str, required: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _reject(value, what, "a JSON object")
    for key in value:
        if key not in required and key not in optional:
            raise ImageAnswerError(f"{what} has the unknown key {shown(shorten(key, 60))}")
    for key in required:
        if key not in value:
            raise ImageAnswerError(f"{what} has no {key}")
    return value


def _read_list(value: object, what: str, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ImageAnswerError(f"{what} is no list of at most {most} entries")
    return value


def _check_packages(packages: object) -> None:
    if not isinstance(packages, dict) or len(packages) > MOST_PACKAGES:
        raise ImageAnswerError(f"packages is no JSON object of at most {MOST_PACKAGES} entries")
    for name, version in packages.items():
        _match(name, _NAME, "the name of a package", "a canonical name such as huggingface-hub")
        _read_version(version, f"the version of {name}")


def check_contents(data: object) -> dict[str, Any]:
    """Return the content of an image: `python`, `platforms` and `packages`, and what else inspect_image.py prints.

    Args:
        data: the parsed answer of inspect_image.py, or `base_contents` of a record

    Raises:
        ImageAnswerError: anything in it is not what that script prints
    """
    known = _read_object(
        data, "the answer", ("python", "platforms", "packages"), ("implementation", "externally_managed")
    )
    _check_packages(known["packages"])
    platforms = _read_list(known["platforms"], "platforms", MOST_PLATFORMS)
    if not platforms:
        raise ImageAnswerError("platforms is empty")
    for platform in platforms:
        _match(platform, _PLATFORM, "a platform", "one such as manylinux_2_35_x86_64")
    _match(known["python"], _PYTHON, "python", "a release such as 3.12")
    for key, pattern in (("implementation", _WORD), ("externally_managed", _PATH)):
        if key in known:
            _match(known[key], pattern, key, "what Python says of itself")
    return dict(known)


def check_inventory(data: object) -> dict[str, Any]:
    """Return the answer of list_packages.py: `packages` and `debian`, rows of name, version and architecture."""
    known = _read_object(data, "the answer", ("packages", "debian"))
    _check_packages(known["packages"])
    for row in _read_list(known["debian"], "debian", 10 * MOST_PACKAGES):
        if not isinstance(row, list) or len(row) != 3:
            raise ImageAnswerError("debian has an entry that is not name, version and architecture")
        for value, pattern in zip(row, _DEBIAN, strict=True):
            _match(value, pattern, "a word of a Debian package", "one that dpkg writes")
    return dict(known)


def check_tests(data: object) -> dict[str, Any]:
    """Return the answer of smoke_test.py: `failures` (shortened texts), `versions` and `libraries`."""
    known = _read_object(data, "the answer", ("failures", "versions", "libraries"), ("test",))
    failures = _read_list(known["failures"], "failures", MOST_FAILURES)
    if not all(isinstance(failure, str) for failure in failures):
        raise ImageAnswerError("failures has an entry that is no text")
    versions = _read_object(known["versions"], "versions", ("torch", "transformers", "vllm"))
    # A package that is not installed has an empty version, and is one of the failures.
    read = {key: value and _read_version(value, f"the version of {key}") for key, value in versions.items()}
    libraries = known["libraries"]
    if type(libraries) is not int or not 0 <= libraries < 100_000:
        raise _reject(libraries, "libraries", "a number of files")
    test = {"test": _match(known["test"], _HEX, "test", "a SHA-256")} if "test" in known else {}
    return {"failures": [shorten(text, 300) for text in failures], "versions": read, "libraries": libraries} | test


def check_identity(data: object) -> dict[str, Any]:
    """Return who a base image is, from the answer of `docker image inspect`: `id`, `digests`, `user` and `cuda`.

    Id and digests are Docker's; user and environment are the image's.

    Raises ImageAnswerError: the user could be more than one word of a Dockerfile, or Docker's part has another form.
    """
    try:
        (image,) = _read_list(data, "the answer", 1)
        config = image["Config"] or {}
        digests = [str(digest).rpartition("@")[2] for digest in image.get("RepoDigests") or []]
        user, environment = config.get("User") or "", config.get("Env") or []
        found = [text.partition("=")[2] for text in environment if text.startswith("CUDA_VERSION=")]
        identity = _match(image["Id"], _ID, "the id", "sha256:...")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ImageAnswerError("it is not what `docker image inspect` prints of one image") from error
    return {
        "id": identity,
        "digests": [_match(digest, _ID, "a digest", "sha256:...") for digest in dict.fromkeys(digests)],
        "user": _match(user, _USER, "its user", "a user such as 1000:1000"),
        "cuda": found[0] if found and _CUDA.fullmatch(found[0]) else "",
    }


def check_record(data: object) -> dict[str, Any]:
    """Return the record image.json of a host, whose texts came from an image.

    Args:
        data: the parsed record; an empty object where there is none

    Raises:
        ImageAnswerError: a part of it is not what this release would record
    """
    if not isinstance(data, dict):
        raise _reject(data, "the record", "a JSON object")
    for key in ("base_id", "id"):
        if key in data:
            _match(data[key], _ID, key, "sha256:...")
    for key in ("base", "base_digest", "name", "requirement", "constraint", "cuda", "driver_branch"):
        if not isinstance(data.get(key, ""), str) or not data.get(key, "").isprintable():
            raise _reject(data[key], key, "a printable text")
    for item in _read_list(data.get("base_ids", []), "base_ids", 4):
        _match(item, _ID, "an id of the archive", "sha256:...")
    if "base_contents" in data:
        check_contents(data["base_contents"])
    if "tested" in data:
        check_tests(data["tested"])
    check_wheels(data.get("wheels", {}))
    return data


def check_wheels(data: object) -> dict[str, str]:
    """Return wheels as a mapping of file name to SHA-256.

    Raises ImageAnswerError: a name is not that of a wheel, a hash is none, or there are more than MOST_WHEELS.
    """
    if not isinstance(data, dict) or len(data) > MOST_WHEELS:
        raise ImageAnswerError(f"the wheels are no mapping of at most {MOST_WHEELS} entries")
    for name, digest in data.items():
        try:
            parse_wheel_filename(name)
        except (InvalidWheelFilename, InvalidVersion, TypeError, AttributeError) as error:
            raise _reject(
                name, "the name of a wheel", "one such as tokenizers-0.23.3-cp39-abi3-linux_x86_64.whl"
            ) from error
        _match(name, _WHEEL, "the name of a wheel", "plain")
        _match(digest, _HEX, f"the hash of {name}", "a SHA-256 in 64 small hexadecimal digits")
    return dict(data)


def read_pip_report(data: object) -> dict[str, str]:
    """Return what `pip install --dry-run --report` would install, as file name to SHA-256.

    Raises ImageAnswerError: it would install something else than wheels with a hash.
    """
    try:
        found = {}
        for item in _read_list(data["install"], "install", MOST_WHEELS):  # type: ignore[index]
            info = item["download_info"]
            name = str(info["url"]).partition("#")[0].partition("?")[0].rpartition("/")[2].replace("%2B", "+")
            found[name.replace("%2b", "+")] = info["archive_info"]["hashes"]["sha256"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ImageAnswerError("it is not what `pip install --report` prints of wheels with hashes") from error
    return check_wheels(found)


def list_requirements(wheels: Mapping[str, str]) -> list[str]:
    """Return one line `name==version --hash=sha256:...` for each wheel, for `pip install --require-hashes`."""
    parsed = [(*parse_wheel_filename(name)[:2], digest) for name, digest in sorted(wheels.items())]
    return [f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in parsed]


def explain_other_wheels(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return how wheels differ from the wanted ones; empty if they are the same."""
    parts = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    parts += [f"{name} is not among them" for name in sorted(found.keys() - wanted.keys())]
    parts += [
        f"{name} has the SHA-256 {found[name]} instead of {wanted[name]}"
        for name in sorted(found.keys() & wanted.keys())
        if found[name] != wanted[name]
    ]
    return "; ".join(parts[:5]) + ("; ..." if len(parts) > 5 else "")
