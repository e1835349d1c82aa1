# SPDX-License-Identifier: Apache-2.0
"""The sections of the page. What is not recorded is said in one sentence, with the command that records it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .data import BenchRun, PageData, Row, list_of, mapping, number, texts_of
from .figures import Figure, amount
from .markup import Content, Html, escape, facts, join, paragraphs, table, tag

SECONDS_IN_TEXT = re.compile(r"T(\d\d:\d\d):\d\dZ$")


@dataclass(frozen=True)
class Drawn:
    """A figure with its SVG for wide and narrow screens; both are empty if it could not be drawn."""

    figure: Figure
    wide: str = ""
    narrow: str = ""


Figures = Mapping[str, Drawn]


def moment(stamp: object) -> Html:
    """Return `2026-11-25 02:19 UTC` for a time of a record."""
    text = str(stamp or "unknown")
    return tag("span", SECONDS_IN_TEXT.sub(r" \1 UTC", text), class_="nowrap")


def command(playbook: str, data: PageData) -> Html:
    return tag("code", f"ansible-playbook playbooks/{playbook} --limit {data.host}")


def missing(what: str, playbook: str, data: PageData) -> Html:
    return tag("p", f"{what} ", command(playbook, data), ".", class_="muted")


def long(text: Content) -> Html:
    return tag("span", text, class_="long")


def show(drawn: Drawn | None) -> Html:
    """Return a figure: the plot, its legend, and its values as a table, which is all there is without a plot."""
    if drawn is None:
        return Html("")
    figure = drawn.figure
    values = table(f"{figure.title}: values", figure.headings, figure.rows, figure.right)
    if not drawn.wide:
        return values
    legend = [
        tag("li", tag("span", style=f"background:var(--{colour})", aria_hidden="true"), words)
        for words, colour in figure.legend
    ]
    return tag(
        "figure",
        tag("figcaption", figure.title, id=f"caption-{figure.name}"),
        tag("ul", *legend, class_="legend"),
        tag(
            "div",
            tag("div", Html(drawn.wide), class_="wide"),
            tag("div", Html(drawn.narrow), class_="narrow"),
            role="img",
            aria_labelledby=f"caption-{figure.name}",
            aria_describedby=f"text-{figure.name}",
        ),
        tag("p", figure.text, id=f"text-{figure.name}", hidden="hidden"),
        tag("details", tag("summary", f"Values of the figure: {figure.title}"), values),
    )


def write_overview(data: PageData, _figures: Figures) -> Html:
    gpus: dict[str, int] = {}
    for gpu in data.gpus:
        gpus[str(gpu.get("name"))] = gpus.get(str(gpu.get("name")), 0) + 1
    gateway = mapping(data.report.get("gateway"))
    ends = str(gateway.get("certificate_ends") or "")[:10]
    warnings = [
        *texts_of(data.report.get("memory_warnings")),
        *texts_of(data.report.get("load_warnings")),
        *[f"plan_override: {text}" for text in texts_of(data.report.get("overrides"))],
    ]
    return join(
        [
            facts(
                [
                    ("Profile", f"{data.report.get('profile')}, generation {data.report.get('generation')}"),
                    ("GPUs", ", ".join(f"{count} {name}" for name, count in gpus.items())),
                    ("Gateway", describe_gateway(gateway)),
                    ("Certificate ends", ends),
                ]
            ),
            tag("h3", "Problems") if data.failures else "",
            paragraphs(data.failures, "bad"),
            tag("h3", "Warnings") if warnings else "",
            paragraphs(warnings, "warn"),
            "" if data.failures or warnings else tag("p", "No problems and no warnings are known."),
        ]
    )


def describe_gateway(gateway: Row) -> str:
    """Return the state of the gateway and where it listens, without a scheme: nothing here is to be followed."""
    if not gateway:
        return "none"
    places = [
        f"{address.partition('://')[2]}{' (TLS)' if address.startswith('https') else ''}"
        for address in texts_of(gateway.get("addresses"))
    ]
    return f"{gateway.get('active_state')} at {', '.join(places)}"


def write_roles(data: PageData, _figures: Figures) -> Html:
    states = mapping(mapping(data.report.get("gateway")).get("roles"))
    asked = {str(row.get("served_name")): row for row in list_of(data.report.get("completions"))}
    if not asked and data.history:
        asked = {str(row.get("served_name")): row for row in list_of(data.history[0].get("canary"))}
    rows = []
    for engine in data.status_engines:
        for name in texts_of(engine.get("served_names")):
            canary = asked.get(name, {})
            checks = list_of(canary.get("checks"))
            passed = sum(check.get("outcome") == "passed" for check in checks)
            told = "not asked" if not canary else "failed" if not canary.get("ok") else f"{passed} of {len(checks)}"
            state = mapping(states.get(name)).get("state")
            rows.append(
                [
                    name,
                    str(engine.get("engine")),
                    str(engine.get("repo") or engine.get("model")),
                    str(engine.get("precision")),
                    ", ".join(texts_of(engine.get("slots"))),
                    str(engine.get("port") or "none"),
                    str(state or engine.get("state") or "unknown"),
                    tag("span", told, class_="bad" if told == "failed" else None),
                ]
            )
    unmet: dict[str, list[str]] = {}
    for name, row in asked.items():
        for check in list_of(row.get("checks")):
            if check.get("outcome") != "passed":
                told = f"{check.get('check')} {str(check.get('outcome')).replace('_', ' ')}"
                unmet.setdefault(told, []).append(name)
    notes = [f"{told}: {', '.join(names)}." for told, names in unmet.items()] + [
        f"{row.get('served_name')}: {row.get('error')}" for row in asked.values() if row.get("error")
    ] + [
        f"{engine.get('engine')}: peer-to-peer is off: {'; '.join(texts_of(engine.get('peer_to_peer_off')))}."
        for engine in data.engines
        if engine.get("peer_to_peer_off")
    ] + [
        f"{engine.get('engine')}: accepted risks: {', '.join(texts_of(engine.get('accept_risk')))}."
        for engine in data.engines
        if engine.get("accept_risk")
    ]  # fmt: skip
    if not rows:
        return tag("p", "No engine of the profile serves a name.", class_="muted")
    headings = ["served name", "engine", "model", "precision", "GPUs", "port", "state", "checks passed"]
    return join(
        [
            table("Served names and their engines", headings, rows),
            paragraphs(notes),
            "" if asked else missing("No answers are recorded; they are asked for by", "verify.yml", data),
        ]
    )


def write_memory(data: PageData, figures: Figures) -> Html:
    drift = list_of(data.report.get("drift"))
    names = {str(gpu.get("uuid")): f"GPU {gpu.get('index')}" for gpu in data.gpus}
    rows = []
    for row in drift:
        measured, planned = number(row.get("measured")), number(row.get("planned"))
        far = "unknown" if measured is None or planned is None else f"{measured - planned:+,.0f}"
        within = {True: "within", False: "drift"}.get(row.get("within"), "not told")  # type: ignore[arg-type]
        what = names.get(str(row.get("what")), str(row.get("what")))
        part = str(row.get("component")).replace("_mib", " MiB").replace("_", " ")
        verdict = tag("span", within, class_="bad" if within == "drift" else None)
        rows.append([what, part, amount(planned), amount(measured), far, amount(number(row.get("tolerance"))), verdict])
    far_off = sum(row.get("within") is False for row in drift)
    summary = f"Plan against measurement: {len(rows) - far_off} of {count(len(rows), 'figure')} within the tolerance"
    headings = ["engine or GPU", "part", "planned", "measured", "difference", "tolerated", "verdict"]
    return join(
        [
            show(figures.get("memory")) or tag("p", "No GPU was measured.", class_="muted"),
            tag(
                "details",
                tag("summary", summary),
                table("Plan against measurement", headings, rows, frozenset({2, 3, 4, 5})),
                open="open" if far_off else None,
            )
            if rows
            else "",
            "" if data.plan else tag("p", "The engines were not planned in this run.", class_="muted"),
        ]
    )


def write_speed(data: PageData, figures: Figures) -> Html:
    parts: list[Content] = [show(figures.get("speed"))]
    if not data.bench:
        return join([*parts, missing("No benchmark is recorded; this one measures the speed:", "bench.yml", data)])
    run = data.bench[0]
    found = list_of(run.end.get("findings"))
    parts += [
        tag("h3", "Newest benchmark"),
        tag("p", moment(run.run.get("at")), f": {describe_end(run)}. vLLM {run.run.get('vllm')}, "
            f"driver {run.run.get('driver') or 'unknown'}."),
        tag("p", str(run.run.get("note")), class_="bad") if run.run.get("note") else "",
        paragraphs([f"{one.get('severity')}: {one.get('text')}" for one in found]),
    ]  # fmt: skip
    rows = []
    for row in run.measurements:
        first, gap = mapping(row.get("ttft_ms")), mapping(row.get("itl_ms"))
        watts = [number(gpu.get("power_w_mean")) for gpu in list_of(row.get("gpus"))]
        power = None if None in watts or not watts else sum(value or 0.0 for value in watts)
        joules = number(row.get("joules_per_token"))
        rows.append(
            [
                str(row.get("engine")),
                str(row.get("case")),
                "gateway" if row.get("through") == "gateway" else "direct",
                f"{amount(number(row.get('input_tokens')))} + {amount(number(row.get('output_tokens')))}",
                amount(number(row.get("concurrency"))),
                amount(number(row.get("tok_s")), 1),
                amount(number(first.get("p50"))),
                amount(number(first.get("p95"))),
                amount(number(gap.get("p50")), 1),
                amount(power),
                amount(joules, 2),
                amount(number(row.get("failed"))),
            ]
        )
    headings = ["engine", "case", "way", "tokens in + out", "at once", "tok/s", "first token, ms", "its p95",
                "per token, ms", "W", "J per token", "failed"]  # fmt: skip
    if rows:
        taken = table("Measurements of the newest benchmark", headings, rows, frozenset(range(3, 12)))
        parts.append(tag("details", tag("summary", f"All measurements of the newest benchmark: {len(rows)}"), taken))
    return join(parts)


def count(some: int, what: str) -> str:
    return f"{some} {what}{'' if some == 1 else 's'}"


def describe_end(run: BenchRun) -> str:
    if not run.end:
        return "it still runs, or was killed"
    words = {"passed": "passed", "findings": count(len(list_of(run.end.get("findings"))), "finding")}
    error = f" ({run.end.get('error')})" if run.end.get("error") else ""
    return f"{words.get(str(run.end.get('verdict')), str(run.end.get('verdict')))}{error}"


def write_loads(data: PageData, figures: Figures) -> Html:
    shown = show(figures.get("loads"))
    recorded = any(mapping(engine.get("load_phases")) for engine in data.status_engines)
    told = "The phases of a load are recorded the next time an engine starts."
    return join(
        [
            shown or tag("p", "No load of an engine is recorded.", class_="muted"),
            "" if recorded else tag("p", told, class_="muted"),
        ]
    )


def write_switch(data: PageData, figures: Figures) -> Html:
    switch = data.switch
    if not switch:
        return missing("No switch is recorded; the first one is made by", "site.yml", data)
    head = f": {describe_way(switch)}, {switch.get('result') or 'not finished'}"
    whole = number(switch.get("seconds"))
    away = [name for name, down in mapping(switch.get("downtime")).items() if seconds_away(down)]
    return join(
        [
            tag("p", moment(switch.get("started_at")), head, f" after {amount(whole, 1)} s." if whole else ".",
                f" {switch.get('message') or ''}"),
            "" if away else tag("p", "No served name was without an answer."),
            show(figures.get("switch")) or tag("p", "Its phases are in the host's history.", class_="muted"),
        ]
    )  # fmt: skip


def describe_way(switch: Row) -> str:
    former = switch.get("from_profile") or "nothing"
    return f"{former} to {switch.get('profile')} (generation {switch.get('generation')})"


def write_quality(data: PageData, _figures: Figures) -> Html:
    suites = [record for record in data.quality if record.get("kind") != "reference"]
    parts: list[Content] = []
    if suites:
        newest = suites[0]
        counts = ", ".join(f"{amount(number(newest.get(key)))} {key}" for key in ("passed", "failed", "unsteady"))
        parts.append(tag("p", moment(newest.get("at")), f", {newest.get('profile')}: {counts}."))
        rows = []
        for case in list_of(newest.get("cases")):
            why = next((one.get("why") for one in list_of(case.get("repeats")) if one.get("why")), "")
            verdict = str(case.get("verdict"))
            kind = {"passed": "good", "unsteady": "warn"}.get(verdict, "bad")
            rows.append(
                [
                    str(case.get("case")),
                    str(case.get("served_name")),
                    str(case.get("engine")),
                    str(case.get("expectation")),
                    tag("span", verdict, class_=kind),
                    long(str(why or "")),
                ]
            )
        if rows:
            headings = ["case", "served name", "engine", "expected", "verdict", "why"]
            parts.append(table("Cases of the newest quality run", headings, rows))
    else:
        parts.append(missing("No quality run is recorded; this one asks the engines:", "quality.yml", data))
    compared: dict[str, Row] = {}
    for record in data.quality:
        if record.get("kind") == "reference":
            compared.setdefault(str(record.get("engine")), record)
    rows = [
        [
            engine,
            str(case.get("case")),
            f"{amount(number(case.get('agreed')))} of {amount(number(case.get('compared')))}",
            str(case.get("finding")),
            long(str(case.get("text") or "")),
        ]
        for engine, record in compared.items()
        for case in list_of(record.get("cases"))
    ]
    if rows:
        headings = ["engine", "prompt", "equal tokens", "finding", "explanation"]
        parts.append(table("Answers against a reference implementation", headings, rows, frozenset({2})))
    return join(parts)


def write_history(data: PageData, _figures: Figures) -> Html:
    parts: list[Content] = []
    switches = list(data.history) or list_of(data.status.get("history"))
    if switches:
        rows = [
            [
                moment(row.get("started_at")),
                describe_way(row),
                str(row.get("result") or "not finished"),
                amount(number(row.get("seconds")), 1),
                long(describe_downtime(mapping(row.get("downtime")))),
                str(row.get("asked_by")),
            ]
            for row in switches[:20]
        ]
        headings = ["began", "switch", "result", "seconds", "seconds without an answer", "asked by"]
        parts.append(table("Switches", headings, rows, frozenset({3})))
    else:
        parts.append(tag("p", "No switch is recorded.", class_="muted"))
    if data.bench:
        rows = []
        for run in data.bench:
            best: dict[str, float] = {}
            for row in run.measurements:
                speed = number(row.get("tok_s"))
                if row.get("case") == "protocol" and speed is not None:
                    best[str(row.get("engine"))] = max(best.get(str(row.get("engine")), 0.0), speed)
            speeds = ", ".join(f"{engine} {speed:.1f}" for engine, speed in best.items())
            rows.append(
                [
                    moment(run.run.get("at")),
                    str(run.run.get("profile")),
                    str(run.run.get("vllm")),
                    long(speeds or "no protocol measured"),
                    describe_end(run),
                    long(str(run.run.get("note") or "")),
                ]
            )
        headings = ["began", "profile", "vLLM", "most tok/s of one stream", "end", "note"]
        parts.append(table("Benchmarks", headings, rows))
    return join(parts)


def seconds_away(down: object) -> float | None:
    """Return the seconds of a downtime, which is a journal's, or a number in the status."""
    return number(down["seconds"] if isinstance(down, Mapping) and "seconds" in down else down)


