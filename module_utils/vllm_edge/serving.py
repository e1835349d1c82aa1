# SPDX-License-Identifier: Apache-2.0
"""Contradictions between profiles, engines and models, found from the variables alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """Sentence that offers the names most like `name`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(names)}."


def contradictions(
    profile: str,
    profiles: Mapping[str, Any],
    engines: Mapping[str, Any],
    models: Mapping[str, Any],
    roles: Iterable[str],
) -> list[str]:
    """Every contradiction of a profile as one sentence with variable, value, reason and way out; empty when sound."""
    if profile not in profiles:
        return [f"serving_profile: {profile!r} is not a key of serving_profiles; {nearest(profile, profiles)}"]
    names: list[str] = list(profiles[profile]["engines"])
    found = [
        f"serving_profiles.{profile}.engines: {name!r} is not a key of serving_engines; {nearest(name, engines)}"
        for name in names
        if name not in engines
    ]
    chosen = {name: engines[name] for name in names if name in engines}
    for name, engine in chosen.items():
        found += engine_contradictions(name, engine, models)
    found += shared(profile, chosen)
    served = [served_name for engine in chosen.values() for served_name in engine["served_names"]]
    found += [
        f"serving_profiles.{profile}: role {role!r} of serving_roles is served by "
        f"{'nobody' if served.count(role) == 0 else f'{served.count(role)} engines'}; "
        f"put it into served_names of exactly one of its engines ({', '.join(chosen)})."
        for role in roles
        if served.count(role) != 1
    ]
    return found


def engine_contradictions(name: str, engine: Mapping[str, Any], models: Mapping[str, Any]) -> list[str]:
    """Contradictions within one engine."""
    found = []
    if engine["model"] not in models:
        found.append(
            f"serving_engines.{name}.model: {engine['model']!r} is not a key of vllm_models; "
            f"{nearest(engine['model'], models)}"
        )
    ranks = engine["tensor_parallel_size"] * engine.get("pipeline_parallel_size", 1)
    if ranks != len(engine["gpus"]):
        found.append(
            f"serving_engines.{name}.gpus: {engine['gpus']} are {len(engine['gpus'])} GPUs, but tensor_parallel_size x "
            f"pipeline_parallel_size is {ranks}; give one slot for each rank."
        )
    if not 1024 <= engine["port"] <= 65535:
        found.append(
            f"serving_engines.{name}.port: {engine['port']} is outside 1024 to 65535; "
            f"the reference uses 8050, 8060, 8070."
        )
    return found


def shared(profile: str, engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """GPU slots and ports that two engines of a profile, or one engine twice, want."""
    found = []
    for key, values in (
        ("gpus", {name: engine["gpus"] for name, engine in engines.items()}),
        ("port", {name: [engine["port"]] for name, engine in engines.items()}),
    ):
        owners: dict[int, list[str]] = {}
        for name, wanted in values.items():
            for value in wanted:
                owners.setdefault(value, []).append(name)
        found += [
            f"serving_profiles.{profile}: {key} {value} is wanted by {' and '.join(users)}; each may be used once."
            for value, users in owners.items()
            if len(users) > 1
        ]
    return found
