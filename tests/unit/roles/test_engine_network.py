# SPDX-License-Identifier: Apache-2.0
"""The Docker network of earlier releases: removed once nobody is on it, and not before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers import ROOT, run_playbook

DOCKER = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
*"network ls"*) printf '{networks}' ;;
*"container ls"*) printf '{containers}' ;;
esac
"""


@pytest.mark.parametrize(
    ("networks", "containers", "going", "removed"),
    [
        ("", "", False, False),
        ("7a vllm-edge\\n", "", False, True),
        ("7a vllm-edge\\n", "vllm-e2b e2b\\n", False, False),
        ("7a vllm-edge\\n", "vllm-e2b e2b\\n", True, True),
        ("7a vllm-edge\\n", "trainer \\n", True, False),
    ],
    ids=["none", "free", "an engine is on it", "uninstall: an engine", "uninstall: somebody"],
)
def test_the_network_goes_when_nobody_uses_it(
    tmp_path: Path, networks: str, containers: str, going: bool, removed: bool
) -> None:
    program, log = tmp_path / "bin" / "docker", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(DOCKER.format(log=log, networks=networks, containers=containers))
    program.chmod(0o755)
    role = ROOT / "roles/vllm_engine"
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "environment": {"PATH": f"{program.parent}:/usr/bin:/bin"},
        "vars": {"__vllm_engine_containers_go": going, "ansible_python_interpreter": sys.executable},
        "vars_files": [str(role / "vars/main.yml")],
        "tasks": [{"ansible.builtin.import_tasks": str(role / "tasks/network.yml")}],
    }
    (tmp_path / "play.json").write_text(json.dumps([play]))
    done = run_playbook("--inventory=localhost,", str(tmp_path / "play.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("network rm 7a" in log.read_text()) is removed
