# SPDX-License-Identifier: Apache-2.0
"""The notification protocol over a real socket."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible.module_utils.vllm_edge.engine.sd_notify import STATUS_LIMIT, Notifier, read_watchdog_seconds


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        sock.settimeout(2)
        yield sock


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_fields_arrive_in_one_datagram(tmp_path: Path, kind: str) -> None:
    address = str(tmp_path / "notify") if kind == "path" else f"@vllm-edge-test-{uuid.uuid4()}"
    with listening(address) as sock:
        notifier = Notifier(address)
        notifier.send(ready=True, watchdog=True, status="serving\nsentry", extend_s=1.5)
        assert sock.recv(4096) == b"READY=1\nWATCHDOG=1\nSTATUS=serving sentry\nEXTEND_TIMEOUT_USEC=1500000"
        notifier.send(stopping=True)
        assert sock.recv(4096) == b"STOPPING=1"
        notifier.send(status="x " * 1000)
        assert len(sock.recv(4096)) == len("STATUS=") + STATUS_LIMIT


def test_nothing_is_sent_without_a_field_or_a_socket(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with listening(address) as sock:
        Notifier(address).send()
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(10)
    Notifier(None).send(ready=True)
    Notifier(str(tmp_path / "gone")).send(watchdog=True)


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "41"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_watchdog_of_this_process_only(environ: dict[str, str], seconds: float | None) -> None:
    assert read_watchdog_seconds(environ, 41) == seconds
