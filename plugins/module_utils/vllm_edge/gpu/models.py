# SPDX-License-Identifier: Apache-2.0
"""What is known of GPU models by NVML's name of them, beyond their memory."""

from __future__ import annotations

from typing import NamedTuple


class GpuModel(NamedTuple):
    """One model of GPU."""

    compute_capability: tuple[int, int]
    bandwidth_bytes_per_s: float
    """Of its memory, as NVIDIA's data sheet has it."""
    nvlink: bool
    nvml_total_mib: int | None = None
    """What nvidia-smi prints as its total, where it was looked at."""
    cuda_total_bytes: int | None = None
    """What CUDA has of that."""


# NVIDIA's data sheets of each, and its table of compute capabilities. The L4's memory is that of the reference host and
# of several public reports: 22.03 GiB of 23,034 MiB.
GPU_MODELS: dict[str, GpuModel] = {
    "NVIDIA L4": GpuModel((8, 9), 300e9, False, 23034, 23_659_151_360),
    "NVIDIA L40S": GpuModel((8, 9), 864e9, False),
    "NVIDIA A10": GpuModel((8, 6), 600e9, False),
    "Tesla T4": GpuModel((7, 5), 320e9, False),
}


def by_total(nvml_total_mib: int) -> tuple[str, int] | None:
    """Name and CUDA's total of the GPU of which nvidia-smi prints this total; None where nobody has looked at one."""
    for name, model in GPU_MODELS.items():
        if model.nvml_total_mib == nvml_total_mib and model.cuda_total_bytes is not None:
            return name, model.cuda_total_bytes
    return None


def known(name: str) -> GpuModel | None:
    """What is known of a GPU, None for one that nobody has written down: then nothing is claimed of it."""
    return GPU_MODELS.get(name)
