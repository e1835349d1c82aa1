# SPDX-License-Identifier: Apache-2.0
"""The supervisor's decisions, one table per question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from ansible.module_utils.vllm_edge.engine.config import EngineConfig, parse_engine
from ansible.module_utils.vllm_edge.engine.lifecycle import (
    Existing,
    Found,
    Supervision,
    decide_existing,
    had_been_ready,
)
from ansible.module_utils.vllm_edge.engine.startup import (
    ORDER,
    TIMES,
    WORDS,
    Phase,
    Progress,
    facts_of,
    is_progress,
    parse_phase,
)
from ansible.module_utils.vllm_edge.engine.state import EngineState
from ansible.module_utils.vllm_edge.engine.usage import Usage
from ansible.module_utils.vllm_edge.engine.watchers import compute_health_interval
from ansible.module_utils.vllm_edge.system.docker import Container
from ansible.module_utils.vllm_edge.system.http import Answer
from engine_files import CONFIG

ENGINE: EngineConfig = parse_engine(json.dumps(CONFIG | {"image_id": "sha256:11"}), "engine.json")
LABELS = {"vllm-edge.engine": "e2b", "vllm-edge.input-hash": "ab12"}
OURS = Container(id="c" * 64, name="vllm-e2b", status="running", labels=LABELS, image="vllm:1")
OK, SILENT = Answer(200), Answer(None, error="no answer within 5 s")
LINE = "INFO Loading safetensors checkpoint shards:  50% Completed | 1/2"


@pytest.mark.parametrize(
    ("container", "found", "what", "told"),
    [
        (None, None, Existing.CREATE, "no container"),
        (replace(OURS, labels={}), None, Existing.REFUSE, "has no label vllm-edge.engine, so it is not ours"),
        (replace(OURS, labels={}, status="exited"), None, Existing.REFUSE, "left alone"),
        (replace(OURS, labels={"vllm-edge.engine": "e4b"}), None, Existing.REFUSE, "belongs to the engine 'e4b'"),
        (replace(OURS, status="exited"), None, Existing.REMOVE, "is exited"),
        (replace(OURS, status="paused"), None, Existing.REMOVE, "is paused"),
        (replace(OURS, labels={"vllm-edge.engine": "e2b"}), None, Existing.STOP_AND_REMOVE, "other inputs"),
        (OURS, Found(OK, True, 900.0), Existing.ATTACH_SERVING, "answers /health"),
        (replace(OURS, image_id="sha256:22"), None, Existing.STOP_AND_REMOVE, "from the image sha256:22"),
        (replace(OURS, image_id="sha256:11"), Found(OK, True, 1.0), Existing.ATTACH_SERVING, "answers /health"),
        (OURS, Found(SILENT, True, 1.0), Existing.STOP_AND_REMOVE, "served before and does not answer"),
        (OURS, Found(SILENT, False, 299.0), Existing.ATTACH_LOADING, "still loads"),
        (OURS, Found(SILENT, False, 300.0), Existing.STOP_AND_REMOVE, "log stands still"),
        (OURS, Found(SILENT, False, None), Existing.STOP_AND_REMOVE, "log stands still"),
        (OURS, Found(SILENT, False, 900.0, "computes"), Existing.ATTACH_LOADING, "its log is silent, and it computes"),
        (OURS, Found(SILENT, False, None, "reads 9 MiB/s"), Existing.ATTACH_LOADING, "it reads 9 MiB/s"),
        (OURS, Found(SILENT, True, 900.0, "computes"), Existing.STOP_AND_REMOVE, "served before"),
    ],
)
def test_a_container_that_is_there(container: Container | None, found: Found | None, what: Existing, told: str) -> None:
    look = Mock(return_value=found)
    decision = decide_existing(container, ENGINE, look)
    assert look.called is (found is not None), "only the right running one"
    assert decision.what is what
    assert told in decision.why


@pytest.mark.parametrize(
    ("state", "lines", "ready"),
    [
        (None, [], False),
        (None, ["INFO:     Application startup complete."], True),
        (EngineState("e2b", "serving", "t", container_id="c" * 64, ready_at="t"), [], True),
        (EngineState("e2b", "loading-weights", "t", container_id="c" * 64), ["Application startup complete"], False),
        (EngineState("e2b", "serving", "t", container_id="d" * 64, ready_at="t"), [], False),
    ],
)
def test_whether_it_has_ever_answered(state: EngineState | None, lines: list[str], ready: bool) -> None:
    assert had_been_ready(OURS, state, lines) is ready


def begun() -> Supervision:
    return Supervision(ENGINE, started=100.0)


def test_from_start_to_ready() -> None:
    life = begun()
    first = life.on_tick(100.0)
    assert first.status == "starting container, 0 s"
    assert first.extend_s is not None
    loading = life.on_log(LINE, 101.0)
    assert loading.phase_changed and loading.status == "loading weights, 50 %, 1 s"
    assert not life.on_health(SILENT, 102.0, "03:00:02").watchdog
    ready = life.on_health(OK, 125.3, "03:00:25")
    assert ready.ready and ready.watchdog and ready.phase_changed
    assert ready.status == "serving sentry at http://127.0.0.1:8070 (e2b bf16), loaded in 25 s"
    assert ready.extend_s is None
    assert life.load_seconds == 25.3
    again = life.on_health(OK, 135.0, "03:00:35")
    assert again.watchdog and not again.ready and again.status is None and not again.phase_changed
    assert life.on_log(LINE, 140.0).phase_changed is False, "a line does not bring a serving engine back to loading"
    assert life.on_log("Model loading took 9.9 GiB", 140.0).late_facts, "Docker delivers a line after /health answers"
    assert not life.on_log("Model loading took 9.9 GiB", 141.0).late_facts


ALONE = "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs."


def test_a_warning_of_the_start_is_kept_once_and_one_of_a_request_is_not() -> None:
    life = begun()
    for rank in "0123":
        life.on_log(f"(Worker_TP{rank}) {ALONE}", 101.0)
    life.on_health(OK, 125.3, "03:00:25")
    life.on_log("Using KV cache scaling factor 1.0 for fp8", 130.0)
    (warning,) = life.start_warnings
    assert "more than two PCIe-only GPUs" in warning


def test_how_often_the_status_and_more_time_are_sent_while_it_loads() -> None:
    life = begun()
    extensions = [life.on_tick(100.0 + second).extend_s for second in range(20)]
    assert extensions.count(60.0) == 4
    life.on_health(OK, 121.0, "")
    assert all(life.on_tick(121.0 + second).extend_s is None for second in range(20))
    life = begun()
    life.on_log(LINE, 100.0)
    sent = [life.on_log(f"line {n}", 100.0 + n / 10).status for n in range(1, 50)]
    assert 1 <= sum(text is not None for text in sent) <= 3


def test_a_log_that_stands_still() -> None:
    life = begun()
    life.on_log(LINE, 150.0)
    life.on_log("INFO No available shared memory broadcast block found in 60 seconds.", 400.0)
    assert life.on_tick(449.9).give_up is None
    given_up = life.on_tick(450.0).give_up
    assert given_up is not None and given_up.cause == "stalled"
    assert "loading weights, 50 %" in given_up.reason


def test_a_load_that_reads_in_silence_is_no_hang() -> None:
    life = begun()
    life.on_log(LINE, 110.0)
    for second in range(110, 2000, 5):  # 100 MB/s
        life.on_usage(Usage(second * 100_000_000, 0, second / 100), float(second))
        assert life.on_tick(float(second)).give_up is None
    assert life.status_text(1995.0) == "loading weights, 50 %, 31 min 35 s; no line for 31 min 25 s, reads 95 MiB/s"
    life.on_usage(Usage(1995 * 100_000_000, 0, 20.0), 2005.0)
    assert life.on_tick(2294.0).give_up is None
    assert life.on_tick(2295.0).give_up is not None, "it stands still"


@pytest.mark.parametrize(
    ("line", "until"),
    [(LINE, 1310 + 300), ("Dynamo bytecode transform time: 3.5 s", 1310 + 300), ("first line", 110 + 300)],
    ids=["loading", "compiling", "a phase before"],
)
def test_computing_alone_is_progress_for_a_while(line: str, until: int) -> None:
    life = begun()
    life.on_log(line, 110.0)
    for second in range(110, 3000, 5):
        life.on_usage(Usage(0, 0, float(second)), float(second))
        if life.on_tick(float(second)).give_up is not None:
            break
    assert until - 10 <= second <= until + 5


def test_waiting_is_no_computing() -> None:
    """It reads less than 1 MiB, meets less than one fault and uses less than a tenth of a core in each second."""
    life = begun()
    life.on_log(LINE, 110.0)
    for second in range(110, 420, 5):
        life.on_usage(Usage(second * 1_000_000, second * 4 // 5, second * 0.09), float(second))
    assert life.on_tick(420.0).give_up is not None


def test_silence_is_no_hang_while_nobody_sees_what_the_container_does() -> None:
    life = begun()
    life.on_log(LINE, 110.0)
    extended = []
    for second in range(110, 2000, 5):
        life.on_usage(None, float(second))
        seen = life.on_tick(float(second))
        assert seen.give_up is None
        extended += [second] if seen.extend_s else []
    assert extended[-1] == 405, "then the unit's own start timeout ends it"
    assert "/sys/fs/cgroup cannot be read" in life.status_text(1995.0)
    life.on_usage(Usage(0, 0, 0.0), 2000.0)
    assert life.on_tick(2000.0).give_up is not None


def test_silence_is_not_the_engines_while_docker_is_away_or_its_log_cannot_be_read() -> None:
    life = begun()
    assert "away" in (life.on_docker(True, 120.0).say or "")
    assert life.on_tick(500.0).give_up is None
    assert "back after 6 min 20 s" in (life.on_docker(False, 500.0).say or "")
    assert life.on_tick(501.0).give_up is None
    assert life.on_tick(800.0).give_up is not None
    life = begun()
    life.on_tick(110.0)
    lost = life.on_log_lost("logs: 500 Server Error", 120.0)
    assert lost.say == "the engine's log cannot be read: logs: 500 Server Error"
    assert lost.status == "starting container, 20 s; its log cannot be read"
    assert life.on_log_lost("another", 130.0).say is None
    ticks = [life.on_tick(120.0 + second) for second in range(600)]
    assert all(tick.give_up is None for tick in ticks)
    assert all(tick.extend_s is None for tick in ticks), "without its log the unit's start timeout bounds it"
    again = life.on_log_lost(None, 800.0)
    assert again.say == "the engine's log can be read again" and again.extend_s is not None
    assert life.on_tick(1099.0).give_up is None
    assert life.on_tick(1100.0).give_up is not None


def test_a_hung_engine() -> None:
    life = begun()
    life.on_health(OK, 110.0, "")
    lost = life.on_health(SILENT, 120.0, "03:00:20")
    assert not lost.watchdog and lost.phase_changed and life.phase is Phase.UNHEALTHY
    assert lost.status is not None
    assert lost.status.startswith("not answering /health since 03:00:20 (no answer within 5 s)")
    assert lost.say == "/health does not answer: no answer within 5 s"
    more = life.on_health(Answer(503), 125.0, "03:00:25")
    assert more.say is None and not more.watchdog
    assert "since 03:00:20 (HTTP 503)" in (more.status or "")
    assert "not answered /health for 20 s (HTTP 503)" in life.explain_end_by_watchdog(130.0).sentence()
    back = life.on_health(OK, 131.0, "03:00:31")
    assert back.watchdog and back.say == "/health answers again after 11 s" and not back.ready
    assert life.phase is Phase.SERVING and life.get_unanswered_s(131.0) == 0.0


def metrics(running: int, tokens: int, usage: float = 0.25, waiting: int = 0) -> str:
    return (
        "# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0"}} {running}.0\nvllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="0"}} {usage}\nvllm:generation_tokens_total{{engine="0"}} {tokens}.0\n'
        f"process_cpu_seconds_total {usage}\n"
    )


def serving() -> Supervision:
    life = begun()
    life.on_health(OK, 110.0, "", metrics(0, 7))
    return life


@pytest.mark.parametrize("stuck", [metrics(2, 9), metrics(0, 9, waiting=2)], ids=["running", "waiting"])
def test_requests_that_stand_still(stuck: str) -> None:
    life = serving()
    life.on_health(OK, 120.0, "", stuck)
    assert life.on_health(OK, 419.0, "03:05:19", stuck).watchdog
    found = life.on_health(OK, 420.0, "03:05:20", stuck)
    assert not found.watchdog and found.phase_changed and life.phase is Phase.UNHEALTHY
    assert found.say == "requests make no progress for 5 min 00 s (2 running or waiting)"
    assert (found.status or "").startswith("requests make no progress, seen at 03:05:20 (2 running or waiting); the")
    assert life.on_health(OK, 430.0, "", stuck).say is None
    ended = life.explain_end_by_watchdog(450.0)
    assert ended.cause == "no_progress" and ended.heals and "for 330 s" in ended.reason
    back = life.on_health(OK, 460.0, "", metrics(2, 10))
    assert back.watchdog and back.say == "requests make progress again after 40 s" and life.phase is Phase.SERVING
    assert life.explain_end_by_watchdog(461.0).cause == "hung"


def test_what_metrics_do_not_tell_or_what_moves_in_them_is_no_standstill() -> None:
    life = serving()
    for chunk in range(1, 20):
        assert life.on_health(OK, 110.0 + 290 * chunk, "", metrics(1, 7, usage=chunk / 100)).watchdog
    life = serving()
    life.on_health(OK, 120.0, "", metrics(1, 9))
    assert life.on_health(OK, 5000.0, "").watchdog, "/metrics could not be read"
    assert life.on_health(OK, 5010.0, "", "vllm:other 1").watchdog, "an engine without statistics"


def test_an_idle_engine_is_asked_for_a_token() -> None:
    life = serving()
    assert not life.on_health(OK, 409.0, "", metrics(0, 7)).probe
    assert life.on_health(OK, 410.0, "", metrics(0, 7)).probe
    assert not life.on_health(OK, 420.0, "", metrics(0, 7)).probe, "one at a time"
    life.advance.on_probe(OK, 421.0)
    assert not life.on_health(OK, 720.0, "", metrics(0, 7)).probe
    assert life.on_health(OK, 721.0, "", metrics(0, 7)).probe
    assert life.on_health(OK, 1020.0, "", metrics(0, 7)).watchdog
    stopped = life.on_health(OK, 1021.0, "", metrics(0, 7))
    assert not stopped.watchdog and "the supervisor's own, for one token" in (stopped.say or "")
    assert life.explain_end_by_watchdog(1021.0).reason.count("300 s") == 1


def test_no_probe_while_somebodys_request_runs_or_where_it_is_turned_off() -> None:
    life = serving()
    assert not any(life.on_health(OK, 110.0 + n, "", metrics(1, n)).probe for n in range(0, 3000, 100))
    off = Supervision(replace(ENGINE, idle_probe_s=0), started=100.0)
    assert not any(off.on_health(OK, 110.0 + n, "", metrics(0, 7)).probe for n in range(0, 3000, 100))


def test_a_status_while_docker_is_away() -> None:
    life = begun()
    life.on_health(OK, 110.0, "")
    assert "clients cannot connect" in (life.on_docker(True, 120.0).status or "")
    assert life.on_health(OK, 121.0, "").watchdog, "with live-restore the engine lives on"
    assert life.on_docker(True, 122.0).say is None
    back = life.on_docker(False, 123.0)
    assert back.status == "serving sentry at http://127.0.0.1:8070 (e2b bf16), loaded in 10 s"


def test_after_the_first_answer_silence_and_lines_of_the_start_count_no_more() -> None:
    life = begun()
    life.on_log("RuntimeError: No available memory for the cache blocks", 101.0)
    assert list(life.scan)
    life.on_health(OK, 110.0, "")
    assert not life.scan and list(life.tail)
    assert life.on_tick(99_999.0).give_up is None


def test_an_attached_engine_keeps_its_load_time() -> None:
    life = Supervision(ENGINE, started=50.0, was_ready=True, load_seconds=91.0)
    life.on_health(OK, 110.0, "")
    assert life.load_seconds == 91.0
    unknown = Supervision(ENGINE, started=50.0, was_ready=True)
    unknown.on_health(OK, 110.0, "")
    assert unknown.load_seconds is None, "60 s would be the time since its start, not its load"


@pytest.mark.parametrize(("watchdog", "interval"), [(None, 10.0), (120.0, 10.0), (15.0, 5.0), (0.3, 0.2)])
def test_how_often_health_is_asked(watchdog: float | None, interval: float) -> None:
    assert compute_health_interval(watchdog) == interval


LINES = [
    ("INFO 11-21 03:00:01 [model_runner.py:425] Starting to load model /models/x...", Phase.LOADING, None),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]", Phase.LOADING, 0),
    ("Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:11<00:03,  3.7s/it]", Phase.LOADING, 75),
    ("INFO [model_runner.py:425] Model loading took 16.32 GiB memory and 25.101 seconds", Phase.LOADING, None),
    ("INFO Using cache directory: /cache/x for vLLM's torch.compile", Phase.COMPILING, None),
    ("INFO [backends.py:1167] Dynamo bytecode transform time: 9.01 s", Phase.COMPILING, None),
    ("INFO [gpu_worker.py:773] Available KV cache memory: 2.39 GiB", Phase.KV_CACHE, None),
    ("INFO GPU KV cache size: 10,432 tokens", Phase.KV_CACHE, None),
    ("INFO CPU KV cache size: 10,432 tokens", Phase.KV_CACHE, None),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  35%|###   | 12/34", Phase.CAPTURING, 35),
    ("INFO Graph capturing finished in 14 secs, took 1.47 GiB", Phase.HEALTH, None),
    ("INFO init engine (profile, create kv cache, warmup model) took 60.10 s", Phase.HEALTH, None),
    ("INFO [api_server.py:1] Starting vLLM API server 0 on http://0.0.0.0:8000", Phase.HEALTH, None),
    ("INFO:     Application startup complete.", Phase.HEALTH, None),
]
TELL_NOTHING = [
    "INFO Enforce eager set, disabling torch.compile and CUDAGraphs. This is equivalent to setting",
    "INFO Initializing a V1 LLM engine (v0.32.0) with config: model='/models/x'",
    "",
]


@pytest.mark.parametrize(("line", "phase", "percent"), [*LINES, *((line, None, None) for line in TELL_NOTHING)])
def test_phase_of_a_line(line: str, phase: Phase | None, percent: int | None) -> None:
    assert parse_phase(line) == ((phase, percent) if phase else None)


def test_numbers_of_the_log() -> None:
    one = "GPU KV cache size: 71,234 tokens, Maximum concurrency for 4,096 tokens per request: 17.39x"
    assert facts_of(one) == {"kv_cache_tokens": 71234, "max_concurrency": 17.39}
    assert facts_of("Model loading took 9.91 GiB and 1.5 seconds") == {"model_gib": 9.91, "model_s": 1.5}
    assert facts_of("Available KV cache memory: -0.92 GiB") == {"kv_cache_gib": -0.92}


FIXTURES = Path(__file__).parents[2] / "fixtures" / "explain"


@pytest.mark.parametrize(
    ("log", "times"),
    [
        ("healthy-gemma-4-31b", {"compile_s": 5.92, "profile_s": 0.47}),
        ("healthy-gemma-4-lab", {"weights_s": 0.02, "model_s": 3.04, "graphs_s": 0, "init_s": 5.93}),
        ("healthy-gpt-oss-20b", {"weights_s": 4.15, "model_s": 4.83}),
        ("healthy-qwen3.8-27b-two-gpus", {"graphs_s": 1, "init_s": 68.81}),
        ("healthy-qwen3-1.7b-two-gpus", {"graphs_s": 4, "init_s": 25.85}),
    ],
)
def test_times_in_real_logs(log: str, times: dict[str, float]) -> None:
    progress = Progress()
    for line in (FIXTURES / f"{log}.log").read_text().splitlines():
        progress.feed(line)
    found = {key: round(value, 2) for key, value in progress.facts.items() if key in TIMES}
    assert found == times


def test_times_of_ranks_and_of_a_compiled_model_in_the_cache() -> None:
    progress = Progress()
    for line in (
        "(Worker_TP0 pid=26) INFO [default_loader.py:507] Loading weights took 24.10 seconds",
        "(Worker_TP1 pid=27) INFO [default_loader.py:507] Loading weights took 23.90 seconds",
        "INFO [monitor.py:62] [encoder] torch.compile took 1.50 s in total",
        "INFO [decorators.py:717] torch.compile and initial profiling/warmup run together took 11.25 s in total",
        "INFO [core.py:396] init engine (profile, create kv cache, warmup model) took 60.10 s (compilation: 12.75 s — "
        "language_model: 11.25 s, encoder: 1.50 s)",
    ):
        progress.feed(line)
    assert progress.facts == {"weights_s": 24.1, "compile_s": 11.25, "init_s": 60.1}
    assert parse_phase("INFO [monitor.py:62] torch.compile took 5.92 s in total") == (Phase.COMPILING, None)


@pytest.mark.parametrize(
    ("line", "alive"),
    [
        ("INFO anything", True),
        ("", False),
        ("   ", False),
        ("INFO [shm_broadcast.py:681] No available shared memory broadcast block found in 60 seconds.", False),
        ("DEBUG Waiting for 1 local, 0 remote core engine proc(s) to start.", False),
    ],
)
def test_what_counts_as_a_sign_of_life(line: str, alive: bool) -> None:
    assert is_progress(line) is alive


def test_every_phase_has_words_and_a_place() -> None:
    assert set(WORDS) == set(Phase) == set(ORDER)
