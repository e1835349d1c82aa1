# SPDX-License-Identifier: Apache-2.0
"""playbooks/bench.yml for hosts that are this machine: what it asks the program for, and what it makes of the end."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import find_failures, get_words, make_host, run_playbook

RECORD = "20261125T023000Z-e2b-only.jsonl"
SLOW, ODD = ({"severity": severity, "text": text} for severity, text in (("fail", "9.1 tok/s."), ("warn", "Odd.")))
PROGRAM = """#!/bin/sh
case "$*" in *--progress*) echo "e2b, protocol"; exit ;; esac
echo "$*" >> {place}/called
cat > {place}/asked
cat {place}/says
cat {place}/refuses >&2
exit {status}
"""
ENDS: dict[str, dict[str, Any]] = {
    "here": {},
    "slow": {"status": 1, "findings": [SLOW, ODD]},
    "early": {"status": 1, "error": "The benchmark ended early: a switch began."},
    "busy": {"status": 2, "refuses": "Engine e2b works on 2 requests of clients."},
    "bare": {},
}
"""Hosts by how their program ends; the last one has none."""
WRONG = {
    "bench_engines": ("e2", "'e2' is no engine of the inventory; did you mean e2b"),
    "bench_cases": ("soak", "for a soak its length, -e bench_soak_minutes=30"),
    "bench_reference": ([{"engine": "e4b", "output_tokens": 128, "tok_s": "19-26"}], "each row has engine, output_tok"),
}


WORDS = {
    "bench_tolerance_percent": ("0", "bench_tolerance_percent: 0 is too small, the least is 0.1"),
    "bench_output_tokens": ("128,long", "bench_output_tokens[1]: 'long' is text, not a number; write a whole number"),
    "bench_gate": ("loud", "bench_gate: 'loud' is not one of warn, fail"),
    "bench_allow_load": ("perhaps", "bench_allow_load: 'perhaps'"),
    "bench_engine": ("e2b", "did you mean bench_engines?"),
}


def run_bench(place: Path, more: Mapping[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the play for the hosts of ENDS, and for those with more variables."""
    hosts = {}
    for name in (*ENDS, *more):
        end = {"error": "", "findings": [], **ENDS.get(name, {})}
        own = place / name
        status = end.pop("status", 0)
        program = {} if name == "bare" else {"vllm-edge": PROGRAM.format(place=own, status=status)}
        hosts[name] = make_host(own, **program) | {"serving_profile": "e2b-only", **more.get(name, {})}
        hosts[name] |= {"serving_reports_directory": str(place / "reports")}
        (own / RECORD).write_text('{"kind": "run"}\n')
        refuses = end.pop("refuses", "")
        said = {"path": str(own / RECORD), "lines": ["a table", "Nothing differs."], "end": end}
        (own / "says").write_text("" if refuses else json.dumps(said))
        (own / "refuses").write_text(refuses)
    hosts["slow"] |= {"bench_gate": "fail"}
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": hosts}}))
    return run_playbook("-i", place / "hosts.yml", "playbooks/bench.yml", *options)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    place = tmp_path_factory.mktemp("bench")
    more = {
        "wrong": {name: value for name, (value, _) in WRONG.items()},
        "words": {name: value for name, (value, _) in WORDS.items()},
        "long": {"bench_soak_minutes": "60"},
    }
    return place, run_bench(place, more)


@pytest.mark.slow
def test_the_record_is_fetched_and_printed(ran: Any) -> None:
    place, done = ran
    assert "here" not in find_failures(done) and "changed=0" in done.stdout, done.stdout + done.stderr
    fetched = place / "reports" / "bench" / "here" / RECORD
    assert fetched.read_text() == (place / "here" / RECORD).read_text()
    assert "here: a table Nothing differs." in get_words(done) and f"The record is {fetched}" in done.stdout
    words = (place / "here" / "called").read_text().split()
    assert words[0] == "bench" and {"--attended", "--through=both", "--gate=warn", "--limit-minutes=60"} < set(words)
    assert "--output-tokens=128,256,512" in words and not any("--engine" in word or "--allow" in word for word in words)
    row = json.loads((place / "here" / "asked").read_text())[0]
    wanted = {"engine": "31b-nvfp4-tp2", "output_tokens": 128, "tok_s": 14.9}
    assert {key: row[key] for key in wanted} == wanted


@pytest.mark.slow
def test_a_bad_end_fails_the_play_after_the_record_is_fetched(ran: Any) -> None:
    place, done = ran
    failures = find_failures(done)
    assert "bench_gate is fail, and the benchmark found: 9.1 tok/s." in failures["slow"]
    assert "Odd." not in failures["slow"] and (place / "reports" / "bench" / "slow" / RECORD).exists()
    assert "early: The benchmark ended early: a switch began." in failures["early"]
    assert "busy: Engine e2b works on 2 requests of clients." in failures["busy"]
    assert "run site.yml first" in failures["bare"]


@pytest.mark.slow
def test_wrong_variables_are_refused_together(ran: Any) -> None:
    place, done = ran
    failures = {host: text.replace("''", "'") for host, text in find_failures(done).items()}
    for name, (_, words) in WRONG.items():
        assert f"{name}: " in failures["wrong"] and words in failures["wrong"], f"{name}: {failures['wrong']}"
    assert "3 mistakes in the variables, see 'mistakes'; no host was touched." in failures["wrong"]
    assert "(60 for each of 1), such as 120" in failures["long"], "a soak fits into the limit"
    assert "5 mistakes in the variables" in failures["words"]
    assert [words for _, words in WORDS.values() if words not in failures["words"]] == []
    assert not [name for name in ("wrong", "words", "long") if (place / name / "called").exists()]


@pytest.mark.slow
def test_check_mode_says_what_would_run_with_variables_that_are_text(tmp_path: Path) -> None:
    given = {"engines": "e2b, e4b", "cases": "protocol,sweep", "allow_load": "false", "gate": "fail"}
    given |= {"soak_minutes": "0.5", "output_tokens": "16,32", "input_tokens": "64", "requests": "2"}
    variables = json.dumps({f"bench_{name}": value for name, value in given.items()})
    done = run_bench(tmp_path, {}, "--check", "--diff", "--limit", "here", "-e", variables)
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    said = get_words(done)
    assert "would run on here: vllm-edge bench" in said and "--allow-load" not in said
    assert "--engine=e2b --engine=e4b --case=protocol --case=sweep" in said and "--gate=fail" in said
    assert "--soak-minutes=0.5" in said and "--output-tokens=16,32" in said and "--input-tokens=64" in said
    assert not (tmp_path / "here" / "called").exists() and not (tmp_path / "reports").exists()
