# SPDX-License-Identifier: Apache-2.0
"""Detection of variables in an inventory that nothing reads, by comparison with the project's roles and group_vars.

Ansible ignores a variable whose name has a typo, and the default applies: what the operator wrote has no effect, and
nothing says so. This runs on the controller, where the project's files are.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..text import nearest
from .engine_inputs import Spec
from .merging import VARIABLES
from .rules import RULES

PREFIXES = ("serving_", "vllm_", "gpu_", "vram_")
"""Beside the prefixes of the roles: a variable with such a name is meant for the project."""
OWN = " A variable of your own needs a name that begins otherwise."
REMOVED = {
    "vllm_engine_shutdown_timeout_s": "set vllm_engine_drain_timeout_s for the time that running requests get; "
    "vllm_engine_stop_timeout_s, less 10 s, is what is left for them after SIGTERM",
}
"""Variables of earlier releases, with what to set instead."""
SIMPLE = ("int", "float", "bool")
LIKE_ANOTHER = 0.9
"""Similarity from which a name without these prefixes counts as a typo of a known one."""


@dataclass(frozen=True)
class Project:
    known: frozenset[str]
    """Variables that an operator may set."""
    results: frozenset[str]
    """Variables that plays set themselves."""
    roles: tuple[str, ...]
    options: Spec
    """Argument specs of the roles' variables, by name."""
    variables: Spec
    """Those of the other variables, which meta/variables.yml describes. What has the keys `options` is a mapping from
    names to mappings with these keys. Values may be texts, as `-e` passes them."""
    settings: frozenset[str]
    """Variables that are a number, true or false, one of a few words, or have a form. The values of others may be
    secret."""

    @property
    def engine_keys(self) -> Spec:
        return cast(Spec, self.variables["serving_engines"]["options"])

    @property
    def model_keys(self) -> Spec:
        return cast(Spec, self.variables["vllm_models"]["options"])


def read_options(root: Path) -> dict[str, Mapping[str, Any]]:
    """Return the options of the roles of a project by name, each with its `role`."""
    options: dict[str, Mapping[str, Any]] = {}
    for file in sorted(root.glob("roles/*/meta/argument_specs.yml")):
        for entry_point in _read_mapping(file)["argument_specs"].values():
            options |= {key: {**it, "role": file.parts[-3]} for key, it in entry_point.get("options", {}).items()}
    return options


def read_sections(root: Path, options: Spec) -> dict[str, Any]:
    """Return meta/variables.yml, with the keys of a role's option where `options_of` names one.

    The name of an entry is its key in the inventory, so the key `name` is left out.
    """
    described = _read_mapping(root / "meta" / "variables.yml")
    for section in described["sections"]:
        for option in section["variables"].values():
            if source := option.pop("options_of", None):
                nested: Spec = {key: it for key, it in options[source]["options"].items() if key != "name"}
                own: Spec = option.get("options", {})
                option["options"] = {key: {**nested.get(key, {}), **own.get(key, {})} for key in {**nested, **own}}
    return described


def load(root: Path) -> Project:
    options = read_options(root)
    sections = read_sections(root, options)["sections"]
    variables = {name: option for section in sections for name, option in section["variables"].items()}
    values: dict[str, Any] = {}
    for path in [*root.glob("roles/*/defaults/main.yml"), *root.glob("group_vars/all/*.yml")]:
        values |= _read_mapping(path)
    made: dict[str, Any] = {}
    for name in ("switches", "wiring"):
        made |= _read_mapping(root / "group_vars" / "all" / f"{name}.yml")
    files = [*root.glob("playbooks/**/*.yml"), *root.glob("roles/*/tasks/*.yml")]
    return Project(
        known=frozenset({*values, *options, *variables}),
        results=frozenset(name for file in files for name in _find_results(_parse_file(file))),
        roles=tuple(sorted(path.name for path in root.glob("roles/*"))),
        options=options,
        variables=variables,
        settings=frozenset(
            name
            for name, option in {**options, **variables}.items()
            if (option["type"] in SIMPLE or option.get("choices") or name in RULES)
            and not option.get("no_log")
            and "{{" not in str(made.get(name))  # else it follows from another variable
        ),
    )


@functools.cache
def read_shipped(root: Path) -> dict[str, Any]:
    """Return what the project has of the variables that `merging.merge` takes."""
    return {
        kind: _read_mapping(root / "group_vars" / "all" / f"{file}.yml")[variable]
        for kind, variable, file in (
            *((kind, variable, kind) for kind, variable in VARIABLES.items()),
            ("roles", "serving_roles", "profiles"),
        )
    }


def find_unknown_variables(names: Collection[str], project: Project) -> Iterator[str]:
    """Yield one sentence for each variable that is meant for the project and that nothing reads."""
    ours = (*PREFIXES, *(f"{role}_" for role in project.roles))
    # A play with roles has their internal variables, whose names begin with two underscores.
    for name in sorted(name for name in set(names) - project.known - project.results if not name.startswith("__")):
        if name in REMOVED:
            yield f"{name}: there is no such variable any more; {REMOVED[name]}."
            continue
        alike = difflib.get_close_matches(name, project.known, n=1, cutoff=LIKE_ANOTHER)
        if name.startswith(ours) or alike:
            yield (
                f"{name}: nothing reads a variable of this name, so what it says would have no effect; "
                f"{nearest(name, alike or project.known)}{OWN if not alike else ''}"
            )


@functools.cache
def _make_loader() -> Any:
    """A YAML loader that ignores Ansible's own tags, whose values do not matter here; libyaml's where it is there."""
    import yaml

    loader = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    loader.add_multi_constructor("!", lambda loader, suffix, node: None)  # type: ignore[attr-defined]
    return functools.partial(yaml.load, Loader=loader)


def _parse_file(path: Path) -> Any:
    return _make_loader()(path.read_text(encoding="utf-8")) if path.is_file() else None


def _read_mapping(path: Path) -> dict[str, Any]:
    parsed = _parse_file(path)
    return parsed if isinstance(parsed, dict) else {}


def _find_results(parsed: Any) -> Iterator[str]:
    """Yield names that a play sets while it runs."""
    if isinstance(parsed, list):
        for item in parsed:
            yield from _find_results(item)
    elif isinstance(parsed, dict):
        if isinstance(parsed.get("register"), str):
            yield parsed["register"]
        for key, value in parsed.items():
            if key in ("set_fact", "ansible.builtin.set_fact", "vars") and isinstance(value, dict):
                yield from value
            yield from _find_results(value)
