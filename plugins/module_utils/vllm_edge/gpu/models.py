# SPDX-License-Identifier: Apache-2.0
"""Facts about GPU models that NVML does not report, by NVML's name of the model; the table is in `cards`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import NamedTuple

from .cards import CARDS


class GpuModel(NamedTuple):
    compute_capability: tuple[int, int]
    bandwidth_bytes_per_s: float
    """Memory bandwidth."""
    bandwidth_is_confirmed: bool
    nvlink: bool
    totals_mib: tuple[int, ...] = ()
    """Total memory as nvidia-smi prints it, in MiB; several if cards of this name have different memory, none if it
    prints no total because the memory is shared with the processor."""
    cuda_mib: float | None = None
    """What CUDA offers of the largest total, in MiB; None if nobody has read it."""

    def compute_cuda_mib(self, total_mib: int) -> float:
        """Return what CUDA offers, in MiB, of a total of nvidia-smi, if `cuda_mib` was read.

        ECC, which some models have in their memory, and another size change the total, not what the driver keeps.
        """
        return (self.cuda_mib or 0) - (max(self.totals_mib) - total_mib if self.totals_mib else 0)


def parse_capability(text: object) -> tuple[int, int]:
    """Return a compute capability as nvidia-smi prints it, `8.9`. Raises ValueError."""
    found = re.fullmatch(r"(\d{1,2})(?:\.(\d))?", str(text).strip())
    if found is None:
        raise ValueError(
            f"--compute-capability, gpu_compute_capability: {str(text)!r} is none; write it as nvidia-smi prints "
            f"compute_cap, such as 8.9."
        )
    return int(found[1]), int(found[2] or 0)


def _read_cards(table: str) -> Iterator[tuple[str, GpuModel]]:
    for line in table.strip().splitlines():
        name, capability, bandwidth, source, link, totals, cuda = (cell.strip() for cell in line.split("|"))
        confirmed, offered = source != "memory", cuda.split()[0]
        yield (
            name,
            GpuModel(
                parse_capability(capability),
                float(bandwidth) * 1e9,
                confirmed,
                link == "NVLink",
                tuple(int(total) for total in totals.split()),
                None if offered == "-" else float(offered),
            ),
        )


GPU_MODELS: dict[str, GpuModel] = dict(_read_cards(CARDS))
L4 = "NVIDIA L4"
"""The model that its total alone names: other totals are those of several models, some older than the table."""
L4_TOTAL_MIB, L4_CUDA_MIB = GPU_MODELS[L4].totals_mib[0], GPU_MODELS[L4].cuda_mib or 0
"""nvidia-smi's total of an L4, and what CUDA has of it."""
SHORT_NAMES = {
    "A100": "NVIDIA A100-SXM4-80GB",
    "A100 40GB": "NVIDIA A100-SXM4-40GB",
    "A100 80GB": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H100 SXM": "NVIDIA H100 80GB HBM3",
    "A6000": "NVIDIA RTX A6000",
    "RTX 6000 Ada": "NVIDIA RTX 6000 Ada Generation",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "GH200": "NVIDIA GH200 480GB",
    "GH200 96GB": "NVIDIA GH200 480GB",
    "B300": "NVIDIA B300 SXM6 AC",
    "DGX Spark": "NVIDIA GB10",
}
"""Names that people use for one of several variants."""
OTHER_MAKERS = re.compile(r"\b(amd|radeon|instinct|mi\d{3}\w*|intel|arc|gaudi\d?|tpu|ascend|apple|m[1-5])\b", re.I)
_NO_PART_OF_A_NAME = frozenset({"nvidia", "tesla", "geforce", "generation", "blackwell", "edition"})


def find_by_short_name(name: str) -> str | None:
    """Return NVML's name of a GPU model for what people write, such as `L4` or `rtx 4090`; None if it is not known."""
    wanted = _simplify(name)
    return _NAMES.get(wanted) or _NAMES.get(f"rtx {wanted}")


def find_total_mib(name: str, stated_mib: int = 0) -> int:
    """Return the total memory of a GPU as nvidia-smi prints it: what is stated, or that of all cards of this name; 0 if
    neither is known."""
    model = GPU_MODELS.get(find_by_short_name(name) or "")
    totals = (model.totals_mib or (round(model.cuda_mib or 0),)) if model else ()
    return stated_mib or (totals[0] if len(totals) == 1 else 0)


def list_by_words(name: str) -> list[str]:
    """Return the names that contain every word of what people write: variants of one model, of different memory."""
    words = set(_simplify(name).split())
    return [model for model in GPU_MODELS if words and words <= set(_simplify(model).split())]


def list_alike(name: str) -> list[str]:
    """Return the names that contain every word of what people write, or every word with a digit, else up to three that
    are spelt alike."""
    close = difflib.get_close_matches(_simplify(name), _NAMES, n=3, cutoff=0.5)
    numbers = " ".join(word for word in name.split() if re.search(r"\d", word))
    return list_by_words(name) or list_by_words(numbers) or list(dict.fromkeys(_NAMES[alike] for alike in close))


def list_by_memory(total_mib: int) -> list[str]:
    """Return the models that have this total of nvidia-smi, or one that differs by less than 2 %."""
    return [
        name
        for name, model in GPU_MODELS.items()
        if any(abs(total - total_mib) < total * 0.02 for total in model.totals_mib)
    ]


def _simplify(text: str) -> str:
    return " ".join(word for word in re.split(r"[\s_-]+", text.lower()) if word not in _NO_PART_OF_A_NAME)


_NAMES = {_simplify(model): model for model in GPU_MODELS} | {
    _simplify(short): model for short, model in SHORT_NAMES.items()
}
