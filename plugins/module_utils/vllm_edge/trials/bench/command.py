# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge bench`: measures the engines that serve, prints a table, follows a run, or lists former ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...paths import HostPaths
from ...system.docker import DockerEngine
from ...system.long_run import LongRun, refusing
from ...text import print_result, table, wrapped
from .cases import Options
from .compare import fails_gate
from .model import End, Measurement, Percentiles, Recorded, list_files, read_runs
from .run import prepare

LISTED = 20
"""Former runs that are listed, newest last."""
HEADS = ["engine", "through", "case", "in", "out", "at once", "tok/s", "TTFT p50", "p99 ms", "ITL p50", "KV", "J/tok"]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _at(percentiles: Percentiles | None, name: str) -> str:
    return "-" if percentiles is None else _number(getattr(percentiles, name))


def render_measurements(measurements: Sequence[Measurement]) -> list[str]:
    """Return the measurements as a table, without the warm-up, whose figures mean nothing."""
    rows = [
        [
            one.label,
            one.through,
            one.case,
            str(one.input_tokens),
            str(one.output_tokens),
            str(one.concurrency),
            _number(one.tok_s, 1) if not one.error else "failed",
            *(_at(one.ttft_ms, "p50"), _at(one.ttft_ms, "p99"), _at(one.itl_ms, "p50")),
            "-" if one.kv_use_peak is None else f"{one.kv_use_peak:.0%}",
            _number(one.joules_per_token, 2),
        ]
        for one in measurements
        if one.case != "warm-up"
    ]
    return table(HEADS, rows, frozenset(range(3, len(HEADS)))) if rows else []


def render_end(end: End) -> list[str]:
    lines = [line for finding in end.findings for line in wrapped(f"{finding.severity}: {finding.text}")]
    lines += wrapped(end.error)
    return lines or ["Nothing differs from what was expected."]


def render(recorded: Recorded) -> list[str]:
    run, end = recorded.run, recorded.end
    head = f"{run.run}: {run.profile} on {run.host}, generation {run.generation}, vLLM {run.vllm or 'unknown'}"
    lines = [*wrapped(run.note), head, "", *render_measurements(recorded.measurements), ""]
    return lines + (render_end(end) if end else ["The run has not ended, or was killed."])


@refusing
def run_list(paths: HostPaths, output: str) -> int:
    runs = read_runs(list_files(paths)[-LISTED:])
    rows = [
        [one.run.run, one.run.profile, str(len(one.measurements)), one.end.verdict if one.end else "-"] for one in runs
    ]
    lines = table(("run", "profile", "measurements", "verdict"), rows) if rows else ["no run is recorded"]
    print_result(output, [asdict(one) for one in runs], lines)
    return 0


@refusing
def run_bench(paths: HostPaths, options: Options, long_run: LongRun, *, output: str) -> int:
    """Run the benchmark, print it, and return the exit status.

    Returns:
        0: it was complete. 1: it ended early, or a finding is a failure and the gate is `fail`. 2: it was refused.
    """
    with long_run.alone():
        bench = prepare(paths, options, DockerEngine(), long_run)
        recorded, incomparable = bench.run()
    lines = [*render(recorded), *(line for text in incomparable for line in wrapped(text))]
    print_result(output, {"path": str(bench.path), "lines": lines, **asdict(recorded)}, lines)
    end = recorded.end
    return 1 if end is None or end.error or fails_gate(end.findings, options.gate) else 0
