# SPDX-License-Identifier: Apache-2.0
"""A healthy host is found healthy; with each fault exactly its check says so, with evidence and remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.doctor import registry
from ansible.module_utils.vllm_edge.doctor.contract import STATES
from ansible.module_utils.vllm_edge.doctor.facts import TOOLKIT, Expectation, Space
from ansible.module_utils.vllm_edge.doctor.parsers import read_free_space
from ansible.module_utils.vllm_edge.gpu.owners import Owner
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import BUSES, DRIVER, ENGINES, GPUS, KERNEL, NEW_GPU, FakeHost, card, specification

Fault = tuple[str, Callable[[FakeHost], Any], dict[str, str], str, str]


def swap(host: FakeHost) -> None:
    host.gpus[0] = card(NEW_GPU, BUSES[0])
    host.write("var/run/cdi/nvidia.yaml", specification(NEW_GPU, GPUS[1]))


def lock(host: FakeHost) -> None:
    seen = (host.root / "var/lib/dpkg/lock-frontend").stat()
    device = f"{os.major(seen.st_dev):02x}:{os.minor(seen.st_dev):02x}:{seen.st_ino}"
    host.write("proc/locks", f"1: POSIX  ADVISORY  WRITE 4711 {device} 0 EOF\n")
    host.write("proc/4711/comm", "unattended-upgr\n")


def secure_boot(host: FakeHost, signer: str) -> None:
    path = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    host.write(path, b"\x06\x00\x00\x00\x01")
    host.answers["modinfo"] = Ran(0, f"{signer}\n")
    host.remove("sys/module/nvidia")
    host.gpus.clear()
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    host.answers["nvidia-smi --query-gpu"] = Ran(9, said)


WITHOUT_MODULE = dict.fromkeys(
    (
        "driver.versions",
        "gpus.answer",
        "gpus.expected",
        "gpus.holders",
        "runtime.cdi-devices",
        "topology.pcie",
        "topology.numa",
        "topology.iommu",
        "topology.peer-to-peer",
        "topology.ecc",
        "topology.power",
    ),
    "unknown",
)


def no_driver(host: FakeHost) -> None:
    for name in [
        name for name in host.packages if name.startswith(("libnvidia-ml", "libcuda", "nvidia-k", "nvidia-p"))
    ]:
        del host.packages[name]
    for name in ("libnvidia-ml", "libcuda"):
        host.remove(f"usr/lib/x86_64-linux-gnu/{name}.so.1")
    host.remove("sys/module/nvidia")
    host.gpus.clear()
    host.answers["nvidia-smi"] = Ran(127, "", "nvidia-smi: not found")


WITHOUT_DRIVER = {
    **WITHOUT_MODULE,
    "driver.installed": "fail",
    "driver.one-source": "unknown",
    "driver.held": "unknown",
    "driver.module-loaded": "unknown",
    "driver.cuda": "unknown",
    "driver.next-kernel": "unknown",
    "driver.persistence": "unknown",
    "runtime.cdi-current": "unknown",
}

FAULTS: tuple[Fault, ...] = (
    (
        "RHEL family",
        lambda host: host.write("etc/os-release", 'PRETTY_NAME="Rocky Linux 9"\nID="rocky"\nVERSION_ID="9.5"\n'),
        {"system.distribution": "fail"},
        "Rocky Linux 9",
        "RHEL family is not supported",
    ),
    (
        "older Ubuntu",
        lambda host: host.write("etc/os-release", 'PRETTY_NAME="Ubuntu 22.04"\nID=ubuntu\nVERSION_ID="22.04"\n'),
        {"system.distribution": "fail"},
        "Ubuntu 22.04",
        "Ubuntu 24.04",
    ),
    (
        "dpkg cut off",
        lambda host: host.write("var/lib/dpkg/updates/0001"),
        {"system.dpkg": "fail"},
        "cut off",
        "dpkg --configure -a",
    ),
    (
        "a package half installed",
        lambda host: host.packages.update({"libc6": ("iU", "2.41-12")}),
        {"system.dpkg": "fail"},
        "libc6",
        "dpkg --audit",
    ),
    (
        "a driver package half installed",
        lambda host: host.packages.update({"nvidia-kernel-open-dkms": ("iF", f"{DRIVER}-1")}),
        {"system.dpkg": "fail", "driver.half-installed": "fail"},
        "nvidia-kernel-open-dkms",
        "make.log",
    ),
    ("apt locked", lock, {"system.apt-lock": "warn"}, "unattended-upgr (pid 4711)", "Let it finish"),
    (
        "clock adrift",
        lambda host: host.answers.update(timedatectl=Ran(0, "no\n")),
        {"system.time": "warn"},
        "not synchronised",
        "set-ntp",
    ),
    (
        "few files",
        lambda host: host.answers.update(
            {"systemctl show --property=LoadState,LimitNOFILE": Ran(0, "LoadState=loaded\nLimitNOFILE=1024\n")}
        ),
        {"system.file-limits": "warn"},
        "1024",
        "LimitNOFILE",
    ),
    ("no driver", no_driver, WITHOUT_DRIVER, "no package of a driver", "playbooks/host.yml"),
    (
        "a .run installer",
        lambda host: host.write("usr/bin/nvidia-uninstall"),
        {"driver.one-source": "fail"},
        "/usr/bin/nvidia-uninstall",
        "files of both",
    ),
    (
        "two sources",
        lambda host: host.sources.update(libcuda1="http://deb.example.org/debian trixie/non-free amd64 Packages"),
        {"driver.one-source": "fail"},
        "from Debian: libcuda1; from NVIDIA: libnvidia-ml1",
        "apt-get purge",
    ),
    (
        "two branches",
        lambda host: host.packages.update({"libcuda1": ("hi", "590.48.01-1")}),
        {"driver.one-source": "fail"},
        "branch 590: libcuda1",
        "one branch",
    ),
    (
        "offered by nobody",
        lambda host: host.sources.update(libcuda1="/var/lib/dpkg/status"),
        {"driver.one-source": "warn"},
        "libcuda1",
        "gets no updates",
    ),
    (
        "not held",
        lambda host: host.packages.update({"libcuda1": ("ii", f"{DRIVER}-1")}),
        {"driver.held": "warn"},
        "libcuda1",
        "apt-mark hold",
    ),
    (
        "nouveau",
        lambda host: host.write("sys/module/nouveau/version"),
        {"driver.nouveau": "fail"},
        "nouveau",
        "Reboot",
    ),
    (
        "library newer than the module",
        lambda host: host.module("570.211.01"),
        {"driver.versions": "fail"},
        f"570.211.01 and libcuda.so.1 is {DRIVER}",
        "allow_reboot=true",
    ),
    (
        "an image too new for the driver",
        lambda host: host.image(cuda="14.0.1", driver_branch="615"),
        {"driver.cuda": "fail"},
        f"vllm-edge:1 is made with CUDA 14.0.1, which needs a driver of branch 615 or newer, and the host has {DRIVER}",
        "Set nvidia_driver_branch to 615 or newer and run 'ansible-playbook playbooks/driver_upgrade.yml', or take an "
        "image with an older CUDA",
    ),
    (
        "a driver that became too old for the image",
        lambda host: [
            host.module("570.211.01"),
            host.library("570.211.01"),
            host.write("var/run/cdi/nvidia.yaml", specification(*GPUS, driver="570.211.01")),
        ],
        {"driver.cuda": "fail"},
        "CUDA 13.0.2, which needs a driver of branch 580 or newer, and the host has 570.211.01",
        "playbooks/driver_upgrade.yml",
    ),
    (
        "Secure Boot without a signature",
        lambda host: secure_boot(host, ""),
        {**WITHOUT_MODULE, "driver.module-loaded": "fail", "driver.secure-boot": "fail"},
        "no signature",
        "mokutil",
    ),
    (
        "Secure Boot with a key that is not enrolled",
        lambda host: secure_boot(host, "DKMS module signing key"),
        {**WITHOUT_MODULE, "driver.module-loaded": "fail", "driver.secure-boot": "warn"},
        "DKMS module signing key",
        "mokutil --test-key",
    ),
    (
        "a kernel without a module runs",
        lambda host: [
            host.kernel(KERNEL, module=False),
            host.remove("sys/module/nvidia"),
            host.gpus.clear(),
            host.answers.update({"nvidia-smi --query-gpu": Ran(9, "couldn't communicate with the NVIDIA driver")}),
        ],
        {**WITHOUT_MODULE, "driver.module-loaded": "fail", "driver.next-kernel": "fail"},
        f"there is none for the running kernel {KERNEL}",
        "headers or the prebuilt modules",
    ),
    (
        "a newer kernel without a module",
        lambda host: host.kernel("6.12.63+deb13-amd64", module=False),
        {"driver.next-kernel": "warn"},
        f"6.12.63+deb13-amd64, has no module; {KERNEL} runs",
        "Before the next reboot",
    ),
    (
        "persistence off",
        lambda host: [
            host.unit("nvidia-persistenced.service", ActiveState="inactive"),
            *(gpu.update(persistence_mode="Disabled") for gpu in host.gpus),
        ],
        {"driver.persistence": "warn"},
        "does not run",
        "systemctl enable --now nvidia-persistenced.service",
    ),
    (
        "a GPU that does not answer",
        lambda host: [host.gpus.pop(), host.answers.update({"nvidia-smi topo": Ran(0, "")})],
        {"gpus.present": "fail", "runtime.cdi-devices": "warn"},
        f"silent: {BUSES[1]}",
        "journalctl -k",
    ),
    (
        "a lost GPU",
        lambda host: host.answers.update(
            {
                "nvidia-smi --query-gpu=uuid,name": Ran(
                    15,
                    ", ".join(host.gpus[0][key] for key in list(host.gpus[0])[:12])
                    + "\nUnable to determine the device handle for GPU0000:31:00.0: GPU is lost. Reboot the system\n",
                )
            }
        ),
        {"gpus.present": "fail", "gpus.answer": "fail", "runtime.cdi-devices": "warn"},
        "GPU is lost",
        "Xid 79",
    ),
    (
        "a card swapped",
        swap,
        {"gpus.expected": "fail"},
        f"{GPUS[0]} (engine e2b); there without being expected",
        "gpu_uuids",
    ),
    (
        "Docker absent",
        lambda host: host.answers.update({"dockerd --version": Ran(127, "")}),
        {
            "runtime.docker-installed": "fail",
            "runtime.docker-version": "unknown",
            "runtime.docker-running": "unknown",
            "runtime.cdi-enabled": "unknown",
            "runtime.gpu-access": "unknown",
        },
        "no dockerd",
        "installs it",
    ),
    (
        "Docker too old",
        lambda host: host.answers.update({"dockerd --version": Ran(0, "Docker version 20.10.24, build 297e128")}),
        {"runtime.docker-version": "fail", "runtime.cdi-enabled": "unknown"},
        "20.10.24 does not know CDI",
        "Docker's repository",
    ),
    (
        "Docker stopped",
        lambda host: host.unit("docker.service", ActiveState="failed"),
        {"runtime.docker-running": "fail", "runtime.gpu-access": "unknown"},
        "failed",
        "systemctl start docker.service",
    ),
    (
        "Docker not at boot",
        lambda host: host.unit("docker.service", UnitFileState="disabled"),
        {"runtime.docker-running": "warn"},
        "does not start at boot",
        "systemctl enable docker.service",
    ),
    (
        "daemon.json broken",
        lambda host: host.write("etc/docker/daemon.json", '{"features": {"cdi": true},}'),
        {"runtime.docker-config": "fail", "runtime.cdi-enabled": "fail"},
        "is no JSON",
        "dockerd --validate",
    ),
    (
        "CDI off",
        lambda host: host.write("etc/docker/daemon.json", "{}"),
        {"runtime.cdi-enabled": "fail"},
        "the default is off before 28.2",
        '"cdi": true',
    ),
    (
        "toolkit known to be bad",
        lambda host: host.packages.update({name: ("hi", "1.19.1-1") for name in TOOLKIT}),
        {"runtime.toolkit": "warn"},
        "toolkit#1967",
        "container_runtime_toolkit_version",
    ),
    (
        "toolkit without a refresh unit",
        lambda host: host.packages.update({name: ("hi", "1.17.8-1") for name in TOOLKIT}),
        {"runtime.toolkit": "warn"},
        "that came with 1.18",
        "newer release",
    ),
    (
        "toolkit of two versions",
        lambda host: host.packages.update({"libnvidia-container1": ("hi", "1.17.8-1")}),
        {"runtime.toolkit": "fail"},
        "libnvidia-container1 1.17.8",
        "one version",
    ),
    (
        "toolkit not held",
        lambda host: host.packages.update({"libnvidia-container1": ("ii", "1.18.2-1")}),
        {"runtime.toolkit-held": "warn"},
        "libnvidia-container1",
        "apt-mark hold",
    ),
    (
        "nobody refreshes CDI",
        lambda host: host.unit("nvidia-cdi-refresh.path", UnitFileState="disabled", ActiveState="inactive"),
        {"runtime.cdi-refresh": "warn"},
        "inactive",
        "systemctl enable --now",
    ),
    (
        "CDI stale",
        lambda host: host.write("var/run/cdi/nvidia.yaml", specification(*GPUS, driver="570.211.01")),
        {"runtime.cdi-current": "fail"},
        f"/var/run/cdi/nvidia.yaml was made for driver 570.211.01, the host has {DRIVER}",
        "nvidia-cdi-refresh.service",
    ),
    (
        "two CDI specifications",
        lambda host: host.write("etc/cdi/nvidia.yaml", specification("0", *GPUS)),
        {"runtime.cdi-conflict": "fail"},
        "/etc/cdi/nvidia.yaml and /var/run/cdi/nvidia.yaml both define",
        "remove /etc/cdi/nvidia.yaml",
    ),
    (
        "a GPU without a CDI device",
        lambda host: host.write("var/run/cdi/nvidia.yaml", specification("0", GPUS[0])),
        {"runtime.cdi-devices": "fail"},
        GPUS[1],
        "nvidia-ctk cdi list",
    ),
    (
        "no CDI specification",
        lambda host: host.remove("var/run/cdi/nvidia.yaml"),
        {"runtime.cdi-devices": "fail", "runtime.cdi-current": "unknown", "runtime.cdi-conflict": "unknown"},
        "no CDI specification",
        "nvidia-cdi-refresh",
    ),
    (
        "an engine's container lost its GPU",
        lambda host: host.container("vllm-e2b", 4001, "e2b", denied=("nvidia0",)),
        {"runtime.gpu-access": "fail"},
        "container vllm-e2b may not use /dev/nvidia0, which it has",
        "'systemctl restart vllm-e2b.service' starts the engine anew.",
    ),
    (
        "somebody else's container lost its GPU",
        lambda host: host.container("trainer", 4002, denied=("nvidia0", "nvidiactl")),
        {"runtime.gpu-access": "warn"},
        "container trainer may not use /dev/nvidia0, /dev/nvidiactl",
        "the owner does ('docker restart trainer')",
    ),
    (
        "no engine's files are readable",
        lambda host: host.write("etc/vllm-edge/engines/e2b/docker-create", ""),
        {
            "serving.configuration": "fail",
            "serving.units": "unknown",
            "serving.ports": "unknown",
            "serving.boot": "unknown",
        },
        "docker-create",
        "site.yml",
    ),
    (
        "an engine failed",
        lambda host: [host.unit("vllm-e2b.service", ActiveState="failed", Result="exit-code"), host.listen()],
        {"serving.units": "fail"},
        "vllm-e2b.service failed (exit-code)",
        "vllm-edge explain e2b",
    ),
    (
        "an engine that is started again and again",
        lambda host: [
            host.unit("vllm-e2b.service", ActiveState="activating", SubState="auto-restart", Result="exit-code"),
            host.listen(),
        ],
        {"serving.units": "fail"},
        "vllm-e2b.service activating (exit-code)",
        "vllm-edge explain e2b",
    ),
    (
        "an engine stopped, its port taken",
        lambda host: host.unit("vllm-e2b.service", ActiveState="inactive"),
        {"serving.units": "warn", "serving.ports": "fail"},
        "inactive",
        "systemctl start",
    ),
    ("nobody listens", lambda host: host.listen(), {"serving.ports": "fail"}, "e2b on 8070", "docker ps"),
    (
        "not at boot",
        lambda host: host.unit("vllm-edge.target", UnitFileState="disabled"),
        {"serving.boot": "warn"},
        "not enabled",
        "systemctl enable vllm-edge.target",
    ),
    (
        "a narrow link",
        lambda host: host.gpus[1].update({"pcie.link.width.current": "8"}),
        {"topology.pcie": "warn"},
        f"{BUSES[1]} has 8 of 16 lanes",
        "Reseat",
    ),
    (
        "a slow link under load",
        lambda host: host.gpus[1].update({"pcie.link.gen.current": "3", "pstate": "P0"}),
        {"topology.pcie": "warn"},
        "generation 3 of 4",
        "Reseat",
    ),
    (
        "uncorrected errors",
        lambda host: host.gpus[0].update({"ecc.errors.uncorrected.volatile.total": "3"}),
        {"topology.ecc": "warn"},
        "3 uncorrected errors",
        "--gpu-reset",
    ),
    (
        "a row that cannot be remapped",
        lambda host: host.gpus[0].update({"remapped_rows.failure": "Yes"}),
        {"topology.ecc": "fail"},
        "remapping a row failed",
        "replaced",
    ),
    (
        "Xid 79",
        lambda host: host.answers.update(
            {"journalctl --dmesg": Ran(0, "NVRM: Xid (PCI:0000:31:00): 79, GPU has fallen off the bus.\n")}
        ),
        {"topology.xid": "fail"},
        "Xid 79 (fallen off the bus) of 0000:31:00",
        "reboot",
    ),
    (
        "Xid 31",
        lambda host: host.answers.update(
            {"journalctl --dmesg": Ran(0, "NVRM: Xid (PCI:0000:31:00): 31, pid=7, name=python3, MMU Fault\n" * 2)}
        ),
        {"topology.xid": "warn"},
        "Xid 31 of 0000:31:00, 2 times",
        "crashed",
    ),
    (
        "too hot",
        lambda host: host.gpus[0].update({"clocks_event_reasons.active": "0x0000000000000040"}),
        {"topology.power": "warn"},
        "hardware thermal slowdown",
        "air flow",
    ),
    (
        "little shared memory",
        lambda host: host.engine("31b", 8050, GPUS, shm=""),
        {"topology.shared-memory": "warn"},
        "31b",
        "vllm_engine_shm_size",
    ),
)


# What looks like a fault and is none: the check, and what it says.
FINE: tuple[tuple[str, Callable[[FakeHost], Any], str, str], ...] = (
    (
        "a helper of another branch",
        lambda host: host.packages.update({"nvidia-persistenced": ("ii", "535.171.04-1")}),
        "driver.one-source",
        "one source: NVIDIA",
    ),
    (
        "CDI by Docker's default",
        lambda host: [
            host.remove("etc/docker/daemon.json"),
            host.answers.update({"dockerd --version": Ran(0, "Docker version 28.2.0, build 1")}),
        ],
        "runtime.cdi-enabled",
        "by CDI",
    ),
    (
        "an engine that loads",
        lambda host: [host.unit("vllm-e2b.service", ActiveState="activating"), host.listen()],
        "serving.units",
        "vllm-e2b.service is activating",
    ),
    (
        "a module that is loaded and no longer on disk",
        lambda host: host.kernel(KERNEL, module=False),
        "driver.next-kernel",
        "has no module of the driver on disk",
    ),
    (
        "not started by UEFI",
        lambda host: host.answers.update(modinfo=Ran(1)),
        "driver.secure-boot",
        "not started by UEFI",
    ),
)


@pytest.mark.parametrize(("what", "changes", "check", "evidence"), FINE, ids=[case[0] for case in FINE])
def test_what_only_looks_like_a_fault(
    host: FakeHost, what: str, changes: Callable[[FakeHost], Any], check: str, evidence: str
) -> None:
    changes(host)
    assert host.not_ok() == {}
    assert evidence in host.checks()[check]["evidence"]


def test_a_healthy_host_has_no_finding(host: FakeHost) -> None:
    found = host.examine()
    assert host.not_ok() == {}
    assert (found["exit_status"], found["summary"]["ok"]) == (0, len(registry.CHECKS))
    assert found["recommendation"] == {"environment": {}, "arguments": [], "reasons": []}


@pytest.mark.parametrize(
    ("what", "breaks", "expected", "evidence", "remedy"), FAULTS, ids=[fault[0] for fault in FAULTS]
)
def test_each_fault_is_named(
    host: FakeHost, what: str, breaks: Callable[[FakeHost], Any], expected: dict[str, str], evidence: str, remedy: str
) -> None:
    breaks(host)
    assert host.not_ok() == expected
    checks = host.checks()
    wrong = [checks[name] for name, state in expected.items() if state in ("warn", "fail")]
    assert any(evidence in check["evidence"] and remedy in check["remedy"] for check in wrong), wrong
    assert host.examine()["exit_status"] == (2 if "fail" in expected.values() else 1)


def test_faults_cover_every_check_that_can_fail(host: FakeHost) -> None:
    told = {name for fault in FAULTS for name, state in fault[2].items() if state in ("warn", "fail")}
    elsewhere = {
        "topology.numa",
        "topology.iommu",
        "storage.root",
        "storage.images",
        "storage.data",
        "serving.switch",
    }
    advice = {"gpus.holders", "topology.peer-to-peer"}
    assert told | elsewhere | advice == set(registry.CHECKS)


def test_names_are_stable_and_in_groups() -> None:
    groups = [name.split(".")[0] for name in registry.CHECKS]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index), "checks of a group stand together"


def test_a_bare_host_is_read_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    host = FakeHost(tmp_path / "bare", packages={"libc6": ("ii", "2.41-12")})
    host.answers = {"nvidia-smi": Ran(127, "", "not found")}
    found = host.checks()
    assert {check["state"] for check in found.values()} <= set(STATES)
    assert {name for name, check in found.items() if check["state"] == "fail"} == {
        "system.distribution",
        "driver.installed",
        "gpus.present",
        "runtime.docker-installed",
        "runtime.toolkit",
        "topology.shared-memory",
    }
    for name in ("driver.held", "driver.cuda"):
        assert found[name]["evidence"] == "not judged: no driver is installed"
    assert host.examine()["exit_status"] == 2


def test_what_may_not_be_read_is_unknown_and_no_fault(host: FakeHost) -> None:
    host.answers["journalctl --dmesg"] = Ran(
        0, "", "Hint: You are currently not seeing messages from other users and the system."
    )
    for bridge in host.root.glob("sys/devices/*/*"):
        (bridge / "config").write_bytes(bytes(64))
    found = host.examine()
    assert host.not_ok() == {"topology.xid": "unknown", "topology.iommu": "unknown"}
    assert (found["exit_status"], found["summary"]["unknown"]) == (0, 2)


def test_the_inventory_adds_what_it_expects(host: FakeHost) -> None:
    checks = host.checks(Expectation((NEW_GPU,), gpus=4))
    assert "2 GPUs are there, the profile needs 4" in checks["gpus.present"]["evidence"]
    assert f"{NEW_GPU} (gpu_uuids of the inventory)" in checks["gpus.expected"]["evidence"]


def test_an_engine_and_somebody_else_lost_their_gpus(host: FakeHost) -> None:
    host.container("vllm-e2b", 4001, "e2b", denied=("nvidia0",))
    host.container("trainer", 4002, denied=("nvidia0",))
    check = host.checks()["runtime.gpu-access"]
    assert check["state"] == "fail"
    for words in ("systemctl restart vllm-e2b.service", "docker restart trainer", "--device nvidia.com/gpu="):
        assert words in check["remedy"]


def test_which_containers_were_asked_for_their_gpus(host: FakeHost) -> None:
    assert host.checks()["runtime.gpu-access"]["evidence"] == "those that have GPUs may use them: trainer, vllm-e2b"


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        (
            lambda host: host.answers.update({"docker ps": Ran(1, "", "permission denied")}),
            "docker ps: permission denied",
        ),
        (lambda host: host.container("trainer", 4002, paused=True), "1 of 2 containers with GPUs could not be asked"),
    ],
)
def test_containers_that_cannot_be_asked_are_no_fault(
    host: FakeHost, changes: Callable[[FakeHost], Any], evidence: str
) -> None:
    changes(host)
    assert host.not_ok() == {"runtime.gpu-access": "unknown"}
    assert evidence in host.checks()["runtime.gpu-access"]["evidence"]


def test_others_on_a_gpu_are_advice(host: FakeHost) -> None:
    host.answers["nvidia-smi --query-compute-apps"] = Ran(0, f"{GPUS[1]}, 4242\n")
    host.write("proc/4242/comm", "python3\n")
    check = host.checks()["gpus.holders"]
    assert check["state"] == "ok" and f"pid 4242 (python3; in no container) on {GPUS[1]}" in check["evidence"]


@pytest.mark.parametrize(("user", "told"), [(ENGINES, "nobody but our engines"), (1000, "container abc123")])
def test_whose_a_container_is_where_docker_cannot_be_asked(host: FakeHost, user: int, told: str) -> None:
    host.owner = Owner("unknown", container="abc123", reason="the Python package docker is not installed here")
    host.answers["nvidia-smi --query-compute-apps"] = Ran(0, f"{GPUS[1]}, 4242\n")
    host.write("proc/4242/status", f"Name:\tVLLM::Worker\nUid:\t{user}\t{user}\t{user}\t{user}\n")
    assert told in host.checks()["gpus.holders"]["evidence"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "not judged: no image is recorded on this host"),
        ('{"name": "vllm-edge:1"}', "not judged: the record of vllm-edge:1 names no CUDA"),
        ('{"name": "vllm-edge:1", "cuda": "", "driver_branch": ""}', "not judged: the record of vllm-edge:1 names no"),
        ('{"name": "vllm-edge:1", "cuda": "14.0.1", "driver_branch": ""}', "CUDA 14.0.1, and vllm_image_cuda_floors"),
        ('{"name": ', "image.json is no JSON"),
        ("[]", "image.json holds no JSON object"),
    ],
)
def test_an_image_whose_cuda_nobody_knows(host: FakeHost, text: str | None, told: str) -> None:
    host.remove("var/lib/vllm-edge/image.json")
    if text is not None:
        host.write("var/lib/vllm-edge/image.json", text)
    assert host.not_ok() == {"driver.cuda": "unknown"}
    assert told in host.checks()["driver.cuda"]["evidence"]


def test_a_driver_that_is_new_enough_for_the_image(host: FakeHost) -> None:
    check = host.checks()["driver.cuda"]
    assert check["evidence"] == f"vllm-edge:1 is made with CUDA 13.0.2, and driver {DRIVER} is new enough for it"
    # A branch far below whose digits would come later as text.
    host.image(cuda="12.9.1", driver_branch="99")
    assert host.checks()["driver.cuda"]["state"] == "ok"


def test_a_driver_whose_libraries_are_gone_is_one_fault(host: FakeHost) -> None:
    host.image(cuda="14.0.1", driver_branch="615")
    for name in ("libnvidia-ml", "libcuda"):
        host.remove(f"usr/lib/x86_64-linux-gnu/{name}.so.1")
    checks = host.checks()
    assert [name for name, check in checks.items() if check["state"] == "fail"] == ["driver.installed"]
    assert checks["driver.cuda"]["evidence"] == "not judged: the driver's libraries are not there"


def test_a_gpu_that_is_kept_for_a_virtual_machine_is_not_missed(host: FakeHost) -> None:
    host.gpus.pop()
    host.answers["nvidia-smi topo"] = Ran(0, "")
    host.write("var/run/cdi/nvidia.yaml", specification("0", GPUS[0]))
    assert host.not_ok() == {"gpus.present": "fail"}
    (host.root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    host.link(f"sys/bus/pci/devices/{BUSES[1]}/driver", "../../../../bus/pci/drivers/vfio-pci")
    assert host.not_ok() == {}
    assert f"kept for virtual machines (vfio-pci): {BUSES[1]}" in host.checks()["gpus.present"]["evidence"]


def test_prebuilt_modules_are_held_too(host: FakeHost) -> None:
    host.packages["linux-modules-nvidia-580-server-open-generic"] = ("hi", "6.8.0-87.88")
    assert host.not_ok() == {}
    host.packages["linux-modules-nvidia-580-server-open-generic"] = ("ii", "6.8.0-87.88")
    assert host.not_ok() == {"driver.held": "warn"}


def test_a_running_switch_moves_units_and_ports(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible.module_utils.vllm_edge.doctor import reading

    monkeypatch.setattr(reading, "read_switches", lambda paths: ({"switch": {"generation": 2}}, []))
    host.unit("vllm-e2b.service", ActiveState="inactive")
    assert host.not_ok() == {"serving.units": "unknown", "serving.ports": "unknown"}


@pytest.mark.parametrize("name", ["nvidia", "nvidia-current"])
def test_the_signer_of_the_module_under_either_name(host: FakeHost, name: str) -> None:
    secure_boot(host, "x")
    del host.answers["modinfo"]
    host.answers |= {
        "modinfo -F signer nvidia": Ran(1, "", "modinfo: ERROR: Module nvidia not found."),
        f"modinfo -F signer {name}": Ran(0, "Example key\n"),
    }
    assert "signed by Example key" in host.checks()["driver.secure-boot"]["evidence"]


@pytest.mark.parametrize(
    ("free_mib", "inodes", "state"), [(500, None, "fail"), (3000, None, "warn"), (9000, 50, "warn"), (9000, None, "ok")]
)
def test_room(host: FakeHost, free_mib: int, inodes: int | None, state: str) -> None:
    host.write("etc/docker/daemon.json", '{"features": {"cdi": true}, "data-root": "/data/docker"}')
    host.free_bytes, host.free_inodes = free_mib * 1024**2, inodes
    checks = host.checks(Expectation(data="/srv/vllm"))
    found = [checks[f"storage.{name}"] for name in ("root", "images", "data")]
    assert [check["state"] for check in found] == [state] * 3
    assert [check["evidence"].split()[0] for check in found] == ["/.", "/data/docker", "/srv/vllm"]


def test_room_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    found = read_free_space("x", tmp_path / "not" / "yet")
    assert isinstance(found, Space)
    seen = os.statvfs(tmp_path)
    assert abs(found.free_bytes - seen.f_bavail * seen.f_frsize) < 1024**3
    assert found.path == str(tmp_path / "not" / "yet")


def test_a_switch_that_was_killed(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    from ansible.module_utils.vllm_edge.doctor import reading

    killed = {"unfinished_switch": {"message": "ended in phase stop", "id": "1"}}
    monkeypatch.setattr(reading, "read_switches", lambda paths: (killed, []))
    check = host.checks()["serving.switch"]
    assert (check["state"], "ended in phase stop" in check["evidence"]) == ("fail", True)
    assert "vllm-edge recover" in check["remedy"]


def test_the_host_is_only_asked(host: FakeHost) -> None:
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    host.examine()
    assert {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()} == before
    verbs = {" ".join(line.split()[:2]) for line in host.asked if line.startswith("systemctl")}
    assert verbs == {"systemctl show"}
