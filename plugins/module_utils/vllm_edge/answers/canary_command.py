# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-edge canary`: sends test requests to every served name of an engine (see checks.py).

In all functions, `timeout_s` is how many seconds a request may take, and `ask` sends a request.

/health shows that an engine's processes are alive; only answers show that it serves. Every served name is asked for a
completion, and the first one of an engine gets the other checks.

If a run of the engine's container has passed, that is recorded in /var/lib/vllm-edge/engines/<engine>.canary.json.
While that run lasts, `--unless-passed` requests only one token and returns the recorded results.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from ..engine.config import EngineConfig, EngineConfigError, load_config
from ..engine.state import stamp
from ..names import LABEL_INPUT_HASH
from ..paths import HostPaths
from ..system.docker import DockerAway, DockerEngine, DockerRefused
from ..system.files import write_durably
from ..system.http import Answer, request
from ..system.records import read_record
from ..text import print_result
from .checks import (
    NAMES,
    QUESTION,
    Ask,
    Check,
    Checked,
    CheckFailedError,
    Client,
    EngineSilentError,
    Outcome,
    Reply,
    error_text,
    run_checks,
)

TOKEN_DEADLINE_S = 20.0
"""Seconds that an engine which has passed before may take for one token while it serves other requests."""


@dataclass(frozen=True)
class Result:
    engine: str
    served_name: str
    ok: bool
    seconds: float
    completion: str
    """Text of the first check."""
    tokens: int | None
    """Tokens of the first check."""
    error: str | None
    """Detail of the first failed check; None if none failed."""
    checks: tuple[Check, ...]
    passed_at: str | None = None
    """When all checks passed, in UTC; None if one failed."""
    token_s: float | None = None
    """Seconds that a request for one token took now, if the checks had passed earlier; else None."""


def parse_models(answer: Answer) -> list[str]:
    """Return the names that /v1/models lists. Raises ValueError if the answer has another form."""
    data = answer.json()
    if not isinstance(data, Mapping) or not isinstance(data.get("data"), list):
        raise ValueError("the answer has no list `data`")
    return [str(item["id"]) for item in data["data"] if isinstance(item, Mapping) and "id" in item]


def name_next_step(config: EngineConfig) -> str:
    return f"`systemctl status {config.unit}` and `vllm-edge explain {config.engine}` show the state of the engine"


def ask_models(config: EngineConfig, timeout_s: float, ask: Ask = request) -> tuple[list[str], str | None]:
    """Return the names that the engine serves, and None or why they are not known."""
    answer = ask(config.url, "/v1/models", timeout_s)
    if answer.status is None:
        return [], f"no answer to GET /v1/models at {config.url}: {answer.error}. {name_next_step(config)}"
    if not answer.ok:
        return [], f"GET /v1/models answered HTTP {answer.status}: {error_text(answer)}"
    try:
        return parse_models(answer), None
    except ValueError as error:
        return [], f"GET /v1/models answered something else than a list of models: {error}"


def explain_silence(config: EngineConfig, timeout_s: float, ask: Ask) -> str:
    health = ask(config.url, "/health", min(timeout_s, config.health_timeout_s))
    if health.ok:
        return f"/health still answers: the engine lives, and the request hangs. {name_next_step(config)}"
    how = "does not answer either" if health.status is None else f"answers {health.words()}"
    return f"/health {how}: the engine died in the middle of the canary. {name_next_step(config)}"


def list_due(config: EngineConfig, name: str) -> tuple[str, ...]:
    """Return the checks of a served name: all of them for the first one of an engine, `completion` for the others."""
    return NAMES if name == config.served_names[0] else NAMES[:1]


def build_result(
    config: EngineConfig, name: str, checks: Sequence[Check], seconds: float, reply: Reply | None = None
) -> Result:
    """Return the result of a served name. Checks that did not run are added as skipped; `reply` answered the first."""
    ran = {check.check: check for check in checks}
    skipped = {
        check: Check(check, Outcome.SKIPPED, 0.0, "not asked: see the failure") for check in list_due(config, name)
    }
    error = next((check.detail for check in checks if check.outcome is Outcome.FAILED), None)
    text, tokens = (reply.text, reply.tokens) if reply is not None else ("", None)
    return Result(config.engine, name, error is None, seconds, text, tokens, error, tuple({**skipped, **ran}.values()))


def build_failure(config: EngineConfig, name: str, detail: str, seconds: float = 0.0) -> Result:
    return build_result(config, name, [Check(NAMES[0], Outcome.FAILED, seconds, detail)], seconds)


def canary(config: EngineConfig, timeout_s: float, ask: Ask = request) -> list[Result]:
    """Check the served names of an engine, as `run_checks`; return their results in the order of the configuration."""
    listed, problem = ask_models(config, timeout_s, ask)
    if problem is not None:
        return [build_failure(config, name, problem) for name in config.served_names]
    clients = [Client(config, name, timeout_s, ask) for name in config.served_names if name in listed]
    checked = {name.client.name: name for name in run_checks(clients)}
    explain_stop(config, timeout_s, ask, list(checked.values()))
    unlisted = (
        f"but {', '.join(listed) or 'nothing'}: something else than {config.unit} answers at {config.url}, or it runs "
        "with an older configuration"
    )
    return [
        build_result(config, name, checked[name].checks, checked[name].seconds, checked[name].completion)
        if name in checked
        else build_failure(config, name, f"/v1/models does not list {name!r}, {unlisted}")
        for name in config.served_names
    ]


