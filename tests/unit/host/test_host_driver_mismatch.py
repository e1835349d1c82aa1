# SPDX-License-Identifier: Apache-2.0
"""The supervisor does not start a container that could not reach its GPUs, and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.supervisor import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from ansible.module_utils.vllm_edge.gpu.driver import DriverVersions
from fake_docker import FakeDocker
from supervised import LABELS, Case

LIBRARY = {"libnvidia-ml.so.1": "580.173.02"}
REBOOT = DriverVersions("570.211.01", LIBRARY)
STALE = DriverVersions("580.173.02", LIBRARY, {"/var/run/cdi/nvidia.yaml": ("570.211.01",)})
Begin = Callable[[DriverVersions], Case]


@pytest.fixture
def docker() -> Iterator[FakeDocker]:
    made = FakeDocker()
    yield made
    made.close()


@pytest.fixture
def begin(tmp_path: Path, docker: FakeDocker) -> Iterator[Begin]:
    cases: list[Case] = []

    def make(found: DriverVersions, **changes: Any) -> Case:
        case = Case(tmp_path, docker, **changes)
        case.supervisor._driver = lambda: found
        cases.append(case)
        return case

    yield make
    for case in cases:
        case.stop()
        if case.thread.ident is not None:
            case.thread.join(5)
        case.socket.close()


@pytest.mark.parametrize(
    ("found", "status", "reason", "remedy"),
    [
        (REBOOT, EXIT_CONFIG, "the loaded NVIDIA kernel module is 570.211.01", "Reboot the host"),
        # The specification is made anew without anybody's doing: systemd tries again.
        (STALE, EXIT_FAILED, "/var/run/cdi/nvidia.yaml mounts 570.211.01", "nvidia-cdi-refresh.service"),
    ],
    ids=["reboot pending", "specification stale"],
)
def test_no_container_is_started(
    begin: Begin, docker: FakeDocker, found: DriverVersions, status: int, reason: str, remedy: str
) -> None:
    case = begin(found).start()
    assert case.ends() == status
    assert "create" not in docker.calls
    failure = case.state()["last_failure"]
    assert failure["cause"] == "driver_mismatch"
    assert reason in failure["reason"] and remedy in failure["remedy"]
    assert reason in case.output.getvalue().replace("The loaded", "the loaded")


@pytest.mark.parametrize(
    "found",
    [DriverVersions(), DriverVersions("", LIBRARY), DriverVersions("580.173.02", LIBRARY)],
    ids=["nothing known", "module not known", "one version"],
)
def test_what_is_not_known_is_no_reason(begin: Begin, docker: FakeDocker, found: DriverVersions) -> None:
    case = begin(found).start().until_ready()
    assert docker.calls.count("create") == 1
    case.stop()
    assert case.ends() == EXIT_OK


def test_an_engine_that_runs_already_is_kept(begin: Begin, docker: FakeDocker) -> None:
    """The driver was upgraded underneath it: it works until it is stopped."""
    docker.run_container(LABELS)
    case = begin(REBOOT)
    case.healthy.set()
    case.start().until_ready()
    assert "create" not in docker.calls and case.thread.is_alive()
    case.stop()
    assert case.ends() == EXIT_OK
