# SPDX-License-Identifier: Apache-2.0
"""A run of the benchmark: when it is refused, what it records, and how it ends if it is interrupted."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.metrics import Totals, read_totals
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch import journal
from ansible.module_utils.vllm_edge.switch.journal import find_switch, take_lock
from ansible.module_utils.vllm_edge.switch.model import Phase
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.long_run import LongRun
from ansible.module_utils.vllm_edge.system.nvml import StateReading, open_nvml
from ansible.module_utils.vllm_edge.trials.bench import command, model, program, run, sampling
from ansible.module_utils.vllm_edge.trials.bench.cases import Options
from ansible.module_utils.vllm_edge.trials.bench.model import list_files, parse_run, prune_runs
from ansible.module_utils.vllm_edge.trials.bench.sampling import Sample, Sampler, summarize_gpu
from ansible.module_utils.vllm_edge.trials.sidecar import Ended, Sidecar, SidecarError
from fake_host import FakeDocker
from generations import UUIDS, activate, engine, rendered

from lab.nvidia.testing import LabRoot

SOCKETS = Path("/run/vllm-edge/engines/e2b")
METRICS = """
vllm:num_requests_running{engine="0",model_name="sentry"} 0.0
vllm:num_requests_waiting{engine="0",model_name="sentry"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="sentry"} 0.25
vllm:generation_tokens_total{engine="0",model_name="sentry"} 90.0
vllm:num_preemptions_total{engine="0",model_name="sentry"} 2.0
vllm:prefix_cache_queries_total{engine="0",model_name="sentry"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="sentry"} 300.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="sentry"} 5.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="sentry"} 7.0
"""


class BenchHost:
    """A host with one engine, whose container is played by `play`."""

    def __init__(self, paths: HostPaths) -> None:
        self.paths = paths
        self.metrics = METRICS
        self.finished = 12
        self.in_work = 0
        self.docker = FakeDocker()
        self.docker.engine("e2b")
        self.sampler = Sampler(self.sample)
        self.sidecars: list[Sidecar] = []
        self.play: Callable[[Callable[[str], None], Callable[[], str]], None] = self.measure

    def ask(self, url: str, path: str, timeout_s: float) -> Answer:
        return Answer(200, b'{"version": "0.32.0"}' if path == "/version" else self.metrics.encode())

    def measure(self, tell: Callable[[str], None], trouble: Callable[[], str]) -> None:
        """Answer every step of the job; another client is served beside the second."""
        steps = json.loads(self.sidecars[-1].files["steps.json"])["steps"]
        for number, step in enumerate(steps):
            tell(f"{program.MARK}{json.dumps({'what': 'begin', 'step': number})}")
            self.finished += step["requests"] + (1 if number == 1 else 0)
            times = {"p50": 1.0, "p95": 2.0, "p99": 3.0}
            figures = {"seconds": 4.0, "completed": step["requests"], "failed": 0}
            figures |= {"output_tokens": 200, "tpot_ms": 20.0}
            tell(f"{program.MARK}{json.dumps({'what': 'end', 'step': number, **figures, 'ttft': times})}")

    def run_sidecar(self, sidecar: Sidecar, *_: Any, on_line: Any, find_trouble: Any, **__: Any) -> Ended:
        self.sidecars.append(sidecar)
        self.play(on_line, find_trouble)
        return Ended(0, (), {})

    def sample(self) -> Sample:
        states = {UUIDS[0]: StateReading(60.0, None, 2040, 55, ())}
        totals = Totals(0.25, 0, 10, 4, self.finished, tokens=90, in_work=self.in_work)
        return Sample(0.0, totals, {UUIDS[0]: 20000}, states)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BenchHost:
    made = BenchHost(HostPaths(tmp_path / "etc", tmp_path / "state", tmp_path / "units", tmp_path / "run"))
    files = engine("e2b", url=f"unix:{SOCKETS}/api.sock", weights_path="/data/e2b")
    mount = f"--mount=type=bind,source={SOCKETS},target=/run/api"
    image = files.container.index("vllm-edge/vllm:1")
    container = [*files.container[:image], mount, *files.container[image:]]
    activate(made.paths, rendered(replace(files, container=container), profile="p"))

    @contextlib.contextmanager
    def sampler(config: object) -> Iterator[Sampler]:
        made.sampler = Sampler(made.sample)
        yield made.sampler

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(run, "request", made.ask)
    monkeypatch.setattr(run, "run_sidecar", made.run_sidecar)
    monkeypatch.setattr(run, "open_sampler", sampler)
    monkeypatch.setattr(command, "DockerEngine", lambda: made.docker)
    return made


def bench(host: BenchHost, output: str = "json", attended: bool = False, **options: Any) -> int:
    given = Options(**{"case": ("protocol",), "through": "engine", **options})
    long_run = LongRun(host.paths.run, "bench", attended, find_switch=lambda: find_switch(host.paths))
    return command.run_bench(host.paths, given, long_run, output=output)


@contextlib.contextmanager
def switching(host: BenchHost, phase: Phase | None) -> Iterator[None]:
    """A process that holds the lock of the switch, in a phase or only to look."""
    with take_lock(host.paths):
        one = replace(journal._build_unknown("1", "", asked_by="alice"), phase=phase)
        host.paths.switch_journal.write_text(json.dumps(journal.to_json(one)))
        yield


def read_error(host: BenchHost) -> str:
    """Why the one run of the host was interrupted."""
    end = parse_run(list_files(host.paths)[0].read_text()).end
    assert end is not None and end.verdict == "interrupted"
    return end.error


def test_a_run_is_recorded_line_by_line(host: BenchHost, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(host, note="Simulated GPUs") == 0
    said = json.loads(capsys.readouterr().out)
    (path,) = list_files(host.paths)
    assert said["path"] == str(path) and path.stat().st_mode & 0o777 == 0o640
    recorded = parse_run(path.read_text())
    assert (recorded.run.profile, recorded.run.vllm, recorded.run.note) == ("p", "0.32.0", "Simulated GPUs")
    assert recorded.run.engines["e2b"].arguments[0] == "--name=vllm-e2b"
    assert [one.case for one in recorded.measurements] == ["warm-up", "protocol", "protocol", "protocol"]
    first = recorded.measurements[1]
    assert (first.tok_s, first.decode_tok_s, first.failed, first.kv_use_peak) == (50.0, 50.0, 0, 0.25)
    assert first.ttft_ms is not None and first.ttft_ms.p95 == 2.0 and first.e2e_ms is None
    assert first.other_requests == 1 and recorded.measurements[2].other_requests == 0
    assert (first.gpus[0].power_w_mean, first.gpus[0].vram_peak_mib) == (60.0, 20000)
    assert first.joules_per_token == pytest.approx(60 * 4 / 200)
    assert recorded.end is not None and not recorded.end.error
    assert any("protocol" in line for line in said["lines"]) and not any("warm-up" in line for line in said["lines"])
    assert not (host.paths.run / "bench.progress").exists()


def test_the_container_gets_weights_and_socket_read_only_and_no_network(host: BenchHost) -> None:
    bench(host)
    (sidecar,) = host.sidecars
    assert (sidecar.purpose, sidecar.weights, sidecar.sockets) == ("bench", Path("/data/e2b"), {"api": SOCKETS})
    assert sidecar.program == Path(program.__file__).read_text() and "key" not in sidecar.files


def test_it_is_refused_while_clients_are_served(host: BenchHost, capsys: pytest.CaptureFixture[str]) -> None:
    host.metrics = METRICS.replace('running{engine="0",model_name="sentry"} 0.0', 'running{engine="0"} 2.0')
    assert bench(host) == 2
    said = capsys.readouterr().err
    assert "works on 2 requests of clients" in said and "bench_allow_load=true" in said
    assert list_files(host.paths) == [] and host.sidecars == []
    assert bench(host, allow_load=True) == 0


def test_a_switch_another_run_and_an_engine_that_does_not_serve_are_refused(
    host: BenchHost, capsys: pytest.CaptureFixture[str]
) -> None:
    with switching(host, Phase.PREFLIGHT):
        assert bench(host) == 2
    assert "a switch began" in capsys.readouterr().err
    with LongRun(host.paths.run, "bench").alone():
        assert bench(host) == 2
    assert "`vllm-edge bench` runs on this host already" in capsys.readouterr().err
    assert bench(host, engine=("31b",)) == 2
    assert "31b is no engine of profile p, which serves now; it has e2b" in capsys.readouterr().err
    assert list_files(host.paths) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (SidecarError("Container vllm-edge-bench was ended: it did not finish within 9 s."), "did not finish within"),
        (KeyboardInterrupt("SIGTERM"), "was interrupted by SIGTERM"),
    ],
)
def test_a_run_that_is_cut_off_says_so_in_its_record(host: BenchHost, error: BaseException, said: str) -> None:
    def play(tell: Callable[[str], None], trouble: Callable[[], str]) -> None:
        host.measure(tell, trouble)
        raise error

    host.play = play
    assert bench(host) == 1 and said in read_error(host)
    recorded = parse_run(list_files(host.paths)[0].read_text())
    assert len(recorded.measurements) == 4, "what was measured before counts"


def test_a_switch_that_begins_ends_the_run(host: BenchHost) -> None:
    def play(tell: Callable[[str], None], trouble: Callable[[], str]) -> None:
        with switching(host, None):
            assert not trouble(), "who finds nothing to do disturbs nothing"
        with switching(host, Phase.PREFLIGHT):
            raise SidecarError(trouble())

    host.play = play
    assert bench(host) == 1 and "a switch began" in read_error(host)


def test_a_run_that_nobody_follows_ends(host: BenchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(tell: Callable[[str], None], trouble: Callable[[], str]) -> None:
        assert LongRun(host.paths.run, "bench").follow() == 0
        assert not trouble()
        monkeypatch.setattr("ansible.module_utils.vllm_edge.system.long_run.time.time", lambda: 1e12)
        assert not trouble(), "a step of the clock is nobody's absence"
        monkeypatch.setattr("ansible.module_utils.vllm_edge.system.long_run.count_boot_seconds", lambda: 1e12)
        raise SidecarError(trouble())

    host.play = play
    assert bench(host, attended=True) == 1 and "nobody follows it any more" in read_error(host)


@pytest.mark.parametrize("change", [{"id": "d" * 64}, {"started_at": "2026-11-25T04:00:00Z"}, {"status": "exited"}, {}])
def test_a_run_whose_engine_is_another_container_ends(host: BenchHost, change: dict[str, str]) -> None:
    """Also if that is seen only when the program has ended. Without a change the container is removed."""

    def play(tell: Callable[[str], None], trouble: Callable[[], str]) -> None:
        assert not trouble()
        host.docker.containers = [replace(one, **change) for one in host.docker.containers if change]
        host.measure(tell, trouble)

    host.play = play
    assert bench(host) == 1
    assert "engine e2b no longer runs in the container that it began with" in read_error(host)
    assert "`vllm-edge explain e2b` says why" in read_error(host)


def test_a_run_that_makes_no_progress_ends(host: BenchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for somebody else, such as the supervisor's probe of an idle engine, is none of its own."""
    now = time.monotonic()
    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: now))

    def play(tell: Callable[[str], None], trouble: Callable[[], str]) -> None:
        nonlocal now
        for in_work in (1, 0):
            now += run.IMPORT_S - 1
            assert not trouble()
            host.finished, host.in_work = host.finished + 1, in_work
            host.sampler._look()
        now += 1
        raise SidecarError(trouble())

    host.play = play
    assert bench(host) == 1
    assert "engine e2b has made no progress with the benchmark's requests for 300 s" in read_error(host)


