# SPDX-License-Identifier: Apache-2.0
"""Variables of playbooks/bench.yml and playbooks/quality.yml.

Values come from `-e` as text, so numbers may be texts, and lists texts with commas. `given` has them by name; `active`
is the engines of the chosen profile, each with its model. What is found is one sentence for each variable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..text import shown

CASES = ("protocol", "sweep", "long-context", "shared-prefix")
"""The cases of the benchmark that can be chosen."""
ROW = "{engine: e2b, output_tokens: 128, tok_s: 40.5, source: where}"
BENCH = {
    "bench_engines": "name engines of the inventory, such as {first}: {engines}",
    "bench_cases": "the cases are {cases}; a soak is asked for by its length, -e bench_soak_minutes=30",
    "bench_soak_minutes": "minutes of load for each engine are a number from 0, such as 30",
    "bench_limit_minutes": "the longest time in minutes is a number above 0, and above that of the soak of all engines "
    "({soak} for each of {loaded}), such as {enough}",
    "bench_tolerance_percent": "a percentage is above 0 and below 100, such as 10",
    "bench_input_tokens": "a prompt has a whole number of tokens from 1, such as 256",
    "bench_output_tokens": "answers have whole numbers of tokens from 1, such as 128,256,512",
    "bench_requests": "a number of requests from 1 is expected, such as 3",
    "bench_reference": "each row has engine, output_tokens and tok_s, such as {row}",
}
QUALITY = {
    "quality_engines": "name engines of the inventory: {engines}",
    "quality_compare": "two profiles, or two recorded runs, are expected, such as nvfp4-tp2,bf16-tp4",
    "quality_reference": "the models of vllm_models are {models}",
    "quality_reference_engine": "{lacks}, so name the one to compare: -e quality_reference_engine={active}",
    "quality_reference_chat_template": "this machine has no such file; give the path of a Jinja template, or leave the "
    "variable out for the template of the engine",
    "quality_reference_device": "choose auto (GPUs without an engine, else the CPU), cpu or gpu",
    "quality_reference_tokens": "a whole number from 1 to 9999 is expected, such as 64",
    "quality_reference_timeout_s": "seconds from 1 to 99999 are expected, such as 600",
}
"""What is expected of each variable."""


def _split(value: Any) -> list[str]:
    words = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    return [word for word in (str(word).strip() for word in words) if word]


def _read_number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")  # neither above nor below any other


def _is_whole(value: Any, digits: int) -> bool:
    return re.fullmatch(rf"[1-9][0-9]{{0,{digits - 1}}}", str(value)) is not None


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or "engine" not in row:
        return False
    return isinstance(row.get("output_tokens"), int) and isinstance(row.get("tok_s"), int | float)


def find_bench_mistakes(
    given: Mapping[str, Any], engines: Collection[str], active: Mapping[str, str], _models: Collection[str]
) -> Iterator[str]:
    chosen, soak = _split(given["bench_engines"]), _read_number(given["bench_soak_minutes"])
    loaded = len(chosen or active)
    least = soak * loaded if soak >= 0 else 0.0
    rows = given["bench_reference"]
    words: dict[str, Any] = {"first": next(iter(active)), "engines": ", ".join(engines)}
    words |= {"cases": ", ".join(CASES), "row": ROW}
    words |= {"soak": given["bench_soak_minutes"], "loaded": loaded, "enough": int(least) + 60}
    good = {
        "bench_engines": set(chosen) <= set(engines),
        "bench_cases": set(_split(given["bench_cases"])) <= set(CASES),
        "bench_soak_minutes": soak >= 0,
        "bench_limit_minutes": _read_number(given["bench_limit_minutes"]) > least,
        "bench_tolerance_percent": 0 < _read_number(given["bench_tolerance_percent"]) < 100,
        "bench_input_tokens": _is_whole(given["bench_input_tokens"], 6),
        "bench_output_tokens": all(_is_whole(tokens, 6) for tokens in _split(given["bench_output_tokens"])),
        "bench_requests": _is_whole(given["bench_requests"], 4),
        "bench_reference": isinstance(rows, list) and all(map(_is_row, rows)),
    }
    return (f"{name}: {shown(given[name])}; {BENCH[name].format(**words)}." for name in BENCH if not good[name])


def find_quality_mistakes(
    given: Mapping[str, Any], engines: Collection[str], active: Mapping[str, str], models: Collection[str]
) -> Iterator[str]:
    reference, engine = given["quality_reference"], given["quality_reference_engine"]
    template = given["quality_reference_chat_template"]
    words = {"engines": ", ".join(engines), "models": ", ".join(models), "active": " or ".join(active)}
    words["lacks"] = "no active engine " + ("has this name" if engine else f"serves {reference} itself")
    good = {
        "quality_engines": set(_split(given["quality_engines"])) <= set(engines),
        "quality_compare": len(_split(given["quality_compare"])) in (0, 2),
    }
    if reference:
        good |= {
            "quality_reference": reference in models,
            "quality_reference_engine": engine in active if engine else reference in active.values(),
            "quality_reference_chat_template": not template or os.path.isfile(template),
            "quality_reference_device": given["quality_reference_device"] in ("auto", "cpu", "gpu"),
            "quality_reference_tokens": _is_whole(given["quality_reference_tokens"], 4),
            "quality_reference_timeout_s": _is_whole(given["quality_reference_timeout_s"], 5),
        }
    return (f"{name}: {shown(given[name])}; {QUALITY[name].format(**words)}." for name in good if not good[name])


PLAYS = {"bench": (BENCH, find_bench_mistakes), "quality": (QUALITY, find_quality_mistakes)}
"""By playbook its variables, and what finds their mistakes."""
