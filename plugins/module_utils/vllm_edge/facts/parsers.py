# SPDX-License-Identifier: Apache-2.0
"""Parsers of what other programs print about a host."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..system.host import Unread
from .model import DEFAULT_SHM_BYTES, Space

_SIZES = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def read_free_space(what: str, path: Path) -> Space | Unread:
    """Return the free space of the file system that a path is on, or will be on once it exists."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        found = os.statvfs(place)
    except OSError as error:
        return Unread(f"{path}: {error}")
    return Space(what, str(path), found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def parse_dockerd_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings on the command line of dockerd: `hosts`, and every `--name=value`; a flag alone is True."""
    found: dict[str, Any] = {"hosts": re.findall(r"(?<!\S)(?:-H|--host)[ =]?([a-z]+:\S*)", " ".join(words))}
    for name, value in re.findall(r"(?m)^--([a-z-]+)(?:=(.*))?$", "\n".join(words)):
        found[name] = {"": True, "true": True, "false": False}.get(value, value)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, or ValueError if it holds none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object")
    return found


def number(word: str) -> int | None:
    """Parse a whole number; None for anything else."""
    return int(word) if word.isdigit() else None


def find_replaced_libraries(maps: str) -> tuple[str, ...]:
    """Return the names of the distribution's files in /proc/<pid>/maps that are no longer on disk."""
    paths = re.findall(r"^(?:\S+\s+){5}(/(?:usr|lib\w*)/.*) \(deleted\)$", maps, re.MULTILINE)
    return tuple(sorted({path.rpartition("/")[2] for path in paths}))


def amount(word: str) -> float | None:
    """Parse a number with or without decimals; None for anything else."""
    return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else None


def find_shm_bytes(given: str) -> int:
    """Return the size of a container's /dev/shm in bytes, from the value of --shm-size; empty is Docker's default."""
    match = re.fullmatch(r"(\d+)([bkmg]?)b?", given.lower())
    return int(match[1]) * _SIZES[match[2]] if match else DEFAULT_SHM_BYTES
