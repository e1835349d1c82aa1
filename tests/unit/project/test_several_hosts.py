# SPDX-License-Identifier: Apache-2.0
"""Hosts are independent: one that fails ends its own run, and every run that must not begin on some of them only."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, replace_modules, run_playbook, start_warm_python, write_program

DOWN = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
"""A host on whose port nobody listens."""
LATER = "Later"
"""Name of a task of a play that comes after the one that a test looks at."""
STOP_EVERYWHERE = {"controller.yml", "validate.yml", "choice.yml", "monitoring.yml"}
"""Plays that look before any host is changed, or change none."""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run(hosts, playbooks, options): stages of a site.yml whose last play has the task LATER, on this machine."""
    for name in ("playbooks", "group_vars"):
        (tmp_path / name).symlink_to(ROOT / name)
    later = {"name": LATER, "ansible.builtin.debug": {"msg": "{{ inventory_hostname }} goes on"}}

    def go(hosts: dict[str, dict[str, Any]], *words: str) -> subprocess.CompletedProcess[str]:
        common = {"ansible_connection": "local", "ansible_python_interpreter": start_warm_python()}
        common["serving_profile"] = "nvfp4-tp2"
        listed = {host: {**common, **variables} for host, variables in hosts.items()}
        (tmp_path / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": listed}}))
        names = [word for word in words if word.endswith(".yml")]
        stages = [{"name": "The stage", "ansible.builtin.import_playbook": name} for name in names]
        after = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [later]}
        (tmp_path / "site.yml").write_text(json.dumps([*stages, after]))
        given = ["-i", "hosts.yml", "-e", "ansible_become=false", "site.yml", *words[len(names) :]]
        return run_playbook(*given, cwd=tmp_path, ANSIBLE_DISPLAY_OK_HOSTS="true")

    return go


def goes_on(done: subprocess.CompletedProcess[str], host: str) -> bool:
    return f"{host} goes on" in done.stdout


