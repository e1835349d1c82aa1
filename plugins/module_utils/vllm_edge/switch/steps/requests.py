# SPDX-License-Identifier: Apache-2.0
"""HTTP requests of a switch to engines: wait for running requests, warm up new engines, run the canary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from ...answers.canary_command import Result, canary_unless_passed
from ...answers.checks import Ask, error_text
from ...answers.model import NOT_SHOWN, write_record
from ...answers.quality import Options, OutOfTime, Suite, build_record
from ...answers.suite import read_cases
from ...engine.config import EngineConfig
from ...engine.metrics import requests_in_work
from ...engine.state import stamp
from ...generation.model import Generation, Limits
from ...system.http import takes_work
from ...system.threads import call_in_parallel
from ..model import Done, Moves, PhaseFailed
from ..view import HostView

METRICS_S = 3.0
DRAIN_POLL_S = 0.25
IDLE_POLL_S = 0.25
IDLE_ASK_S = 1.0
IDLE_TIMES = 3
"""After this many idle readings, a request that arrived together with SIGTERM has been counted."""
LONGEST_PROMPT_TOKENS = 1024
"""What an engine with the default max_num_batched_tokens takes in one step; quick on every GPU."""
WARM_UP_TOKENS = 2
"""The second one is the first that is decoded; the first comes of the prefill."""


def _count_requests(config: EngineConfig, timeout_s: float, ask: Ask) -> tuple[int | None, str]:
    answer = ask(config.url, "/metrics", timeout_s)
    if not answer.ok:
        return None, answer.words()
    return requests_in_work(answer.body.decode("utf-8", "replace")), "no such metric"


@dataclass
class _Draining:
    config: EngineConfig
    zeros: int = 0
    left: int | None = None
    note: str = ""
    """Why it is not waited for."""

    @property
    def over(self) -> bool:
        return self.zeros >= 2 or bool(self.note)

    def look(self, ask: Ask) -> None:
        left, why = _count_requests(self.config, METRICS_S, ask)
        if left is None:
            self.note = f"does not report its requests ({why}): not waited for"
            return
        self.left = left
        self.zeros = self.zeros + 1 if left == 0 else 0

    def __str__(self) -> str:
        how = self.note or ("has no request" if not self.left else f"still has {self.left} requests")
        return f"{self.config.engine} {how}"


def drain(host: HostView, moves: Moves, limits: Limits) -> Done:
    """Wait until no engine of `moves.stop` has a request, or `limits.drain_timeout_s` has passed.

    An engine that does not report its requests is not waited for. Requests that are left after the limit are a warning;
    vLLM lets them run for `shutdown_timeout_s` more when it is stopped.
    """
    engines = [_Draining(config) for config in host.load_configs(moves.stop)]
    began = host.clock()
    while True:
        call_in_parallel(lambda engine: engine.look(host.ask), [engine for engine in engines if not engine.over])
        waiting = [engine for engine in engines if not engine.over]
        if not waiting or host.clock() - began >= limits.drain_timeout_s:
            break
        host.sleep(DRAIN_POLL_S)
    seconds = host.clock() - began
    warnings = tuple(
        f"{engine.config.engine} still had {engine.left} requests after {seconds:.0f} s: they end with it, at most "
        f"{engine.config.shutdown_timeout_s or 0:g} s later. A larger vllm_engine_drain_timeout_s waits longer."
        for engine in waiting
        if engine.left
    )
    detail = "; ".join(map(str, engines)) or "no engine has to stop"
    return Done(f"{detail}; {seconds:.1f} s", warnings=warnings)


def wait_until_idle(config: EngineConfig, wait: Callable[[float], bool], ask: Ask) -> bool:
    """Wait, after SIGTERM was sent, until the engine has finished its requests.

    An engine with --shutdown-timeout finishes its requests after SIGTERM, and vLLM 0.32 then spends the rest of that
    time on its own shutdown. Its /metrics show when there is nothing left to wait for. Until SIGTERM arrives, which may
    take systemd some seconds, an idle engine still takes requests.

    `wait` waits for some seconds and returns True if the engine has ended. Returns whether it is idle; False if it has
    ended.
    """
    zeros, told = 0, False
    while not wait(IDLE_POLL_S):
        told = told or not takes_work(config.url, config.served_names[0], IDLE_ASK_S, ask)
        if not told:
            continue
        zeros = zeros + 1 if _count_requests(config, IDLE_ASK_S, ask)[0] == 0 else 0
        if zeros >= IDLE_TIMES:
            return True
    return False


def count_words(config: EngineConfig) -> int:
    """Return how many words make the longer prompt. A word is about one token; two tokens each would also fit."""
    return max(1, min((config.max_model_len or 2 * LONGEST_PROMPT_TOKENS) // 2, LONGEST_PROMPT_TOKENS) - 64)


def warm_up(host: HostView, wanted: Generation, engine: str) -> Done:
    """Send a new engine its first requests, so that what they allocate is there when memory is measured.

    A short prompt goes first and alone, because the first request compiles kernels: a client that asks at that moment
    waits for that, but not for a long prefill as well. A longer one and another short one at the same time follow, so
    that the engine has run prefill and a batch. `wanted.limits.canary_timeout_s` is the patience with one request.
    Raises PhaseFailed if the engine does not answer.
    """
    began = host.clock()
    config = wanted.engines[engine].config

    def ask(what: str, content: str) -> str | None:
        answer = host.ask(
            config.url,
            "/v1/chat/completions",
            wanted.limits.canary_timeout_s,
            method="POST",
            payload={
                "model": config.served_names[0],
                "messages": [{"role": "user", "content": content}],
                "max_tokens": WARM_UP_TOKENS,
                "temperature": 0,
            },
        )
        if answer.ok:
            return None
        why = answer.error if answer.status is None else f"HTTP {answer.status}: {error_text(answer)}"
        return f"Engine {engine} does not answer {what} at {config.url}: {why}"

    words = count_words(config)
    beside = {"a longer prompt": " ".join(["on"] * words), "a short prompt": "Name a number."}
    problem = ask("a short prompt", "Name a colour.")
    problems = [problem] if problem else call_in_parallel(lambda item: ask(*item), list(beside.items()))
    if problem := next(filter(None, problems), None):
        raise PhaseFailed(
            f"{problem.rstrip('.')}. 'journalctl -u vllm-{engine}' has vLLM's own words.", engines=[engine]
        )
    return Done(f"{engine}: 3 requests, the longest of {words} words, {host.clock() - began:.1f} s")


def run_canary(host: HostView, wanted: Generation, engine: str) -> Done:
    """Run the canary for every served name of an engine; rows are `data["canary"]`.

    It is recorded which run of its container has passed; while that lasts, it is asked for one token only. Raises
    PhaseFailed if a served name fails.
    """
    began = host.clock()
    config, timeout_s = wanted.engines[engine].config, wanted.limits.canary_timeout_s
    results = canary_unless_passed(config, host.paths, host.docker, timeout_s, host.ask)
    data = {"canary": [asdict(result) for result in results]}
    if failed := [result for result in results if not result.ok]:
        raise PhaseFailed(" ".join(describe_failures(failed)), engines=[engine], data=data)
    return Done(f"{engine}: {', '.join(one.served_name for one in results)} in {host.clock() - began:.1f} s", data=data)


def ask_suite(host: HostView, wanted: Generation, moves: Moves) -> Done:
    """Ask the engines that were started the quality suite of the generation, if it has one.

    The answers are kept in a record of the suite. The rows are `data["quality"]`: case, name, engine and verdict.
    Raises PhaseFailed: a case did not pass, and the gate is `fail`.
    """
    configs = [wanted.engines[name].config for name in moves.start]
    if not wanted.quality or not configs:
        return Done()
    gate = wanted.quality
    options = Options(
        read_cases(gate["cases"]), repeats=int(gate["repeats"]), timeout_s=float(gate["timeout_s"]), note="switch"
    )
    began, began_at = host.clock(), stamp()
    try:
        results = Suite(options, ask=host.ask, clock=host.clock).run(configs)
    except OutOfTime as error:
        raise PhaseFailed(str(error), engines=moves.start) from error
    record = build_record(wanted, options, results, began_at)
    try:
        kept = f" All answers are in {write_record(record, host.paths)}."
    except OSError as error:
        kept = f" The answers could not be kept: {error}."
    keys = ("case", "served_name", "engine", "verdict")
    rows = [{key: getattr(one, key) for key in keys} for one in results]
    said = record.findings
    engines = dict.fromkeys(one.engine for one in results if one.verdict not in ("passed", NOT_SHOWN))
    if engines and gate["gate"] == "fail":
        text = f"The quality suite was not passed (quality_gate: fail). {' '.join(said)}{kept}"
        raise PhaseFailed(text, engines=engines, data={"quality": rows})
    return Done(
        f"{record.passed} of {len(results)} quality cases passed; {host.clock() - began:.1f} s",
        data={"quality": rows},
        warnings=tuple(f"Quality: {text}" for text in said),
    )


def describe_failures(failed: Sequence[Result]) -> list[str]:
    """Return one sentence for each failure: role, check and what was seen. Names that failed alike share a sentence."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for result in failed:
        check = next((check for check in result.checks if check.outcome == "failed"), None)
        key = (result.engine, check.check if check else "completion", (result.error or "no reason given").rstrip("."))
        said.setdefault(key, []).append(result.served_name)
    return [
        f"Role {', '.join(names)} of engine {engine} failed the canary's check {check}: {why}. 'vllm-edge canary "
        f"{engine}' asks again while it runs, 'journalctl -u vllm-{engine}' has vLLM's own words."
        for (engine, check, why), names in said.items()
    ]
