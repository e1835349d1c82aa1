# SPDX-License-Identifier: Apache-2.0
"""The module and the command: the same document, printed for people or programs; and the page about the checks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.doctor import command, render
from ansible.module_utils.vllm_edge.doctor.registry import CHECKS, DEEP
from doctor_host import GPUS, NEW_GPU, FakeHost

Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("check", [False, True])
def test_the_module_reports_and_does_not_fail(run_module: Run, host: FakeHost, check: bool) -> None:
    host.module("570.211.01")
    args = {"host": "xr7620", "gpu_uuids": [*GPUS, NEW_GPU], "gpus": 2}
    found = run_module("host_doctor", args, check=check, replace={"Reader": lambda: host.reader})
    assert (found["rc"], found["changed"], found["doctor"]["exit_status"]) == (0, False, 2)
    assert [check["check"] for check in found["doctor"]["checks"]] == list(CHECKS)
    assert [problem.split(":")[0] for problem in found["problems"]] == ["driver.versions", "gpus.expected"]
    assert "allow_reboot=true" in found["problems"][0]
    assert found["lines"][-1].startswith("xr7620: ")
    assert found["lines"][-1].endswith("2 fail; failed: driver.versions, gpus.expected")


def test_the_module_writes_a_support_report_except_in_check_mode(
    run_module: Run, host: FakeHost, tmp_path: Path
) -> None:
    path = tmp_path / "report"
    replace = {"Reader": lambda: host.reader}
    args = {"support_report": str(path)}
    assert run_module("host_doctor", args, check=True, replace=replace)["rc"] == 0 and not path.exists()
    found = run_module("host_doctor", args, replace=replace)
    assert (found["rc"], found["changed"]) == (0, False) and path.stat().st_mode & 0o777 == 0o600
    failed = run_module("host_doctor", {"support_report": str(tmp_path / "absent/report")}, replace=replace)
    assert failed["failed"] and "absent/report cannot be written" in failed["msg"]


def test_the_module_runs_here(run_module: Run) -> None:
    """On whatever machine this is, as whatever user."""
    found = run_module("host_doctor", {})
    assert found["rc"] == 0
    assert [check["check"] for check in found["doctor"]["checks"]] == list(CHECKS)


@pytest.mark.parametrize(("version", "status"), [("580.173.02", 0), ("570.211.01", 2)])
def test_the_command_prints_one_object(
    host: FakeHost, capsys: pytest.CaptureFixture[str], version: str, status: int
) -> None:
    host.module(version)
    reader = host.reader
    assert command.run_doctor(reader.paths, output="json", support_report=None, reader=reader) == status
    printed = json.loads(capsys.readouterr().out)
    assert (printed["exit_status"], len(printed["checks"])) == (status, len(CHECKS))


def test_lines_for_people(host: FakeHost) -> None:
    host.unit("vllm-edge.target", UnitFileState="disabled")
    lines = render.render(host.examine() | {"host": "xr7620", "as_root": False, "summary": {"ok": 1, "unknown": 2}})
    assert all(len(line) <= render.WIDTH for line in lines)
    at = next(number for number, line in enumerate(lines) if line.startswith("warn    serving.boot"))
    assert lines[at + 1].strip().startswith("do: 'systemctl enable vllm-edge.target'")
    assert lines[-2:] == [
        "xr7620: 1 ok, 2 unknown",
        "Not everything is shown to this user: as root more of what is unknown can be read.",
    ]


def test_a_support_report_that_cannot_be_written(
    host: FakeHost, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "nowhere" / "report.tar.gz")
    assert command.run_doctor(host.reader.paths, output="text", support_report=path, reader=host.reader) == 2
    assert f"{path} cannot be written" in capsys.readouterr().err


def test_the_page_has_every_check() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "doctor.md").read_text()
    assert re.findall(r"^\| `([a-z]+\.[a-z-]+)` \| .+ \|$", page, re.MULTILINE) == [*CHECKS, *DEEP]
