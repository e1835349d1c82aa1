# SPDX-License-Identifier: Apache-2.0
"""The remembered choice: a run without -e does not end what was chosen with it, and says how to go on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, find_failures, run_playbook

BY_E = {"profile": "e2b-only", "generation": 7, "origin": "-e", "chosen_at": "2026-11-21T16:40:00Z"}
OURS = {"origin": "inventory", "inventory_profile": "nvfp4-tp2"}
CHOICES = "{{ dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'serving_choice'))) }}"
KEEP = {
    "ansible.builtin.copy": {"content": CHOICES, "dest": "{{ kept }}"},
    **{"delegate_to": "localhost", "run_once": True},
    "vars": {"ansible_python_interpreter": "{{ ansible_playbook_python }}"},
}
THEN = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [KEEP]}
"""A play that keeps what the plays after the choice see."""


def choose(
    place: Path, hosts: Mapping[str, Mapping[str, Any]], *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run playbooks/choice.yml for hosts that are this machine, each with what is `committed` there, and a play after.

    Returns the choice by host; nothing where the play after it was not begun.
    """
    place.mkdir(exist_ok=True)
    listed = {}
    for name, given in hosts.items():
        state = place / name
        state.mkdir(exist_ok=True)
        if (committed := given.get("committed")) is not None:
            text = committed if isinstance(committed, str) else json.dumps(committed)
            (state / "active-profile.json").write_text(text)
        # The host needs no Python.
        listed[name] = {"ansible_connection": "local", "ansible_python_interpreter": "/no/python/here"}
        listed[name] |= {"vllm_edge_host_state_directory": str(state), "word": "nvfp4"}
        listed[name] |= {"serving_profile": given.get("profile", "nvfp4-tp2")}
        if given.get("profile", "") is None:
            del listed[name]["serving_profile"]
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": listed}}))
    (place / "then.yml").write_text(json.dumps([THEN]))
    kept = place / "kept"
    kept.unlink(missing_ok=True)
    words = ["-i", place / "hosts.yml", "playbooks/choice.yml", place / "then.yml", "-e", f"kept={kept}", *options]
    done = run_playbook(*words)
    found = json.loads(kept.read_text()) if kept.exists() else {}
    return done, {name: {key: choice[key] for key in OURS} for name, choice in found.items()}


@pytest.mark.slow
def test_without_e_it_is_the_inventory_s(tmp_path: Path) -> None:
    hosts: dict[str, dict[str, Any]] = {
        "nothing": {},
        "empty": {"committed": ""},
        "damaged": {"committed": "no JSON"},
        "no_object": {"committed": "[]"},
        "older_record": {"committed": {"profile": "e2b-only", "generation": 7, "engines": {}}},
        "of_the_inventory": {"committed": BY_E | {"origin": "inventory"}},
        "same_profile": {"committed": BY_E | {"profile": "nvfp4-tp2"}},
    }
    done, found = choose(tmp_path, hosts, "-e", "allow_reboot=true")
    assert found == dict.fromkeys(hosts, OURS), done.stdout + done.stderr


@pytest.mark.slow
def test_that_of_e_and_what_it_hides(tmp_path: Path) -> None:
    """What the inventory says may be absent or a template; where it says the same, nobody has chosen any more."""
    (tmp_path / "vars.yml").write_text("serving_profile: e2b-only\n")
    hosts: dict[str, dict[str, Any]] = {
        "other": {"committed": BY_E | {"profile": "bf16-tp4"}},
        "same": {"profile": "e2b-only", "committed": BY_E | {"profile": "bf16-tp4"}},
        "absent": {"profile": None},
        "template": {"profile": "{{ word }}-tp2"},
        "unknown": {"profile": "{{ nobody }}"},
    }
    options = ["-e", "serving_profile=nvfp4-tp2", "-e", "allow_reboot=true", "-e", f"@{tmp_path / 'vars.yml'}"]
    done, found = choose(tmp_path, hosts, *options)
    hidden = {"other": "nvfp4-tp2", "same": "e2b-only", "absent": None, "template": "nvfp4-tp2", "unknown": None}
    assert found == {
        name: {"origin": "inventory" if name == "same" else "-e", "inventory_profile": says}
        for name, says in hidden.items()
    }, done.stdout + done.stderr


@pytest.mark.slow
def test_it_is_read_as_in_the_run(tmp_path: Path) -> None:
    """From group_vars beside the playbook, from several inventories, of which the last counts, and from a vault."""
    tasks = [
        {"ansible.builtin.include_tasks": str(ROOT / "playbooks/tasks/choice.yml")},
        {"edge.vllm_edge.show": {"text": "{{ serving_choice.inventory_profile }}"}},
    ]
    (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]))
    (tmp_path / "group_vars").mkdir()
    variables = {"vllm_edge_host_state_directory": str(tmp_path), "ansible_connection": "local"}
    (tmp_path / "group_vars" / "all.yml").write_text(json.dumps(variables | {"serving_profile": "beside"}))
    (tmp_path / "password").write_text("secret\n")
    vault = ["--vault-password-file", str(tmp_path / "password")]
    for name in ("first", "second"):
        (tmp_path / name / "group_vars").mkdir(parents=True)
        (tmp_path / name / "hosts.yml").write_text("all: {hosts: {plain: {}}, children: {some: {hosts: {own: {}}}}}\n")
        (tmp_path / name / "group_vars" / "some.yml").write_text(f"serving_profile: {name}\n")
    files = list(tmp_path.glob("*/group_vars/some.yml"))
    subprocess.run(["ansible-vault", "encrypt", *vault, *files], check=True, capture_output=True, timeout=60)
    inventories = ["-i", tmp_path / "first", "-i", tmp_path / "second"]
    done = run_playbook(tmp_path / "play.yml", "-e", "serving_profile=other", *inventories, *vault)
    assert {"plain: beside", "own: second"} <= set(done.stdout.splitlines()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[], ["--check"]], ids=["run", "check"])
def test_a_plain_run_does_not_end_it(tmp_path: Path, mode: list[str]) -> None:
    """Nor does it change another host, on which nothing was chosen."""
    hosts: dict[str, dict[str, Any]] = {
        "xr7620": {"committed": BY_E},
        "by_hand": {"committed": BY_E | {"origin": "host"}},
        "other": {},
    }
    done, found = choose(tmp_path, hosts, *mode)
    assert done.returncode == 2 and "changed=1" not in done.stdout and found == {}
    assert "PLAY [gpu_hosts]" not in done.stdout, "what comes after it was begun"
    failures = find_failures(done)
    assert failures.keys() == {"xr7620", "by_hand"}
    for host, told in (("xr7620", "chosen with -e at 2026-11-21T16:40:00Z"), ("by_hand", "on the host")):
        said = failures[host].replace("''", "'")
        assert f"{host} runs profile e2b-only (generation 7)" in said and told in said, said
        assert "put 'serving_profile: e2b-only' into the inventory" in said
        assert "run with '-e serving_profile=nvfp4-tp2'" in said


def test_site_asks_before_any_host_is_changed() -> None:
    assert yaml.safe_load((ROOT / "site.yml").read_text())[0]["ansible.builtin.import_playbook"] == "playbooks/site.yml"
    stages = yaml.safe_load((ROOT / "playbooks/site.yml").read_text())[:3]
    assert [x["ansible.builtin.import_playbook"] for x in stages] == ["validate.yml", "choice.yml", "host.yml"]
