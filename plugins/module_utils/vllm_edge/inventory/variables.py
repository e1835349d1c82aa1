# SPDX-License-Identifier: Apache-2.0
"""Detection of variables in an inventory that nothing reads, by comparison with the project's roles and group_vars.

Ansible ignores a variable whose name has a typo, and the default applies: what the operator wrote has no effect, and
nothing says so. This runs on the controller, where the project's files are.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..text import nearest
from .engine_inputs import ROLE_FORMS, Spec
from .replicas import REPLICA_KEYS

# Variables of a host that no role's argument spec describes.
OF_A_HOST: dict[str, str] = {
    "serving_profile": "name of the profile that the host serves",
    "gpu_uuids": "UUIDs of its GPUs, in the order of their slots",
    "gpu_count": "number of its GPUs",
    "gpu_name": "name of its GPUs, as nvidia-smi prints it",
    "gpu_memory_mib": "MiB of each of its GPUs, as nvidia-smi prints the total",
}
PREFIXES = ("serving_", "vllm_", "gpu_", "vram_")
"""Beside the prefixes of the roles: a variable with such a name is meant for the project."""
OWN = " A variable of your own needs a name that begins otherwise."
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
    switches: frozenset[str]
    """Variables of group_vars/all/switches.yml that are true or false."""
    settings: frozenset[str]
    """Variables that are a number, true or false, one of a few words, or have a form. The values of others may be
    secret."""
    options: Spec
    """Argument specs of the roles' variables."""
    engine_keys: Spec
    model_keys: Spec


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML loader that ignores Ansible's own tags, whose values do not matter here; libyaml's where it is there."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def load(root: Path) -> Project:
    roles = sorted(path for path in (root / "roles").iterdir() if path.is_dir())
    options: dict[str, Mapping[str, Any]] = {}
    known = set(OF_A_HOST)
    for role in roles:
        known |= set(_read_mapping(role / "defaults" / "main.yml"))
        for entry_point in _read_mapping(role / "meta" / "argument_specs.yml").get("argument_specs", {}).values():
            options |= entry_point.get("options", {})
    for path in (root / "group_vars" / "all").glob("*.yml"):
        known |= set(_read_mapping(path))
    files = [*(root / "playbooks").rglob("*.yml"), *(path for role in roles for path in role.glob("tasks/*.yml"))]
    switches = _read_mapping(root / "group_vars" / "all" / "switches.yml")
    return Project(
        known=frozenset(known | set(options)),
        results=frozenset(name for file in files for name in _find_results(_parse_file(file))),
        roles=tuple(role.name for role in roles),
        switches=frozenset(name for name, value in switches.items() if isinstance(value, bool)),
        settings=frozenset(_find_settings(options, switches)),
        options=options,
        engine_keys={**_select_element_keys(options, "vllm_engine_engines"), **REPLICA_KEYS},
        model_keys=_select_element_keys(options, "model_weights_models"),
    )


def _find_settings(options: Spec, switches: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables that are a number, true or false, or one of a few words, and that nothing derives."""
    yield "vram_foreign"
    derived = {name for name, value in switches.items() if "{{" in str(value)}
    yield from switches.keys() - derived
    for name, option in options.items():
        simple = option.get("type") in SIMPLE or option.get("choices") or name in ROLE_FORMS
        if simple and not option.get("no_log") and name not in derived:
            yield name


def find_unknown_variables(names: Collection[str], project: Project) -> Iterator[str]:
    """Yield one sentence for each variable that is meant for the project and that nothing reads."""
    ours = (*PREFIXES, *(f"{role}_" for role in project.roles))
    # A play with roles has their internal variables, whose names begin with two underscores.
    for name in sorted(name for name in set(names) - project.known - project.results if not name.startswith("__")):
        alike = difflib.get_close_matches(name, project.known, n=1, cutoff=LIKE_ANOTHER)
        if name.startswith(ours) or alike:
            yield (
                f"{name}: nothing reads a variable of this name, so what it says would have no effect; "
                f"{nearest(name, alike or project.known)}{OWN if not alike else ''}"
            )


def _select_element_keys(options: Mapping[str, Mapping[str, Any]], name: str) -> Spec:
    """Return the keys of the elements of a list. The name of an element is its key in the inventory, so it is left
    out."""
    keys: Mapping[str, Mapping[str, Any]] = options.get(name, {}).get("options", {})
    return {key: option for key, option in keys.items() if key != "name"}


def _parse_file(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), _Loader) if path.is_file() else None


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
