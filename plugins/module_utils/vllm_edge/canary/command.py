# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge canary`: real questions to each served name. /health says that processes live; only answers say that the
engine serves. What is asked, and what counts as a good answer, stands in canary_checks.py.

Every served name gets every check, the names of an engine side by side: they share its model, but a client that uses
a name relies on all of it.

A run of an engine's container that has passed is recorded in /var/lib/vllm-edge/engines/<engine>.canary.json. As long
as that run goes on, `--unless-passed` asks it for one token and hands on the recorded results.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from ..engine.config import EngineConfig, EngineConfigError, load_config
from ..engine.state import stamp
from ..names import LABEL_INPUT_HASH
from ..paths import HostPaths
from ..system.docker import Container, DockerAway, DockerEngine, DockerRefused
from ..system.files import write_durably
from ..system.http import Answer, request
from .checks import (
    NAMES,
    QUESTION,
    Ask,
    Check,
    CheckFailedError,
    Client,
    EngineSilentError,
    Outcome,
    error_text,
    run_checks,
)

TOKEN_DEADLINE_S = 20.0
"""Seconds that an engine which has passed before may take for one token, other requests beside it."""


@dataclass(frozen=True)
class Result:
    """What one served name showed. `completion` and `tokens` are those of the first check.

    `passed_at` is when all checks were passed, in UTC; None where one failed. `token_s` is set where they were passed
    in an earlier run and the engine was only asked for one token now: the seconds that this took.
    """

    engine: str
    served_name: str
    ok: bool
    seconds: float
    completion: str
    tokens: int | None
    error: str | None
    checks: tuple[Check, ...]
    passed_at: str | None = None
    token_s: float | None = None


def models_of(answer: Answer) -> list[str]:
    """Names that /v1/models lists; an answer of another shape is told as a ValueError."""
    data = answer.json()
    if not isinstance(data, Mapping) or not isinstance(data.get("data"), list):
        raise ValueError("the answer has no list `data`")
    return [str(item["id"]) for item in data["data"] if isinstance(item, Mapping) and "id" in item]


def next_step(config: EngineConfig) -> str:
    return f"`systemctl status {config.unit}` and `vllm-edge explain {config.engine}` tell how the engine does"


def ask_models(config: EngineConfig, timeout_s: float, ask: Ask = request) -> tuple[list[str], str | None]:
    """What the engine serves, or why that is not known."""
    answer = ask(config.url, "/v1/models", timeout_s)
    if answer.status is None:
        return [], f"no answer to GET /v1/models at {config.url}: {answer.error}. {next_step(config)}"
    if not answer.ok:
        return [], f"GET /v1/models answered HTTP {answer.status}: {error_text(answer)}"
    try:
        return models_of(answer), None
    except ValueError as error:
        return [], f"GET /v1/models answered something else than a list of models: {error}"


def fell_silent(config: EngineConfig, timeout_s: float, ask: Ask) -> str:
    """What the silence of an engine that had answered means."""
    health = ask(config.url, "/health", min(timeout_s, config.health_timeout_s))
    if health.ok:
        return f"/health still answers: the engine lives, and the request hangs. {next_step(config)}"
    how = "does not answer either" if health.status is None else f"answers {health.words()}"
    return f"/health {how}: the engine died in the middle of the canary. {next_step(config)}"


def result_of(
    config: EngineConfig, name: str, checks: Sequence[Check], text: str = "", tokens: int | None = None
) -> Result:
    """All checks of a name; those that were not reached are skipped, and say so."""
    reached = {check.check for check in checks}
    missing = [
        Check(check, Outcome.SKIPPED, 0.0, "not asked: see the failure before it")
        for check in NAMES
        if check not in reached
    ]
    error = next((check.detail for check in checks if check.outcome is Outcome.FAILED), None)
    seconds = round(sum(check.seconds for check in checks), 3)
    return Result(config.engine, name, error is None, seconds, text, tokens, error, tuple([*checks, *missing]))


def canary(config: EngineConfig, timeout_s: float, ask: Ask = request) -> list[Result]:
    """All served names, in order. Once the engine does not answer at all, nothing else is asked."""
    listed, problem = ask_models(config, timeout_s, ask)
    if problem is not None:
        failed = Check(NAMES[0], Outcome.FAILED, 0.0, problem)
        return [result_of(config, name, [failed]) for name in config.served_names]
    names = [Client(config, name, timeout_s, ask) for name in config.served_names if name in listed]
    checked = {name.client.name: name for name in run_checks(names)}
    silent = [(name, name.checks[-1].check) for name in checked.values() if name.silent]
    meaning = fell_silent(config, timeout_s, ask) if silent else ""
    results = []
    for name in config.served_names:
        if name not in checked:
            unlisted = (
                f"/v1/models does not list {name!r}, but {', '.join(listed) or 'nothing'}: something else than "
                f"{config.unit} answers at {config.url}, or it runs with an older configuration"
            )
            results.append(result_of(config, name, [Check(NAMES[0], Outcome.FAILED, 0.0, unlisted)]))
            continue
        checks, reply = checked[name].checks, checked[name].completion
        if checked[name].silent:
            checks[-1] = replace(checks[-1], detail=f"{checks[-1].detail}. {meaning}")
        elif silent and len(checks) < len(NAMES):
            first, at = silent[0]
            why = f"not asked, because the engine stopped answering at {first.client.name!r}, check {at}"
            checks.append(Check(NAMES[len(checks)], Outcome.FAILED, 0.0, why))
        text, tokens = (reply.text, reply.tokens) if reply is not None else ("", None)
        results.append(result_of(config, name, checks, text, tokens))
    return results


