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


# NVIDIA's data sheets of each, and its table of compute capabilities. The L4's 300 GB/s are also the reference's.
GPU_MODELS: dict[str, GpuModel] = {
    "NVIDIA L4": GpuModel((8, 9), 300e9, False),
    "NVIDIA L40S": GpuModel((8, 9), 864e9, False),
    "NVIDIA A10": GpuModel((8, 6), 600e9, False),
    "Tesla T4": GpuModel((7, 5), 320e9, False),
}


def known(name: str) -> GpuModel | None:
    """What is known of a GPU, None for one that nobody has written down: then nothing is claimed of it."""
    return GPU_MODELS.get(name)
