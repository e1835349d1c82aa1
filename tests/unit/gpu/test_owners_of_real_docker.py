# SPDX-License-Identifier: Apache-2.0
"""The whole way with nothing made up but the GPU: NVML's host pid, the kernel's cgroup file, a Docker Engine."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.nvidia.testing import LabRoot

Run = Callable[..., dict[str, Any]]

HOLDER = r"""
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int fd = open(argv[1], O_RDWR | O_CREAT, 0644);
    if (argc != 3 || fd < 0 || flock(fd, LOCK_EX) || write(fd, argv[2], strlen(argv[2])) < 0) return 1;
    write(1, "held\n", 5);
    pause();
    return 0;
}
"""


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60)
    if check:
        done.check_returncode()
    return done.stdout.strip()


def docker_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "version"], capture_output=True, timeout=10).returncode == 0
    except subprocess.TimeoutExpired:
        return False


pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(not docker_answers(), reason="no Docker Engine answers on this machine"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with one static program that holds a claim as an engine's process does."""
    directory = tmp_path_factory.mktemp("holder")
    (directory / "hold.c").write_text(HOLDER)
    subprocess.run(["cc", "-O1", "-static", "-o", directory / "hold", directory / "hold.c"], check=True)
    subprocess.run(["tar", "-cf", directory / "image.tar", "-C", directory, "hold"], check=True)
    name = f"vllm-edge-test-holder:{uuid.uuid4().hex[:8]}"
    docker("import", str(directory / "image.tar"), name)
    yield name
    docker("rmi", "-f", name, check=False)


@pytest.fixture
def hold(image: str, gpus: LabRoot) -> Iterator[Callable[..., str]]:
    """hold(gpu, mib, *docker options) -> the name of a container whose process holds the memory."""
    names: list[str] = []

    def run(gpu: int, mib: int, *options: str) -> str:
        names.append(f"vllm-edge-test-{uuid.uuid4().hex[:8]}")
        claims = gpus.gpu(gpu) / "claims"
        docker(
            "run", "--detach", f"--name={names[-1]}", "--network=none",
            f"--mount=type=bind,source={claims},target=/claims", *options,
            image, "/hold", f"/claims/{names[-1]}", str(mib),
        )  # fmt: skip
        for _ in range(100):
            if docker("logs", names[-1]) == "held":
                return names[-1]
            time.sleep(0.05)
        raise AssertionError(f"{names[-1]} does not hold its claim: {docker('ps', '-a')}")

    yield run
    for name in names:
        docker("rm", "-f", name, check=False)


def test_processes_are_followed_to_their_containers_and_units(
    gpus: LabRoot, hold: Callable[..., str], run_module: Run, tmp_path: Path
) -> None:
    engine = hold(0, 20600, "--label=vllm-edge.engine=e2b")
    other = hold(0, 1200)
    with gpus.claim(1, 700) as pid:
        result = run_module(
            "vram_budget", {"budgets": {"0": 20900}, "settle_timeout_s": 5, "slots_file": str(tmp_path / "none")}
        )
    assert result["rc"] == 0, result["msg"]
    zero, one = result["gpus"][:2]
    assert {(process["container"], process["unit"], process["owner"]) for process in zero["processes"]} == {
        (engine, "vllm-e2b.service", "ours"),
        (other, None, "foreign"),
    }
    assert {str(process["pid"]) for process in zero["processes"]} == {
        docker("inspect", "--format={{.State.Pid}}", name) for name in (engine, other)
    }
    assert (zero["used_mib"], zero["foreign_mib"], zero["engine_mib"]) == (21800, 1200, 20600)
    assert [(process["pid"], process["container"], process["owner"]) for process in one["processes"]] == [
        (pid, None, "foreign")
    ]
