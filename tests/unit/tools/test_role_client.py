# SPDX-License-Identifier: Apache-2.0
"""The client: what counts as an answer, where a role is found again, and which gaps a log tells."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, load_file


@pytest.fixture
def role_client(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tests/tools")
    return load_file(ROOT / "tests/tools/role_client.py")


@pytest.fixture
def run() -> Iterator[Path]:
    """/run/vllm-edge with two engines and a link to the first of them."""
    with tempfile.TemporaryDirectory(prefix="s") as directory:  # the path of a socket is short
        root = Path(directory).resolve()
        (root / "roles").mkdir()
        (root / "roles/sentry.sock").symlink_to("../engines/one/api.sock")
        yield root


GOOD = json.dumps({"choices": [{"message": {"content": "hello"}}]})


def test_a_role_is_asked_where_it_was_found_until_it_fails(
    role_client: Any, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"one": (200, GOOD), "two": (200, GOOD)}
    asked: list[str] = []

    def exchange(url: str, data: str, timeout_s: float) -> tuple[int, str]:
        assert json.loads(data)["model"] == "sentry"
        asked.append(url.split("/engines/")[1].split("/")[0])
        return answers[asked[-1]]

    monkeypatch.setattr(role_client, "exchange", exchange)
    role = role_client.Role("sentry", run)
    assert role.ask().error == ""
    (run / "roles/sentry.sock").unlink()
    (run / "roles/sentry.sock").symlink_to("../engines/two/api.sock")
    assert role.ask().error == ""
    answers["one"] = (404, "no such model")
    assert [role.ask().error for _ in range(2)] == ["HTTP 404: no such model", ""]
    assert asked == ["one", "one", "one", "two"]
    assert role_client.Role("auditor", run).ask().error == "no engine has the role"
    for answers["two"] in ((200, GOOD.replace("hello", "")), (200, "[]"), (200, "no JSON")):
        assert role.ask().error == "an answer without text"


def test_nobody_answers_on_a_socket_that_is_not_there(role_client: Any, run: Path) -> None:
    assert role_client.Role("sentry", run).ask().error.startswith("HTTP 0: ")


def test_a_gap_is_from_the_first_failure_to_the_first_good_answer(role_client: Any, tmp_path: Path) -> None:
    log = [("sentry", 1, ""), ("sentry", 2, "refused"), ("sentry", 7, "late"), ("sentry", 8, ""), ("sentry", 9, "")]
    log += [("worker", 3, ""), ("worker", 8, "refused")]
    lines = [json.dumps({"role": role, "monotonic_s": at, "error": error}) for role, at, error in reversed(log)]
    (tmp_path / "log").write_text("\n".join([*lines, lines[0][:9]]))
    assert role_client.find_gaps(role_client.read(tmp_path / "log")) == [
        role_client.Gap("sentry", 2, 8, 2, "refused"),
        role_client.Gap("worker", 8, None, 1, "refused"),
    ]
