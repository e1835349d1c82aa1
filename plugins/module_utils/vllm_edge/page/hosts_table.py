# SPDX-License-Identifier: Apache-2.0
"""What plays say of all hosts at their end: a table with a line for each and a total, and what fleets serve together.

These are pure functions over Ansible's variables of the hosts. A host that failed lacks those of what came later.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..text import shorten, table, wrapped
from .data import list_of, mapping, number, texts_of

Variables = Mapping[str, Any]
Cells = dict[str, Any]
"""By heading. Numbers (int) are added up, texts of COUNTED are counted; None is not known. Empty: nothing is known."""

NOTE = "note"
ABSENT = "not reached, or failed before"
LONGEST_NOTE = 60
COUNTED = ("profile", "verdict", "result")
SERVED = ("up", "provisional", "stand-in", "leaving")


def _read_status(host: Variables) -> Variables:
    asked = list_of(mapping(host.get("serving_status_output")).get("results"))
    try:
        return mapping(json.loads(str(asked[-1]["stdout"])))
    except (LookupError, ValueError):
        return {}


def _describe_status(host: Variables) -> Cells:
    if not (status := _read_status(host)):
        absent = mapping(mapping(host.get("serving_program")).get("stat")).get("exists") is False
        return {NOTE: "vllm-edge is not installed"} if absent else {}
    roles = mapping(mapping(status.get("gateway")).get("roles"))
    other = [f"{name} {role['state']}" for name, role in roles.items() if role["state"] not in SERVED]
    profile = mapping(status.get("active_profile"))
    return {
        "profile": profile.get("profile"),
        "generation": str(profile.get("generation", "-")),
        "roles up": len(roles) - len(other) if roles else None,
        "away": len(other) if roles else None,
        "problems": len(texts_of(status.get("problems"))),
        NOTE: ", ".join(other) if profile else "no profile is active",
    }


def _describe_doctor(host: Variables) -> Cells:
    document = mapping(mapping(host.get("serving_doctor")).get("doctor"))
    wrong = [str(check["check"]) for check in list_of(document.get("checks")) if check["state"] == "fail"]
    counts = dict(mapping(document.get("summary")))
    return {**counts, NOTE: f"failed: {', '.join(wrong)}" if wrong else ""} if counts else {}


def _find_profile(host: Variables) -> str:
    return str(host.get("plan_profile") or host["serving_profile"])


def _find_plan(host: Variables) -> Variables:
    plans = mapping(mapping(host.get("serving_plan_result")).get("plans"))
    return mapping(plans.get(_find_profile(host))) if plans else {}


def _describe_plan(host: Variables) -> Cells:
    if not (plan := _find_plan(host)):
        return {}
    gpus = [gpu for engine in plan["engines"] for gpu in engine["gpus"]]
    return {
        "profile": _find_profile(host),
        "verdict": str(plan["verdict"] or "cannot be planned"),
        "least free MiB": f"{min(gpu['free_bytes'] for gpu in gpus) // 2**20:,}" if gpus else None,
    }


def _describe_advice(host: Variables) -> Cells:
    if not (advice := mapping(mapping(host.get("serving_advise_result")).get("advice"))):
        return {}
    best = advice["profiles"][advice["chosen"]["rank"] - 1]
    parallel = ("replicas", "tensor_parallel_size", "pipeline_parallel_size")
    words = [f"{engine['model']} {'x'.join(str(engine[key]) for key in parallel)}" for engine in best["engines"]]
    speed = number(mapping(best["tok_s_estimate"]).get("mid"))
    return {
        "engines (replicas x TP x PP)": ", ".join(words),
        "tok/s": None if speed is None else f"{speed:.1f}",
        "context": f"{best['context']:,}",
        "free GPUs": int(best["gpus_free"]),
    }


def _describe_report(host: Variables) -> Cells:
    failed, left = host.get("serving_switch_error"), host.get("serving_switch_stop")
    waits = mapping(host.get("nvidia_driver_result")).get("awaits_reboot")
    report = mapping(host.get("serving_report"))
    if not (failed or waits or report or "stat" in mapping(host.get("serving_active_file"))):
        return {}
    result = mapping(host.get("vllm_engine_result")).get("result") or ("not switched" if report else "nothing serves")
    return {
        "profile": report.get("profile"),
        "generation": str(report.get("generation", "-")),
        "result": "left" if left else "failed" if failed else "awaits a reboot" if waits else result.replace("_", " "),
        NOTE: str(failed or ""),
    }


PLAYS: Mapping[str, Callable[[Variables], Cells]] = {
    "status": _describe_status,
    "doctor": _describe_doctor,
    "plan": _describe_plan,
    "advise": _describe_advice,
    "report": _describe_report,
}


def _list_fleets(hosts: Sequence[str], every: Mapping[str, Variables]) -> dict[str, list[str]]:
    fleets: dict[str, list[str]] = {}
    for host in hosts:
        if fleet := every[host].get("serving_fleet"):
            fleets.setdefault(str(fleet), []).append(host)
    return fleets


def _compare_status(fleet: str, hosts: Sequence[str], every: Mapping[str, Variables]) -> Iterator[str]:
    """Say which hosts of a fleet have another profile than their inventory, or serve it otherwise than others."""
    alike: dict[str, dict[object, list[str]]] = {}
    for host in hosts:
        status = _read_status(every[host])
        expected, profile = status.get("expected_profile"), mapping(status.get("active_profile")).get("profile")
        if expected and profile != expected:
            yield from wrapped(f"Fleet {fleet}: {host} has {profile or 'no profile'}, its inventory {expected}.")
        if profile:
            digest = mapping(status.get("fleet")).get("digest")
            alike.setdefault(profile, {}).setdefault(digest, []).append(host)
    for profile, served in alike.items():
        if len(served) > 1:
            some = " and ".join(", ".join(hosts) for hosts in served.values())
            what = f"differ in models, images or arguments of {profile}: run site.yml."
            yield from wrapped(f"Fleet {fleet}: {some} {what}")


def _plan_fleet(hosts: Sequence[str], planned: Sequence[str], every: Mapping[str, Variables]) -> Iterator[str]:
    """Yield lines with who serves each role, also without any one host, and at each step of a rolling switch.

    A host of the play counts if its plan says that it starts, another one of the inventory always.
    """
    serves: dict[str, list[str]] = {}
    for host in hosts:
        plan = _find_plan(every[host])
        if plan or host not in planned:
            expanded = every[host]["serving_expanded"]
            engines = expanded["profiles"][_find_profile(every[host])]["engines"]
            served = {role for name in engines for role in expanded["engines"][name]["served_names"]}
            for role in expanded["roles"]:
                serves.setdefault(role, []).extend([host] * (role in served and plan.get("verdict", "fits") == "fits"))
    size = min(int(every[host].get("serving_switch_serial") or 1) for host in hosts)
    rows = [[role, ", ".join(some) or "nobody", some[0] if len(some) == 1 else "-"] for role, some in serves.items()]
    yield from table(["role", "served by", "by nobody without"], rows)
    if none := [role for role, some in serves.items() if not some]:
        yield from wrapped(f"advice: no host serves {', '.join(none)}; give one of them a profile that does.")
    for step in (hosts[start : start + size] for start in range(0, len(hosts), size)):
        if gap := [role for role, some in serves.items() if some and set(some) <= set(step)]:
            yield from wrapped(
                f"advice: while {', '.join(step)} would switch, nobody serves {', '.join(gap)}, so it is refused; let "
                "others serve that, too, or switch fewer at a time (serving_switch_serial), or set serving_fleet_gap."
            )


def _total(heading: str, values: Sequence[Any]) -> str:
    if heading in COUNTED:
        return ", ".join(f"{count} {value}" for value, count in Counter(filter(None, values)).items())
    numbers = [value for value in values if isinstance(value, int)]
    return str(sum(numbers)) if numbers else ""


def render(kind: str, hosts: Sequence[str], every: Mapping[str, Variables], group: Sequence[str]) -> list[str]:
    """Return the table of a play, one of PLAYS, then what is to be known of fleets, as lines.

    `hosts` are those of the play, also failed ones, `group` all in the inventory's order; `every` has their variables.
    """
    fleets = _list_fleets(hosts, every)
    own = {host: {"host": host, **({"fleet": None} if fleets else {})} for host in hosts}
    own |= {host: {"host": host, "fleet": fleet} for fleet, some in fleets.items() for host in some}
    rows = [own[host] | (PLAYS[kind](every[host]) or {NOTE: ABSENT}) for host in hosts]
    columns = {one: [row.get(one) for row in rows] for row in rows for one in row if one != NOTE}
    if any(row.get(NOTE) for row in rows):
        columns[NOTE] = [shorten(row.get(NOTE) or " ", LONGEST_NOTE) for row in rows]
    total = [f"{len(hosts)} hosts", *(_total(one, columns[one]) for one in [*columns][1:])]
    cells = [["-" if value is None else str(value) for value in row] for row in zip(*columns.values(), strict=True)]
    lines = table([*columns], [*cells, total], frozenset(at for at, text in enumerate(total) if text.isdigit()))
    for fleet, some in fleets.items():
        if kind == "status":
            lines += _compare_status(fleet, some, every)
        if kind == "plan":
            lines += ["", f"Fleet {fleet}:", *_plan_fleet(_list_fleets(group, every)[fleet], hosts, every)]
    return lines
