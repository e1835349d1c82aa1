# SPDX-License-Identifier: Apache-2.0
"""Compares a run of the benchmark with the plan, with former runs and with a table of reference measurements.

Pure functions of records. A warm-up is never compared; only failed requests of it are found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...names import LABEL_GENERATION, LABEL_INPUT_HASH
from ...system.records import read_record
from ...text import shorten
from .model import EngineRecord, Finding, Measurement, Recorded, Run

VRAM_GROWTH_MIB = 100
"""MiB by which a GPU's memory may grow in a soak. vLLM allocates weights and KV cache at its start; our choice."""
REASONS = {
    "application_clocks": "clocks that somebody has set",
    "sw_power_cap": "power limit",
    "hw_slowdown": "hardware slowdown",
    "sw_thermal_slowdown": "temperature",
    "hw_thermal_slowdown": "temperature, by the hardware",
    "hw_power_brake": "power brake of the server",
}
"""Reasons of `system.nvml.THROTTLE` in words."""
WAYS = {"engine": "asked directly", "gateway": "through the gateway"}
ARGUMENTS_WIDTH = 300


@dataclass(frozen=True)
class Reference:
    """A row of the table of reference measurements: one stream of an engine."""

    engine: str
    output_tokens: int
    tok_s: float
    source: str = ""


def read_reference(data: object) -> tuple[Reference, ...]:
    """Read the table from parsed JSON. Raises ValueError, which names the row."""
    if not isinstance(data, list | tuple):
        raise ValueError("the table of reference measurements is no list")
    return tuple(read_record(Reference, row, f"row {number}") for number, row in enumerate(data, 1))


def fails_gate(findings: Iterable[Finding], gate: Literal["warn", "fail"]) -> bool:
    """Return whether these findings end a run with a failure. Those of severity `warn` never do."""
    return gate == "fail" and any(finding.severity == "fail" for finding in findings)


def find_findings(
    run: Run,
    measurements: Iterable[Measurement],
    former: Sequence[Recorded],
    reference: Sequence[Reference] = (),
    tolerance_percent: float = 10.0,
) -> list[Finding]:
    """Return what an operator should know of a run.

    Args:
        former: runs of this host, newest first
        tolerance_percent: by how much two measurements of the same thing may differ
    """
    everything = list(measurements)
    measured = [one for one in everything if one.case != "warm-up" and _has_figures(one)]
    found = list(_find_failures(everything))
    for engines in dict.fromkeys(one.engines for one in measured):
        first, label = engines[0], " + ".join(engines)
        mine = [one for one in measured if one.engines == engines]
        direct = [one for one in measured if one.through == "engine" and one.engine in engines]
        if len(engines) == 1 or not direct:
            # With one stream, each request is answered by one engine: its plan and its reference hold for the name.
            found += _compare_plan(label, run.engines[first].plan, mine)
            found += _compare_reference(label, first, mine, reference, tolerance_percent)
        found += _compare_former(run, label, mine, former, tolerance_percent)
        found += _compare_ways(label, mine, direct, tolerance_percent)
        found += _find_throttling(label, mine)
        found += _find_growth(label, mine)
        found += _find_others(label, mine)
    return found


def list_incomparable(
    run: Run,
    measurements: Iterable[Measurement],
    former: Sequence[Recorded],
    reference: Sequence[Reference] = (),
) -> list[str]:
    """Return a sentence for each comparison that was not possible, and why. Arguments are those of `find_findings`."""
    sentences = []
    known = {row.engine for row in reference}
    measured = [one for one in measurements if one.case != "warm-up" and _has_figures(one)]
    for engines in dict.fromkeys(one.engines for one in measured):
        mine = [one for one in measured if one.engines == engines]
        engine, record = " + ".join(engines), run.engines[engines[0]]
        reasons: dict[str, list[str]] = {}
        for one in mine:
            former_one, reason = _find_former(run, one, former)
            if former_one is None and one.case not in reasons.setdefault(reason, []):
                reasons[reason].append(one.case)
        for reason, cases in reasons.items():
            sentences.append(f"{engine}, {', '.join(cases)}: not compared with a former run, {reason}.")
        if any(one.case == "protocol" for one in mine):
            if _read_speed(record.plan) is None:
                sentences.append(f"{engine}: not compared with the plan, which has no speed for it.")
            if engines[0] not in known:
                sentences.append(f"{engine}: not compared with the reference measurements, which have no row for it.")
    return sentences


