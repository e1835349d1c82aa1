# SPDX-License-Identifier: Apache-2.0
"""Stages of engines and report for hosts that are this machine: who switches when, and what becomes of the others.

The stages before, the gateway and the switch itself are stand-ins.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.switch.model import Result
from helpers import ROOT, find_failures, make_host, run_playbook
from journals import ended
from test_several_hosts import DOWN

pytestmark = pytest.mark.slow

PROFILE, NEW, FORMER = "w4a16-tp4", "31b-w4a16-tp4", "former-engine"
UUIDS = [f"GPU-{slot}" for slot in range(4)]
SLOT = {"name": "NVIDIA L4", "total_mib": 23034, "reserved_mib": 470}
FACTS = {
    **{name: {} for name in ("serving_validated", "serving_choice", "gpu_access")},
    **{
        "nvidia_driver_result": {"version": "580.1"},
        "container_runtime_result": dict.fromkeys(("docker_version", "toolkit_version"), "1"),
    },
    "vllm_image_result": {
        **{"id": "sha256:aaaa", "name": "image", "vllm": "0.32.0", "transformers": "5.0.0"},
        **{"requirement": ">=5", "constraint": "==5.0.0"},
    },
    "model_weights_result": {"31b-w4a16": {"path": "/data/w"}},
    "gpu_slots_result": {"uuids": UUIDS, "slots": [SLOT] * 4, "source": "declared"},
}
ENGINE = {
    **{"engine": FORMER, "unit": f"vllm-{FORMER}.service", "model": "e2b", "precision": "bf16", "port": None},
    **{"tensor_parallel_size": 1, "gpus": UUIDS[1:2], "served_names": ["sentry"], "active_state": "active"},
    **{"load_seconds": 1.0, "active_since": "then", "image_id": "sha256:bbbb"},
}
BOARDS = [
    {"uuid": uuid, "index": index, "name": "NVIDIA L4", "used_mib": 1, "total_mib": 23034}
    for index, uuid in enumerate(UUIDS)
]
STATUS = {
    **{"active_profile": {"profile": "former", "generation": 7}, "engines": [ENGINE], "gpus": BOARDS},
    **{"problems": [], "drift": [], "history": [], "host": "x"},
}
PROGRAM = """#!/bin/sh
[ "$1" = history ] && echo '[]' && exit
cat {place}/status.json
"""


def play_of(*tasks: dict[str, Any]) -> str:
    return json.dumps([{"hosts": "gpu_hosts", "gather_facts": False, "tasks": list(tasks)}])


def say(words: str) -> dict[str, Any]:
    return {"ansible.builtin.debug": {"msg": f"{{{{ inventory_hostname }}}} {words}"}}


def deploy(
    place: Path,
    playbook: str,
    hosts: dict[str, dict[str, Any]],
    *options: str,
    fail: str,
    serial: int = 1,
) -> subprocess.CompletedProcess[str]:
    """Run a playbook for these hosts, of which one does not commit, with this serving_switch_serial."""
    stages = place / "playbooks"
    for role, names in (("vllm_engine", ("main",)), ("container_runtime", ("probe", "probe_running"))):
        (stages / "roles" / role / "tasks").mkdir(parents=True)
        for name in names:
            (stages / "roles" / role / "tasks" / f"{name}.yml").write_text("[]")
    failed = f"inventory_hostname == '{fail}'"
    committed, rolled_back = (
        {"vllm_engine_result": {"result": end, "journal": asdict(ended(end, gpus=BOARDS))}}
        for end in (Result.COMMITTED, Result.ROLLED_BACK)
    )
    news = json.dumps(STATUS | {"engines": [ENGINE | {"engine": NEW, "gpus": UUIDS}]})
    serves = {"dest": "{{ vllm_edge_host_state_directory }}/status.json", "content": news}
    switch = [
        say("switches"),
        {"ansible.builtin.set_fact": rolled_back, "when": failed},
        {"ansible.builtin.fail": {"msg": "Rolled back."}, "when": failed},
        {"ansible.builtin.set_fact": committed},
        {"ansible.builtin.copy": serves},
    ]
    (stages / "roles/vllm_engine/tasks/main.yml").write_text(json.dumps(switch))
    for name in ("tasks", "group_vars"):
        (stages / name).symlink_to(ROOT / "playbooks" / name)
    for name in ("site", "engines", "report"):  # a link would be followed
        (stages / f"{name}.yml").write_text((ROOT / "playbooks" / f"{name}.yml").read_text())
    for name in ("controller", "validate", "choice", "host", "image", "weights", "metrics"):
        (stages / f"{name}.yml").write_text(play_of())
    (stages / "gateway.yml").write_text(play_of(say("has a gateway")))
    listed = {}
    for name, own in hosts.items():
        listed[name] = {**make_host(place / name, **{"vllm-edge": PROGRAM.format(place=place / name)})}
        listed[name] |= {"vllm_edge_host_state_directory": str(place / name), "model_weights_root": "/nowhere", **own}
        (place / name / "active-profile.json").touch()
        (place / name / "status.json").write_text(json.dumps(STATUS))
    variables = {"serving_profile": PROFILE, **FACTS, "serving_switch_serial": serial}
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": listed}}))
    (place / "group_vars").mkdir()
    (place / "group_vars/gpu_hosts.yml").write_text(json.dumps(variables))
    return run_playbook(
        "-i", "hosts.yml", f"playbooks/{playbook}.yml", *options, cwd=place, ANSIBLE_DISPLAY_OK_HOSTS="true"
    )


def list_hosts(done: subprocess.CompletedProcess[str], words: str) -> list[str]:
    """The hosts that said this, in this order."""
    return re.findall(rf"msg: (\S+) {words}$", done.stdout, re.MULTILINE)


def test_a_host_that_does_not_commit_leaves_the_rest_as_they_are_and_all_are_reported(tmp_path: Path) -> None:
    hosts = {name: {"serving_fleet": "f"} for name in "abc"}
    done = deploy(tmp_path, "site", hosts, fail="b")
    assert list_hosts(done, "switches") == ["a", "b"], done.stdout
    assert sorted(list_hosts(done, "has a gateway")) == sorted(hosts)
    told = find_failures(done)
    assert told.keys() == {"b", "c"} and done.returncode == 2, done.stdout
    assert "c was not switched and serves what it served before, since the switch of b, a host" in told["c"]
    *_, last = done.stdout.split("PLAY [Fail ")
    at_the_end = find_failures(subprocess.CompletedProcess([], 2, last))
    for name in told:
        report = json.loads((tmp_path / "reports" / f"{name}.json").read_text())
        (problem,) = report["problems"]
        assert problem in at_the_end[name] and f"{name}: profile former, generation 7" in done.stdout
        assert [(row["engine"], row["slots"]) for row in report["engines"]] == [(FORMER, [1])]


LOST = DOWN | {"ansible_connection": "{{ 'local' if serving_switch_stop is undefined else 'ssh' }}"}
"""A host that is not reached any more when its turn has come."""


@pytest.mark.parametrize("partial", [False, True])
def test_turns_are_those_of_each_fleet(tmp_path: Path, partial: bool) -> None:
    """In one fleet a host is down; of the other one two hosts switch at a time, as a group variable says."""
    hosts: dict[str, dict[str, Any]] = {name: {"serving_fleet": "f" if name in "ab" else "g"} for name in "abcde"}
    hosts |= {"a": hosts["a"] | DOWN, "c": hosts["c"] | (LOST if partial else {}), "alone": {}}
    options = ("-e", f"serving_fleet_partial={partial}")
    done = deploy(tmp_path, "engines", hosts, *options, fail="" if partial else "c", serial=2)
    assert {*list_hosts(done, "switches")} == {"alone", "c", "d"} | ({"b"} if partial else set()), done.stdout
    told = find_failures(done)
    assert told.keys() == {"a", "c", "e"} | ({"b"} if not partial else set()) and done.returncode != 0, done.stdout
    assert partial or "since a, a host of the same fleet f, failed before its switch or is not reached" in told["b"]
    fate = (
        "c, a host of the same fleet g, was lost in its switch"
        if partial
        else "the switch of c, a host of the same fleet g, failed"
    )
    assert f"e was not switched and serves what it served before, since {fate}" in told["e"]
