# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge switch` and `rollback`: what is started, how it is followed, what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.generation.model import Committed, FileChange, Generation, GenerationError
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import command as switch_unit
from ansible.module_utils.vllm_edge.switch.command import Choice, moves_lines, run_check, run_rollback, run_switch_to
from ansible.module_utils.vllm_edge.switch.journal import from_json, to_json
from ansible.module_utils.vllm_edge.switch.model import Exit, Journal, Moves, PhaseFailed, Result
from ansible.module_utils.vllm_edge.text import WIDTH
from journals import RUNNING, ended

PACKAGE = "ansible.module_utils.vllm_edge"
FORMER = ended(id="20261120T100000Z-3", generation=3, profile="nvfp4-tp2", result=Result.COMMITTED)


class FakeUnit:
    """Systemd's side of the unit: each question of whether it runs takes the journal one step on."""

    def __init__(self, paths: HostPaths, steps: Sequence[Journal | None]) -> None:
        self.paths = paths
        self.steps = list(steps)
        self.started: list[str] | None = None
        self.refuses: str | None = None
        self.elsewhere = False
        """Somebody else's unit of the same name runs."""
        self.status: int | None = None
        """Exit status of its program."""

    def start(self, command: Sequence[str]) -> str | None:
        if self.refuses is None:
            self.started = list(command)
        return self.refuses

    def running(self) -> bool:
        if self.started is None:
            return self.elsewhere
        if not self.steps:
            return False
        step = self.steps.pop(0)
        if step is not None:
            self.paths.switch_journal.write_text(json.dumps(to_json(step)))
        return True

    def collect(self) -> int | None:
        return self.status


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostPaths:
    """A host with the generations 3 to 5, of which 4 is committed; root asks, and no second passes."""
    generations = {3: "nvfp4-tp2", 4: "bf16-tp4", 5: "nvfp4-tp2"}
    found = HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units")
    for number in generations:
        found.generation_dir(number).mkdir(parents=True)

    def load(paths: HostPaths, number: int) -> Generation:
        if number not in generations:
            raise GenerationError(f"generation {number} is damaged")
        return Generation(number, generations[number], "d", "t", paths.generation_dir(number), {}, {})

    monkeypatch.setattr(switch_unit, "load", load)
    monkeypatch.setattr(switch_unit, "committed", lambda paths: COMMITTED)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(switch_unit, "POLL_S", 0.0)
    monkeypatch.setattr(switch_unit, "ASK_SYSTEMD_S", 0.0)
    monkeypatch.delenv("SUDO_USER", raising=False)
    found.switch_journal.write_text(json.dumps(to_json(FORMER)))
    return found


COMMITTED = Committed("bf16-tp4", 4, "d", {}, "-e", "nvfp4-tp2", "t", previous_generation=3)


# ---- what is started --------------------------------------------------------------------------------------------


