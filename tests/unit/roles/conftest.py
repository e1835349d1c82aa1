# SPDX-License-Identifier: Apache-2.0
"""Modules that live in roles, run through the real AnsibleModule with programs of ours in front of the PATH."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
KEYS = Path(__file__).parent / "keys"
Result = dict[str, Any]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """program(name, script): a shell script that the module finds before the real program of that name."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path))

    def make(name: str, script: str) -> None:
        path = directory / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Why the ROLE of a file of tests refused, by the name of each of its CASES."""
    found: dict[str, str] = request.module.ROLE.said(tmp_path_factory.mktemp("cases"), request.module.CASES)
    return found


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """Adds a row to the table at the end: a state of a host, and what an operator reads of it."""

    def add(what: str, said: str) -> None:
        record_property("state of a host", (what, said))

    return add


@pytest.fixture
def keys() -> Path:
    """Public keys made by gpg 2.2.40 for example.org."""
    return KEYS