def explain_stop(config: EngineConfig, timeout_s: float, ask: Ask, names: Sequence[Checked]) -> None:
    """Add to the checks that got no response why the engine may have stopped answering."""
    if not any(name.silent for name in names):
        return
    meaning = explain_silence(config, timeout_s, ask)
    for name in names:
        name.checks = [
            replace(check, detail=f"{check.detail}. {meaning}") if check.check in name.silent else check
            for check in name.checks
        ]


@dataclass(frozen=True)
class Run:
    container_id: str
    started_at: str
    input_hash: str


@dataclass(frozen=True)
class Passed:
    """Content of <engine>.canary.json: a run of the container, and the results of the last canary."""

    run: Run
    results: tuple[Result, ...]
    """Empty if it failed."""
    failed: tuple[Result, ...] = ()
    """All results of one that failed, for the metrics; empty if it passed."""


def find_run(config: EngineConfig, docker: DockerEngine) -> Run | None:
    """Return the current run of the engine's container; None if it is not running or Docker cannot tell."""
    try:
        container = docker.find(config.container)
    except (DockerAway, DockerRefused):
        return None
    if container is None or not container.running:
        return None
    return Run(container.id, container.started_at, container.labels.get(LABEL_INPUT_HASH, ""))


def full_canary(
    config: EngineConfig, paths: HostPaths, docker: DockerEngine, timeout_s: float, ask: Ask = request
) -> list[Result]:
    """Check all served names; if one run of the container, which Docker identifies, passed everything, record it."""
    before = find_run(config, docker)
    results = canary(config, timeout_s, ask)
    if not all(result.ok for result in results):
        return forget(config, paths, before, results)
    results = [replace(result, passed_at=stamp()) for result in results]
    if before is not None and before == find_run(config, docker):
        write_passed(config, paths, Passed(before, tuple(results)))
    return results


def write_passed(config: EngineConfig, paths: HostPaths, passed: Passed) -> None:
    # Errors are ignored (full disk, user other than root): without a record the next canary checks everything.
    with contextlib.suppress(OSError):
        record = json.dumps(asdict(passed), ensure_ascii=False)
        write_durably(paths.engine_canary(config.engine), record + "\n", 0o640)


def forget(config: EngineConfig, paths: HostPaths, run: Run | None, failed: list[Result]) -> list[Result]:
    """Replace the record that this run has passed by one of its failure, if Docker tells which run it is.

    Returns the results; if the former record stays, those that failed say so.
    """
    try:
        paths.engine_canary(config.engine).unlink(missing_ok=True)
    except OSError as error:
        why = f" Until it is removed, --unless-passed goes by an older result: {error}."
        return [one if one.ok else replace(one, error=f"{one.error}{why}") for one in failed]
    if run is not None:
        write_passed(config, paths, Passed(run, (), tuple(failed)))
    return failed


def find_recorded(config: EngineConfig, paths: HostPaths, docker: DockerEngine) -> list[Result]:
    """Return the recorded results if they are about this run of the container, these served names and these checks."""
    try:
        passed = read_record(Passed, json.loads(paths.engine_canary(config.engine).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    asked = [(result.served_name, tuple(check.check for check in result.checks)) for result in passed.results]
    due = [(name, list_due(config, name)) for name in config.served_names]
    if asked != due or passed.run != find_run(config, docker):
        return []
    return list(passed.results)


def request_one_token(config: EngineConfig, ask: Ask = request) -> tuple[float, str | None]:
    """Request one token, since /health says nothing about the work of the GPUs; return the seconds it took and None or
    what is wrong with the answer.
    """
    begin = time.monotonic()
    client = Client(config, config.served_names[0], TOKEN_DEADLINE_S, ask)
    problem = None
    try:
        reply = client.chat("the request for one token", QUESTION, 1)
        if not reply.tokens:
            problem = f"the request for one token of {client.name!r} was answered with none. {name_next_step(config)}"
    except CheckFailedError as error:
        problem = f"{error}. {name_next_step(config)}"
    except EngineSilentError as error:
        problem = f"{error}. {explain_silence(config, TOKEN_DEADLINE_S, ask)}"
    return round(time.monotonic() - begin, 3), problem


def canary_unless_passed(
    config: EngineConfig, paths: HostPaths, docker: DockerEngine, timeout_s: float, ask: Ask = request
) -> list[Result]:
    """Request one token and return the recorded results if this run has passed before; else run the full canary."""
    results = find_recorded(config, paths, docker)
    if not results:
        return full_canary(config, paths, docker, timeout_s, ask)
    seconds, problem = request_one_token(config, ask)
    if problem is None:
        return [replace(result, token_s=seconds) for result in results]
    failed = [build_failure(config, name, problem, seconds) for name in config.served_names]
    return forget(config, paths, find_run(config, docker), failed)


def render_result(result: Result) -> str:
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
    """Run `vllm-edge canary`: print the results as `output` (`json` or text); return 0 if no check failed, else 1.

    With `unless_passed`, only one token is requested if this run of the container has passed before.
    """
    try:
        config = load_config(engine, paths)
    except EngineConfigError as error:
        print(error, file=sys.stderr)
        return 1
    results = (canary_unless_passed if unless_passed else full_canary)(config, paths, DockerEngine(), timeout_s)
    good = all(result.ok for result in results)
    answer = {"engine": engine, "ok": good, "results": [asdict(result) for result in results]}
    print_result(output, answer, [render_result(result) for result in results])
    return 0 if good else 1
