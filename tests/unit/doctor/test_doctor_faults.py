# SPDX-License-Identifier: Apache-2.0
"""A healthy host is found healthy; with each fault exactly its check says so, with evidence and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.doctor import registry
from ansible.module_utils.vllm_edge.doctor.contract import STATES
from ansible.module_utils.vllm_edge.facts import reader
from ansible.module_utils.vllm_edge.facts.model import Expectation
from ansible.module_utils.vllm_edge.gpu.owners import Owner
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import BUSES, ENGINES, GPUS, NEW_GPU, FakeHost, specification
from faults import (
    BROKEN,
    FINE,
    Change,
    answer,
    gpu,
    held_kernel,
    kernel_log,
    secure_boot,
    several,
    silent_gpu,
    slots,
    write,
)


@pytest.mark.parametrize(("changes", "check", "evidence"), FINE, ids=[check for _, check, _ in FINE])
def test_what_only_looks_like_a_fault(host: FakeHost, changes: Change, check: str, evidence: str) -> None:
    changes(host)
    assert host.not_ok() == {}
    assert evidence in host.checks()[check]["evidence"]


def test_a_healthy_host_has_no_finding(host: FakeHost) -> None:
    found = host.examine()
    assert host.not_ok() == {}
    assert (found["exit_status"], found["summary"]["ok"]) == (0, len(registry.CHECKS))
    assert found["recommendation"] == {"environment": {}, "arguments": [], "reasons": []}
    assert host.checks()["gpus.present"]["evidence"] == "2 of NVIDIA L4"
    assert "nvidia-smi names 2 GPUs" in host.checks()["gpus.answer"]["evidence"]


@pytest.mark.parametrize(
    ("breaks", "expected", "evidence", "remedy"), BROKEN, ids=[f"{next(iter(row[1]))}: {row[2]}" for row in BROKEN]
)
def test_each_fault_is_named(
    host: FakeHost, breaks: Change, expected: dict[str, str], evidence: str, remedy: str
) -> None:
    breaks(host)
    assert host.not_ok() == expected
    checks = host.checks()
    wrong = [checks[name] for name, state in expected.items() if state in ("warn", "fail")]
    assert any(evidence in check["evidence"] and remedy in check["remedy"] for check in wrong), wrong
    assert host.examine()["exit_status"] == (2 if "fail" in expected.values() else 1)


def test_faults_cover_every_check_that_can_fail_and_checks_of_a_group_stand_together() -> None:
    told = {name for _, states, *_ in BROKEN for name, state in states.items() if state in ("warn", "fail")}
    elsewhere = {"topology.numa", "topology.iommu", "serving.switch"} | {
        f"storage.{place}" for place in ("root", "images", "data", "state", "boot")
    }
    advice = {"gpus.holders", "topology.peer-to-peer"}
    assert told | elsewhere | advice == set(registry.CHECKS)
    groups = [name.split(".")[0] for name in registry.CHECKS]
    assert groups == sorted(groups, key=list(dict.fromkeys(groups)).index)


def test_a_bare_host_is_read_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    host = FakeHost(tmp_path / "bare", packages={"libc6": ("ii", "2.41-12")})
    host.answers = {"nvidia-smi": Ran(127, "", "not found")}
    found = host.checks()
    assert {check["state"] for check in found.values()} <= set(STATES)
    assert {name for name, check in found.items() if check["state"] == "fail"} == {
        *("system.distribution", "driver.installed", "gpus.present", "runtime.docker-installed"),
        *("runtime.toolkit", "topology.shared-memory"),
    }
    for name in ("driver.held", "driver.cuda"):
        assert found[name]["evidence"] == "not judged: no driver is installed"
    assert host.examine()["exit_status"] == 2


def test_what_may_not_be_read_is_unknown_and_no_fault(host: FakeHost) -> None:
    host.answers["journalctl --dmesg"] = Ran(
        0, "", "Hint: You are currently not seeing messages from other users and the system."
    )
    host.answers["docker ps"] = Ran(1, "", "permission denied")
    for bridge in host.root.glob("sys/devices/*/*"):
        (bridge / "config").write_bytes(bytes(64))
    found = host.examine()
    unread = ("topology.xid", "topology.iommu", "runtime.gpu-access", "runtime.leftovers")
    assert host.not_ok() == dict.fromkeys(unread, "unknown")
    assert (found["exit_status"], found["summary"]["unknown"]) == (0, 4)
    assert "docker ps: permission denied" in host.checks()["runtime.gpu-access"]["evidence"]


SMI = "nvidia-smi --query-compute-apps"


@pytest.mark.parametrize(
    ("hides", "check", "why"),
    [
        (answer("journalctl --dmesg", "-- No entries --\n", 1), "topology.xid", "does not have the message"),
        (answer("journalctl --dmesg", ""), "topology.xid", "an older Xid may be gone"),
        (gpu(1, gpu_recovery_action="[N/A]"), "topology.recovery", "does not name a GPU recovery action"),
        (lambda host: [one.pop("gpu_recovery_action") for one in host.gpus], "topology.recovery", "before 565"),
        (gpu(1, compute_mode="[N/A]"), "gpus.mode", "which compute mode"),
        (gpu(1, ecc__errors__uncorrected__volatile__total="[N/A]"), "topology.ecc", GPUS[1]),
        (gpu(0, clocks_event_reasons__active="[N/A]"), "topology.power", GPUS[0]),
        (gpu(1, pcie__link__width__current="[N/A]"), "topology.pcie", GPUS[1]),
        (answer("nvidia-smi topo", " \tGPU0\tGPU1\n GPU0\tX\tU\n GPU1\tU\tX\n"), "topology.peer-to-peer", "(U)"),
        (answer(SMI, "Failed to initialize NVML", 18), "gpus.holders", "Failed to initialize NVML"),
        (answer(SMI, f"{GPUS[0]}, [N/A]\n"), "gpus.holders", "does not list the processes"),
        (write("var/lib/vllm-edge/gpu-slots.json", "{"), "gpus.expected", "is not a record of GPU slots"),
        (
            several(held_kernel("1"), answer("apt-cache show --no-all-versions linux-image-generic", "")),
            "driver.kernel-updates",
            "apt does not know linux-image-generic",
        ),
        (write("sys/firmware/efi/config_table"), "driver.secure-boot", "efivars is not mounted"),
    ],
)
def test_nothing_to_look_into_is_unknown(host: FakeHost, hides: Change, check: str, why: str) -> None:
    hides(host)
    assert host.not_ok() == {check: "unknown"}
    assert why in host.checks()[check]["evidence"]


def test_an_xid_of_a_gpu_without_a_slot_is_a_warning(host: FakeHost) -> None:
    slots(GPUS[0], kernel_log("79, GPU is gone."))(host)
    assert host.checks()["topology.xid"]["state"] == "warn"
    assert "No slot of this host has that GPU" in host.checks()["topology.xid"]["remedy"]
    slots(GPUS[1])(host)
    assert host.checks()["topology.xid"]["state"] == "fail"


def test_the_inventory_adds_what_it_expects(host: FakeHost) -> None:
    checks = host.checks(Expectation((NEW_GPU,), gpus=4))
    assert "2 GPUs are there, the profile needs 4" in checks["gpus.present"]["evidence"]
    assert f"{NEW_GPU} (gpu_uuids of the inventory)" in checks["gpus.expected"]["evidence"]


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


def test_a_driver_whose_libraries_are_gone_is_one_fault(host: FakeHost) -> None:
    host.image(cuda="14.0.1", driver_branch="615")
    for name in ("libnvidia-ml", "libcuda"):
        host.remove(f"usr/lib/x86_64-linux-gnu/{name}.so.1")
    checks = host.checks()
    assert [name for name, check in checks.items() if check["state"] == "fail"] == ["driver.installed"]
    assert checks["driver.cuda"]["evidence"] == "not judged: the driver's libraries are not there"


def test_a_gpu_that_is_kept_for_a_virtual_machine_is_not_missed(host: FakeHost) -> None:
    silent_gpu(host)
    host.write("var/run/cdi/nvidia.yaml", specification("0", GPUS[0]))
    assert host.not_ok() == {"gpus.present": "fail"}
    (host.root / "sys/bus/pci/drivers/vfio-pci").mkdir(parents=True)
    host.link(f"sys/bus/pci/devices/{BUSES[1]}/driver", "../../../../bus/pci/drivers/vfio-pci")
    assert host.not_ok() == {}
    assert f"kept for virtual machines (vfio-pci): {BUSES[1]}" in host.checks()["gpus.present"]["evidence"]


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What is known of the host's switches."""
    found: dict[str, object] = {}
    monkeypatch.setattr(reader, "read_switches", lambda paths: (found, []))
    return found


