# SPDX-License-Identifier: Apache-2.0
"""What an inventory has beside the project's models, engines and profiles, and what follows from an entry."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.vllm_edge.inventory.merging import choose_profile, list_roles, merge

PROJECT: dict[str, Any] = {
    "models": {"m": {"repo": "x/m", "revision": "main", "dir": "m"}},
    "engines": {"e": {"model": "m", "served_names": ["r"], "tensor_parallel_size": 1, "gpus": [0]}},
    "profiles": {"p": {"engines": ["e"]}},
    "roles": ["r"],
}
CHAT = {"models": {"chat": {"repo": "a/b"}}}
FULL = {"tensor_parallel_size": 1, "gpus": [1]}
OTHERS = {"q": {"engines": ["e"]}}


@pytest.mark.parametrize(
    ("given", "extra", "shown", "profiles", "models", "roles", "incomplete"),
    [
        ({}, {}, "", ["p"], ["m"], ["r"], ()),
        ({}, CHAT, "", ["chat"], ["chat"], ["chat"], ("chat",)),
        ({}, CHAT, "p", ["p", "chat"], ["m", "chat"], ["chat"], ("chat",)),
        ({"roles": ["s"]}, CHAT, "", ["chat"], ["chat"], ["s"], ("chat",)),
        # Replaced and added.
        ({"profiles": OTHERS}, CHAT, "", ["q", "chat"], ["m", "chat"], ["chat"], ("chat",)),
        # Only an engine: of a model of the project, which advice still compares with the others.
        ({}, {"engines": {"f": {"model": "m", **FULL}}}, "", ["f"], ["m"], ["m"], ()),
        ({}, CHAT | {"engines": {"f": {"model": "chat"}}}, "", ["f"], ["chat"], ["chat"], ("f",)),
        ({}, {"profiles": {"o": {"engines": ["e"]}}}, "", ["o"], ["m"], ["r"], ()),
    ],
)
def test_what_a_host_has_to_do_with(
    given: Any, extra: Any, shown: str, profiles: Any, models: Any, roles: Any, incomplete: Any
) -> None:
    chosen = choose_profile(extra)
    found = merge(PROJECT | given, extra, lambda: PROJECT, [chosen, shown])
    assert (list(found.profiles), list(found.models), found.incomplete) == (profiles, models, incomplete)
    assert list_roles(found, chosen) == roles
    assert found.known_profiles[:1] == (next(iter({**PROJECT, **given}["profiles"])),)


def test_a_model_needs_only_its_repository_and_an_inventory_of_two_profiles_a_choice() -> None:
    found = merge(PROJECT, CHAT, lambda: PROJECT, [])
    assert found.models["chat"] == {"repo": "a/b", "revision": "main", "dir": "b"}
    assert found.engines["chat"] == {"model": "chat", "served_names": ["chat"]}
    assert choose_profile({"models": CHAT["models"] | {"more": {"repo": "c/d"}}}) is None
