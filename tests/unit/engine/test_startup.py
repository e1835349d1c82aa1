# SPDX-License-Identifier: Apache-2.0
"""Phases and numbers from vLLM's own lines."""

from __future__ import annotations

from pathlib import Path

import pytest
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

LINES = [
    ("INFO 11-21 03:00:01 [model_runner.py:425] Starting to load model /models/x...", Phase.LOADING, None),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]", Phase.LOADING, 0),
    ("Loading safetensors checkpoint shards:  75% Completed | 3/4 [00:11<00:03,  3.7s/it]", Phase.LOADING, 75),
    ("INFO [default_loader.py:502] Loading weights took 24.11 seconds", Phase.LOADING, None),
    ("INFO [model_runner.py:425] Model loading took 16.32 GiB memory and 25.101 seconds", Phase.LOADING, None),
    ("INFO Using cache directory: /cache/x for vLLM's torch.compile", Phase.COMPILING, None),
    ("INFO [backends.py:1167] Dynamo bytecode transform time: 9.01 s", Phase.COMPILING, None),
    ("INFO [gpu_worker.py:773] Available KV cache memory: 2.39 GiB", Phase.KV_CACHE, None),
    ("INFO GPU KV cache size: 10,432 tokens", Phase.KV_CACHE, None),
    ("INFO CPU KV cache size: 10,432 tokens", Phase.KV_CACHE, None),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  35%|###   | 12/34", Phase.CAPTURING, 35),
    ("Capturing CUDA graphs (decode, FULL): 100%|######| 34/34", Phase.CAPTURING, 100),
    ("INFO Graph capturing finished in 14 secs, took 1.47 GiB", Phase.HEALTH, None),
    ("INFO init engine (profile, create kv cache, warmup model) took 60.10 s", Phase.HEALTH, None),
    ("INFO [api_server.py:1] Starting vLLM API server 0 on http://0.0.0.0:8000", Phase.HEALTH, None),
    ("INFO Starting vLLM server on http://0.0.0.0:8000", Phase.HEALTH, None),
    ("INFO:     Application startup complete.", Phase.HEALTH, None),
]


@pytest.mark.parametrize(("line", "phase", "percent"), LINES)
def test_phase_of_a_line(line: str, phase: Phase, percent: int | None) -> None:
    assert parse_phase(line) == (phase, percent)


def test_lines_that_tell_nothing() -> None:
    for line in (
        "INFO Enforce eager set, disabling torch.compile and CUDAGraphs. This is equivalent to setting",
        "INFO Initializing a V1 LLM engine (v0.32.0) with config: model='/models/x'",
        "INFO Automatically detected platform cpu.",
        "",
    ):
        assert parse_phase(line) is None, line


def test_the_furthest_phase_counts() -> None:
    progress = Progress()
    assert progress.words() == "starting container"
    assert not progress.feed("")
    assert progress.feed("INFO Automatically detected platform cuda.")
    assert progress.words() == "starting vLLM"
    assert not progress.feed("INFO vLLM API server version 0.32.0")
    for line, _, _ in LINES[:3]:
        progress.feed(line)
    assert progress.words() == "loading weights, 75 %"
    assert progress.feed(LINES[7][0])
    assert progress.words() == "KV cache"
    assert not progress.feed(LINES[2][0]), "another worker is behind"
    assert progress.phase is Phase.KV_CACHE


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
