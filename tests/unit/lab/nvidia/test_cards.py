# SPDX-License-Identifier: Apache-2.0
"""VLLM_EDGE_LAB_GPUS: which GPUs a host has, and that NVML, nvidia-smi, CUDA and engines say the same of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lab.__main__ as program
import lab.server
from lab.nvidia import testing
from lab.nvidia.cards import read_cards
from lab.server import Server

H100 = "NVIDIA H100 80GB HBM3"
CUDA = """
import ctypes
cuda, count, part, total = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count))
def capability(number, device):
    assert cuda.cuDeviceGetAttribute(ctypes.byref(part), number, device) == 0
    return part.value
def bytes_of(device):
    return cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device) or total.value
print([(capability(75, at), capability(76, at), bytes_of(at)) for at in range(count.value)])
"""


@pytest.mark.parametrize(
    ("text", "names", "mib"),
    [
        ("", ["NVIDIA L4"] * 4, [23034] * 4),
        ("h100", [H100], [81559]),
        (H100, [H100], [81559]),
        ("2 x L4, L40S", ["NVIDIA L4", "NVIDIA L4", "NVIDIA L40S"], [23034, 23034, 46068]),
        ("8xT4", ["Tesla T4"] * 8, [15360] * 8),
        ("2xNVIDIA B200:183359:10.0", ["NVIDIA B200"] * 2, [183359] * 2),
    ],
)
def test_the_text_names_the_cards(text: str, names: list[str], mib: list[int]) -> None:
    cards = read_cards(text)
    assert ([card["name"] for card in cards], [int(card["total_mib"]) for card in cards]) == (names, mib)
    assert [card["uuid"] for card in cards] == list(testing.SLOTS[: len(cards)])
    assert sorted(card["pci"] for card in cards) == [card["pci"] for card in cards], "slots follow the bus"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("L5", '"L5" is not a card'),
        ("4xL4,", '"" is not a card'),
        ("4xL4,5xL4", "1 to 8 GPUs"),
        ("NVIDIA B200:183359", "is not a card"),
        ("$(id):23034:8.9", "is not a card"),
    ],
)
def test_another_text_is_refused_before_anything_is_started(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_EDGE_LAB_GPUS", text)
    monkeypatch.setattr("sys.argv", ["lab", "up"])
    monkeypatch.setattr(program, "up", lambda *_: pytest.fail("the lab was started"))
    with pytest.raises(SystemExit):
        program.main()
    said = capsys.readouterr().err
    assert why in said and "Write for example 4xL4" in said
    with pytest.raises(ValueError, match="VLLM_EDGE_LAB_GPUS is"):
        testing.create_root(tmp_path / "gpus", text)
    assert not (tmp_path / "gpus" / "gpus").exists()


@pytest.mark.slow
def test_everybody_says_the_same_of_mixed_gpus(nvml_library: Path, smi_program: Path, tmp_path: Path) -> None:
    gpus = testing.create_root(tmp_path / "gpus", "L4,H100,NVIDIA B200:183359:10.0")
    environment = gpus.environment(nvml_library)
    fields = "--query-gpu=name,memory.total,memory.reserved,compute_cap,power.limit"
    with gpus.claim(1, 61_440):
        query = [str(smi_program), fields, "--format=csv,noheader,nounits"]
        said = subprocess.run(query, env=environment, capture_output=True, text=True, check=True).stdout
        table = subprocess.run([smi_program], env=environment, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [
        "NVIDIA L4, 23034, 470, 8.9, 72.00",
        f"{H100}, 81559, 470, 9.0, 700.00",
        "NVIDIA B200, 183359, 512, 10.0, 300.00",
    ]
    assert "61440MiB /  81559MiB" in table
    environment = gpus.environment(testing.build_cuda(tmp_path))
    answer = subprocess.run([sys.executable, "-c", CUDA], env=environment, capture_output=True, text=True, check=True)
    assert ast.literal_eval(answer.stdout) == [
        (8, 9, 23_659_151_360),
        (9, 0, (81559 - 470) << 20),
        (10, 0, (183359 - 512) << 20),
    ]
    assert round(((81559 - 470) << 20) / 2**30, 2) == 79.19, "what torch prints of an H100"


CONTEXT = """
import ctypes
cuda, count, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
print(cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(count)), count.value)
print([cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), at) for at in range(count.value)])
"""


@pytest.mark.slow
def test_cuda_refuses_by_compute_mode_and_does_not_see_mig(tmp_path: Path) -> None:
    gpus = testing.create_root(tmp_path / "gpus")
    for gpu, fault in enumerate(
        (("compute-mode", "Prohibited"), *[("compute-mode", "Exclusive_Process")] * 2, ("mig",))
    ):
        gpus.set_fault(gpu, *fault)
    with gpus.claim(2, 1_000):
        run = [sys.executable, "-c", CONTEXT]
        environment = gpus.environment(testing.build_cuda(tmp_path))
        said = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert said == "0 0 3\n[46, 0, 46]\n"


def test_a_host_that_is_there_keeps_its_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lab.server, "container_state", lambda *_: "running")
    monkeypatch.setattr(lab.server, "docker_output", lambda *_: "PATH=/bin\nVLLM_EDGE_LAB_GPUS=2xL4,H100\n")
    monkeypatch.setattr(lab.server, "prepare", lambda: pytest.fail("began"))
    with pytest.raises(SystemExit, match=r"other GPUs \(2xL4,H100\)\. A host keeps its GPUs"):
        lab.server.up(Server("mine", 22022, gpus="H100"))
    with pytest.raises(pytest.fail.Exception, match="began"):
        lab.server.up(Server("mine", 22022, gpus="2 x L4, H100"))
