# SPDX-License-Identifier: Apache-2.0
"""playbooks/calibrate.yml for hosts that are this machine: stages that it imports and their programs are stand-ins.

The stand-in of the engines' stage plans like the real one and writes down what it would render.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, find_failures, get_words, make_host, run_playbook

pytestmark = pytest.mark.slow

ENGINE, PROFILE, IMAGE = "31b-w4a16-tp4", "w4a16-tp4", "sha256:aaaa"
UUIDS = [f"GPU-{slot}" for slot in range(4)]
LOG = {"model_gib": 5.7, "kv_cache_gib": 13.0, "consumed_gib": 5.8, "activation_gib": 0.3, "outside_gib": 0.6}
LOG |= {"graphs_gib": 0.2, "graphs_estimate_gib": 0.2, "graphs_outside": 1}
FACTS = {
    "vllm_image_result": {"id": IMAGE, "name": "image", "vllm": "0.32.0"},
    "model_weights_result": {"31b-w4a16": {"path": "/data/w"}},
    "gpu_slots_result": {"uuids": UUIDS, "slots": [{"name": "NVIDIA L4", "total_mib": 23034, "reserved_mib": 470}] * 4},
}
PROGRAM = """#!/bin/sh
echo "$*" >> {place}/called
"""


HOSTS = ("serves", "never_served", "terse", "rolled_back")
"""The log of one says too little, and on another one the switch fails."""


def play_of(*tasks: dict[str, Any]) -> str:
    return json.dumps([{"hosts": "gpu_hosts", "gather_facts": False, "tasks": list(tasks)}])


def write_hosts(place: Path) -> None:
    """The inventory of HOSTS, and a directory for each of them with its program, its record and what it measures."""
    hosts = {}
    for name in HOSTS:
        own = place / name
        hosts[name] = make_host(own, **{"vllm-edge": PROGRAM.format(place=own)})
        hosts[name] |= {"serving_profile": PROFILE, "model_weights_root": "/nowhere"}
        hosts[name] |= {"vllm_edge_host_state_directory": str(own), "broken": name == "rolled_back"}
        log = LOG if name != "terse" else {key: value for key, value in LOG.items() if key != "consumed_gib"}
        engine = {"engine": ENGINE, "container": "c", "container_image_id": IMAGE, "gpus": UUIDS, "log_facts": log}
        boards = [{"uuid": uuid, "engine_mib": 20_700, "foreign_mib": 0, "processes": []} for uuid in UUIDS]
        hosts[name]["measured"] = {"engines": [engine], "gpus": boards}
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": hosts}}))


def calibrate(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the playbook; what the program was called with is in `called` of each host."""
    for name in HOSTS:
        (place / name / "called").write_text("")
        (place / name / "rendered").unlink(missing_ok=True)
    return run_playbook("-i", "hosts.yml", "playbooks/calibrate.yml", *options, cwd=place)


def read_calls(place: Path) -> list[str]:
    return (place / "called").read_text().splitlines()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Check mode, then the calibration of all HOSTS."""
    place = tmp_path_factory.mktemp("calibrate")
    stages = place / "playbooks"
    stages.mkdir()
    (stages / "tasks").symlink_to(ROOT / "playbooks" / "tasks")
    (stages / "group_vars").symlink_to(ROOT / "group_vars")
    # A link would be followed, and its imports found beside the real one.
    (stages / "calibrate.yml").write_text((ROOT / "playbooks" / "calibrate.yml").read_text())
    for name in ("validate", "choice", "weights"):
        (stages / f"{name}.yml").write_text(play_of())
    (stages / "image.yml").write_text(play_of({"ansible.builtin.set_fact": FACTS}))
    rendered = "{'engines': vllm_engine_engines, 'budgets': vllm_engine_budgets, 'purpose': vllm_engine_purpose}"
    content = f"{{{{ {rendered} | to_json }}}}"
    to = "{{ vllm_edge_host_state_directory }}/rendered"
    engines = play_of(
        {"ansible.builtin.include_tasks": "tasks/plan_host.yml"},
        {"ansible.builtin.copy": {"content": content, "dest": to, "mode": "0644"}},
        {"ansible.builtin.fail": {"msg": "The switch was rolled back."}, "when": "broken"},
        {"ansible.builtin.set_fact": {"vllm_engine_result": {"journal": {"measured": "{{ measured }}"}}}},
    )
    (stages / "engines.yml").write_text(engines)
    write_hosts(place)
    checked = calibrate(place, "--check", "--limit", "serves")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert read_calls(place / "serves") == [] and not (place / "serves" / "observations.json").exists()
    return place, calibrate(place)


def test_a_host_that_serves_is_measured_as_a_calibration(calibrated: Any) -> None:
    place, done = calibrated
    assert find_failures(done).keys() == {"terse", "rolled_back"}, done.stdout + done.stderr
    rendered = json.loads((place / "serves" / "rendered").read_text())
    (engine,) = rendered["engines"]
    assert engine["gpu_memory_utilization"] == 0.9 and "kv_cache_memory_bytes" not in engine
    assert rendered["budgets"] == dict.fromkeys(UUIDS, 23034 - 470), "nothing may be rolled back for its size"
    assert engine["plan"]["on_drift"] == "ignore"
    assert rendered["purpose"] == "calibration", "the host's program goes back by itself"
    assert read_calls(place / "serves") == []
    (found,) = json.loads((place / "serves" / "observations.json").read_text())["observations"]
    assert found["components"]["context_bytes"] / 2**20 == pytest.approx(20_700 - (5.8 + 0.3 + 0.2 + 13.0) * 1024)
    said = get_words(done)
    assert f"{ENGINE} NVML" in said and "20,700" in said
    assert "plan_observations:" in said and "observed: context_bytes, graphs_bytes, overhead_bytes, weights" in said


def test_what_was_not_measured_is_not_recorded(calibrated: Any) -> None:
    place, done = calibrated
    failures = find_failures(done)
    assert "no line with 'Actual usage is'" in failures["terse"].replace("''", "'")
    assert "The switch was rolled back." in failures["rolled_back"]
    assert not [name for name in ("terse", "rolled_back") if (place / name / "observations.json").exists()]


def test_a_second_run_measures_nothing_unless_it_is_asked_to(calibrated: Any) -> None:
    place, _ = calibrated
    again = '{"calibrate_again": "{{ inventory_hostname == \'never_served\' }}"}'
    options = ("--limit", "serves,never_served", "-e", again, "-e", "calibrate_gpu_memory_utilization=0.95")
    done = calibrate(place, *options)
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    assert not (place / "serves" / "rendered").exists() and read_calls(place / "serves") == []
    assert get_words(done).count(f"Every engine of {PROFILE} was measured before") == 1
    rendered = json.loads((place / "never_served" / "rendered").read_text())
    assert rendered["engines"][0]["gpu_memory_utilization"] == 0.95
