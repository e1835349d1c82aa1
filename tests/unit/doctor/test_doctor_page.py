# SPDX-License-Identifier: Apache-2.0
"""The page names every check with its meaning, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from ansible.module_utils.vllm_edge.doctor.registry import CHECKS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "doctor.md"


def test_the_table_is_the_codes() -> None:
    rows = re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(check.name, check.meaning) for check in CHECKS]
