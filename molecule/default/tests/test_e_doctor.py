# SPDX-License-Identifier: Apache-2.0
"""`playbooks/doctor.yml` on a host that serves, and on the same with one fault of each class.

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
from conftest import ENGINES, GPUS, INVENTORY_HOST, Controller, Machine

SPECIFICATION = "/var/run/cdi/nvidia.yaml"
DROP_IN = "/etc/systemd/system/nvidia-cdi-refresh.service.d/vllm-edge.conf"
IMAGE_RECORD = "/var/lib/vllm-edge/image.json"
HOOK = "/usr/bin/nvidia-container-runtime-hook"
LEGACY = "somebodys-legacy"
# The lab's hook refuses every container, and Docker's cgroup driver depends on the machine that the lab runs on. So the
# container starts with a hook that does nothing, and `docker info` answers as on the supported distributions. Docker
# looks for the hook only when it starts.
START_LEGACY = f"""set -e
image=$(docker image ls --quiet --filter=reference=*/vllm/vllm-openai | head -n 1)
cp --preserve {HOOK} /run/hook
trap 'mv /run/hook {HOOK}' EXIT
printf '#!/bin/sh\\nexit 0\\n' > {HOOK}
start() {{ docker run --detach --name={LEGACY} --gpus=all --entrypoint=sleep "$image" infinity; }}
start || {{ docker rm --force {LEGACY} || true; systemctl restart docker.service; start; }}
cat > /usr/local/bin/docker <<'WRAPPER'
#!/bin/sh
case "$*" in *CgroupDriver*) echo systemd ;; *) exec /usr/bin/docker "$@" ;; esac
WRAPPER
chmod 0755 /usr/local/bin/docker
"""
END_LEGACY = f"rm --force /usr/local/bin/docker; /usr/bin/docker rm --force {LEGACY}"
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
        "runtime.gpu-access",
        f"may take the GPUs from {LEGACY}, which NVIDIA's legacy runtime hook granted",
        "nvidia-ctk system create-dev-char-symlinks",
        START_LEGACY,
        END_LEGACY,
        state="warn",
    ),
    Fault(
        "driver.cuda",
        "CUDA 13.0.2",
        "playbooks/driver_upgrade.yml",
        f"""sed --in-place=.kept 's/"driver_branch": "580"/"driver_branch": "600"/' {IMAGE_RECORD}""",
        f"mv {IMAGE_RECORD}.kept {IMAGE_RECORD}",
        state="warn",
    ),
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
        "runtime.toolkit-held",
        "nvidia-container-toolkit",
        "host.yml",
        "apt-mark unhold nvidia-container-toolkit",
        "apt-mark hold nvidia-container-toolkit",
        state="warn",
    ),
    Fault(
        "gpus.expected",
        "GPU-00000000-0000-0000-0000-000000000000 (gpu_uuids of the inventory)",
        "Look for the card",
    ),
    Fault(
        "system.dpkg",
        "dpkg",
        "dpkg --configure -a",
        "touch /var/lib/dpkg/updates/0001",
        "rm /var/lib/dpkg/updates/0001",
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


def doctor(controller: Controller, variables: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
    """Exit status of the play, its JSON, and all that it printed."""
    controller.environment["ANSIBLE_STDOUT_CALLBACK"] = "community.general.null"
    try:
        played = controller.play("playbooks/doctor.yml", f"--extra-vars={json.dumps({'format': 'json', **variables})}")
    finally:
        del controller.environment["ANSIBLE_STDOUT_CALLBACK"]
    document, _ = json.JSONDecoder().raw_decode(played.output[played.output.index("{\n") :])
    return played.rc, document, played.output


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
    options = json.dumps({"format": "json", "support": str(place)})
    played = controller.play("playbooks/doctor.yml", f"--extra-vars={options}")
    assert played.rc == 0 and played.changed == [], played.output[-4000:]
    document, _ = json.JSONDecoder().raw_decode(played.output[played.output.index("{\n") :])
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


def find_moved(found: Findings, healthy: Findings) -> set[str]:
    """Checks that say something else than on the healthy host, and not that all is well."""
    return {check for check, finding in found.items() if finding["state"] not in ("ok", healthy[check]["state"])}


def check_fault(fault: Fault, found: Findings) -> None:
    finding = found[fault.check]
    assert finding["state"] == fault.state, finding
    assert fault.evidence in finding["evidence"] and fault.remedy in finding["remedy"], finding


def test_each_fault_is_named_with_its_remedy_and_nothing_else_is(
    controller: Controller, machine: Machine, undisturbed: None, healthy: Findings
) -> None:
    with contextlib.ExitStack() as spoilt:
        for fault in FAULTS:
            spoilt.callback(machine.shell, fault.go)
            machine.shell(fault.come)
        rc, document, output = doctor(controller, CARD_GONE)
    found = by_name(document)
    for fault in FAULTS:
        check_fault(fault, found)
    assert rc == 2, output[-3000:]
    assert find_moved(found, healthy) == {fault.check for fault in FAULTS}


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


@pytest.mark.thorough
def test_the_next_run_makes_a_stale_specification_anew_and_warns_of_a_container_that_may_lose_its_gpus(
    controller: Controller, machine: Machine, undisturbed: None
) -> None:
    """As the toolkit leaves a headless host at boot: without the nodes of CUDA, which nobody asked for.

    The warning comes before anything is changed; the engines, which have their GPUs by CDI, are not named."""
    right = machine.run("cat", SPECIFICATION)
    machine.shell(
        f"rm {DROP_IN} /dev/nvidia-uvm /dev/nvidia-uvm-tools && systemctl daemon-reload && "
        "systemctl restart nvidia-cdi-refresh.service"
    )
    stale = machine.run("cat", SPECIFICATION)
    assert "/dev/nvidia-uvm" not in stale and all(f"name: {uuid}" in stale for uuid in GPUS), stale
    machine.shell(START_LEGACY)
    try:
        healed = controller.play("playbooks/host.yml")
    finally:
        machine.shell(END_LEGACY)
    assert healed.rc == 0, healed.output[-4000:]
    assert healed.changed == [
        "container_runtime : Configure nvidia-cdi-refresh.service to create the device nodes of CUDA",
        "container_runtime : Restart nvidia-cdi-refresh.service",
    ]
    words = healed.output.split("TASK [vllm_edge_host")[0].split()
    warned = f"WARNING: 'systemctl daemon-reload' may take the GPUs from {LEGACY}, which"
    assert warned in " ".join(words) and "--device nvidia.com/gpu=" in " ".join(words), healed.output
    assert machine.run("cat", SPECIFICATION) == right
    assert machine.shell("stat --format=%A /dev/nvidia-uvm").strip() == "crw-rw-rw-"
