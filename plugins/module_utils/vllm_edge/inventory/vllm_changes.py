# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM that are recorded as what each changed of the release before it: see vllm_arguments.py.

A text is a list of words. A change names words that are new, words whose name (what is before `|`) stays and whose rest
is another, and with `-` in front the names that are gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def apply_changes(changes: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the whole record of each release, the oldest first; the first change has all of it."""
    releases: dict[str, dict[str, Any]] = {}
    before: dict[str, Any] = {}
    for version, change in changes.items():
        before = releases[version] = apply_change(before, change)
    return releases


def apply_change(before: Any, change: Any) -> Any:
    """Return a record, or a part of one, with a change."""
    if isinstance(change, Mapping):
        found = {key: apply_change((before or {}).get(key, ""), value) for key, value in change.items()}
        return {key: value for key, value in {**(before or {}), **found}.items() if value != ""}
    if not isinstance(change, str):
        return change
    words = {word.partition("|")[0]: word for word in f"{before} {change}".split()}
    return " ".join(word for name, word in words.items() if name[0] != "-" and f"-{name}" not in words)


def find_changes(before: Any, now: Any) -> Any:
    """Return what `apply_changes` needs to make a record, or a part of one, of the one before; empty for nothing."""
    if isinstance(now, Mapping):
        was: Mapping[str, Any] = before or {}
        found = {key: find_changes(was.get(key, ""), now.get(key, "")) for key in {**was, **now}}
        return {key: value for key, value in found.items() if value not in ("", {}, None)}
    if not isinstance(now, str):
        return None if now == before else now
    old, new = ({word.partition("|")[0]: word for word in text.split()} for text in (before, now))
    came = [word for name, word in new.items() if old.get(name) != word]
    return " ".join([*came, *(f"-{name}" for name in old if name not in new)])
