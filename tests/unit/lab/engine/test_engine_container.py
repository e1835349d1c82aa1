# SPDX-License-Identifier: Apache-2.0
"""The engine image for real, with the flags of a unit: it serves, it claims, it refuses, and it lets go.

Needs the image that `lab/engine/build.py` makes (VLLM_EDGE_LAB_ENGINE_IMAGE, else the newest one of the lab).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT
from vllm_edge_lab import gpus, physics

from lab.nvidia import testing

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1200)]

MIB = 2**20
REPOSITORY = "google/gemma-4-E4B-it"
KV_BYTES = 4 * 2**30


def docker(*arguments: str, check: bool = True) -> str:
    return subprocess.run(
        ["docker", *arguments], check=check, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def image() -> str:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode != 0:
        pytest.skip("no Docker Engine answers")
    if name := os.environ.get("VLLM_EDGE_LAB_ENGINE_IMAGE"):
        return name
    names = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", "vllm-edge-lab/vllm-openai").splitlines()
    if not names:
        pytest.skip("the lab's engine image has not been built: python3 lab/engine/build.py")
    return names[0]


@pytest.fixture(scope="module")
def models(image: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "hub"
    build = ROOT / "lab/models/build.py"
    subprocess.run(["python3", str(build), "--image", image, "--out", str(out)], check=True)
    return out


@dataclass(frozen=True)
class Engine:
    container: str
    gpu: gpus.Gpu

    @property
    def url(self) -> str:
        return "http://" + docker("port", self.container, "8000/tcp").splitlines()[0]

    @property
    def log(self) -> str:
        return docker("logs", self.container)

    @property
    def running(self) -> bool:
        return docker("inspect", "--format", "{{.State.Running}}", self.container) == "true"

    @property
    def exit_code(self) -> int:
        return int(docker("inspect", "--format", "{{.State.ExitCode}}", self.container))

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self, seconds: float = 240) -> bool:
        """Until it is healthy (true) or has ended (false)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.running:
                return False
            if self.healthy():
                return True
            time.sleep(0.5)
        pytest.fail(f"neither healthy nor ended after {seconds} s:\n{self.log[-4000:]}")

    def post(self, path: str, content: dict[str, Any], timeout_s: float = 120) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def pids(self) -> set[int]:
        """Process ids as the host counts them."""
        return {int(pid) for pid in docker("top", self.container, "-eo", "pid").splitlines()[1:]}


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> gpus.Gpu:
    monkeypatch.setenv("LAB_GPU_ROOT", str(tmp_path))
    testing.create_root(tmp_path)
    return gpus.visible_gpus()[1]


@pytest.fixture
def engine(image: str, models: Path, board: gpus.Gpu, tmp_path: Path) -> Iterator[Engine]:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    command = ["run", "--detach", "--user=8050:8050", "--read-only", "--cap-drop=ALL", "--shm-size=512m"]
    command += ["--security-opt=no-new-privileges", "--tmpfs=/tmp:exec,mode=1777", "--publish=127.0.0.1::8000"]
    command += ["--label=vllm-edge-lab=test", "--env=HOME=/cache", "--env=HF_HUB_OFFLINE=1"]
    command += [f"--volume={cache}:/cache", f"--volume={models / REPOSITORY}:/models/e4b:ro"]
    # With LAB_GPU_ROOT the device nodes, which are nobody's here, are not asked for.
    library = testing.build_cuda(tmp_path / "driver")
    command += ["--env=LAB_GPU_ROOT=/var/lib/lab-gpu", f"--volume={tmp_path / 'module'}:/var/lib/lab-gpu/module:ro"]
    command += [f"--volume={library}:/usr/lib/x86_64-linux-gnu/libcuda.so.1:ro"]
    command += [f"--volume={board.path}:/var/lib/lab-gpu/gpus/{board.uuid}", image, "/models/e4b"]
    command += ["--served-model-name", "auditor", "--tensor-parallel-size", "1", "--max-model-len", "8192"]
    command += ["--kv-cache-memory-bytes", str(KV_BYTES), "--enable-auto-tool-choice", "--tool-call-parser", "gemma4"]
    container = docker(*command).splitlines()[-1]
    try:
        yield Engine(container, board)
    finally:
        docker("rm", "--force", "--volumes", container, check=False)


