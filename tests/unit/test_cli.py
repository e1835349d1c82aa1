# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge explain`, the command line, and the files and listings that the program reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.engine.state import EngineState, read_state, write_state
from ansible.module_utils.vllm_edge.status.command import render_explanation, run_explain
from engine_files import CONFIG, written
from test_status import FAILURE


def test_explain_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path)
    assert run_explain("e2b", paths, output="text") == 0
    assert "nothing is known" in capsys.readouterr().out
    write_state(paths.engine_state("e2b"), EngineState("e2b", "failed", "2026-11-21T03:00:01Z", last_failure=FAILURE))
    assert run_explain("e2b", paths, output="text") == 0
    text = capsys.readouterr().out
    for told in ("failed since", "while: KV cache, exit status 1", "What: no memory is left.", "  | last words"):
        assert told in text
    assert run_explain("e2b", paths, output="json") == 0
    assert json.loads(capsys.readouterr().out)["last_failure"]["cause"] == "no_kv"
    assert run_explain("nobody", paths, output="text") == 1
    assert "there are: e2b" in capsys.readouterr().err
    assert main(["--etc", str(tmp_path), "explain", "../e2b"]) == 1
    assert render_explanation("e2b", EngineState("e2b", "serving", "t"))[-1] == "No failure has been recorded."


def test_state_survives_what_is_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "e2b.json"
    assert read_state(path) is None
    state = EngineState("e2b", "serving", "t", container_id="c", log_facts={"model_gib": 9.9}, last_failure=FAILURE)
    write_state(path, state)
    assert read_state(path) == state
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in path.parent.iterdir()] == ["e2b.json"], "a temporary file was left"
    newer = {**json.loads(path.read_text()), "added_later": 1}
    path.write_text(json.dumps(newer))
    assert read_state(path) == state
    for broken in ("", "[]", "{}", "{"):
        path.write_text(broken)
        assert read_state(path) is None


def test_nothing_is_needed_for_a_refused_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    written(tmp_path, config={**CONFIG, "port": 0})
    assert main(["--etc", str(tmp_path), "run-engine", "e2b"]) == 78
    assert "<3>" in (out := capsys.readouterr().out) and "port is 0" in out
