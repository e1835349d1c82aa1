# SPDX-License-Identifier: Apache-2.0
"""What is read of a host for its metrics, how often, and what is counted across restarts.

The host has one engine that serves; every file that it has also has a secret.
"""

from __future__ import annotations

import grp
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.engine.state import EngineState, Failure, write_state
from ansible.module_utils.vllm_edge.metrics import facts as module
from ansible.module_utils.vllm_edge.metrics import reader
from ansible.module_utils.vllm_edge.metrics.exporter import HostCollector, read_facts
from ansible.module_utils.vllm_edge.metrics.facts import STATES, Service, run_facts, run_metrics
from ansible.module_utils.vllm_edge.metrics.reader import HostFacts
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.journal import take_lock, to_json
from ansible.module_utils.vllm_edge.switch.model import Journal, Result
from ansible.module_utils.vllm_edge.system.nvml import MIB, THROTTLE
from ansible.module_utils.vllm_edge.system.systemd import Ran
from engine_files import CONFIG, CREATE, written
from journals import ended
from prometheus_client import generate_latest

SECRET = "sk-hunter2 and what alice asked"  # pragma: allowlist secret
GPU = CONFIG["gpus"][0]
BUS = "0000:17:00"
PARTS = {"weights_mib": 9000, "kv_cache_mib": 8000, "total_mib": 20000}
FIGURES = {"total_bytes": 24, "power_w": 29.5, "sm_clock_mhz": 1020, "throttle": ["sw_power_cap"], "ecc_corrected": 1}
COMMITTED = {"profile": "small", "generation": 7, "digest": "", "engines": {}}
PRINTED = {
    "doctor": {"checks": [{"check": "system.apt-lock", "state": "ok", "evidence": SECRET}]},
    "status": {"problems": [SECRET], "engines": [{"status_text": SECRET}]},
}


def xid(number: int) -> str:
    return f"NVRM: Xid (PCI:{BUS}): {number}, pid=7, name={SECRET}"


def tell(facts: dict[str, Any]) -> dict[str, float]:
    """The value of each series by its name and the values of its labels."""
    return {" ".join([name, *labels.values()]): value for name, value, labels in facts["series"]}


