# SPDX-License-Identifier: Apache-2.0
"""What a switch asks engines: whether requests run, first work, the canary; and weights read ahead."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from ansible.module_utils.vllm_edge.answers import canary_command as command
from ansible.module_utils.vllm_edge.engine.metrics import kv_blocks
from ansible.module_utils.vllm_edge.generation.model import Limits
from ansible.module_utils.vllm_edge.switch.model import Done, Moves, PhaseFailed
from ansible.module_utils.vllm_edge.switch.steps import page_cache
from ansible.module_utils.vllm_edge.switch.steps.requests import count_words
from ansible.module_utils.vllm_edge.system.http import Answer
from ansible.module_utils.vllm_edge.system.threads import call_in_parallel
from fake_host import Bench, failure, models, ok
from generations import engine
from test_preflight import recorded

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="a"}} {0}
vllm:num_requests_running{{engine="1",model_name="a"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="a"}} {1}
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 99.0
"""
CHAT = {"choices": [{"message": {"content": "on"}, "finish_reason": "length"}], "usage": {"completion_tokens": 1}}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_questions_are_asked_at_once_and_what_one_raises_is_raised_after_all_have_ended() -> None:
    together = threading.Barrier(3, timeout=60)

    def answer(item: int) -> int:
        together.wait()
        time.sleep(0.01 * (3 - item))
        return item * 2

    assert call_in_parallel(answer, [0, 1, 2]) == [0, 2, 4]
    assert call_in_parallel(answer, []) == []
    ended = []

    def end(item: int) -> None:
        if item == 0:
            raise PhaseFailed("no")
        time.sleep(0.05)
        ended.append(item)

    assert "no" in failure(lambda: call_in_parallel(end, [0, 1])).text
    assert ended == [1]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="3917",engine="0"} 1.0\n', 3917),
        ('# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{num_gpu_blocks="12"} 1.0\n', 12),
        ('vllm:cache_config_info{num_gpu_blocks="None",num_gpu_blocks_override="7"} 1.0\n', None),
        ("vllm:num_requests_running 0.0\n", None),
    ],
)
def test_kv_blocks(text: str, blocks: int | None) -> None:
    assert kv_blocks(text) == blocks


def test_draining_ends_when_twice_in_a_row_nothing_runs_or_at_its_limit(bench: Bench) -> None:
    bench.live(engine("e2b", shutdown_timeout_s=20))
    answers = iter([3, 0, 1, 0, 0, 7])
    bench.http.answers["/metrics"] = lambda _: ok(f"vllm:num_requests_running {next(answers)}")
    done = bench.machine.drain(Moves(stop=("e2b",)), Limits(drain_timeout_s=30))
    assert done.detail == "e2b has no request; 1.0 s" and done.warnings == ()
    assert next(answers) == 7
    bench.http.answers["/metrics"] = ok(METRICS.format("2.0", "0.0"))
    done = bench.machine.drain(Moves(stop=("e2b",)), Limits(drain_timeout_s=5))
    assert done.detail == "e2b still has 3 requests; 5.0 s"
    assert done.warnings[0].startswith("e2b still had 3 requests after 5 s: they end with it, at most 20 s later. A")


def test_an_engine_that_cannot_tell_is_not_waited_for(bench: Bench) -> None:
    bench.live(engine("a"), engine("b", port=8060))
    bench.http.answers["http://127.0.0.1:8060/metrics"] = ok("python_info 1")
    done = bench.machine.drain(Moves(stop=("a", "b", "gone")), Limits())
    assert done.detail == (
        "a does not report its requests (connection refused): not waited for; "
        "b does not report its requests (no such metric): not waited for; 0.0 s"
    )
    assert bench.machine.drain(Moves(), Limits()).detail == "no engine has to stop; 0.0 s"


