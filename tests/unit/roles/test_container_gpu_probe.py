# SPDX-License-Identifier: Apache-2.0
"""The probe's sentences, the command it runs, and its program over the simulated NVML."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system.long_run import begin_moving
from helpers import ROOT

from lab.nvidia import testing

PROBE = (ROOT / "plugins/module_utils/vllm_edge/gpu/container_probe.py").read_text()
GPUS = ["GPU-a", "GPU-b"]


@pytest.fixture
def module(load_module: Callable[[str], ModuleType]) -> ModuleType:
    return load_module("container_gpu_probe")


IMAGE, CONTAINER = {"image": "image"}, {"container": "vllm-e2b"}
LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.173.02"
COMPAT = "/usr/local/cuda-13.0/compat/libcuda.so.580.82.07"
SEEN = {"driver": "580.173.02", "uuids": GPUS, "libcuda": LIBRARY, "cuda": 13000, "devices": 2, "wanted": "13.0.2"}


def printed(**changes: Any) -> str:
    """What the program prints where all is well, but for some values."""
    return json.dumps(SEEN | changes)


BOTH = printed()


@pytest.mark.parametrize(
    ("probed", "code", "out", "err", "said"),
    [
        (IMAGE, 0, BOTH, "a warning", ""),
        (IMAGE, 0, '{"driver": "580", "uuids": ["GPU-a"]}', "", "sees GPU-a"),
        (IMAGE, 0, '{"driver": "580", "uuids": ["GPU-a", "GPU-b", "GPU-c"]}', "", "Something else than CDI"),
        (IMAGE, 0, "", "", "ended with 0"),
        (IMAGE, 0, printed(cuda=13010, wanted="13.1.0"), "", ""),
        (IMAGE, 0, printed(cuda=13000, wanted="9.2"), "", ""),
        (IMAGE, 0, printed(wanted=""), "", ""),
        (IMAGE, 0, printed(devices=1), "", "CUDA counts 1 GPUs of 2. 'nvidia-smi -L' on the host"),
        (IMAGE, 0, printed(cuda=12040), "", "CUDA 12.4 is there, and the image was made with 13.0.2: error 35,"),
        (IMAGE, 3, '{"error": "nvmlInit_v2: Driver/library version mismatch (18)"}', "", "version mismatch"),
        (IMAGE, 125, "", "docker: CDI device injection failed: unresolvable CDI devices x", "by its UUID"),
        (IMAGE, 125, "", 'docker: could not select device driver "cdi" with capabilities: []', "CDI is disabled"),
        (IMAGE, 125, "", "docker: Error response from daemon: No such image: x.", "image stage"),
        (IMAGE, 124, "", "", "within 60 s"),
        (IMAGE, 127, "", "exec: python3: not found", "python3: not found"),
        (CONTAINER, 0, BOTH, "", ""),
        (CONTAINER, 0, '{"driver": "580", "uuids": ["GPU-b"]}', "", "it sees GPU-b of GPU-a, GPU-b"),
        (CONTAINER, 3, printed(error="cuInit", code=999), "", "that node, CUDA does not. If"),
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


@pytest.mark.parametrize(
    ("call", "code", "libcuda", "said"),
    [
        ("cuInit", 999, LIBRARY, f"CUDA_ERROR_UNKNOWN (loaded: {LIBRARY}): most often /dev/nvidia-uvm is missing"),
        ("cuInit", 100, LIBRARY, "CUDA_ERROR_NO_DEVICE"),
        ("cuInit", 802, LIBRARY, "nvidia-fabricmanager"),
        ("cuInit", 803, COMPAT, f"(loaded: {COMPAT}): the libcuda that was"),
        ("cuInit", 804, COMPAT, "work with data-center cards only. Install a"),
        ("cuMemAlloc_v2 for GPU-b", 2, LIBRARY, ""),
        ("cuInit", 777, LIBRARY, "a CUDA error"),
    ],
)
def test_sentences_of_cudas_errors(module: ModuleType, call: str, code: int, libcuda: str, said: str) -> None:
    problem = module.judge(3, printed(error=call, code=code, libcuda=libcuda), "", GPUS, 60, **IMAGE)
    assert problem.startswith(f"{call}: error {code}, ") and said in problem


@pytest.fixture
def args(program: Callable[[str, str], None]) -> dict[str, Any]:
    # Another container has the first GPU, and a process of somebody uses the last.
    program(
        "docker",
        'case $1 in ps) echo c0ffee;; inspect) [ "$3" = c0ffee ] && echo \'{"DeviceIDs":["nvidia.com/gpu=GPU-a"]}\';; '
        '*) printf "%s\\n" "$@" > "$STATE/command"; cat "$STATE/answer"; exit "$(cat "$STATE/code")";; esac',
    )
    program("nvidia-smi", "echo GPU-c")
    return {"image": "engine", "gpus": GPUS, "flags": ["--read-only", "--user=8050:8050"]}


@pytest.mark.parametrize("check", [True, False])
def test_commands_and_failures(
    run_module: Callable[..., dict[str, Any]], args: dict[str, Any], tmp_path: Path, check: bool
) -> None:
    def run(given: dict[str, Any], code: int, answer: str) -> tuple[dict[str, Any], list[str]]:
        (tmp_path / "answer").write_text(f"{answer}\n")
        (tmp_path / "code").write_text(str(code))
        result = run_module("container_gpu_probe", given, check=check, replace={"RUN": str(tmp_path)})
        return result, (tmp_path / "command").read_text().replace(PROBE, "the program").splitlines()

    args["gpus"] = [*GPUS, "GPU-c"]
    result, command = run(args, 0, printed(uuids=args["gpus"], devices=3))
    assert (result["changed"], result["problem"], result["driver"]) == (False, "", "580.173.02")
    assert (result["libcuda"], result["cuda"]) == (LIBRARY, "13.0")
    assert command[:3] == ["run", "--rm", "--pull=never"]
    devices = [f"--device=nvidia.com/gpu={gpu}" for gpu in args["gpus"]]
    assert command[4] == "--label=vllm-edge.companion=probe"
    assert command[5:] == [*args["flags"], *devices, "--entrypoint=python3", "engine", "-c", "the program", "GPU-b"]
    running = {"container": "vllm-e2b", "gpus": GPUS}
    result, command = run(running, 0, BOTH)
    assert (result["changed"], result["problem"], result["driver"]) == (False, "", "580.173.02")
    assert command == ["exec", "vllm-e2b", "python3", "-c", "the program"]
    for given, code, answer, said in (
        (args, 125, "", "ended with 125"),
        (running, 3, json.dumps({"error": "nvmlInit_v2: Unknown Error (999)"}), "Unknown Error (999)"),
    ):
        result, _ = run(given, code, answer)
        assert result["rc"] == (0 if check else 1) and said in result["problem"]
    with begin_moving(tmp_path):
        result, command = run(args, 125, "")
        assert command[-1] == "the program", "an engine that starts measures what is free"
    assert result["problem"].startswith("this is not judged, because a switch began")
    assert "mutually exclusive" in run_module("container_gpu_probe", running | args)["msg"]


def run_probe(lab: testing.LabRoot, library: Path, *free: str, **more: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", PROBE, *free]
    done = subprocess.run(command, env=lab.environment(library) | more, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def gpus(tmp_path: Path) -> tuple[testing.LabRoot, Path]:
    """Two GPUs as a container has them, with its libraries."""
    library = testing.build_library(tmp_path)
    testing.build_cuda(tmp_path)
    lab = testing.create_root(tmp_path / "gpus", gpus=2)
    lab.set_nodes("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm")
    return lab, library


@pytest.mark.slow
def test_program_over_nvml_and_cuda(gpus: tuple[testing.LabRoot, Path], module: ModuleType) -> None:
    lab, library = gpus
    code, answer = run_probe(lab, library, *testing.UUIDS[:2], CUDA_VERSION="13.0.2")
    assert (code, answer["uuids"], answer["devices"]) == (0, sorted(testing.UUIDS[:2]), 2)
    assert answer["memory"].keys() == set(testing.UUIDS[:2])
    assert all(0 < gpu["free_bytes"] < gpu["total_bytes"] for gpu in answer["memory"].values())
    assert run_probe(lab, library)[1]["memory"] == {}, "without arguments no context is created"
    assert answer["libcuda"] == str(library.parent / "libcuda.so.1")
    assert (answer["cuda"], answer["wanted"]) == (13000, "13.0.2")
    assert module.judge(code, json.dumps(answer), "", list(testing.UUIDS[:2]), 60, "image") == ""
    lab.set_module("570.1")
    code, answer = run_probe(lab, library)
    assert code == 3 and answer["error"].startswith("nvmlInit_v2: ") and "mismatch" in answer["error"]


@pytest.mark.slow
def test_program_where_nvml_answers_and_cuda_does_not(gpus: tuple[testing.LabRoot, Path]) -> None:
    lab, library = gpus
    (lab.path / "dev/nvidia-uvm").unlink()
    code, answer = run_probe(lab, library)
    assert (code, answer["error"], answer["code"]) == (3, "cuInit", 999) and len(answer["uuids"]) == 2
    lab.set_nodes("nvidia-uvm")
    for error in (802, 803, 804):
        lab.set_fault(0, "cuda-init-fails", error)
        assert run_probe(lab, library)[1]["code"] == error
    lab.clear_fault(0, "cuda-init-fails")
    # A card without a context is of interest where no engine holds it.
    lab.set_fault(1, "cuda-context-fails")
    assert run_probe(lab, library, testing.UUIDS[0])[0] == 0
    code, answer = run_probe(lab, library, *testing.UUIDS[:2])
    assert (code, answer["error"], answer["code"]) == (3, f"cuDevicePrimaryCtxRetain for {testing.UUIDS[1]}", 46)
    lab.clear_fault(1, "cuda-context-fails")
    with lab.claim(0, 22400):
        code, answer = run_probe(lab, library, testing.UUIDS[0])
        assert (code, answer["code"]) == (3, 2)


@pytest.mark.parametrize(
    "line",
    ['{"uuids": 7, "wanted": [1], "code": "x", "error": {}}', "{" * 5000, '{"a":' * 5000, '{"uuids": [1, null, {}]}'],
)
def test_an_image_that_prints_something_else_is_a_sentence(module: ModuleType, line: str) -> None:
    assert module.judge(0, line, "\x1b[2J", ["GPU-1"], 5, "image").strip()
    assert all(type(value) is module.TYPES[key] for key, value in module.answer_of(line).items())
