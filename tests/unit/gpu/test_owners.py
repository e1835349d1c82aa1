# SPDX-License-Identifier: Apache-2.0
"""pid -> container -> engine -> unit; at the end with nothing made up but the GPU."""

from __future__ import annotations

import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gpu import owners
from ansible.module_utils.vllm_edge.gpu.owners import (
    ContainerRef,
    Owner,
    decide_owner,
    parse_cgroup,
    parse_unit,
)
from ansible.module_utils.vllm_edge.switch.model import Interrupted
from ansible.module_utils.vllm_edge.system.docker import Container

from lab.nvidia.testing import LabRoot

A, B, C = "a" * 64, "b" * 64, "c" * 64
NOWHERE: frozenset[str] = frozenset()
IN_A, IN_B = ContainerRef(A, "docker"), ContainerRef(B, "docker")
POD = f"0::/kubepods.slice/kubepods-besteffort.slice/cri-containerd-{A}.scope"


@pytest.mark.parametrize(
    ("cgroup", "around", "expected"),
    [
        pytest.param(f"12:cpuset:/docker/{A}", NOWHERE, IN_A, id="v1"),
        pytest.param(f"12:cpuset:/docker/{A}/docker/{B}", NOWHERE, IN_B, id="docker in docker"),
        pytest.param(f"4:pids:/docker/{A}/system.slice/docker-{B}.scope", NOWHERE, IN_B, id="nested systemd"),
        pytest.param(f"0::/system.slice/docker-{A}.scope/x/y", NOWHERE, IN_A, id="v2 sub-cgroup"),
        pytest.param(f"0::/gpu.slice/{A}", NOWHERE, IN_A, id="cgroup-parent of the operator"),
        pytest.param(f"0::/x.slice/libpod-{A}.scope/container", NOWHERE, ContainerRef(A, "podman"), id="podman v2"),
        pytest.param(f"0::/machine.slice/libpod-conmon-{A}.scope", NOWHERE, None, id="podman's conmon"),
        pytest.param(POD, NOWHERE, ContainerRef(A, "other"), id="kubernetes systemd"),
        pytest.param(f"4:pids:/kubepods/burstable/pod1/{A}", NOWHERE, ContainerRef(A, "other"), id="kubernetes v1"),
        pytest.param("0::/system.slice/ssh.service", NOWHERE, None, id="service"),
        pytest.param("0::/", NOWHERE, None, id="root"),
        pytest.param(f"0::/docker/{A[:63]}", NOWHERE, None, id="63 digits are no id"),
        pytest.param(f"0::/docker/{A}/system.slice/x.service", frozenset({A}), None, id="the host is a container"),
        pytest.param(f"0::/docker/{A}/docker/{B}", frozenset({A}), IN_B, id="container of such a host"),
        pytest.param(f"5:net_cls:/\n4:pids:/docker/{A}\n0::/", NOWHERE, IN_A, id="v1 with roots beside it"),
    ],
)
def test_container_of_a_cgroup(cgroup: str, around: frozenset[str], expected: ContainerRef | None) -> None:
    assert parse_cgroup(cgroup, around) == expected


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ("0::/system.slice/gdm.service", "gdm.service"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/jupyter.service", "jupyter.service"),
        ("1:name=systemd:/user.slice\n0::/user.slice/session-3.scope", None),
    ],
)
def test_unit_of_a_process_of_the_host(cgroup: str, expected: str | None) -> None:
    assert parse_unit(cgroup) == expected


KNOWN = {A: Container(A, "vllm-e2b", "running", {"vllm-edge.engine": "e2b"}), B: Container(B, "notebook", "running")}


@pytest.mark.parametrize(
    ("cgroup", "docker", "expected"),
    [
        pytest.param(f"0::/docker/{A}", KNOWN, Owner("ours", "vllm-e2b", "vllm-e2b.service"), id="labelled"),
        pytest.param(f"0::/docker/{B}", KNOWN, Owner("foreign", "notebook"), id="not labelled"),
        pytest.param(f"0::/docker/{C}", KNOWN, Owner("foreign", C[:12]), id="Docker does not know it"),
        pytest.param(f"0::/libpod-{A}.scope", KNOWN, Owner("foreign", f"podman:{A[:12]}"), id="podman, same id"),
        pytest.param("0::/system.slice/x.service", KNOWN, Owner("foreign", None, "x.service"), id="host's service"),
        pytest.param(None, KNOWN, Owner("unknown", reason=owners.ENDED), id="gone"),
        pytest.param(
            f"0::/docker/{A}",
            "it does not answer",
            Owner("unknown", A[:12], None, f"Docker cannot say whose container {A[:12]} is: it does not answer"),
            id="Docker unreachable: unknown, not foreign",
        ),
        pytest.param("0::/system.slice/x.service", "down", Owner("foreign", None, "x.service"), id="needs no Docker"),
    ],
)
def test_owner(cgroup: str | None, docker: Any, expected: Owner) -> None:
    assert decide_owner(cgroup, NOWHERE, lambda: docker) == expected


def test_docker_is_asked_once_for_many_processes(docker_api: Any, processes: Any) -> None:
    processes.engine(101)
    processes.somebody(102)
    assert owners.find_owners([101, 102]) == {
        101: Owner("ours", "vllm-e2b", "vllm-e2b.service"),
        102: Owner("foreign", "someones-notebook"),
    }
    assert docker_api.requests == 1


def test_docker_is_left_alone_when_no_process_is_in_a_container(docker_api: Any, processes: Any) -> None:
    processes.belongs(101, "/system.slice/gdm.service")
    service, ended = Owner("foreign", None, "gdm.service"), Owner("unknown", reason=owners.ENDED)
    assert owners.find_owners([101, 4242]) == {101: service, 4242: ended}
    assert docker_api.requests == 0


def test_unreachable_docker_is_a_sentence(no_docker: None) -> None:
    answer = owners.list_docker_containers()
    assert isinstance(answer, str) and answer.startswith("it does not answer (")


def test_a_signal_that_ends_the_switch_is_no_answer_of_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(**_: object) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr("docker.APIClient", signalled)
    with pytest.raises(Interrupted):
        owners.list_docker_containers()


# ---- the whole way, with a Docker Engine ------------------------------------------------------------------------

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


@pytest.mark.docker
@pytest.mark.skipif(not docker_answers(), reason="no Docker Engine answers on this machine")
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
