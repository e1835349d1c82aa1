# SPDX-License-Identifier: Apache-2.0
"""The benchmark's steps, the program in its container, and the relay that connects both."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.trials.bench import program
from ansible.module_utils.vllm_edge.trials.bench.cases import Options, Step, build_steps, find_max_num_seqs

TOLD = list[tuple[str, Mapping[str, Any]]]


def run(steps: list[Step], speeds: Callable[[Step], float], clock: Callable[[], float] = lambda: 0.0) -> TOLD:
    told: TOLD = []

    def measure(step: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"output_tokens": 100, "seconds": 100 / speeds(Step(**step))}

    program.run_steps([vars(step) for step in steps], measure, lambda what, data: told.append((what, data)), clock)
    return told


def test_the_steps_are_the_protocol_of_the_reference_host_and_the_other_cases() -> None:
    steps = build_steps(Options(), max_model_len=8192, max_num_seqs=16)
    assert [(step.case, step.output_tokens, step.concurrency) for step in steps] == [
        ("warm-up", 32, 1),
        *(("protocol", tokens, 1) for tokens in (128, 256, 512)),
        *(("sweep", 128, at_once) for at_once in (1, 2, 4, 8, 16)),
        ("long-context", 64, 1),
        ("shared-prefix", 32, 8),
    ]
    assert [step.input_tokens for step in steps if step.case == "long-context"] == [8192 - 64 - 64]
    assert len({step.seed for step in steps}) == len(steps), "equal prompts would come from the prefix cache"


def test_every_step_fits_a_small_context() -> None:
    steps = build_steps(Options(input_tokens=4000, soak_minutes=10), max_model_len=512, max_num_seqs=4)
    assert all(step.input_tokens + step.output_tokens <= 512 - 64 for step in steps)
    assert all(0 <= step.prefix_tokens < step.input_tokens for step in steps)
    assert steps[-1].case == "soak" and steps[-1].for_s == 600


@pytest.mark.parametrize(
    ("arguments", "found"),
    [(("--max-num-seqs=8",), 8), (("--max_num_seqs=8", "--max-num-seqs=2"), 2), (("--max-model-len=8",), 256)],
)
def test_the_number_of_requests_at_once_is_the_engines(arguments: tuple[str, ...], found: int) -> None:
    assert find_max_num_seqs(arguments) == found


def test_a_sweep_ends_where_more_requests_bring_no_more_tokens() -> None:
    steps = build_steps(Options(case=("sweep",)), max_model_len=8192, max_num_seqs=64)
    speeds = {1: 10.0, 2: 19.0, 4: 35.0, 8: 36.0, 16: 36.5, 32: 36.6, 64: 36.7}
    told = run(steps, lambda step: speeds[step.concurrency])
    assert [steps[data["step"]].concurrency for what, data in told if what == "end"][1:] == [1, 2, 4, 8]


def test_a_soak_is_repeated_for_its_time() -> None:
    times = iter([0.0, 30.0, 59.0, 61.0])
    told = run([Step("soak", 256, 128, 4, 8, for_s=60)], lambda step: 10.0, lambda: next(times))
    assert [what for what, _ in told] == ["begin", "end"] * 3


def test_the_command_has_what_the_step_says() -> None:
    step = vars(Step("protocol", 256, 128, 1, 3, seed=4))
    words = program.build_command(step, "sentry", "/models/e2b", Path("/tmp/result.json"))
    assert words[:3] == ["vllm", "bench", "serve"]
    for word in ("--random-input-len=256", "--random-output-len=128", "--num-prompts=3", "--max-concurrency=1"):
        assert word in words
    assert {"--model=sentry", "--tokenizer=/models/e2b", "--ignore-eos", "--seed=4"} <= set(words)
    shared = vars(Step("shared-prefix", 1024, 32, 8, 32, 896))
    words = program.build_command(shared, "sentry", "/models/e2b", Path("/tmp/result.json"))
    assert {"--dataset-name=prefix_repetition", "--prefix-repetition-suffix-len=128", "--num-prompts=32"} <= set(words)


def test_a_step_is_measured_in_a_child_whose_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # /tmp is the container's own, and here everybody's.
    monkeypatch.setattr(program, "Path", lambda name: tmp_path / Path(name).name)
    step = vars(Step("protocol", 256, 128, 1, 3))
    result = {"duration": 2.5, "completed": 3, "failed": 0, "total_output_tokens": 384, "total_input_tokens": 768}

    def serve(words: Any) -> None:
        (name,) = [word.partition("=")[2] for word in words if word.startswith("--result-filename=")]
        (directory,) = [word.partition("=")[2] for word in words if word.startswith("--result-dir=")]
        times = {f"p{at}_{metric}_ms": float(at) for at in (50, 95, 99) for metric in ("ttft", "itl", "e2el")}
        Path(directory, name).write_text(json.dumps({**result, **times, "median_tpot_ms": 20.0}))

    found = program.run_step(step, serve, "sentry", "/models/e2b")
    assert (found["seconds"], found["completed"], found["output_tokens"], found["tpot_ms"]) == (2.5, 3, 384, 20.0)
    assert found["ttft"] == found["e2e"] == {"p50": 50.0, "p95": 95.0, "p99": 99.0}

    def fail(words: Any) -> None:
        os.write(1, b"Connection refused\n")
        raise SystemExit(7)

    error = program.run_step(step, fail, "sentry", "/models/e2b")["error"]
    assert "status 7" in error and "Connection refused" in error


@pytest.mark.parametrize("way", ["into the container", "out of the host"])
def test_the_relay_passes_both_directions_and_their_ends(way: str, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    inside = way == "into the container"
    server = socket.socket(socket.AF_UNIX if inside else socket.AF_INET)
    server.bind(str(path) if inside else ("127.0.0.1", 0))
    server.listen()

    def answer() -> None:
        with contextlib.suppress(OSError), server.accept()[0] as there:
            text = b""
            while data := there.recv(4096):  # until the client has said that it is done
                text += data
            there.sendall(text.upper())

    threading.Thread(target=answer, daemon=True).start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    listen: program.Address = ("127.0.0.1", port) if inside else path
    end = program.start_relay(listen, path if inside else server.getsockname())
    try:
        with socket.socket(socket.AF_INET if inside else socket.AF_UNIX) as client:
            client.connect(listen if inside else str(path))
            client.sendall(b"a" * 200_000 + b"z")
            client.shutdown(socket.SHUT_WR)
            found = b""
            while data := client.recv(65536):
                found += data
    finally:
        end()
        server.close()
    assert found == b"A" * 200_000 + b"Z"


def test_the_relay_passes_on_that_an_engine_died(tmp_path: Path) -> None:
    """A connection that it had not accepted yet breaks off, without an end. The client would wait for its answer."""
    engine = socket.socket(socket.AF_UNIX)
    engine.bind(str(tmp_path / "api.sock"))
    engine.listen()
    end = program.start_relay(tmp_path / "relay.sock", tmp_path / "api.sock")
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(20)
            client.connect(str(tmp_path / "relay.sock"))
            assert select.select([engine], [], [], 20)[0], "the relay has connected"
            engine.close()
            assert client.recv(1) == b""
    finally:
        end()


def test_a_relay_that_cannot_listen_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        program.start_relay(tmp_path / "nowhere" / "api.sock", ("127.0.0.1", 1))
