# SPDX-License-Identifier: Apache-2.0
"""Docker's answers, reduced; and its absence, told apart from its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system.docker import (
    DockerAway,
    DockerEngine,
    DockerRefused,
    DockerUnit,
    LogRecord,
    docker_unit,
    find_kill_signal,
    parse_container,
    parse_stamp,
    split_records,
)

INSPECT: dict[str, Any] = {
    "Id": "c" * 64,
    "Name": "/vllm-e2b",
    "Config": {"Labels": {"vllm-edge.engine": "e2b"}, "Image": "vllm:1"},
}
STAMP = "2026-11-21T03:00:00.000000001Z"


@pytest.mark.parametrize(
    ("status", "pid", "code"), [("running", 4711, None), ("exited", 0, 137), ("created", 0, None), ("dead", 0, 137)]
)
def test_a_container_that_does_not_run_has_no_pid(status: str, pid: int, code: int | None) -> None:
    found = parse_container({**INSPECT, "State": {"Pid": 4711, "Status": status, "ExitCode": 137}})
    assert (found.name, found.labels) == ("vllm-e2b", {"vllm-edge.engine": "e2b"})
    assert (found.running, found.pid, found.exit_code) == (bool(pid), pid, code)


def test_records_of_a_log() -> None:
    assert split_records(f"{STAMP} one\n{STAMP} two\n") == [LogRecord(STAMP, "one"), LogRecord(STAMP, "two")]
    assert split_records(f"{STAMP} \n") == [LogRecord(STAMP, "")]
    assert split_records(f"{STAMP}  10%|#\r 20%|##\r 30%|###   \r\n") == [LogRecord(STAMP, " 30%|###")]
    assert split_records("without a stamp", STAMP) == [LogRecord(STAMP, "without a stamp")]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1970-01-01T00:00:10.5Z", 10.5),
        ("1970-01-01T00:01:00Z", 60.0),
        ("0001-01-01T00:00:00Z", None),
        ("", None),
        ("yesterday", None),
    ],
)
def test_time_stamps(text: str, seconds: float | None) -> None:
    assert parse_stamp(text) == seconds


def test_who_killed_it() -> None:
    def kill(signal: str) -> dict[str, Any]:
        return {"Action": "kill", "Actor": {"Attributes": {"signal": signal}}}

    assert find_kill_signal([kill("15"), kill("9")]) == "SIGTERM"
    assert find_kill_signal([kill("9")]) == "SIGKILL"
    assert find_kill_signal([kill("1")]) == "signal 1"
    assert find_kill_signal([{"Action": "die"}]) is None


def test_an_absent_engine_is_away(tmp_path: Path) -> None:
    engine = DockerEngine({"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "PATH": "/nonexistent"})
    with pytest.raises(DockerAway):
        engine.ping(1)
    with pytest.raises(DockerAway):
        engine.find("x")
    with pytest.raises(DockerRefused, match="install Docker's client"):
        engine.create(["--name=x", "image"])


@pytest.mark.parametrize(
    ("shown", "active"),
    [
        ("LoadState=loaded\nActiveState=active", True),
        ("LoadState=loaded\nActiveState=activating", True),
        ("LoadState=loaded\nActiveState=inactive", False),
        ("LoadState=loaded\nActiveState=failed", False),
        ("LoadState=not-found\nActiveState=inactive", None),
        ("", None),
    ],
)
def test_docker_service_by_systemd(
    shown: str, active: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' 'Id=docker.service' 'InvocationID=0f' '{shown}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert docker_unit({}) == (None if active is None else DockerUnit(active, "0f"))
    assert docker_unit({"DOCKER_HOST": "tcp://10.0.0.1:2375"}) is None, "it is not systemd's"
