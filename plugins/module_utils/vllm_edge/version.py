# SPDX-License-Identifier: Apache-2.0
"""Which version of the program this is, and the hash of its sources."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from . import __version__

PACKAGE = Path(__file__).resolve().parent


def hash_files(files: Mapping[str, bytes]) -> str:
    """Return a hash of files, given by their path within the package, that does not depend on their order."""
    lines = (f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:12]


def hash_sources(package: Path = PACKAGE) -> str:
    """Return the hash of the package's files, without what Python compiles from them."""
    paths = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return hash_files({path.relative_to(package).as_posix(): path.read_bytes() for path in paths})


def describe_version() -> str:
    return f"vllm-edge {__version__}, sources {hash_sources()}"
