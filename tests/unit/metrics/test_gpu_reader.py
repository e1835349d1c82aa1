# SPDX-License-Identifier: Apache-2.0
"""A reading of every GPU within its deadline: what it says, and what it does about GPUs that are lost or hang."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest
from ansible.module_utils.vllm_edge.metrics import gpus as module
from ansible.module_utils.vllm_edge.metrics.gpus import GpuReader

from lab.nvidia.testing import UUIDS, LabRoot

pytestmark = pytest.mark.slow
MIB = 2**20


@pytest.fixture
def reader(gpus: LabRoot) -> GpuReader:
    return GpuReader()


def let_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children live on after SIGKILL, as those that hang in the kernel."""
    monkeypatch.setattr(os, "kill", lambda pid, number: None)


def see(rows: list[dict[str, Any]]) -> list[tuple[str, bool, str]]:
    return [(row["uuid"], row["up"], row["why"]) for row in rows]


def up(*but: int, why: str = "TIMEOUT") -> list[tuple[str, bool, str]]:
    return [(uuid, index not in but, why if index in but else "") for index, uuid in enumerate(UUIDS)]


def answer(code: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise pynvml.NVMLError(code)

    return fail


def test_a_row_has_what_nvml_reports(gpus: LabRoot, reader: GpuReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "engine_uid", lambda: os.getuid() + 1)
    for fault, value in {"throttled": "sw_power_cap", "ecc-error": 3, "pcie-replays": 7}.items():
        gpus.set_fault(1, fault, value)
    with gpus.claim(1, 4000):
        (_, one, *_), error = reader.read_gpus()
        monkeypatch.setattr(module, "engine_uid", os.getuid)
        assert reader.read_gpus()[0][1]["foreign_bytes"] == 0
    assert error == ""
    assert one.pop("energy_j") > 0
    assert one == {
        **{"index": 1, "uuid": UUIDS[1], "name": "NVIDIA L4", "bus": "00000000:31:00.0", "up": True, "why": ""},
        **{"total_bytes": 23034 * MIB, "used_bytes": 4000 * MIB, "foreign_bytes": 4000 * MIB},
        **{"power_w": 29.5, "sm_clock_mhz": 1020, "temperature_c": 45, "throttle": ["sw_power_cap"]},
        **{"ecc_corrected": 0, "ecc_uncorrected": 3, "pcie_generation": 4, "pcie_width": 16, "pcie_replays": 7},
        "utilization": 0.0,
    }


def test_what_is_not_known_is_left_out(gpus: LabRoot, reader: GpuReader, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.set_fault(0, "no-process-memory")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", answer(pynvml.NVML_ERROR_NOT_SUPPORTED))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", answer(pynvml.NVML_ERROR_NOT_SUPPORTED))
    with gpus.claim(0, 4000):
        (row, *_), _ = reader.read_gpus()
    assert {"foreign_bytes", "throttle", "ecc_corrected", "ecc_uncorrected"}.isdisjoint(row)
    assert (row["up"], row["used_bytes"], row["pcie_width"]) == (True, 4000 * MIB, 16)
    # An error of one figure is not one of the card; one of its memory is.
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", answer(pynvml.NVML_ERROR_UNKNOWN))
    gpus.set_fault(1, "nvml-error", "RESET_REQUIRED")
    (row, other, *_), _ = reader.read_gpus()
    assert (row["up"], row["why"], row["pcie_width"], "power_w" in row) == (True, "UNKNOWN", 16, False)
    assert other.keys() == {"index", "uuid", "name", "bus", "up", "why"}
    assert (other["up"], other["why"]) == (False, "RESET_REQUIRED")


def test_a_lost_gpu_is_named_if_it_was_seen(gpus: LabRoot, reader: GpuReader) -> None:
    gpus.set_fault(2, "gpu-lost")
    assert see(reader.read_gpus()[0])[2] == ("", False, "GPU_IS_LOST")
    gpus.clear_fault(2, "gpu-lost")
    assert see(reader.read_gpus()[0]) == up()
    gpus.set_fault(2, "gpu-lost")
    assert see(reader.read_gpus()[0]) == up(2, why="GPU_IS_LOST")
    # One that NVML no longer counts.
    gpus.clear_fault(2, "gpu-lost")
    (gpus.gpu(1) / "board").rename(gpus.path / "taken")
    assert see(reader.read_gpus()[0]) == up(1, why="NOT_FOUND")


def test_a_gpu_that_hangs_takes_no_other_with_it(
    gpus: LabRoot, reader: GpuReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader.read_gpus()
    gpus.set_fault(1, "hangs")
    began = time.monotonic()
    with monkeypatch.context() as context:
        let_live(context)
        assert (see(reader.read_gpus()[0]), time.monotonic() - began < 2.5) == (up(1), True)
        # The child still hangs: the next one does not ask for that GPU, and another that begins to hang is told, too.
        began = time.monotonic()
        assert (see(reader.read_gpus()[0]), time.monotonic() - began < 1.5) == (up(1), True)
        gpus.set_fault(3, "hangs")
        assert see(reader.read_gpus(0.5)[0]) == up(1, 3)
        gpus.clear_fault(3, "hangs")
        time.sleep(1)
        assert see(reader.read_gpus()[0]) == up(1)
        gpus.clear_fault(1, "hangs")
        time.sleep(1)
    assert see(reader.read_gpus()[0]) == up()


def test_nothing_is_left_of_a_round(gpus: LabRoot, reader: GpuReader) -> None:
    def look() -> set[str]:
        children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
        return {*os.listdir("/proc/self/fd"), *(f"child {pid}" for pid in children)}

    before = look()
    for round_ in range(20):
        (gpus.set_fault if round_ == 8 else gpus.clear_fault)(0, "hangs")
        reader.read_gpus(1.0)
    assert look() <= before


def test_an_error_of_nvml_as_a_whole(gpus: LabRoot, reader: GpuReader, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.set_module("570.211.01")
    assert reader.read_gpus() == ([], "LIB_RM_VERSION_MISMATCH")
    gpus.set_module(None)
    assert reader.read_gpus() == ([], "DRIVER_NOT_LOADED")
    monkeypatch.setattr(pynvml, "nvmlInit", answer(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert reader.read_gpus() == ([], "LIBRARY_NOT_FOUND")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: os.abort())
    assert reader.read_gpus() == ([], "UNKNOWN")


def test_nvml_that_hangs_as_a_whole(gpus: LabRoot, reader: GpuReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read_gpus()
    let_live(monkeypatch)
    (flag := gpus.path / "nobody-answers").touch()
    with monkeypatch.context() as context:
        context.setattr(pynvml, "nvmlInit", lambda: [time.sleep(0.05) for _ in iter(flag.exists, False)])
        rows, error = reader.read_gpus(0.1)
        assert (see(rows), error) == (up(0, 1, 2, 3), "TIMEOUT")
    assert reader.read_gpus() == (rows, error), "while it hangs no other child is started"
    flag.unlink()
    time.sleep(1)
    assert see(reader.read_gpus()[0]) == up()