@pytest.mark.parametrize(("longest", "words"), [(None, 960), (4096, 960), (100_000, 960), (512, 192), (64, 1)])
def test_how_long_the_longer_prompt_is(bench: Bench, longest: int | None, words: int) -> None:
    generation = bench.live(engine("e2b", max_model_len=longest))
    assert count_words(generation.engines["e2b"].config) == words


def test_new_engines_get_work_and_those_that_serve_do_not(bench: Bench) -> None:
    wanted = bench.live(engine("a"), engine("b", port=8060), engine("c", port=8050))
    bench.http.answers["/v1/chat/completions"] = ok(CHAT)
    bench.let_pass("check_engine")
    done = bench.machine.warm_up(wanted, Moves(keep=("a",), start=("b",), wait=("c",)))
    assert done.detail == "; ".join(f"{name}: 3 requests, the longest of 960 words, 0.0 s" for name in "bc")
    asked = {(url, len(payload["messages"][0]["content"].split())) for url, _, payload in bench.http.asked}
    assert asked == {(f"http://127.0.0.1:{port}", words) for port in (8060, 8050) for words in (960, 3)}
    assert len(bench.http.asked) == 6
    for port in (8060, 8050):
        first = next(payload for url, _, payload in bench.http.asked if url.endswith(str(port)))
        assert first["messages"][0]["content"] == "Name a colour.", "a client that asks then waits for no long prefill"
    bench.machine.healthy(wanted, Moves(), all_of_them=False)
    assert bench.machine.warm_up(wanted, Moves(keep=("a",))).detail == "no engine is new"


def test_work_that_fails_fails_the_phase_with_vllms_words(bench: Bench) -> None:
    wanted = bench.live(engine("a"), engine("b", port=8060))
    error = {"error": {"message": "EngineCore encountered an issue"}}
    bench.http.answers["http://127.0.0.1:8070/v1/chat/completions"] = lambda payload: (
        Answer(500, json.dumps(error).encode()) if len(payload["messages"][0]["content"]) > 100 else ok(CHAT)
    )
    bench.http.answers["http://127.0.0.1:8060/v1/chat/completions"] = ok(CHAT)
    bench.let_pass("check_engine")
    failed = failure(lambda: bench.machine.warm_up(wanted, Moves(start=("a", "b"))))
    assert failed.text == (
        "Engine a does not answer a longer prompt at http://127.0.0.1:8070: HTTP 500: EngineCore encountered an issue. "
        "'journalctl -u vllm-a' has vLLM's own words."
    )
    assert failed.engines == ("a",)


