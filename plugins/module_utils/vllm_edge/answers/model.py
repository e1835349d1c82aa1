# SPDX-License-Identifier: Apache-2.0
"""The records of the quality suite, in /var/lib/vllm-edge/quality/, and their comparison."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import Any, Final, Literal

from ..paths import HostPaths
from ..system.files import make_directories, prune, write_durably
from ..system.long_run import list_records
from ..system.records import read_record
from .checks import quote

MODE = 0o640
KEPT = 200
NOT_SHOWN: Final = "not_shown"
"""Verdict and end of an answer where the model thought for all its tokens, so that nothing can be said of it."""
Verdict = Literal["passed", "failed", "unsteady", "error", "not_shown"]


@dataclass(frozen=True)
class Answered:
    text: str
    ok: bool
    why: str
    """Why it is not the expected one; empty if it is."""
    tokens: int | None
    seconds: float
    finish: str


@dataclass(frozen=True)
class CaseResult:
    """What one served name answered to one case."""

    case: str
    source: str
    served_name: str
    engine: str
    precision: str
    expectation: str
    verdict: Verdict
    """`unsteady` if its repeats are not equal, although nothing in them is random."""
    repeats: tuple[Answered, ...]

    def describe(self) -> str:
        """Return in one sentence why it did not pass."""
        first = next((one for one in self.repeats if one.why), None)
        why = first.why if first else ""
        if self.verdict == "unsteady":
            good = sum(one.ok for one in self.repeats)
            why = f"{good} of {len(self.repeats)} answers are as expected, and they differ. {why}".strip()
        return f"{self.case} of {self.served_name} ({self.engine}, {self.precision}): {why}"


@dataclass(frozen=True)
class Record:
    run: str
    at: str
    ended_at: str
    host: str
    profile: str
    generation: int
    suite_sha256: str
    engines: Mapping[str, Mapping[str, Any]]
    """By name what the engine was: model, repo, revision, precision, image_id, arguments."""
    cases: tuple[CaseResult, ...]
    passed: int
    failed: int
    unsteady: int
    findings: tuple[str, ...]
    note: str = ""
    kind: str = "suite"
    schema: int = 1


def write_record(record: Record | Mapping[str, Any], paths: HostPaths) -> Path:
    """Write the record of a suite or of a reference answer, remove the oldest ones, and return its path.

    Raises OSError.
    """
    data = asdict(record) if isinstance(record, Record) else record
    path = paths.quality / f"{data['run']}.json"
    make_directories(paths.quality, 0o750)
    write_durably(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n", MODE)
    prune(list_files(paths), KEPT, path)
    return path


def list_files(paths: HostPaths) -> list[Path]:
    return list_records(paths.quality, "*.json")


def read_suites(paths: HostPaths) -> Iterator[Record]:
    for path in reversed(list_files(paths)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("kind") == "suite":
                yield read_record(Record, data)


def find_run(paths: HostPaths, name: str) -> Record | None:
    """Return the run of this name, or the newest of a profile of this name; None if there is none."""
    return next((record for record in read_suites(paths) if name in (record.run, record.profile)), None)


def compare(one: Record, other: Record) -> list[str]:
    """Return how two runs differ, one line for each case, served name and engine of which something differs.

    The suites and the engines may differ: what only one of them asked is named. An engine is compared with itself, and
    if the other run does not have it, with each engine that serves the name there.
    """
    lines = [] if one.suite_sha256 == other.suite_sha256 else ["The two runs were asked different suites."]
    mine, theirs = _group(one), _group(other)
    here, over_there = ({name: None for _, name in results} for results in (mine, theirs))
    shared = here.keys() & over_there.keys()
    for case, name in dict.fromkeys([*mine, *theirs]):
        results, there = mine.get((case, name), {}), theirs.get((case, name), {})
        if name in shared and not (results and there):
            lines.append(f"{case} of {name}: only in {one.run if results else other.run}.")
        for engine, other_engine in product(results, there):
            if engine == other_engine or engine not in there or other_engine not in results:
                lines += _compare_results(results[engine], there[other_engine])
    for record, names in ((one, here), (other, over_there)):
        if only := [name for name in names if name not in shared]:
            lines.append(f"Only {record.run} asked {', '.join(only)}.")
    return lines


def _group(run: Record) -> dict[tuple[str, str], dict[str, CaseResult]]:
    """Return the results by case and served name, and of those by engine."""
    found: dict[tuple[str, str], dict[str, CaseResult]] = {}
    for result in run.cases:
        found.setdefault((result.case, result.served_name), {})[result.engine] = result
    return found


def _compare_results(result: CaseResult, there: CaseResult) -> Iterator[str]:
    name = f"{result.case} of {result.served_name}"
    texts = [each.repeats[0].text if each.repeats else "" for each in (result, there)]
    if result.verdict != there.verdict:
        yield (
            f"{name}: {result.verdict} with {result.precision} ({result.engine}), {there.verdict} with "
            f"{there.precision} ({there.engine}). {quote(texts[0])} / {quote(texts[1])}"
        )
    elif texts[0] != texts[1]:
        at = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
        parts = [quote(text[max(0, at - 20) :], 60) for text in texts]
        yield (
            f"{name}: both {result.verdict} ({' / '.join(dict.fromkeys((result.engine, there.engine)))}), texts differ "
            f"from character {at} on: {' / '.join(parts)}"
        )
