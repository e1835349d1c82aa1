# SPDX-License-Identifier: Apache-2.0
"""`playbooks/doctor.yml` on a host that serves, and on the same with one fault at a time."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import ENGINES, GPUS, INVENTORY_HOST, Controller, Machine

SPECIFICATION = "/var/run/cdi/nvidia.yaml"
DROP_IN = "/etc/systemd/system/nvidia-cdi-refresh.service.d/vllm-edge.conf"
DAEMON_JSON = "/etc/docker/daemon.json"
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

# What nobody can tell of cards that do not answer.
SILENT = frozenset(
    {"gpus.present", "gpus.answer", "gpus.expected", "gpus.holders", "runtime.cdi-devices", "runtime.cdi-current"}
    | {"gpus.device-nodes"}
    | {f"topology.{name}" for name in ("pcie", "numa", "iommu", "peer-to-peer", "ecc", "power")}
)

Seen = Callable[..., None]
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
    also: frozenset[str] = frozenset()
    """Other checks that may see it."""
    variables: dict[str, Any] = field(default_factory=dict)


def make_lab_fault(name: str, check: str, evidence: str, remedy: str, also: frozenset[str] = SILENT) -> Fault:
    """A fault of the simulated cards, which then do not answer."""
    come, go = f"lab-gpu fault set {name}", "lab-gpu fault clear"
    return Fault(check, evidence, remedy, come, go, also=also)


def make_loose(check: str, package: str) -> Fault:
    """A package that apt may replace."""
    return Fault(check, package, "host.yml", f"apt-mark unhold {package}", f"apt-mark hold {package}", state="warn")


FAULTS = {
    "driver changed without a reboot": make_lab_fault(
        "library-mismatch", "driver.versions", "the loaded NVIDIA kernel module is", "Reboot the host"
    ),
    "kernel module not loaded": make_lab_fault(
        "module-not-loaded", "driver.module-loaded", "nvidia", "modprobe nvidia", SILENT | {"driver.versions"}
    ),
    "GPU lost": make_lab_fault(f"--gpu {GPUS[1]} gpu-lost", "gpus.answer", "GPU is lost", "eboot"),
    "image wants a newer driver": Fault(
        "driver.cuda",
        "CUDA 13.0.2",
        "playbooks/driver_upgrade.yml",
        f"""sed --in-place=.kept 's/"driver_branch": "580"/"driver_branch": "600"/' {IMAGE_RECORD}""",
        f"mv {IMAGE_RECORD}.kept {IMAGE_RECORD}",
        state="warn",
    ),
    "card gone": Fault(
        "gpus.expected",
        "GPU-00000000-0000-0000-0000-000000000000 (gpu_uuids of the inventory)",
        "Look for the card",
        variables={"gpu_uuids": [*GPUS[:3], "GPU-00000000-0000-0000-0000-000000000000"]},
    ),
    "driver no longer held": make_loose("driver.held", "nvidia-driver-cuda"),
    "persistence daemon stopped": Fault(
        "driver.persistence",
        "nvidia-persistenced",
        "systemctl enable --now nvidia-persistenced.service",
        "systemctl stop nvidia-persistenced.service",
        "systemctl start nvidia-persistenced.service",
        state="warn",
    ),
    "CDI specification of another driver": Fault(
        "runtime.cdi-current",
        "550.54.15",
        "nvidia-cdi-refresh.service",
        rf"sed -Ei 's/(\.so\.)[0-9]+\.[0-9.]+/\1550.54.15/' {SPECIFICATION}",
        "systemctl restart nvidia-cdi-refresh.service",
    ),
    "somebody's container may lose its GPU": Fault(
        "runtime.gpu-access",
        f"may take the GPUs from {LEGACY}, which NVIDIA's legacy runtime hook granted",
        "nvidia-ctk system create-dev-char-symlinks",
        START_LEGACY,
        END_LEGACY,
        state="warn",
    ),
    "a benchmark was killed": Fault(
        "runtime.leftovers",
        "vllm-edge-bench",
        "docker rm --force vllm-edge-bench",
        "docker create --name=vllm-edge-bench --label=vllm-edge.companion=bench "
        "$(docker inspect --format '{{.Image}}' vllm-e2b)",
        "docker rm vllm-edge-bench",
        state="warn",
    ),
    "two CDI specifications": Fault(
        "runtime.cdi-conflict",
        "/etc/cdi/own.yaml",
        "remove /etc/cdi/own.yaml",
        f"mkdir --parents /etc/cdi && cp {SPECIFICATION} /etc/cdi/own.yaml",
        "rm /etc/cdi/own.yaml",
    ),
    "toolkit no longer held": make_loose("runtime.toolkit-held", "nvidia-container-toolkit"),
    "daemon.json damaged": Fault(
        "runtime.docker-config",
        DAEMON_JSON,
        "dockerd --validate",
        f"cp --preserve {DAEMON_JSON} /run/daemon.json && echo '{{' >> {DAEMON_JSON}",
        f"cp --preserve /run/daemon.json {DAEMON_JSON} && rm /run/daemon.json",
        also=frozenset({"runtime.cdi-enabled"}),
    ),
    "dpkg was cut off": Fault(
        "system.dpkg",
        "dpkg",
        "dpkg --configure -a",
        "touch /var/lib/dpkg/updates/0001",
        "rm /var/lib/dpkg/updates/0001",
    ),
    "somebody installs": Fault(
        "system.apt-lock",
        "lock-frontend",
        "Let it finish",
        f"systemd-run --quiet --unit=lab-lock python3 -c '{HOLD_LOCK}'",
        "systemctl stop lab-lock.service",
        state="warn",
    ),
}

# One of each class: driver, cards, runtime, somebody else's container, packages. `make test-all` has the others.
EACH_RUN = (
    "driver changed without a reboot",
    "GPU lost",
    "CDI specification of another driver",
    "somebody's container may lose its GPU",
    "dpkg was cut off",
)


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


@pytest.fixture(scope="module")
def healthy(controller: Controller) -> Findings:
    rc, document, output = doctor(controller, {})
    assert rc == 0, output
    return by_name(document)


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


@pytest.mark.parametrize(
    "name", [name if name in EACH_RUN else pytest.param(name, marks=pytest.mark.thorough) for name in FAULTS]
)
def test_a_fault_is_named_with_its_remedy(
    controller: Controller, machine: Machine, undisturbed: None, healthy: Findings, seen: Seen, name: str
) -> None:
    fault = FAULTS[name]
    machine.shell(fault.come)
    try:
        rc, document, output = doctor(controller, fault.variables)
    finally:
        machine.shell(fault.go)
    found = by_name(document)[fault.check]
    assert found["state"] == fault.state, found
    assert fault.evidence in found["evidence"], found
    assert fault.remedy in found["remedy"], found
    assert rc == (2 if fault.state == "fail" else 0), output[-3000:]
    moved = {
        check for check, finding in by_name(document).items() if finding["state"] not in ("ok", healthy[check]["state"])
    }
    assert fault.check in moved and moved <= fault.also | {fault.check}, {
        name: by_name(document)[name] for name in moved
    }
    seen(f" What: {name}: {fault.check}, {found['evidence']}. {found['remedy']}")


def test_a_support_report_is_fetched(
    controller: Controller, machine: Machine, undisturbed: None, tmp_path: Path
) -> None:
    """Every GPU has an engine, so CUDA is asked in the containers of the engines only, and takes no memory."""
    leftovers = "ls -d /tmp/vllm-edge-* /var/tmp/vllm-edge-* 2>/dev/null || true"
    before = machine.gpu_memory(), machine.shell(leftovers)
    played = controller.play("playbooks/doctor.yml", f"--extra-vars=support={tmp_path}")
    assert played.rc == 0 and played.changed == [], played.output[-4000:]
    path = tmp_path / f"{INVENTORY_HOST}.tar.gz"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
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
    assert (machine.gpu_memory(), machine.shell(leftovers)) == before


def test_the_next_run_makes_a_stale_specification_anew(
    controller: Controller, machine: Machine, undisturbed: None
) -> None:
    """As the toolkit leaves a headless host at boot: without the nodes of CUDA, which nobody asked for."""
    right = machine.run("cat", SPECIFICATION)
    machine.shell(
        f"rm {DROP_IN} /dev/nvidia-uvm /dev/nvidia-uvm-tools && systemctl daemon-reload && "
        "systemctl restart nvidia-cdi-refresh.service"
    )
    stale = machine.run("cat", SPECIFICATION)
    assert "/dev/nvidia-uvm" not in stale and all(f"name: {uuid}" in stale for uuid in GPUS), stale
    healed = controller.play("playbooks/host.yml", "--start-at-task=container_runtime : Gather the distribution")
    assert healed.rc == 0, healed.output[-4000:]
    assert healed.changed == [
        "container_runtime : Configure nvidia-cdi-refresh.service to create the device nodes of CUDA",
        "container_runtime : Restart nvidia-cdi-refresh.service",
    ]
    assert machine.run("cat", SPECIFICATION) == right
    assert machine.shell("stat --format=%A /dev/nvidia-uvm").strip() == "crw-rw-rw-"


def test_the_host_stage_warns_of_containers_that_may_lose_their_gpus(
    controller: Controller, machine: Machine, undisturbed: None
) -> None:
    """The warning comes before anything is changed. The engines, which have their GPUs by CDI, are not named."""
    machine.shell(START_LEGACY)
    try:
        played = controller.play("playbooks/host.yml", "--check")
    finally:
        machine.shell(END_LEGACY)
    assert played.rc == 0, played.output[-4000:]
    words = " ".join(played.output.split())
    assert f"WARNING: 'systemctl daemon-reload' may take the GPUs from {LEGACY}, which" in words, played.output
    assert "--device nvidia.com/gpu=" in words