# -- the run that has passed


class FindsContainers(Protocol):
    """Docker, as far as it is asked here. Raises DockerAway or DockerRefused."""

    def find(self, name: str) -> Container | None: ...


@dataclass(frozen=True)
class Run:
    """One run of an engine's container."""

    container_id: str
    started_at: str
    input_hash: str


def run_of(config: EngineConfig, docker: FindsContainers) -> Run | None:
    """The run that answers now; None where Docker does not tell."""
    try:
        container = docker.find(config.container)
    except (DockerAway, DockerRefused):
        return None
    if container is None or not container.running:
        return None
    return Run(container.id, container.started_at, container.labels.get(LABEL_INPUT_HASH, ""))


def full_canary(
    config: EngineConfig, paths: HostPaths, docker: FindsContainers, timeout_s: float, ask: Ask = request
) -> list[Result]:
    """All checks of all served names. Where all were passed by one run of the container, that is recorded."""
    before = run_of(config, docker)
    results = canary(config, timeout_s, ask)
    if not all(result.ok for result in results):
        forget(config, paths)
        return results
    now = stamp()
    results = [replace(result, passed_at=now) for result in results]
    if before is not None and before == run_of(config, docker):
        record = {"run": asdict(before), "results": [asdict(result) for result in results]}
        # Without a record the next run asks everything again: a full disk, or another user than root, is no failure.
        with contextlib.suppress(OSError):
            write_durably(paths.engine_canary(config.engine), json.dumps(record, ensure_ascii=False) + "\n", 0o640)
    return results


def forget(config: EngineConfig, paths: HostPaths) -> None:
    """The next run asks everything."""
    with contextlib.suppress(OSError):
        paths.engine_canary(config.engine).unlink(missing_ok=True)


def recorded(config: EngineConfig, paths: HostPaths, docker: FindsContainers) -> list[Result]:
    """What the run that goes on has passed, by every check of this program under every served name; else nothing."""
    try:
        record: Any = json.loads(paths.engine_canary(config.engine).read_text(encoding="utf-8"))
        run = Run(**record["run"])
        results = [
            Result(**{**row, "checks": tuple(Check(**check) for check in row["checks"])}) for row in record["results"]
        ]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    asked = [(result.served_name, tuple(check.check for check in result.checks)) for result in results]
    if asked != [(name, NAMES) for name in config.served_names] or run != run_of(config, docker):
        return []
    return results


def one_token(config: EngineConfig, ask: Ask = request) -> tuple[float, str | None]:
    """Seconds of a request for one token, and what is wrong with its answer: /health says nothing of the GPUs' work."""
    begin = time.monotonic()
    client = Client(config, config.served_names[0], TOKEN_DEADLINE_S, ask)
    problem = None
    try:
        reply = client.chat("the request for one token", QUESTION, 1)
        if not reply.tokens:
            problem = f"the request for one token of {client.name!r} was answered with none. {next_step(config)}"
    except CheckFailedError as error:
        problem = f"{error}. {next_step(config)}"
    except EngineSilentError as error:
        problem = f"{error}. {fell_silent(config, TOKEN_DEADLINE_S, ask)}"
    return round(time.monotonic() - begin, 3), problem


def canary_unless_passed(
    config: EngineConfig, paths: HostPaths, docker: FindsContainers, timeout_s: float, ask: Ask = request
) -> list[Result]:
    """One token, and the recorded results, where this run of the container has passed before; else the full canary."""
    results = recorded(config, paths, docker)
    if not results:
        return full_canary(config, paths, docker, timeout_s, ask)
    seconds, problem = one_token(config, ask)
    if problem is None:
        return [replace(result, token_s=seconds) for result in results]
    forget(config, paths)
    failed = Check(NAMES[0], Outcome.FAILED, seconds, problem)
    return [result_of(config, name, [failed]) for name in config.served_names]


def text_of(result: Result) -> str:
    """A heading and one line per check."""
    heading = f"{result.served_name}: {'ok' if result.ok else 'FAILED'} ({result.seconds:.2f} s)"
    if result.token_s is not None:
        heading += f", passed at {result.passed_at}; one token took {result.token_s:.2f} s now"
    wide = max(len(name) for name in NAMES)
    lines = [
        f"  {check.check:<{wide}}  {check.outcome.replace('_', ' '):<9}  {check.seconds:6.2f} s  {check.detail}"
        for check in result.checks
    ]
    return "\n".join([heading, *lines])


def run_canary(engine: str, paths: HostPaths, *, output: str, timeout_s: float, unless_passed: bool = False) -> int:
    """Entry of `vllm-edge canary`: 0 when no check of any served name failed."""
    try:
        config = load_config(engine, paths)
    except EngineConfigError as error:
        print(error, file=sys.stderr)
        return 1
    results = (canary_unless_passed if unless_passed else full_canary)(config, paths, DockerEngine(), timeout_s)
    good = all(result.ok for result in results)
    if output == "json":
        answer = {"engine": engine, "ok": good, "results": [asdict(result) for result in results]}
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        print("\n".join(text_of(result) for result in results))
    return 0 if good else 1
