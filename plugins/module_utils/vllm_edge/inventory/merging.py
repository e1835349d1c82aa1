# SPDX-License-Identifier: Apache-2.0
"""The entries that an inventory has beside the project's (`vllm_models_extra` and so on), and what they need not say.

A model of `vllm_models_extra` that no engine names gets an engine, an engine of `serving_engines_extra` that no profile
names gets a profile, each of the same name. What the engine's entry leaves to the plan is added by
`planning/completion.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .engine_inputs import select_mappings, select_texts

VARIABLES = {"models": "vllm_models", "engines": "serving_engines", "profiles": "serving_profiles"}
"""The variables that are merged with one whose name ends in `_extra`, by what they contain."""
PLANNED = ("tensor_parallel_size", "gpus")
"""Arguments that an engine of an inventory may leave to the plan."""


@dataclass(frozen=True)
class Merged:
    """What has not the expected type is as it was given; the validator refuses it."""

    models: Any
    engines: Any
    profiles: Any
    """Those of the inventory, if it has any, and the chosen ones; else the project's."""
    roles: Any
    """Empty if each profile may serve names of its own."""
    known_profiles: tuple[str, ...]
    """The names of all profiles."""
    incomplete: tuple[str, ...]
    """The engines that leave arguments to the plan."""
    added: Mapping[str, Sequence[str]]
    """Names of the inventory's additional entries, derived ones included, by variable."""
    twice: Mapping[str, Sequence[str]]
    """Names of additional entries that the project has too, by variable."""


def derive_entries(extra: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the additional entries with the engines and profiles that follow from them.

    `extra` and `given` are the variables with and without `_extra`, by the keys of VARIABLES.
    """
    models, engines, profiles = (dict[str, Any](select_mappings(extra.get(kind))) for kind in VARIABLES)
    named = [engine.get("model") for engine in (*engines.values(), *select_mappings(given.get("engines")).values())]
    engines |= {model: {"model": model} for model in models if model not in named}
    listed = (*profiles.values(), *select_mappings(given.get("profiles")).values())
    used = {engine for profile in listed for engine in select_texts(profile.get("engines"))}
    profiles |= {engine: {"engines": [engine]} for engine in engines if engine not in used}
    return {"models": models, "engines": engines, "profiles": profiles}


def choose_profile(extra: Mapping[str, Any]) -> str | None:
    """Return the profile of an inventory that adds only one; None if there are several or none."""
    profiles = derive_entries(extra, {})["profiles"]
    return next(iter(profiles)) if len(profiles) == 1 else None


def merge(
    given: Mapping[str, Any],
    extra: Mapping[str, Any],
    read_shipped: Callable[[], Mapping[str, Any]],
    chosen: Sequence[Any],
) -> Merged:
    """Return the entries of an inventory and of the project that a host has to do with.

    Args:
        given: vllm_models, serving_engines, serving_profiles and serving_roles, by `models`, `engines`, ...
        extra: the additional entries of the inventory.
        read_shipped: returns `given` as the project has it; called only where the inventory adds entries.
        chosen: names of profiles that are there in any case, if they exist.
    """
    added = derive_entries(extra, given)
    added["engines"] = {name: _name_served(engine) for name, engine in added["engines"].items()}
    every: dict[str, Any] = {}
    own: dict[str, dict[str, Any]] = {}
    for kind, entries in added.items():
        known = given.get(kind)
        if not isinstance(known, dict):
            every[kind], own[kind] = known, {}
            continue
        every[kind] = {**dict(known.items()), **entries}
        own[kind] = every[kind] if entries and _plain(known) != read_shipped()[kind] else entries
    kept: set[str] = set(own["profiles"]) | {name for name in chosen if isinstance(name, str)}
    profiles = _keep(every["profiles"], kept if own["profiles"] else None)
    kept = set(own["engines"]) | {
        engine for profile in select_mappings(profiles).values() for engine in select_texts(profile.get("engines"))
    }
    engines = _keep(every["engines"], kept if own["engines"] else None)
    kept = set(own["models"]) | {str(engine.get("model")) for engine in select_mappings(engines).values()}
    models = _keep(every["models"], kept if own["models"] else None)
    if isinstance(models, dict):
        models = {name: _locate(model) if isinstance(model, dict) else model for name, model in models.items()}
    roles = given.get("roles")
    return Merged(
        models=models,
        engines=engines,
        profiles=profiles,
        roles=[] if added["profiles"] and _plain(roles) == read_shipped()["roles"] else roles,
        known_profiles=tuple(select_mappings(every["profiles"])),
        incomplete=tuple(name for name, engine in added["engines"].items() if set(PLANNED) - engine.keys()),
        added={VARIABLES[kind]: list(entries) for kind, entries in added.items()},
        twice={VARIABLES[kind]: sorted(added[kind].keys() & select_mappings(given.get(kind)).keys()) for kind in added},
    )


def list_roles(merged: Merged, profile: str | None) -> Any:
    """Return serving_roles, or the names that a profile serves if it may serve names of its own."""
    engines = select_mappings(merged.engines)
    served = (engines.get(engine, {}).get("served_names") for engine in list_engines(merged, profile))
    return merged.roles or list(dict.fromkeys(name for names in served for name in select_texts(names)))


def list_engines(merged: Merged, profile: str | None) -> list[str]:
    return select_texts(select_mappings(merged.profiles).get(str(profile), {}).get("engines"))


def _name_served(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {"served_names": [engine.get("model")], **dict(engine.items())}


def _locate(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model with the revision and the directory that it need not state."""
    return {"revision": "main", "dir": str(model.get("repo")).rpartition("/")[2], **dict(model.items())}


def _keep(entries: Any, names: set[str] | None) -> Any:
    if names is None or not isinstance(entries, dict):
        return entries
    return {name: entry for name, entry in entries.items() if name in names}


def _plain(value: Any) -> Any:
    """Return a value of Ansible, whose mappings and lists evaluate their items late, as one that can be compared."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
