# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge switch` and `rollback`: what is started, how it is followed, what is refused; `history`, `progress`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.generation.model import Choice, Committed, FileChange, Generation, GenerationError
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import command as switch_unit
from ansible.module_utils.vllm_edge.switch import history
from ansible.module_utils.vllm_edge.switch.command import moves_lines, run_check, run_switch_to
from ansible.module_utils.vllm_edge.switch.history import count_seconds_since
from ansible.module_utils.vllm_edge.switch.journal import take_lock, to_json
from ansible.module_utils.vllm_edge.switch.model import Direction, Exit, Journal, Moves, Phase, PhaseFailed, Result
from ansible.module_utils.vllm_edge.system.records import read_record
from ansible.module_utils.vllm_edge.system.systemd import Ran
from ansible.module_utils.vllm_edge.text import WIDTH
from journals import RUNNING, ended

PACKAGE = "ansible.module_utils.vllm_edge"
FORMER = ended(id="20261120T100000Z-3", generation=3, profile="nvfp4-tp2", result=Result.COMMITTED)


class FakeUnit:
    """Systemd's side of the unit: each question of whether it runs takes the journal one step on."""

    def __init__(self, paths: HostPaths) -> None:
        self.paths = paths
        self.steps: list[Journal | None] = []
        self.started: list[str] = []
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
        if not self.started:
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
    found.active_profile.write_text(json.dumps(asdict(COMMITTED)))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(switch_unit, "POLL_S", 0.0)
    monkeypatch.setattr(switch_unit, "ASK_SYSTEMD_S", 0.0)
    monkeypatch.delenv("SUDO_USER", raising=False)
    found.switch_journal.write_text(json.dumps(to_json(FORMER)))
    return found


COMMITTED = Committed("bf16-tp4", 4, "d", {}, "-e", "nvfp4-tp2", "t", previous_generation=3)


