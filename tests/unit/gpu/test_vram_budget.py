# SPDX-License-Identifier: Apache-2.0
"""The module vram_budget: the real AnsibleModule, the real nvidia-ml-py, simulated GPUs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system.long_run import begin_moving
from fake_host import Clock

from lab.nvidia.testing import UUIDS, LabRoot

Run = Callable[..., dict[str, Any]]


class Time(Clock):
    """A clock that the module's sleep moves."""

    monotonic = Clock.__call__


@pytest.fixture
def measure(run_module: Run, tmp_path: Path) -> Run:
    """Run vram_budget; time is made up unless `clock` is the real one."""

    def run(budgets: dict[Any, Any], *, check: bool = False, clock: Any = None, **options: Any) -> dict[str, Any]:
        given = {"slots_file": str(tmp_path / "no-slots.json"), "budgets": budgets, **options}
        return run_module("vram_budget", given, check=check, replace={"time": clock or Time(), "RUN": str(tmp_path)})

    return run


def test_within_budget(gpus: LabRoot, measure: Run, docker_api: Any, processes: Any) -> None:
    with gpus.claim(0, 20600) as pid:
        processes.engine(pid)
        result = measure({"0": 20900}, expected_mib={"0": 20600})
        below = measure({"0": 20900}, expected_mib={"0": 20901})
    assert "301 MiB less than the expected 20901" in below["warnings"][0] and below["rc"] == 0
    assert (result["rc"], result["changed"], result["settled"], result["warnings"]) == (0, False, True, [])
    assert len(result["gpus"]) == 4
    process = {"pid": pid, "used_mib": 20600, "container": "vllm-e2b", "unit": "vllm-e2b.service"}
    assert result["gpus"][0] == {
        **{"index": 0, "slot": 0, "uuid": UUIDS[0], "name": "NVIDIA L4", "pci_bus_id": "00000000:17:00.0"},
        **{"compute_capability": "8.9", "memory_version": "v2", "total_mib": 23034, "reserved_mib": 470},
        **{"used_mib": 20600, "free_mib": 1964, "engine_mib": 20600, "engine_mib_is": "exact", "foreign_mib": 0},
        **{"unattributed_mib": 0, "budget_mib": 20900, "expected_mib": 20600, "headroom_mib": 300},
        **{"within_budget": True, "processes": [{**process, "owner": "ours", "reason": None}]},
    }
    assert result["msg"].startswith("Every GPU is within its budget (GPU 0: 20600 of 20900 MiB; GPU 1: 0 of 0 MiB")


def test_a_host_whose_engines_move_meanwhile_is_not_judged(gpus: LabRoot, measure: Run, tmp_path: Path) -> None:
    clock = Time()
    clock.at(1, lambda: move(tmp_path))
    gpus.set_fault(3, "orphan", 300)
    result = measure({}, clock=clock)
    assert (result["rc"], "failures" in result) == (1, False)
    assert result["msg"].startswith("VRAM was not judged, because a switch began") and "over budget" in result["msg"]


def move(run: Path) -> None:
    with begin_moving(run):
        pass


def test_an_orphan_is_found_after_the_time_to_settle_in_check_mode_as_well(gpus: LabRoot, measure: Run) -> None:
    gpus.set_fault(3, "orphan", 300)
    for check in (False, True):
        clock = Time()
        result = measure({}, check=check, clock=clock, settle_timeout_s=12)
        assert (result["rc"], clock.now, result["gpus"][3]["unattributed_mib"]) == (1, 1012, 300)
        assert f"nvidia-smi --gpu-reset -i {UUIDS[3]}" in result["msg"]


def test_an_nvml_error_fails_with_its_remedy(gpus: LabRoot, measure: Run) -> None:
    gpus.set_fault(1, "nvml-error", "NO_PERMISSION")
    result = measure({})
    assert (result["rc"], result["nvml"]["code"], result["nvml"]["gpu"]) == (1, "NO_PERMISSION", UUIDS[1])
    assert result["nvml"]["sentence"] in result["msg"] and result["nvml"]["remedy"] in result["msg"]
    gpus.clear_fault(1, "nvml-error")
    gpus.set_fault(2, "gpu-lost")
    result = measure({}, gpu_slots=list(UUIDS))
    assert (result["rc"], result["nvml"]["gpu"]) == (1, UUIDS[2])
    assert "slot 2" in result["msg"]


