# SPDX-License-Identifier: Apache-2.0
"""`playbooks/doctor.yml` on a host that serves, and on the same with faults that are read in different ways.

Each fault by itself is in tests/unit/doctor/faults.py.
"""

from __future__ import annotations

import contextlib
import json
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINES, GPUS, INVENTORY_HOST, Controller, Machine, Play

SPECIFICATION = "/var/run/cdi/nvidia.yaml"
HOLD_LOCK = """import fcntl, time
file = open("/var/lib/dpkg/lock-frontend", "w")
fcntl.lockf(file, fcntl.LOCK_EX)
time.sleep(600)"""


Findings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Fault:
    """How a fault comes and goes on the host, and what the doctor has to say of it."""

    check: str
    evidence: str
    remedy: str
    come: str = "true"
    go: str = "true"
    state: str = "fail"


FAULTS = [
    Fault(
        "driver.persistence",
        "nvidia-persistenced",
        "systemctl enable --now nvidia-persistenced.service",
        "systemctl stop nvidia-persistenced.service",
        "systemctl start nvidia-persistenced.service",
        state="warn",
    ),
    Fault(
        "runtime.cdi-current",
        "550.54.15",
        "nvidia-cdi-refresh.service",
        rf"sed -Ei 's/(\.so\.)[0-9]+\.[0-9.]+/\1550.54.15/' {SPECIFICATION}",
        "systemctl restart nvidia-cdi-refresh.service",
    ),
    Fault(
        "runtime.leftovers",
        "vllm-edge-bench",
        "docker rm --force vllm-edge-bench",
        "docker create --name=vllm-edge-bench --label=vllm-edge.companion=bench "
        "$(docker inspect --format '{{.Image}}' vllm-e2b)",
        "docker rm vllm-edge-bench",
        state="warn",
    ),
    Fault(
        "gpus.expected",
        "GPU-00000000-0000-0000-0000-000000000000 (gpu_uuids of the inventory)",
        "Look for the card",
    ),
    Fault(
        "system.apt-lock",
        "lock-frontend",
        "Let it finish",
        f"systemd-run --quiet --unit=lab-lock python3 -c '{HOLD_LOCK}'",
        "systemctl stop lab-lock.service",
        state="warn",
    ),
]
"""In an order in which each can come, and go again backwards. All are there at once."""
CARD_GONE = {"gpu_uuids": [*GPUS[:3], "GPU-00000000-0000-0000-0000-000000000000"]}


def doctor(controller: Controller, variables: dict[str, Any]) -> tuple[Play, dict[str, Any]]:
    """The play, and the JSON that it printed."""
    played = controller.play("playbooks/doctor.yml", f"--extra-vars={json.dumps({'format': 'json', **variables})}")
    document, _ = json.JSONDecoder().raw_decode(played.output[played.output.index("{\n") :])
    return played, document


def by_name(document: dict[str, Any]) -> Findings:
    return {finding["check"]: finding for finding in document["checks"]}


@dataclass(frozen=True)
class Healthy:
    """The doctor on the host as it serves, with its support report."""

    document: dict[str, Any]
    report: Path
    left: list[object]
    """Memory of the GPUs and temporary directories, before and after."""


@pytest.fixture(scope="module")
def run(controller: Controller, machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    """Every GPU has an engine, so CUDA is asked in the containers of the engines only, and takes no memory."""
    place = tmp_path_factory.mktemp("support")
    leftovers = "ls -d /tmp/vllm-edge-* /var/tmp/vllm-edge-* 2>/dev/null || true"
    before = machine.gpu_memory(), machine.shell(leftovers)
    played, document = doctor(controller, {"support": str(place)})
    assert played.rc == 0 and played.changed == [], played.output[-4000:]
    return Healthy(
        document, place / f"{INVENTORY_HOST}.tar.gz", [before, (machine.gpu_memory(), machine.shell(leftovers))]
    )


@pytest.fixture(scope="module")
def healthy(run: Healthy) -> Findings:
    return by_name(run.document)


def test_a_host_that_serves(healthy: Findings) -> None:
    wrong = {name: finding for name, finding in healthy.items() if finding["state"] in ("fail", "warn")}
    # The clock of the lab is that of the machine it runs on, which nothing on the host synchronises.
    assert set(wrong) <= {"system.time"}, wrong
    unknown = {name: finding["evidence"] for name, finding in healthy.items() if finding["state"] == "unknown"}
    # No PCI bus, no EFI and no journal of a kernel are behind the simulated cards.
    assert not [name for name in unknown if name.partition(".")[0] in ("gpus", "runtime", "serving", "storage")], (
        unknown
    )


def test_the_same_on_the_host_for_another_user(machine: Machine, healthy: Findings) -> None:
    done = machine.host.run("sudo --user=ops vllm-edge doctor --format json")
    assert done.rc in (0, 1), done.stdout + done.stderr
    found = by_name(json.loads(done.stdout))
    assert list(found) == list(healthy)
    assert not [name for name, finding in found.items() if finding["state"] == "fail"], found


def test_each_fault_is_named_with_its_remedy_and_nothing_else_is(
    controller: Controller, machine: Machine, undisturbed: None, healthy: Findings
) -> None:
    with contextlib.ExitStack() as spoilt:
        for fault in FAULTS:
            spoilt.callback(machine.shell, fault.go)
            machine.shell(fault.come)
        controller.environment["ANSIBLE_STDOUT_CALLBACK"] = "community.general.null"
        spoilt.callback(controller.environment.pop, "ANSIBLE_STDOUT_CALLBACK")
        played, document = doctor(controller, CARD_GONE)
    found = by_name(document)
    for fault in FAULTS:
        finding = found[fault.check]
        assert finding["state"] == fault.state, finding
        assert fault.evidence in finding["evidence"] and fault.remedy in finding["remedy"], finding
    assert played.rc == 2, played.output[-3000:]
    moved = {check for check, finding in found.items() if finding["state"] not in ("ok", healthy[check]["state"])}
    assert moved == {fault.check for fault in FAULTS}


def test_a_support_report_is_fetched(run: Healthy) -> None:
    assert stat.S_IMODE(run.report.stat().st_mode) == 0o600
    with tarfile.open(run.report) as archive:
        texts = {
            member.name.removeprefix("vllm-edge-support/"): content.read().decode()
            for member in archive.getmembers()
            if (content := archive.extractfile(member))
        }
    said = {name.removeprefix("commands/").removesuffix(".txt"): text for name, text in texts.items()}
    assert said["cuda-new-container"] == "not asked: every GPU that answers is in use\n"
    for engine in ENGINES:
        answer = json.loads(said[f"cuda-{engine.name}"].splitlines()[1])
        assert answer.keys() >= {"libcuda", "cuda", "devices"}
        assert answer["memory"] == {}, "it allocated on the GPUs of an engine"
        assert "Starting to load model" in said[f"start-of-{engine.name}"]
        assert f"Id={engine.unit}" in said["boot-times"] and f"Started {engine.unit}" in said["boot-units"]
    assert said["gpu-device-nodes"].count("/dev/nvidia") >= len(GPUS) + 1
    assert "FB Memory Usage" in said["nvidia-smi-memory"] and '"Size"' in said["image"]
    assert "Finished nvidia-cdi-refresh.service" in said["boot-units"]
    assert run.left[0] == run.left[1]
