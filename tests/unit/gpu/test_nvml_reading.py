# SPDX-License-Identifier: Apache-2.0
"""NVML through the real nvidia-ml-py over simulated GPUs, and what its figures and errors mean."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from ansible.module_utils.vllm_edge.system.nvml import (
    ERRORS,
    MIB,
    GpuIdentity,
    NvmlFailure,
    ProcessReading,
    bus_order,
    interpret_memory,
    merge_processes,
    name_lost,
    open_nvml,
)

from lab.nvidia.testing import UUIDS, LabRoot

ROOT = Path(__file__).resolve().parents[3]


def test_a_reading_has_what_the_board_has(gpus: LabRoot) -> None:
    with open_nvml() as session:
        assert session.read().gpus[1].used_mib == 0, "every read is a new sample"
        with gpus.claim(1, 4000) as pid:
            host = session.read()
        assert session.read().gpus[1].used_mib == 0
    assert host.driver_version == gpus.path.joinpath("module").read_text().strip()
    assert [gpu.uuid for gpu in host.gpus] == list(UUIDS)
    one = host.gpus[1]
    assert (one.index, one.name, one.pci_bus_id) == (1, "NVIDIA L4", "00000000:31:00.0")
    assert (one.total_mib, one.reserved_mib, one.used_mib, one.free_mib) == (23034, 470, 4000, 23034 - 470 - 4000)
    assert (one.memory_version, one.used_includes_reserved, one.compute_capability) == ("v2", False, "8.9")
    assert one.processes == (ProcessReading(pid, 4000),)
    assert host.gpus[0].processes == ()


@pytest.mark.parametrize("error", ["FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH"])
def test_without_v2_the_reserve_is_unknown_and_in_used(gpus: LabRoot, error: str) -> None:
    gpus.set_fault(2, "no-memory-v2", error)
    with gpus.claim(2, 4000), open_nvml() as session:
        reading = session.read().gpus[2]
    assert (reading.memory_version, reading.reserved_mib, reading.used_mib) == ("v1", None, 4470)
    assert reading.used_includes_reserved


@pytest.mark.parametrize(
    ("total", "used", "free", "reserved", "expected"),
    [
        pytest.param(1000, 300, 650, 50, (1000, 50, 300, "v2"), id="v2"),
        pytest.param(1000, 350, 650, 50, (1000, 50, 300, "v2"), id="v2 call with the meaning of v1: corrected"),
        pytest.param(1000, 350, 650, None, (1000, None, 350, "v1"), id="v1"),
        pytest.param(1000, 300, 651, 50, (1000, 50, 300, "v2"), id="one MiB of rounding"),
        pytest.param(1000, 100, 100, 50, None, id="adds up to nothing"),
        pytest.param(1000, 300, 700, 0, (1000, 0, 300, "v2"), id="no reserve: both meanings are the same"),
    ],
)
def test_what_memory_figures_mean(
    total: int, used: int, free: int, reserved: int | None, expected: tuple[int, int | None, int, str] | None
) -> None:
    reading = interpret_memory(total * MIB, used * MIB, free * MIB, None if reserved is None else reserved * MIB)
    found = reading and (reading.total_mib, reading.reserved_mib, reading.used_mib, reading.memory_version)
    assert found == expected


def test_an_error_of_a_gpu_is_a_sentence_with_a_remedy(gpus: LabRoot) -> None:
    assert all(isinstance(getattr(pynvml, f"NVML_ERROR_{code}"), int) for code in ERRORS), "NVML has each of them"
    code = "NO_PERMISSION"
    gpus.set_fault(2, "nvml-error", code)
    with open_nvml() as session, pytest.raises(NvmlFailure) as failed:
        session.read()
    failure = failed.value
    assert (failure.code, failure.gpu, failure.driver_absent) == (code, UUIDS[2], False)
    assert failure.sentence == ERRORS[code][0].format(gpu=f"{UUIDS[2]} (NVIDIA L4 at 00000000:B1:00.0)")
    assert failure.remedy == ERRORS[code][1]
    assert str(failure) == f"{failure.sentence} {failure.remedy}"
    # One without a text of its own keeps its code.
    gpus.set_fault(0, "nvml-error", "FREQ_NOT_SUPPORTED")
    with open_nvml() as session, pytest.raises(NvmlFailure, match="NVML answered FREQ_NOT_SUPPORTED for GPU-"):
        session.read()


@pytest.mark.slow
def test_a_host_without_the_library(tmp_path: Path) -> None:
    script = (
        "from vllm_edge.system.nvml import open_nvml, NvmlFailure\n"
        "try:\n    open_nvml().__enter__()\n"
        "except NvmlFailure as failure:\n    print(failure.code, failure.driver_absent)"
    )
    # The loader's own directories count, too: a machine with a real driver has the library there.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "plugins" / "module_utils"), "LD_LIBRARY_PATH": str(tmp_path)}
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "LIBRARY_NOT_FOUND True\n"


def test_a_gpu_that_is_lost_before_is_kept_apart_from_those_that_answer(gpus: LabRoot) -> None:
    gpus.set_fault(1, "gpu-lost")
    with open_nvml() as session:
        assert [gpu.uuid for gpu in session.identities] == [UUIDS[0], UUIDS[2], UUIDS[3]]
        assert [(failure.code, failure.index) for failure in session.lost] == [("GPU_IS_LOST", 1)]
        with pytest.raises(NvmlFailure, match="the GPU at NVML index 1"):
            session.read()


def cards(*numbers: int) -> list[GpuIdentity]:
    return [GpuIdentity(number, f"GPU-{number}", "NVIDIA L4", f"0:{number}") for number in numbers]


@pytest.mark.parametrize(
    ("expected", "seen", "gpu", "says"),
    [
        pytest.param(cards(0, 1), ["GPU-0"], "GPU-1", "GPU-1 (NVIDIA L4 at 0:1), slot 1", id="one is missing"),
        pytest.param(cards(0, 1, 2), ["GPU-0"], None, "one of slot 1, GPU-1", id="two are missing"),
        pytest.param([], ["GPU-0"], None, "the GPU at NVML index 4", id="nothing is known"),
    ],
)
def test_the_name_of_a_card_that_was_lost_before(
    expected: list[GpuIdentity], seen: list[str], gpu: str | None, says: str
) -> None:
    named = name_lost(NvmlFailure("GPU_IS_LOST", index=4), expected, seen)
    assert named.gpu == gpu
    assert says in named.sentence


def test_gpus_are_counted_in_bus_order() -> None:
    buses = ["00000001:0A:00.0", "0000:CA:00.0", "00000000:17:00.0"]
    assert sorted(buses, key=bus_order) == ["00000000:17:00.0", "0000:CA:00.0", "00000001:0A:00.0"]


def test_a_process_in_both_lists_counts_once() -> None:
    graphics, last, compute = ProcessReading(8, 4), ProcessReading(9, None), ProcessReading(7, 500)
    assert merge_processes([compute, last, compute, graphics]) == (compute, graphics, last)
