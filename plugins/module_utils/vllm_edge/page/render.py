# SPDX-License-Identifier: Apache-2.0
"""The page of a host and the index of several hosts, as HTML. The templates lie beside this file.

Ansible's own templating does not escape, so this is Jinja by itself: everything is escaped that a template prints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..text import printable
from .data import PageData, Row, engines_of, list_of, mapping, number, texts_of
from .figures import amount, draw_figures

if TYPE_CHECKING:
    from jinja2 import Environment


def show(value: object) -> object:
    """Return a value without characters that change how others look; what is None or undefined is empty."""
    return value if hasattr(value, "__html__") else printable("" if value is None else str(value))


def format_time(stamp: object) -> str:
    """Return `2026-11-25 02:19 UTC` for a time of a record."""
    return re.sub(r"T(\d\d:\d\d):\d\dZ$", r" \1 UTC", str(stamp or "unknown"))


def age(stamp: object, now: object) -> str:
    """Return the hours or days from a time to another one; empty if one of them is no time."""
    try:
        hours = int((datetime.fromisoformat(str(now)) - datetime.fromisoformat(str(stamp))).total_seconds() // 3600)
    except (TypeError, ValueError):
        return ""
    return f"{hours // 24} days" if hours >= 48 else f"{hours} h"


def count(items: Sequence[object], what: str) -> str:
    return f"{len(items)} {what}{'' if len(items) == 1 else 's'}"


def difference(row: Row) -> float | None:
    measured, planned = number(row.get("measured")), number(row.get("planned"))
    return None if measured is None or planned is None else measured - planned


def sum_watts(row: Row) -> float | None:
    watts = [number(gpu.get("power_w_mean")) for gpu in list_of(row.get("gpus"))]
    known = [one for one in watts if one is not None]
    return sum(known) if known and len(known) == len(watts) else None


def seconds_away(switch: Row) -> dict[str, float]:
    """Return the seconds without an answer of each served name that had some.

    A downtime is an object in a journal, and a number in the status.
    """
    found = {}
    for name, down in mapping(switch.get("downtime")).items():
        seconds = number(down["seconds"] if isinstance(down, Mapping) and "seconds" in down else down)
        if seconds:
            found[str(name)] = seconds
    return found


def make_environment() -> Environment:
    """A key that a record does not have is undefined, which is empty, and is `unknown` where it should be a number."""
    from jinja2 import ChainableUndefined, Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=ChainableUndefined,
        finalize=show,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "age": age,
        "amount": amount,
        "count": count,
        "difference": difference,
        "engines_of": engines_of,
        "format_time": format_time,
        "rows": list_of,
        "seconds_away": seconds_away,
        "sum_watts": sum_watts,
        "texts": texts_of,
    }
    return environment


def render_host(data: PageData) -> str:
    words: dict[str, Any] = {"data": data, "report": data.report, "figures": draw_figures(data)}
    return make_environment().get_template("host.html.j2").render(words)


def render_index(hosts: Sequence[Row], made_at: str) -> str:
    return make_environment().get_template("index.html.j2").render(hosts=hosts, made_at=made_at)
