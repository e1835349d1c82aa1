# SPDX-License-Identifier: Apache-2.0
"""The client: what counts as an answer, and which gaps a log tells. Scenarios show that it finds a role again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, load_file


@pytest.fixture
def role_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tests/tools")
    return load_file(ROOT / "tests/tools/role_client.py")


def test_what_counts_as_an_answer(role_client: Any) -> None:
    good = json.dumps({"choices": [{"message": {"content": "hello"}}]})
    assert role_client.find_mistake(200, good) == ""
    assert role_client.find_mistake(404, "no such model") == "HTTP 404: no such model"
    for text in (good.replace("hello", ""), "[]", "no JSON"):
        assert role_client.find_mistake(200, text) == "an answer without text"


def test_a_gap_is_from_the_first_failure_to_the_first_good_answer(role_client: Any, tmp_path: Path) -> None:
    log = [("sentry", 1, ""), ("sentry", 2, "refused"), ("sentry", 7, "late"), ("sentry", 8, ""), ("sentry", 9, "")]
    log += [("worker", 3, ""), ("worker", 8, "refused")]
    lines = [json.dumps({"role": role, "monotonic_s": at, "error": error}) for role, at, error in reversed(log)]
    (tmp_path / "log").write_text("\n".join([*lines, lines[0][:9]]))
    assert role_client.find_gaps(role_client.read(tmp_path / "log")) == [
        role_client.Gap("sentry", 2, 8, 2, "refused"),
        role_client.Gap("worker", 8, None, 1, "refused"),
    ]
