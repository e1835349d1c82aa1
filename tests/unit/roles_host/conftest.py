# SPDX-License-Identifier: Apache-2.0
"""Modules that live in roles, run through the real AnsibleModule with programs of ours in front of the PATH."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

ROOT = Path(__file__).resolve().parents[3]
KEYS = Path(__file__).parent / "keys"
Result = dict[str, Any]


def load(role: str, name: str) -> ModuleType:
    path = ROOT / "roles" / role / "library" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"role_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="load_role_module")
def load_role_module_fixture() -> Callable[[str, str], ModuleType]:
    return load


@pytest.fixture
def run_role_module(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """run_role_module(role, name, args, check=False) -> what the module printed, with its exit status as `rc`."""

    def run(role: str, name: str, args: Mapping[str, Any], *, check: bool = False) -> Result:
        module = load(role, name)
        capsys.readouterr()
        with patch_module_args({**args, "_ansible_check_mode": check}), pytest.raises(SystemExit) as ended:
            module.main()
        result: Result = json.loads(capsys.readouterr().out)
        result["rc"] = int(ended.value.code or 0)
        return result

    return run


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
