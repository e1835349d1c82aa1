# SPDX-License-Identifier: Apache-2.0
"""The client `bench` of the gateway, which exists while a benchmark runs.

Its key is in the memory of this process. The gateway learns the SHA-256 from a file in /run that counts only while
this process holds it locked: after SIGKILL the next `vllm-edge gateway sync`, which a timer runs every five minutes,
finds no such client, and a reboot forgets the file. `clients.json`, which Ansible writes, is not touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from ...engine.state import stamp
from ...gateway.clients import Client, GatewayError, Key, read_clients
from ...gateway.command import synchronize
from ...gateway.sync import is_installed
from ...names import TEMPORARY_CLIENT
from ...paths import HostPaths
from ...switch.history import read_switch_progress
from ...system.files import hold_lock, is_locked, write_durably

VALID_S = 24 * 3600.0
"""Seconds after which the key ends although its process runs; no benchmark may take longer."""

LOCK_S = 5.0
"""A synchronization that looks whether the client's program runs holds a shared lock for a moment."""


def _admit(paths: HostPaths) -> None:
    report = synchronize(paths, read_switch_progress)
    if report.warnings:
        raise GatewayError(" ".join(report.warnings))
    if not report.answers:
        raise GatewayError(
            "The gateway does not run, so nothing can be measured through it. Start it with 'systemctl start "
            "vllm-edge-gateway.service', or measure the engines alone: --through engine."
            if report.installed
            else "This host has no gateway. Measure the engines alone: --through engine."
        )


@contextlib.contextmanager
def temporary_client(paths: HostPaths, valid_s: float = VALID_S) -> Iterator[str]:
    """Make a client that may use every name without limits, yield its key, and revoke it in every case.

    Args:
        valid_s: seconds after which the key ends in any case

    Raises:
        GatewayError: the gateway did not take the client, or has one of this name; or it was not told that the key has
            ended, which the next synchronization does
    """
    place = paths.temporary_clients
    if is_installed(paths) and TEMPORARY_CLIENT in read_clients(paths.gateway / "clients.json"):
        raise GatewayError(
            f"The gateway has a client {TEMPORARY_CLIENT}, whose name the benchmark needs for its own. Give it another "
            f"name in serving_clients, and run playbooks/clients.yml -e revoke={TEMPORARY_CLIENT}."
        )
    if is_locked(place):
        raise GatewayError(f"Another benchmark has the client {TEMPORARY_CLIENT}; wait until it has ended.")
    key, now = f"vllm-{secrets.token_urlsafe(32)}", datetime.now(UTC)
    known = Key(hashlib.sha256(key.encode()).hexdigest(), stamp(now), stamp(now + timedelta(seconds=valid_s)))
    write_durably(place, json.dumps({TEMPORARY_CLIENT: asdict(Client((known,)))}), 0o600)
    try:
        with hold_lock(place, LOCK_S):
            try:
                _admit(paths)
                yield key
            finally:
                place.unlink(missing_ok=True)
    finally:
        synchronize(paths, read_switch_progress)
