# SPDX-License-Identifier: Apache-2.0
"""The lesser CPU: who asks torch gets the lesser answer, and the tiny model's cache is one that it holds."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_edge_lab import cpu

from lab.nvidia.cards import HARDWARE

MACHINE = {
    "architecture": "x86_64",
    "num_logical_cores": 2,
    "avx2": True,
    "avx512_f": True,
    "avx512_bf16": True,
    "avx10_1": True,
    "amx_tile": True,
    "amx_fp16": True,
    "fma3": True,
}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch as far as it is asked about the CPU; the questions are those of torch 2.13, answers kept as there."""
    made: Any = ModuleType("torch")
    source = SimpleNamespace(_get_cpu_capability=lambda: dict(MACHINE))
    made._C = SimpleNamespace(_cpu=source)

    @functools.lru_cache(None)
    def get_capabilities() -> Any:
        return MappingProxyType(source._get_cpu_capability())

    made.cpu = SimpleNamespace(
        get_capabilities=get_capabilities,
        _is_avx512_supported=lambda: get_capabilities().get("avx512_f", False),
        _is_amx_tile_supported=lambda: get_capabilities().get("amx_tile", False),
    )
    monkeypatch.setitem(sys.modules, "torch", made)
    for name in cpu.ENVIRONMENT:
        monkeypatch.setenv(name, "")
    return made


def test_who_asks_gets_the_lesser_answer(torch: Any) -> None:
    assert torch.cpu._is_avx512_supported() and cpu.holds_fp8(), "also where somebody has asked before"
    cpu.become_lesser()
    told = dict(torch.cpu.get_capabilities())
    beyond = {name for name in MACHINE if name.startswith(("avx512", "avx10", "amx"))}
    assert {name for name in MACHINE if told[name] != MACHINE[name]} == beyond
    assert not cpu.holds_fp8()
    assert {name: os.environ[name] for name in cpu.ENVIRONMENT} == cpu.ENVIRONMENT


@pytest.mark.parametrize(("beyond", "holds"), [("avx512_f", True), ("amx_tile", True), ("fma3", False)])
def test_avx512_or_amx_is_enough_for_fp8(torch: Any, beyond: str, holds: bool) -> None:
    capabilities = {"avx2": True, beyond: True}
    torch._C._cpu._get_cpu_capability = lambda: capabilities
    assert cpu.holds_fp8() is holds


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "lesser"), [("avx2", True), (None, False), ("", False)])
def test_the_boards_of_the_host_say_which_cpu_it_has(tmp_path: Path, asked: str | None, lesser: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_EDGE_LAB_CPU"}
    environment |= {"LAB_GPU_ROOT": str(tmp_path)} | ({} if asked is None else {"VLLM_EDGE_LAB_CPU": asked})
    subprocess.run(["sh", HARDWARE], env=environment, check=True)
    assert cpu.is_lesser(tmp_path) is lesser
