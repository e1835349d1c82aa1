# SPDX-License-Identifier: Apache-2.0
"""The text that Prometheus gets, and the exporter as a process of its own, on a socket as systemd passes it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge import __version__
from ansible.module_utils.vllm_edge.metrics import exporter
from ansible.module_utils.vllm_edge.metrics.exporter import HELP, HostCollector, run_exporter
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.version import PACKAGE
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

GOLDEN = Path(__file__).with_name("host.prom").read_text().replace("VERSION", __version__)
SAMPLES = [sample for family in text_string_to_metric_families(GOLDEN) for sample in family.samples]
SERIES = [
    [name, sample.value, sample.labels]
    for sample in SAMPLES
    if (name := sample.name.removeprefix("vllm_edge_")) != "build_info" and not name.startswith("facts")
]


def test_the_text_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the program may have read more, or have another form of document."""
    monkeypatch.setattr(exporter, "time", SimpleNamespace(time=lambda: 1007.5))

    def tell(facts: dict[str, Any] | None) -> str:
        return generate_latest(HostCollector(lambda: facts)).decode()

    assert tell({"time": 1000.0, "series": [["unknown", 1, {}], *SERIES]}) == GOLDEN
    assert {sample.name.removeprefix("vllm_edge_") for sample in SAMPLES} == HELP.keys()
    build, age = f'build_info{{version="{__version__}"}} 1.0', "facts_age_seconds 7.5"
    assert build in tell(None) and "facts" not in tell(None)
    assert build in tell({"time": 1000.0, "gpus": 7}) and age in tell({"time": 1000.0, "gpus": 7})


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "exporter.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm_edge.cli", "run-exporter"],
            env={
                **os.environ,
                **{"PYTHONPATH": str(PACKAGE.parent), "LISTEN_FDS": "1", "VLLM_EDGE_EXPORTER_RUN": str(tmp_path)},
            },
            preexec_fn=lambda: os.dup2(listener.fileno(), exporter.FIRST_PASSED),
            close_fds=False,
        )
    yield place
    process.kill()
    process.wait(10)


def ask(place: Path) -> tuple[str, str]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(place))
        client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        with client.makefile("rb") as stream:
            head, _, body = stream.read().decode().partition("\r\n\r\n")
    return head.splitlines()[0], body


@pytest.mark.slow
def test_what_is_there_is_served(place: Path) -> None:
    facts = place.with_name("facts.json")
    for text in ("", "{", "[]", '{"time": "x", "gpus": 7}', "[" * 100_000):
        status, body = ask(place)
        assert status == "HTTP/1.0 200 OK" and "vllm_edge_build_info" in body and "vllm_edge_facts" not in body
        facts.write_text(text)
    facts.write_text(json.dumps({"time": time.time(), "series": [["status_problems", 3, {}]]}))
    status, body = ask(place)
    assert "vllm_edge_status_problems 3.0" in body and "vllm_edge_facts_age_seconds 0." in body


@pytest.mark.slow
def test_a_slow_client_keeps_the_next_waiting_for_a_few_seconds_only(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(place))
        slow.sendall(b"GET /metr")
        began = time.monotonic()
        assert ask(place)[0] == "HTTP/1.0 200 OK"
        assert time.monotonic() - began < exporter.REQUEST_S + 5


def test_without_a_socket_it_says_who_starts_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], paths: HostPaths
) -> None:
    monkeypatch.delenv("LISTEN_FDS", raising=False)
    assert run_exporter(paths) == 2 and "vllm-edge-exporter.socket" in capsys.readouterr().err
