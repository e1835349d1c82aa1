# SPDX-License-Identifier: Apache-2.0
"""What programs print that run inside an image: names, versions and hashes, in the form and size that they may have.

They become lines of files, parts of records and of messages, so each function accepts nothing else and raises
ImageAnswerError otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion

from ..system import records
from ..text import shorten, shown

LONGEST_TEXT = 4 * 1024 * 1024
"""Characters of an answer. A report of pip has the long descriptions of packages."""
DEEPEST = 8
"""Levels of objects and lists in an answer."""
MOST_PACKAGES = 20_000
MOST_WHEELS = 200
MOST_FAILURES = 100

_WORD = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+!~:_-]{0,99}", re.ASCII)
_WHEEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{1,250}\.whl", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


class ImageAnswerError(Exception):
    """An answer cannot be used. The text says what is wrong with it, as the end of a sentence."""


def _match(value: object, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ImageAnswerError(f"{what} is {shown(shorten(str(value), 60))}")
    return value


def parse_json(text: str) -> Any:
    """Parse an answer. Raises ImageAnswerError: it is no JSON, or longer or deeper than answers may be."""
    if len(text) > LONGEST_TEXT:
        raise ImageAnswerError(f"it has more than {LONGEST_TEXT} characters")
    try:
        return records.parse_json(text, DEEPEST)
    except ValueError as error:
        raise ImageAnswerError(f"it is no JSON: {shorten(str(error), 80)}") from error


def read_packages(data: Any) -> dict[str, Any]:
    """Return the answer of list_packages.py: `packages`, versions by name, and `debian`, rows of three words."""
    try:
        packages, debian = data["packages"], data["debian"]
        if len(packages) + len(debian) > MOST_PACKAGES:
            raise ImageAnswerError(f"it has more than {MOST_PACKAGES} packages")
        for name, version in packages.items():
            _match(name, _WORD, "the name of a package")
            _match(version, _WORD, f"the version of {name}")
        rows = [[_match(word, _WORD, "a word of a Debian package") for word in row] for row in debian]
    except (AttributeError, KeyError, TypeError) as error:
        raise ImageAnswerError("it is not what list_packages.py prints") from error
    if any(len(row) != 3 for row in rows):
        raise ImageAnswerError("a Debian package is not name, version and architecture")
    return {"packages": packages, "debian": rows}


def read_tests(data: Any) -> dict[str, Any]:
    """Return the answer of smoke_test.py: `failures` (shortened texts), `versions` and `libraries`."""
    try:
        # A package that is not installed has an empty version, and is one of the failures.
        versions = {name: data["versions"][name] for name in ("torch", "transformers", "vllm")}
        for name, version in versions.items():
            _match(version or "0", _WORD, f"the version of {name}")
        failures = [shorten(str(text), 300) for text in data["failures"][:MOST_FAILURES]]
        return {"failures": failures, "versions": versions, "libraries": int(data["libraries"])}
    except (KeyError, TypeError, ValueError) as error:
        raise ImageAnswerError("it is not what smoke_test.py prints") from error


def read_record(data: object) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ImageAnswerError("it is no JSON object")
    return data


def check_wheels(data: Any) -> dict[str, str]:
    """Return wheels as a mapping of file name to SHA-256."""
    if not isinstance(data, dict) or len(data) > MOST_WHEELS:
        raise ImageAnswerError(f"the wheels are no mapping of at most {MOST_WHEELS} entries")
    for name, digest in data.items():
        try:
            parse_wheel_filename(name)
        except (InvalidWheelFilename, InvalidVersion, TypeError, AttributeError) as error:
            example = "tokenizers-0.23.3-cp39-abi3-linux_x86_64.whl"
            raise ImageAnswerError(
                f"the name of a wheel is {shown(shorten(str(name), 60))}, expected is one such as {example}"
            ) from error
        _match(name, _WHEEL, "the name of a wheel")
        _match(digest, _HASH, f"the hash of {name}, which must be a SHA-256 in 64 small hexadecimal digits,")
    return dict(data)


def read_pip_report(data: Any) -> dict[str, str]:
    """Return what `pip install --dry-run --report` would install, as file name to SHA-256."""
    try:
        found = {}
        for item in data["install"]:
            info = item["download_info"]
            name = str(info["url"]).partition("#")[0].partition("?")[0].rpartition("/")[2]
            found[re.sub("%2[Bb]", "+", name)] = info["archive_info"]["hashes"]["sha256"]
    except (AttributeError, KeyError, TypeError) as error:
        raise ImageAnswerError("it is not what `pip install --report` prints of wheels with hashes") from error
    return check_wheels(found)


def list_requirements(wheels: Mapping[str, str]) -> list[str]:
    """Return one line `name==version --hash=sha256:...` for each wheel, for `pip install --require-hashes`."""
    parsed = [(*parse_wheel_filename(name)[:2], digest) for name, digest in sorted(wheels.items())]
    return [f"{name}=={version} --hash=sha256:{digest}" for name, version, digest in parsed]
