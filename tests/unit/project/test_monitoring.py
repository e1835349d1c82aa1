# SPDX-License-Identifier: Apache-2.0
"""The rules for an operator's Prometheus and the dashboard: promtool tests the rules, and what both name exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory import vllm_arguments
from ansible.module_utils.vllm_edge.metrics import exporter, facts
from ansible.module_utils.vllm_edge.switch.model import Result
from ansible.module_utils.vllm_edge.system.nvml import THROTTLE
from helpers import ROOT
from test_docs import headings

FILES = ROOT / "roles/serving_metrics/files"
RULES = [rule for group in yaml.safe_load((FILES / "rules.yml").read_text())["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
TESTS = f"test rules rules_test.yml {Path(__file__).with_name('rules_of_days.yml')}"
PROMTOOL = shutil.which("promtool") or shutil.which(ROOT / ".cache/promtool/promtool")
SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")


def find_names(prefix: str) -> set[str]:
    """Names with a prefix in the rules and, where there is one, in the dashboard."""
    texts = [str(rule["expr"]) for rule in RULES]
    texts += [path.read_text() for path in FILES.glob("dashboard.json")]
    return {name for text in texts for name in re.findall(rf"\b{prefix}([a-z0-9_]+)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("words", ["check rules --lint=all --lint-fatal rules.yml", TESTS])
def test_promtool_finds_no_fault(words: str) -> None:
    if PROMTOOL is None:
        pytest.skip("promtool is not there: tools/bootstrap python unpacks it into .cache/promtool")
    done = subprocess.run([PROMTOOL, *words.split()], cwd=FILES, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", vllm_arguments.RELEASES)
def test_metrics_of_vllm_are_those_of_every_recorded_release(version: str) -> None:
    recorded = set(vllm_arguments.RELEASES[version]["metrics"].split())
    missing = {name for name in find_names("vllm:") if not {name, SUFFIX.sub("", name)} & recorded}
    assert missing == set(), "not in the record: does the release have it? Then make vllm-release VERSION=..."


def test_metrics_of_the_host_are_those_of_the_exporter() -> None:
    assert find_names("vllm_edge_") <= set(exporter.HELP)
    made = {rule["record"].removeprefix("vllm_edge:") for rule in RULES if "record" in rule}
    assert find_names("vllm_edge:") <= made | {"role_ttft_p95_target_seconds", "role_itl_p95_target_seconds"}


def test_values_of_labels_are_those_of_the_program() -> None:
    of_haproxy = {"L7OK", "L7STS"}
    known = {*THROTTLE.values(), *Result, *facts.STATES, *of_haproxy, "any", "uncorrected"}
    given = re.findall(r'\b(?:reason|result|state|type)=~?"([^"]+)"', "".join(str(rule["expr"]) for rule in RULES))
    assert {word for value in given for word in value.split("|")} <= known


@pytest.mark.parametrize("name", ALERTS)
def test_alert_says_what_to_do_and_where_to_read(name: str) -> None:
    alert: dict[str, Any] = ALERTS[name]
    assert name.startswith("VllmEdge") and alert["for"]
    assert alert["labels"].keys() == {"severity"} and alert["annotations"].keys() == {"summary", "action", "docs"}
    assert {*re.findall("critical|warning|info", alert["labels"]["severity"])}
    page, anchor = alert["annotations"]["docs"].split("#")
    assert anchor in headings(page)
    assert "{{ $labels.host }}: " in alert["annotations"]["summary"]


def test_every_alert_is_seen_firing_in_the_tests_of_the_rules() -> None:
    tests = (FILES / "rules_test.yml").read_text()
    assert set(re.findall(r'alertname="(\w+)",severity="\w+"', tests)) == set(ALERTS)