def _has_figures(one: Measurement) -> bool:
    return not one.error and one.completed > 0 and one.tok_s > 0


def _name(one: Measurement) -> str:
    requests = "one request" if one.concurrency == 1 else f"{one.concurrency} requests"
    return f"{one.case} with {requests} at once of {one.input_tokens} + {one.output_tokens} tokens, {WAYS[one.through]}"


def _select_protocol(measured: Iterable[Measurement]) -> list[Measurement]:
    """Return the protocol's measurements: those of the engine itself, or where there are none those of the gateway."""
    protocol = [one for one in measured if one.case == "protocol" and one.concurrency == 1]
    return [one for one in protocol if one.through == "engine"] or protocol


def _find_failures(measured: Iterable[Measurement]) -> Iterator[Finding]:
    for one in measured:
        if one.error:
            text = f"{one.label} has no figures of {_name(one)}: {one.error.rstrip('.')}."
            yield Finding("not-measured", "fail", one.label, one.case, text)
        elif one.failed:
            text = f"{one.failed} of {one.requests} requests to {one.label} failed: {_name(one)}."
            yield Finding("failed-requests", "fail", one.label, one.case, text)


def _find_throttling(engine: str, measured: Iterable[Measurement]) -> Iterator[Finding]:
    by_case: dict[str, dict[str, set[str]]] = {}
    for one in measured:
        for gpu in one.gpus:
            for reason in gpu.throttle:
                place = f"GPU {gpu.uuid if gpu.slot is None else gpu.slot}"
                by_case.setdefault(one.case, {}).setdefault(REASONS.get(reason, reason), set()).add(place)
    for case, reasons in by_case.items():
        words = "; ".join(f"{reason} ({', '.join(sorted(places))})" for reason, places in sorted(reasons.items()))
        text = f"The GPUs of {engine} ran with lower clocks during {case}: {words}."
        yield Finding("throttled", "warn", engine, case, text)


def _find_growth(engine: str, measured: Iterable[Measurement]) -> Iterator[Finding]:
    # A soak may be several measurements: the first one has what the memory was before.
    vram_mib: dict[str, list[int]] = {}
    for gpu in (gpu for one in measured if one.case == "soak" for gpu in one.gpus):
        seen = vram_mib.setdefault(str(gpu.uuid if gpu.slot is None else gpu.slot), [])
        seen += [value for value in (gpu.vram_before_mib, gpu.vram_after_mib) if value is not None]
    for name, seen in vram_mib.items():
        grown = seen[-1] - seen[0] if seen else 0
        if grown > VRAM_GROWTH_MIB:
            text = (
                f"GPU {name} has {grown:,} MiB more in use after the soak of {engine} than before it "
                f"({seen[0]:,} MiB became {seen[-1]:,}); up to {VRAM_GROWTH_MIB} MiB are usual."
            )
            yield Finding("vram-grew", "fail", engine, "soak", text)


def _find_others(engine: str, measured: Iterable[Measurement]) -> Iterator[Finding]:
    counts: Counter[str] = Counter()
    for one in measured:
        counts[one.case] += one.other_requests or 0
    for case, count in counts.items():
        if count:
            text = f"{engine} answered {count} requests of other clients during {case}, so that its figures count less."
            yield Finding("other-clients", "warn", engine, case, text)


