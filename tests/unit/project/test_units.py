# SPDX-License-Identifier: Apache-2.0
"""How much of a host each unit of the project may reach, as systemd itself counts it; it knows each of their words."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Choice
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.command import SANDBOX, build_start_command
from generations import engine, put, rendered
from helpers import ROOT, run_playbook

ROLE = ROOT / "roles/vllm_engine"
GATEWAY = ROOT / "roles/serving_gateway"
GATEWAY_UNITS = ("vllm-edge-gateway.service", "vllm-edge-gateway-sync.service")
LIMITS = {"vllm-edge-switch.service": 5.0, "vllm-edge-recover.service": 2.0, "vllm-e.service": 3.0}
LIMITS |= {"vllm-edge-gateway.service": 4.0, "vllm-edge-gateway-sync.service": 2.0}
METRICS = ROOT / "roles/serving_metrics"
LIMITS |= {"vllm-edge-facts.service": 3.5, "vllm-edge-exporter.service": 0.5}
"""Exposure from 0 to 10 (`systemd-analyze security`); without a sandbox it is 9.6. Lower a limit when you can."""


def write_switch_unit(directory: Path) -> None:
    """Write the transient unit of a switch as a file, because only files can be analysed without a running systemd."""
    paths = HostPaths(directory / "etc", directory / "state", directory / "units")
    generation = store.load(paths, put(paths, rendered(engine("a"))))
    command = build_start_command(paths, generation, Choice(), "a test")
    properties = [word.removeprefix("--property=") for word in command if word.startswith("--property=")]
    service = [line for line in properties if not line.startswith("After=")]
    text = "[Service]\nExecStart=/bin/true\n" + "".join(f"{line}\n" for line in service)
    (directory / "vllm-edge-switch.service").write_text(text)


@pytest.fixture(scope="module")
def units(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("units")
    write_switch_unit(directory)
    names = {
        ROLE / "templates/vllm-edge-recover.service.j2": "vllm-edge-recover.service",
        ROLE / "templates/vllm-engine.service.j2": "vllm-e.service",
        **{GATEWAY / f"templates/{name}.j2": name for name in GATEWAY_UNITS},
        **{
            METRICS / f"templates/vllm-edge-{name}.service.j2": f"vllm-edge-{name}.service"
            for name in ("facts", "exporter")
        },
    }
    parts = [str(role / part) for role in (ROLE, GATEWAY, METRICS) for part in ("defaults/main.yml", "vars/main.yml")]
    variables = {
        "__vllm_engine_item": {"name": "e", "model": "m", "gpus": [0], "served_names": ["one"]},
        "vllm_engine_models": {"m": {"path": "/data/m"}},
        "ansible_python_interpreter": sys.executable,
    }
    tasks = [{"ansible.builtin.template": {"src": str(of), "dest": f"{directory}/{to}"}} for of, to in names.items()]
    head = {"hosts": "localhost", "gather_facts": False, "connection": "local"}
    play = [{**head, "vars_files": parts, "vars": variables, "tasks": tasks}]
    (directory / "play.json").write_text(json.dumps(play))
    ran = run_playbook("-i", "localhost,", str(directory / "play.json"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("unit", LIMITS)
def test_a_unit_reaches_no_more_of_the_host_than_its_limit(units: Path, unit: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed on this machine, so no exposure was counted")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(units / unit)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", ran.stdout)
    assert found, ran.stdout + ran.stderr
    assert not re.search("Unknown|Failed to parse|Invalid", ran.stderr), ran.stderr
    assert float(found[1]) <= LIMITS[unit], ran.stdout
    print(unit, found[1])


def test_the_sandbox_of_a_switch_leaves_the_gpus_alone() -> None:
    """These close every device node, and NVML could not be opened."""
    assert not re.search("ProtectClock|PrivateDevices|DevicePolicy|DeviceAllow", " ".join(SANDBOX))
