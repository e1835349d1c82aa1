# SPDX-License-Identifier: Apache-2.0
"""The page of a host, its plots, and the index of several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from .data import PageData, Row
from .drawing import NARROW, WIDE, draw_files, draw_inline
from .figures import Figure, list_figures
from .markup import Content, Html, join, make_id, table, tag
from .sections import SECTIONS, Drawn, count, moment
from .style import CSS

FILES = ("memory", "speed")
"""Figures that are also files of their own."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True)
class Built:
    """A page, its plots by name with suffix, and why there are none."""

    page: str
    plots: dict[str, bytes]
    missing: str = ""


def draw(figures: dict[str, Figure]) -> tuple[dict[str, Drawn], dict[str, bytes], str]:
    """Return the figures for the page, the files, and the error if they could not be drawn; then there are no plots."""
    try:
        drawn = {
            name: Drawn(figure, draw_inline(figure, WIDE), draw_inline(figure, NARROW))
            for name, figure in figures.items()
        }
        files = {
            f"{name}.{suffix}": content
            for name in FILES
            if name in figures
            for suffix, content in draw_files(figures[name]).items()
        }
    # The page does without plots, whatever is wrong with the library or with a value.
    except Exception as error:
        return {name: Drawn(figure) for name, figure in figures.items()}, {}, f"{type(error).__name__}: {error}"
    return drawn, files, ""


def frame(title: str, head: Html, body: Html, foot: str, nav: Html | None = None) -> str:
    document = tag(
        "html",
        tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", title),
            tag("style", Html(CSS)),
        ),
        tag(
            "body",
            tag("a", "Skip to the content", href="#content", class_="skip"),
            tag("header", head),
            nav or "",
            tag("main", body, id="content", tabindex=-1),
            tag("footer", tag("p", foot)),
        ),
        lang="en",
    )
    return f"<!DOCTYPE html>\n{document}\n"


def banner(note: object) -> Html:
    return tag("p", tag("strong", "Note: "), str(note), class_="note", role="note") if note else Html("")


def build(data: PageData) -> Built:
    drawn, files, missing = draw(list_figures(data))
    sections: list[Content] = []
    for heading, write in SECTIONS.items():
        name = make_id(heading)
        sections.append(tag("section", tag("h2", heading, id=name), write(data, drawn), aria_labelledby=name))
    links = [tag("li", tag("a", heading, href=f"#{make_id(heading)}")) for heading in SECTIONS]
    head = join(
        [
            tag("h1", data.host),
            tag("p", f"Profile {data.report.get('profile')}, generation {data.report.get('generation')}. As of ",
                moment(data.made_at), ".", class_="lead"),
            tag("p", data.verdict, class_=f"verdict {'good' if data.good else 'bad'}"),
            banner(data.report.get("note")),
        ]
    )  # fmt: skip
    foot = (
        "Written by vllm-edge from what the host recorded and measured. Sizes are MiB (1,048,576 bytes), times are UTC."
    )
    nav = tag("nav", tag("ul", *links), aria_label="Sections")
    return Built(frame(f"{data.host}: vllm-edge", head, join(sections), foot, nav), files, missing)


def build_index(hosts: Sequence[Row]) -> str:
    rows = [
        [
            tag("a", row.get("host"), href=f"{quote(str(row.get('host')))}.html"),
            str(row.get("profile")),
            tag("span", row.get("verdict"), class_="good" if row.get("good") else "bad"),
            str(row.get("note") or ""),
            moment(row.get("made_at")),
        ]
        for row in hosts
    ]
    return frame(
        "Hosts: vllm-edge",
        join([tag("h1", "Hosts"), tag("p", f"{count(len(rows), 'host')} in the last report.", class_="lead")]),
        table("Hosts and their reports", ["host", "profile", "verdict", "note", "as of"], rows),
        "Written by vllm-edge. Times are UTC.",
    )
