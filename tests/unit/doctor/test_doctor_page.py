# SPDX-License-Identifier: Apache-2.0
"""The page names every check with its meaning, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from ansible.module_utils.vllm_edge.doctor.registry import CHECKS, DEEP

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"


def test_the_page_has_every_check() -> None:
    names = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| .+ \|$", PAGE.read_text(), re.MULTILINE)
    assert names == [*CHECKS, *DEEP]
