# SPDX-License-Identifier: Apache-2.0
"""Facts about GPU models that NVML does not report, by NVML's name of the model."""

from __future__ import annotations

from typing import NamedTuple


class GpuModel(NamedTuple):
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
    "NVIDIA L40S": GpuModel((8, 9), 864e9, False, 46068),
    "NVIDIA A10": GpuModel((8, 6), 600e9, False, 23028),
    "Tesla T4": GpuModel((7, 5), 320e9, False, 15360),
    # What nvidia-smi prints of these is public; what CUDA offers of it was not read, so plans are on the safe side.
    "NVIDIA A100 80GB PCIe": GpuModel((8, 0), 1935e9, False, 81920),
    "NVIDIA A100-SXM4-80GB": GpuModel((8, 0), 2039e9, True, 81920),
    "NVIDIA H100 80GB HBM3": GpuModel((9, 0), 3350e9, True, 81559),
    "NVIDIA H200": GpuModel((9, 0), 4800e9, True, 143771),
    "NVIDIA RTX A6000": GpuModel((8, 6), 768e9, False, 49140),
    "NVIDIA RTX 6000 Ada Generation": GpuModel((8, 9), 960e9, False, 49140),
    "NVIDIA GeForce RTX 3090": GpuModel((8, 6), 936e9, False, 24576),
    "NVIDIA GeForce RTX 4090": GpuModel((8, 9), 1008e9, False, 24564),
}
SHORT_NAMES = {"A100": "NVIDIA A100-SXM4-80GB", "H100": "NVIDIA H100 80GB HBM3", "A6000": "NVIDIA RTX A6000"}
"""Names that people use for one of several variants."""


def by_total(nvml_total_mib: int) -> tuple[str, int] | None:
    """Return name and CUDA's total in bytes of the model with this total of nvidia-smi; None if none has it."""
    for name, model in GPU_MODELS.items():
        if model.nvml_total_mib == nvml_total_mib and model.cuda_total_bytes is not None:
            return name, model.cuda_total_bytes
    return None


def find_by_short_name(name: str) -> str | None:
    """Return NVML's name of a GPU model for what people write, such as `L4` or `rtx 4090`; None if it is not known."""

    def simplify(text: str) -> str:
        return " ".join(word for word in text.lower().split() if word not in ("nvidia", "tesla", "geforce"))

    wanted = simplify(name)
    names = {simplify(model): model for model in GPU_MODELS}
    names |= {simplify(short): model for short, model in SHORT_NAMES.items()}
    return names.get(wanted) or names.get(f"rtx {wanted}")
