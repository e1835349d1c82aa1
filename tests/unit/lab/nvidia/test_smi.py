# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi: the same truth in the forms that people and scripts read."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.nvidia import testing

Run = Callable[..., subprocess.CompletedProcess[str]]


def rows(text: str) -> list[list[str]]:
    return [line.split(", ") for line in text.splitlines()]


def test_list(smi: Run) -> None:
    result = smi("-L")
    assert result.returncode == 0
    assert result.stdout.splitlines() == [f"GPU {i}: NVIDIA L4 (UUID: {uuid})" for i, uuid in enumerate(testing.UUIDS)]


def test_query_as_csv(smi: Run, gpus: testing.LabRoot) -> None:
    with gpus.claim(2, 20900):
        result = smi(
            "--query-gpu=index,uuid,pci.bus_id,memory.total,memory.reserved,memory.used,memory.free,mig.mode.current,driver_version",
            "--format=csv,noheader,nounits",
        )
    table = rows(result.stdout)
    assert table[2] == [
        "2",
        testing.UUIDS[2],
        "00000000:B1:00.0",
        "23034",
        "470",
        "20900",
        "1664",
        "[N/A]",
        "580.173.02",
    ]
    assert [row[5] for row in table] == ["0", "0", "20900", "0"]


def test_query_with_header_and_units(smi: Run) -> None:
    result = smi("--query-gpu=memory.total, power.limit,compute_cap", "--format=csv", "-i", "1")
    assert rows(result.stdout) == [
        ["memory.total [MiB]", "power.limit [W]", "compute_cap"],
        ["23034 MiB", "72.00 W", "8.9"],
    ]


def test_processes_as_csv(smi: Run, gpus: testing.LabRoot) -> None:
    with gpus.claim(3, 400) as pid:
        result = smi("--query-compute-apps=pid,used_memory,gpu_uuid,process_name", "--format=csv,noheader")
    assert len(rows(result.stdout)) == 1
    assert rows(result.stdout)[0][:3] == [str(pid), "400 MiB", testing.UUIDS[3]]
    assert "python" in rows(result.stdout)[0][3]


def test_processes_without_memory_figures(smi: Run, gpus: testing.LabRoot) -> None:
    gpus.set_fault(3, "no-process-memory")
    with gpus.claim(3, 400) as pid:
        result = smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    assert result.stdout == f"{pid}, [N/A]\n"


def test_table(smi: Run, gpus: testing.LabRoot) -> None:
    with gpus.claim(1, 16000) as pid:
        lines = smi().stdout.splitlines()
    assert "Driver Version: 580.173.02     CUDA Version: 13.0" in lines[2]
    assert {len(line) for line in lines[1:] if line} == {91}
    assert sum("16000MiB /  23034MiB" in line for line in lines) == 1
    assert [line for line in lines if str(pid) in line and "16000MiB" in line]
    assert "No running processes found" in smi().stdout


def test_memory_details(smi: Run) -> None:
    lines = [line.strip() for line in smi("-q", "-d", "MEMORY", "-i", testing.UUIDS[0]).stdout.splitlines()]
    start = lines.index("FB Memory Usage")
    assert [line.replace(" ", "") for line in lines[start + 1 : start + 5]] == [
        "Total:23034MiB", "Reserved:470MiB", "Used:0MiB", "Free:22564MiB",
    ]  # fmt: skip


def test_memory_of_a_driver_without_v2(smi: Run, gpus: testing.LabRoot) -> None:
    gpus.set_fault(0, "no-memory-v2")
    assert smi("--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0").stdout == "470\n"


def test_memory_errors_are_shown_in_their_field(smi: Run, gpus: testing.LabRoot) -> None:
    gpus.set_fault(0, "nvml-error", "TIMEOUT")
    result = smi("--query-gpu=index,memory.used", "--format=csv,noheader", "-i", "0")
    assert result.stdout == "0, [Timeout]\n"


@pytest.mark.parametrize(
    ("arguments", "text", "status"),
    [
        (("--query-gpu=colour", "--format=csv"), 'Field "colour" is not a valid field to query.', 2),
        (("--query-gpu=index",), '"--format=" switch is missing', 2),
        (("--wings",), "Invalid combination of input arguments", 2),
        (("-L", "-i", "9"), "No devices were found", 6),
    ],
)
def test_refusals(smi: Run, arguments: tuple[str, ...], text: str, status: int) -> None:
    result = smi(*arguments)
    assert text in result.stdout
    assert result.returncode == status


def test_driver_not_loaded(smi: Run, gpus: testing.LabRoot) -> None:
    gpus.set_module(None)
    result = smi()
    assert result.stdout.startswith("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert result.returncode == 9


def test_mismatch(smi: Run, gpus: testing.LabRoot) -> None:
    gpus.set_module("570.211.01")
    result = smi("-L")
    assert (
        result.stdout == "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
    )
    assert result.returncode == 18


def test_lost_card(smi: Run, gpus: testing.LabRoot) -> None:
    gpus.set_fault(1, "gpu-lost")
    result = smi("-L")
    assert result.stdout == (
        "Unable to determine the device handle for GPU1: 00000000:31:00.0: GPU is lost."
        "  Reboot the system to recover this GPU\n"
    )
    assert result.returncode == 15


def test_no_library(smi_program: Path, gpus: testing.LabRoot, tmp_path: Path) -> None:
    environment = {**os.environ, "LAB_GPU_ROOT": str(gpus.path), "LD_LIBRARY_PATH": str(tmp_path)}
    result = subprocess.run([smi_program], capture_output=True, text=True, env=environment)
    if result.returncode == 0:
        pytest.skip("this machine has a libnvidia-ml.so.1 of its own")
    assert "couldn't find libnvidia-ml.so library" in result.stdout
    assert result.returncode == 12
