# SPDX-License-Identifier: Apache-2.0
"""Dataclasses from JSON: what fits is converted, and what does not is named with its place and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import pytest
from ansible.module_utils.vllm_edge.system.records import RecordError, read_record


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    count: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str
    seconds: float
    inner: Inner | None = None
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    facts: dict[str, float | int] = field(default_factory=dict)
    colour: Colour | None = None
    way: Literal["on", "back"] = "on"
    more: Mapping[str, Any] | None = None


def test_a_record_with_everything() -> None:
    inner = {"count": 1, "names": ["a", "b"], "unknown": 1}
    data = {"name": "x", "seconds": 2, "inner": inner, "by_name": {"y": {"count": 0}}, "facts": {"a": 1, "b": 1.5}}
    made = read_record(Outer, {**data, "colour": "red", "way": "back", "more": {"z": [1]}})
    expected = Outer(
        "x", 2.0, Inner(1, ("a", "b")), {"y": Inner(0)}, {"a": 1, "b": 1.5}, Colour.RED, "back", {"z": [1]}
    )
    assert made == expected and type(made.seconds) is float and type(made.facts["a"]) is int
    assert read_record(Outer, {"name": "x", "seconds": 0.5, "inner": None}) == Outer("x", 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "name is None, str is expected"),
        ({"seconds": True}, "seconds is True, float is expected"),
        ({"inner": []}, r"inner is \[\], an object is expected"),
        ({"inner": {}}, "inner has no count"),
        ({"inner": {"count": 1, "names": ["a", 2]}}, r"inner.names\[1\] is 2, str is expected"),
        ({"inner": {"count": 1, "names": "a"}}, "inner.names is 'a', tuple"),
        ({"by_name": {"y": {"count": "1"}}}, "by_name.y.count is '1', int is expected"),
        ({"facts": {"a": "1"}}, "facts.a is '1', float is expected"),
        ({"colour": ["red"]}, r"colour is \['red'\], Colour is expected"),
        ({"way": "up"}, "way is 'up', typing.Literal"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_record(Outer, {"name": "x", "seconds": 1, **change})


@pytest.mark.parametrize(("data", "message"), [([], "the record is"), ({}, "the record has no name, seconds")])
def test_what_is_no_record(data: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read_record(Outer, data)
