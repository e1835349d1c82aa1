# SPDX-License-Identifier: Apache-2.0
"""Modules that live in roles, run through the real AnsibleModule with programs of ours in front of the PATH."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import write_program


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """program(name, script): a shell script that the module finds before the real program of that name."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("STATE", str(tmp_path))
    return lambda name, script: write_program(tmp_path / "bin" / name, script)


@pytest.fixture(scope="module")
def run_case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """run_case(name): what one of the CASES of a file of tests returned or raised. They share their plays."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    mine = [item.callspec.params for item in items if item.module is request.module and hasattr(item, "callspec")]
    asked = [parameters["case"] for parameters in mine if "case" in parameters]
    ended = request.module.CASES.play(tmp_path_factory.mktemp("cases"), asked)

    def run(name: str) -> Any:
        if isinstance(ended[name], Exception):
            raise ended[name]
        return ended[name]

    return run


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Callable[[str, Any], None]:
    """Adds a row to the table at the end: a state of a host, and what an operator reads of it."""

    def add(what: str, said: Any) -> None:
        if said:
            record_property("What a role says of each state of a host", [what, "", said])

    return add
