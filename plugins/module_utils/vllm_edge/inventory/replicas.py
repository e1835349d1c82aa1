# SPDX-License-Identifier: Apache-2.0
"""Engines of an inventory as they run: with the `engine_defaults` of their model, and each replica by itself.

`replicas: N` of an engine becomes N engines that serve the same names, each on its own GPUs. `expand` is applied once,
to what an operator wrote. Everything after it sees ordinary engines; only the gateway has to know that several of them
may serve a name. `find_replica_errors` checks what the expansion relies on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..text import shown
from .rules import RULES

OF_ONE_ENGINE: dict[str, str] = {
    "model": "the engines that name this model are those that take its defaults",
    **dict.fromkeys(
        ("gpus", "tensor_parallel_size", "pipeline_parallel_size", "replicas"), "it says which GPUs the engine runs on"
    ),
    **dict.fromkeys(("port", "served_names", "stands_in_for"), "it says which requests reach the engine"),
    **dict.fromkeys(
        ("gpu_memory_utilization", "kv_cache_memory_bytes", "vram_budget_mib"),
        "it depends on the engine's GPUs and on what else runs there",
    ),
    "secret_env": "no engine gets a secret that its own entry does not name",  # pragma: allowlist secret
    "accept_risk": "a risk is accepted by each engine that takes it",
    "plan": "the play sets it for each engine",
}
"""Keys of an engine that `engine_defaults` of a model cannot have, and why."""


def add_defaults(engine: Mapping[str, Any], models: Any) -> dict[str, Any]:
    """Return an engine with the arguments that its model's `engine_defaults` have and it does not state itself.

    `models` is vllm_models, as the operator wrote it; what has not the expected type has no defaults.
    """
    name = engine.get("model")
    model = models.get(name) if isinstance(models, Mapping) and isinstance(name, str) else None
    defaults = model.get("engine_defaults") if isinstance(model, Mapping) else None
    inherited = defaults.items() if isinstance(defaults, Mapping) else ()
    own = dict(engine.items())
    return own | {key: value for key, value in inherited if key not in own and key not in OF_ONE_ENGINE}


def find_inherited(engine: Mapping[str, Any], models: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of an engine that its model's `engine_defaults` have, by the name of that variable."""
    defaults = add_defaults({"model": engine.get("model")}, models)
    found = {key: value for key, value in defaults.items() if key != "model" and engine.get(key) == value}
    return {f"vllm_models.{engine['model']}.engine_defaults": found} if found else {}


def count_replicas(engine: Mapping[str, Any]) -> int:
    """Return how many engines an engine of the inventory stands for; 1 if `replicas` is missing or cannot be right."""
    number = engine.get("replicas", 1)
    good = isinstance(number, int) and not isinstance(number, bool)
    return number if good and 1 <= number <= (RULES["replicas"].high or 0) else 1


def list_replicas(name: str, engine: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the engines that an engine of the inventory stands for, by name.

    Replica k is `<name>-<k>`, counted from 0, and gets the k-th part of `gpus`. One replica is the engine itself.
    """
    number = count_replicas(engine)
    settings = {key: value for key, value in engine.items() if key != "replicas"}
    if number == 1:
        return {name: settings}
    gpus = engine.get("gpus")
    slots = list(gpus) if isinstance(gpus, list) else []
    each = len(slots) // number
    return {f"{name}-{k}": {**settings, "gpus": slots[k * each : (k + 1) * each]} for k in range(number)}


def expand(
    engines: Mapping[str, Mapping[str, Any]], profiles: Any, models: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return engines and profiles of an inventory, with defaults of models, and replicas as engines of their own.

    A profile that has not the expected type stays as it is; the validator refuses it.
    """
    profiles = profiles if isinstance(profiles, dict) else {}
    replicas = {name: list_replicas(name, add_defaults(engine, models)) for name, engine in engines.items()}
    expanded = {}
    for name, profile in profiles.items():
        named = profile.get("engines") if isinstance(profile, dict) else None
        expanded[name] = profile
        if isinstance(named, list):
            members = [
                one
                for engine in named
                for one in (replicas.get(engine, [engine]) if isinstance(engine, str) else [engine])
            ]
            expanded[name] = {**dict(profile.items()), "engines": members}
    return {one: engine for parts in replicas.values() for one, engine in parts.items()}, expanded


def expand_observations(observations: Any, engines: Any) -> Any:
    """Return plan_observations with those of an engine with replicas as those of each of its replicas.

    What is stated of a replica by its own name takes precedence. What has not the expected type stays as it is.
    """
    if not isinstance(observations, Mapping) or not isinstance(engines, Mapping):
        return observations
    names = {
        name: list_replicas(name, engines[name]) if isinstance(engines.get(name), Mapping) else [name]
        for name in observations
    }
    expanded = {one: observations[name] for name in observations for one in names[name]}
    return expanded | {one: observations[one] for one in expanded if one in observations}


def count_places(profiles: Mapping[str, Mapping[str, Any]], engines: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return by served name the most engines that serve it, or stand in for it, at once in any profile, if several."""
    most: Counter[str] = Counter()
    for profile in profiles.values():
        for key in ("served_names", "stands_in_for"):
            most |= Counter(name for engine in profile["engines"] for name in engines[engine].get(key) or ())
    return {name: number for name, number in sorted(most.items()) if number > 1}


def find_replica_errors(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield ports of engines with replicas, and names of replicas that another engine has."""
    for name, engine in engines.items():
        number = count_replicas(engine)
        if number == 1:
            continue
        if "port" in engine:
            yield (
                f"serving_engines.{name}.port: {shown(engine['port'])} is the port of one engine, and replicas is "
                f"{number}; remove it, clients reach the replicas at the address of the gateway."
            )
        for other in list_replicas(name, engine):
            if other in engines:
                yield (
                    f"serving_engines: {shown(other)} is also the name of a replica of {name}, whose replicas is "
                    f"{number}; rename one of the two engines."
                )
