# SPDX-License-Identifier: Apache-2.0
"""Validation as an operator runs it: against a host that cannot be reached, and that nobody tries to reach."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import helpers
import pytest
import yaml
from helpers import ROOT

NOBODY = "192.0.2.1"
"""Of the addresses that RFC 5737 keeps for documentation: no host has it."""


@pytest.fixture
def play(tmp_path: Path, run_playbook: Any) -> Any:
    """Run a playbook for one host whose group_vars are given; ssh only writes down that it was called."""
    inventory = tmp_path / "inventory"
    (inventory / "group_vars").mkdir(parents=True)
    (inventory / "hosts.yml").write_text(f"gpu_hosts: {{hosts: {{nobody: {{ansible_host: {NOBODY}}}}}}}\n")
    called = tmp_path / "called"
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{called}\nexit 255\n')
    ssh.chmod(0o755)

    def run(
        name: str, variables: dict[str, Any], *options: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        (inventory / "group_vars" / "gpu_hosts.yml").write_text(json.dumps(variables))
        done: subprocess.CompletedProcess[str]
        done = run_playbook("-i", inventory, name, *options, PATH=f"{ssh.parent}:{os.environ['PATH']}", **environment)
        assert not called.exists(), f"ssh was called: {called.read_text()}"
        assert "UNREACHABLE" not in done.stdout
        return done

    return run


GOOD = {"serving_profile": "nvfp4-tp2", "gpu_count": 4, "gpu_memory_mib": 23034}


def test_good_variables_pass_without_a_connection(play: Any) -> None:
    later = {"vllm_image_keep": "{{ ansible_facts['nobody_knows_yet'] }}"}
    done = play("playbooks/validate.yml", GOOD | later, "-e", "allow_reboot=true", "-e", "vllm_engine_watchdog_s=60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed=0" in done.stdout


def test_a_fifth_role_is_data_as_the_page_shows(play: Any) -> None:
    page = (ROOT / "docs" / "profiles.md").read_text()
    example = yaml.safe_load(
        page.split("```yaml\n# inventories/<yours>/group_vars/gpu_hosts/serving.yml\n")[1].split("```")[0]
    )
    assert example["serving_roles"][4:] == ["reflector"]
    options = ("-e", "plan_profile=with-reflector", "-e", "plan_facts=recorded")
    done = play("playbooks/validate.yml", GOOD | example, "playbooks/plan.yml", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "e4b-reflector  fits" in done.stdout
    # Nobody serves it: refused, so that the name is not only ignored.
    example["serving_engines"]["e4b-reflector"]["served_names"] = ["other"]
    refused = play("playbooks/validate.yml", GOOD | example)
    assert refused.returncode == 2 and "'reflector'" in helpers.get_words(refused)


@pytest.mark.thorough
def test_replicas_are_data_as_the_page_shows(play: Any) -> None:
    section = (ROOT / "docs" / "profiles.md").read_text().split("## Serve a role by several engines")[1]
    example = yaml.safe_load(section.split("```yaml\n")[1].split("```")[0])
    options = ("-e", "plan_profile=e4b-four-times", "-e", "plan_facts=recorded")
    done = play("playbooks/validate.yml", GOOD | example, "playbooks/plan.yml", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"e4b-each-{k}  fits: 512 MiB stay free on GPU {k}." in done.stdout for k in range(4)] == [True] * 4


STAGES = ("host", "image", "weights", "engines", "gateway", "clients")


@pytest.mark.parametrize("stage", [STAGES[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in STAGES[1:])])
def test_a_stage_by_itself_validates_before_it_connects(play: Any, stage: str) -> None:
    engine = {"model": "e2b", "tensor_parallel_size": 1, "gpus": [0], "port": 8050, "served_names": ["architect"]}
    odd = {
        "serving_engines": {
            "x": {**engine, "extra_env": {"VLLM_NOTE": "one\n--pid=host"}, "extra_args": ["--middlew=a"]}
        },
        "serving_profiles": {"p": {"engines": ["x"]}},
        "serving_profile": "p",
        "serving_roles": ["architect"],
        "vllm_engine_ulimits": ["nofile=1\n--rm", "rtprio=99"],
        "vllm_engine_shm_size": "4 GiB",
        "vllm_engine_request_limits": {"VLLM_MAX_N_SEQUENCES": "-1"},
        "vllm_engine_cache_directory": "/data/../etc",
    }
    for check in ("--diff", "--check"):
        done = play(f"playbooks/{stage}.yml", odd, check)
        assert done.returncode == 2
        assert "7 mistakes in the variables" in done.stdout + done.stderr, done.stdout
        assert "is a risk: it imports Python code by name" in done.stdout
        if stage != STAGES[0]:
            return


def test_each_stage_validates_first_and_once() -> None:
    """In site.yml the fact of the first play keeps the stages from repeating it."""
    for stage in STAGES:
        (play,) = yaml.safe_load((ROOT / "playbooks" / f"{stage}.yml").read_text())
        first = play["pre_tasks"][0]
        assert first["ansible.builtin.include_tasks"]["file"] == "tasks/validate.yml"
        assert first["when"] == "serving_validated is not defined"
    (*_, last) = yaml.safe_load((ROOT / "playbooks/tasks/validate.yml").read_text())
    assert last["ansible.builtin.set_fact"] == {"serving_validated": True}


def test_everything_has_to_be_pinned_where_it_is_asked_for(play: Any) -> None:
    facts = {"distribution": "Debian", "distribution_version": "13.1", "distribution_major_version": "13"}
    known = {"ansible_facts": facts, "ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    wanted = GOOD | {"serving_profile": "e2b-only", "container_runtime_repository_key_fingerprint": ""}
    done = play("playbooks/validate.yml", wanted | known, "-e", "require_pins=true")
    said = done.stdout + done.stderr
    assert done.returncode == 2
    for name in ("vllm_image_base_digest", "vllm_models.e2b.revision", "container_runtime_repository_key_fingerprint"):
        assert f"{name}: " in said
    assert "31b-bf16" not in said, "models of other profiles are not used"
    assert (
        "require_pins: 'ture' is neither"
        in play("playbooks/validate.yml", wanted | known, "-e", "require_pins=ture").stdout
    )


def test_unfit_access_to_the_hub_is_said_without_a_secret(play: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_planted")
    (tmp_path / "token").chmod(0o644)
    bad = {
        "model_weights_endpoint": "http://mirror.example",
        "model_weights_token_file": str(tmp_path / "token"),
        "model_weights_environment": {"HTTPS_PROXY": "http://user:pla/nted@proxy"},
    }
    done = play("playbooks/validate.yml", GOOD | bad, "-vvv")
    words = " ".join(done.stdout.split())
    assert done.returncode == 2 and "3 mistakes in the variables" in words
    assert "model_weights_environment: 'HTTPS_PROXY' is no address of a proxy" in words
    assert f"`chmod 0600 {tmp_path}/token`" in words
    assert "model_weights_endpoint: 'http://mirror.example' is not encrypted, and a token is given" in words
    assert "hf_planted" not in done.stdout and "nted@proxy" not in done.stdout
    medium = {**bad, "model_weights_source_directory": "/media/vllm-edge/weights"}
    assert play("playbooks/validate.yml", GOOD | medium).returncode == 0, "the hub is not asked then"


def test_every_mistake_is_said_on_a_line_of_its_own(play: Any) -> None:
    bad = {"serving_profile": "e2b-olny", "gpu_count": "four", "vllm_engine_watchdog": 30, "vllm_image_keep": "many"}
    done = play("playbooks/validate.yml", bad, "-e", "verify_weights=ful", "-e", "alow_docker_restart=true")
    assert done.returncode == 2
    assert "6 mistakes in the variables, see 'mistakes'; no host was touched." in done.stdout + done.stderr
    listed = [
        line.strip() for line in done.stdout.splitlines() if line.strip()[:2] in ("1.", "2.", "3.", "4.", "5.", "6.")
    ]
    for number, words in enumerate(
        [
            "serving_profile: 'e2b-olny' is not a key of serving_profiles; did you mean e2b-only?",
            "gpu_count: 'four' is text, not a number; write a whole number of GPUs, such as 4.",
            "verify_weights: 'ful' is not one of size, full; did you mean full?",
            "vllm_image_keep: 'many' is text, not a number; write a whole number, such as 1.",
            "alow_docker_restart: nothing reads a variable of this name",
            "vllm_engine_watchdog: nothing reads a variable of this name",
        ]
    ):
        assert listed[number].startswith(f"{number + 1}. {words}"), done.stdout


def test_site_stops_there(play: Any) -> None:
    done = play("site.yml", {**GOOD, "gpu_count": 2}, "-e", "allow_reboot=maybe")
    assert done.returncode == 2
    assert "allow_reboot: 'maybe' is neither true nor false; write true or false." in done.stdout
    assert "slot 2 does not exist, gpu_count is 2" in done.stdout
    assert done.stdout.count("PLAY [") == 1


MEASURED = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
module = AnsibleModule({"budgets": {"type": "dict"}, "gpu_slots": {"type": "list"}, "foreign": {}})
module.exit_json(gpus=[], **%r)
"""
NVML = {"failed": True, "msg": "VRAM cannot be measured"}
OVER = {"failed": True, "msg": "500 MiB too many", "failures": ["500 MiB too many"]}
WITHIN = {"msg": "within", "failures": []}


