# SPDX-License-Identifier: Apache-2.0
"""A run of an engine that has passed the canary is recorded, and asked for one token only from then on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.answers.canary_command import Result, canary_unless_passed, full_canary
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system.http import Answer
from engine_files import CONFIG
from fake_engine import Server, chat, refuse, serve
from fake_host import FakeDocker

server = pytest.fixture(serve)


class Passed:
    """An engine that has passed the full canary."""

    def __init__(self, server: Server, paths: HostPaths) -> None:
        self.server, self.docker = server, FakeDocker()
        self.docker.engine("e2b", CONFIG["input_hash"])
        self.config = server.config()
        self.paths = paths
        self.first = full_canary(self.config, self.paths, self.docker, 5)
        server.asked.clear()

    def again(self) -> list[Result]:
        return canary_unless_passed(self.config, self.paths, self.docker, 5)

    @property
    def tokens_asked(self) -> list[int]:
        return [asked["max_tokens"] for asked in self.server.asked if "max_tokens" in asked]


def is_failure(passed: Passed) -> bool:
    """Whether the record is one that older programs do not take for a success, either."""
    record = json.loads(passed.paths.engine_canary("e2b").read_text())
    return record["results"] == [] and [result["ok"] for result in record["failed"]] == [False]


@pytest.fixture
def passed(server: Server, paths: HostPaths) -> Passed:
    return Passed(server, paths)


def test_a_run_that_has_passed_is_asked_for_one_token(passed: Passed) -> None:
    (first,), (again,) = passed.first, passed.again()
    assert passed.tokens_asked == [1]
    assert again.token_s is not None and again.passed_at == first.passed_at is not None
    assert replace(again, token_s=None) == first


def changed(**changes: Any) -> Callable[[Passed], None]:
    def change(passed: Passed) -> None:
        passed.docker.containers = [replace(passed.docker.containers[0], **changes)]

    return change


def drop_a_check(passed: Passed) -> None:
    """As an older program recorded it."""
    place = passed.paths.engine_canary("e2b")
    record = json.loads(place.read_text(encoding="utf-8"))
    record["results"][0]["checks"].pop()
    place.write_text(json.dumps(record), encoding="utf-8")


CHANGES: dict[str, Callable[[Passed], Any]] = {
    "other id": changed(id="d" * 64),
    "other start": changed(started_at="04:00"),
    "other inputs": changed(labels={"vllm-edge.input-hash": "other"}),
    "stopped": changed(status="exited"),
    "no Docker": lambda passed: setattr(passed.docker, "away", "connection refused"),
    "other names": lambda passed: setattr(passed, "config", passed.server.config("sentry", "auditor")),
    "damaged record": lambda passed: passed.paths.engine_canary("e2b").write_text("{", encoding="utf-8"),
    "fewer checks": drop_a_check,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_run_is_asked_everything(passed: Passed, change: Callable[[Passed], Any]) -> None:
    change(passed)
    results = passed.again()
    assert all(result.ok and result.token_s is None for result in results)
    assert len(passed.tokens_asked) > 5


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (chat(None, tokens=0), "was answered with none"),
        (refuse(500, "EngineDeadError"), "HTTP 500: EngineDeadError"),
        (None, "/health still answers: the engine lives, and the request hangs"),
    ],
)
def test_an_engine_that_gives_no_token_fails_and_is_asked_everything_next(
    passed: Passed, answer: Any, told: str
) -> None:
    passed.server.answers["completion"] = answer
    (result,) = passed.again()
    assert not result.ok and result.error is not None and told in result.error
    assert ("hangs" in result.error) is (answer is None), "an answer is no silence"
    assert passed.tokens_asked == [1]
    assert is_failure(passed)
    passed.server.answers["completion"] = chat()
    passed.again()
    assert len(passed.tokens_asked) > 5


def test_a_record_that_cannot_be_removed_is_named(passed: Passed, monkeypatch: pytest.MonkeyPatch) -> None:
    passed.server.answers["completion"] = refuse(500, "EngineDeadError")
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(30, "Read-only file system", "e2b.canary.json")))
    for results in (passed.again(), full_canary(passed.config, passed.paths, passed.docker, 5)):
        assert "goes by an older result: [Errno 30]" in str(results[0].error)


def test_one_token_has_a_deadline_of_its_own(passed: Passed) -> None:
    waited: list[float] = []

    def ask(url: str, path: str, timeout_s: float, **_: Any) -> Answer:
        waited.append(timeout_s)
        return Answer(None, error=f"no answer within {timeout_s:g} s")

    (result,) = canary_unless_passed(passed.config, passed.paths, passed.docker, 300, ask)
    assert waited[0] == 20
    assert result.error is not None and "no answer within 20 s" in result.error


def test_what_failed_is_not_recorded_as_passed(passed: Passed) -> None:
    passed.server.answers["schema"] = chat("A green lamp.")
    (result,) = full_canary(passed.config, passed.paths, passed.docker, 5)
    assert not result.ok and result.passed_at is None
    assert is_failure(passed)


def test_a_container_that_is_replaced_meanwhile_is_not_recorded(server: Server, paths: HostPaths) -> None:
    docker = FakeDocker()
    runs = [docker.engine("e2b", inputs) for inputs in ("h", "h2")]
    docker.find = lambda name: runs.pop(0)  # type: ignore[method-assign]
    assert all(result.ok for result in full_canary(server.config(), paths, docker, 5))
    assert runs == [] and not paths.engine_canary("e2b").exists()


def test_a_state_directory_that_cannot_be_written_fails_nothing(server: Server, paths: HostPaths) -> None:
    paths.state.write_text("no directory")
    docker = FakeDocker()
    docker.engine("e2b")
    assert all(result.ok for result in full_canary(server.config(), paths, docker, 5))
