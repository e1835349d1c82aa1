# SPDX-License-Identifier: Apache-2.0
"""What the page is made of. Each part may be missing, and a record may be of another release or damaged."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
ROW = ".row.json"
"""After the name of a host: the file with its row of the index."""
NEWEST = 20
"""Records of a kind that are read."""


def mapping(value: object) -> Row:
    """Return the value if it is an object of JSON, or an empty one."""
    return value if isinstance(value, Mapping) else {}


def list_of(value: object) -> list[Row]:
    """Return the objects of a list of JSON, or none."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, (list, tuple)) else []


def texts_of(value: object) -> list[str]:
    """Return the members of a list of JSON as text, or none."""
    return [str(one) for one in value] if isinstance(value, (list, tuple)) else []


def number(value: object) -> float | None:
    """Return the value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


@dataclass(frozen=True)
class BenchRun:
    run: Row
    measurements: Sequence[Row] = ()
    end: Row = field(default_factory=dict)
    """Empty if the run was killed."""

    @property
    def best(self) -> dict[str, float]:
        """The most tokens per second of one stream of the protocol, by engine."""
        best: dict[str, float] = {}
        for row in self.measurements:
            speed = number(row.get("tok_s"))
            if row.get("case") == "protocol" and speed is not None:
                best[str(row.get("engine"))] = max(best.get(str(row.get("engine")), 0.0), speed)
        return best


@dataclass(frozen=True)
class PageData:
    """What is known of a host. `report` is that of `playbooks/tasks/report.yml`."""

    report: Row
    made_at: str
    status: Row = field(default_factory=dict)
    history: Sequence[Row] = ()
    """Journals, newest first."""
    bench: Sequence[BenchRun] = ()
    """Newest first."""
    quality: Sequence[Row] = ()
    """Newest first; those with `kind: reference` compare tokens with a reference."""
    reference: Sequence[Row] = ()

    @property
    def engines(self) -> list[Row]:
        return list_of(self.report.get("engines"))

    @property
    def status_engines(self) -> list[Row]:
        """The engines as the host tells of them, in the order of the profile."""
        told = {str(one.get("engine")): one for one in list_of(self.status.get("engines"))}
        return [{**engine, **told.get(str(engine.get("engine")), {})} for engine in self.engines]

    @property
    def gpus(self) -> list[Row]:
        return list_of(self.report.get("gpus"))

    @property
    def gpu_models(self) -> Counter[str]:
        return Counter(str(gpu.get("name")) for gpu in self.gpus)

    @property
    def plan(self) -> list[Row]:
        return list_of(self.report.get("plan"))

    def plan_of(self, engine: str) -> Row:
        return next((one for one in self.plan if one.get("engine") == engine), {})

    @property
    def answers(self) -> dict[tuple[str, str], Row]:
        """What the canary says of each engine and served name: in this run, or in the switch to this generation."""
        asked = list_of(self.report.get("completions"))
        for journal in self.history if not asked else ():
            if journal.get("result") == "committed":
                same = journal.get("generation") == self.report.get("generation")
                asked = list_of(journal.get("canary")) if same else []
                break
        return {(str(row.get("engine")), str(row.get("served_name"))): row for row in asked}

    def name_role(self, engine: str, name: str) -> str:
        """Return a served name, with its engine where several serve it."""
        several = sum(name in texts_of(one.get("served_names")) for one in self.engines) > 1
        return f"{name} ({engine})" if several else name

    @property
    def unmet(self) -> dict[str, list[str]]:
        """The served names of each check that did not pass."""
        unmet: dict[str, list[str]] = {}
        for key, row in self.answers.items():
            for check in list_of(row.get("checks")):
                if check.get("outcome") != "passed":
                    told = f"{check.get('check')} {str(check.get('outcome')).replace('_', ' ')}"
                    unmet.setdefault(told, []).append(self.name_role(*key))
        return unmet

    @property
    def switch(self) -> Row:
        """The journal of the last switch, or what is known of it."""
        for journal in (self.report.get("switch"), next(iter(self.history), None), self.report.get("last_switch")):
            if mapping(journal):
                return mapping(journal)
        return {}

    @property
    def protocol(self) -> dict[str, list[Row]]:
        """Of each engine, the measurements of one stream of the newest benchmark that has some."""
        found: dict[str, list[Row]] = {}
        for run in reversed(self.bench):
            newer: dict[str, list[Row]] = {}
            for row in run.measurements:
                if row.get("case") == "protocol" and row.get("concurrency") == 1:
                    newer.setdefault(str(row.get("engine")), []).append(row)
            found |= newer
        return found

    @property
    def suite(self) -> Row:
        """The newest run of the quality suite."""
        return next((record for record in self.quality if record.get("kind") != "reference"), {})

    @property
    def compared(self) -> dict[str, Row]:
        """The newest comparison of each engine with its reference."""
        newest = [record for record in self.quality if record.get("kind") == "reference"]
        return {str(record.get("engine")): record for record in reversed(newest)}

    @property
    def failures(self) -> list[str]:
        """Problems, or the engines that do not serve."""
        silent = [engine for engine in self.engines if engine.get("state") not in (None, "active")]
        return texts_of(self.report.get("problems")) or [
            f"{engine.get('engine')} is {engine.get('state')}." for engine in silent
        ]

    @property
    def warnings(self) -> list[str]:
        overrides = [f"plan_override: {text}" for text in texts_of(self.report.get("overrides"))]
        memory, load = (texts_of(self.report.get(f"{kind}_warnings")) for kind in ("memory", "load"))
        return [*memory, *load, *overrides]

    @property
    def good(self) -> bool:
        return bool(self.engines) and not self.failures

    @property
    def verdict(self) -> str:
        if self.failures:
            return f"{len(self.failures)} problem{'s' if len(self.failures) > 1 else ''}"
        return "serves without known problems" if self.engines else "no engine is known"

    @property
    def index_row(self) -> dict[str, Any]:
        """The line of the host in the index of several hosts."""
        told = {key: self.report.get(key) for key in ("host", "profile", "note")}
        return told | {"verdict": self.verdict, "good": self.good, "made_at": self.made_at}


def complete(report: Row, saved: Row) -> dict[str, Any]:
    """Return the report with the completions and versions that the last complete run saved, where it has none.

    Those of another generation are of other engines, and are left out.
    """
    whole = dict(report)
    if saved.get("generation") == report.get("generation"):
        for key in ("completions", "versions"):
            whole[key] = report.get(key) or saved.get(key)
    return whole


def read_rows(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the index by host, which each page has written beside itself."""
    rows = {}
    for path in directory.glob(f"*{ROW}"):
        host = path.name.removesuffix(ROW)
        rows[host] = {"host": host, "missed": "its row cannot be read"}
        with contextlib.suppress(OSError, ValueError):
            rows[host] = {**mapping(json.loads(path.read_text(encoding="utf-8"))), "host": host}
    return rows


def newest_files(directory: Path, pattern: str) -> list[Path]:
    return sorted(directory.glob(pattern), reverse=True)[:NEWEST]


def read_bench(directory: Path) -> list[BenchRun]:
    """Return the newest runs of the benchmark; what is no record is left out."""
    runs = []
    for path in newest_files(directory, "*.jsonl"):
        lines = []
        try:
            for text in path.read_text(encoding="utf-8").splitlines():
                lines.append(mapping(json.loads(text)))
        except (OSError, ValueError):
            pass  # a run that was killed can end in the middle of a line; what is before it counts
        kinds: dict[str, list[Row]] = {}
        for line in lines:
            kinds.setdefault(str(line.get("kind")), []).append(line)
        if "run" in kinds:
            runs.append(BenchRun(kinds["run"][0], kinds.get("measurement", []), kinds.get("end", [{}])[0]))
    return runs


def read_quality(directory: Path) -> list[Row]:
    """Return the newest records of quality and of reference answers; what is no record is left out."""
    found = []
    for path in newest_files(directory, "*.json"):
        try:
            found.append(mapping(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            continue
    return [record for record in found if record]
