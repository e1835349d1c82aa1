# SPDX-License-Identifier: Apache-2.0
"""The supervisor where Docker answers with errors: for a moment, for good, and while a switch waits for the engine."""

from __future__ import annotations

import signal
import time

import pytest
from ansible.module_utils.vllm_edge.engine import supervisor
from ansible.module_utils.vllm_edge.engine.supervisor import EXIT_FAILED, EXIT_OK
from ansible.module_utils.vllm_edge.switch.journal import Lock
from ansible.module_utils.vllm_edge.system.docker import DockerAway, DockerRefused
from fake_docker import FakeDocker
from supervised import LABELS, Begin, begin, docker, ended, quick

__all__ = ["begin", "docker", "quick"]  # fixtures


ALWAYS = 10_000


@pytest.mark.parametrize("call", ["find", "wait"])
def test_an_error_of_dockers_api_is_no_death(begin: Begin, docker: FakeDocker, call: str) -> None:
    case = begin().start().until_ready()
    docker.refuse(call, 2)
    docker.cut()
    case.until(lambda: not docker.fails[call] and "the Docker Engine is back" in case.output.getvalue())
    assert case.code is None, case.state()["last_failure"]
    docker.kill_container(9)
    assert case.fails() == "sigkill"


@pytest.mark.parametrize("times", [3, ALWAYS], ids=["a moment", "for good"])
def test_an_error_of_dockers_api_does_not_mean_that_somebody_removed_it(
    begin: Begin, docker: FakeDocker, times: int
) -> None:
    case = begin().start().until_ready()
    docker.refuse("find", times)
    docker.kill_container(9)
    assert case.fails() == ("sigkill" if times < ALWAYS else "unknown")


def test_who_stopped_it_is_asked_again_after_an_error_of_dockers_api(begin: Begin, docker: FakeDocker) -> None:
    docker.outside = "SIGTERM"
    case = begin().start().until_ready()
    docker.refuse("events", 1)
    docker.kill_container(15)
    assert case.fails() == "stopped_outside"


def test_the_log_is_followed_on_after_an_error_of_dockers_api(begin: Begin, docker: FakeDocker) -> None:
    case = begin().start()
    docker.log("line 1")
    case.until(lambda: "line 1" in case.output.getvalue())
    docker.refuse("follow", 1)
    docker.cut()
    docker.log("line 2")
    case.until(lambda: "line 2" in case.output.getvalue())
    assert case.output.getvalue().count("line 1") == 1
    assert case.output.getvalue().count("can be read again") == 1


def test_a_log_that_cannot_be_read_is_no_silence(begin: Begin, docker: FakeDocker) -> None:
    docker.refuse("follow", ALWAYS)
    docker.refuse("logs", ALWAYS)
    case = begin(stall_timeout_s=1).start()
    case.until(lambda: any("its log cannot be read" in text for text in case.told))
    time.sleep(1.5)
    assert case.code is None, case.state()["last_failure"]
    case.until_ready()


@pytest.mark.parametrize(
    ("call", "good"), [("info", 0), ("find", 0), ("find", 2), ("find", 3), ("stop", 0), ("remove", 0)]
)
def test_an_error_of_dockers_api_does_not_end_a_start(begin: Begin, docker: FakeDocker, call: str, good: int) -> None:
    docker.run_container({**LABELS, "vllm-edge.input-hash": "old"})
    docker.fails[call] = [*[None] * good, DockerRefused("500 Server Error: context deadline exceeded")]
    case = begin().start().until_ready()
    assert case.state()["last_failure"] is None
    assert docker.calls.count("start") == 1
    assert not docker.fails[call]


def test_no_engine_is_left_unwatched_where_docker_does_not_stop_it(begin: Begin, docker: FakeDocker) -> None:
    docker.refuse("stop", ALWAYS)
    case = begin(stall_timeout_s=1).start()
    assert case.fails() == "stalled"
    assert docker.process is not None and docker.process.poll() is not None


