# SPDX-License-Identifier: Apache-2.0
"""Rules of the repository that no linter knows."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PLAYBOOKS = [ROOT / "site.yml", *sorted((ROOT / "playbooks").glob("*.yml"))]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())


def load(path: Path) -> Any:
    """A YAML file; an empty one is an empty mapping."""
    return yaml.safe_load(path.read_text()) or {}


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository, those not yet committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


@pytest.mark.parametrize("playbook", PLAYBOOKS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_playbook_sees_group_vars_and_inventory_overrides(playbook: Path, tmp_path: Path) -> None:
    inventory = tmp_path / "inventory"
    (inventory / "group_vars" / "gpu_hosts").mkdir(parents=True)
    (inventory / "hosts.yml").write_text("gpu_hosts: {hosts: {sentinel: {}}}\n")
    (inventory / "group_vars" / "gpu_hosts" / "main.yml").write_text("vram_foreign: sentinel\n")
    shown = subprocess.run(
        ["ansible-inventory", "-i", str(inventory), "--playbook-dir", str(playbook.parent), "--host", "sentinel"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    variables = json.loads(shown)
    assert variables["serving_roles"] == ["architect", "worker", "auditor", "sentry"]
    assert variables["vram_foreign"] == "sentinel"


@pytest.mark.parametrize(
    "playbook", [path for path in PLAYBOOKS if path.name != "site.yml"], ids=lambda path: path.name
)
def test_play_runs_on_gpu_hosts(playbook: Path) -> None:
    for play in load(playbook):
        imported = play.get("ansible.builtin.import_playbook", "")
        assert play.get("hosts") == "gpu_hosts" or (playbook.parent / imported) in PLAYBOOKS


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_defaults_and_argument_spec_agree(role: Path) -> None:
    defaults = load(role / "defaults" / "main.yml")
    entry_points = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    specified: dict[str, Any] = {}
    for entry_point in entry_points.values():
        for name, option in entry_point.get("options", {}).items():
            assert option.get("description"), f"{name} has no description"
            if "default" in option:
                specified[name] = option["default"]
    assert specified == defaults


def test_nothing_outside_the_lab_knows_the_lab() -> None:
    for path in tracked("roles", "playbooks", "plugins", "group_vars", "site.yml"):
        text = path.read_text(errors="replace")
        for word in ("lab-gpu", "vendors.lab", "hub.lab", "registry.lab", "vllm-edge-lab", "LAB_GPU"):
            assert word not in text, f"{path} knows {word}"


@pytest.mark.parametrize(
    "path",
    tracked("*.py", "*.sh", "*.c", "*.h", "Makefile", "tools/*", ".ci/run"),
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_source_carries_a_licence(path: Path) -> None:
    head = path.read_text()[:400]
    assert "SPDX-License-Identifier: " in head
    if re.search(r"^from ansible\.(plugins|errors|utils)", path.read_text(), re.MULTILINE):
        assert "GPL-3.0-or-later" in head


@pytest.mark.parametrize("value", ["true", "yes", True])
def test_operators_switches_are_normalised(value: object) -> None:
    done = subprocess.run(
        [
            "ansible",
            "all",
            "-i",
            "sentinel,",
            "--playbook-dir",
            str(ROOT / "playbooks"),
            "-c",
            "local",
            "-e",
            json.dumps({"allow_reboot": value, "allow_docker_restart": value}),
            "-m",
            "ansible.builtin.assert",
            "-a",
            json.dumps({"that": ["nvidia_driver_allow_reboot is true", "container_runtime_allow_restart is true"]}),
        ],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


LOWEST = {"names", "paths", "text", "version", "system", "gpu", "weights"}
ABOVE = {
    "host_doctor": "it runs on a bare host with every check of the doctor",
    "program_release": "it takes the lock of the switch and names the switch that has it",
    "serving_page": "it runs on the controller",
    "model_facts": "it interprets checkpoints as the planner does",
    **dict.fromkeys(
        (
            "engine_secrets",
            "serving_advise",
            "serving_observations",
            "serving_plan",
            "serving_report",
            "serving_switch",
        ),
        "the program is installed",
    ),
}
"""Modules that import more than the lowest layers of the package, and why they may."""


def test_modules_for_a_bare_host_import_the_lowest_layers_only() -> None:
    """All that a module imports travels to the host with it. `make lint` keeps these layers from importing others."""
    found = {
        path.stem: set(re.findall(r"^from \.\.module_utils\.vllm_edge\.(\w+)", path.read_text(), re.MULTILINE))
        for path in (ROOT / "plugins" / "modules").glob("*.py")
    }
    assert {name for name, parts in found.items() if parts - LOWEST} == ABOVE.keys()


def test_teardown_knows_every_record_of_the_program() -> None:
    """A file or directory of the state tree that no role removes is left behind as if it were somebody's."""
    source = (ROOT / "plugins/module_utils/vllm_edge/paths.py").read_text()
    names = {*re.findall(r'self\.state / "([^"]+)"', source)}
    assert len(names) > 8
    removed = "".join(path.read_text() for path in ROOT.glob("roles/*/tasks/uninstall.yml"))
    assert [name for name in sorted(names) if f"'{name}'" not in removed] == []