class Command:
    """`vllm-edge switch` and `rollback` on this host; what they print is in `out` and `err`."""

    def __init__(self, paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> None:
        self.paths, self.capsys, self.unit = paths, capsys, FakeUnit(paths)
        self.out = self.err = ""

    def switch(
        self, wanted: str | None, *steps: Journal | None, choice: Choice | None = None, output: str = "text"
    ) -> int:
        """The journal takes these steps while the unit runs; with None it is `rollback`."""
        self.unit.steps = list(steps)
        return self.end(run_switch_to(wanted, self.paths, choice or Choice(), output=output, unit=self.unit))

    def end(self, status: int) -> int:
        self.out, self.err = self.capsys.readouterr()
        return status

    def refused(self, status: int, expected: Exit = Exit.REFUSED) -> str:
        """What it says when it has not started anything."""
        assert (status, self.out, self.unit.started) == (expected, "", [])
        assert self.err.count("\n") == 1, "one paragraph"
        return self.err


@pytest.fixture
def command(paths: HostPaths, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(paths, capsys)


def test_the_unit_outlives_its_asker_and_is_ended_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_USER", "alice")
    assert command.switch("4", ended()) == Exit.OK
    options, _, program = " ".join(command.unit.started).partition(" -- ")
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
        f"--setenv=VLLM_EDGE_STATE={command.paths.state}",
    ):
        assert told in options
    assert "--scope" not in options and "--wait" not in options, "it would end with whoever asked"
    assert "--collect" not in options, "its exit status would be gone"
    assert program == (
        "/usr/local/bin/vllm-edge run-switch 4 --origin=host --inventory-profile=nvfp4-tp2 "
        "--asked-by=vllm-edge switch by alice"
    )


def test_what_the_unit_runs_is_a_command_of_the_program(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setitem(
        sys.modules,
        f"{PACKAGE}.switch.run",
        SimpleNamespace(run_switch=lambda paths, number, choice: asked.append((paths.state, number, choice)) or 3),
    )
    command.switch("4", ended(), choice=Choice("-e", None, "site.yml by alice", gap=True), output="json")
    words = command.unit.started[command.unit.started.index("--") + 2 :]
    assert main([f"--state={command.paths.state}", *words]) == 3
    assert asked == [(command.paths.state, 4, Choice("-e", None, "site.yml by alice", gap=True))]


def test_rollback_goes_to_the_previous_one_and_says_so(command: Command) -> None:
    assert command.switch(None, ended(generation=3)) == Exit.OK
    started = command.unit.started
    assert started[started.index("run-switch") + 1] == "3"
    assert "--origin=host" in started and "--inventory-profile=nvfp4-tp2" in started
    assert any(word.startswith("--asked-by=vllm-edge rollback by ") for word in started)


def test_a_line_for_each_phase_once_and_the_end(command: Command) -> None:
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
    assert command.switch("4", *steps) == Exit.OK
    lines = command.out.splitlines()
    assert lines[0] == ("switch to generation 4 (bf16-tp4) from generation 3 (nvfp4-tp2), asked by site.yml by alice")
    phases = [line.split()[2] for line in lines if " s  " in line and line.startswith("   ")]
    assert phases == ["preflight", "stop", "healthy"]
    assert "    0.8 s  stop                4.1 s  31b-nvfp4-tp2 stopped" in lines
    assert "committed after 70.4 s: Generation 4 (bf16-tp4) serves." in lines
    assert "kept e4b; stopped 31b-nvfp4-tp2; started 31b-bf16-tp4" in lines
    assert "warning: The hook gateway failed." in lines
    assert "architect  64.5 s  1     healthy 60.4 s, stop 4.1 s" in lines
    assert max(map(len, lines)) <= WIDTH


def test_a_long_phase_is_not_silent(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_unit, "list_loading_engines", lambda journal: ["31b-bf16-tp4: loading weights 40 %"])
    monkeypatch.setattr(switch_unit, "QUIET_S", 0.0)
    command.switch("4", RUNNING, RUNNING, ended())
    line = r"^ +4\.9 s  healthy +\.\.\.  31b-bf16-tp4: loading weights 40 %$"
    assert re.search(line, command.out, re.MULTILINE)


def test_json_is_the_final_journal_alone_after_all_that_the_unit_runs(command: Command) -> None:
    """Until ExecStopPost has ended nobody else could start the unit."""
    final = ended(Result.ROLLED_BACK)
    assert command.switch("4", RUNNING, final, None, None, output="json") == Exit.ROLLED_BACK
    assert read_record(Journal, json.loads(command.out)) == final
    assert command.unit.steps == []


STATUS = {Result.COMMITTED: 0, Result.UNCHANGED: 0, Result.ROLLED_BACK: 1, Result.REFUSED: 2, Result.FAILED: 3}


@pytest.mark.parametrize("result", STATUS)
def test_the_exit_status_is_the_result(command: Command, result: Result) -> None:
    assert command.switch("4", ended(result)) == STATUS[result]


@pytest.mark.parametrize(("step", "told"), [(None, "ended before it had begun"), (RUNNING, "ended in phase healthy")])
def test_a_unit_that_ends_without_a_result(command: Command, step: Journal | None, told: str) -> None:
    assert command.switch("4", step, output="json") == Exit.FAILED
    assert command.out == ""
    for words in (told, "'journalctl -u vllm-edge-switch.service'", "vllm-edge recover"):
        assert words in command.err


@pytest.mark.parametrize("status", [Exit.REFUSED, Exit.BUSY])
def test_a_refusal_that_no_journal_tells_is_one(command: Command, status: Exit) -> None:
    """As on a full disk."""
    command.unit.status = status
    assert command.switch("4", None, output="json") == status
    assert command.out == ""
    assert "refused to begin: nothing was touched" in command.err and "recover" not in command.err


@pytest.mark.parametrize(
    ("shown", "status"),
    [
        ("ExecMainCode=1 ExecMainStatus=2", 2),
        ("ExecMainCode=2 ExecMainStatus=9", None),
        ("ExecMainCode=0 ExecMainStatus=0", None),
        ("", None),
    ],
)
def test_the_exit_status_is_asked_before_systemd_forgets_the_unit(shown: str, status: int | None) -> None:
    calls: list[str] = []

    def systemctl(command: Sequence[str], timeout_s: float) -> Ran:
        calls.append(" ".join(command[1:]))
        return Ran(0, f"Id=vllm-edge-switch.service\n{shown}".replace(" ", "\n"))

    assert switch_unit.Unit(systemctl).collect() == status
    unit = "vllm-edge-switch.service"
    assert calls == [f"show --property=Id,ExecMainCode,ExecMainStatus -- {unit}", f"reset-failed -- {unit}"]


@pytest.mark.parametrize("signal", [KeyboardInterrupt, BrokenPipeError])
def test_who_stops_following(command: Command, signal: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch_unit, "follow", Mock(side_effect=signal))
    assert command.switch("4") == 130
    assert "The switch goes on in vllm-edge-switch.service" in command.err
    assert all(words in command.err for words in ("vllm-edge progress", "journalctl -fu", "systemctl stop"))


def test_a_second_switch_is_told_of_the_first(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command.unit.elsewhere = True
    assert "runs already" in command.refused(command.switch("5"), Exit.BUSY)
    command.unit.elsewhere = False
    command.unit.refuses = "Failed to connect to bus"
    assert "nothing was touched: Failed to connect to bus" in command.refused(command.switch("5"))
    command.unit.refuses = None
    monkeypatch.setattr(switch_unit, "holder", lambda paths: RUNNING)
    told = command.refused(command.switch("5", output="json"), Exit.BUSY)
    for word in ("generation 4 (bf16-tp4)", "site.yml by alice", "phase healthy", "process 4711", "Nothing was done"):
        assert word in told


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ("9", "There is no generation 9 on this host. There are: 5 (nvfp4-tp2), 4 (bf16-tp4), 3 (nvfp4-tp2)."),
        ("w4a16-tp2", "There is no generation of a profile 'w4a16-tp2' on this host."),
        ("6", "Generation 6 is damaged."),
    ],
)
def test_a_generation_that_is_not_there(command: Command, wanted: str, told: str) -> None:
    command.paths.generation_dir(6).mkdir()
    assert told in command.refused(command.switch(wanted))


def write_history(paths: HostPaths, *journals: Journal) -> None:
    paths.history.mkdir()
    for journal in journals:
        (paths.history / f"{journal.id}.json").write_text(json.dumps(to_json(journal)))


def test_a_profile_is_what_was_verified_and_served_last_and_one_damaged_hides_no_other(command: Command) -> None:
    command.paths.generation_dir(6).mkdir()
    assert command.switch("nvfp4-tp2", ended(generation=3)) == Exit.OK
    assert command.unit.started[command.unit.started.index("run-switch") + 1] == "3"
    assert "Generation 5 (nvfp4-tp2) is passed over, it was never switched to; 'vllm-edge switch 5'" in command.err
    failed = ended(Result.ROLLED_BACK, id="20261123T000000Z-5", started_at="2026-11-23T00:00:00Z", generation=5)
    write_history(command.paths, failed)
    assert switch_unit.find_generation("nvfp4-tp2", command.paths).number == 3
    assert (
        "never verified: the switch to it at 2026-11-23T00:00:00Z ended rolled back" in command.capsys.readouterr().err
    )
    assert switch_unit.find_generation("5", command.paths).number == 5, "its number goes there"
    command.paths.active_profile.write_text(json.dumps(asdict(replace(COMMITTED, previous_generation=None))))
    command.unit.started = []
    assert "No generation of profile 'nvfp4-tp2' on this host was verified" in command.refused(
        command.switch("nvfp4-tp2")
    )


def test_a_rollback_passes_over_what_was_committed_over_its_budget(command: Command) -> None:
    first = ended(Result.OVER_BUDGET, id="20261119T000000Z-3", started_at="2026-11-19T00:00:00Z", generation=3)
    write_history(command.paths, first)
    assert "ended over budget. 'vllm-edge switch 3' tries it" in command.refused(command.switch(None))
    command.paths.active_profile.write_text(json.dumps(asdict(replace(COMMITTED, verified=(5, 4)))))
    assert command.switch(None, ended(generation=5)) == Exit.OK
    assert command.unit.started[command.unit.started.index("run-switch") + 1] == "5"
    assert "Generation 3 (nvfp4-tp2) is passed over" in command.err


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (None, "no generation was ever committed"),
        (replace(COMMITTED, previous_generation=None), "generation 4 (bf16-tp4) is the first that was committed"),
        (replace(COMMITTED, previous_generation=2), "generations/2 does not exist"),
    ],
)
def test_no_way_back(command: Command, now: Committed | None, told: str) -> None:
    command.paths.active_profile.unlink()
    if now:
        command.paths.active_profile.write_text(json.dumps(asdict(now)))
    assert told in command.refused(command.switch(None))


