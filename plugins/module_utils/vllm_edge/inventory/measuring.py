# SPDX-License-Identifier: Apache-2.0
"""Variables of playbooks/bench.yml and playbooks/quality.yml: what they contradict, and the options that they become.

Type, bounds and words of each are checked as those of other variables are; what is here needs the engines of the
inventory, or two variables.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from ..text import nearest, shown
from .engine_inputs import Spec, parse_text

CASES: Final = ("protocol", "sweep", "long-context", "shared-prefix")
"""The cases of the benchmark that can be chosen."""
_BENCH = (
    *("through", "gate", "soak_minutes", "limit_minutes", "requests", "tolerance_percent", "input_tokens"),
    *("output_tokens", "allow_load"),
)
OPTIONS: dict[str, dict[str, str]] = {
    "bench": {
        **{f"--{name.replace('_', '-')}": f"bench_{name}" for name in _BENCH},
        **{"--engine": "bench_engines", "--case": "bench_cases"},
        **{"--note": "serving_note", "--asked-by": "vllm_engine_asked_by"},
    },
    "quality": {
        "--repeats": "quality_repeats",
        "--timeout": "quality_timeout_s",
        "--engine": "quality_engines",
        "--note": "serving_note",
    },
    "compare": {"--compare": "quality_compare"},
    "reference": {
        "--model": "quality_reference",
        "--engine": "quality_reference_engine",
        "--device": "quality_reference_device",
        "--tokens": "quality_reference_tokens",
        "--timeout": "quality_reference_timeout_s",
        "--note": "serving_note",
    },
}
"""By command of the program its options, each with the variable that it has its value from."""
FURTHER = ("bench_reference", "quality_reference_chat_template")
NAMES = frozenset({name for options in OPTIONS.values() for name in options.values()}.union(FURTHER))
JOINED, AFTER = ("--output-tokens",), ("--compare",)
"""Options whose values follow with commas between them, and as words of their own; others are repeated."""


def write_options(command: str, given: Mapping[str, Any]) -> list[str]:
    """Return the options of a command; `given` are the values of its variables, as `read_variables` returns them."""
    words: list[str] = []
    for option, name in OPTIONS[command].items():
        value = given[name]
        if isinstance(value, list) and option in JOINED:
            value = ",".join(map(str, value))
        if isinstance(value, bool):
            words += [option] if value else []
        elif option in AFTER:
            words += [option, *value]
        else:
            words += [f"{option}={one:g}" if isinstance(one, float) else f"{option}={one}" for one in _as_list(value)]
    return words


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_variables(given: Mapping[str, Any], specs: Spec) -> dict[str, Any]:
    """Return the variables of NAMES with numbers and lists for what `-e` passes as text."""
    return {name: parse_text(value, specs.get(name, {"type": "str"})) for name, value in given.items()}


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or "engine" not in row:
        return False
    return isinstance(row.get("output_tokens"), int) and isinstance(row.get("tok_s"), int | float)


def _find_unknown(variable: str, names: Sequence[str], engines: Collection[str]) -> Iterator[str]:
    for name in names:
        if name not in engines:
            yield f"{variable}: {shown(name)} is no engine of the inventory; {nearest(name, engines)}"


def find_bench_mistakes(
    given: Mapping[str, Any], engines: Collection[str], active: Mapping[str, str], _models: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong; `active` is the engines of the chosen profile, each with its model."""
    yield from _find_unknown("bench_engines", given["bench_engines"], engines)
    if wrong := [case for case in given["bench_cases"] if case not in CASES]:
        yield (
            f"bench_cases: {shown(wrong[0])} is not one of {', '.join(CASES)}; write one of those, and for a soak its "
            f"length, -e bench_soak_minutes=30."
        )
    soak, loaded = given["bench_soak_minutes"], len(given["bench_engines"] or active)
    if given["bench_limit_minutes"] <= soak * loaded:
        yield (
            f"bench_limit_minutes: {shown(given['bench_limit_minutes'])}; the longest time in minutes is above 0, and "
            f"above that of the soak of all engines ({soak} for each of {loaded}), such as {int(soak * loaded) + 60}."
        )
    rows = given["bench_reference"]
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        yield (
            f"bench_reference: {shown(rows)}; each row has engine, output_tokens and tok_s, such as "
            f"{{engine: e2b, output_tokens: 128, tok_s: 40.5, source: where}}."
        )


def find_quality_mistakes(
    given: Mapping[str, Any], engines: Collection[str], active: Mapping[str, str], models: Collection[str]
) -> Iterator[str]:
    """Yield what is wrong; `active` is the engines of the chosen profile, each with its model."""
    yield from _find_unknown("quality_engines", given["quality_engines"], engines)
    if len(given["quality_compare"]) not in (0, 2):
        yield (
            f"quality_compare: {shown(given['quality_compare'])}; two profiles, or two recorded runs, are expected, "
            f"such as nvfp4-tp2,bf16-tp4."
        )
    reference, engine = given["quality_reference"], given["quality_reference_engine"]
    if not reference:
        return
    if reference not in models:
        yield f"quality_reference: {shown(reference)}; the models of vllm_models are {', '.join(models)}."
    if engine not in active if engine else reference not in active.values():
        yield (
            f"quality_reference_engine: {shown(engine)}; no active engine "
            f"{'has this name' if engine else f'serves {reference} itself'}, so name the one to compare: "
            f"-e quality_reference_engine={' or '.join(active)}."
        )
    template = given["quality_reference_chat_template"]
    if template and not os.path.isfile(template):
        yield (
            f"quality_reference_chat_template: {shown(template)}; this machine has no such file; give the path of a "
            f"Jinja template, or leave the variable out for the template of the engine."
        )


FINDERS = {"bench": find_bench_mistakes, "quality": find_quality_mistakes}
