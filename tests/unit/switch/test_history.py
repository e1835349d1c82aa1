# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge history` and `progress`."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import history
from ansible.module_utils.vllm_edge.switch.history import count_seconds_since
from ansible.module_utils.vllm_edge.switch.journal import Lock, from_json, to_json
from ansible.module_utils.vllm_edge.switch.model import Journal, Result
from ansible.module_utils.vllm_edge.text import WIDTH
from journals import RUNNING, ended


@pytest.fixture
def paths(tmp_path: Path) -> HostPaths:
    (tmp_path / "history").mkdir()
    return HostPaths(tmp_path / "etc", tmp_path, tmp_path / "units")


def run(paths: HostPaths, *arguments: str) -> int:
    return main([f"--etc={paths.etc}", f"--state={paths.state}", *arguments])


def keep(paths: HostPaths, *journals: Journal) -> None:
    for journal in journals:
        (paths.history / f"{journal.id}.json").write_text(json.dumps(to_json(journal)))


FIRST = ended(
    id="20261120T100000Z-3",
    started_at="2026-11-20T10:00:00Z",
    generation=3,
    profile="a-profile-with-a-name-that-is-very-long",
    from_generation=None,
    from_profile=None,
    origin="inventory",
    downtime={},
)
FAILED = ended(Result.ROLLED_BACK, id="20261121T170000Z-4", started_at="2026-11-21T17:00:00Z")


def test_history_is_newest_first_and_says_why(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    keep(paths, FIRST, FAILED)
    assert run(paths, "history") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[2:4]] == [
        "2026-11-21T17:00:00Z 3 nvfp4-tp2 4 bf16-tp4 rolled back 70 s 64 s -e",
        "2026-11-20T10:00:00Z - 3 a-profile-with-... committed 70 s - inventory",
    ]
    assert lines[-1] == "2026-11-21T17:00:00Z: The canary of worker failed.", "a switch that went well needs no words"
    assert max(map(len, lines)) <= WIDTH


def test_history_for_programs_is_the_journals(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    keep(paths, FIRST, FAILED)
    assert run(paths, "history", "--format=json") == 0
    assert [from_json(row) for row in json.loads(capsys.readouterr().out)] == [FAILED, FIRST]


def test_a_host_without_history(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(paths, "history") == 0
    assert capsys.readouterr().out == "no switch was made on this host\n"
    assert run(paths, "history", "--format=json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("journal", "states", "told"),
    [
        (RUNNING, {"31b-bf16-tp4": "activating"}, ["healthy", "31b-bf16-tp4: loading weights, 40 %"]),
        (RUNNING, {"31b-bf16-tp4": "active"}, ["healthy"]),
        (
            replace(RUNNING, direction="back"),
            {"31b-bf16-tp4": "inactive", "31b-nvfp4-tp2": "activating"},
            ["going back, healthy", "31b-nvfp4-tp2: loading weights, 40 %"],
        ),
    ],
    ids=["loading", "up", "going back"],
)
def test_progress_of_the_running_switch(
    paths: HostPaths,
    journal: Journal,
    states: dict[str, str],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    units = {
        f"vllm-{name}.service": {"ActiveState": state, "StatusText": "loading weights, 40 %"}
        for name, state in states.items()
    }
    monkeypatch.setattr(
        history, "ask_units", lambda names: ({name: units[name] for name in names if name in units}, None)
    )
    paths.switch_journal.write_text(json.dumps(to_json(journal)))
    with Lock(paths):
        assert run(paths, "progress") == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"generation 4 (bf16-tp4): {told[0]} for ") and first.endswith(" s")
    assert others == told[1:]


def test_progress_of_nothing_is_nothing(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a journal was left unfinished: nothing goes on."""
    paths.switch_journal.write_text(json.dumps(to_json(RUNNING)))
    assert run(paths, "progress") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("stamp", "seconds"), [("2026-11-21T16:40:00Z", 90.0), ("2026-11-21T17:00:00Z", 0.0), ("", 0.0)]
)
def test_seconds_by_a_clock_that_jumps(stamp: str, seconds: float) -> None:
    assert count_seconds_since(stamp, datetime(2026, 11, 21, 16, 41, 30, tzinfo=UTC)) == seconds