class Host:
    def __init__(self, root: Path) -> None:
        self.root = root
        plan = {"gpus": [PARTS], "decode_tok_s": {"low": 30.0, "mid": 41.5, "high": 50.0}, "reason": SECRET}
        record = root / "weights.json"
        record.write_text(SECRET)
        os.utime(record, (1000, 1000))
        config = {**CONFIG, "plan": plan, "weights_path": str(root), "weights_record": str(record)}
        self.paths: HostPaths = replace(written(root, config, [*CREATE, f"--api-key={SECRET}"]), exporter_run=root)
        self.kernel = ["NVRM: loading", xid(79), "other", xid(31)]
        """Lines of the kernel's log."""
        self.asked: list[str] = []
        self.said: list[str] = []
        self.active = "active"
        self.gpus: tuple[list[dict[str, Any]], str] = (
            [{"uuid": GPU, "index": 3, "up": True, "why": SECRET, "name": "L4", "bus": f"0000{BUS}.0", **FIGURES}],
            "",
        )
        write_state(
            self.paths.engine_state("e2b"),
            EngineState(
                *("e2b", "serving", "2026-11-21T03:00:00Z", "c1"),
                last_failure=Failure("", 1, "hung", SECRET, SECRET, log_tail=[SECRET]),
                **{"starts": 3, "failures": {"hung": 2, "no_kv": 1}, "standstills": 1},
                start_warnings=[SECRET],
            ),
        )
        self.canary(results=[{"served_name": "sentry", "ok": True, "completion": SECRET}])
        self.write(self.paths.active_profile, {**COMMITTED, "inventory_profile": SECRET})
        self.write(self.paths.state / "gpu-slots.json", {"version": 1, "gpus": [{"uuid": "GPU-gone"}, {"uuid": GPU}]})
        self.write(self.paths.gateway / "tls/server.pem", {"key": SECRET})
        self.write(self.paths.secret_file("e2b"), {"HF_TOKEN": SECRET})
        self.archive(ended(message=SECRET, asked_by=SECRET))

    def write(self, place: Path, data: object) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(data))

    def canary(self, container: str = "c1", **more: Any) -> None:
        self.write(self.paths.engine_canary("e2b"), {"run": {"container_id": container}, "results": [], **more})
        os.utime(self.paths.engine_canary("e2b"), (2000, 2000))

    def archive(self, journal: Journal) -> None:
        self.write(self.paths.history / f"{journal.id}.json", to_json(journal))

    def __call__(self, command: Sequence[str], timeout_s: float) -> Ran:
        line = " ".join(command)
        self.asked.append(command[0])
        if command[0] == "journalctl":
            words = dict(word.partition("=")[::2] for word in command)
            known = int(words.get("--cursor") or words.get("--after-cursor") or 0)
            lines = self.kernel[:known] if "--reverse" in words else self.kernel[known:]
            cursor = f"-- cursor: {len(self.kernel)}" if lines else ""
            return Ran(0, "\n".join([*(lines if "--lines" not in words else lines[-1:]), cursor]))
        if line.startswith("systemctl show"):
            return Ran(int(not self.active), f"Id=vllm-e2b.service\nActiveState={self.active}\nStatusText={SECRET}\n")
        if line.startswith("openssl"):
            return Ran(0, "notBefore=Nov 21 03:00:00 2026 GMT\nnotAfter=Nov 21 03:00:00 2027 GMT\n")
        return Ran(0, "{}")

    def facts(self) -> HostFacts:
        return HostFacts(self.paths, lambda: self.gpus, self, self.said.append)

    def service(self, facts: HostFacts | None = None, program: str = "") -> Service:
        """`program` is Python of which the first argument is the name of the command."""
        script = program or f"import json, sys; print(json.dumps({PRINTED!r}[sys.argv[1]]))"
        return Service(self.paths, facts or self.facts(), [sys.executable, "-c", script])

    def written(self) -> dict[str, float]:
        return tell(json.loads(self.paths.facts.read_text()))


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_gid=os.getegid()))
    return Host(tmp_path)


