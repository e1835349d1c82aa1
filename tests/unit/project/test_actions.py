# SPDX-License-Identifier: Apache-2.0
"""The action plugins, run by ansible-playbook on this machine: one play with a task for each case."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import run_playbook
from test_printable import GOOD, HOSTILE, find_forbidden

pytestmark = pytest.mark.slow

LINE = "".join(character for character in HOSTILE if character not in "\x00\ud800")


def follow(command: str, progress: Path | str = "/nonexistent", **options: Any) -> dict[str, Any]:
    """A task that follows a shell command."""
    shell = {"module": "ansible.builtin.shell", "args": {"cmd": command}, "label": "work"}
    return {"edge.vllm_edge.follow": {**shell, "progress": ["cat", str(progress)], "interval_s": 1, **options}}


class Played:
    """What the play printed, and what each task returned or failed with."""

    def __init__(self, place: Path) -> None:
        self.place, self.cut = place, place / "cut"
        progress, unknown = place / "progress", follow("true")
        progress.write_text(LINE)
        del unknown["edge.vllm_edge.follow"]["module"], unknown["edge.vllm_edge.follow"]["label"]
        cut = f"sleep 1; touch {self.cut}; sleep 4; rm {self.cut}; sleep 2; echo done"
        tasks: dict[str, dict[str, Any]] = {
            "progress": follow("sleep 4; echo done", progress),
            "failure": follow("echo why >&2; exit 7"),
            "limit": follow("sleep 20", timeout_s=2),
            "cut": follow(cut),
            "check": {**follow(f"touch {place / 'touched'}"), "check_mode": True},
            "unknown": unknown,
            "text": {"edge.vllm_edge.show": {"text": "It is ready."}},
            "lines": {"edge.vllm_edge.show": {"lines": ["a  b", "'c'", LINE, GOOD]}},
            "neither": {"edge.vllm_edge.show": {}},
            "both": {"edge.vllm_edge.show": {"text": "a", "lines": ["b"]}},
        }
        refused = {"refused": "{{ ansible_failed_result.msg }}"}
        blocks = [
            {
                "block": [{**task, "register": f"acted_{name}", "failed_when": False}],
                "rescue": [{"ansible.builtin.set_fact": {f"acted_{name}": refused}}],
            }
            for name, task in tasks.items()
        ]
        acted = "{{ {" + ", ".join(f"'{name}': acted_{name}" for name in tasks) + "} | to_json }}"
        keep = {"ansible.builtin.copy": {"content": acted, "dest": str(place / "acted")}}
        (place / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": [*blocks, keep]}]))
        # A Python of its own: jobs go on after the module that began them.
        variables = {"ansible_python_interpreter": sys.executable, "ansible_async_dir": str(place / "async")}
        words = ["-i", "here,", "-c", "cable", "-e", json.dumps(variables), str(place / "play.yml")]
        plugins = str(Path(__file__).with_name("connections"))
        done = run_playbook(*words, ANSIBLE_CONNECTION_PLUGINS=plugins, CABLE_CUT=str(self.cut))
        assert done.returncode == 0, done.stdout + done.stderr
        self.stdout = done.stdout
        assert find_forbidden(self.stdout + done.stderr) == []
        self.acted: dict[str, dict[str, Any]] = json.loads((place / "acted").read_text())


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(tmp_path_factory.mktemp("actions"))


def test_follow_shows_the_progress_in_printable_lines_and_returns_the_result(played: Played) -> None:
    progress = [line for line in played.stdout.splitlines() if line.startswith("  here  work") and "gnp" in line]
    assert progress, played.stdout
    assert (played.acted["progress"]["stdout"], played.acted["progress"]["changed"]) == ("done", True)
    left = [path.name for path in (played.place / "async").iterdir()]
    assert len(left) <= 1, "besides that of the job that took too long, records are left behind"


def test_follow_returns_a_failure_gives_up_in_time_and_runs_nothing_in_check_mode(played: Played) -> None:
    assert (played.acted["failure"]["rc"], played.acted["failure"]["stderr"]) == (7, "why")
    # Whoever notices first: the host, or the controller.
    assert played.acted["limit"]["msg"] in ("Timeout exceeded", "work: not finished after 2 s")
    assert not (played.place / "touched").exists()


def test_follow_outlives_a_cut_connection(played: Played) -> None:
    assert played.acted["cut"].get("stdout") == "done", played.stdout
    assert played.cut.with_suffix(".reset").exists(), "a connection that broke was used again"
    assert played.stdout.count("Connection reset by peer") == 1, played.stdout
    assert "goes on there" in played.stdout


def test_options_are_checked(played: Played) -> None:
    assert "missing required arguments: label, module" in played.acted["unknown"]["refused"]
    assert "one of the following is required: lines, text" in played.acted["neither"]["refused"]
    assert "mutually exclusive" in played.acted["both"]["refused"]


def test_show_prints_text_under_the_name_of_the_host_and_lines_as_they_are(played: Played) -> None:
    assert "\nhere: It is ready.\n" in played.stdout
    assert "\na  b\n'c'\n" in played.stdout and f"\n{GOOD}\n" in played.stdout
    assert played.acted["lines"]["changed"] is False
