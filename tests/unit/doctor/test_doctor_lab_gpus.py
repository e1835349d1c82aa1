# SPDX-License-Identifier: Apache-2.0
"""What the doctor makes of an nvidia-smi that was not written for it: the lab's, over simulated GPUs."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import DRIVER, FakeHost, specification

from lab.nvidia import testing


class LabHost(FakeHost):
    """Everything as in a FakeHost but the GPUs."""

    lab: testing.LabRoot
    library_file: Path
    smi: Path

    def __call__(self, command: Sequence[str], timeout_s: float) -> Ran:
        if command[0] != "nvidia-smi":
            return super().__call__(command, timeout_s)
        done = subprocess.run(
            [str(self.smi), *command[1:]],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env=self.lab.environment(self.library_file),
        )
        return Ran(done.returncode, done.stdout, done.stderr.strip())


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("smi")
    return testing.build_library(directory, DRIVER), testing.build_smi(directory)


@pytest.fixture
def lab(host: FakeHost, programs: tuple[Path, Path], tmp_path: Path) -> LabHost:
    found = LabHost(host.root, answers=host.answers, units=host.units)
    found.lab = testing.create_root(tmp_path / "gpus", version=DRIVER)
    found.library_file, found.smi = programs
    for path in list(found.root.glob("sys/bus/pci/devices/*")):
        path.unlink()
    found.write("var/run/cdi/nvidia.yaml", specification(*testing.UUIDS))
    for name in [name for name in found.answers if name.startswith("nvidia-smi")]:
        del found.answers[name]
    return found


# The lab has no PCI bus, and its nvidia-smi names no pairs.
ALWAYS = {"topology.iommu": "unknown", "topology.peer-to-peer": "unknown"}


def test_four_gpus(lab: LabHost) -> None:
    assert lab.not_ok() == ALWAYS
    checks = lab.checks()
    assert checks["gpus.present"]["evidence"] == "4 of NVIDIA L4"
    assert "nvidia-smi names 4 GPUs" in checks["gpus.answer"]["evidence"]


def test_a_process_on_a_gpu(lab: LabHost) -> None:
    with lab.lab.claim(2, 1000) as pid:
        assert f"pid {pid}" in lab.checks()["gpus.holders"]["evidence"]
        assert testing.UUIDS[2] in lab.checks()["gpus.holders"]["evidence"]


def test_a_lost_gpu(lab: LabHost) -> None:
    lab.engine("31b", 8050, testing.UUIDS[:2])
    lab.lab.set_fault(1, "gpu-lost")
    checks = lab.checks()
    assert checks["gpus.answer"]["state"] == "fail" and "GPU is lost" in checks["gpus.answer"]["evidence"]
    assert "Xid 79" in checks["gpus.answer"]["remedy"]


def test_another_module(lab: LabHost) -> None:
    lab.lab.set_module("570.211.01")
    lab.module("570.211.01")
    checks = lab.checks()
    assert (checks["driver.versions"]["state"], checks["gpus.answer"]["state"]) == ("fail", "fail")
    assert "Reboot the server" in checks["gpus.answer"]["remedy"]


def test_no_module(lab: LabHost) -> None:
    lab.lab.set_module(None)
    lab.remove("sys/module/nvidia")
    checks = lab.checks()
    assert (checks["driver.module-loaded"]["state"], checks["gpus.answer"]["state"]) == ("fail", "unknown")


def test_a_card_that_refuses_a_field(host: FakeHost) -> None:
    host.gpus[1]["pcie.link.width.current"] = "[GPU requires reset]"
    host.gpus[0]["pcie.link.width.current"] = "[N/A]"
    check = host.checks()["gpus.answer"]
    assert check["state"] == "fail" and "--gpu-reset" in check["remedy"]
    assert host.gpus[1]["uuid"] in check["evidence"] and "N/A" not in check["evidence"]
