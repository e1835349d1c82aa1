# SPDX-License-Identifier: Apache-2.0
"""playbooks/bench.yml on this machine; the host's program is a stand-in that writes down how it was called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, get_words, run_playbook

RECORD = "20261125T023000Z-e2b-only.jsonl"
SLOW, ODD = ({"severity": severity, "text": text} for severity, text in (("fail", "9.1 tok/s."), ("warn", "Odd.")))
PROGRAM = """#!/bin/sh
case "$*" in *--progress*) echo "e2b, protocol"; exit ;; esac
echo "$*" >> {place}/called
cat > {place}/asked
cat {place}/says
cat {place}/refuses >&2
exit $(cat {place}/status)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Any]:
    """Run the play for this machine as the host `here`."""
    host = {"ansible_connection": "local", "ansible_become": False, "serving_profile": "e2b-only"}
    host |= {"serving_reports_directory": str(tmp_path / "reports")}
    (tmp_path / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": {"here": host}}}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm-edge").write_text(PROGRAM.format(place=tmp_path))
    (tmp_path / "bin" / "vllm-edge").chmod(0o755)
    (tmp_path / RECORD).write_text('{"kind": "run"}\n')

    def run(*options: str, status: int = 0, findings: Any = (), refuses: str = "", error: str = "") -> Any:
        end = {"error": error, "findings": list(findings)}
        said = {"path": str(tmp_path / RECORD), "lines": ["a table", "Nothing differs."], "end": end}
        (tmp_path / "says").write_text("" if refuses else json.dumps(said))
        (tmp_path / "refuses").write_text(refuses)
        (tmp_path / "status").write_text(str(status))
        (tmp_path / "called").write_text("")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return run_playbook("-i", str(tmp_path / "hosts.yml"), "playbooks/bench.yml", *options, PATH=path)

    return run


def read_call(place: Path) -> list[str]:
    (line,) = (place / "called").read_text().splitlines()
    return line.split()


def test_the_record_is_fetched_and_printed(bench: Callable[..., Any], tmp_path: Path) -> None:
    done = bench()
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    fetched = tmp_path / "reports" / "bench" / "here" / RECORD
    assert fetched.read_text() == (tmp_path / RECORD).read_text()
    assert "here: a table Nothing differs." in get_words(done) and f"The record is {fetched}" in done.stdout
    words = read_call(tmp_path)
    assert words[0] == "bench" and {"--attended", "--through=both", "--gate=warn", "--limit-minutes=60"} < set(words)
    assert "--output-tokens=128,256,512" in words and not any("--engine" in word or "--allow" in word for word in words)
    rows = json.loads((tmp_path / "asked").read_text())
    assert {key: rows[0][key] for key in ("engine", "output_tokens", "tok_s")} == {
        "engine": "31b-nvfp4-tp2",
        "output_tokens": 128,
        "tok_s": 14.9,
    }


def test_check_mode_says_what_would_run_with_variables_that_are_text(bench: Callable[..., Any], tmp_path: Path) -> None:
    given = {"engines": "e2b, e4b", "cases": "protocol,sweep", "allow_load": "false", "gate": "fail"}
    given |= {"soak_minutes": "0.5", "output_tokens": "16,32", "input_tokens": "64", "requests": "2"}
    done = bench("--check", "--diff", "-e", json.dumps({f"bench_{name}": value for name, value in given.items()}))
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    said = get_words(done)
    assert "would run on here: vllm-edge bench" in said and "--allow-load" not in said
    assert "--engine=e2b --engine=e4b --case=protocol --case=sweep" in said and "--gate=fail" in said
    assert "--soak-minutes=0.5" in said and "--output-tokens=16,32" in said and "--input-tokens=64" in said
    assert (tmp_path / "called").read_text() == "" and not (tmp_path / "reports").exists()


WRONG = {
    "bench_engines": ("e2", "'e2'; name engines of the inventory, such as e2b-all: "),
    "bench_cases": ("soak", "a soak is asked for by its length, -e bench_soak_minutes=30"),
    "bench_soak_minutes": ("-1", "minutes of load for each engine are a number from 0"),
    "bench_limit_minutes": ("soon", "'soon'; the longest time in minutes is a number above 0"),
    "bench_tolerance_percent": ("0", "a percentage is above 0 and below 100"),
    "bench_input_tokens": ("many", "'many'; a prompt has a whole number of tokens"),
    "bench_output_tokens": ("128,long", "'128,long'; answers have whole numbers of tokens"),
    "bench_requests": ("1.5", "'1.5'; a number of requests from 1"),
    "bench_reference": ([{"engine": "e4b", "output_tokens": 128, "tok_s": "19-26"}], "each row has engine, output_tok"),
}


def test_wrong_variables_are_refused_together(bench: Callable[..., Any], tmp_path: Path) -> None:
    done = bench("-e", json.dumps({name: value for name, (value, _) in WRONG.items()}))
    said = get_words(done).replace("\\'", "'")
    assert done.returncode == 2 and (tmp_path / "called").read_text() == ""
    for name, (_, words) in WRONG.items():
        assert f"{name} is '" in said and words in said, f"{name}: {said}"
    assert "No host was touched." in said


def test_words_and_names_are_checked_with_the_inventory(bench: Callable[..., Any], tmp_path: Path) -> None:
    given = {"bench_gate": "loud", "bench_through": "door", "bench_allow_load": "perhaps", "bench_engine": "e2b"}
    done = bench("-e", json.dumps(given))
    said = get_words(done).replace("\\'", "'")
    assert done.returncode == 2 and (tmp_path / "called").read_text() == ""
    for words in (
        "4 mistakes in the variables",
        "bench_gate: 'loud' is not one of warn, fail",
        "bench_through: 'door' is not one of engine, gateway, both",
        "bench_allow_load: 'perhaps'",
        "did you mean bench_engines?",
    ):
        assert words in said, said


@pytest.mark.thorough
def test_a_soak_fits_into_the_limit(bench: Callable[..., Any]) -> None:
    done = bench("-e", "bench_soak_minutes=60")
    assert done.returncode == 2 and "(60 for each of 1), such as 120" in get_words(done)


def test_findings_fail_the_play_after_the_record_is_fetched(bench: Callable[..., Any], tmp_path: Path) -> None:
    done = bench("-e", "bench_gate=fail", status=1, findings=[SLOW, ODD])
    assert done.returncode == 2 and "bench_gate is fail, and the benchmark found: 9.1 tok/s." in get_words(done)
    assert "Odd." not in done.stdout and (tmp_path / "reports" / "bench" / "here" / RECORD).exists()


@pytest.mark.thorough
def test_a_run_that_ended_early_says_why(bench: Callable[..., Any]) -> None:
    done = bench(status=1, error="The benchmark ended early: a switch began.")
    assert done.returncode == 2 and "here: The benchmark ended early: a switch began." in get_words(done)


@pytest.mark.thorough
def test_a_refusal_is_passed_on(bench: Callable[..., Any], tmp_path: Path) -> None:
    done = bench(status=2, refuses="Engine e2b works on 2 requests of clients.")
    assert done.returncode == 2 and "here: Engine e2b works on 2 requests of clients." in get_words(done)
    (tmp_path / "bin" / "vllm-edge").unlink()
    absent = bench()
    assert absent.returncode == 2 and "run site.yml first" in get_words(absent)


def test_the_play_names_the_cases_of_the_program() -> None:
    from ansible.module_utils.vllm_edge.bench.model import CASES

    assert f"bench_known_cases: [{', '.join(CASES)}]" in (ROOT / "playbooks" / "bench.yml").read_text()
