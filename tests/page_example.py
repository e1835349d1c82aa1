# SPDX-License-Identifier: Apache-2.0
"""A host's report, and what its page needs besides: status, history, records of benchmark, quality and reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTE = "Simulated GPUs: speeds mean nothing"
PHASES = [
    ("preflight", 0.167, 0.067, "image, weights, GPUs and disk as they should be; 0.1 s"),
    ("healthy", 0.589, 47.258, "31b-nvfp4-tp2, e4b, e2b serve after 47.3 s, 31b-nvfp4-tp2 last"),
    ("canary", 55.985, 11.065, "e4b: auditor in 2.1 s; 31b-nvfp4-tp2: architect, worker in 11.1 s"),
    ("commit", 68.085, 0.003, "generation 1 (nvfp4-tp2) is committed"),
]
NVFP4 = {"slots": [0, 1], "served_names": ["architect", "worker"], "tok_s": (13.0, 14.9, 16.8), "total": 22051}
NVFP4 |= {"repo": "nvidia/Gemma-4-31B-IT-NVFP4", "mib": (15563, 1147, 1505, 264, 3572), "used": 21806, "budget": 22351}
E4B = {"slots": [2], "served_names": ["auditor"], "tok_s": (15.9, 18.4, 20.9), "total": 20396}
E4B |= {"repo": "google/gemma-4-E4B-it", "mib": (14530, 1165, 695, 195, 3811), "used": 20606, "budget": 20800}
E2B = {"slots": [3], "served_names": ["sentry"], "tok_s": (28.5, 33.0, 37.5), "total": 20421}
E2B |= {"repo": "google/gemma-4-E2B-it", "mib": (9117, 1165, 539, 200, 9400), "used": 20559, "budget": 20900}
ENGINES: dict[str, dict[str, Any]] = {"31b-nvfp4-tp2": NVFP4, "e4b": E4B, "e2b": E2B}
SPEEDS = {"31b-nvfp4-tp2": 14.8, "e4b": 17.2, "e2b": 31.4}
PARTS = ("weights", "overhead", "graphs", "context", "kv_cache")


def describe_engine(name: str, engine: dict[str, Any]) -> dict[str, Any]:
    names, slots = engine["served_names"], engine["slots"]
    model, precision = ("31b-nvfp4", "nvfp4") if len(slots) > 1 else (name, "bf16")
    described = {"engine": name, "model": model, "precision": precision, "served_names": names, "slots": slots}
    described |= {"unit": f"vllm-{name}.service", "port": 8030 + 10 * len(slots) + 10 * slots[0], "state": "active"}
    described |= {"start_warnings": [f"{name} does not compute in FP4."]}
    return described | {"tensor_parallel_size": len(slots), "load_seconds": 131.6, "since": "2026-11-21T13:20:01Z"}


def plan_engine(name: str, engine: dict[str, Any]) -> dict[str, Any]:
    parts = {f"{part}_bytes": mib << 20 for part, mib in zip(PARTS, engine["mib"], strict=True)}
    speed = dict(zip(("low", "mid", "high"), engine["tok_s"], strict=True))
    gpus = [{"slot": slot, **parts} for slot in engine["slots"]]
    return {"engine": name, "decode_tok_s": speed, "gpus": gpus}


def compare(what: str, component: str, planned: float, measured: float) -> dict[str, Any]:
    row = {"what": what, "component": component, "planned": planned, "measured": measured}
    return row | {"tolerance": 160.0, "within": True}


def ask(engine: str, name: str) -> dict[str, Any]:
    """What the canary says of a served name."""
    checks = [{"check": "completion", "outcome": "passed"}, {"check": "tool_call", "outcome": "not_shown"}]
    return {"engine": engine, "served_name": name, "ok": True, "error": None, "checks": checks}


REPORT: dict[str, Any] = {
    **{"host": "example", "profile": "nvfp4-tp2", "generation": 1, "note": NOTE, "problems": [], "switch": None},
    "load_warnings": ["e4b loaded in 39.7 s, its plan was 18 to 30 s."],
    "engines": [describe_engine(*item) for item in ENGINES.items()],
    "plan": [plan_engine(*item) for item in ENGINES.items()],
    "completions": [ask(name, served) for name, engine in ENGINES.items() for served in engine["served_names"]],
    "gpus": [
        {
            **{"index": slot, "slot": slot, "uuid": f"GPU-{slot}", "name": "NVIDIA L4", "total_mib": 23034},
            **{"used_mib": engine["used"], "foreign_mib": 0, "budget_mib": engine["budget"]},
        }
        for engine in ENGINES.values()
        for slot in engine["slots"]
    ],
    "drift": [
        *(compare(name, "weights_mib", one["mib"][0], one["mib"][0] + 83.7) for name, one in ENGINES.items()),
        *(
            compare(f"GPU-{at}", "total_mib", one["total"], one["used"])
            for one in ENGINES.values()
            for at in one["slots"]
        ),
    ],
    "gateway": {
        "active_state": "active",
        "addresses": ["http://127.0.0.1:8000", "https://0.0.0.0:8443"],
        "certificate_ends": "2027-12-27T02:19:21Z",
        "roles": {name: {"state": "up"} for engine in ENGINES.values() for name in engine["served_names"]},
    },
    "versions": {"driver": "580.178.04", "vLLM": "0.32.0+cpu", "image id": f"sha256:{'73' * 32}"},
    "pins": ["gpu_uuids:", *(f"  - GPU-{slot}  # slot {slot}: NVIDIA L4" for slot in range(4))],
}
LOAD = {"waiting-for-gpus": 0.4, "starting-container": 1.2, "initializing": 6.1, "loading-weights": 14.0}
LOAD |= {"compiling": 9.2, "kv-cache": 3.0, "capturing-graphs": 8.5, "waiting-for-health": 3.5}
STATUS: dict[str, Any] = {
    "host": "example",
    "engines": [
        {"engine": name, "repo": engine["repo"], "revision": "15" * 20, "load_seconds": 45.9, "load_phases": LOAD}
        for name, engine in ENGINES.items()
    ],
}


def record_switch(
    started_at: str, way: tuple[str, str], result: str, message: str, away: dict[str, float]
) -> dict[str, Any]:
    """The journal of a switch. `way` is the former profile and the new one, `away` the seconds without an answer."""
    named = ("phase", "began_s", "seconds", "detail")
    phases = [dict(zip(named, phase, strict=True)) | {"direction": "forward", "outcome": "done"} for phase in PHASES]
    gaps = {name: {"seconds": s, "gaps": [{"from_s": 0.3, "to_s": 0.3 + s}]} for name, s in away.items()}
    journal = {"started_at": started_at, "from_profile": way[0], "profile": way[1], "generation": 1, "result": result}
    return journal | {"seconds": 68.469, "asked_by": "root", "phases": phases, "downtime": gaps, "message": message}


HISTORY = [
    record_switch(
        *("2026-11-25T02:17:57Z", ("bf16-tp4", "nvfp4-tp2"), "committed"),
        "Generation 1 (nvfp4-tp2) serves and is verified, 68.5 s after the switch began.",
        {"architect": 47.3, "worker": 47.3, "auditor": 41.0},
    ),
    record_switch(
        "2026-11-24T20:00:00Z", ("nvfp4-tp2", "e2b-only"), "rolled_back", "Generation 2 failed the canary.", {}
    ),
]


def measure(engine: str, way: str, case: str, output_tokens: int, streams: int, tok_s: float) -> dict[str, Any]:
    gpus = [{"slot": slot, "power_w_mean": 61.5} for slot in ENGINES[engine]["slots"]]
    latency = {name: {"p50": p50, "p95": p50 * 1.3} for name, p50 in (("ttft_ms", 180.0), ("itl_ms", 67.6))}
    row = {"kind": "measurement", "engine": engine, "through": way, "case": case, "input_tokens": 256, "failed": 0}
    row |= {"output_tokens": output_tokens, "concurrency": streams, "tok_s": tok_s, "joules_per_token": 8.31}
    return row | latency | {"gpus": gpus}


def record_bench(at: str, share: float, *findings: str) -> list[dict[str, Any]]:
    """A run of the benchmark at this share of the usual speeds, line by line."""
    told = {"profile": "nvfp4-tp2", "vllm": "0.32.0", "driver": "580.178.04", "note": NOTE}
    measured = [
        measure(name, way, case, tokens, streams, speed * share * streams)
        for name, speed in SPEEDS.items()
        for way, case, tokens, streams in (
            *(("engine", "protocol", tokens, 1) for tokens in (128, 256, 512)),
            *(("gateway", "protocol", 256, 1), ("engine", "sweep", 256, 4)),
        )
    ]
    warnings = [{"severity": "warn", "text": text} for text in findings]
    end = {"kind": "end", "verdict": "findings" if findings else "passed", "error": "", "findings": warnings}
    return [{"kind": "run", "at": at, **told}, *measured, end]


BENCH = {
    "20261124T120000Z-nvfp4-tp2.jsonl": record_bench("2026-11-24T12:00:00Z", 0.97),
    "20261125T023000Z-nvfp4-tp2.jsonl": record_bench("2026-11-25T02:30:00Z", 1, "31b-nvfp4-tp2 gives 4 % less."),
}
SUITE = {
    **{"at": "2026-11-25T02:55:00Z", "profile": "nvfp4-tp2", "passed": 1, "failed": 1, "unsteady": 1},
    "cases": [
        {"case": case, "served_name": name, "expectation": "exact", "verdict": verdict, "repeats": [{"why": why}]}
        for case, name, verdict, why in (
            ("capital", "architect", "passed", ""),
            ("order-as-json", "auditor", "unsteady", "the property quantity is missing in one of three answers"),
            ("weather-tool", "sentry", "failed", "no tool was called"),
        )
    ],
}
ANSWER = {
    **{"kind": "reference", "at": "2026-11-25T03:00:00Z", "engine": "e2b"},
    "cases": [
        {"case": "count", "agreed": 5, "compared": 5, "finding": "equal", "text": "All 5 tokens are equal."},
        {"case": "balancer", "agreed": 3, "compared": 5, "finding": "tie", "text": "Token 3 differs."},
    ],
}
QUALITY = {"20261125T025500Z-nvfp4-tp2.json": SUITE, "20261125T030000Z-reference-e2b.json": ANSWER}


def write_records(directory: Path) -> None:
    """Write the records into `bench` and `quality` of a directory."""
    for kind in ("bench", "quality"):
        (directory / kind).mkdir(parents=True)
    for name, lines in BENCH.items():
        (directory / "bench" / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for name, record in QUALITY.items():
        (directory / "quality" / name).write_text(json.dumps(record))
