# SPDX-License-Identifier: Apache-2.0
"""How a refused value is shown and what is offered instead."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

LONGEST = 60
FEW = 12


def shown(value: Any) -> str:
    """A value on one line, as far as it helps to find it."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Sentence that offers the names most like `name`, or all of them where they are few."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5 if len(names) <= FEW else 0.7)
    if close:
        likeness = {other: difflib.SequenceMatcher(None, other, name).ratio() for other in close}
        return f"did you mean {' or '.join(other for other in close if likeness[other] > likeness[close[0]] - 0.1)}?"
    if not names:
        return "there is none."
    return (
        f"there are: {', '.join(names)}." if len(names) <= FEW else f"none of the {len(names)} known ones is like it."
    )


def not_among(value: Any, choices: Collection[str]) -> str:
    """What is wrong with a value that is none of a few."""
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    remedy = nearest(str(value), choices) if close else "write one of those."
    return f"{shown(value)} is not one of {', '.join(choices)}; {remedy}"


WIDTH = 100


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Aligned lines of a table; columns in `right` are aligned to the right."""
    cells = [list(headings), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return [line(cells[0]), "  ".join("-" * width for width in widths), *[line(row) for row in cells[1:]]]


def wrapped(text: str, indent: str = "") -> list[str]:
    """A sentence as lines that fit; what follows the first one is indented."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def shorten(text: str, width: int) -> str:
    """`text` on one line of at most `width` characters, printable ones only."""
    line = "".join(character if character.isprintable() else " " for character in text).strip()
    return line if len(line) <= width else line[: width - 3] + "..."


def cut_line(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts 6.12 behind 6.2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]
