# SPDX-License-Identifier: Apache-2.0
"""The page on another box is the scenario `box`, word for word; what of it contacts no host runs here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT

from lab.nvidia.cards import read_cards

(PAGE,) = (text for text in (path.read_text() for path in (ROOT / "docs").glob("*.md")) if "# inventories/box/" in text)
SHELL = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [line for line in SHELL.splitlines() if "inventories/box" in line]
FILES = dict(re.findall(r"^```yaml\n# inventories/box/(\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
SCENARIO = ROOT / "molecule/box"
SERVING = "group_vars/gpu_hosts/serving.yml"


def read_yaml(path: str) -> Any:
    return yaml.safe_load((SCENARIO / path).read_text())


def run(command: str, **environment: str) -> str:
    """Run a command of the page and return its output."""
    settings = {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", "COLUMNS": "160", **environment}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words = ["bash", "-c", f"set -o pipefail; {command}"]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, **settings, "PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_scenario_runs_the_commands_of_the_page() -> None:
    (play,) = read_yaml("converge.yml")
    commands = [command.replace("{{ inventory }}", "inventories/box") for command in play["tasks"][0]["loop"]]
    assert commands == COMMANDS
    assert play["vars"]["inventory"] == "molecule/box/inventory"


def test_the_inventory_of_the_scenario_is_that_of_the_page() -> None:
    assert set(FILES) == {"hosts.yml", "group_vars/gpu_hosts/main.yml", SERVING}
    for name in set(FILES) - {SERVING}:
        assert (SCENARIO / "inventory" / name).read_text() == FILES[name], name
    box = yaml.safe_load(FILES["group_vars/gpu_hosts/main.yml"])
    (card,) = read_cards(read_yaml("molecule.yml")["ansible"]["env"]["VLLM_EDGE_LAB_GPUS"])
    assert (card["name"], int(card["total_mib"])) == (box["gpu_name"], box["gpu_memory_mib"])


@pytest.mark.slow
def test_the_way_of_the_page_up_to_the_host(tmp_path: Path) -> None:
    for name in set(FILES) - {SERVING}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(FILES[name])
    paste, validate, plan, site = (command.replace("inventories/box", str(tmp_path)) for command in COMMANDS)
    run(paste.replace(" | sed", f" | tee {tmp_path / 'printed'} | sed"))
    (sample,) = re.findall(r"^```\n(chosen: .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert sample in (tmp_path / "printed").read_text()
    assert (tmp_path / SERVING).read_text().strip() == FILES[SERVING].strip()
    run(validate)
    assert re.search(r"^\s*advised\b.*\bfits\b", run(plan), re.MULTILINE)
    assert site.endswith(" site.yml")
