# SPDX-License-Identifier: Apache-2.0
"""HTML of escaped text. Everything that is no `Html` is escaped, so a recorded text cannot become markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from ..text import printable

VOID = frozenset({"meta", "br"})


class Html(str):
    """Text that is markup already."""


Content = str | int | float | None


def escape(value: Content) -> Html:
    """Return the value as markup: escaped, and without characters that change how others look."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(printable("" if value is None else str(value))))


def tag(name: str, /, *children: Content, **attributes: Content) -> Html:
    """Return an element. `class_` is the attribute `class`, `aria_label` is `aria-label`; None leaves one out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(escape(child) for child in children)
    return Html(f"<{name}{words}>" if name in VOID else f"<{name}{words}>{inner}</{name}>")


def join(parts: Iterable[Content]) -> Html:
    return Html("".join(escape(part) for part in parts))


def make_id(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "part"


def table(
    caption: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[Content]],
    right: frozenset[int] = frozenset(),
) -> Html:
    """Return a table. Its first column names the row; columns in `right` are numbers. It scrolls by itself if it is
    wider than the screen."""

    def cell(column: int, value: Content) -> Html:
        kind = "number" if column in right else None
        if column == 0:
            return tag("th", value, scope="row", class_=kind)
        return tag("td", value, class_=kind)

    head = join(
        tag("th", name, scope="col", class_="number" if column in right else None)
        for column, name in enumerate(headings)
    )
    body = join(tag("tr", *[cell(column, value) for column, value in enumerate(row)]) for row in rows)
    return tag(
        "div",
        tag("table", tag("caption", tag("span", caption)), tag("thead", tag("tr", head)), tag("tbody", body)),
        class_="scroll",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def paragraphs(texts: Iterable[str], kind: str | None = None) -> Html:
    items = [tag("li", text) for text in texts]
    return tag("ul", *items, class_=kind) if items else Html("")


def facts(pairs: Iterable[tuple[str, Content]]) -> Html:
    """Return names with their values; those without a value are left out."""
    known = [(name, value) for name, value in pairs if value not in (None, "")]
    return tag("dl", *[tag("div", tag("dt", name), tag("dd", value)) for name, value in known]) if known else Html("")
