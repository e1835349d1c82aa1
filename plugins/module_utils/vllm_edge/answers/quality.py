# SPDX-License-Identifier: Apache-2.0
"""Asks engines the questions of the quality suite, and judges, records and prints their answers."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..engine.config import EngineConfig
from ..engine.state import stamp
from ..generation.model import Generation
from ..paths import HostPaths
from ..system.files import make_directories, prune, write_durably
from ..system.http import call_in_parallel, request
from ..system.long_run import CommandRefused, LongRun, refusing
from ..system.records import RecordError
from ..text import print_result, table, wrapped
from .checks import Ask, CheckFailedError, Client, EngineSilentError, StillThinkingError
from .engines import choose_engines, describe_engine
from .model import (
    KEPT,
    MODE,
    NOT_SHOWN,
    Answered,
    CaseResult,
    Record,
    Verdict,
    compare,
    find_run,
    list_files,
    read_suites,
)
from .suite import Case, build_prompt, judge, read_cases

REPEATS = 3
TIMEOUT_S = 300.0
"""Seconds of one answer: 1,500 tokens at 5 tok/s."""
LIMIT_S = 3600.0
LISTED = 20


class OutOfTime(Exception):
    """The suite took longer than it may, or nobody follows it any more. The text says which."""


@dataclass(frozen=True)
class Options:
    cases: tuple[Case, ...]
    engines: tuple[str, ...] = ()
    repeats: int = REPEATS
    timeout_s: float = TIMEOUT_S
    limit_s: float = LIMIT_S
    note: str = ""


@dataclass
class Suite:
    """A run of the suite over some engines. Engines are asked in parallel, each one question after the other."""

    options: Options
    ask: Ask = request
    go_on: Callable[[], str] = lambda: ""
    """Returns why the run has to end, or nothing."""
    say: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock()

    def run(self, configs: Sequence[EngineConfig]) -> list[CaseResult]:
        return [result for group in call_in_parallel(self._ask_engine, configs) for result in group]

    def _ask_engine(self, config: EngineConfig) -> list[CaseResult]:
        return [
            self._ask_case(config, case, name)
            for case in self.options.cases
            for name in config.served_names
            if name in (case.served_names or config.served_names[:1])
        ]

    def _ask_case(self, config: EngineConfig, case: Case, name: str) -> CaseResult:
        repeats: list[Answered] = []
        for number in range(1, self.options.repeats + 1):
            why = self.go_on()
            if not why and self.clock() - self._began > self.options.limit_s:
                why = f"it did not finish within {self.options.limit_s:.0f} s"
            if why:
                raise OutOfTime(why)
            self.say(f"{config.engine}: {case.name}, answer {number} of {self.options.repeats}")
            repeats.append(self._ask_once(Client(config, name, self.options.timeout_s, self.ask), case))
        equal = len({one.text for one in repeats}) == 1
        good = [one.ok for one in repeats]
        verdict: Verdict = "passed" if all(good) and equal else "unsteady" if not equal else "failed"
        if any(one.finish == "error" for one in repeats):
            verdict = "error"
        elif any(one.finish == NOT_SHOWN for one in repeats) and all(
            one.ok or one.finish == NOT_SHOWN for one in repeats
        ):
            verdict = NOT_SHOWN
        return CaseResult(
            case.name, case.source, name, config.engine, config.precision, case.expectation, verdict, tuple(repeats)
        )

    def _ask_once(self, client: Client, case: Case) -> Answered:
        payload: dict[str, Any] = {"tools": list(case.tools)} if case.tools else {}
        began = self.clock()
        config, most = client.config, case.max_tokens
        if config.max_model_len:
            most = min(most, config.max_model_len // 2)
        try:
            reply = client.chat_patiently(case.name, build_prompt(case, config), most, system=case.system, **payload)
        except StillThinkingError as error:
            return Answered("", False, f"{error}.", None, round(self.clock() - began, 3), NOT_SHOWN)
        except (CheckFailedError, EngineSilentError) as error:
            return Answered("", False, f"{error}.", None, round(self.clock() - began, 3), "error")
        text = reply.text or json.dumps(reply.calls)
        why = judge(case, reply)
        return Answered(text, not why, why, reply.tokens, round(self.clock() - began, 3), reply.finish)


def build_record(generation: Generation, options: Options, results: Sequence[CaseResult], began_at: str) -> Record:
    verdicts = [result.verdict for result in results]
    asked = {result.engine for result in results}
    cases = json.dumps([asdict(case) for case in options.cases], sort_keys=True)
    return Record(
        run=f"{began_at.replace('-', '').replace(':', '')}-{generation.profile}",
        at=began_at,
        ended_at=stamp(),
        host=socket.gethostname(),
        profile=generation.profile,
        generation=generation.number,
        suite_sha256=hashlib.sha256(cases.encode()).hexdigest(),
        engines={
            name: {**describe_engine(engine), "image": engine.config.image, "image_id": engine.config.image_id}
            for name, engine in generation.engines.items()
            if name in asked
        },
        cases=tuple(results),
        passed=verdicts.count("passed"),
        failed=verdicts.count("failed") + verdicts.count("error"),
        unsteady=verdicts.count("unsteady"),
        findings=tuple(result.describe() for result in results if result.verdict != "passed"),
        note=options.note,
    )


def write_record(record: Record, paths: HostPaths) -> Path:
    """Write the record, remove the oldest ones, and return its path. Raises OSError."""
    path = paths.quality / f"{record.run}.json"
    make_directories(paths.quality, 0o750)
    write_durably(path, json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n", MODE)
    prune(list_files(paths), KEPT, path)
    return path


def render(record: Record) -> list[str]:
    rows = [
        [result.case, result.source, result.served_name, result.precision, result.verdict] for result in record.cases
    ]
    head = f"{record.run}: {record.passed} passed, {record.failed} failed, {record.unsteady} unsteady"
    lines = [*wrapped(record.note), head, "", *table(("case", "source", "served name", "precision", "verdict"), rows)]
    return [*lines, "", *(line for text in record.findings for line in wrapped(text))]


def read_suite_file(path: str) -> tuple[Case, ...]:
    """Read the cases from a JSON file, `-` for standard input. Raises CommandRefused."""
    try:
        cases = read_cases(json.loads(sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecordError) as error:
        raise CommandRefused(f"--suite {path} cannot be used: {error}. playbooks/quality.yml writes it.") from error
    if not cases:
        raise CommandRefused(f"--suite {path} has no case; quality_suite and quality_cases have them.")
    return cases


@refusing
def run_quality(paths: HostPaths, options: Options, long_run: LongRun, *, output: str) -> int:
    """Run the suite, print it, and return the exit status.

    Returns:
        0: no case failed or is unsteady. 1: one did, or is. 2: it was refused, or did not end.
    """

    try:
        with long_run.alone():
            began_at = stamp()
            if trouble := long_run.find_trouble():
                raise OutOfTime(trouble)
            generation, engines = choose_engines(paths, options.engines)
            results = Suite(options, go_on=long_run.find_trouble, say=long_run.say).run(
                [one.config for one in engines.values()]
            )
            if trouble := long_run.find_trouble():  # an answer may have failed because of it
                raise OutOfTime(trouble)
            record = build_record(generation, options, results, began_at)
            path = write_record(record, paths)
    except OutOfTime as ended:
        raise CommandRefused(f"The suite was ended: {ended}. Nothing was recorded.") from ended
    except KeyboardInterrupt as asked:
        raise CommandRefused("The suite was interrupted. Nothing was recorded.") from asked
    except OSError as error:
        raise CommandRefused(f"Progress or record of the suite cannot be written: {error}.") from error
    lines = render(record)
    print_result(output, {"path": str(path), "lines": lines, **asdict(record)}, lines)
    return 1 if record.failed or record.unsteady else 0


@refusing
def run_compare(paths: HostPaths, names: Sequence[str], *, output: str) -> int:
    """Print how two runs differ, and return the exit status: 2 if one is not there."""
    found = [find_run(paths, name) for name in names]
    missing = [name for name, record in zip(names, found, strict=True) if record is None]
    if missing:
        known = ", ".join(dict.fromkeys(record.profile for record in read_suites(paths))) or "none"
        raise CommandRefused(
            f"No run of {' and '.join(missing)} is recorded on this host; recorded are runs of: {known}. "
            "playbooks/quality.yml records one of the profile that serves."
        )
    one, other = (record for record in found if record is not None)
    lines = [f"{one.run} ({one.passed} of {len(one.cases)} passed)"]
    lines += [f"{other.run} ({other.passed} of {len(other.cases)} passed)", ""]
    lines += [line for text in compare(one, other) or ["Verdicts and texts are equal."] for line in wrapped(text)]
    print_result(output, {"lines": lines}, lines)
    return 0


def run_list(paths: HostPaths, *, output: str) -> int:
    records = list(read_suites(paths))[:LISTED][::-1]
    rows = [[one.run, str(one.passed), str(one.failed), str(one.unsteady)] for one in records]
    lines = table(("run", "passed", "failed", "unsteady"), rows) if rows else ["no run is recorded"]
    print_result(output, [asdict(record) for record in records], lines)
    return 0