def test_a_running_switch_is_no_fault_and_a_killed_one_is(host: FakeHost, switches: dict[str, object]) -> None:
    switches["unfinished_switch"] = {"message": "ended in phase stop", "id": "1"}
    check = host.checks()["serving.switch"]
    assert (check["state"], "ended in phase stop" in check["evidence"]) == ("fail", True)
    assert "vllm-edge recover" in check["remedy"]
    switches |= {"switch": {"generation": 2}, "unfinished_switch": None}
    host.unit("vllm-e2b.service", ActiveState="inactive")
    moved = ("serving.units", "serving.sockets", "serving.libraries", "serving.profile", "gateway.maps")
    assert host.not_ok() == dict.fromkeys(moved, "unknown")


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
    ("free_mib", "inodes", "state"),
    [(500, None, "fail"), (3000, None, "warn"), (9000, 50, "fail"), (9000, 5000, "warn"), (9000, None, "ok")],
)
def test_room(host: FakeHost, free_mib: int, inodes: int | None, state: str) -> None:
    host.write("etc/docker/daemon.json", '{"features": {"cdi": true}, "data-root": "/data/docker"}')
    host.free_bytes, host.free_inodes = free_mib * 1024**2, inodes
    checks = host.checks(Expectation(data="/srv/vllm"))
    found = [checks[f"storage.{name}"] for name in ("root", "images", "data")]
    assert [check["state"] for check in found] == [state] * 3
    named = zip(("/var/log", "/data/docker", "/srv/vllm"), found, strict=True)
    assert state == "ok" or [path for path, check in named if path not in check["evidence"]] == []


