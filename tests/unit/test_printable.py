# SPDX-License-Identifier: Apache-2.0
"""Whatever logs, hubs, registries and other people's names contain: only printable characters reach a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge import cli, text
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.engine.state import EngineState, Failure, write_state
from ansible.module_utils.vllm_edge.planning.checkpoint.headers import FactsError
from ansible.module_utils.vllm_edge.status.command import render_explanation
from ansible.module_utils.vllm_edge.switch.history import render_history
from ansible.module_utils.vllm_edge.switch.journal import to_json
from ansible.module_utils.vllm_edge.switch.model import Result
from ansible.module_utils.vllm_edge.switch.render import complain, say
from ansible.module_utils.vllm_edge.switch.render import render_result as render_switch
from ansible.module_utils.vllm_edge.text import printable
from engine_files import written
from helpers import ROOT
from journals import ended

HOSTILE = (
    "a\x1b[2K\rb\x1b]0;owned\x07c\x9b2Jd\x00\x08\x0b\x0c\x7f\x85e\u202egnp\u2066f\u200b\u200d\ufeffg\u2028\u2029h"
    "\U000e0041\ud800i\u00adj"
)
FORBIDDEN = [character for character in set(HOSTILE) if not character.isprintable()]
GOOD = "Größe ▇▇░ │ ├─ … “x” 日本語　字 ü e\u0301 ₂ 🙂"


def find_forbidden(shown: str) -> list[str]:
    return [repr(character) for character in FORBIDDEN if character in shown]


def test_what_a_terminal_would_obey_is_written_out() -> None:
    shown = printable(HOSTILE)
    assert find_forbidden(shown) == []
    assert "\\u001b]0;owned\\u0007c\\u009b2J" in shown
    assert printable("\x1b[1;31mred\x1b[0m") == "red"
    assert printable("a\n\tb") == "a\n\tb"
    assert printable("a\n\tb", "") == "a\\n\\tb"


def test_words_of_all_languages_and_tables_stay() -> None:
    assert printable(GOOD) == GOOD


def test_json_stays_the_same_document() -> None:
    document = {"name\u202e": HOSTILE, "list": [HOSTILE, GOOD]}
    shown = printable(json.dumps(document, indent=2, ensure_ascii=False))
    assert json.loads(shown) == document
    assert find_forbidden(shown) == []


def tell_all(options: Any, paths: Any) -> int:
    """A command that prints what every renderer makes of hostile texts."""
    failure = Failure("t", 1, "no_kv", HOSTILE, HOSTILE, "kv-cache", [HOSTILE, "one\nforged"])
    print("\n".join(render_explanation("e2b", EngineState("e2b", "failed", "t", last_failure=failure))))
    journal = ended(Result.ROLLED_BACK, message=HOSTILE, profile=HOSTILE, asked_by=HOSTILE)
    print("\n".join(render_history([journal])))
    print("\n".join(render_switch(to_json(journal))))
    print(json.dumps({"x": HOSTILE}, ensure_ascii=False))
    say(HOSTILE)
    complain(HOSTILE)
    print(FactsError(HOSTILE), file=sys.stderr)
    print("\n".join(text.table(["name"], [[HOSTILE]])))
    sys.stdout.writelines([HOSTILE, GOOD])
    return 0


def test_every_command_prints_through_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = [replace(command, run=tell_all) for command in cli.COMMANDS if command.name in ("status", "history")]
    monkeypatch.setattr(cli, "COMMANDS", commands)
    for command in commands:
        assert main(["--etc", str(tmp_path), command.name]) == 0
        told = capsys.readouterr()
        assert "Größe" in told.out
        assert "gnp" in told.err
        assert find_forbidden(told.out + told.err) == []


@pytest.mark.parametrize("lines", [1, 9999])
def test_the_exit_status_tells_that_the_output_was_lost(lines: int) -> None:
    """A short output is written when the program ends, a long one meanwhile."""
    code = (
        "import sys; from dataclasses import replace; from vllm_edge import cli\n"
        f"def tell(*_): print('x' * 9 * {lines}); return 0\n"
        "cli.COMMANDS[:] = [replace(cli.COMMANDS[0], run=tell)]; sys.exit(cli.main(['status']))"
    )
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": "plugins/module_utils", "PYTHONUNBUFFERED": ""}

    def run(output: int) -> tuple[int, str]:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.PIPE, text=True)
        os.close(output)
        return done.returncode, done.stderr

    status, said = run(os.open("/dev/full", os.O_WRONLY))
    assert status == 1 and said.startswith("The output of `vllm-edge status`, ") and said.endswith("left on device.\n")
    reader, writer = os.pipe()
    os.close(reader)
    assert run(writer) == (0 if lines == 1 else 141, "")


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["--help", "--version", "status --help"])
def test_lost_help_is_no_success(words: str, unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONPATH": "plugins/module_utils", "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "vllm_edge.cli", *words.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr.startswith("The output of `vllm-edge`, ") and "Trace" not in done.stderr


def test_errors_of_the_command_line_are_printable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([HOSTILE.replace("\ud800", "")])
    assert find_forbidden(capsys.readouterr().err) == []


def test_explain_shows_a_log_with_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path)
    line = HOSTILE.replace("\ud800", "")
    failure = Failure("2026-11-21T03:00:00Z", 1, "no_kv", "no memory", "Lower it", "kv-cache", [line])
    write_state(paths.engine_state("e2b"), EngineState("e2b", "failed", "2026-11-21T03:00:01Z", last_failure=failure))
    for words in (["explain", "e2b"], ["explain", "e2b", "--format", "json"]):
        assert main(["--etc", str(paths.etc), "--state", str(paths.state), *words]) == 0
        told = capsys.readouterr().out
        assert find_forbidden(told) == []
    assert json.loads(told)["last_failure"]["log_tail"] == [line]
