# SPDX-License-Identifier: Apache-2.0
"""The report fits a terminal and says what was measured."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.vllm_edge.report import bar, render

REPORT: dict[str, Any] = {
    "host": "xr7620",
    "profile": "e2b-only",
    "generation": 3,
    "engines": [
        {
            "unit": "vllm-e2b.service",
            "model": "e2b",
            "precision": "bf16",
            "tensor_parallel_size": 1,
            "slots": [3],
            "port": 8070,
            "state": "active",
            "load_seconds": 31.6,
        }
    ],
    "completions": [
        {"served_name": "sentry", "engine": "e2b", "seconds": 0.12, "ok": True, "completion": "a\nb" + "c" * 200}
    ],
    "gpus": [
        {
            "index": 3,
            "name": "NVIDIA L4",
            "used_mib": 20600,
            "budget_mib": 20900,
            "total_mib": 23034,
            "within_budget": True,
        }
    ],
    "versions": {"vLLM": "0.32.0"},
    "pins": ["revision: abc"],
}


def test_report_fits_a_terminal() -> None:
    assert max(len(line) for line in render(REPORT)) <= 100


@pytest.mark.parametrize(
    "words",
    ["generation 3", "vllm-e2b.service", "32 s", "20600", "20900", "23034", "within", "vLLM: 0.32.0", "revision: abc"],
)
def test_report_says(words: str) -> None:
    assert words in "\n".join(render(REPORT))


def test_report_keeps_a_completion_on_one_line() -> None:
    (line,) = [line for line in render(REPORT) if line.startswith("sentry")]
    assert "a b" in line
    assert line.endswith("...")


@pytest.mark.parametrize(
    ("used", "budget", "expected"),
    [
        (0, 0, "[                    ]"),
        (50, 75, "[##########.....|    ]"),
        (90, 50, "[##########|#######  ]"),
        (100, 100, "[###################|]"),
    ],
)
def test_bar_is_to_scale(used: int, budget: int, expected: str) -> None:
    assert bar(used, budget, 100) == expected