@pytest.mark.parametrize(
    ("result", "measured", "words", "report"),
    [
        ("over_budget", NVML, "500 MiB too many by the switch", True),
        ("unchanged", OVER, "500 MiB too many", True),
        ("unchanged", NVML, "VRAM cannot be measured", False),
        ("unchanged", WITHIN, "", False),
        ("committed", NVML, "", False),
    ],
)
def test_a_gpu_over_its_budget_fails_the_play_after_its_report(
    tmp_path: Path, result: str, measured: dict[str, Any], words: str, report: bool
) -> None:
    """The end of playbooks/engines.yml with the wiring, where the module answers what this test says."""
    (whole,) = yaml.safe_load((ROOT / "playbooks" / "engines.yml").read_text())
    first = next(at for at, task in enumerate(whole["tasks"]) if "vram_budget" in task)
    wiring = yaml.safe_load((ROOT / "group_vars" / "all" / "wiring.yml").read_text())
    switched = {"result": result, "msg": "500 MiB too many by the switch", "journal": {"gpus": []}}
    variables = {name: wiring[name] for name in ("serving_over_budget", "serving_unmoved", "vram_foreign")}
    variables |= {"serving_budgets": {}, "gpu_slots_result": {"uuids": []}, "vllm_engine_result": switched}
    play = {"hosts": "all", "gather_facts": False, "connection": "local", "vars": variables}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{**play, "tasks": whole["tasks"][first:]}]))
    for path, text in (
        ("tasks/report.yml", "- debug: {msg: hidden}\n"),
        ("library/vram_budget.py", MEASURED % measured),
    ):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    done = helpers.run_playbook("-i", "host,", "play.yml", cwd=tmp_path, ANSIBLE_LIBRARY=str(tmp_path / "library"))
    said = helpers.get_words(done)
    assert (done.returncode != 0, "included:" in said) == (bool(words), report), said
    assert words in said.rpartition("included:")[2]


@pytest.mark.parametrize(
    ("support", "said"),
    [
        ("", "support is '', which is no absolute path"),
        ("true", "support is 'true', which is no absolute path"),
        ("reports/today", "-e support={cwd}/reports"),
        ("/proc/reports", "this machine cannot write /proc/reports/nobody.tar.gz"),
        ("{file}/reports", "Name a directory that you may write to, for example -e support="),
    ],
)
def test_a_directory_for_support_reports_that_cannot_be_used_is_refused(
    play: Any, tmp_path: Path, support: str, said: str
) -> None:
    (tmp_path / "file").touch()
    done = play(
        "playbooks/doctor.yml", GOOD, "-e", f"support={support.format(file=tmp_path / 'file')}", PWD="/srv/here"
    )
    assert done.returncode == 2
    assert said.format(cwd="/srv/here") in " ".join((done.stdout + done.stderr).split()), done.stdout
