# SPDX-License-Identifier: Apache-2.0
"""Reading dataclasses from parsed JSON: records that this or another version of the program wrote."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_get_hints = functools.cache(get_type_hints)

MOST_DEPTH = 64
"""Objects and lists within each other in JSON from elsewhere."""
MOST_VALUES = 1_000_000
"""Commas and brackets in JSON from elsewhere: with that, 16 MiB of text become at most some 150 MiB of objects."""


def parse_json(raw: bytes | str, most_depth: int = MOST_DEPTH) -> Any:
    """Parse JSON that somebody else wrote.

    Unlike json.loads it refuses keys that an object has twice, numbers that are not finite, deep nesting, and so many
    values that they would fill the memory. The caller bounds the length of the text. `most_depth` are the levels of
    objects and lists that it may have. Raises ValueError: the text is not such JSON.
    """
    text = raw if isinstance(raw, bytes) else raw.encode("utf-8", "replace")
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    try:
        document = json.loads(
            raw, object_pairs_hook=_build_object, parse_constant=_refuse_number, parse_float=_parse_float
        )
        level = [document]
        for _ in range(most_depth):
            level = [
                item
                for value in level
                if isinstance(value, dict | list)
                for item in (value.values() if isinstance(value, dict) else value)
                if isinstance(item, dict | list)
            ]
            if not level:
                return document
    except RecursionError:
        pass
    raise ValueError(f"it is nested deeper than {most_depth} levels")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("an object has a key twice")
    return built


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:20]} is no number that JSON knows")


def _parse_float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


class RecordError(ValueError):
    """The data are not a record of the wanted type. The text names the place, its value and what is expected."""


def read_record(kind: type[T], data: object, where: str = "") -> T:
    """Build a dataclass from parsed JSON, including the dataclasses, enums, lists and mappings in it.

    Unknown keys, which a newer program wrote, are dropped. A missing key gets its default. `where` is where the data
    are within the record, for messages, such as `files.config.json`. Raises RecordError: keys without a default are
    missing, or a value has another type.
    """
    if not isinstance(data, Mapping):
        raise RecordError(f"{where or 'the record'} is {data!r}, an object is expected")
    items = fields(kind)  # type: ignore[arg-type]
    required = [item.name for item in items if item.default is item.default_factory is MISSING]
    missing = [name for name in required if name not in data]
    if missing:
        raise RecordError(f"{where or 'the record'} has no {', '.join(missing)}")
    hints = _get_hints(kind)  # type: ignore[arg-type]
    present = [item.name for item in items if item.name in data]
    return kind(**{name: _read(hints[name], data[name], f"{where}.{name}".lstrip(".")) for name in present})


def _read(hint: Any, value: Any, where: str) -> Any:
    """Return a value as its type hint asks for it; RecordError if it is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if type(value) in arguments:
            return value
        return _read(next(kind for kind in arguments if kind is not type(None)), value, where)
    if is_dataclass(hint):
        return read_record(hint, value, where)  # type: ignore[arg-type]
    if origin in (list, tuple) and isinstance(value, list | tuple):
        return origin(_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {key: _read(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    return _read_scalar(hint, value, where)


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, Enum) and value in [item.value for item in hint]:
        return hint(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or type(value) is hint or (get_origin(hint) is Literal and value in get_args(hint)):
        return value
    raise RecordError(f"{where} is {value!r}, {hint.__name__ if isinstance(hint, type) else hint} is expected")
