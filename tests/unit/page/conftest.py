# SPDX-License-Identifier: Apache-2.0
"""The data of a page, and the page of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.page.data import PageData, read_bench, read_quality
from ansible.module_utils.vllm_edge.page.render import render_host
from page_example import HISTORY, REPORT, STATUS, write_records

AT = "2026-11-25T03:05:00Z"
REFERENCE = [
    {"engine": "31b-nvfp4-tp2", "output_tokens": tokens, "tok_s": speed, "source": "reference host"}
    for tokens, speed in ((128, 14.9), (256, 15.1), (1024, 15.1))
]
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e&' + 100 * "x"


def spoil(value: Any) -> Any:
    """The same document with hostile texts, which keep their beginning."""
    if isinstance(value, dict):
        return {key: spoil(one) for key, one in value.items()}
    if isinstance(value, list):
        return [spoil(one) for one in value]
    return value + HOSTILE if isinstance(value, str) else value


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory) -> PageData:
    """A host of which everything is recorded."""
    directory = tmp_path_factory.mktemp("records")
    write_records(directory)
    return PageData(
        REPORT, AT, STATUS, HISTORY, read_bench(directory / "bench"), read_quality(directory / "quality"), REFERENCE
    )


@pytest.fixture(scope="session")
def page(full: PageData) -> str:
    return render_host(full)


@pytest.fixture(scope="session")
def hostile(full: PageData) -> PageData:
    kept = ("engine", "kind", "case", "through")
    bench = [
        replace(
            run,
            run=spoil(run.run),
            measurements=[spoil(row) | {key: row[key] for key in kept} for row in run.measurements],
            end=spoil(run.end),
        )
        for run in full.bench
    ]
    return replace(
        full, report=spoil(full.report), status=spoil(full.status), history=spoil(list(full.history)),
        bench=bench, quality=[spoil(record) for record in full.quality], made_at=HOSTILE,
    )  # fmt: skip
