# SPDX-License-Identifier: Apache-2.0
"""playbooks/calibrate.yml on this machine: the stages that it imports and the host's program are stand-ins.

The stand-in of the engines' stage plans like the real one and writes down what it would render.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, get_words, run_playbook

ENGINE, PROFILE, IMAGE = "31b-w4a16-tp4", "w4a16-tp4", "sha256:aaaa"
UUIDS = [f"GPU-{slot}" for slot in range(4)]
LOG = {"model_gib": 5.7, "kv_cache_gib": 13.0, "consumed_gib": 5.8, "activation_gib": 0.3, "outside_gib": 0.6}
LOG |= {"graphs_gib": 0.2, "graphs_estimate_gib": 0.2, "graphs_outside": 1}
FACTS = {
    "vllm_image_result": {"id": IMAGE, "name": "image", "vllm": "0.32.0"},
    "model_weights_result": {"31b-w4a16": {"path": "/data/w"}},
    "gpu_slots_result": {
        "uuids": UUIDS,
        "slots": [{"name": "NVIDIA L4", "total_mib": 23034, "reserved_mib": 470}] * 4,
    },
}
PROGRAM = """#!/bin/sh
echo "$*" >> {place}/called
case $1 in status) cat {place}/status ;; *) echo "switched back" ;; esac
"""


def play_of(*tasks: dict[str, Any]) -> str:
    return json.dumps([{"hosts": "gpu_hosts", "gather_facts": False, "tasks": list(tasks)}])


@pytest.fixture
def calibrate(tmp_path: Path) -> Callable[..., Any]:
    stages = tmp_path / "playbooks"
    stages.mkdir()
    (stages / "tasks").symlink_to(ROOT / "playbooks" / "tasks")
    (stages / "group_vars").symlink_to(ROOT / "group_vars")
    # A link would be followed, and its imports found beside the real one.
    (stages / "calibrate.yml").write_text((ROOT / "playbooks" / "calibrate.yml").read_text())
    for name in ("validate", "choice", "weights"):
        (stages / f"{name}.yml").write_text(play_of())
    (stages / "image.yml").write_text(play_of({"ansible.builtin.set_fact": FACTS}))
    (stages / "engines.yml").write_text(
        play_of(
            {"ansible.builtin.include_tasks": "tasks/plan_host.yml"},
            {
                "ansible.builtin.copy": {
                    "content": "{{ {'engines': vllm_engine_engines, 'budgets': vllm_engine_budgets} | to_json }}",
                    "dest": str(tmp_path / "rendered"),
                    "mode": "0644",
                }
            },
            {"ansible.builtin.fail": {"msg": "The switch was rolled back."}, "when": "broken | default(false) | bool"},
        )
    )
    host = {"ansible_connection": "local", "ansible_become": False, "serving_profile": PROFILE}
    host |= {"vllm_edge_host_state_directory": str(tmp_path), "model_weights_root": "/nowhere"}
    (tmp_path / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": {"here": host}}}))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "vllm-edge").write_text(PROGRAM.format(place=tmp_path))
    (tmp_path / "bin" / "vllm-edge").chmod(0o755)
    engine = {"engine": ENGINE, "container": "c", "container_image_id": IMAGE, "gpus": UUIDS, "log_facts": LOG}
    boards = [{"uuid": uuid, "engine_mib": 20_700, "foreign_mib": 0, "processes": []} for uuid in UUIDS]
    (tmp_path / "status").write_text(json.dumps({"engines": [engine], "gpus": boards}))

    def run(*options: str) -> Any:
        (tmp_path / "called").write_text("")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        return run_playbook("-i", "hosts.yml", "playbooks/calibrate.yml", *options, cwd=tmp_path, PATH=path)

    return run


def serve(place: Path, **more: Any) -> None:
    (place / "active-profile.json").write_text(json.dumps({"profile": PROFILE, "generation": 7, **more}))


def test_a_host_that_serves_is_measured_and_goes_back(calibrate: Callable[..., Any], tmp_path: Path) -> None:
    serve(tmp_path, origin="-e", inventory_profile="nvfp4-tp2")
    done = calibrate()
    assert done.returncode == 0, done.stdout + done.stderr
    rendered = json.loads((tmp_path / "rendered").read_text())
    (engine,) = rendered["engines"]
    assert engine["gpu_memory_utilization"] == 0.9 and "kv_cache_memory_bytes" not in engine
    assert rendered["budgets"] == dict.fromkeys(UUIDS, 23034 - 470), "nothing may be rolled back for its size"
    assert engine["plan"]["on_drift"] == "ignore"
    status, back = (tmp_path / "called").read_text().splitlines()
    assert status.startswith("status --format json")
    assert back.startswith("switch 7 ") and "--origin=-e --inventory-profile=nvfp4-tp2" in back
    (found,) = json.loads((tmp_path / "observations.json").read_text())["observations"]
    assert found["components"]["context_bytes"] / 2**20 == pytest.approx(20_700 - (5.8 + 0.3 + 0.2 + 13.0) * 1024)
    said = get_words(done)
    assert f"{ENGINE} NVML" in said and "20,700" in said
    assert "plan_observations:" in said and "observed: context_bytes, graphs_bytes, overhead_bytes, weights" in said


def test_a_second_run_measures_nothing(calibrate: Callable[..., Any], tmp_path: Path) -> None:
    serve(tmp_path)
    assert calibrate().returncode == 0
    (tmp_path / "rendered").unlink()
    done = calibrate()
    assert done.returncode == 0 and "changed=0" in done.stdout, done.stdout + done.stderr
    assert not (tmp_path / "rendered").exists() and (tmp_path / "called").read_text() == ""
    assert f"Every engine of {PROFILE} was measured before" in get_words(done)
    again = calibrate("-e", "calibrate_again=true", "-e", "calibrate_gpu_memory_utilization=0.95")
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((tmp_path / "rendered").read_text())["engines"][0]["gpu_memory_utilization"] == 0.95


@pytest.mark.parametrize("over_budget", [False, True])
def test_on_a_host_that_never_served_within_its_budgets_the_engines_stay(
    calibrate: Callable[..., Any], tmp_path: Path, over_budget: bool
) -> None:
    """The switch back would be rolled back for the same budget."""
    if over_budget:
        serve(tmp_path, over_budget=True)
    done = calibrate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in (tmp_path / "called").read_text().splitlines()] == ["status"]
    assert "The engines keep running as they were measured; site.yml starts them as planned." in get_words(done)


def test_a_log_that_says_too_little_still_goes_back(calibrate: Callable[..., Any], tmp_path: Path) -> None:
    serve(tmp_path)
    (tmp_path / "status").write_text((tmp_path / "status").read_text().replace("consumed_gib", "nothing"))
    done = calibrate()
    assert done.returncode != 0 and "no line with 'Actual usage is'" in get_words(done)
    assert (tmp_path / "called").read_text().splitlines()[-1].startswith("switch 7 ")
    assert not (tmp_path / "observations.json").exists()


def test_a_switch_that_was_rolled_back_records_nothing(calibrate: Callable[..., Any], tmp_path: Path) -> None:
    serve(tmp_path)
    done = calibrate("-e", "broken=true")
    assert done.returncode != 0 and "The switch was rolled back." in done.stdout
    assert (tmp_path / "called").read_text() == "" and not (tmp_path / "observations.json").exists()


def test_check_mode_and_a_wrong_share_change_nothing(calibrate: Callable[..., Any], tmp_path: Path) -> None:
    serve(tmp_path)
    done = calibrate("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "called").read_text() == "" and not (tmp_path / "observations.json").exists()
    refused = calibrate("-e", "calibrate_gpu_memory_utilization=90")
    assert refused.returncode != 0 and "calibrate_gpu_memory_utilization is '90'" in get_words(refused)
