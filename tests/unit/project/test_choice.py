# SPDX-License-Identifier: Apache-2.0
"""The remembered choice: a run without -e does not end what was chosen with it, and says how to go on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import run_playbook

BY_E = {"profile": "e2b-only", "generation": 7, "origin": "-e", "chosen_at": "2026-11-21T16:40:00Z"}

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run playbooks/choice.yml on this machine as the host, with what is committed there; `then` sees the choice."""
    inventory, state = tmp_path / "inventory", tmp_path / "state"
    (inventory / "group_vars").mkdir(parents=True)
    state.mkdir()

    def go(
        *options: str, committed: dict[str, Any] | str | None = None, profile: str | None = "nvfp4-tp2"
    ) -> subprocess.CompletedProcess[str]:
        hosts = {"gpu_hosts": {"hosts": {"xr7620": {"ansible_connection": "local"}}}}
        variables: dict[str, Any] = {"vllm_edge_host_state_directory": str(state), "word": "nvfp4"}
        variables |= {"ansible_python_interpreter": "/no/python/here"}
        if profile is not None:
            variables["serving_profile"] = profile
        (inventory / "hosts.yml").write_text(json.dumps(hosts))
        (inventory / "group_vars" / "gpu_hosts.yml").write_text(json.dumps(variables))
        if committed is not None:
            text = committed if isinstance(committed, str) else json.dumps(committed)
            (state / "active-profile.json").write_text(text)
        then = tmp_path / "then.yml"
        show = {"name": "Show", "ansible.builtin.debug": {"var": "serving_choice"}}
        then.write_text(json.dumps([{"hosts": "gpu_hosts", "gather_facts": False, "tasks": [show]}]))
        words = ["-i", str(inventory), "playbooks/choice.yml", str(then), *options]
        return run_playbook(*words, ANSIBLE_CALLBACK_RESULT_FORMAT="json", ANSIBLE_DISPLAY_OK_HOSTS="true")

    return go


def chosen(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What the play after it sees."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in done.stdout
    return dict(json.loads(done.stdout.split("ok: [xr7620] => ")[-1].split("\nPLAY RECAP")[0])["serving_choice"])


def words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stdout + done.stderr).replace('\\"', '"').split())


# ---- whose choice it is -----------------------------------------------------------------------------------------


def test_the_inventory_s(run: Run) -> None:
    assert chosen(run()) == {"origin": "inventory", "inventory_profile": "nvfp4-tp2"}


@pytest.mark.parametrize(
    "options",
    [
        ["-e", "serving_profile=e2b-only"],
        ["-e", "allow_reboot=true serving_profile=e2b-only"],
        ["-e", '{"serving_profile": "e2b-only"}'],
        ["--extra-vars", "serving_profile=nvfp4-tp2", "--extra-vars", "serving_profile=e2b-only"],
        ["-e", "@FILE"],
    ],
    ids=["word", "words", "JSON", "last of two", "file"],
)
def test_that_of_e_and_what_it_hides(run: Run, options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "vars.yml"
    file.write_text("serving_profile: e2b-only\n")
    done = run(*[option.replace("@FILE", f"@{file}") for option in options])
    assert chosen(done) == {"origin": "-e", "inventory_profile": "nvfp4-tp2"}


def test_another_variable_of_e_chooses_nothing(run: Run) -> None:
    assert chosen(run("-e", "allow_reboot=true"))["origin"] == "inventory"


def test_e_that_says_what_the_inventory_says(run: Run) -> None:
    """The way back to the inventory: what is chosen is no longer anybody's own choice."""
    done = run("-e", "serving_profile=nvfp4-tp2", committed=BY_E)
    assert chosen(done) == {"origin": "inventory", "inventory_profile": "nvfp4-tp2"}


@pytest.mark.parametrize(("profile", "says"), [(None, None), ("{{ word }}-tp2", "nvfp4-tp2"), ("{{ nobody }}", None)])
def test_what_e_hides_may_be_absent_or_a_template(run: Run, profile: str | None, says: str | None) -> None:
    done = run("-e", "serving_profile=e2b-only", profile=profile)
    assert chosen(done) == {"origin": "-e", "inventory_profile": says}


# ---- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [[], ["--check"]], ids=["run", "check"])
@pytest.mark.parametrize(
    ("origin", "told"), [("-e", "chosen with -e at 2026-11-21T16:40:00Z"), ("host", "on the host")]
)
def test_a_plain_run_does_not_end_it(run: Run, origin: str, told: str, mode: list[str]) -> None:
    done = run(*mode, committed=BY_E | {"origin": origin})
    assert done.returncode == 2 and "changed=0" in done.stdout
    said = words(done)
    assert "xr7620 runs profile e2b-only (generation 7)" in said and told in said
    assert "put 'serving_profile: e2b-only' into the inventory" in said
    assert "run with '-e serving_profile=nvfp4-tp2'" in said
    assert "PLAY [gpu_hosts]" not in done.stdout, "what comes after it was not begun"


@pytest.mark.parametrize(
    "committed",
    [
        None,
        "",
        "no JSON",
        "[]",
        {"profile": "e2b-only", "generation": 7, "engines": {}},
        BY_E | {"origin": "inventory"},
        BY_E | {"profile": "nvfp4-tp2"},
    ],
    ids=["nothing", "empty", "damaged", "no object", "older record", "inventory's own", "same profile"],
)
def test_a_plain_run_passes(run: Run, committed: dict[str, Any] | str | None) -> None:
    assert chosen(run(committed=committed))["origin"] == "inventory"


def test_e_passes(run: Run) -> None:
    assert chosen(run("-e", "serving_profile=bf16-tp4", committed=BY_E))["origin"] == "-e"


def test_site_asks_before_any_host_is_changed() -> None:
    done = run_playbook("--list-tasks", "-i", "xr7620,", "site.yml", check=True)
    plays = [line.split("): ")[1].split("\t")[0] for line in done.stdout.splitlines() if line.startswith("  play #")]
    assert plays[:3] == ["Validate the inventory", "Check the chosen profile", "Prepare the host"]
