# SPDX-License-Identifier: Apache-2.0
"""README, CONTRIBUTING and the READMEs of the roles name what is there: playbooks, packages, entry points."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "plugins/module_utils/vllm_edge"
ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())


def read(path: str) -> str:
    return (ROOT / path).read_text()


def load(path: str) -> Any:
    return yaml.safe_load(read(path))


def first_cells(page: str) -> list[str]:
    """Code in the first column of all tables of a page, in order."""
    rows = re.findall(r"^\|(.*?)\|", read(page), re.MULTILINE)
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def tracked(directory: str = ".") -> set[str]:
    """What lies directly in a directory of the repository, files that are not yet committed included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT / directory,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {line.split("/")[0] + "/" * ("/" in line) for line in listed.splitlines()}


def test_readme_names_every_playbook() -> None:
    named = [name for name in first_cells("README.md") if name.startswith("playbooks/")]
    assert sorted(named) == sorted(
        f"playbooks/{path.name}" for path in (ROOT / "playbooks").glob("*.yml") if path.name != "site.yml"
    )


def test_readme_names_the_stages_first_and_in_their_order() -> None:
    stages = [play["ansible.builtin.import_playbook"] for play in load("playbooks/site.yml")]
    named = [name for name in first_cells("README.md") if name.startswith("playbooks/")]
    assert named[: len(stages)] == [f"playbooks/{stage}" for stage in stages]
    assert len(stages) == 8, "README says that site.yml runs the first eight"


def test_contributing_names_every_directory() -> None:
    named = {name.split("/")[0] + "/" for name in re.findall(r"`([^`\s]+/[^`\s]*)`", read("CONTRIBUTING.md"))}
    directories = {name for name in tracked() if name.endswith("/")}
    assert directories - named == set()


def test_contributing_gives_every_part_of_the_package_a_layer() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", read("CONTRIBUTING.md"), re.MULTILINE)
    named = [name for _, cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(named) == sorted(tracked(PACKAGE) - {"__init__.py", "py.typed"})
    layers = [int(layer) for layer, _ in rows]
    assert layers == sorted(layers)


@pytest.mark.parametrize("role", ROLES)
def test_readme_of_a_role_names_its_entry_points_and_its_reference(role: str) -> None:
    entry_points = load(f"roles/{role}/meta/argument_specs.yml")["argument_specs"]
    assert entry_points.keys() <= set(first_cells(f"roles/{role}/README.md"))
    assert f"`ansible-doc -t role -r roles {role}`" in read(f"roles/{role}/README.md")


@pytest.mark.parametrize("role", ROLES)
def test_readme_of_a_role_names_only_tasks_that_exist(role: str) -> None:
    for name in first_cells(f"roles/{role}/README.md"):
        assert (ROOT / "roles" / role / "tasks" / f"{name}.yml").is_file(), name


def test_continuous_integration_runs_every_test() -> None:
    github = [step.get("run") for job in load(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]
    assert "make test" in github
    assert "make test" in load(".gitlab-ci.yml")["test"]["script"]
    assert "exec make test" in read(".ci/run").splitlines()