@pytest.mark.slow
def test_a_host_that_is_down_hides_no_other(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that awaits a reboot ends without a failure. The reports are those of who called sudo."""
    monkeypatch.setenv("SUDO_UID", "4321")
    monkeypatch.setenv("SUDO_GID", "4321")
    absent = {"vllm_edge_host_state_directory": str(tmp_path)}
    later = DOWN | absent | {"ansible_connection": "{{ 'ssh' if 'report' in ansible_play_name else 'local' }}"}
    hosts = {"down": DOWN, "later": later, "up": absent}
    hosts["waits"] = absent | {"nvidia_driver_result": {"awaits_reboot": "Reboot this machine."}}
    done = run(hosts, "playbooks/status.yml", "playbooks/report.yml")
    assert goes_on(done, "up") and not goes_on(done, "down") and not goes_on(done, "later")
    assert "up: vllm-edge is not installed on this host." in done.stdout, done.stdout
    assert "up: would report" in done.stdout
    assert "waits: Reboot this machine." in done.stdout and "waits: would report" not in done.stdout
    tables = re.findall(r"^host .*\n-.*\n(?s:.+?)^4 hosts", done.stdout, re.MULTILINE)
    of_status, of_report = [[" ".join(line.split()) for line in table.splitlines()[2:]] for table in tables]
    assert {"down not reached, or failed before", "up vllm-edge is not installed"} < {*of_status}
    assert of_report[:2] == [f"{host} - - - not reached, or failed before" for host in ("down", "later")]
    assert of_report[2:4] == ["up - - nothing serves", "waits - - awaits a reboot"]
    page = tmp_path / "reports" / "index.html"
    assert page.stat().st_uid == (os.geteuid() or 4321)
    index = page.read_text()
    assert "nothing serves" in index and "awaits a reboot" in index and index.count("not reached") == 2, index
    assert done.returncode != 0 and done.stdout.count("unreachable=1") == 2, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_a_host_that_is_down_ends_the_run_unless_the_others_may_go_on(run: Run, tmp_path: Path, partial: bool) -> None:
    hosts = {"down": DOWN, "up": {"vllm_edge_host_state_directory": str(tmp_path)}}
    done = run(hosts, "playbooks/validate.yml", "playbooks/choice.yml", "-e", f"serving_fleet_partial={partial}")
    assert goes_on(done, "up") == partial and not goes_on(done, "down"), done.stdout
    assert re.search(r"^down .*unreachable=1", done.stdout, re.MULTILINE), done.stdout
    assert done.returncode == 4 or not partial, done.stdout


@pytest.mark.slow
def test_a_stage_that_fails_on_one_host_goes_on_with_the_other(run: Run, tmp_path: Path) -> None:
    """The other one neither stops nor runs the `rescue` that tells of the failure."""
    hosts = {}
    image = json.dumps([{"Id": f"sha256:{'a' * 64}", "RepoDigests": [], "Config": {}}])
    for name, answer in (("bad", "echo the words of bad >&2; exit 1"), ("good", f"echo '{image}'")):
        docker = tmp_path / f"docker-{name}"
        write_program(docker, answer)
        (tmp_path / name / "log").mkdir(parents=True)
        hosts[name] = {"vllm_image_docker": str(docker), "vllm_image_state_directory": str(tmp_path / name)}
    base = {"name": "vllm_image", "tasks_from": "base", "rolespec_validate": False}
    stage = tmp_path / "stage.yml"
    include = {"ansible.builtin.include_role": base}
    stage.write_text(json.dumps([{"hosts": "gpu_hosts", "gather_facts": False, "tasks": [include]}]))
    done = run(hosts, "stage.yml", "-e", "vllm_image_base=registry.example/vllm:v0.32.0")
    assert done.returncode != 0
    assert "Docker does not answer on the host" in done.stdout and "the words of bad" in done.stdout
    assert goes_on(done, "good") and not goes_on(done, "bad")


@pytest.mark.slow
def test_a_fleet_that_cannot_be_is_refused_also_by_a_run_for_some_of_its_hosts(run: Run) -> None:
    hosts = {name: {"serving_fleet": "site"} for name in ("a", "b")}
    for number, host in enumerate(hosts.values(), 1):
        host["serving_fleet_listen"] = {"address": f"192.0.2.{number}", "port": 8444}
    hosts["b"]["serving_roles"] = ["worker"]
    hosts["c"] = {"serving_fleet": "sites", "serving_fleet_listen": {"address": "{{ unknown }}", "port": 8444}}
    hosts["d"] = {"serving_fleet_listen": {"address": "192.0.2.4", "port": 8444}}
    done = run(hosts, "playbooks/validate.yml", "--limit", "a,c,d")
    said = " ".join(done.stdout.split())
    assert "1. serving_roles: compared with b of the fleet 'site' the host has architect, auditor, sentry, and" in said
    assert "1. serving_fleet_listen: has no value that is known before the run; write" in said
    assert "2. serving_fleet: 'sites' has no other host in the group gpu_hosts, which has 'site'; set" in said
    assert "1. serving_fleet_listen: is set for a host of no fleet, as serving_fleet is empty; set" in said
    assert done.returncode != 0 and not goes_on(done, "a")


def test_only_plays_that_look_before_all_changes_stop_everywhere() -> None:
    assert "any_errors_fatal" not in (ROOT / "ansible.cfg").read_text()
    stop = {
        path.name
        for path in (ROOT / "playbooks").glob("*.yml")
        for play in yaml.safe_load(path.read_text())
        if play.get("any_errors_fatal")
    }
    assert stop == STOP_EVERYWHERE


DOCTOR = """#!/usr/bin/python
from ansible.module_utils.basic import AnsibleModule
names = ("host", "gpu_uuids", "gpus", "data_directory", "deep", "support_report")
module = AnsibleModule({name: {} for name in names}, supports_check_mode=True)
if not module.check_mode:
    open(module.params["support_report"], "w").write("of " + module.params["host"])
module.exit_json(doctor={}, problems=["This is wrong."], lines=["a line"])
"""


@pytest.mark.slow
def test_each_host_has_a_support_report_of_its_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks may fail; the report is fetched nevertheless."""
    monkeypatch.setenv("ANSIBLE_COLLECTIONS_PATH", replace_modules(tmp_path / "collections", host_doctor=DOCTOR))
    reports = tmp_path / "reports"
    reports.mkdir()
    old = reports / "one.tar.gz"
    old.write_text("old")
    old.chmod(0o644)
    for options, said, content in (
        (["--check"], "would write the support report to", {"one": "old"}),
        ([], "the support report is", {"one": "of one", "two": "of two"}),
    ):
        done = run({"one": {}, "two": {}}, "playbooks/doctor.yml", "-e", f"support={reports}", *options)
        assert {path.name: path.read_text() for path in reports.iterdir()} == {
            f"{name}.tar.gz": text for name, text in content.items()
        }, done.stdout + done.stderr
        for name in ("one", "two"):
            assert f"{name}: {said} {reports}/{name}.tar.gz. Read it" in done.stdout, done.stdout
            assert re.search(rf"^{name} .*changed=0 .*unreachable=0 .*failed=1", done.stdout, re.MULTILINE), done.stdout
    assert [stat.S_IMODE(path.stat().st_mode) for path in reports.iterdir()] == [0o600] * 2
