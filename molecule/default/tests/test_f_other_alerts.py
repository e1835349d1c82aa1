# SPDX-License-Identifier: Apache-2.0
"""All alerts of Prometheus that test_e_by_prometheus.py has not, each by its fault, in three quarters of an hour.

After all tests that want a sound host: the lines of the kernel's log stay.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from conftest import ENGINES, MONITORING, Machine, Prometheus, Provoked
from test_a_gateway import connect, read_environment
from test_e_by_prometheus import wait_until_firing

STATE = "/var/lib/vllm-edge/engines"
ETC = "/etc/vllm-edge/engines"
CACHE = "/data/vllm/cache/e4b"
RESTART = "systemctl restart vllm-edge-facts"
SERVER = "/etc/vllm-edge/gateway/tls/server.pem"
CRASH = "for n in 1 2 3 4; do docker kill vllm-e2b; sleep 45; done"
# A log of the kernel, as journald reads it. Who writes to it must not wait for a reader.
LOG = """
mkfifo /dev/kmsg; systemd-run --quiet --unit=lab-kmsg sh -c 'exec 3<>/dev/kmsg; exec sleep infinity'; sleep 1
systemctl restart systemd-journald; sleep 1
for n in 1 2; do echo "4,$n,$n,-;NVRM: Xid (PCI:0000:17:00): 13, pid=1, name=x" > /dev/kmsg; sleep 130; done
"""


@dataclass(frozen=True)
class Cause:
    """How the cause of an alert comes and goes."""

    alert: str
    come: str = "true"
    go: str = "true"
    ask: tuple[str, int, int] | None = None
    """Role, requests at once, and how often, once a minute."""


TOGETHER = [
    # GPU 0 is over its budget, so that the repair of a file does not commit.
    Cause(
        "SwitchRolledBack",
        f"lab-gpu fault set --gpu 0 orphan=4096; chmod 0777 {ETC}/31b-nvfp4-tp2/docker-create; vllm-edge switch 1; "
        "lab-gpu fault clear --gpu 0",
    ),
    # For as long as both have to be seen.
    Cause("FirstTokenSlow", ask=("sentry", 1, 14)),
    Cause("TokensSlow"),
    Cause("EngineDown", "systemctl stop vllm-e4b", "systemctl start --no-block vllm-e4b"),
    Cause("GpuLost", "lab-gpu fault set --gpu 2 gpu-lost"),
    Cause("GpuThrottledByPower", "lab-gpu fault set --gpu 0 throttled=sw_power_cap"),
    Cause("GpuThrottledByHeat", "lab-gpu fault set --gpu 1 throttled"),
    Cause("GpuEccErrors", "lab-gpu fault set --gpu 3 ecc-error=2"),
    Cause(
        "GpuXid",
        f"systemd-run --quiet --unit=lab-log bash -c {shlex.quote(LOG)}",
        "systemctl stop lab-kmsg; rm /dev/kmsg; systemctl restart systemd-journald",
    ),
    Cause(
        "EngineCrashLoop",
        f"systemd-run --quiet --unit=lab-crash bash -c {shlex.quote(CRASH)}",
        "systemctl reset-failed vllm-e2b; systemctl start --no-block vllm-e2b",
    ),
    Cause("EngineStandsStill", "lab-gpu fault set --gpu 1 engine-hangs", ask=("worker", 1, 1)),
    Cause(
        "CertificateEnds",
        f"cp --preserve {SERVER} /run/server.pem; openssl req -x509 -newkey rsa:2048 -nodes -days 5 -subj /CN=short "
        f"-keyout /run/short -out /run/short; cat /run/short > {SERVER}",
        f"cp --preserve /run/server.pem {SERVER}",
    ),
    # The sandbox of the reader has the file systems that were there when it began: / of a container is not shared.
    Cause(
        "DiskFull",
        f"mount -t tmpfs -o size=1m tmpfs {CACHE}; head -c 1m /dev/zero > {CACHE}/full; {RESTART}",
        f"umount {CACHE}; {RESTART}",
    ),
    Cause("CheckMissing", f"touch --date='4 days ago' {STATE}/31b-nvfp4-tp2.canary.json"),
]
BLIND = [
    Cause("DriverMismatch", "lab-gpu fault set library-mismatch; sleep 20"),
    Cause("FactsStale", "systemctl stop vllm-edge-facts", "systemctl start vllm-edge-facts"),
]
SILENT = [Cause("HostSilent", "systemctl stop vllm-edge-gateway", "systemctl start vllm-edge-gateway")]
NEVER = {
    "GatewayErrors": "an engine of the lab answers 4xx, or is down, which is another alert",
    "GatewayFull": "some 3,300 connections at once, for five minutes",
    "RequestsWaitNoneRuns": "an engine of the lab runs whatever waits",
    "KvCacheFullAndPreempting": "its KV cache is as large as the real one, which a CPU would fill in hours",
}
"""Alerts whose fault the lab cannot make. `promtool test rules` has them, as all others."""


def keep_asking(role: str, at_once: int, rounds: int) -> None:
    question: Any = [{"role": "user", "content": "Count to three."}]

    def ask() -> None:
        with contextlib.suppress(openai.APIError):
            client.chat.completions.create(model=role, messages=question, max_tokens=8, logprobs=True, timeout=600)

    with connect(read_environment("default")) as client, ThreadPoolExecutor(at_once) as pool:
        for _ in range(rounds):
            for _ in range(at_once):
                pool.submit(ask)
            time.sleep(60)


@pytest.mark.thorough
@pytest.mark.timeout(2 * 3600)
def test_every_alert_is_raised_by_its_fault(machine: Machine, prometheus: Prometheus, provoked: Provoked) -> None:
    every = set(re.findall(r"alert: VllmEdge(\w+)", (MONITORING / "rules.yml").read_text()))
    tried = {cause.alert for causes in (TOGETHER, BLIND, SILENT) for cause in causes}
    assert every == {*tried, *NEVER, *(alert.removeprefix("VllmEdge") for alert in provoked.alerts)}
    for causes, seconds in ((TOGETHER, 2700), (BLIND, 900), (SILENT, 600)):
        machine.wait("every engine to serve", lambda: all(machine.health(engine) == 200 for engine in ENGINES), 400)
        try:
            for cause in causes:
                machine.host.run(cause.come)
                if cause.ask:
                    threading.Thread(target=keep_asking, args=cause.ask).start()
            wait_until_firing(prometheus, [f"VllmEdge{cause.alert}" for cause in causes], seconds)
        finally:
            machine.clear_faults()
            for cause in causes:
                machine.host.run(cause.go)
    machine.wait("every engine to serve", lambda: all(machine.health(engine) == 200 for engine in ENGINES), 400)
    for engine in ENGINES:
        machine.run("vllm-edge", "canary", engine.name)