def test_it_serves_and_holds_the_real_models_memory(engine: Engine) -> None:
    assert engine.wait(), engine.log[-4000:]
    # Of all first requests the smallest, the supervisor's probe: what is compiled by then takes other lengths, too.
    for tokens in (1, 32):
        probe = {"model": "auditor", "prompt": [5] * tokens, "max_tokens": 1}
        assert engine.post("/v1/completions", probe)["usage"]["prompt_tokens"] == tokens
    answer = engine.post(
        "/v1/chat/completions",
        {"model": "auditor", "max_tokens": 4, "messages": [{"role": "user", "content": "Say hello."}]},
    )
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["choices"][0]["message"]["content"]

    log = engine.log
    assert "reserved 4.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes" in log
    # The same case as vLLM 0.33 computed for the real checkpoint's layers.
    assert "GPU KV cache size: 108,502 tokens, Maximum concurrency for 8,192 tokens per request: 13.24x" in log
    assert "CPU KV cache size" not in log

    need = physics.need(
        REPOSITORY,
        gpu_uuid=testing.UUIDS[1],
        cuda_total=engine.gpu.cuda_total,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.92,
        kv_cache_memory_bytes=KV_BYTES,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        enforce_eager=False,
        graphs_in_fraction=True,
    )
    assert f"Model loading took {round(need.weights / 2**30, 2)} GiB memory and" in log
    assert gpus.used_mib(engine.gpu) == pytest.approx(need.total / MIB, abs=3)
    (claim,) = [path for path in (engine.gpu.path / "claims").iterdir() if gpus.is_held(path)]
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    holders = {int(lock[4]) for lock in locks if lock[5].endswith(f":{claim.stat().st_ino}")}
    assert holders and holders <= engine.pids()

    docker("stop", engine.container)
    assert engine.exit_code == 0
    assert gpus.used_mib(engine.gpu) == 0


def test_a_gpu_too_full_is_refused_in_vllms_words(board: gpus.Gpu, request: pytest.FixtureRequest) -> None:
    (board.path / "faults" / "orphan").write_text("5000\n")
    engine: Engine = request.getfixturevalue("engine")
    assert not engine.wait()
    assert engine.exit_code == 1
    assert "is less than desired GPU memory utilization (0.92, 20.27 GiB)" in engine.log
    assert gpus.used_mib(board) == 5000


def test_without_a_compiler_the_first_completion_kills_it(board: gpus.Gpu, request: pytest.FixtureRequest) -> None:
    (board.path / "faults" / "engine-dies-on-first-completion").touch()
    engine: Engine = request.getfixturevalue("engine")
    assert engine.wait(), engine.log[-4000:]
    with pytest.raises(OSError):
        engine.post("/v1/completions", {"model": "auditor", "prompt": "Once", "max_tokens": 2})
    docker("wait", engine.container)
    assert "No working C++ compiler found" in engine.log
    assert gpus.used_mib(board) == 0


def test_faults_that_strike_an_engine_while_it_serves(engine: Engine, board: gpus.Gpu) -> None:
    def fault(name: str, value: str = "") -> Path:
        file = board.path / "faults" / name
        file.write_text(f"{value}\n")
        return file

    def ask(timeout_s: float = 120) -> str:
        content = {"model": "auditor", "max_tokens": 4, "messages": [{"role": "user", "content": "Say hello."}]}
        answer = engine.post("/v1/chat/completions", content, timeout_s)
        return answer["choices"][0]["message"]["content"] or ""

    assert engine.wait(), engine.log[-4000:]
    assert ask()
    fault("engine-nan-logits", "max_model_len=4096")
    assert ask(), "this fault is meant for another engine"
    wrong = fault("engine-nan-logits", f"max_model_len=8192,model={REPOSITORY},served_model_name=auditor")
    assert ask() == ""
    wrong.unlink()

    before = gpus.used_mib(board)
    fault("engine-grows", "700")
    assert ask()
    assert ask()
    assert gpus.used_mib(board) == before + 700

    hang = fault("engine-hangs")
    with pytest.raises(OSError):
        ask(timeout_s=3)
    assert engine.healthy()
    hang.unlink()
    assert ask()

    fault("engine-ignores-sigterm")
    time.sleep(1.5)
    docker("kill", "--signal=TERM", engine.container)
    time.sleep(3)
    assert ask()

    fault("gpu-lost")
    with pytest.raises(urllib.error.HTTPError):
        ask()
    docker("wait", engine.container)
    assert "CUDA error: unknown error" in engine.log
    assert gpus.used_mib(board) == 0