def _compare_ways(
    engine: str, measured: Iterable[Measurement], asked_directly: Iterable[Measurement], tolerance: float
) -> Iterator[Finding]:
    # Of replicas, the slowest one.
    direct = {_key(one)[1:]: one for one in sorted(asked_directly, key=lambda one: -one.tok_s)}
    for one in measured:
        beside = direct.get(_key(one)[1:])
        if one.through == "gateway" and beside and _is_slower(one.tok_s, beside.tok_s, tolerance):
            text = (
                f"{engine} gives {one.tok_s:.1f} tok/s through the gateway and {beside.tok_s:.1f} when it is asked "
                f"directly, {_less(one.tok_s, beside.tok_s)} less: {_name(one)}."
            )
            yield Finding("gateway-slower", "warn", engine, one.case, text)


def _read_speed(plan: Mapping[str, Any] | None) -> Mapping[str, float] | None:
    """Return low, mid, high and ceiling of the plan; None if it has no speed."""
    speed = (plan or {}).get("decode_tok_s")
    return speed if isinstance(speed, Mapping) and {"low", "high", "ceiling"} <= speed.keys() else None


def _compare_plan(engine: str, plan: Mapping[str, Any] | None, measured: Sequence[Measurement]) -> Iterator[Finding]:
    band = _read_speed(plan)
    if band is None:
        return
    low, high, ceiling = band["low"], band["high"], band["ceiling"]
    kinds: dict[str, list[str]] = {}
    for one in _select_protocol(measured):
        speed = one.decode_tok_s
        if speed is not None and not low <= speed <= high:
            what = "below-plan" if speed < low else "above-plan" if speed <= ceiling else "above-ceiling"
            kinds.setdefault(what, []).append(f"{speed:.1f} tok/s at {one.output_tokens} output tokens")
    bandwidth = f" and its ceiling of {ceiling:.1f}, which is the GPUs' memory bandwidth"
    for what, figures in kinds.items():
        compared = "less" if what == "below-plan" else "more"
        tail = f"{bandwidth}: the plan or the measurement is wrong" if what == "above-ceiling" else ""
        text = (
            f"{engine} writes {', '.join(figures)} with one stream, {compared} than the plan's {low:.1f} to "
            f"{high:.1f} tok/s{tail}."
        )
        yield Finding(what, "warn" if what == "above-plan" else "fail", engine, "protocol", text)


def _compare_reference(
    engine: str, first: str, measured: Sequence[Measurement], reference: Sequence[Reference], tolerance: float
) -> Iterator[Finding]:
    for one in _select_protocol(measured):
        for row in reference:
            if (row.engine, row.output_tokens) != (first, one.output_tokens):
                continue
            if _is_slower(one.tok_s, row.tok_s, tolerance):
                text = (
                    f"{engine} gives {one.tok_s:.1f} tok/s at {one.output_tokens} output tokens, "
                    f"{_less(one.tok_s, row.tok_s)} less than the {row.tok_s:.1f} that were measured elsewhere"
                    f"{f' ({row.source})' if row.source else ''}."
                )
                yield Finding("below-reference", "warn", engine, one.case, text)


def _key(one: Measurement) -> tuple[object, ...]:
    return one.through, one.case, one.concurrency, one.input_tokens, one.output_tokens


def _is_slower(speed: float, than: float, tolerance: float) -> bool:
    return speed < than * (1 - tolerance / 100)


def _less(speed: float, than: float) -> str:
    return f"{100 * (1 - speed / than):.0f} %"


def _describe_model(record: EngineRecord) -> str:
    return f"{record.repo} in {record.precision} on {record.tensor_parallel_size} GPUs"


