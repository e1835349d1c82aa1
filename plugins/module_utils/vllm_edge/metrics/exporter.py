# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge run-exporter`: serves the metrics on the socket that systemd passes, and reads nothing but facts.json."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from socketserver import UnixStreamServer
from typing import Any

from prometheus_client import MetricsHandler
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from .. import __version__
from ..paths import HostPaths
from ..system.files import read_foreign

FIRST_PASSED = 3
"""SD_LISTEN_FDS_START of sd_listen_fds(3)."""
REQUEST_S = 5
"""Seconds that the exporter waits for a client to go on: the next one is served after it."""
MOST_BYTES = 4 * 2**20
PREFIX = "vllm_edge_"
HELP = {
    "gpu_info": "1; the name of each GPU.",
    "gpu_up": "Whether the GPU answers NVML. One that does not has no other series of its own.",
    "gpu_memory_total_bytes": "Memory of the GPU.",
    "gpu_memory_used_bytes": "Memory in use, of whomever it is.",
    "gpu_memory_budget_bytes": "What the engines on the GPU may use together; 0 where there is none.",
    "gpu_memory_foreign_bytes": "Memory of processes that are not the engines'.",
    "gpu_memory_planned_bytes": "What the plan says that the engines use, by part.",
    "gpu_power_watts": "Power that the GPU draws.",
    "gpu_energy_joules_total": "Energy since the driver was loaded.",
    "gpu_sm_clock_hertz": "Clock of the multiprocessors.",
    "gpu_temperature_celsius": "Temperature of the GPU.",
    "gpu_throttled": "Whether the clocks are lowered for this reason.",
    "gpu_ecc_errors_total": "ECC errors over the life of the card.",
    "gpu_xid_errors_total": "Xid errors in the kernel's log, since the metrics were installed or that boot began.",
    "gpu_pcie_link_generation": "Generation of the PCIe link at the moment; an idle card lowers it.",
    "gpu_pcie_link_width": "Lanes of the PCIe link at the moment.",
    "gpu_pcie_replays_total": "Packets that were sent again over PCIe, since the driver was loaded.",
    "gpu_utilization_ratio": "Part of the last sample period in which a kernel ran.",
    "driver_mismatch": "Whether kernel module and library of the driver are of different versions.",
    "engine_info": "1; served names, model and profile of each engine.",
    "engine_gpu_info": "1; the GPUs of each engine.",
    "engine_up": "Whether the unit is active and its engine serves.",
    "engine_starts_total": "Containers that were started for the engine.",
    "engine_crashes_total": "Ends that nobody asked for and starts that failed, by cause; `any` counts all.",
    "engine_standstills_total": "How often the engine was alive while its requests made no progress.",
    "engine_planned_tokens_per_second": "What the plan expects of one request, in the middle of its range.",
    "role_canary_ok": "Whether the last canary of the running container passed.",
    "role_canary_timestamp_seconds": "When that canary ran.",
    "generation": "Number of the committed generation.",
    "switch_running": "Whether a switch runs.",
    "switches_total": "Switches by result.",
    "switch_last_timestamp_seconds": "When the last switch ended.",
    "switch_last_downtime_seconds": "How long clients of the role could not be served in the last switch.",
    "doctor_checks": "Checks of `vllm-edge doctor` by state.",
    "doctor_check": "1; the state of each check.",
    "doctor_timestamp_seconds": "When the doctor ran.",
    "status_problems": "Problems that `vllm-edge status` names.",
    "weights_verified_timestamp_seconds": "When the weights were brought or fully verified last.",
    "certificate_end_timestamp_seconds": "When the gateway's certificate ends.",
    "filesystem_size_bytes": "Size of a file system that serving writes to.",
    "filesystem_avail_bytes": "What is free there.",
    "facts_timestamp_seconds": "When the host was read.",
    "facts_age_seconds": "Seconds since the host was read.",
    "build_info": "1; the version of the program.",
}
"""All metrics, in the order in which they are shown. Those that end with _total are counters."""
Json = Mapping[str, Any]


def read_facts(path: Path) -> Json | None:
    """Return what `run-facts` has written; None if there is nothing that can be read."""
    try:
        found = json.loads(read_foreign(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class HostCollector(Collector):
    """The metrics of a document of `run-facts`; without one (None) only which program this is."""

    def __init__(self, read: Callable[[], Json | None]) -> None:
        self.read = read

    def collect(self) -> Iterable[Metric]:
        facts = self.read() or {}
        series: list[Any] = [("build_info", 1, {"version": __version__}), *facts.get("series", ())]
        if isinstance(read_at := facts.get("time"), int | float):
            age = max(0.0, time.time() - read_at)
            series += [("facts_timestamp_seconds", read_at, {}), ("facts_age_seconds", age, {})]
        metrics = {}
        for name, text in HELP.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            metrics[name] = Metric(PREFIX + name.removesuffix("_total"), text, kind)
        for name, value, labels in series:
            if name in metrics:  # else it is of another version of the program
                metrics[name].add_sample(PREFIX + name, labels, float(value))
        return [metric for metric in metrics.values() if metric.samples]


def run_exporter(paths: HostPaths) -> int:
    if not os.environ.get("LISTEN_FDS"):
        print("run-exporter serves on the socket that vllm-edge-exporter.socket passes, and got none.", file=sys.stderr)
        return 2

    class Handler(MetricsHandler):
        registry = HostCollector(lambda: read_facts(paths.facts))
        timeout = REQUEST_S

    server = UnixStreamServer("", Handler, bind_and_activate=False)
    server.socket.close()
    with socket.socket(fileno=FIRST_PASSED) as server.socket:
        server.serve_forever(poll_interval=3600)
    return 0