def test_a_gpu_lost_while_measuring_is_named_with_what_was_read_before(gpus: LabRoot, measure: Run) -> None:
    clock = Time()
    clock.at(1, lambda: gpus.set_fault(2, "gpu-lost"))
    result = measure({}, clock=clock)
    assert (result["rc"], result["nvml"]["code"], result["nvml"]["gpu"]) == (1, "GPU_IS_LOST", UUIDS[2])
    assert "NVIDIA L4 at 00000000:B1:00.0" in result["msg"]
    assert len(result["gpus"]) == 4


@pytest.mark.parametrize(
    ("module", "check", "rc", "skipped"),
    [(None, False, 1, False), (None, True, 0, True), ("570.1", False, 1, False), ("570.1", True, 1, False)],
)
def test_a_driver_that_does_not_answer(
    gpus: LabRoot, measure: Run, module: str | None, check: bool, rc: int, skipped: bool
) -> None:
    gpus.set_module(module)
    result = measure({"0": 1}, check=check)
    assert (result["rc"], result.get("skipped", False)) == (rc, skipped)
    assert ("is not loaded" if module is None else "Reboot the server") in result["msg"]


@pytest.mark.parametrize(
    ("budgets", "options", "teaches"),
    [
        ({"7": 5}, {}, "names slot 7, but this host has the slots 0 to 3"),
        ({}, {"expected_mib": {"0": "20 GB"}}, "expected_mib[0] is '20 GB'"),
        ({}, {"settle_timeout_s": -1}, "settle_timeout_s is -1"),
        ({}, {"tolerance_mib": -1}, "tolerance_mib is -1"),
        ({}, {"gpu_slots": [UUIDS[0], UUIDS[0]]}, "2 times, as slots 0 and 1"),
    ],
)
def test_refused_input(
    gpus: LabRoot, measure: Run, budgets: dict[str, Any], options: dict[str, Any], teaches: str
) -> None:
    result = measure(budgets, **options)
    assert (result["rc"], result["gpus"]) == (1, [])
    assert teaches in result["msg"]


def test_slots_are_those_of_the_host(
    gpus: LabRoot, measure: Run, tmp_path: Path, docker_api: Any, processes: Any
) -> None:
    turned, file = list(reversed(UUIDS)), tmp_path / "slots.json"
    file.write_text(json.dumps({"version": 1, "gpus": [{"slot": n, "uuid": uuid} for n, uuid in enumerate(turned)]}))
    with gpus.claim(UUIDS[3], 800) as pid:
        processes.engine(pid)
        found = [measure({"0": 1000}, gpu_slots=turned), measure({"0": 1000}, slots_file=str(file))]
    for result in found:
        last = result["gpus"][3]
        assert result["rc"] == 0
        assert (last["uuid"], last["slot"], last["budget_mib"], last["engine_mib"]) == (UUIDS[3], 0, 1000, 800)
    file.write_text("{")
    result = measure({}, slots_file=str(file))
    assert result["rc"] == 1 and "is not a record of GPU slots" in result["msg"]


# ---- the interpreter --------------------------------------------------------------------------------------------


modules = pytest.mark.parametrize(("module", "given"), [("vram_budget", {"budgets": {}}), ("gpu_slots", {})])


@modules
def test_respawns_once_into_the_interpreter_that_has_nvidia_ml_py(
    run_module: Run, monkeypatch: pytest.MonkeyPatch, module: str, given: dict[str, Any]
) -> None:
    """The scenario `default` does so on a host whose own Python lacks it."""

    def respawn(python: str) -> None:
        print(json.dumps({"respawned": python}))
        raise SystemExit(0)

    monkeypatch.setattr("ansible.module_utils.vllm_edge.system.nvml.pynvml_missing", lambda: True)
    given = {"python": sys.executable, **given}
    assert run_module(module, given, replace={"respawn_module": respawn})["respawned"] == sys.executable
    result = run_module(module, given, replace={"has_respawned": lambda: True})
    assert result["rc"] == 1 and "nvidia-ml-py is not installed in the environment of" in result["msg"]


@modules
@pytest.mark.parametrize(("check", "rc"), [(True, 0), (False, 1)])
def test_before_the_host_runtime_is_there(
    run_module: Run, monkeypatch: pytest.MonkeyPatch, module: str, given: dict[str, Any], check: bool, rc: int
) -> None:
    monkeypatch.setattr("ansible.module_utils.vllm_edge.system.nvml.pynvml_missing", lambda: True)
    result = run_module(module, {"python": "/nonexistent/venv/bin/python", **given}, check=check)
    assert (result["rc"], result.get("skipped", False)) == (rc, check)
    assert "there is no interpreter /nonexistent/venv/bin/python" in result["msg"]
    assert ("Would" in result["msg"]) is check
    assert ("vllm_edge_host" in result["msg"]) is not check