@pytest.mark.parametrize(("results", "state"), [("over_budget", "warn"), ("committed over_budget", "ok")])
def test_a_generation_over_its_budget(host: FakeHost, switches: dict[str, object], results: str, state: str) -> None:
    rows = ("refused", *results.split(), "unchanged")
    switches["history"] = [{"result": result, "message": "21400 MiB"} for result in rows]
    check = host.checks()["serving.switch"]
    assert (check["state"], "21400 MiB" in check["evidence"]) == (state, state == "warn")


def test_the_host_is_only_asked(host: FakeHost) -> None:
    before = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    host.examine()
    assert {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()} == before
    verbs = {" ".join(line.split()[:2]) for line in host.asked if line.startswith("systemctl")}
    assert verbs == {"systemctl show"}


def test_a_card_that_refuses_a_field(host: FakeHost) -> None:
    host.gpus[1]["pcie.link.width.current"] = "[GPU requires reset]"
    host.gpus[0]["pcie.link.width.current"] = "[N/A]"
    check = host.checks()["gpus.answer"]
    assert check["state"] == "fail" and "--gpu-reset" in check["remedy"]
    assert host.gpus[1]["uuid"] in check["evidence"] and "N/A" not in check["evidence"]


def test_small_file_systems_and_the_store_of_containerd(host: FakeHost) -> None:
    status = {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]], "DockerRootDir": "/data/docker"}
    host.answers["docker info --format {{json .}}"] = Ran(0, json.dumps(status))
    host.write("etc/containerd/config.toml", "version = 3\nroot = '/data/containerd'\n[plugins]\nroot = '/x'\n")
    host.free_bytes = 2 * 1024**2
    checks = host.checks()
    assert "the file system of /data/containerd and /data/docker" in checks["storage.images"]["evidence"]
    host.answers["docker info --format {{json .}}"] = Ran(
        0, json.dumps({**status, "Containerd": {"Address": "/run/docker/containerd/containerd.sock"}})
    )
    assert "/data/containerd" not in host.checks()["storage.images"]["evidence"]
    found = {name: checks[f"storage.{name}"] for name in ("state", "boot")}
    assert {name: check["state"] for name, check in found.items()} == {"state": "fail", "boot": "fail"}
    assert "/var/lib/vllm-edge and " in found["state"]["evidence"] and "2 MiB free" in found["state"]["evidence"]
