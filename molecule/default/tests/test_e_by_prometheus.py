# SPDX-License-Identifier: Apache-2.0
"""The operator's Prometheus on a host that serves: how it was installed, what it sees, and what that costs the host.

Its alerts come by real faults. Those that are in every run are there since the first test of test_c_faults.py.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterable

import httpx2
import pytest
from conftest import ENGINES, MONITORING, Machine, Prometheus, Provoked
from test_a_gateway import read_environment

SCRAPED_S = 2.0
READ_S = 30
"""From an event until it is in the figures: a round of the reader, and a GPU that is waited for."""


def scrape(page: str) -> tuple[float, str]:
    """Seconds, and the page as Prometheus' client sees it."""
    environment = read_environment("prometheus")
    context = ssl.create_default_context(cafile=environment["SSL_CERT_FILE"])
    url = environment["OPENAI_BASE_URL"].removesuffix("/v1") + page
    begun = time.monotonic()
    with httpx2.Client(verify=context) as client:
        answer = client.get(url, headers={"Authorization": f"Bearer {environment['OPENAI_API_KEY']}"})
    assert answer.status_code == 200, (page, answer.text)
    return time.monotonic() - begun, answer.text


def test_the_written_lines_start_one_prometheus_for_this_machine_alone(prometheus: Prometheus) -> None:
    listening = prometheus.run("ss", "--listening", "--tcp", "--numeric", "--no-header", "sport = :9090").split()
    assert listening[3] == "127.0.0.1:9090" and len(listening) == 5
    starts = prometheus.run("journalctl", "--quiet", "--unit=prometheus", "--output=cat", "--grep=^Started ")
    assert len(starts.splitlines()) == 1, "the package started it before it was configured"
    prometheus.run("sh", "-c", "cd /etc/prometheus/vllm-edge && promtool check config prometheus.yml")
    prometheus.run("sh", "-c", "cd /etc/prometheus/vllm-edge && promtool test rules rules_test.yml")


def test_every_target_is_up_and_every_rule_is_sound(prometheus: Prometheus) -> None:
    prometheus.wait_until_up(engine.name for engine in ENGINES)
    (said,) = prometheus.ask("rules")
    assert [rule for group in said["groups"] for rule in group["rules"] if rule["health"] != "ok"] == []


def test_engines_have_every_metric_that_rules_and_dashboard_name(prometheus: Prometheus) -> None:
    texts = (MONITORING / "rules.yml").read_text() + (MONITORING / "grafana" / "dashboard.json").read_text()
    named = set(re.findall(r"vllm:\w+", texts))
    there = {one["metric"]["__name__"] for one in prometheus.series('count by (__name__) ({job="vllm-edge-engine"})')}
    assert len(named) > 8 and named <= there, named - there


def test_a_gpu_that_hangs_holds_up_no_scrape(machine: Machine) -> None:
    """In the kernel it could not be killed; what waits for it here can be."""

    def answers() -> bool:
        seconds, text = scrape("/metrics/host")
        assert seconds < SCRAPED_S
        rows = dict(re.findall(r'^vllm_edge_gpu_up\{gpu="(\d)",.*\} (\S+)$', text, re.MULTILINE))
        assert [rows[gpu] for gpu in "012"] == ["1.0"] * 3, text
        assert (rows["3"] == "1.0") == bool(re.search(r'^vllm_edge_gpu_power_watts\{gpu="3"', text, re.MULTILINE))
        return rows["3"] == "1.0"

    machine.run("lab-gpu", "fault", "set", "--gpu=3", "hangs")
    try:
        machine.wait("the figures to say so", lambda: not answers(), READ_S)
    finally:
        machine.run("lab-gpu", "fault", "clear", "--gpu=3")
    machine.wait("the GPU to be there again", answers, READ_S)


# ---- alerts -----------------------------------------------------------------------------------------------------

FIRING = 'ALERTS{alertstate="firing"}'


def wait_until_firing(prometheus: Prometheus, alerts: Iterable[str], seconds: float) -> None:
    missing, until = set(alerts), time.monotonic() + seconds
    while missing := missing - {one["metric"]["alertname"] for one in prometheus.series(FIRING)}:
        if time.monotonic() > until:
            pytest.fail(f"not within {seconds:.0f} s: {sorted(missing)}; {prometheus.series('ALERTS')}")
        time.sleep(5)


def test_alerts_of_faults_that_were_there_meanwhile(
    machine: Machine, prometheus: Prometheus, provoked: Provoked
) -> None:
    """That they end with their faults is looked at after the switch of the mission."""
    try:
        # Six minutes; two rounds of what is read, scraped and judged in between; and a busy machine.
        wait_until_firing(prometheus, provoked.alerts, provoked.since + 480 - time.time())
    finally:
        machine.run("lab-gpu", "foreign", "stop")
        machine.clear_faults()
        machine.run("vllm-edge", "canary", "e4b")
    assert {one["metric"]["host"] for one in prometheus.series(FIRING)} == {"xr7620-lab"}


def test_what_the_figures_cost(machine: Machine) -> None:
    """Since the two services began, with doctor and status: 1.3 % of a core and 35 MiB beside other work."""
    units = ("vllm-edge-facts.service", "vllm-edge-exporter.service")
    now = [f"/proc/{machine.unit('MainPID', unit=unit)['MainPID']}" for unit in units]
    uptime, share = float(machine.run("cat", "/proc/uptime").split()[0]), 0.0
    for text in machine.run("cat", *(f"{process}/stat" for process in now)).splitlines():
        # What it used and its children, and when it began, in hundredths of a second: proc_pid_stat(5).
        words = text.rpartition(")")[2].split()
        share += sum(map(int, words[11:15])) / (100 * uptime - int(words[19]))
    rollups = machine.run("cat", *(f"{process}/smaps_rollup" for process in now))
    mib = sum(int(kib) for kib in re.findall(r"^Pss:\s+(\d+) kB", rollups, re.MULTILINE)) / 1024
    print(f"{100 * share:.2f} % of a core, {mib:.1f} MiB")
    assert share < 0.02 and mib < 80