def step_until(service: Service, done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        service.step()
        time.sleep(0.02)


@pytest.mark.slow
def test_a_host_is_read_whole_and_no_secret_of_it(host: Host) -> None:
    service = host.service()
    service.step()
    step_until(service, lambda: "status_problems" in host.written())
    found = host.written()
    assert host.said == []
    for name in ("doctor_timestamp_seconds", *(name for name in found if name.startswith("filesystem"))):
        assert found.pop(name) > 0
    throttled = dict.fromkeys((f"gpu_throttled 1 {GPU} {reason}" for reason in THROTTLE.values()), False)
    assert found == {
        **{"driver_mismatch": False, "gpu_up 0 GPU-gone": False, f"gpu_up 1 {GPU}": True, f"gpu_info 1 {GPU} L4": 1},
        f"gpu_xid_errors_total 1 {GPU}": 2,
        f"gpu_memory_budget_bytes 1 {GPU}": 20900 * MIB,
        f"gpu_memory_planned_bytes 1 {GPU} weights": 9000 * MIB,
        f"gpu_memory_planned_bytes 1 {GPU} kv_cache": 8000 * MIB,
        f"gpu_memory_planned_bytes 1 {GPU} other": 3000 * MIB,
        f"gpu_memory_total_bytes 1 {GPU}": 24,
        f"gpu_power_watts 1 {GPU}": 29.5,
        f"gpu_sm_clock_hertz 1 {GPU}": 1020e6,
        f"gpu_ecc_errors_total 1 {GPU} corrected": 1,
        **throttled,
        f"gpu_throttled 1 {GPU} sw_power_cap": True,
        **{"engine_info e2b sentry e2b bf16 small": 1, f"engine_gpu_info e2b 1 {GPU}": 1, "engine_up e2b": True},
        **{"engine_planned_tokens_per_second e2b": 41.5, "engine_starts_total e2b": 3},
        **{f"engine_crashes_total e2b {reason}": count for reason, count in {"any": 3, "hung": 2, "no_kv": 1}.items()},
        "engine_standstills_total e2b": 1,
        **{"role_canary_ok sentry e2b": True, "role_canary_timestamp_seconds sentry e2b": 2000.0},
        **{"generation small": 7, "weights_verified_timestamp_seconds e2b": 1000.0},
        **{f"switches_total {result}": result == "committed" for result in Result},
        **{"switch_running": False, "switch_last_timestamp_seconds": 1795279270.0},
        **{"switch_last_downtime_seconds architect": 64.5, "switch_last_downtime_seconds sentry": 0.0},
        "certificate_end_timestamp_seconds": 1826766000.0,
        **{f"doctor_checks {state}": state == "ok" for state in STATES},
        **{"doctor_check system.apt-lock ok": 1, "status_problems": 1},
    }
    text = generate_latest(HostCollector(lambda: read_facts(host.paths.facts))).decode()
    assert 'vllm_edge_engine_up{engine_name="e2b"} 1.0' in text
    for word in (SECRET, *SECRET.split()[:1], "alice"):
        assert word not in text + host.paths.facts.read_text()
    assert host.paths.facts.stat().st_mode & 0o777 == 0o640


def test_a_round_asks_systemd_and_now_and_then_the_journal_and_nobody_else(host: Host) -> None:
    facts = host.facts()
    facts.read()
    host.asked.clear()
    facts.read()
    assert host.asked == ["systemctl"]


def test_what_cannot_be_read_is_absent_and_said_once(host: Host) -> None:
    facts = host.facts()
    host.gpus = None  # type: ignore[assignment]
    host.paths.active_profile.write_text("damaged")
    for _ in range(2):
        found = tell(facts.read())
        assert "engine_up e2b" in found and not [name for name in found if name.startswith(("gpu", "generation"))]
    assert [text.split(" cannot")[0] for text in host.said] == [
        "Metrics: the committed generation",
        "Metrics: gpus",
    ]


@pytest.mark.parametrize(
    ("error", "mismatch"), [("", False), ("LIB_RM_VERSION_MISMATCH", True), ("TIMEOUT", None), ("UNKNOWN", None)]
)
def test_a_gpu_of_which_nothing_is_known(host: Host, error: str, mismatch: bool | None) -> None:
    host.gpus = ([{"uuid": GPU, "up": True, "name": "L4"}], error)
    path = host.paths.engine_dir("e2b") / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vram_budget_mib": None, "plan": None}))
    found = tell(host.facts().read())
    assert found.get("driver_mismatch") is mismatch
    assert {name.split()[0] for name in found if name.startswith("gpu")} == {"gpu_up", "gpu_info"}


@pytest.mark.parametrize(
    ("phase", "active", "up"),
    [
        *(("serving", "active", True), ("unhealthy", "active", False), ("", "inactive", False)),
        *(("damaged", "active", None), ("serving", "", None)),
    ],
)
def test_an_engine_is_up_if_its_unit_is_active_and_it_serves(
    host: Host, phase: str, active: str, up: bool | None
) -> None:
    host.active = active
    place = host.paths.engine_state("e2b")
    place.write_text(place.read_text().replace("serving", phase) if phase != "damaged" else phase)
    assert tell(host.facts().read()).get("engine_up e2b") is up


def test_an_engine_that_never_started_has_counts(host: Host) -> None:
    host.paths.engine_state("e2b").unlink()
    found = tell(host.facts().read())
    counts = ("engine_starts_total e2b", "engine_crashes_total e2b any", "engine_standstills_total e2b")
    assert [found[name] for name in counts] == [0, 0, 0]
    host.paths.engine_state("e2b").write_text("damaged")
    assert "engine_starts_total e2b" not in tell(host.facts().read())


def test_a_canary_counts_for_the_container_that_runs(host: Host) -> None:
    host.canary(failed=[{"served_name": "sentry", "ok": False, "error": SECRET}])
    assert tell(host.facts().read())["role_canary_ok sentry e2b"] is False
    host.canary("another", results=[{"served_name": "sentry", "ok": True}])
    assert "role_canary_ok sentry e2b" not in tell(host.facts().read())
    host.paths.engine_canary("e2b").write_text("damaged")
    assert "role_canary_ok sentry e2b" not in tell(host.facts().read())
    assert "the canary of e2b" in host.said[-1], "those of others are there"


def test_xids_and_switches_are_counted_once_whoever_reads(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "XIDS_S", 0)

    def count(facts: HostFacts) -> tuple[float, float, float]:
        found = tell(facts.read())
        return found[f"gpu_xid_errors_total 1 {GPU}"], found["switches_total committed"], found["switches_total failed"]

    facts = host.facts()
    assert [count(facts), count(facts)] == [(2, 1, 0)] * 2
    host.kernel.append(xid(79))
    host.archive(replace(ended(Result.FAILED), id="20261122T000000Z-5"))
    assert count(host.facts()) == (3, 1, 1)
    for path in host.paths.history.iterdir():  # the history forgets
        path.unlink()
    assert count(host.facts()) == (3, 1, 1)
    host.paths.metrics_record.write_text("damaged")
    assert count(host.facts())[0] == 3 and "what was counted cannot be read" in host.said[-1]


@pytest.mark.slow
def test_a_switch_that_has_ended_is_read_at_once(host: Host) -> None:
    service = host.service()
    step_until(service, lambda: host.paths.facts.exists() and "status_problems" in host.written())
    with take_lock(host.paths):
        host.write(host.paths.switch_journal, {"any": 1})
        service.step()
        assert not host.written()["switch_running"], "it is not read before ten seconds have passed"
        service._fast_at = 0.0
        service.step()
        assert host.written()["switch_running"]
    service.step()
    assert not host.written()["switch_running"]
    assert next(service.asked) is False, "doctor and status are asked again, too"


@pytest.mark.slow
def test_the_doctor_finds_new_facts_also_after_a_boot_with_gpus_that_are_slow(host: Host) -> None:
    def read_slowly() -> tuple[list[dict[str, Any]], str]:
        time.sleep(0.5)
        return host.gpus

    program = f"import json, os; there = os.path.exists({str(host.paths.facts)!r}); "
    checks = "[{'check': 'gateway.metrics', 'state': 'ok' if there else 'warn'}]"
    program += f"print(json.dumps({{'checks': {checks}, 'problems': []}}))"
    service = host.service(HostFacts(host.paths, read_slowly, host, host.said.append), program)
    step_until(service, lambda: host.paths.facts.exists() and "doctor_timestamp_seconds" in host.written())
    assert "doctor_check gateway.metrics ok" in host.written()


def test_the_unit_is_ready_when_there_are_facts(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    class Told(Exception):
        pass

    monkeypatch.setattr(module, "HostFacts", lambda *_: host.facts())
    monkeypatch.setattr(module, "list_program", lambda _: ["true"])
    monkeypatch.setattr(module.time, "sleep", Mock(side_effect=Told))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{host.root}"[:100])
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{host.root}"[:100])
        with pytest.raises(Told):
            run_facts(host.paths)
        assert systemd.recv(100, socket.MSG_DONTWAIT) == b"READY=1" and host.written()["engine_up e2b"]


@pytest.mark.slow
def test_a_doctor_that_hangs_stops_no_round_and_is_ended(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHILD_S", 0.5)
    monkeypatch.setattr(module, "FAST_S", 0.0)
    service = host.service(
        program="import sys, time; sys.argv[1] == 'doctor' and time.sleep(60); print('{\"problems\": []}')"
    )
    began = time.monotonic()
    service.step()
    assert time.monotonic() - began < 0.5 and host.written()["engine_up e2b"]
    step_until(service, lambda: "status_problems" in host.written())
    assert "doctor_checks ok" not in host.written() and "doctor cannot be read" in host.said[-1]


def test_the_command_prints_the_same_once_and_counts_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "HostFacts", partial(HostFacts, run=host))
    monkeypatch.setattr(module, "GpuReader", lambda: SimpleNamespace(read_gpus=lambda: host.gpus))
    monkeypatch.setattr(module, "list_program", lambda _: host.service().program)
    assert run_metrics(host.paths) == 0
    text = capsys.readouterr().out
    assert 'vllm_edge_doctor_check{check="system.apt-lock",state="ok"} 1.0' in text
    assert "vllm_edge_status_problems 1.0" in text and 'vllm_edge_engine_up{engine_name="e2b"} 1.0' in text
    assert SECRET not in text and not host.paths.metrics_record.exists()
