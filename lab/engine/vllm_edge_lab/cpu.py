# SPDX-License-Identifier: Apache-2.0
"""The CPU that an engine of the lab computes on: the machine's, or a lesser one that the lab is told to have.

vLLM's CPU build chooses kernels by what torch says of the CPU, and refuses an fp8 KV cache without AVX-512 and AMX. A
lab that was made with VLLM_EDGE_LAB_CPU=avx2 has a file `cpu` beside its boards, and its engines then behave as on a
machine without either, whatever the machine has.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

LESSER = "avx2"
"""The one lesser CPU that can be asked for: AVX2, neither AVX-512 nor AMX."""
BEYOND_AVX2 = ("avx512", "avx10", "avx_vnni", "avx_ne_convert", "amx")
# Libraries that ask the CPU themselves, in C++; each reads its variable when it is loaded.
ENVIRONMENT = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def is_lesser(lab_root: Path) -> bool:
    file = lab_root / "cpu"
    return file.is_file() and file.read_text().strip() == LESSER


def become_lesser() -> None:
    """Make every later question about the CPU, in this process and in those forked from it, get the lesser answer.

    All of Python asks torch.cpu.get_capabilities, and that asks the one function that is replaced here.
    """
    os.environ.update(ENVIRONMENT)
    torch: Any = importlib.import_module("torch")
    source = torch._C._cpu
    ask = source._get_cpu_capability

    def lesser_capabilities() -> dict[str, Any]:
        return {name: False if name.startswith(BEYOND_AVX2) else value for name, value in ask().items()}

    source._get_cpu_capability = lesser_capabilities
    torch.cpu.get_capabilities.cache_clear()


def holds_fp8() -> bool:
    """Whether vLLM's CPU attention takes an fp8 KV cache here; the condition is that of its `_get_attn_isa`."""
    torch: Any = importlib.import_module("torch")
    return bool(torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported())
