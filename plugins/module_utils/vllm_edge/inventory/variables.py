# SPDX-License-Identifier: Apache-2.0
"""Which variables the project reads, taken from its roles and group_vars, and those of an inventory that it does not.

A variable whose name has a typo is silently ignored by Ansible, and its default applies: what an operator wrote has no
effect, and nothing says so. Runs on the controller, where the project's files are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..text import nearest
from .engine_inputs import Spec

# What an inventory says of a host and no role's spec describes.
OF_A_HOST: dict[str, str] = {
    "serving_profile": "name of the profile that the host serves",
    "gpu_uuids": "UUIDs of its GPUs, in the order of their slots",
    "gpu_count": "number of its GPUs",
    "gpu_memory_mib": "MiB of each of its GPUs, as nvidia-smi prints the total",
}
PREFIXES = ("serving_", "vllm_", "gpu_", "vram_")
"""Besides those of the roles: whoever writes a name that begins so means the project."""
OWN = " A variable of your own needs a name that begins otherwise."
LIKE_ANOTHER = 0.9
"""How like a known name another must be to be taken for a slip of the pen, beyond our prefixes."""


@dataclass(frozen=True)
class Project:
    """What the project's files say of its variables."""

    known: frozenset[str]
    """Variables that an operator may set."""
    results: frozenset[str]
    """Variables that plays set for themselves."""
    roles: tuple[str, ...]
    switches: frozenset[str]
    """Variables of group_vars/all/switches.yml that are true or false."""
    options: Spec
    """Variables of the roles."""
    engine_keys: Spec
    model_keys: Spec


class _Loader(yaml.SafeLoader):
    """Ansible's own tags carry values that do not matter here."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def load(roles_directories: Iterable[str], playbooks_directory: str, group_vars: str) -> Project:
    """Read roles, playbooks and group_vars/all."""
    known = set(OF_A_HOST)
    roles: list[Path] = []
    for directory in roles_directories:
        roles += sorted(path for path in Path(directory).glob("*") if path.is_dir())
    options: dict[str, Mapping[str, Any]] = {}
    for role in roles:
        known |= set(_mapping(role / "defaults" / "main.yml"))
        for entry_point in _mapping(role / "meta" / "argument_specs.yml").get("argument_specs", {}).values():
            options |= entry_point.get("options", {})
    known |= set(options)
    switches: set[str] = set()
    for path in sorted(Path(group_vars).glob("*.yml")):
        variables = _mapping(path)
        known |= set(variables)
        if path.stem == "switches":
            switches = {name for name, value in variables.items() if isinstance(value, bool)}
    results: set[str] = set()
    for file in [
        *Path(playbooks_directory).rglob("*.yml"),
        *(path for role in roles for path in role.glob("tasks/*.yml")),
    ]:
        results |= set(_results(_parsed(file)))
    return Project(
        frozenset(known),
        frozenset(results),
        tuple(role.name for role in roles),
        frozenset(switches),
        options,
        _elements(options, "vllm_engine_engines"),
        _elements(options, "model_weights_models"),
    )


def unknown_variables(names: Collection[str], project: Project) -> Iterator[str]:
    """One sentence for each variable that is meant for us and that nothing reads."""
    ours = (*PREFIXES, *(f"{role}_" for role in project.roles))
    for name in sorted(set(names) - project.known - project.results):
        alike = difflib.get_close_matches(name, project.known, n=1, cutoff=LIKE_ANOTHER)
        if name.startswith(ours) or alike:
            yield (
                f"{name}: nothing reads a variable of this name, so what it says would have no effect; "
                f"{nearest(name, alike or project.known)}{OWN if not alike else ''}"
            )


def _elements(options: Mapping[str, Mapping[str, Any]], name: str) -> Spec:
    """Keys of the elements of a list; the name of an element is its key in our data."""
    keys: Mapping[str, Mapping[str, Any]] = options.get(name, {}).get("options", {})
    return {key: option for key, option in keys.items() if key != "name"}


def _parsed(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), _Loader) if path.is_file() else None


def _mapping(path: Path) -> dict[str, Any]:
    parsed = _parsed(path)
    return parsed if isinstance(parsed, dict) else {}


def _results(parsed: Any) -> Iterator[str]:
    """Names that a play sets while it runs."""
    if isinstance(parsed, list):
        for item in parsed:
            yield from _results(item)
    elif isinstance(parsed, dict):
        if isinstance(parsed.get("register"), str):
            yield parsed["register"]
        for key, value in parsed.items():
            if key in ("set_fact", "ansible.builtin.set_fact", "vars") and isinstance(value, dict):
                yield from value
            yield from _results(value)