def test_the_unit_outlives_its_asker_and_is_ended_once(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    unit = FakeUnit(paths, [ended()])
    assert run_switch_to("4", paths, Choice(), output="text", unit=unit) == Exit.OK
    assert unit.started is not None
    options, _, program = " ".join(unit.started).partition(" -- ")
    for told in (
        "systemd-run --unit=vllm-edge-switch.service",
        "--description=Switch to generation 4, profile bf16-tp4, asked by vllm-edge switch by alice",
        "--service-type=exec",
        "--property=ExecStopPost=/usr/local/bin/vllm-edge recover",
        "--property=KillMode=mixed",
        "--property=TimeoutStopSec=infinity",
        "--property=Restart=no",
        "--property=OOMScoreAdjust=-900",
        "--property=After=docker.service",
        f"--setenv=VLLM_EDGE_STATE={paths.state}",
    ):
        assert told in options
    assert "--scope" not in options and "--wait" not in options, "it would end with whoever asked"
    assert "--collect" not in options, "its exit status would be gone"
    assert program == (
        "/usr/local/bin/vllm-edge run-switch 4 --origin=host --inventory-profile=nvfp4-tp2 "
        "--asked-by=vllm-edge switch by alice"
    )


def test_what_the_unit_runs_is_a_command_of_the_program(paths: HostPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(
        sys.modules,
        f"{PACKAGE}.switch.run",
        SimpleNamespace(run_switch=lambda paths, number, **more: asked.append((paths.state, number, more)) or 3),
    )
    unit = FakeUnit(paths, [ended()])
    run_switch_to("4", paths, Choice("-e", None, "site.yml by alice"), output="json", unit=unit)
    assert unit.started is not None
    words = unit.started[unit.started.index("--") + 2 :]
    assert main([f"--state={paths.state}", *words]) == 3
    assert asked == [
        (paths.state, 4, {"origin": "-e", "inventory_profile": None, "asked_by": "site.yml by alice"}),
    ]


def test_a_profile_is_its_newest_generation(paths: HostPaths) -> None:
    unit = FakeUnit(paths, [ended(generation=5)])
    assert run_switch_to("nvfp4-tp2", paths, Choice(), output="text", unit=unit) == Exit.OK
    assert unit.started is not None
    assert unit.started[unit.started.index("run-switch") + 1] == "5"


def test_rollback_goes_to_the_previous_one_and_says_so(paths: HostPaths) -> None:
    unit = FakeUnit(paths, [ended(generation=3)])
    assert run_rollback(paths, output="text", unit=unit) == Exit.OK
    assert unit.started is not None
    assert unit.started[unit.started.index("run-switch") + 1] == "3"
    assert "--origin=host" in unit.started and "--inventory-profile=nvfp4-tp2" in unit.started
    assert any(word.startswith("--asked-by=vllm-edge rollback by ") for word in unit.started)


# ---- how it is followed -----------------------------------------------------------------------------------------


def test_a_line_for_each_phase_once_and_the_end(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    preflight, stop, _ = RUNNING.phases
    steps = [
        None,
        replace(RUNNING, phases=(replace(preflight, seconds=None, outcome=None),)),
        replace(RUNNING, phases=(preflight, stop)),
        RUNNING,
        RUNNING,
        ended(warnings=("The hook gateway failed.",)),
        None,
    ]
    assert run_switch_to("4", paths, Choice(), output="text", unit=FakeUnit(paths, steps)) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == ("switch to generation 4 (bf16-tp4) from generation 3 (nvfp4-tp2), asked by site.yml by alice")
    assert [line.split()[2] for line in lines if " s  " in line and line.startswith("   ")] == [
        "preflight",
        "stop",
        "healthy",
    ]
    assert "    0.8 s  stop                4.1 s  31b-nvfp4-tp2 stopped" in lines
    assert "committed after 70.4 s: Generation 4 (bf16-tp4) serves." in lines
    assert "kept e4b; stopped 31b-nvfp4-tp2; started 31b-bf16-tp4" in lines
    assert "warning: The hook gateway failed." in lines
    assert "architect  64.5 s  1     healthy 60.4 s, stop 4.1 s" in lines
    assert max(map(len, lines)) <= WIDTH


def test_a_long_phase_is_not_silent(
    paths: HostPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(switch_unit, "list_loading_engines", lambda journal: ["31b-bf16-tp4: loading weights 40 %"])
    monkeypatch.setattr(switch_unit, "QUIET_S", 0.0)
    run_switch_to("4", paths, Choice(), output="text", unit=FakeUnit(paths, [RUNNING, ended()]))
    out = capsys.readouterr().out
    assert re.search(r"^ +4\.9 s  healthy +\.\.\.  31b-bf16-tp4: loading weights 40 %$", out, re.MULTILINE)


def test_json_is_the_final_journal_alone(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    final = ended(Result.ROLLED_BACK)
    unit = FakeUnit(paths, [RUNNING, final])
    assert run_switch_to("4", paths, Choice(), output="json", unit=unit) == Exit.ROLLED_BACK
    assert from_json(json.loads(capsys.readouterr().out)) == final


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (Result.COMMITTED, 0),
        (Result.UNCHANGED, 0),
        (Result.ROLLED_BACK, 1),
        (Result.REFUSED, 2),
        (Result.FAILED, 3),
    ],
)
def test_the_exit_status_is_the_result(paths: HostPaths, result: Result, status: int) -> None:
    assert run_switch_to("4", paths, Choice(), output="text", unit=FakeUnit(paths, [ended(result)])) == status


@pytest.mark.parametrize(
    ("steps", "told"), [([None], "ended before it had begun"), ([RUNNING], "ended in phase healthy")]
)
def test_a_unit_that_ends_without_a_result(
    paths: HostPaths, steps: list[Journal | None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_switch_to("4", paths, Choice(), output="json", unit=FakeUnit(paths, steps)) == Exit.FAILED
    said = capsys.readouterr()
    assert said.out == ""
    assert told in said.err and "'journalctl -u vllm-edge-switch.service'" in said.err
    assert "vllm-edge recover" in said.err


@pytest.mark.parametrize("status", [Exit.REFUSED, Exit.BUSY])
def test_a_refusal_that_no_journal_tells_is_one(
    paths: HostPaths, status: Exit, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a full disk."""
    unit = FakeUnit(paths, [None])
    unit.status = status
    assert run_switch_to("4", paths, Choice(), output="json", unit=unit) == status
    said = capsys.readouterr()
    assert said.out == "" and "refused to begin: nothing was touched" in said.err and "recover" not in said.err


SYSTEMCTL = """#!/bin/sh
echo "$*" >> {log}
[ "$1" = show ] && printf '%s\\n' {shown}
exit 0
"""


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        ("ExecMainCode=1 ExecMainStatus=2", 2),
        ("ExecMainCode=2 ExecMainStatus=9", None),
        ("ExecMainCode=0 ExecMainStatus=0", None),
        ("''", None),
    ],
    ids=["exited", "killed", "unknown", "silent"],
)
def test_the_exit_status_is_asked_before_systemd_forgets_the_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, status: int | None
) -> None:
    log = tmp_path / "log"
    (tmp_path / "systemctl").write_text(SYSTEMCTL.format(log=log, shown=shown))
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert switch_unit.SystemdUnit().collect() == status
    unit = "vllm-edge-switch.service"
    assert log.read_text().splitlines() == [
        f"show --property=ExecMainCode,ExecMainStatus {unit}",
        f"reset-failed {unit}",
    ]


def test_the_end_waits_for_what_the_unit_runs_after_it(paths: HostPaths) -> None:
    """Until ExecStopPost has ended nobody else could start the unit."""
    unit = FakeUnit(paths, [RUNNING, ended(), None, None, None])
    assert run_switch_to("4", paths, Choice(), output="text", unit=unit) == Exit.OK
    assert unit.steps == []


@pytest.mark.parametrize("signal", [KeyboardInterrupt, BrokenPipeError])
def test_who_stops_following_is_told_how_to_go_on(
    paths: HostPaths,
    signal: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise signal

    monkeypatch.setattr(switch_unit, "follow", interrupted)
    unit = FakeUnit(paths, [])
    assert run_switch_to("4", paths, Choice(), output="text", unit=unit) == 130
    told = capsys.readouterr().err
    assert "The switch goes on in vllm-edge-switch.service" in told
    assert "vllm-edge progress" in told and "journalctl -fu" in told and "systemctl stop" in told


# ---- what is refused --------------------------------------------------------------------------------------------


def refused(call: Callable[[], int], status: Exit, capsys: pytest.CaptureFixture[str]) -> str:
    assert call() == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, "one paragraph"
    return said.err


def test_a_second_switch_is_told_who_holds_the_first(
    paths: HostPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(switch_unit, "holder", lambda paths: RUNNING)
    unit = FakeUnit(paths, [])
    told = refused(lambda: run_switch_to("5", paths, Choice(), output="json", unit=unit), Exit.BUSY, capsys)
    for word in ("generation 4 (bf16-tp4)", "site.yml by alice", "phase healthy", "process 4711", "Nothing was done"):
        assert word in told
    assert unit.started is None


def test_a_second_switch_that_comes_before_the_first_has_said_anything(
    paths: HostPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    unit = FakeUnit(paths, [])
    unit.elsewhere = True
    assert "runs already" in refused(
        lambda: run_switch_to("5", paths, Choice(), output="text", unit=unit), Exit.BUSY, capsys
    )


def test_systemd_s_own_words_where_it_starts_nothing(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
    unit = FakeUnit(paths, [])
    unit.refuses = "Failed to connect to bus"
    told = refused(lambda: run_switch_to("5", paths, Choice(), output="text", unit=unit), Exit.REFUSED, capsys)
    assert "nothing was touched: Failed to connect to bus" in told


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("9", "There is no generation 9 on this host. There are: 5 (nvfp4-tp2), 4 (bf16-tp4), 3 (nvfp4-tp2)."),
        ("w4a16-tp2", "There is no generation of a profile 'w4a16-tp2' on this host."),
        ("6", "Generation 6 cannot be used: generation 6 is damaged"),
    ],
)
def test_a_generation_that_is_not_there(
    paths: HostPaths, wanted: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if wanted == "6":
        paths.generation_dir(6).mkdir()
    unit = FakeUnit(paths, [])
    assert told in refused(
        lambda: run_switch_to(wanted, paths, Choice(), output="text", unit=unit), Exit.REFUSED, capsys
    )
    assert unit.started is None


def test_one_damaged_generation_hides_no_other(paths: HostPaths) -> None:
    paths.generation_dir(6).mkdir()
    unit = FakeUnit(paths, [ended(generation=5)])
    assert run_switch_to("nvfp4-tp2", paths, Choice(), output="text", unit=unit) == Exit.OK


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (None, "no generation was ever committed"),
        (replace(COMMITTED, previous_generation=None), "generation 4 (bf16-tp4) is the first that was committed"),
        (replace(COMMITTED, previous_generation=2), "generations/2 does not exist"),
    ],
)
def test_a_rollback_to_nothing(
    paths: HostPaths,
    now: Committed | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(switch_unit, "committed", lambda paths: now)
    unit = FakeUnit(paths, [])
    assert told in refused(lambda: run_rollback(paths, output="text", unit=unit), Exit.REFUSED, capsys)
    assert unit.started is None


@pytest.mark.parametrize(
    "arguments", [["switch", "4"], ["switch", "4", "--check"], ["rollback"], ["recover"], ["recover", "--boot"]]
)
def test_only_root(
    paths: HostPaths, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = refused(lambda: main([f"--state={paths.state}", *arguments]), Exit.REFUSED, capsys)
    assert f"'sudo vllm-edge {' '.join(arguments)}'" in told


# ---- what would be done -----------------------------------------------------------------------------------------

MOVES = Moves(
    keep=("e4b", "e2b"),
    stop=("31b-nvfp4-tp2",),
    start=("31b-bf16-tp4",),
    files=(
        FileChange("/etc/systemd/system/vllm-31b-bf16-tp4.service", None, "x"),
        FileChange("/etc/systemd/system/vllm-31b-nvfp4-tp2.service", "x", None),
        FileChange("/etc/vllm-edge/engines/e2b/engine.json", "x", "x", "mode 0777, wanted 0644"),
    ),
    target=("needs daemon-reload",),
)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Moves | Exception]]:
    """What the host answers."""
    answers: list[Moves | Exception] = [MOVES]

    def asked(generation: Generation) -> Moves:
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    world = SimpleNamespace(HostWorld=lambda paths: SimpleNamespace(moves=asked))
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.switch.host", world)
    yield answers


def test_check_prints_a_line_for_each_kind_of_work(
    paths: HostPaths, moves: list[Moves | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_check("5", paths, output="text") == 0
    assert capsys.readouterr().out.splitlines() == [
        "generation 5, profile nvfp4-tp2",
        "  keeps e4b, e2b",
        "  stops 31b-nvfp4-tp2",
        "  starts 31b-bf16-tp4",
        "  writes /etc/systemd/system/vllm-31b-bf16-tp4.service",
        "  removes /etc/systemd/system/vllm-31b-nvfp4-tp2.service",
        "  writes /etc/vllm-edge/engines/e2b/engine.json (mode 0777, wanted 0644)",
        "  vllm-edge.target: needs daemon-reload",
    ]
    assert run_check("5", paths, output="json") == 0
    assert json.loads(capsys.readouterr().out)["moves"]["stop"] == ["31b-nvfp4-tp2"]


def test_check_where_nothing_differs(paths: HostPaths) -> None:
    generation = Generation(4, "bf16-tp4", "d", "t", paths.state, {}, {})
    assert "nothing would be touched" in moves_lines(generation, Moves(keep=("e2b",)))[0]


def test_check_where_the_host_cannot_be_asked(
    paths: HostPaths, moves: list[Moves | Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    moves[0] = PhaseFailed("The Docker Engine does not answer.")
    assert "Docker" in refused(lambda: run_check("5", paths, output="text"), Exit.REFUSED, capsys)