@pytest.mark.parametrize(
    "arguments", [["switch", "4"], ["switch", "4", "--check"], ["rollback"], ["recover"], ["recover", "--boot"]]
)
def test_only_root(command: Command, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    told = command.refused(command.end(main([f"--state={command.paths.state}", *arguments])))
    assert f"'sudo vllm-edge {' '.join(arguments)}'" in told


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
def moves(monkeypatch: pytest.MonkeyPatch) -> list[PhaseFailed]:
    """Why the host cannot be asked; nothing: it can."""
    problems: list[PhaseFailed] = []

    def asked(generation: Generation) -> Moves:
        if problems:
            raise problems[0]
        return MOVES

    machine = SimpleNamespace(SwitchedHost=lambda paths: SimpleNamespace(moves=asked))
    monkeypatch.setitem(sys.modules, f"{PACKAGE}.switch.host", machine)
    return problems


def test_check_prints_a_line_for_each_kind_of_work(command: Command, moves: list[PhaseFailed]) -> None:
    assert command.end(run_check("5", command.paths, output="text")) == 0
    assert command.out.splitlines() == [
        "generation 5, profile nvfp4-tp2",
        "  keeps e4b, e2b",
        "  stops 31b-nvfp4-tp2",
        "  starts 31b-bf16-tp4",
        "  writes /etc/systemd/system/vllm-31b-bf16-tp4.service",
        "  removes /etc/systemd/system/vllm-31b-nvfp4-tp2.service",
        "  writes /etc/vllm-edge/engines/e2b/engine.json (mode 0777, wanted 0644)",
        "  vllm-edge.target: needs daemon-reload",
    ]
    assert command.end(run_check("5", command.paths, output="json")) == 0
    assert json.loads(command.out)["moves"]["stop"] == ["31b-nvfp4-tp2"]
    moves.append(PhaseFailed("The Docker Engine does not answer."))
    assert "Docker" in command.refused(command.end(run_check("5", command.paths, output="text")))
    generation = Generation(4, "bf16-tp4", "d", "t", command.paths.state, {}, {})
    assert "nothing would be touched" in moves_lines(generation, Moves(keep=("e2b",)))[0]


def run(paths: HostPaths, *arguments: str) -> int:
    return main([f"--etc={paths.etc}", f"--state={paths.state}", *arguments])


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
    for outputs in ("no switch was made on this host\n", "[]\n"):
        assert run(paths, "history", *(["--format=json"] if outputs == "[]\n" else [])) == 0
        assert capsys.readouterr().out == outputs
    paths.history.mkdir()
    for journal in (FIRST, FAILED):
        (paths.history / f"{journal.id}.json").write_text(json.dumps(to_json(journal)))
    assert run(paths, "history") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[2:4]] == [
        "2026-11-21T17:00:00Z 3 nvfp4-tp2 4 bf16-tp4 rolled back 70 s 64 s -e",
        "2026-11-20T10:00:00Z - 3 a-profile-with-... committed 70 s - inventory",
    ]
    assert lines[-1] == "2026-11-21T17:00:00Z: The canary of worker failed.", "a switch that went well needs no words"
    assert max(map(len, lines)) <= WIDTH
    assert run(paths, "history", "--format=json") == 0
    assert [read_record(Journal, row) for row in json.loads(capsys.readouterr().out)] == [FAILED, FIRST]


