# SPDX-License-Identifier: Apache-2.0
"""pid -> container -> engine -> unit. With a real Docker Engine the scenario `default` shows it of every engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.gpu import owners
from ansible.module_utils.vllm_edge.gpu.owners import ContainerRef, Owner, decide_owner, parse_cgroup
from ansible.module_utils.vllm_edge.names import LABEL_SIDECAR
from ansible.module_utils.vllm_edge.switch.model import Interrupted
from ansible.module_utils.vllm_edge.system import process
from ansible.module_utils.vllm_edge.system.docker import Container

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


KNOWN = {A: Container(A, "vllm-e2b", "running", {"vllm-edge.engine": "e2b"}), B: Container(B, "notebook", "running")}
BESIDE = {A: Container(A, "vllm-edge-bench", "running", {LABEL_SIDECAR: "bench"})}
USER = "user.slice/user-1000.slice/user@1000.service"
UNREACHABLE = Owner("unknown", A[:12], None, f"Docker cannot say whose container {A[:12]} is: it does not answer")


@pytest.mark.parametrize(
    ("cgroup", "docker", "expected"),
    [
        pytest.param(f"0::/docker/{A}", KNOWN, Owner("ours", "vllm-e2b", "vllm-e2b.service"), id="labelled"),
        pytest.param(f"0::/docker/{A}", BESIDE, Owner("sidecar", "vllm-edge-bench"), id="beside engines"),
        pytest.param(f"0::/docker/{B}", KNOWN, Owner("foreign", "notebook"), id="not labelled"),
        pytest.param(f"0::/docker/{C}", KNOWN, Owner("foreign", C[:12]), id="Docker does not know it"),
        pytest.param(f"0::/libpod-{A}.scope", KNOWN, Owner("foreign", f"podman:{A[:12]}"), id="podman, same id"),
        pytest.param("0::/system.slice/x.service", KNOWN, Owner("foreign", None, "x.service"), id="host's service"),
        pytest.param(
            f"0::/{USER}/app.slice/x.service", KNOWN, Owner("foreign", None, "x.service"), id="user's service"
        ),
        pytest.param("1:name=systemd:/user.slice\n0::/user.slice/s-3.scope", KNOWN, Owner("foreign"), id="no service"),
        pytest.param(None, KNOWN, Owner("unknown", reason=owners.ENDED), id="gone"),
        pytest.param(
            f"0::/docker/{A}", "it does not answer", UNREACHABLE, id="Docker unreachable: unknown, not foreign"
        ),
        pytest.param("0::/system.slice/x.service", "down", Owner("foreign", None, "x.service"), id="needs no Docker"),
    ],
)
def test_owner(cgroup: str | None, docker: Any, expected: Owner) -> None:
    assert decide_owner(cgroup, NOWHERE, lambda: docker) == expected


def test_docker_is_asked_once_for_many_processes_and_left_alone_if_none_is_in_a_container(
    docker_api: Any, processes: Any
) -> None:
    processes.belongs(100, "/system.slice/gdm.service")
    service, ended = Owner("foreign", None, "gdm.service"), Owner("unknown", reason=owners.ENDED)
    assert owners.find_owners([100, 4242]) == {100: service, 4242: ended}
    assert docker_api == []
    processes.engine(101)
    processes.somebody(102)
    assert owners.find_owners([101, 102]) == {
        101: Owner("ours", "vllm-e2b", "vllm-e2b.service"),
        102: Owner("foreign", "someones-notebook"),
    }
    assert docker_api == ["listed"]


def test_unreachable_docker_is_a_sentence(no_docker: None) -> None:
    answer = owners.list_docker_containers()
    assert isinstance(answer, str) and answer.startswith("it does not answer (")


def test_a_signal_that_ends_the_switch_is_no_answer_of_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    def signalled(**_: object) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr("docker.APIClient", signalled)
    with pytest.raises(Interrupted):
        owners.list_docker_containers()


def test_a_process_that_proc_hides_has_not_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With hidepid=2 there is no directory of it; kill(2) with signal 0 still tells that it lives."""
    for module in (owners, process):
        monkeypatch.setattr(module, "PROC", tmp_path)
    assert owners.find_owners([os.getpid()])[os.getpid()].reason == owners.HIDDEN
    assert process.command_of(os.getpid()) == "hidden"
    gone = 2**22 + 1  # above the kernel's largest pid
    assert owners.find_owners([gone])[gone].reason == owners.ENDED
    assert process.command_of(gone) == "ended"
