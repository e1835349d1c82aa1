# SPDX-License-Identifier: Apache-2.0
"""Facts about GPU models that NVML does not report, by NVML's name of the model."""

from __future__ import annotations

from typing import NamedTuple


class GpuModel(NamedTuple):
    """Facts about one GPU model."""

    compute_capability: tuple[int, int]
    bandwidth_bytes_per_s: float
    """Memory bandwidth according to NVIDIA's data sheet."""
    nvlink: bool
    nvml_total_mib: int | None = None
    """Total memory as nvidia-smi prints it; None if nobody has read it on such a card."""
    cuda_total_bytes: int | None = None
    """The part of it that CUDA offers; None if unknown."""


# Sources: NVIDIA's data sheet of each model and NVIDIA's table of compute capabilities. The memory of the L4 was read
# on the reference host and matches several public reports: 22.03 GiB of 23,034 MiB.
GPU_MODELS: dict[str, GpuModel] = {
    "NVIDIA L4": GpuModel((8, 9), 300e9, False, 23034, 23_659_151_360),
    "NVIDIA L40S": GpuModel((8, 9), 864e9, False),
    "NVIDIA A10": GpuModel((8, 6), 600e9, False),
    "NVIDIA A100 80GB PCIe": GpuModel((8, 0), 1935e9, False),
    "NVIDIA A100-SXM4-80GB": GpuModel((8, 0), 2039e9, True),
    "NVIDIA H100 80GB HBM3": GpuModel((9, 0), 3350e9, True),
    "NVIDIA H200": GpuModel((9, 0), 4800e9, True),
    "Tesla T4": GpuModel((7, 5), 320e9, False),
}


def by_total(nvml_total_mib: int) -> tuple[str, int] | None:
    """Find a GPU model by its total memory.

    Args:
        nvml_total_mib: total as nvidia-smi prints it

    Returns:
        Name of the model and CUDA's total in bytes; None if no known model has this total.
    """
    for name, model in GPU_MODELS.items():
        if model.nvml_total_mib == nvml_total_mib and model.cuda_total_bytes is not None:
            return name, model.cuda_total_bytes
    return None


def known(name: str) -> GpuModel | None:
    """Return the facts about a GPU model; None if it is not in the table, so nothing can be said about it."""
    return GPU_MODELS.get(name)
