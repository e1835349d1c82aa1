# SPDX-License-Identifier: Apache-2.0
"""The image's `vllm`: what it changes of a unit's command line, and when it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from vllm_edge_lab import command, gpus

from lab.nvidia.testing import LabRoot, create_root

WORKER = ["--worker-cls", command.WORKER]
DEFAULTS = ["--max-num-seqs", "256", "--max-num-batched-tokens", "2048"]


@pytest.mark.parametrize(
    ("given", "run"),
    [
        (["/models/x", "--enforce-eager"], ["/models/x", "--enforce-eager", *DEFAULTS, *WORKER]),
        (["/models/x", "--quantization", "modelopt"], ["/models/x", *DEFAULTS, *WORKER]),
        (["/models/x", "--quantization=modelopt", "-q", "fp8"], ["/models/x", *DEFAULTS, *WORKER]),
        (
            ["/models/x", "--max_num_seqs=8", "--max-num-batched-tokens", "512"],
            ["/models/x", "--max_num_seqs=8", "--max-num-batched-tokens", "512", *WORKER],
        ),
        (["/models/x", "--config", "/etc/x.yaml"], ["/models/x", "--config", "/etc/x.yaml", *WORKER]),
    ],
)
def test_only_what_the_cpu_build_cannot_take_is_changed(given: list[str], run: list[str]) -> None:
    assert command.rewrite(given) == run


@pytest.mark.parametrize(
    ("card", "sequences", "tokens"),
    [("L4", 256, 2048), ("A100", 256, 2048), ("H100", 1024, 8192), ("NVIDIA B200:183359:10.0", 1024, 16384)],
)
def test_defaults_of_a_batch_are_those_of_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: str, sequences: int, tokens: int
) -> None:
    create_root(tmp_path, card)
    monkeypatch.setenv("LAB_GPU_ROOT", str(tmp_path))
    defaults = ["--max-num-seqs", str(sequences), "--max-num-batched-tokens", str(tokens)]
    assert command.rewrite(["/models/x"]) == ["/models/x", *defaults, *WORKER]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """The command line that replaces the wrapper."""
    executed: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, line: executed.append(line))
    monkeypatch.setattr("sys.argv", ["vllm", *arguments])
    command.main()
    return executed[0]


def test_serving_puts_simulated_gpus_under_the_command(lab_gpu_root: LabRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHDYNAMO_DISABLE", gpus.IDENTITY):
        monkeypatch.setenv(name, "")
    served = [sys.executable, "-m", command.PROCESSES, "serve", "/models/x"]
    assert run(monkeypatch, "serve", "/models/x") == [*served, *DEFAULTS, *WORKER]
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert json.loads(os.environ[gpus.IDENTITY]) == {"model": ["/models/x"]}


def test_outside_the_lab_it_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB_GPU_ROOT", str(tmp_path / "absent"))
    with pytest.raises(SystemExit, match=r"belongs to the lab of vllm-edge.*use the image vllm/vllm-openai"):
        run(monkeypatch, "serve", "/models/x")
    assert run(monkeypatch, "--version") == [command.REAL, "--version"]
    assert run(monkeypatch, "serve", "--help") == [command.REAL, "serve", "--help"]
    monkeypatch.setenv("LAB_GPU_ROOT", str(tmp_path))
    with pytest.raises(SystemExit, match="Failed to infer device type"):  # a container without GPUs
        run(monkeypatch, "serve", "/models/x")