def describe_downtime(downtime: Row) -> str:
    said = []
    for name, down in downtime.items():
        if seconds_away(down):
            said.append(f"{name} {amount(seconds_away(down), 1)}")
    return ", ".join(said) or "none"


def write_versions(data: PageData, _figures: Figures) -> Html:
    versions = dict(mapping(data.report.get("versions")))
    pins = texts_of(data.report.get("pins"))
    models = [
        [str(engine.get("model")), long(str(engine.get("repo") or "")), tag("code", str(engine.get("revision") or ""))]
        for engine in data.status_engines
    ]
    return join(
        [
            table(
                "Versions", ["software", "version"], [[str(key), long(str(value))] for key, value in versions.items()]
            )
            if versions
            else missing("The versions are recorded by", "site.yml", data),
            table("Models", ["model", "repository", "commit"], models) if models else "",
            tag("h3", "To pin in the inventory") if pins else "",
            tag("pre", escape("\n".join(pins)), tabindex=0, role="region", aria_label="Lines for the inventory")
            if pins
            else "",
        ]
    )


SECTIONS: dict[str, Callable[[PageData, Figures], Html]] = {
    "Overview": write_overview,
    "Roles": write_roles,
    "Memory": write_memory,
    "Speed": write_speed,
    "Loading": write_loads,
    "Last switch": write_switch,
    "Quality": write_quality,
    "History": write_history,
    "Versions": write_versions,
}
"""The sections in their order, by heading."""
