# SPDX-License-Identifier: Apache-2.0
"""What `vllm-edge status` and `explain` show, from an empty host to a troubled one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.answers.model import CaseResult
from ansible.module_utils.vllm_edge.answers.quality import Options, build_record, write_record
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.engine.config import parse_engine, sum_budgets
from ansible.module_utils.vllm_edge.engine.loads import Load, remember_load
from ansible.module_utils.vllm_edge.engine.state import EngineState, Failure, read_state, stamp, write_state
from ansible.module_utils.vllm_edge.facts import serving as serving_facts
from ansible.module_utils.vllm_edge.facts.serving import collect, read_quality
from ansible.module_utils.vllm_edge.generation.model import FileChange
from ansible.module_utils.vllm_edge.gpu.topology import Card, find_obstacles
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.planning.drift import TOLERANCES
from ansible.module_utils.vllm_edge.status import command
from ansible.module_utils.vllm_edge.status.command import render_explanation, render_status, run_explain
from ansible.module_utils.vllm_edge.status.problems import add_problems, describe_state, judge, judge_gateway
from ansible.module_utils.vllm_edge.switch.journal import take_lock, to_json
from ansible.module_utils.vllm_edge.switch.model import Journal, Result
from ansible.module_utils.vllm_edge.system.docker import Container
from ansible.module_utils.vllm_edge.text import WIDTH
from ansible.module_utils.vllm_edge.weights.record import Record
from engine_files import CONFIG, written
from fake_docker import FakeDocker
from journals import RUNNING, ended

BOARD = {
    **{"index": 3, "uuid": "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003", "name": "NVIDIA L4", "total_mib": 23034},
    **{"reserved_mib": 470, "used_mib": 20612, "free_mib": 1952, "budget_mib": 20900, "foreign_mib": 0},
    **{"within_budget": True, "problem": None},
}
FAILURE = Failure(
    "2026-11-21T03:00:00Z", 1, "no_kv", "no memory is left", "Lower max_num_seqs", "kv-cache", ["last words"]
)
UNIT = {
    "ActiveState": "active",
    "SubState": "running",
    "StatusText": "serving sentry",
    "NRestarts": "2",
    "LoadState": "loaded",
    "WantedBy": "vllm-edge.target",
    "NeedDaemonReload": "no",
    "InactiveExitTimestamp": "@1763700000",
    "ActiveEnterTimestamp": "@1763700031",
}
TARGET = {"ActiveState": "active", "UnitFileState": "enabled"}
OURS = {"vllm-edge.engine": "e2b", "vllm-edge.input-hash": "ab12", "vllm-edge.generation": "1"}


@dataclass
class Host:
    """A host, and what systemd, Docker, NVML and the kernel say of it."""

    paths: HostPaths
    docker: FakeDocker = field(default_factory=FakeDocker)

    def ask(
        self,
        unit: dict[str, str] | None = UNIT,
        boards: Any = (),
        target: dict[str, str] = TARGET,
        expected: str | None = None,
        gpu_problem: str | None = None,
        **record: Any,
    ) -> dict[str, Any]:
        """`record`: what else stands in the record of the committed generation."""
        if record:
            self.remember(**record)
        units = {"vllm-e2b.service": unit, "vllm-edge.target": target} if unit else {}
        units_shown = (units, None)
        asked = (list(boards), gpu_problem)
        return add_problems(
            collect(self.paths, self.docker, lambda names: units_shown, lambda budgets, paths: asked, expected)
        )

    def tell(self, **asked: Any) -> str:
        """The status as text, on one line."""
        return " ".join(" ".join(render_status(self.ask(**asked))).split())

    def remember(self, **more: Any) -> None:
        """More in the record of the committed generation."""
        record = json.loads(self.paths.active_profile.read_text())
        self.paths.active_profile.write_text(json.dumps(record | more))

    def write_journal(self, journal: Journal) -> None:
        self.paths.switch_journal.write_text(json.dumps(to_json(journal)))


@pytest.fixture
def bare(tmp_path: Path) -> Host:
    """A host without a file of ours."""
    return Host(HostPaths(tmp_path / "etc", tmp_path / "state"))


@pytest.fixture
def configured(tmp_path: Path) -> Host:
    """A host with the files of one engine."""
    return Host(written(tmp_path))


@pytest.fixture
def serving(configured: Host) -> Host:
    """A host on which one engine serves."""
    paths = configured.paths
    write_state(paths.engine_state("e2b"), EngineState("e2b", "serving", stamp(), load_seconds=25.3))
    record = {"profile": "e2b-only", "generation": 1, "engines": {"e2b": {"input_hash": "ab12", "generation": 1}}}
    paths.active_profile.write_text(json.dumps(record))
    configured.docker.container = Container("c" * 64, "vllm-e2b", "running", OURS, started_at="2026-11-21T03:00:00.5Z")
    return configured


def test_an_empty_host_says_so_and_is_no_problem_until_a_profile_is_expected(bare: Host) -> None:
    began, status = stamp(), bare.ask(unit=None)
    assert status["problems"] == [] and began <= status["at"] <= stamp()
    (problem,) = bare.ask(unit=None, expected="e2b-only")["problems"]
    assert "no profile is active on this host: run site.yml" in problem
    bare.docker.away.set()
    text = bare.tell(unit=None, gpu_problem="GPUs cannot be read: the driver is not loaded")
    assert text.startswith("no profile is active on this host no engine is configured on this host Problems:")
    assert "the Docker Engine cannot be asked" in text and "the driver is not loaded" in text


def test_engines_without_a_recorded_profile_are_a_problem(
    serving: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(host: Host) -> int:
        monkeypatch.setattr(command, "collect", lambda *_, **__: host.ask())
        return command.run_status(host.paths, output="json")

    assert serving.ask()["problems"] == [] and run(serving) == 0
    assert run(Host(HostPaths(tmp_path / "new", tmp_path / "empty"))) == 0, "a host on which nothing was ever deployed"
    serving.remember(digest="lost with its generation")
    assert run(serving) == (os.geteuid() == 0)
    serving.paths.active_profile.unlink()
    (problem,) = serving.ask()["problems"]
    assert "no profile is recorded" in problem and "Run site.yml" in problem
    capsys.readouterr()
    assert run(serving) == 1 and problem in json.loads(capsys.readouterr().out)["problems"]


def test_a_serving_engine(serving: Host) -> None:
    state = EngineState("e2b", "serving", stamp(), load_seconds=25.3, last_failure=FAILURE)
    write_state(serving.paths.engine_state("e2b"), state)
    status = serving.ask(boards=[BOARD])
    assert status["problems"] == []
    (engine,) = status["engines"]
    assert engine["active_state"] == "active" and engine["restarts"] == 2
    assert engine["running_input_hash"] == "ab12" and engine["running_generation"] == 1
    assert engine["container_state"] == "running" and engine["container_ours"] is True
    assert engine["load_seconds"] == 25.3 and engine["last_failure"]["cause"] == "no_kv"
    text = "\n".join(render_status(status))
    for told in ("profile e2b-only, generation 1", "serving", "e2b bf16", "8070", "25 s", "20,612", "23,034"):
        assert told in text
    assert "2025-11-21T04:40:31Z" in text, "serving since, by systemd's clock"
    assert "container running since 2026-11-21T03:00:00Z" in text
    assert "[##################| ]" in text and BOARD["uuid"] in text
    assert "last failure 2026-11-21T03:00:00Z: no memory is left. Lower max_num_seqs" in text
    assert max(map(len, text.splitlines())) <= WIDTH
    json.dumps(status)


def test_phases_of_a_load_and_what_the_next_one_takes(serving: Host) -> None:
    assert "load: " not in serving.tell() and serving.ask()["load_warnings"] == []
    phases = {"loading-weights": 31.0, "compiling": 120.4}
    loads = [
        Load("2026-11-25T02:00:00Z", "ab12", "vllm-edge/vllm:1", "e2b", "main", at, phases) for at in (40.0, 151.4)
    ]
    for load in loads:
        remember_load(serving.paths.engine_loads("e2b"), load)
    state = EngineState("e2b", "serving", stamp(), input_hash="ab12", load_seconds=151.4, load_phases=phases)
    write_state(serving.paths.engine_state("e2b"), state)
    status = serving.ask()
    (engine,) = status["engines"]
    assert engine["load_phases"] == phases
    assert engine["load_expected_s"] == {"low": 28, "mid": 96, "high": 243, "basis": "2 earlier loads"}
    assert status["problems"] == [], "it serves"
    text = serving.tell()
    assert "load: compiling 120 s, loading weights 31 s" in text
    assert "next load: 28 to 243 s, probably 96 (2 earlier loads)" in text
    assert "Warning: Engine e2b took 151 s to load, and 28 to 75 s were expected" in text
    assert max(map(len, render_status(status))) <= WIDTH


def test_the_newest_run_of_the_quality_suite(serving: Host) -> None:
    assert serving.ask()["quality"] is None and "quality" not in serving.tell()
    generation: Any = SimpleNamespace(profile="nvfp4-tp2", number=3, engines={})
    for at in ("2026-11-24T08:00:00Z", "2026-11-25T08:00:00Z"):
        passed = CaseResult("json", "own", "sentry", "e2b", "bf16", "a JSON object", "passed", ())
        results = [passed, replace(passed, case="german", verdict="failed" if "-25T" in at else "passed")]
        write_record(build_record(generation, Options((), 3, 60.0), results, at), serving.paths)
    assert "quality of nvfp4-tp2 at 2026-11-25T08:00:00Z: 1 passed, 1 failed, 0 unsteady" in serving.tell()


def test_what_quantized_the_weights_and_what_vllm_warned_of(serving: Host, tmp_path: Path) -> None:
    (tmp_path / "e2b.json").write_text(
        Record("e2b", "a/b", "main", "c" * 40, "/w", "hub", {}, "modelopt 0.37.0").to_json()
    )
    file = serving.paths.engine_dir("e2b") / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "weights_record": str(tmp_path / "e2b.json")}))
    state = serving.paths.engine_state("e2b")
    state.write_text(json.dumps({**json.loads(state.read_text()), "start_warnings": ["It does not compute in FP4."]}))
    said = serving.tell()
    assert "weights: quantized by modelopt 0.37.0" in said
    assert said.count("e2b: It does not compute in FP4.") == 1


def test_accepted_risks_and_what_keeps_the_gpus_of_an_engine_apart(serving: Host, tmp_path: Path) -> None:
    """The latter is from the head of the unit, as the role renders it."""
    file = serving.paths.engine_dir("e2b") / "engine.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "accept_risk": ["--trust-remote-code"]}))
    template = Path(__file__).parents[3] / "roles/vllm_engine/templates/vllm-engine.service.j2"
    (line,) = [line for line in template.read_text().splitlines() if "{{ reason }}" in line]
    cards = [Card("GPU-1", "0000:17:00.0", iommu="DMA-FQ", redirecting=("0000:16:00.0",))]
    rendered = [line.replace("{{ reason }}", reason) for reason in find_obstacles(cards)]
    serving.paths = replace(serving.paths, units=tmp_path)
    (tmp_path / "vllm-e2b.service").write_text("\n".join(["# Managed", *rendered, "[Unit]"]))
    (engine,) = serving.ask()["engines"]
    assert engine["peer_to_peer_off"] == find_obstacles(cards)
    said = serving.tell()
    assert "e2b: accepted risks: --trust-remote-code." in said
    assert "e2b: peer-to-peer is off: the IOMMU translates the addresses of 0000:17:00.0 (DMA-FQ)" in said
    assert "iommu=pt and a reboot and turning these off in the firmware would allow it" in said


def test_an_engine_that_is_not_as_planned(serving: Host) -> None:
    plan = {
        "gpus": [{"weights_mib": 10_024, "graphs_mib": 539, "kv_cache_mib": 8_485, "total_mib": 20_612}],
        **{"kv_cache_tokens": 480_192, "kv_blocks": 30_012, "on_drift": "warn"},
        "tolerances": {**TOLERANCES, "total_mib": 300},
    }

    def configure(**more: Any) -> None:
        file = serving.paths.engine_dir("e2b") / "engine.json"
        file.write_text(json.dumps({**CONFIG, "gpus": [BOARD["uuid"]], "plan": {**plan, **more}}))

    configure()
    state = EngineState("e2b", "serving", stamp(), input_hash="ab12", log_facts={"model_gib": 15.0})
    write_state(serving.paths.engine_state("e2b"), state)
    board = {**BOARD, "engine_mib": 20_612}
    status = serving.ask(boards=[board])
    (problem,) = status["problems"]
    assert "weights of e2b 15,360 MiB, planned 10,024 (+5,336, tolerated 160)" in problem
    text = "\n".join(render_status(status))
    assert "plan against measurement" in text and re.search(r"^GPU 3 .* 20,612 +20,612 +\+0 +300 +within$", text, re.M)
    # What still loads holds less than it will.
    loading = serving.ask(UNIT | {"ActiveState": "activating"}, [board])
    assert not [text for text in loading["problems"] if "Plan" in text]
    # The lower threshold is exceeded by what is beside the KV cache; that is a warning and no problem.
    configure(memory_threshold_percent=30)
    warned = serving.ask(boards=[board])
    assert "besides KV caches, more than memory_threshold_percent 30" in warned["memory_warnings"][0]
    assert warned["problems"] == status["problems"] and status["memory_warnings"] == []
    assert "Warning: GPU 3 holds" in "\n".join(render_status(warned))


OTHER_INPUTS = {"vllm-edge.engine": "e2b", "vllm-edge.input-hash": "old"}


@pytest.mark.parametrize(
    ("container", "told", "running_hash"),
    [
        (None, "container absent", None),
        (Container("c", "vllm-e2b", "exited", {"vllm-edge.engine": "e2b"}), "container exited", None),
        (Container("c", "vllm-e2b", "running", {}), "exists that vllm-edge did not create", None),
        (Container("c", "vllm-e2b", "running", OTHER_INPUTS), "made from other inputs than the files", "old"),
    ],
)
def test_containers(configured: Host, container: Container | None, told: str, running_hash: str | None) -> None:
    configured.docker.container = container
    assert configured.ask(unit=None)["engines"][0]["running_input_hash"] == running_hash
    assert told in configured.tell(unit=None)
    configured.docker.away.set()
    (engine,) = configured.ask()["engines"]
    assert engine["container_state"] == "unknown", "where nobody can be asked"
    assert engine["load_seconds"] == 31.0, "without the supervisor's file by systemd's clock"


PROBLEMS: list[tuple[dict[str, Any], str]] = [
    (
        {"expected": "nvfp4-tp2"},
        "The inventory says profile nvfp4-tp2, this host runs e2b-only (chosen by the inventory): run site.yml to "
        "bring nvfp4-tp2, or put 'serving_profile: e2b-only' into the inventory to keep what runs.",
    ),
    (
        # A plain run refuses to end what somebody chose.
        {"expected": "nvfp4-tp2", "origin": "-e", "chosen_at": "t"},
        "run site.yml -e serving_profile=nvfp4-tp2 to bring nvfp4-tp2, or put 'serving_profile: e2b-only' into the",
    ),
    ({"digest": "d"}, "There is no generation 1 on this host"),
    ({"unit": UNIT | {"ActiveState": "failed"}}, "vllm-e2b.service is failed: 'vllm-edge explain e2b'"),
    ({"unit": UNIT | {"ActiveState": "inactive"}}, "'systemctl start vllm-e2b.service' starts it"),
    ({"unit": UNIT | {"ActiveState": "activating", "SubState": "start"}}, "vllm-e2b.service does not serve yet"),
    ({"unit": UNIT | {"ActiveState": "inactive", "LoadState": "not-found"}}, "is gone from /etc/systemd/system"),
    ({"unit": UNIT | {"WantedBy": ""}}, "vllm-e2b.service is not wanted by vllm-edge.target"),
    ({"unit": UNIT | {"NeedDaemonReload": "yes"}}, "systemd knows the former one"),
    ({"target": TARGET | {"UnitFileState": "disabled"}}, "vllm-edge.target is active and not enabled"),
    ({"target": TARGET | {"ActiveState": "inactive"}}, "vllm-edge.target is inactive, as after 'vllm-edge stop'"),
    ({"boards": [BOARD | {"within_budget": False, "problem": "GPU 3 is over budget."}]}, "GPU 3 is over budget."),
]


@pytest.mark.parametrize(("state", "told"), PROBLEMS, ids=[told for _, told in PROBLEMS])
def test_each_problem_is_named_with_a_remedy_and_alone(serving: Host, state: dict[str, Any], told: str) -> None:
    status = serving.ask(**state)
    (problem,) = status["problems"]
    assert told in problem
    assert max(map(len, render_status(status))) <= WIDTH


def test_files_of_a_run_that_was_interrupted(serving: Host) -> None:
    engines = {"e2b": {"input_hash": "ff00"}, "e4b": {"input_hash": "00ff"}}
    first, second = serving.ask(engines=engines)["problems"]
    assert "Generation 1 has the engines e2b, e4b, and configured on this host are e2b" in first
    assert "The files of engine e2b are not those of generation 1 (input hash ab12, recorded ff00)" in second


# ---- switches ---------------------------------------------------------------------------------------------------


@pytest.fixture
def switching(serving: Host) -> Iterator[Host]:
    """The same host while a switch to bf16-tp4 runs."""
    with take_lock(serving.paths):
        serving.write_journal(RUNNING)
        yield serving


@pytest.fixture
def differ(monkeypatch: pytest.MonkeyPatch) -> Callable[[FileChange], None]:
    """Gives the host a generation, from which one live file differs."""

    def change_file(change: FileChange) -> None:
        monkeypatch.setattr(serving_facts, "load", lambda paths, number: number)
        monkeypatch.setattr(serving_facts, "live_changes", lambda generation, paths: [change])

    return change_file


def test_what_a_switch_is_just_changing_is_no_problem(switching: Host, differ: Callable[[FileChange], None]) -> None:
    switching.remember(engines={"31b": {"input_hash": "ff00"}}, digest="d")
    differ(FileChange("/etc/x", "a", "b"))
    for unit in (
        UNIT | {"ActiveState": "activating", "SubState": "start"},
        UNIT | {"ActiveState": "deactivating"},
        UNIT | {"ActiveState": "inactive", "WantedBy": "", "NeedDaemonReload": "yes"},
    ):
        status = switching.ask(unit, target=TARGET | {"ActiveState": "inactive"}, expected="bf16-tp4")
        assert status["problems"] == []
    switching.docker.container = Container("c", "vllm-e2b", "running", OURS | {"vllm-edge.input-hash": "old"})
    assert switching.ask()["problems"] == []
    # What it does not excuse.
    assert "is failed" in switching.ask(UNIT | {"ActiveState": "failed"})["problems"][0]
    (problem,) = switching.ask(expected="w4a16-tp4")["problems"]
    assert "The inventory says profile w4a16-tp4" in problem


def test_the_running_switch(switching: Host) -> None:
    status = switching.ask()
    assert status["switch"].pop("seconds") >= 0
    assert status["switch"] == {
        **{"generation": 4, "profile": "bf16-tp4", "phase": "healthy", "direction": "forward"},
        **{"purpose": "serving", "asked_by": "site.yml by alice", "started_at": "2026-11-21T16:40:00Z"},
        **{"provisional": {"e2b": 31.0}, "restored": {}},
    }
    assert status["unfinished_switch"] is None
    status["switch"]["seconds"] = 12.3
    lines = render_status(status)
    assert lines[2].startswith("switching to generation 4 (bf16-tp4) for 12 s, phase healthy, asked by site.yml by ali")
    assert max(map(len, lines)) <= WIDTH
    assert "clients reach e2b again, provisional until the commit;" in " ".join(" ".join(lines[2:5]).split())
    json.dumps(status)
    status["switch"] |= {"purpose": "calibration", "phase": "clean_up"}
    told = " ".join(" ".join(render_status(status)[2:5]).split())
    assert told.startswith("calibration of generation 4") and "goes back to the committed generation by itself" in told
    assert "provisional" not in told


def test_a_switch_that_was_killed(serving: Host) -> None:
    """Its files are half of one and half of the other generation: that is not said for each of them."""
    serving.write_journal(RUNNING)
    status = serving.ask()
    assert (status["switch"], status["unfinished_switch"]["id"]) == (None, RUNNING.id)
    (problem,) = status["problems"]
    assert "A switch to generation 4 (bf16-tp4), which site.yml by alice asked for at 2026-11-21T16:40:00Z" in problem
    assert "in phase healthy" in problem and "'vllm-edge recover'" in problem
    assert judge(status | {"live_files": [{"path": "/etc/x", "how": "it is missing"}]}) == [problem]
    serving.paths.switch_journal.write_text("half a jour")
    (problem,) = serving.ask()["problems"]
    assert "switch.json cannot be read: not JSON" in problem and "'vllm-edge recover'" in problem


def test_former_switches(serving: Host) -> None:
    """Ten of them in the JSON, five in the tables, the newest first."""
    serving.paths.history.mkdir()
    for hour in range(10, 22):
        result = Result.COMMITTED if hour != 20 else Result.ROLLED_BACK
        journal = ended(result, id=f"20261121T{hour}0000Z-4", started_at=f"2026-11-21T{hour}:00:00Z")
        (serving.paths.history / f"{journal.id}.json").write_text(json.dumps(to_json(journal)))
    serving.write_journal(journal)
    status = serving.ask()
    assert status["problems"] == []
    assert [row["id"] for row in status["history"]] == [f"20261121T{hour}0000Z-4" for hour in range(21, 11, -1)]
    assert status["history"][0] == {
        **{"id": "20261121T210000Z-4", "started_at": "2026-11-21T21:00:00Z", "from_generation": 3},
        **{"from_profile": "nvfp4-tp2", "generation": 4, "profile": "bf16-tp4", "origin": "-e"},
        **{"asked_by": "site.yml by alice", "result": "committed", "seconds": 70.4},
        **{"downtime": {"architect": 64.5, "sentry": 0.0}, "message": "Generation 4 (bf16-tp4) serves."},
    }
    lines = render_status(status)
    told = [line[11:13] + (" rolled back" in line) * "!" for line in lines if line.startswith("2026-11-21T")]
    assert told == ["21", "20!", "19", "18", "17"] and max(map(len, lines)) <= WIDTH
    json.dumps(status)


def chosen(by: str, inventory: str, at: str = "t") -> dict[str, str]:
    return {"origin": by, "chosen_at": at, "inventory_profile": inventory}


CHOICES: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, None, "chosen by the inventory"),
    ({"origin": "-e", "chosen_at": "2026-11-21T16:41:00Z"}, None, "chosen by -e on 2026-11-21T16:41:00Z"),
    ({"origin": "host", "chosen_at": "t"}, "e2b-only", "chosen on the host on t"),
    (chosen("-e", "nvfp4-tp2"), None, "inventory says nvfp4-tp2, host runs e2b-only (chosen by -e on t)"),
    (chosen("host", "e2b-only"), "bf16-tp4", "inventory says bf16-tp4, host runs e2b-only (chosen on the host on t)"),
]


@pytest.mark.parametrize(("record", "expected", "told"), CHOICES, ids=[told for *_, told in CHOICES])
def test_who_chose_the_profile(serving: Host, record: dict[str, Any], expected: str | None, told: str) -> None:
    assert render_status(serving.ask(expected=expected, **record))[1] == told


def test_a_generation_that_is_over_its_budget(serving: Host) -> None:
    assert render_status(serving.ask(over_budget=True))[0].endswith(", committed over its budget")


FILES = [
    (FileChange("/etc/x", None, "a"), "it is missing"),
    (FileChange("/etc/x", "a", None), "it is of an engine that is not in it"),
    (FileChange("/etc/x", "a", "b", "mode 0777, wanted 0644"), "its content differs"),
    (FileChange("/etc/x", "a", "a", "mode 0777, wanted 0644"), "mode 0777, wanted 0644"),
]


@pytest.mark.parametrize(("change", "told"), FILES)
def test_a_live_file_that_is_not_the_generation_s(
    serving: Host, change: FileChange, told: str, differ: Callable[[FileChange], None]
) -> None:
    """Said once, by its name, although the input hash of the record differs, too."""
    serving.remember(digest="d", engines={"e2b": {"input_hash": "ff00"}, "e4b": {"input_hash": "00ff"}})
    differ(change)
    (problem,) = serving.ask()["problems"]
    assert f"/etc/x is not what generation 1 says: {told}. Run site.yml, or 'vllm-edge switch 1'" in problem


# ---- and the rest -----------------------------------------------------------------------------------------------


def test_budgets_of_engines_that_share_a_gpu() -> None:
    config = parse_engine(json.dumps(CONFIG | {"gpus": ["GPU-a", "GPU-b"], "vram_budget_mib": 100}), "x")
    other = replace(config, gpus=("GPU-b", "GPU-c"))
    assert sum_budgets([config, other]) == {"GPU-a": 100, "GPU-b": 200, "GPU-c": 100}
    assert sum_budgets([config, replace(other, vram_budget_mib=None)]) == {"GPU-a": 100, "GPU-b": None, "GPU-c": None}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"active_state": "active", "phase": "serving"}, "serving"),
        ({"active_state": "active", "phase": "not-answering"}, "not answering"),
        ({"active_state": "activating", "sub_state": "start", "phase": "loading-weights"}, "loading weights"),
        ({"active_state": "activating", "sub_state": "auto-restart", "phase": "failed"}, "restarting"),
        ({"active_state": "failed", "phase": "failed"}, "failed"),
        ({"active_state": "inactive", "phase": "stopped"}, "inactive"),
        ({"active_state": None, "phase": None}, "unknown"),
    ],
)
def test_one_word_for_an_engine(engine: dict[str, Any], words: str) -> None:
    assert describe_state(engine) == words


def test_broken_files_are_named_and_the_rest_is_shown(configured: Host, tmp_path: Path) -> None:
    bad = tmp_path / "engines" / "e4b"
    bad.mkdir()
    (bad / "engine.json").write_text("{}")
    configured.paths.state.mkdir()
    configured.paths.active_profile.write_text("not JSON")
    status = configured.ask(unit=None)
    assert [engine["engine"] for engine in status["engines"]] == ["e2b"]
    assert any("e4b/engine.json: the record has no engine" in text for text in status["problems"])
    assert any("active-profile.json cannot be read" in text for text in status["problems"])


@pytest.mark.parametrize(
    ("changes", "switch", "words"),
    [
        ({}, None, None),
        ({"active_state": "failed"}, None, "vllm-edge-gateway.service is failed: no client is answered"),
        ({"problem": "the gateway's files are for root"}, None, "The gateway's files are for root."),
        ({"roles": {"architect": {"state": "away"}}}, None, "keeps requests for architect waiting"),
        ({"roles": {"architect": {"state": "away"}}}, {"phase": "drain"}, None),
        (
            {"roles": {"architect": {"state": "down", "engines": ["big"]}}},
            None,
            "does not reach the engine of architect",
        ),
        ({"roles": {"architect": {"state": "down", "engines": ["off"]}}}, None, None),
    ],
)
def test_what_is_wrong_with_the_gateway(changes: dict[str, Any], switch: object, words: str | None) -> None:
    gateway = {"unit": "vllm-edge-gateway.service", "active_state": "active", "problem": None, "roles": {}, **changes}
    engines = [{"engine": "big", "active_state": "active"}, {"engine": "off", "active_state": "failed"}]
    found = list(judge_gateway({"gateway": gateway, "switch": switch, "engines": engines}))
    assert len(found) == (words is not None) and (words or "") in " ".join(found)
    assert list(judge_gateway({"gateway": None})) == []


# ---- explain, and what an engine leaves of itself -----------------------------------------------------------------


def test_explain_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = written(tmp_path)
    assert run_explain("e2b", paths, output="text") == 0
    assert "nothing is known" in capsys.readouterr().out
    write_state(paths.engine_state("e2b"), EngineState("e2b", "failed", "2026-11-21T03:00:01Z", last_failure=FAILURE))
    assert run_explain("e2b", paths, output="text") == 0
    text = capsys.readouterr().out
    for told in ("failed since", "while: KV cache, exit status 1", "What: no memory is left.", "  | last words"):
        assert told in text
    assert run_explain("e2b", paths, output="json") == 0
    assert json.loads(capsys.readouterr().out)["last_failure"]["cause"] == "no_kv"
    paths.engine_state("e2b").write_text("{")
    assert run_explain("e2b", paths, output="text") == 1 and "e2b.json is damaged" in capsys.readouterr().err
    assert run_explain("nobody", paths, output="text") == 1
    assert "there are: e2b" in capsys.readouterr().err
    assert main(["--etc", str(tmp_path), "explain", "../e2b"]) == 1
    assert render_explanation("e2b", EngineState("e2b", "serving", "t"))[-1] == "No failure has been recorded."


def test_records_that_a_user_may_not_see_are_not_called_none(
    bare: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = ["--etc", str(bare.paths.etc), "--state", str(bare.paths.state)]
    for place, name in ((bare.paths.bench, "bench"), (bare.paths.quality, "quality")):
        assert main([*trees, name, "--list"]) == 0 and "no run is recorded" in capsys.readouterr().out
        place.mkdir(parents=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "access", lambda *_: False)
            assert main([*trees, name, "--list"]) == 2 and f"{place} is for root" in capsys.readouterr().err
            assert read_quality(bare.paths) is None or name == "bench"


def test_state_survives_what_is_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "engines" / "e2b.json"
    assert read_state(path) is None
    state = EngineState("e2b", "serving", "t", container_id="c", log_facts={"model_gib": 9.9}, last_failure=FAILURE)
    write_state(path, state)
    assert read_state(path) == state
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in path.parent.iterdir()] == ["e2b.json"], "a temporary file was left"
    newer = {**json.loads(path.read_text()), "added_later": 1}
    path.write_text(json.dumps(newer))
    assert read_state(path) == state
    for broken in ("", "[]", "{}", "{"):
        path.write_text(broken)
        assert read_state(path) is None


def test_nothing_is_needed_for_a_refused_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    written(tmp_path, config={**CONFIG, "port": 0})
    assert main(["--etc", str(tmp_path), "run-engine", "e2b"]) == 78
    assert "<3>" in (out := capsys.readouterr().out) and "port is 0" in out
