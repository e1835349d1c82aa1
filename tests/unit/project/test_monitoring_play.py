# SPDX-License-Identifier: Apache-2.0
"""playbooks/monitoring.yml, for two hosts that nobody contacts; the dashboard and the table of alerts."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import ROOT, find_failures, run_playbook, start_warm_python
from test_monitoring import ALERTS, PROMTOOL

from tools import dashboard

PANELS = [panel for panel in json.loads(dashboard.FILE.read_text())["panels"] if panel["type"] != "row"]
KEYS = {host: f"vllm-{letter * 43}" for host, letter in (("one", "a"), ("two", "b"))}
URLS = {"one": "https://192.0.2.10:8443", "two": "http://127.0.0.1:8000"}
WRITTEN = ["README.md", "ca/one.pem", "grafana/dashboard.json", "grafana/dashboards.yml", "grafana/datasource.yml"]
WRITTEN += ["keys/one", "keys/two", "prometheus.yml", "rules.yml", "rules_test.yml", "scrape.yml", "targets.yml"]


def write_inventory(place: Path, **changes: Any) -> None:
    clients = {"serving_clients": {"ci": {}, "prometheus": {"metrics": True}}, "serving_profile": "nvfp4-tp2"}
    # ssh to an address where nobody answers.
    common = clients | {"ansible_host": "127.0.0.1", "ansible_port": 1, "controller_user": ""} | changes
    targets = {"architect": {"ttft_p95_s": 1.5, "itl_p95_s": 0.08}}
    hosts = {"one": common | {"serving_targets": targets}, "two": common}
    here = {"localhost": {"ansible_connection": "local", "ansible_python_interpreter": start_warm_python()}}
    (place / "hosts.yml").write_text(json.dumps({"gpu_hosts": {"hosts": hosts}, "controllers": {"hosts": here}}))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An inventory whose clients have their files, and a key of a host that has left."""
    clients = tmp_path / "reports/clients"
    clients.mkdir(parents=True)
    for host, key in KEYS.items():
        ca = f"SSL_CERT_FILE='{clients}/{host}-ca.pem'\n" * (host == "one")
        text = f"# Client\nOPENAI_BASE_URL={URLS[host]}/v1\n{ca}OPENAI_API_KEY={key}\n"
        (clients / f"{host}-prometheus.env").write_text(text)
    (clients / "one-ca.pem").write_text("a certificate\n")
    left = tmp_path / "reports/monitoring/keys/gone"
    left.parent.mkdir(parents=True)
    left.write_text("x")
    for name in ("playbooks", "group_vars", "roles"):
        (tmp_path / name).symlink_to(ROOT / name)
    plays = [{"ansible.builtin.import_playbook": "playbooks/monitoring.yml"}] * 2
    (tmp_path / "twice.yml").write_text(json.dumps(plays))
    return tmp_path


