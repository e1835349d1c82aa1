# SPDX-License-Identifier: Apache-2.0
"""playbooks/tasks/page.yml for two hosts on this machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, get_words, run_playbook, start_warm_python, write_program
from page_example import BENCH, HISTORY, REPORT, STATUS, write_records

BROKEN = {**REPORT, "host": "a", "problems": ["bad"]}
TASKS: list[dict[str, Any]] = [
    {
        "ansible.builtin.fail": {"msg": "an earlier stage"},
        "when": "inventory_hostname in [fails | default(''), 'never']",
    },
    {"ansible.builtin.include_tasks": str(ROOT / "playbooks" / "tasks" / "page.yml")},
    {"edge.vllm_edge.show": {"text": "{{ serving_note }}", "color": "red"}},
]
PLAY = [{"hosts": "gpu_hosts", "gather_facts": False, "tasks": TASKS}]


@pytest.fixture
def pages(tmp_path: Path) -> Any:
    """Run the tasks for the hosts `a` and `b`; `a` has records, and a report that a complete run saved."""
    common = {"ansible_connection": "local", "serving_profile": "e2b-only", "serving_note": "", "bench_reference": []}
    common |= {"ansible_python_interpreter": start_warm_python(), "controller_user": ""}
    common |= {"serving_reports_directory": str(tmp_path / "reports"), "serving_status": {"stdout": json.dumps(STATUS)}}
    hosts = {}
    for name in ("a", "b"):
        state = tmp_path / name / "state"
        state.mkdir(parents=True)
        report = {**REPORT, "host": name, "note": "On loan <b>", "versions": {}, "completions": []}
        hosts[name] = {**common, "vllm_edge_host_state_directory": str(state), "serving_report": report}
    write_records(tmp_path / "a" / "state")
    (tmp_path / "a" / "state" / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "history.json").write_text(json.dumps(HISTORY))
    hosts["never"] = common
    (tmp_path / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": hosts}}))
    (tmp_path / "play.yml").write_text(json.dumps(PLAY))
    write_program(tmp_path / "bin" / "vllm-edge", f"cat {tmp_path}/history.json")

    def run(*options: str) -> Any:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return run_playbook("-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), *options, PATH=path)

    return run


@pytest.mark.slow
def test_pages_records_and_index(pages: Any, tmp_path: Path) -> None:
    """Nothing counts as a change, nobody else may read the files, and a second run fetches what became complete."""
    done = pages("-e", "serving_note=Borrowed")
    assert "failed=1" in done.stdout, done.stdout + done.stderr
    assert "changed=0" in done.stdout and "a: Borrowed" in get_words(done)
    reports = tmp_path / "reports"
    assert f"The page is {reports}/a.html." in get_words(done)
    fetched = reports / "bench" / "a" / "20261125T023000Z-nvfp4-tp2.jsonl"
    for path in [reports, *reports.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    page = (reports / "a.html").read_text()
    assert "On loan &lt;b&gt;" in page and "580.178.04" in page and "order-as-json" in page
    other = (reports / "b.html").read_text()
    assert "No benchmark is recorded" in other and "The versions are recorded by" in other
    index = reports / "index.html"
    assert re.findall(r'href="(\w+\.html)"', index.read_text()) == ["a.html", "b.html"]
    assert "never" in index.read_text() and "not reached" in index.read_text()
    fetched.write_text("")
    former = fetched.with_name("20261126T010000Z-of-another.jsonl")
    former.write_text(json.dumps({"kind": "run", "driver": "of the former machine"}))
    assert pages("--limit", "a", "-e", json.dumps({"serving_report": BROKEN})).returncode == 0
    assert re.findall(r'href="(\w+\.html)"', index.read_text()) == ["a.html", "b.html"]
    assert index.read_text().count("1 problem") == 1, "the index has the verdict of the newest page"
    assert pages("-e", "fails=b").returncode != 0 and "not reached at" in index.read_text()
    assert pages("--limit", "a").returncode == 0 and "not reached at" in index.read_text()
    assert len(fetched.read_text().splitlines()) == len(BENCH[fetched.name])
    assert "of the former machine" not in (reports / "a.html").read_text() and former.exists()
