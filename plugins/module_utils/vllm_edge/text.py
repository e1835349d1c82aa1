# SPDX-License-Identifier: Apache-2.0
"""Text for people: rejected values and suggestions, tables, wrapping and shortening of lines."""

from __future__ import annotations

import contextlib
import difflib
import json
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TextIO, cast

LONGEST = 60
"""Characters of a value that an error message quotes."""
FEW = 12
"""Up to this many known names are listed in full."""

_COLOUR = re.compile(r"\x1b\[[0-9;]{0,32}m")


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return the text with each character that a terminal would obey, or that changes how others look, as `\uXXXX`.

    These are control characters (C0, C1), the direction of writing, zero width, separators of lines and paragraphs,
    lone surrogates, and what Unicode has not assigned. Colours are removed. The escapes are those of JSON, so a JSON
    document still means the same.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in keep or unicodedata.category(character) == "Zs"
        else json.dumps(character)[1:-1]
        for character in _COLOUR.sub("", text)
    )


class OutputLost(OSError):
    """What a command prints cannot be written, such as to a full disk. The text says why."""


class PrintableStream:
    """A text stream whose `write` passes everything through `printable`.

    Raises BrokenPipeError: the reader has gone; OutputLost.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _telling_loss():
            return self._stream.write(printable(text))

    def flush(self) -> None:
        with _telling_loss():
            self._stream.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _telling_loss() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputLost(error.errno, error.strerror) from error


def make_printable(stream: TextIO) -> TextIO:
    return cast(TextIO, PrintableStream(stream))


def shown(value: Any) -> str:
    """Return the value on one line of at most LONGEST characters: strings quoted as in Python, others as JSON."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the similar names, or all names if there are few."""
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


def describe_invalid_choice(value: Any, choices: Collection[str]) -> str:
    """Return what is wrong with a value that is not one of the choices, and what to write instead."""
    close = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    remedy = nearest(str(value), choices) if close else "write one of those."
    return f"{shown(value)} is not one of {', '.join(choices)}; {remedy}"


WIDTH = 100
"""Columns of printed tables and paragraphs."""


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Lay out a table with a heading, a rule and one line per row.

    Args:
        right: numbers of the columns, from 0, that are aligned to the right
    """
    cells = [list(headings), *[[printable(cell, "") for cell in row] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()

    return [line(cells[0]), "  ".join("-" * width for width in widths), *[line(row) for row in cells[1:]]]


def wrapped(text: str, indent: str = "") -> list[str]:
    """Wrap the text to WIDTH columns; every line after the first is indented by two more spaces than `indent`."""
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)


def shorten(text: str, width: int) -> str:
    """Return `text` on one line of at most `width` characters, with unprintable characters replaced by spaces."""
    line = "".join(character if character.isprintable() else " " for character in text).strip()
    return line if len(line) <= width else line[: width - 3] + "..."


def cut_line(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def make_sort_key(text: str) -> list[tuple[int, str]]:
    """A key that sorts 6.12 behind 6.2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def print_result(output: str, data: Any, lines: Sequence[str]) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False) if output == "json" else "\n".join(lines))
