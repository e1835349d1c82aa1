# SPDX-License-Identifier: Apache-2.0
"""docs/reference/variables.md is up to date, and the documentation of plugins, roles and variables is complete."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from plugins.module_utils.vllm_edge.inventory import rules, variables
from tools import reference

MODULES = sorted(reference.MODULES.glob("*.py"))
FRAGMENTS = sorted((reference.ROOT / "plugins" / "doc_fragments").glob("*.py"))
COLLECTION = ".".join(reference.COLLECTION)

Docs = dict[str, Any]
Named = tuple[str, Mapping[str, Any]]

# Words in the names of sizes and times. Such an option states its unit in its name or in its description.
MEASURED = re.compile(r"(^|_)(timeout|interval|delay|wait|size|memory|space|free|reserve|budget|watchdog|shm)(_|$)")
UNIT_IN_WORDS = re.compile(r"\b(seconds?|minutes?|MiB|GiB|bytes|tokens|fraction)\b", re.IGNORECASE)
# Names of vLLM, which we cannot change.
COUNTS = {"tensor_parallel_size", "pipeline_parallel_size"}


@pytest.fixture(scope="module")
def roles() -> Docs:
    return reference.role_docs()


@pytest.fixture(scope="module")
def documented() -> Docs:
    return reference.module_docs()


def nested(name: str, options: Mapping[str, Any]) -> Iterator[Named]:
    """Yield options and their suboptions, each with its full name."""
    for key, option in options.items():
        yield f"{name}.{key}", option
        yield from nested(f"{name}.{key}", option.get("options") or option.get("suboptions") or {})


@pytest.fixture(scope="module")
def options(roles: Docs, documented: Docs) -> list[Named]:
    """Every option of every role, module and action plugin, and every variable."""
    found = [(role, each.get("options", {})) for role, entries in roles.items() for each in entries.values()]
    found += [(name, plugin["doc"].get("options", {})) for name, plugin in documented.items()]
    found += [(section["title"], section["variables"]) for section in reference.variable_docs()["sections"]]
    return [option for name, given in found for option in nested(name, given)]


def test_the_page_of_variables_is_up_to_date() -> None:
    lines = [text.splitlines() for text in (reference.PAGE.read_text(), reference.render())]
    differences = list(difflib.unified_diff(*lines, reference.PAGE.name, "as generated", lineterm="", n=0))
    assert not differences, "it is out of date; run `make reference`:\n" + "\n".join(differences[:40])


def test_every_option_says_what_it_is_and_of_which_type(options: list[Named]) -> None:
    assert len(options) > 100
    assert [name for name, option in options if not option.get("description")] == []
    assert [name for name, option in options if "type" not in option] == []
    assert [name for name, option in options if option["type"] == "list" and "elements" not in option] == []


def is_measured(name: str, option: Mapping[str, Any]) -> bool:
    last = name.rpartition(".")[2]
    takes_numbers = option["type"] in {"int", "float"} or bool(re.match(r"\d", str(option.get("default"))))
    return takes_numbers and last not in COUNTS and bool(MEASURED.search(last))


def test_sizes_and_times_have_a_unit(options: list[Named]) -> None:
    measured = {
        name: reference.sentences(option["description"]) for name, option in options if is_measured(name, option)
    }
    assert len(measured) > 10
    assert [
        name for name, text in measured.items() if not reference.unit(name) and not UNIT_IN_WORDS.search(text)
    ] == []


def names_below(prefix: str, values: Mapping[str, Any], below: str) -> Iterator[str]:
    """Yield the names that O() or RV() may contain, with [] after each list."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        ending = "[]." if value.get("type") == "list" else "."
        yield from names_below(f"{prefix}{key}{ending}", value.get(below) or value.get("suboptions") or {}, below)


def texts(value: Any) -> Iterator[str]:
    """Yield every text in a documentation."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from texts(inner)


def test_options_and_return_values_that_the_documentation_names_exist(documented: Docs, roles: Docs) -> None:
    docs = [
        (name, plugin, plugin["doc"].get("options", {}), plugin["return"] or {}) for name, plugin in documented.items()
    ]
    for role, entry_points in roles.items():
        options = {key: option for each in entry_points.values() for key, option in each.get("options", {}).items()}
        docs.append((role, entry_points, options, {}))
    wrong = [
        f"{name}: {kind}({inner})"
        for name, doc, options, values in docs
        for text in texts(doc)
        for kind, inner in re.findall(r"\b(O|RV)\(([^)=]+)(?:=[^)]*)?\)", text)
        if inner not in names_below("", *((options, "options") if kind == "O" else (values, "contains")))
    ]
    assert wrong == []


def test_modules_that_documentation_and_examples_name_exist(documented: Docs) -> None:
    ours = {f"{COLLECTION}.{path.stem}" for path in MODULES}
    files = [*MODULES, *FRAGMENTS, *reference.ROOT.glob("roles/*/meta/argument_specs.yml")]
    named = {name for path in files for name in re.findall(r"\bM\(([^)]+)\)", path.read_text())}
    assert len(named & ours) > 5
    for name, plugin in documented.items():
        named |= {entry["module"] for entry in plugin["doc"].get("seealso", [])}
        tasks = yaml.safe_load(plugin["examples"] or "[]") or []
        used = {key for task in tasks for key in task if "." in key}
        assert not tasks or f"{COLLECTION}.{name}" in used, name
        named |= used
    assert {name for name in named if not name.startswith("ansible.builtin.")} <= ours


def test_variables_that_are_described_exist() -> None:
    patterns = ("group_vars/all/*.yml", "inventories/*/group_vars/gpu_hosts/*.yml", "playbooks/**/*.yml")
    paths = [path for pattern in patterns for path in reference.ROOT.glob(pattern)]
    known = {name for path in paths for name in re.findall(r"\w+", path.read_text())}
    project = variables.load(reference.ROOT)
    assert project.variables.keys() - known == set(), "meta/variables.yml describes what nothing reads"

    def last_words(options: Mapping[str, Any]) -> set[str]:
        return set(options).union(*(last_words(option.get("options", {})) for option in options.values()))

    specified = last_words({**project.options, **project.variables})
    assert {name.rpartition(".")[2] for name in rules.RULES} <= specified, "a rule of what no variable has"
