# SPDX-License-Identifier: Apache-2.0
"""The supervisor while the Docker Engine goes away and comes back, with and without live-restore."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
from ansible.module_utils.vllm_edge.engine.supervisor import EXIT_CONFIG, EXIT_FAILED, EXIT_OK
from ansible.module_utils.vllm_edge.system.docker import DockerUnit
from fake_docker import FakeDocker
from supervised import LABELS, Begin, begin, docker, ended, quick

__all__ = ["begin", "docker", "quick"]  # fixtures


def test_live_restore_the_engine_is_never_bounced(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start()
    docker.log("line 1")
    case.until_ready()
    pid = docker.container.pid if docker.container else 0
    docker.away.set()
    case.until(lambda: any("the Docker Engine is away" in text for text in case.told))
    docker.log("line 2, written while Docker was away")
    before = case.fed()
    time.sleep(1.0)
    assert case.fed() >= before + 2, "a living engine was called dead because its published port went with Docker"
    assert "http://172.30.0.2:8000" in case.asked
    docker.away.clear()
    case.until(lambda: "the Docker Engine is back" in case.output.getvalue())
    docker.log("line 3")
    case.until(lambda: "line 3" in case.output.getvalue())
    text = case.output.getvalue()
    assert [text.count(f"line {n}") for n in (1, 2, 3)] == [1, 1, 1], "lines were lost or printed twice"
    assert case.thread.is_alive()
    assert docker.container is not None and docker.container.pid == pid
    assert docker.calls.count("start") == 1
    case.until(lambda: case.told[-1] != "" and case.state()["phase"] == "serving")
    case.stop()
    assert case.ends() == EXIT_OK
    assert docker.container is None


def test_without_live_restore_the_death_is_dockers(begin: Begin, docker: FakeDocker) -> None:
    docker.live = False
    case = begin(patience_s=900).start().until_ready()
    docker.away.set()
    docker.kill_container(15)
    assert case.ends() == EXIT_FAILED, "it waited for Docker"
    failure = case.state()["last_failure"]
    assert failure["cause"] == "docker_stopped"
    assert "live-restore" in failure["remedy"]


def test_docker_that_is_back_at_once_is_still_the_cause(begin: Begin, docker: FakeDocker) -> None:
    docker.live = False
    case = begin().start().until_ready()
    case.until_docker_is_missed()
    docker.kill_container(15)
    docker.away.clear()
    assert case.fails() == "docker_stopped"


@pytest.mark.parametrize("now", [DockerUnit(False, "1"), DockerUnit(True, "2")], ids=["ending", "another"])
def test_docker_that_answers_until_it_ends(begin: Begin, docker: FakeDocker, now: DockerUnit) -> None:
    """Newer Docker stops its containers before it closes its socket, and sends them the signal a person would send."""
    docker.live = False
    docker.outside = "SIGTERM"
    case = begin()
    case.unit = DockerUnit(True, "1")
    case.start().until_ready()
    case.unit = now
    docker.kill_container(15)
    assert case.fails() == "docker_stopped"


def test_a_person_at_the_same_docker_is_told_apart(begin: Begin, docker: FakeDocker) -> None:
    docker.outside = "SIGTERM"
    case = begin()
    case.unit = DockerUnit(True, "1")
    case.start().until_ready()
    docker.kill_container(15)
    assert case.fails() == "stopped_outside"


def test_while_its_service_is_stopped_docker_is_left_alone(begin: Begin, docker: FakeDocker) -> None:
    case = begin()
    case.unit = DockerUnit(True, "1")
    case.start().until_ready()
    case.unit = DockerUnit(False, "1")
    case.until_docker_is_missed()
    time.sleep(0.3)
    asked = len(docker.calls)
    time.sleep(1.5)
    assert len(docker.calls) == asked, f"the socket was touched: {docker.calls[asked:]}"
    docker.away.clear()
    case.unit = DockerUnit(True, "2")
    case.until(lambda: "the Docker Engine is back" in case.output.getvalue())


def test_an_engine_that_dies_while_docker_is_away(begin: Begin, docker: FakeDocker) -> None:
    case = begin(patience_s=900).start().until_ready()
    case.until_docker_is_missed()
    time.sleep(0.3)
    docker.kill_container(9)
    assert case.fails() == "died_while_docker_away"


def test_stop_while_docker_is_away_ends_the_process(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start().until_ready()
    case.until_docker_is_missed()
    case.stop()
    assert docker.process is not None
    assert docker.process.wait(5) == -signal.SIGTERM, "the engine outlived its unit"
    assert case.ends() == EXIT_OK
    assert "next start removes" in case.output.getvalue()


def test_the_start_waits_for_docker(begin: Begin, docker: FakeDocker) -> None:
    docker.away.set()
    case = begin().start()
    case.until(lambda: any("STATUS=waiting for the Docker Engine" in text for text in case.told))
    assert any("EXTEND_TIMEOUT_USEC=" in text for text in case.told)
    docker.away.clear()
    case.until_ready()


def test_a_stopped_docker_service_is_not_woken_through_its_socket(begin: Begin, docker: FakeDocker) -> None:
    case = begin()
    case.unit = DockerUnit(False, "")
    case.start()
    case.until(lambda: any("docker.service is not running" in text for text in case.told))
    time.sleep(0.2)
    assert docker.calls == []
    case.unit = DockerUnit(True, "1")
    case.until_ready()


def test_the_wait_for_docker_has_an_end(begin: Begin, docker: FakeDocker) -> None:
    docker.away.set()
    case = begin().start()
    assert case.ends(8) == EXIT_FAILED
    assert case.state()["last_failure"]["cause"] == "docker_away"


def test_a_stop_during_the_wait_takes_along_what_was_left(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    docker.away.set()
    case = begin().start()
    case.until(lambda: any("waiting for the Docker Engine" in text for text in case.told))
    docker.away.clear()
    case.supervisor._signal = signal.SIGTERM
    assert case.ends() == EXIT_OK
    assert docker.container is None, "an engine of a stopped unit was left running"


@pytest.mark.parametrize(
    ("refusal", "cause"),
    [
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=GPU-1", "cdi_unresolvable"),
        ("something nobody has seen", "docker_refused"),
    ],
)
def test_a_refused_start_leaves_no_container(begin: Begin, docker: FakeDocker, refusal: str, cause: str) -> None:
    docker.refuse_start = refusal
    case = begin().start()
    assert case.fails() == cause
    assert docker.container is None
    assert cause != "docker_refused" or refusal in case.state()["last_failure"]["reason"]


def test_a_removal_in_progress_is_waited_for(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container({**LABELS, "vllm-edge.input-hash": "old"})
    docker.refuse_remove = 3
    case = begin().start().until_ready()
    assert docker.calls.count("remove") == 4
    assert docker.calls.index("create") > docker.calls.index("remove")
    assert "made from other inputs" in case.output.getvalue()


def test_a_container_that_died_unwatched_is_explained(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    docker.log("ValueError: No available memory for the cache blocks. Try increasing")
    docker.kill_container(9)
    found = docker.find("vllm-e2b")
    assert found is not None
    docker.container = replace(ended(found), exit_code=1)
    case = begin().start().until_ready()
    failure = case.state()["last_failure"]
    assert failure["cause"] == "no_kv" and failure["time"] == "2026-11-21T03:00:09Z"
    assert "ended unwatched" in case.output.getvalue()


def test_a_foreign_container_ends_it_for_good(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container({})
    case = begin().start()
    assert case.ends() == EXIT_CONFIG
    assert not {"stop", "remove", "create"} & set(docker.calls)
    assert any(line.startswith("<3>") for line in case.output.getvalue().splitlines())


def test_a_state_directory_that_cannot_be_written_stops_no_engine(begin: Begin, docker: FakeDocker) -> None:
    case = begin()
    case.paths.state.write_text("a file where a directory should be")
    case.start().until_ready()
    assert case.output.getvalue().count("the engine runs on without it") == 1
