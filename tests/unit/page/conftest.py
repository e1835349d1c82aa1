# SPDX-License-Identifier: Apache-2.0
"""The data of a page, and the page of them."""

from __future__ import annotations

import pytest
from ansible.module_utils.vllm_edge.page.data import PageData, read_bench, read_quality
from ansible.module_utils.vllm_edge.page.render import render_host
from page_example import HISTORY, REPORT, STATUS, write_records

AT = "2026-11-25T03:05:00Z"
REFERENCE = [
    {"engine": "31b-nvfp4-tp2", "output_tokens": tokens, "tok_s": speed, "source": "reference host"}
    for tokens, speed in ((128, 14.9), (256, 15.1), (1024, 15.1))
]


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
