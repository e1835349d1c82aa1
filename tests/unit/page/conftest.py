# SPDX-License-Identifier: Apache-2.0
"""A full example of a page's data, a minimal one, and what a page is parsed to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.page.data import PageData, read_bench, read_quality

RECORDS = Path(__file__).resolve().parents[2] / "fixtures" / "page"
AT = "2026-11-25T03:05:00Z"
REFERENCE = [
    {"engine": "31b-nvfp4-tp2", "output_tokens": tokens, "tok_s": speed, "source": "reference host"}
    for tokens, speed in ((128, 14.9), (256, 15.1), (1024, 15.1))
]


def read(name: str) -> Any:
    """A document of the example."""
    return json.loads((RECORDS / name).read_text())


@pytest.fixture
def full() -> PageData:
    """A host of which everything is recorded."""
    return PageData(
        read("report.json"), AT, read("status.json"), read("history.json"),
        read_bench(RECORDS / "bench"), read_quality(RECORDS / "quality"), REFERENCE,
    )  # fmt: skip


@pytest.fixture
def minimal() -> PageData:
    """A host of which nothing is recorded."""
    return PageData({"host": "bare", "profile": "e2b-only", "generation": 1}, AT)


@dataclass
class Parsed(HTMLParser):
    """What a page is made of."""

    ids: list[str] = field(default_factory=list)
    headings: list[int] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    open_tags: list[str] = field(default_factory=list)
    first_in_table: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the element."""
        values = dict(attrs)
        if self.open_tags and self.open_tags[-1] == "table" and self.tags[-1][0] == "table":
            self.first_in_table.append(tag)
        self.tags.append((tag, values))
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if tag in {"h1", "h2", "h3", "h4"}:
            self.headings.append(int(tag[1]))
        if tag not in {"meta", "br"}:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element of SVG that has no end."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Every element that ends was the last one that began."""
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        """Note the text."""
        self.text += data


def parse(page: str) -> Parsed:
    """Parse a page."""
    parsed = Parsed()
    parsed.feed(page)
    parsed.close()
    assert not parsed.open_tags
    return parsed
