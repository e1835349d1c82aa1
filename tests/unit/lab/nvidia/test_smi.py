# SPDX-License-Identifier: Apache-2.0
"""nvidia-smi: the same truth in the forms that people and scripts read."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from lab.nvidia import testing

pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


LISTED = "".join(f"GPU {index}: NVIDIA L4 (UUID: {uuid})\n" for index, uuid in enumerate(testing.UUIDS))
NO_DRIVER = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.173\n"
LOST = (
    "Unable to determine the device handle for GPU1: 00000000:31:00.0: GPU is lost."
    "  Reboot the system to recover this GPU\n"
)


@pytest.mark.parametrize(
    ("fault", "arguments", "text", "status"),
    [
        (None, "-L", LISTED, 0),
        (
            None,
            "'--query-gpu=memory.total, power.limit,compute_cap' --format=csv -i 1",
            "memory.total [MiB], power.limit [W], compute_cap\n23034 MiB, 72.00 W, 8.9\n",
            0,
        ),
        ((0, "no-memory-v2"), "--query-gpu=memory.used --format=csv,noheader,nounits -i 0", "470\n", 0),
        ((0, "nvml-error", "TIMEOUT"), "--query-gpu=index,memory.used --format=csv,noheader -i 0", "0, [Timeout]\n", 0),
        (None, "--query-gpu=colour --format=csv", 'Field "colour" is not a valid field to query.', 2),
        (None, "--wings", "Invalid combination of input arguments", 2),
        (None, "-L -i 9", "No devices were found", 6),
        ((None,), "", NO_DRIVER, 9),
        (("570.211.01",), "-L", MISMATCH, 18),
        ((1, "gpu-lost"), "-L", LOST, 15),
    ],
)
def test_answers(
    smi: Run, gpus: testing.LabRoot, fault: tuple[Any, ...] | None, arguments: str, text: str, status: int
) -> None:
    """`fault`: the version of the loaded module, or GPU, name and value of a fault."""
    if fault is not None:
        (gpus.set_module if len(fault) == 1 else gpus.set_fault)(*fault)
    result = smi(*shlex.split(arguments))
    # A text with a line break is all of it.
    assert result.stdout == text if text.endswith("\n") else text in result.stdout
    assert result.returncode == status