def test_a_run_begins_with_an_engine_that_runs_and_a_docker_that_answers(host: BenchHost) -> None:
    host.docker.containers = []
    assert bench(host) == 1 and host.sidecars == []
    assert "Engine e2b does not run; `vllm-edge explain e2b` says why" in read_error(host)
    list_files(host.paths)[0].unlink()
    host.docker.away = "connection refused"
    assert bench(host) == 1
    assert "Docker does not say whether engine e2b still runs: connection refused" in read_error(host)


def test_lost_measurements_and_a_full_disk_are_no_pass(host: BenchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.play = lambda tell, trouble: host.measure(
        lambda line: None if '"end", "step": 2' in line else tell(line), trouble
    )
    assert bench(host) == 1 and "lines with measurements were lost" in read_error(host)

    def add(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run, "add_record", add)
    assert bench(host) == 2


def test_only_the_newest_runs_are_kept(host: BenchHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "KEPT_RUNS", 2)
    host.paths.bench.mkdir(parents=True)
    for number in range(5):
        (host.paths.bench / f"2026112{number}T000000Z-p.jsonl").write_text("{}\n")
    prune_runs(host.paths, list_files(host.paths)[0])
    kept = [path.stem[:8] for path in list_files(host.paths)]
    assert kept == ["20261120", "20261124"], "the one just written stays, whatever the clock said"


def test_totals_are_summed_over_label_sets() -> None:
    assert read_totals(METRICS) == Totals(0.25, 2, 1000, 300, 12, 90, 0)
    assert read_totals("") == Totals(None, None, None, None, None, None, None)


def test_energy_is_the_counters_between_the_requests_or_power_times_time() -> None:
    def at(seconds: float, energy: float | None) -> Sample:
        return Sample(seconds, None, {}, {"g": StateReading(50.0, energy, 2040 - int(seconds), 40, ("hw_slowdown",))})

    counted = summarize_gpu("g", 0, [at(0, 100.0), at(2, 160.0), at(4, 300.0)], (1.0, 3.0))
    assert counted.joules == pytest.approx(230 - 130)
    measured = summarize_gpu("g", 0, [at(0, None), at(2, None), at(4, None)], (1.0, 3.0))
    assert (measured.joules, measured.sm_clock_mhz_min, measured.throttle) == (100.0, 2038, ("hw_slowdown",))
    unknown = summarize_gpu("g", None, [Sample(0, None)], (0.0, 1.0))
    assert (unknown.joules, unknown.vram_peak_mib, unknown.power_w_mean) == (None, None, None)


def test_the_state_of_a_gpu_is_read_through_nvml(gpus: LabRoot) -> None:
    gpus.set_fault(1, "throttled", "sw_power_cap")
    with open_nvml() as session:
        idle, throttled = (session.read_state(gpu) for gpu in session.identities[:2])
    assert (idle.power_w, idle.sm_clock_mhz, idle.throttle) == (16.2, 210, ())
    assert (throttled.sm_clock_mhz, throttled.throttle) == (105, ("sw_power_cap",))
    assert idle.energy_j is not None and idle.energy_j > 0 and idle.temperature_c == 36
