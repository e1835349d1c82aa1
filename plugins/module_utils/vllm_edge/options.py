# SPDX-License-Identifier: Apache-2.0
"""Options of a command that are written once, as the fields of a dataclass: argparse and the code read them there."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, TypeVar

T = TypeVar("T")
Number = TypeVar("Number", int, float)


def above_zero(kind: type[Number]) -> Callable[[str], Number]:
    """Return a type for argparse that refuses 0, which has no meaning where "not given" has another one."""

    def parse(text: str) -> Number:
        try:
            number = kind(text)
        except ValueError:
            number = kind(0)
        if number <= 0 or not math.isfinite(number):
            whole = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a {whole} above 0; without the option there is a default"
            )
        return number

    return parse


def option(default: Any, help: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a field that is an option of its name; `more` is passed to argparse.

    A bool is a switch, and a tuple may be repeated, unless `type` makes it from one text. A number may be 0 if that is
    its default.
    """
    if type(default) in (int, float):
        help += f" (default: {default:g})"
    given = {"help": help, **({"metavar": metavar} if metavar else {}), **more}
    if isinstance(default, bool):
        given["action"] = "store_true"
    elif isinstance(default, tuple) and "type" not in given:
        given["action"] = "append"
    kind = above_zero(type(default)) if type(default) in (int, float) and default else type(default)
    return field(default=default, metadata={**({} if "action" in given else {"type": kind}), **given})


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add the fields that `option` made. Those that are not given stay None."""
    for one in fields(options):
        if one.metadata:
            parser.add_argument(f"--{one.name.replace('_', '-')}", default=None, **one.metadata)


def read_options(options: type[T], given: argparse.Namespace) -> T:
    found = {one.name: getattr(given, one.name, None) for one in fields(options)}  # type: ignore[arg-type]
    lists = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return options(**{name: value for name, value in lists.items() if value is not None})