def test_a_canary_of_every_role(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bench.live(engine("a", served_names=["architect", "worker"]), engine("b", port=8060))
    bench.http.answers["http://127.0.0.1:8070/v1/models"] = models("architect", "worker")
    bench.machine.healthy(wanted, Moves(), all_of_them=True)
    failed = failure(lambda: bench.machine.canary(wanted))
    assert "Role architect of engine a failed the canary's check completion: " in failed.text
    assert "Role b of engine b failed the canary's check completion: no answer to GET /v1/models" in failed.text
    assert "'vllm-edge canary b' asks again" in failed.text and failed.engines == ("a", "b")
    rows = [(row["engine"], row["served_name"], row["ok"]) for row in failed.data["canary"]]
    assert rows == [("a", "architect", False), ("a", "worker", False), ("b", "b", False)]
    good = [command.Result("a", "architect", True, 0.1, "on", 1, None, ())]
    monkeypatch.setattr(command, "canary", lambda config, timeout_s, ask: good)
    bench.docker.engine("a")
    bench.machine.healthy(wanted, Moves(), all_of_them=False)
    done = bench.machine.canary(wanted)
    assert done.detail == "a: architect in 0.0 s; b: architect in 0.0 s"
    assert done.data["canary"][0]["served_name"] == "architect"
    assert [bench.paths.engine_canary(name).exists() for name in "ab"] == [True, False], "b has no container"


def test_roles_that_failed_alike_are_told_once(bench: Bench) -> None:
    wanted = bench.live(engine("a", served_names=["architect", "worker", "auditor"]))
    failed = failure(lambda: bench.machine.canary(wanted))
    assert failed.text.startswith("Role architect, worker, auditor of engine a failed")


def prepared(bench: Bench, weights: Mapping[str, tuple[Path, Path]], room: int) -> Done:
    """Of engines with these weights (4002 bytes in two files) and records."""
    engines = [
        engine(name, weights_path=str(path), weights_record=str(record)) for name, (path, record) in weights.items()
    ]
    with patch.object(page_cache, "available_bytes", return_value=page_cache.RESERVE_BYTES + room):
        return bench.machine.prepare(bench.stored(*engines), Moves(start=tuple(weights)))


def test_weights_are_read_once_each(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    through = page_cache.read_through

    def watched(path: Path, *rest: Any) -> tuple[int, bool]:
        read.append(path.name)
        return through(path, *rest)

    monkeypatch.setattr(page_cache, "read_through", watched)
    weights = recorded(tmp_path)
    told = prepared(bench, {"e2b": weights, "e2b-2": weights}, 10_000).detail
    assert told.endswith("; e2b-2 0.0 MiB read in 0.0 s") and told.count(" read in ") == 1
    assert read == ["config.json", "model-00001-of-00001.safetensors"]


def test_the_disk_is_measured_before_the_weights_are_read(bench: Bench, tmp_path: Path) -> None:
    rates, weights = bench.paths.read_rates, {"e2b": recorded(tmp_path)}
    told = prepared(bench, weights, 10_000).detail
    assert told.startswith(f"the disk of {tmp_path / 'weights'} is of unknown rate: ")
    assert json.loads(rates.read_text())["rates"][0]["bytes_per_s"] is None
    assert prepared(bench, weights, 10_000).detail == "e2b 0.0 MiB read in 0.0 s"
    with patch.object(page_cache, "LIMIT_S", 0.0):
        assert "the limit of 0 s was reached" in prepared(bench, weights, 10_000).detail
    rates.unlink()
    rates.mkdir()
    assert "was not recorded: " in prepared(bench, weights, 10_000).detail


def test_weights_that_do_not_fit_are_left_on_the_disk(bench: Bench, tmp_path: Path) -> None:
    weights = {name: recorded(tmp_path, name) for name in ("e2b", "e4b")}
    done = prepared(bench, weights, 100)
    assert "e2b (0.0 MiB) does not fit into the 0.0 MiB of memory" in done.detail
    assert "a reserve of 8.0 GiB and was not read" in done.detail and done.warnings == ()
    done = prepared(bench, weights, 6000)
    assert "e2b 0.0 MiB read" in done.detail and "e4b (0.0 MiB) does not fit" in done.detail


def test_reading_ahead_never_fails_the_switch(bench: Bench, tmp_path: Path) -> None:
    directory, record = recorded(tmp_path)
    (directory / "config.json").unlink()
    done = prepared(bench, {"e2b": (directory, record)}, 10_000)
    assert "Weights of e2b could not be read ahead: " in done.warnings[0]
    bench.paths.read_rates.unlink()
    wanted = bench.stored(engine("e2b"))
    done = bench.machine.prepare(wanted, Moves(start=("e2b",)))
    assert done.detail == "e2b has no record of its weights and was not read" and not bench.paths.read_rates.exists()
    assert bench.machine.prepare(wanted, Moves()).detail == "no engine has to start"


def test_what_the_kernel_could_give(tmp_path: Path) -> None:
    assert page_cache.available_bytes() > 0
    place = tmp_path / "meminfo"
    place.write_text("MemTotal: 10 kB\nMemAvailable:      8 kB\n")
    assert page_cache.available_bytes(place) == 8192
    place.write_text("nonsense\n")
    assert page_cache.available_bytes(place) == 0