REACHED = "clients reach e2b again, provisional until the commit"


@pytest.mark.parametrize(
    ("direction", "loads", "others", "told"),
    [
        ("forward", "31b-bf16-tp4", "", ["healthy", REACHED, "31b-bf16-tp4: loading weights, 40 %"]),
        ("forward", "none", "active", ["healthy", REACHED]),
        ("back", "31b-nvfp4-tp2", "inactive", ["going back, healthy", "31b-nvfp4-tp2: loading weights, 40 %"]),
    ],
)
def test_progress_of_the_running_switch(
    command: Command, monkeypatch: pytest.MonkeyPatch, direction: Direction, loads: str, others: str, told: list[str]
) -> None:
    def ask(names: Sequence[str]) -> tuple[dict[str, dict[str, str]], None]:
        states = {name: "activating" if loads in name else others for name in names}
        return {name: {"ActiveState": states[name], "StatusText": "loading weights, 40 %"} for name in names}, None

    monkeypatch.setattr(history, "ask_units", ask)
    command.paths.switch_journal.write_text(json.dumps(to_json(replace(RUNNING, direction=direction))))
    assert command.end(run(command.paths, "progress")) == 0
    assert command.out == "", "a journal was left unfinished, and nothing goes on"
    with take_lock(command.paths):
        assert command.end(run(command.paths, "progress")) == 0
    first, *engines = command.out.splitlines()
    assert first.startswith(f"generation 4 (bf16-tp4): {told[0]} for ") and first.endswith(" s")
    assert engines == told[1:]
    if direction == "forward" and others:
        begun = replace(RUNNING, phase=Phase.DRAIN, provisional={}, restarts=("e2b: restart because of --memory",))
        command.paths.switch_journal.write_text(json.dumps(to_json(begun)))
        with take_lock(command.paths):
            assert command.end(run(command.paths, "progress")) == 0
        assert command.out.splitlines()[1:] == ["e2b: restart because of --memory"]


def test_seconds_by_a_clock_that_jumps() -> None:
    assert count_seconds_since("2020-01-01T00:00:00Z") > 0
    assert count_seconds_since("2999-01-01T00:00:00Z") == count_seconds_since("") == 0


def test_a_command_does_not_take_the_umask_that_sudo_gives(paths: HostPaths) -> None:
    former = os.umask(0o077)
    try:
        main(["--etc", str(paths.etc), "--state", str(paths.state), "history"])
    finally:
        left = os.umask(former)
    assert left == 0o022