def test_a_stop_before_the_launch_takes_along_what_docker_does_not_stop(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    docker.refuse("find", 1)
    docker.refuse("stop", 1)
    case = begin()
    case.supervisor._signal = signal.SIGTERM
    case.start()
    assert case.ends() == EXIT_OK
    assert docker.container is None, "an engine of a stopped unit was left running"


# -- logs that cannot be read


def test_a_former_log_that_cannot_be_read_keeps_no_engine_from_starting(begin: Begin, docker: FakeDocker) -> None:
    docker.run_container(LABELS)
    docker.kill_container(9)
    found = docker.find("vllm-e2b")
    assert found is not None
    docker.container = ended(found)
    docker.refuse("logs", ALWAYS)
    case = begin().start().until_ready()
    assert case.state()["last_failure"]["cause"] == "sigkill", "it is explained by what is known without lines"


@pytest.mark.parametrize(
    "errors",
    [
        [DockerRefused("logs: 500 Server Error: context deadline exceeded")] * ALWAYS,
        [None, *[DockerAway("connection reset by peer")] * 20],
        [None, *[DockerRefused("logs: 500 Server Error")] * 20],
    ],
    ids=["always", "the connection ends", "an error of the API"],
)
def test_an_engine_that_serves_is_kept_though_its_log_cannot_be_read(
    begin: Begin, docker: FakeDocker, errors: list[Exception | None]
) -> None:
    pid = docker.run_container(LABELS).pid
    docker.fails["logs"] = list(errors)
    case = begin()
    case.healthy.set()
    case.start().until_ready()
    assert docker.container is not None and docker.container.pid == pid


# -- failures that heal


FULL = "no space left on device"


def test_a_refusal_that_heals_is_tried_again_without_systemd(begin: Begin, docker: FakeDocker) -> None:
    docker.refuse_start = FULL
    case = begin().start()
    case.until(lambda: docker.calls.count("start") > 2)
    told = [text for text in case.told if "Trying again in" in text]
    assert all("Docker's disk is full" in text and "EXTEND_TIMEOUT_USEC=" in text for text in told) and told
    assert case.state()["last_failure"]["cause"] == "docker_out_of_space"
    docker.refuse_start = ""
    case.until_ready()


def test_the_wait_for_what_heals_is_seen_and_obeys(
    begin: Begin, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RETRY_FIRST_S", 300)
    docker.refuse_start = FULL
    case = begin(patience_s=900).start()
    case.until(lambda: any("Trying again in" in text for text in case.told))
    case.until(lambda: case.state()["phase"] == "waiting-to-try-again")
    case.stop()
    assert case.ends() == EXIT_OK


def test_waits_grow_up_to_five_minutes(begin: Begin, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RETRY_FIRST_S", 5)
    docker.refuse_start = FULL
    case, waited, now = begin(patience_s=900), [0.0], [0.0]

    def pause(seconds: float, why: str) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(case.supervisor, "_wait_to_retry", pause)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    assert case.supervisor.run() == EXIT_FAILED
    assert waited == [0, 5, 10, 20, 40, 80, 160, 300, 285], "systemd's five starts in half an hour are never used up"


@pytest.mark.parametrize(
    ("refusal", "cause", "tries"), [(FULL, "docker_out_of_space", 1), ("what nobody has seen", "docker_refused", 2)]
)
def test_within_a_switch_a_refusal_ends_the_engine_at_once(
    begin: Begin, docker: FakeDocker, refusal: str, cause: str, tries: int
) -> None:
    docker.refuse_start = refusal
    case = begin(patience_s=900)
    with Lock(case.paths):
        case.start()
        assert case.ends() == EXIT_FAILED
    assert docker.calls.count("start") == tries
    state = case.state()
    assert (state["phase"], state["last_failure"]["cause"]) == ("failed", cause)


def test_one_error_of_dockers_api_does_not_end_a_switch(begin: Begin, docker: FakeDocker) -> None:
    docker.refuse("start", 1)
    case = begin()
    with Lock(case.paths):
        case.start().until_ready()
    assert docker.calls.count("create") == 2
