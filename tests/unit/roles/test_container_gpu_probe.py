# SPDX-License-Identifier: Apache-2.0
"""The probe's sentences, the command it runs, and its program over the simulated NVML."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab.nvidia import testing

ROOT = Path(__file__).resolve().parents[3]
PROBE = ROOT / "roles/container_runtime/files/probe.py"
GPUS = ["GPU-a", "GPU-b"]


@pytest.fixture
def module(load_module: Callable[[str], ModuleType]) -> ModuleType:
    return load_module("container_gpu_probe")


IMAGE, CONTAINER = {"image": "image"}, {"container": "vllm-e2b"}
BOTH = '{"driver": "580", "uuids": ["GPU-b", "GPU-a"]}'


@pytest.mark.parametrize(
    ("probed", "code", "out", "err", "said"),
    [
        (IMAGE, 0, BOTH, "a warning", ""),
        (IMAGE, 0, '{"driver": "580", "uuids": ["GPU-a"]}', "", "sees GPU-a"),
        (IMAGE, 0, '{"driver": "580", "uuids": ["GPU-a", "GPU-b", "GPU-c"]}', "", "Something else than CDI"),
        (IMAGE, 0, "", "", "ended with 0"),
        (IMAGE, 3, '{"error": "nvmlInit_v2: Driver/library version mismatch (18)"}', "", "version mismatch"),
        (IMAGE, 125, "", "docker: CDI device injection failed: unresolvable CDI devices x", "by its UUID"),
        (IMAGE, 125, "", 'docker: could not select device driver "cdi" with capabilities: []', "CDI is disabled"),
        (IMAGE, 125, "", "docker: Error response from daemon: No such image: x.", "image stage"),
        (IMAGE, 124, "", "", "within 60 s"),
        (IMAGE, 127, "", "exec: python3: not found", "python3: not found"),
        (CONTAINER, 0, BOTH, "", ""),
        (CONTAINER, 0, '{"driver": "580", "uuids": ["GPU-b"]}', "", "it sees GPU-b of GPU-a, GPU-b"),
        (CONTAINER, 3, '{"error": "nvmlInit_v2: Unknown Error (999)"}', "", "Unknown Error (999). If a new container"),
        (CONTAINER, 1, "", "Error response from daemon: No such container: vllm-e2b", "No such container"),
        (CONTAINER, 124, "", "", "within 60 s"),
    ],
)
def test_sentences(module: ModuleType, probed: dict[str, str], code: int, out: str, err: str, said: str) -> None:
    problem = module.judge(code, out, err, GPUS, 60, **probed)
    assert said in problem and bool(said) == bool(problem)
    if probed is CONTAINER and said and code != 124:
        assert '"systemctl restart vllm-e2b.service"' in problem


@pytest.fixture
def args(program: Callable[[str, str], None]) -> dict[str, Any]:
    program("docker", 'printf "%s\\n" "$@" > "$STATE/command"; cat "$STATE/answer"; exit "$(cat "$STATE/code")"')
    return {"image": "engine", "gpus": GPUS, "flags": ["--read-only", "--user=8050:8050"], "program": "pass"}


@pytest.mark.parametrize("check", [True, False])
def test_command_and_failure(
    run_module: Callable[..., dict[str, Any]], args: dict[str, Any], tmp_path: Path, check: bool
) -> None:
    (tmp_path / "answer").write_text(json.dumps({"driver": "580.173.02", "uuids": GPUS}) + "\n")
    (tmp_path / "code").write_text("0")
    result = run_module("container_gpu_probe", args, check=check)
    assert (result["changed"], result["problem"], result["driver"]) == (False, "", "580.173.02")
    command = (tmp_path / "command").read_text().splitlines()
    assert command[:3] == ["run", "--rm", "--pull=never"]
    assert command[4:] == [
        "--read-only",
        "--user=8050:8050",
        "--device=nvidia.com/gpu=GPU-a",
        "--device=nvidia.com/gpu=GPU-b",
        "--entrypoint=python3",
        "engine",
        "-c",
        "pass",
    ]
    (tmp_path / "code").write_text("125")
    (tmp_path / "answer").write_text("")
    result = run_module("container_gpu_probe", args, check=check)
    assert result["rc"] == (0 if check else 1)
    assert "ended with 125" in result["problem"]


@pytest.mark.parametrize("check", [True, False])
def test_one_that_runs(
    run_module: Callable[..., dict[str, Any]], args: dict[str, Any], tmp_path: Path, check: bool
) -> None:
    running = {"container": "vllm-e2b", "gpus": GPUS, "program": "pass"}
    (tmp_path / "answer").write_text(json.dumps({"driver": "580.173.02", "uuids": GPUS}) + "\n")
    (tmp_path / "code").write_text("0")
    result = run_module("container_gpu_probe", running, check=check)
    assert (result["changed"], result["problem"], result["driver"]) == (False, "", "580.173.02")
    assert (tmp_path / "command").read_text().splitlines() == ["exec", "vllm-e2b", "python3", "-c", "pass"]
    (tmp_path / "answer").write_text(json.dumps({"error": "nvmlInit_v2: Unknown Error (999)"}) + "\n")
    (tmp_path / "code").write_text("3")
    result = run_module("container_gpu_probe", running, check=check)
    assert result["rc"] == (0 if check else 1) and "Unknown Error (999)" in result["problem"]
    refused = run_module("container_gpu_probe", running | args)
    assert "mutually exclusive" in refused["msg"]


def run_probe(lab: testing.LabRoot, library: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", PROBE.read_text()]
    done = subprocess.run(command, env=lab.environment(library), capture_output=True, text=True)
    assert done.stderr == "", shlex.join(command[:1])
    return done.returncode, json.loads(done.stdout)


def test_program_over_nvml(tmp_path: Path) -> None:
    library = testing.build_library(tmp_path)
    lab = testing.create_root(tmp_path / "gpus", gpus=2)
    code, answer = run_probe(lab, library)
    assert (code, answer["uuids"]) == (0, sorted(testing.UUIDS[:2]))
    lab.set_module("570.1")
    code, answer = run_probe(lab, library)
    assert code == 3 and "mismatch" in answer["error"]
    lab.set_module(None)
    code, answer = run_probe(lab, library)
    assert code == 3 and "nvmlInit_v2" in answer["error"]
