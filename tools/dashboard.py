# SPDX-License-Identifier: Apache-2.0
"""Write roles/serving_metrics/files/dashboard.json, the dashboard for Grafana."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, DynamicConfigValue, VariableRefresh

FILE = Path(__file__).resolve().parent.parent / "roles/serving_metrics/files/dashboard.json"
SOURCE = DataSourceRef("prometheus", "${datasource}")
BUDGET = "budget"
"""Legend of the line that is not stacked in a stack."""

PANELS = """
# Roles
Output | suffix: tok/s | ROLE | vllm_edge:role_tokens_per_second@
Requests | reqps | ROLE | vllm_edge:role_requests_per_second@
Errors of all answers | percentunit | ROLE | vllm_edge:role_errors_ratio@
Requests that wait, in gateway and engines | short | ROLE | vllm_edge:role_queue@
First token, 95th percentile, and its target | s | ROLE | vllm_edge:role_ttft_p95_seconds@
| target of ROLE | vllm_edge:role_ttft_p95_target_seconds@
Between tokens, 95th percentile, and its target | s | ROLE | vllm_edge:role_itl_p95_seconds@
| target of ROLE | vllm_edge:role_itl_p95_target_seconds@
Requests that other hosts answer | reqps | {{host}} {{server}} | sum by (host, server) \
(rate(haproxy_server_http_responses_total{host=~"$host",proxy=~"role_.+",server=~"host-.+"}[5m]))
# GPUs
Memory of all chosen GPUs: plan, others, rest | bytes | {{part}} | sum by (part) (vllm_edge_gpu_memory_planned_bytes@)
| foreign | sum(vllm_edge_gpu_memory_foreign_bytes@)
| free | sum(vllm_edge_gpu_memory_total_bytes@) - sum(vllm_edge_gpu_memory_planned_bytes@) \
- (sum(vllm_edge_gpu_memory_foreign_bytes@) or vector(0))
| budget | sum(vllm_edge_gpu_memory_budget_bytes@)
Memory of each GPU, without others', of its budget | percentunit | GPU | \
(vllm_edge_gpu_memory_used_bytes@ - vllm_edge_gpu_memory_foreign_bytes@) / (vllm_edge_gpu_memory_budget_bytes@ > 0)
Utilization | percentunit | GPU | vllm_edge_gpu_utilization_ratio@
Temperature | celsius | GPU | vllm_edge_gpu_temperature_celsius@
Clock of the SMs | hertz | GPU | vllm_edge_gpu_sm_clock_hertz@
Throttled GPUs by reason | suffix: GPUs | {{host}} {{reason}} | sum by (host, reason) (vllm_edge_gpu_throttled@)
Errors in an hour: Xid, uncorrected ECC | short | GPU Xid | increase(vllm_edge_gpu_xid_errors_total@[1h])
| GPU ECC | increase(vllm_edge_gpu_ecc_errors_total{host=~"$host", type="uncorrected"}[1h])
GPUs that answer | short | {{host}} | sum by (host) (vllm_edge_gpu_up@)
# Latency
Time to the first token | s | ENGINE | QUANTILES time_to_first_token
Time between tokens | s | ENGINE | QUANTILES inter_token_latency
Whole request | s | ENGINE | QUANTILES e2e_request_latency
Wait in the engine | s | ENGINE | QUANTILES request_queue_time
Speed of one request, of what the plan expects | percentunit | ENGINE | vllm_edge:engine_planned_share@
Requests in the engines | short | ENGINE run | sum by (host, engine_name) (vllm:num_requests_running@)
| ENGINE wait | sum by (host, engine_name) (vllm:num_requests_waiting@)
KV cache in use | percentunit | ENGINE | max by (host, engine_name) (vllm:kv_cache_usage_perc@)
Preemptions in five minutes | short | ENGINE | sum by (host, engine_name) (increase(vllm:num_preemptions_total@[5m]))
# Switches
Generation | none | {{host}} {{profile}} | vllm_edge_generation@
Downtime of roles in the last switch | s | ROLE | vllm_edge_switch_last_downtime_seconds@
Switches in a day | short | {{host}} {{result}} | sum by (host, result) (increase(vllm_edge_switches_total@[1d]))
Engines that serve | short | ENGINE | vllm_edge_engine_up@
Starts and crashes in an hour | short | ENGINE starts | increase(vllm_edge_engine_starts_total@[1h])
| ENGINE crashes | increase(vllm_edge_engine_crashes_total{host=~"$host", reason="any"}[1h])
Canary, 1 is right | none | ROLE, {{engine_name}} | vllm_edge_role_canary_ok@
Time since the canary | s | ROLE | time() - max by (host, role) (vllm_edge_role_canary_timestamp_seconds@)
Checks of the doctor | short | {{host}} {{state}} | vllm_edge_doctor_checks@
# Power
Power of GPUs and engines | watt | GPU | vllm_edge_gpu_power_watts@
| ENGINE | vllm_edge:engine_watts@
Energy of one output token | suffix: J/tok | ENGINE | vllm_edge:engine_joules_per_token@
Energy of a day | kwatth | {{host}} | sum by (host) (increase(vllm_edge_gpu_energy_joules_total@[1d])) / 3.6e6
"""
"""Rows, and their panels: title, unit by its name in Grafana, legend and query, in further lines more of the latter."""
SHORT = {
    r"(.+) \| QUANTILES (\w+)": "\n".join(
        rf"\1 p{i} | histogram_quantile(0.{i}, sum by (host, engine_name, le) (rate(vllm:\2_seconds_bucket@[5m])))"
        for i in (50, 95)
    ),
    "ENGINE": "{{host}} {{engine_name}}",
    "GPU(?!s)": "{{host}} GPU {{gpu}}",
    "ROLE": "{{host}} {{role}}",
    "@": '{host=~"$host"}',
}


def build_panel(number: int, title: str, unit: str, queries: list[tuple[str, str]]) -> timeseries.Panel:
    panel = timeseries.Panel().id(number).title(title).unit(unit).datasource(SOURCE).span(8).height(8).min(0)
    for letter, (legend, query) in zip("ABCDEF", queries, strict=False):
        panel.with_target(prometheus.Dataquery().ref_id(letter).expr(query).legend_format(legend))
    if BUDGET in dict(queries):
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL)).fill_opacity(40)
        line = {"custom.stacking": {"mode": "none"}, "custom.fillOpacity": 0}
        panel.override_by_name(BUDGET, [DynamicConfigValue(name, value) for name, value in line.items()])
    return panel


def expand(text: str) -> list[tuple[str, str]]:
    """Return pairs of legend and query."""
    for short, long in SHORT.items():
        text = re.sub(short, long, text)
    pairs = [line.strip("| ").split(" | ", 1) for line in text.splitlines()]
    return [(legend, query) for legend, query in pairs]


def render() -> str:
    board = dashboard.Dashboard("vllm-edge").uid("vllm-edge").time("now-6h", "now").refresh("30s").readonly()
    board.with_variable(dashboard.DatasourceVariable("datasource").type("prometheus"))
    hosts = dashboard.QueryVariable("host").datasource(SOURCE).query("label_values(vllm_edge_build_info, host)")
    board.with_variable(hosts.multi(True).include_all(True).refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    number = itertools.count(1)
    for block in re.split(r"\n(?!\|)", PANELS.strip()):
        if block.startswith("# "):
            board.with_row(dashboard.Row(block[2:]).id(next(number)))
        else:
            title, unit, queries = block.split(" | ", 2)
            board.with_panel(build_panel(next(number), title, unit, expand(queries)))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
