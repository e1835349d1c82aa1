# SPDX-License-Identifier: Apache-2.0
"""The action plugins, run by ansible-playbook on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import get_words, run_playbook


def play(
    tmp_path: Path, task: dict[str, Any], *options: str, succeeds: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run one task on this machine; what it returned is in the file `result`."""
    tasks = [
        {"name": "Act", **task, "register": "acted", "failed_when": False},
        {
            "name": "Keep",
            "ansible.builtin.copy": {"content": "{{ acted | to_json }}", "dest": str(tmp_path / "result")},
            "check_mode": False,
        },
    ]
    playbook = tmp_path / "play.yml"
    playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    variables = {"ansible_python_interpreter": sys.executable, "ansible_async_dir": str(tmp_path / "async")}
    words = ["-i", "here,", "-c", "cable", "-e", json.dumps(variables), *options, str(playbook)]
    plugins = str(Path(__file__).with_name("connections"))
    return run_playbook(*words, check=succeeds, ANSIBLE_CONNECTION_PLUGINS=plugins, CABLE_CUT=str(tmp_path / "cut"))


def result(tmp_path: Path) -> dict[str, Any]:
    """What the task returned."""
    return dict(json.loads((tmp_path / "result").read_text()))


def follow(command: str, progress: Path, **options: Any) -> dict[str, Any]:
    """A task that follows a shell command."""
    return {
        "follow": {
            "module": "ansible.builtin.shell",
            "args": {"cmd": command},
            "label": "work",
            "progress": ["cat", str(progress)],
            "interval_s": 1,
            **options,
        }
    }


def test_follow_shows_the_progress_and_returns_the_result(tmp_path: Path) -> None:
    progress = tmp_path / "progress"
    done = play(tmp_path, follow(f"echo half > {progress}; sleep 4; echo done", progress))
    assert "here  work" in done.stdout
    assert "half" in done.stdout
    assert result(tmp_path)["stdout"] == "done"
    assert result(tmp_path)["changed"] is True
    assert not list((tmp_path / "async").iterdir()), "the job's record is left behind"


def test_follow_returns_a_failure_as_the_module_does(tmp_path: Path) -> None:
    play(tmp_path, follow("echo why >&2; exit 7", tmp_path / "none"))
    assert (result(tmp_path)["rc"], result(tmp_path)["stderr"]) == (7, "why")


def test_follow_gives_up_in_time(tmp_path: Path) -> None:
    play(tmp_path, follow("sleep 60", tmp_path / "none", timeout_s=3))
    assert "rc" not in result(tmp_path) or result(tmp_path)["rc"] != 0


def test_follow_outlives_a_cut_connection(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    done = play(tmp_path, follow(f"sleep 1; touch {cut}; sleep 4; rm {cut}; sleep 2; echo done", tmp_path / "none"))
    assert result(tmp_path).get("stdout") == "done", done.stdout
    assert (tmp_path / "cut.reset").exists(), "a connection that broke was used again"
    assert done.stdout.count("Connection reset by peer") == 1, done.stdout
    assert "goes on there" in done.stdout


def test_follow_runs_nothing_in_check_mode(tmp_path: Path) -> None:
    play(tmp_path, follow(f"touch {tmp_path / 'touched'}", tmp_path / "none"), "--check")
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("missing", ["module", "label"])
def test_follow_names_what_is_missing(tmp_path: Path, missing: str) -> None:
    task = follow("true", tmp_path / "none")
    del task["follow"][missing]
    done = play(tmp_path, task, succeeds=False)
    assert f"missing required arguments: {missing}" in done.stdout + done.stderr


def test_show_prints_sentences_under_the_name_of_the_host(tmp_path: Path) -> None:
    done = play(tmp_path, {"show": {"text": "It is ready."}})
    assert "\nhere: It is ready.\n" in done.stdout


@pytest.mark.parametrize("given", [{}, {"text": "a", "lines": ["b"]}])
def test_show_wants_either(tmp_path: Path, given: dict[str, Any]) -> None:
    done = play(tmp_path, {"show": given}, succeeds=False)
    said = get_words(done)
    assert done.returncode != 0 and ("mutually exclusive" if given else "one of the following is required") in said


def test_show_prints_lines_as_they_are(tmp_path: Path) -> None:
    done = play(tmp_path, {"show": {"lines": ["a  b", "'c'"]}})
    assert "\na  b\n'c'\n" in done.stdout
    assert result(tmp_path)["changed"] is False
