# SPDX-License-Identifier: Apache-2.0
"""Python that tests run elsewhere, as text: it uses names of the package that exist."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "ansible.module_utils."


def scripts() -> Iterator[tuple[str, ast.Module]]:
    for file in (path for top in ("molecule", "tests") for path in sorted((ROOT / top).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "from vllm_edge." in node.value:
                try:
                    script = ast.parse(node.value)
                except SyntaxError:
                    continue  # a part of a text that is put together
                yield f"{file.relative_to(ROOT)}:{node.lineno}", script


SCRIPTS = dict(scripts())


@pytest.mark.parametrize("place", SCRIPTS)
def test_names_of_the_package_exist(place: str) -> None:
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(SCRIPTS[place]):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm_edge"):
            for name in node.names:
                try:
                    module = importlib.import_module(f"{PACKAGE}{node.module}.{name.name}")
                except ModuleNotFoundError:
                    assert hasattr(importlib.import_module(f"{PACKAGE}{node.module}"), name.name), name.name
                else:
                    modules[name.asname or name.name] = module
    for node in ast.walk(SCRIPTS[place]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert hasattr(modules[node.value.id], node.attr), f"{node.value.id}.{node.attr}"
