# SPDX-License-Identifier: Apache-2.0
"""`make test`: lanes, the limit, what is printed, and whose CPU seconds are counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from helpers import ROOT, load_file, write_program

WAIT = "for i in $(seq 100); do [ -e {} ] && exit 0; sleep 0.1; done; exit 1"


@pytest.fixture(scope="module")
def tests() -> ModuleType:
    return load_file(ROOT / "tools" / "run_tests.py")


def run(tests: ModuleType, logs: Path, *commands: str, limit_s: float = 60) -> tuple[int, list[str]]:
    """Exit status and summary of a run whose parts are shell commands named a, b, ..."""
    parts = [tests.Part(chr(ord("a") + at), ["sh", "-c", command], 60) for at, command in enumerate(commands)]
    this = tests.Run(parts, logs, limit_s)
    return this.all(), this.summary()


def meet(directory: Path) -> list[str]:
    """Two commands of which each waits for the other."""
    places = [directory / "first", directory / "second"]
    return [f"touch {mine}; {WAIT.format(other)}" for mine, other in zip(places, reversed(places), strict=True)]


def test_two_parts_run_at_once_and_each_has_a_line(tests: ModuleType, tmp_path: Path) -> None:
    status, lines = run(tests, tmp_path, *meet(tmp_path), "true")
    assert status == 0 and lines.pop().startswith("containers ")
    assert sorted(line.split()[0] for line in lines) == ["a", "b", "c"]
    assert all(" minutes " in line and " CPU seconds  passed" in line for line in lines), lines


def test_a_part_that_fails_does_not_stop_the_others(
    tests: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = "echo 'FAILED test_x.py::test_y - no'; printf '  \\033[2m│\\033[0m FAILED test_z.py::test_z\\n'; exit 3"
    status, lines = run(tests, tmp_path, failed, "true", "echo last")
    assert status == 1
    assert any(line.startswith("a ") and line.endswith("FAILED, exit status 3") for line in lines)
    assert "    FAILED test_x.py::test_y - no" in lines
    assert "    FAILED test_z.py::test_z" in lines, "as Molecule shows it"
    assert "\nlast\n" in capsys.readouterr().out, "what a part prints is printed"


@pytest.mark.slow
def test_past_the_limit_nothing_is_begun_and_what_is_left_out_is_named(tests: ModuleType, tmp_path: Path) -> None:
    began = time.monotonic()
    status, lines = run(tests, tmp_path, "sleep 60", "sleep 60", "true", "true", limit_s=2)
    assert status == 1 and time.monotonic() - began < 50
    assert lines[0].endswith("ENDED, because 0 minutes had passed for all parts")
    assert lines[-2].startswith("LEFT OUT, because 0 minutes had passed: c, d")
    assert not (tmp_path / "c.log").exists()


def is_running(pid: int) -> bool:
    """Whether it is there, and is not a process that ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_part_that_hangs_is_named_and_ended_with_what_it_started(
    tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tidies up when it is told to end, what it started does not listen, and Molecule has left a host."""
    monkeypatch.setattr(tests, "TERM_S", 2)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    write_program(tmp_path / "molecule", f'echo "$@" >>{tmp_path}/destroyed')
    deaf = f"(trap '' TERM; echo 'FAILED test_x.py::test_y'; exec sleep 60) & echo $! >{tmp_path}/deaf"
    tidy = "trap 'echo tidied; exit 0' TERM; while :; do sleep 0.1; done"
    parts = [tests.Part("a", ["sh", "-c", f"{deaf}; {tidy}"], 2, scenario="default")]
    parts += [tests.Part(name, ["true"], 60, scenario="switch") for name in "bc"]
    this, began = tests.Run(parts, tmp_path, times=2), time.monotonic()
    assert this.all() == 1 and 4 < time.monotonic() - began < 50
    lines = {line.split()[0]: line for line in this.summary()}
    assert lines["a"].endswith("HUNG: ended after its limit of 0 minutes")
    assert lines["b"].endswith("passed") and lines["c"].endswith("passed")
    assert lines["FAILED"] == "    FAILED test_x.py::test_y"
    assert "tidied" in (tmp_path / "a.log").read_text()
    assert (tmp_path / "destroyed").read_text() == "destroy --scenario-name default\n"
    deadline = time.monotonic() + 60
    while is_running(int((tmp_path / "deaf").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)


MAIN = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import run_tests
run_tests.LOGS = pathlib.Path(sys.argv[2])
run_tests.PARTS = [run_tests.Part(name, ["sh", "-c", "echo up; exec sleep 60"], 60) for name in "abc"]
sys.exit(run_tests.main())
"""


@pytest.mark.slow
def test_a_run_that_is_stopped_stops_its_parts_and_begins_no_other(tmp_path: Path) -> None:
    words = [sys.executable, "-c", MAIN, str(ROOT / "tools"), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 60
        while sum(log.read_text() == "up\n" for log in tmp_path.glob("*.log")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=40)
    assert process.returncode != 0
    assert sorted(line[4] for line in output.splitlines() if line.endswith("FAILED, exit status -15")) == ["a", "b"]
    assert not (tmp_path / "c.log").exists()


def test_cpu_seconds_of_a_part_and_of_containers(tests: ModuleType, tmp_path: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    this = tests.Run([tests.Part("a", [sys.executable, "-c", busy], 60)], tmp_path)
    assert this.all() == 0
    assert 0.2 < this.ended[0].cpu_seconds < 2
    (tmp_path / "cpuacct/docker").mkdir(parents=True)
    (tmp_path / "cpuacct/docker/cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "system.slice").mkdir()
    (tmp_path / "system.slice/cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert tests.container_seconds(tmp_path) == 4.0, "under either version of control groups"


@pytest.mark.slow
def test_a_test_that_hangs_is_named_and_the_next_one_runs(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text("import time\ndef test_a(): time.sleep(60)\ndef test_b(): pass\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--config-file={ROOT}/pyproject.toml"]
    words += ["--override-ini=timeout=1", str(tmp_path)]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert "1 failed, 1 passed" in done.stdout and "test_a - Failed: Timeout" in done.stdout, done.stdout + done.stderr
    assert 60 <= float(pytestconfig.getini("timeout")) <= 600
    scenarios = yaml.safe_load((ROOT / ".config/molecule/config.yml").read_text())
    assert 600 <= int(scenarios["verifier"]["options"]["timeout"]) <= 1200


def test_every_scenario_is_a_part(tests: ModuleType) -> None:
    scenarios = {path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml")}
    parts = {"default" if part.name == "molecule" else part.name: part for part in tests.PARTS}
    assert {name for name, part in parts.items() if part.scenario == name} == scenarios, "what it leaves can be removed"
    assert all(60 < part.limit_s < tests.LIMIT_S for part in tests.PARTS)