def list_files(place: Path) -> list[str]:
    directory = place / "reports/monitoring"
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@pytest.mark.slow
def test_prometheus_gets_jobs_keys_and_rules_of_every_host(place: Path) -> None:
    """No host is contacted, no key is shown, check mode writes nothing, and a second run changes nothing."""
    write_inventory(place, serving_clients={"ci": {}})
    refused = run_playbook("-i", "hosts.yml", "twice.yml", cwd=place)
    assert "metrics: true}}" in find_failures(refused)["one"] and list_files(place) == ["keys/gone"], refused.stdout
    write_inventory(place)
    check = run_playbook("-i", "hosts.yml", "playbooks/monitoring.yml", "--check", "--diff", cwd=place)
    assert check.returncode == 0 and "+scrape_configs:" in check.stdout, check.stdout + check.stderr
    assert "/keys/gone: would be removed" in check.stdout and list_files(place) == ["keys/gone"]
    done = run_playbook("-i", "hosts.yml", "twice.yml", "--diff", "-vvv", cwd=place)
    assert done.returncode == 0 and "/keys/gone: removed" in done.stdout, done.stdout + done.stderr
    first, second = re.split(r"PLAY \[Write", done.stdout)[1:]
    assert re.search("^changed:", first, re.MULTILINE) and not re.search("^changed:", second, re.MULTILINE), second
    assert not [key for key in KEYS.values() if key in refused.stdout + check.stdout + done.stdout]
    assert "two: its gateway is http://127.0.0.1:8000, which no Prometheus on another machine" in done.stdout

    directory = place / "reports/monitoring"
    assert list_files(place) == WRITTEN
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()} == {0o600}
    assert {host: (directory / "keys" / host).read_text() for host in KEYS} == KEYS
    jobs = {
        job["job_name"]: job for job in yaml.safe_load((directory / "prometheus.yml").read_text())["scrape_configs"]
    }
    kinds = ("host", "gateway", "engine")
    assert [*jobs] == [f"vllm-edge-{kind}/{host}" for host in KEYS for kind in kinds]
    (discovery,) = jobs["vllm-edge-engine/one"]["http_sd_configs"]
    assert discovery["url"] == "https://192.0.2.10:8443/metrics/targets"
    for access in (discovery, jobs["vllm-edge-host/one"], jobs["vllm-edge-engine/one"]):
        assert access["authorization"] == {"type": "Bearer", "credentials_file": "keys/one"}
        assert access["tls_config"] == {"ca_file": "ca/one.pem"}
    assert "tls_config" not in jobs["vllm-edge-host/two"]
    # Beside the file of the operator's own configuration, which has it from release 2.43 on.
    assert yaml.safe_load((directory / "scrape.yml").read_text()) == {"scrape_configs": [*jobs.values()]}
    if PROMTOOL:
        command = [PROMTOOL, "check", "config", directory / "prometheus.yml"]
        checked = subprocess.run(command, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout + checked.stderr
    (dropped,) = jobs["vllm-edge-engine/one"]["metric_relabel_configs"]
    names = ["vllm_edge_switch_running", "vllm_edge:role_queue", "haproxy_backend_status", "vllm:num_requests_running"]
    assert [bool(re.fullmatch(dropped["regex"], name)) for name in names] == [True, True, True, False]
    rules = yaml.safe_load((directory / "targets.yml").read_text())["groups"][0]["rules"]
    assert [rule["expr"] for rule in rules] == ["vector(0.08)", "vector(1.5)"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("OPENAI_API_KEY=x", "has no OPENAI_BASE_URL"),
        (
            "OPENAI_API_KEY=x\nSSL_CERT_FILE=/nowhere/ca.pem",
            "/nowhere/ca.pem does not exist. Run playbooks/clients.yml",
        ),
        ("", "one-prometheus.env does not exist. Run playbooks/clients.yml"),
    ],
)
def test_a_client_whose_file_cannot_be_used_is_named(
    filters: dict[str, Callable[..., Any]], tmp_path: Path, text: str, said: str
) -> None:
    if text:
        (tmp_path / "one-prometheus.env").write_text(text)
    clients = {"serving_clients": {"prometheus": {"metrics": True}}, "serving_gateway_clients_directory": str(tmp_path)}
    of_two = {"serving_metrics": "no"}
    (told,) = filters["describe_monitored"](["one", "two"], {"one": clients, "two": of_two})
    assert said in told["fault"]


@pytest.mark.parametrize(
    ("listen", "scheme", "address"),
    [
        (
            [{"address": "127.0.0.1", "port": 80}, {"address": "0.0.0.0", "port": 443, "tls": True}],
            "https",
            "[::2]:443",
        ),
        ([{"address": "192.0.2.2", "port": 8000}], "http", "192.0.2.2:8000"),
        (None, "http", "127.0.0.1:8000"),
    ],
)
def test_each_host_of_a_fleet_is_asked_at_its_own_address(
    filters: dict[str, Callable[..., Any]], tmp_path: Path, listen: Any, scheme: str, address: str
) -> None:
    (tmp_path / "lab-prometheus.env").write_text("OPENAI_BASE_URL=https://lab.example:8443/v1\nOPENAI_API_KEY=x\n")
    of_fleet = {"serving_fleet": "lab", "serving_fleet_listen": {"address": "::2", "port": 8444}}
    clients = {"serving_clients": {"prometheus": {"metrics": True}}, "serving_gateway_clients_directory": str(tmp_path)}
    (told,) = filters["describe_monitored"](["two"], {"two": clients | of_fleet | {"serving_gateway_listen": listen}})
    assert (told["fault"], told["scheme"], told["address"]) == ("", scheme, address)
    assert bool(told["note"]) == address.startswith("127.")
    assert told["server_name"] == ("lab.example" if scheme == "https" else "")


def test_the_dashboard_is_what_the_tool_makes() -> None:
    assert dashboard.FILE.read_text() == dashboard.render(), "run `make reference`"
    assert len(PANELS) > 30
    assert [panel for panel in PANELS if not (panel["title"] and panel["fieldConfig"]["defaults"]["unit"])] == []


@pytest.mark.slow
def test_promtool_reads_every_query_of_the_dashboard(tmp_path: Path) -> None:
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    if PROMTOOL is None:
        pytest.skip("promtool is not there: tools/bootstrap python unpacks it into .cache/promtool")
    done = subprocess.run([PROMTOOL, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(queries)} rules found" in done.stdout, done.stdout + done.stderr


def test_the_page_has_every_alert_with_its_severity() -> None:
    rows = re.findall(r"^\| (`VllmEdge.*?) \|.*\| (.*?) \|$", (ROOT / "docs/monitoring.md").read_text(), re.MULTILINE)
    told = {name: set(words.split(", ")) for names, words in rows for name in re.findall(r"\w+", names)}
    severities = {name: alert["labels"]["severity"] for name, alert in ALERTS.items()}
    assert told == {name: set(re.findall("critical|warning|info", words)) for name, words in severities.items()}
