# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge run-engine` against real containers."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
from ansible.module_utils.vllm_edge.system.http import request
from harness import Host

pytestmark = pytest.mark.docker


def test_ready_only_after_health_and_a_clean_stop(host: Host) -> None:
    host.configure("--mode=slow", "--load=10")
    run = host.start(watchdog_s=1.5)
    run.until(lambda: any(re.match(r"loading weights, \d+ %, \d+ s", text) for text in run.statuses()))
    assert not run.has("READY"), "ready while it still loads"
    run.until_ready()
    assert run.has("EXTEND_TIMEOUT_USEC")
    ready = next(m for m in run.messages if "READY" in m.fields)
    assert ready.fields["STATUS"].startswith(f"serving sentry at {host.url} ")
    state = host.state()
    assert state["phase"] == "serving" and state["last_failure"] is None
    assert isinstance(state["load_seconds"], float) and state["load_seconds"] >= 10
    facts = {
        "model_gib": 9.9,
        "model_s": 1.5,
        "kv_cache_gib": 5.25,
        "kv_cache_tokens": 71234,
        "kv_blocks": 4452,
        "max_concurrency": 17.39,
    }
    run.until(lambda: host.state()["log_facts"] == facts)  # Docker may deliver the last lines after /health answers
    assert state["load_phases"]["loading-weights"] >= 8
    assert sum(state["load_phases"].values()) == pytest.approx(state["load_seconds"], abs=0.4)
    before = sum("WATCHDOG" in m.fields for m in run.messages)
    time.sleep(2.0)
    assert sum("WATCHDOG" in m.fields for m in run.messages) >= before + 2, "the watchdog is not fed"
    assert "Application startup complete" in run.text
    assert "GET /health" not in run.text, "our own probes fill the journal"

    assert run.stop() == 0
    assert run.has("STOPPING", "1")
    assert host.container_id() == ""
    assert host.state()["phase"] == "stopped"
    assert host.state()["last_failure"] is None


def complete(host: Host, prompt: str) -> None:
    """A client's request, in the background."""
    asked = {"model": "sentry", "prompt": prompt, "max_tokens": 1}
    given = {"method": "POST", "payload": asked}
    threading.Thread(target=request, args=(host.url, "/v1/completions", 60), kwargs=given, daemon=True).start()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with a request"])
def test_a_stopped_engine_process_starves_the_watchdog(host: Host, busy: bool) -> None:
    """/health stays 200; the counters stand still. An idle engine's cannot move, so it is asked for a token."""
    limits = {"watchdog_s": 0.9, "progress_timeout_s": 1.5, "idle_probe_s": 0 if busy else 1}
    run = host.serve("--mode=freeze", "--hang-after=2", **limits)
    if busy:
        complete(host, "x" * 100_000)
    run.until(lambda: run.has("STATUS", "requests make no progress"))
    still = time.monotonic()
    assert host.state()["phase"] == "not-answering"
    time.sleep(1.5)
    assert not [m for m in run.messages if "WATCHDOG" in m.fields and m.at > still], "a standing engine is called alive"
    run.process.send_signal(signal.SIGABRT)
    assert run.ends() == 1
    assert not host.running()
    failure = host.failure()
    assert failure["cause"] == "no_progress"
    assert ("1 running or waiting" if busy else "the supervisor's own") in str(failure["reason"])
    assert "by=vllm-edge" not in run.text, "our own requests fill the journal"


def test_a_killed_supervisor_finds_its_container_again(host: Host) -> None:
    run = host.serve("--mode=good")
    first, loaded = host.container_id(), host.state()["load_seconds"]
    run.kill()
    assert host.running()
    again = host.start().until_ready()
    assert host.container_id() == first, "a healthy engine was bounced"
    assert host.state()["load_seconds"] == loaded
    assert "Application startup complete" not in again.text, "old lines were printed a second time"
    assert again.stop() == 0
    assert host.container_id() == ""


def test_sigterm_while_loading(host: Host) -> None:
    """Nothing is served yet, so nobody waits the 30 s that an engine with requests would get."""
    host.configure("--mode=ignore-term", "--load=60", stop_timeout_s=30)
    run = host.start()
    run.until(lambda: run.has("STATUS", "loading weights"))
    begin = time.monotonic()
    assert run.stop() == 0
    assert time.monotonic() - begin < 8
    assert host.container_id() == ""
    assert not run.has("READY")


def test_a_load_that_reads_without_a_line_goes_on(host: Host) -> None:
    """Longer than the stall limit; what then neither reads nor computes is given up."""
    weights = host.root / "weights"
    with weights.open("wb") as file:
        file.write(os.urandom(64 * 1024 * 1024))
        os.fsync(file.fileno())
    mount = f"--mount=type=bind,source={weights},target=/weights,readonly"
    host.configure("--mode=read", "--file=/weights", "--load=6", options=(mount,), stall_timeout_s=2)
    run = host.start()
    run.until(lambda: "it reads no more" in run.text or run.process.poll() is not None)
    assert run.process.poll() is None, run.text
    assert run.ends() == 1
    assert host.failure()["cause"] == "stalled"