def _find_former(
    run: Run, one: Measurement, former: Iterable[Recorded]
) -> tuple[tuple[Recorded, Measurement] | None, str]:
    """Return the newest former measurement of the same, without failures; or None and why there is none.

    One that was slower than before by itself is passed over for an older one of the same files, image and driver, so
    that a loss is found until it is gone; one that came with another of them was told, and counts from then on.
    """
    now, why = run.engines[one.engine], ""
    found: tuple[Recorded, Measurement] | None = None
    for other in former:
        then = other.run.engines.get(one.engine)
        if other.run.run == run.run or then is None:
            continue
        if other.run.host != run.host:
            why = why or f"because {other.run.run} is of host {other.run.host}"
        elif then.input_hash != now.input_hash and _describe_model(then) != _describe_model(now):
            why = why or f"because in {other.run.run} it was {_describe_model(then)}, and now is {_describe_model(now)}"
        else:
            same = [
                two
                for two in other.measurements
                if two.engines == one.engines and _key(two) == _key(one) and _has_figures(two) and not two.failed
            ]
            if found is not None and _list_inputs(found[0].run, one) != _list_inputs(other.run, one):
                break
            if same:
                found = (other, same[-1])
                findings = other.end.findings if other.end else ()
                if ("slower-than-before", one.label, one.case) not in [
                    (it.what, it.engine, it.case) for it in findings
                ]:
                    break
            why = why or f"because {other.run.run} has no good measurement of this case in the same sizes"
    return (found, "") if found else (None, why or "because there is none with this engine")


def _list_inputs(run: Run, one: Measurement) -> tuple[str | None, ...]:
    return run.engines[one.engine].input_hash, run.image_id, run.driver


def _compare_former(
    run: Run, engine: str, measured: Iterable[Measurement], former: Sequence[Recorded], tolerance: float
) -> Iterator[Finding]:
    pairs: dict[tuple[str, str], list[tuple[Measurement, Recorded, Measurement]]] = {}
    for one in measured:
        found, _ = _find_former(run, one, former)
        if found:
            pairs.setdefault((one.case, one.through), []).append((one, *found))
    for (case, _), rows in pairs.items():
        slower = [row for row in rows if _is_slower(row[0].tok_s, row[2].tok_s, tolerance)]
        if not slower:
            continue
        one, other, before = min(slower, key=lambda row: row[0].tok_s / row[2].tok_s)
        text = (
            f"{engine} gives {one.tok_s:.1f} tok/s, {_less(one.tok_s, before.tok_s)} less than the "
            f"{before.tok_s:.1f} of {other.run.run}: {_name(one)}. {len(slower)} of {len(rows)} measurements of this "
            f"case are slower by more than {tolerance:g} %. {_describe_changes(run, other.run, one.engine)}"
        )
        yield Finding("slower-than-before", "fail", engine, case, text)


def _describe_changes(run: Run, before: Run, engine: str) -> str:
    """Return what the records of two runs say that has changed between them."""
    now, then = run.engines[engine], before.engines[engine]
    changes = [
        f"{name} ({old} became {new})"
        for name, old, new in (
            ("vLLM", before.vllm, run.vllm),
            ("driver", before.driver, run.driver),
            ("image", before.image_id[:19], run.image_id[:19]),
            ("revision of the model", then.revision[:12], now.revision[:12]),
            ("GPUs", ", ".join(then.gpus), ", ".join(now.gpus)),
        )
        if old != new
    ]
    gone, new = _subtract(then.arguments, now.arguments), _subtract(now.arguments, then.arguments)
    if gone or new:
        words = "; ".join(f"{name} {' '.join(part)}" for name, part in (("without", gone), ("with", new)) if part)
        changes.append(f"arguments ({shorten(words, ARGUMENTS_WIDTH)})")
    return f"Changed since then: {', '.join(changes)}." if changes else "No record says what has changed since then."


def _subtract(words: Iterable[str], without: Sequence[str]) -> list[str]:
    """Return the words that are not in `without`; labels that change with each generation are left out."""
    own = (LABEL_GENERATION, LABEL_INPUT_HASH)
    return [word for word in words if word not in without and not any(label in word for label in own)]
