# SPDX-License-Identifier: Apache-2.0
"""docs/reference says what the sources say, and the sources say enough."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tools import reference

MODULES = sorted(reference.MODULES.glob("*.py"))

Named = tuple[str, Mapping[str, Any]]

# Words in the name of a size or a time. Such an option says its unit, in its name or in words.
MEASURED = re.compile(r"(^|_)(timeout|interval|delay|wait|size|memory|space|free|reserve|budget|watchdog|shm)(_|$)")
UNIT_IN_WORDS = re.compile(r"\b(seconds?|minutes?|MiB|GiB|bytes|tokens|fraction)\b", re.IGNORECASE)
# vLLM's own names, which are not ours to change.
COUNTS = {"tensor_parallel_size", "pipeline_parallel_size"}


def nested(name: str, options: Mapping[str, Any]) -> Iterator[Named]:
    """Options and those within them, each with its full name."""
    for key, option in options.items():
        yield f"{name}.{key}", option
        yield from nested(f"{name}.{key}", option.get("options") or {})


def described() -> list[Named]:
    """Every option of every role, module and action plugin, and every variable."""
    found: list[Named] = []
    roles = reference.role_docs()
    for role, entry_points in roles.items():
        for entry_point in entry_points.values():
            found += nested(role, entry_point.get("options", {}))
    for name, doc in reference.plugin_docs(reference.MODULES, reference.ACTIONS).items():
        found += nested(name, doc["doc"].get("options", {}))
    for section in reference.variable_docs(roles)["sections"]:
        found += nested(section["title"], section["variables"])
    return found


@pytest.fixture(scope="module")
def options() -> list[Named]:
    return described()


def test_reference_is_up_to_date() -> None:
    pages = reference.render()
    present = {path.name: path.read_text() for path in reference.REFERENCE.glob("*.md")}
    differences = [
        line
        for name in sorted(pages.keys() | present.keys())
        for line in difflib.unified_diff(
            present.get(name, "").splitlines(), pages.get(name, "").splitlines(), name, f"{name} anew", lineterm="", n=0
        )
    ]
    assert not differences, "docs/reference is out of date; run `make reference`:\n" + "\n".join(differences[:40])


def test_every_option_says_what_it_is_and_of_which_type(options: list[Named]) -> None:
    assert len(options) > 100
    assert [name for name, option in options if not option.get("description")] == []
    assert [name for name, option in options if "type" not in option] == []
    assert [name for name, option in options if option["type"] == "list" and "elements" not in option] == []


def is_measured(name: str, option: Mapping[str, Any]) -> bool:
    """Whether an option is a size or a time, by its name and by what it takes."""
    last = name.rpartition(".")[2]
    takes_numbers = option["type"] in {"int", "float"} or bool(re.match(r"\d", str(option.get("default"))))
    return takes_numbers and last not in COUNTS and bool(MEASURED.search(last))


def test_sizes_and_times_have_a_unit(options: list[Named]) -> None:
    measured = [(name, option) for name, option in options if is_measured(name, option)]
    assert len(measured) > 10
    unitless = [
        name
        for name, option in measured
        if not reference.unit(name) and not UNIT_IN_WORDS.search(reference.sentences(option["description"]))
    ]
    assert unitless == []


class Asked(Exception):
    """A module has said which arguments it takes; nothing else of it is to run."""


def arguments(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The argument spec that a module hands to AnsibleModule."""
    spec = importlib.util.spec_from_file_location(f"reference_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    with mock.patch.object(module, "AnsibleModule", side_effect=Asked) as made, pytest.raises(Asked):
        module.main()
    found: dict[str, Any] = made.call_args.kwargs["argument_spec"]
    return found


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of options, whether documented or asked for, what both must say."""
    return {
        name: {
            "type": option.get("type", "str"),
            "elements": option.get("elements"),
            "required": bool(option.get("required", False)),
            "default": option.get("default"),
            "choices": sorted(option.get("choices") or []),
            "options": comparable(option.get("options") or {}),
        }
        for name, option in options.items()
    }


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    return reference.plugin_docs(*sorted({path.parent for path in MODULES}))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_documentation_of_a_module_says_what_it_takes(
    path: Path, documented: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = documented[path.stem]["doc"].get("options", {})
    assert comparable(options) == comparable(arguments(path, monkeypatch))


@pytest.mark.parametrize("variable", ["serving_engines", "serving_profiles", "vllm_models"])
def test_every_key_in_use_is_described(variable: str, options: list[Named]) -> None:
    keys = {name.rpartition(".")[2] for name, _ in options if f".{variable}." in name}
    values = {name: value for found in reference.group_vars().values() for name, value in found.items()}
    assert {key for entry in values[variable].values() for key in entry} <= keys


def test_every_role_has_a_stage() -> None:
    roles = reference.role_docs()
    assert reference.variable_docs(roles)["stages"].keys() == roles.keys()


def test_variables_that_are_described_exist() -> None:
    sources = "".join(
        path.read_text()
        for pattern in ("group_vars/all/*.yml", "inventories/*/group_vars/gpu_hosts/*.yml", "playbooks/**/*.yml")
        for path in reference.ROOT.glob(pattern)
    )
    for section in reference.variable_docs(reference.role_docs())["sections"]:
        for name in section["variables"]:
            assert re.search(rf"\b{name}\b", sources), f"tools/variables.yml describes {name}, which nothing reads"


@pytest.mark.parametrize(
    ("text", "markdown"),
    [
        ("see C(a<b>) and O(c[].d)", "see `a<b>` and `c[].d`"),
        ("a <b> of V(null), I(word), B(bold)", r"a \<b> of `null`, *word*, **bold**"),
        ("M(gpu_slots) with C(f(x))", "`gpu_slots` with `f(x)`"),
        ("NVML(1) stays", "NVML(1) stays"),
    ],
)
def test_markup(text: str, markdown: str) -> None:
    assert reference.markup(text) == markdown


@pytest.mark.parametrize(
    ("name", "option", "head"),
    [
        ("x_timeout_s", {"type": "int", "default": 60}, "int, seconds, default `60`"),
        ("x_mib", {"type": "int", "required": True}, "int, MiB, required"),
        ("x", {"type": "list", "elements": "str", "default": []}, "list of str, default `[]`"),
        ("x", {"type": "bool", "default": True, "value": False}, "bool, is `false`"),
        ("x", {"type": "str", "default": "a", "value": "{{ y }}"}, "str, default `a`"),
    ],
)
def test_head_of_an_option(name: str, option: Mapping[str, Any], head: str) -> None:
    assert reference.head(name, option) == head
