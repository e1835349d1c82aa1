# SPDX-License-Identifier: Apache-2.0
"""What a switch asks engines over HTTP: whether requests still run, first work of a new engine, the canary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..canary.checks import Ask, error_text
from ..canary.command import FindsContainers, Result, full_canary
from ..engine.config import EngineConfig
from ..engine.metrics import requests_in_work
from ..generation.model import Generation, Limits
from ..paths import HostPaths
from ..system.http import request, side_by_side, takes_work
from .model import Done, PhaseFailed

METRICS_S = 3.0
DRAIN_POLL_S = 0.5
IDLE_POLL_S = 0.25
IDLE_ASK_S = 1.0
IDLE_TIMES = 3
"""A request that came in with SIGTERM has been counted by then."""
LONGEST_PROMPT_TOKENS = 1024
"""As many as an engine with the default max_num_batched_tokens takes in one step, and quick on every card."""
WARM_UP_TOKENS = 8


# -- drain


@dataclass
class _Draining:
    config: EngineConfig
    zeros: int = 0
    left: int | None = None
    note: str = ""

    @property
    def over(self) -> bool:
        return self.zeros >= 2 or bool(self.note)


def drain(
    configs: Sequence[EngineConfig],
    limits: Limits,
    *,
    ask: Ask = request,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Done:
    """Waits until no request runs, or the limit has passed. An engine that cannot tell is not waited for."""
    engines = [_Draining(config) for config in configs]
    for engine in engines:
        if engine.config.shutdown_timeout_s is not None:
            engine.note = f"finishes its requests itself when it is stopped ({engine.config.shutdown_timeout_s:g} s)"
    began = clock()

    def look(engine: _Draining) -> None:
        answer = ask(engine.config.url, "/metrics", METRICS_S)
        left = requests_in_work(answer.body.decode("utf-8", "replace")) if answer.ok else None
        if left is None:
            engine.note = f"does not tell ({answer.words() if not answer.ok else 'no such metric'}): not waited for"
            return
        engine.left = left
        engine.zeros = engine.zeros + 1 if left == 0 else 0

    while True:
        side_by_side(look, [engine for engine in engines if not engine.over])
        waiting = [engine for engine in engines if not engine.over]
        if not waiting or clock() - began >= limits.drain_timeout_s:
            break
        sleep(DRAIN_POLL_S)
    seconds = clock() - began
    said = [f"{engine.config.engine} {_drained(engine)}" for engine in engines]
    warnings = tuple(
        f"{engine.config.engine} still had {engine.left} requests after {seconds:.0f} s: they end with it. A larger "
        "vllm_engine_drain_timeout_s waits longer."
        for engine in waiting
        if engine.left
    )
    detail = "; ".join(said) or "no engine has to stop"
    return Done(
        f"{detail}; {seconds:.1f} s", data={"left": {e.config.engine: e.left for e in engines}}, warnings=warnings
    )


def _drained(engine: _Draining) -> str:
    if engine.note:
        return engine.note
    return "has no request" if not engine.left else f"still has {engine.left} requests"


def idle_since(config: EngineConfig, wait: Callable[[float], bool], *, ask: Ask = request) -> bool:
    """After SIGTERM, until the engine has finished its requests; False where `wait` said that it has ended.

    An engine that was given --shutdown-timeout finishes its requests after SIGTERM, and vLLM 0.32 then spends all the
    rest of that time on taking itself down. Its /metrics tell when there is nothing left to wait for. Until SIGTERM
    has come, which may take systemd some seconds, an idle engine still takes requests.
    """
    zeros, told = 0, False
    while not wait(IDLE_POLL_S):
        told = told or not takes_work(config.url, config.served_names[0], IDLE_ASK_S, ask)
        if not told:
            continue
        answer = ask(config.url, "/metrics", IDLE_ASK_S)
        left = requests_in_work(answer.body.decode("utf-8", "replace")) if answer.ok else None
        zeros = zeros + 1 if left == 0 else 0
        if zeros >= IDLE_TIMES:
            return True
    return False


# -- warm-up


def words_for(config: EngineConfig) -> int:
    """How many words make a longer prompt, about one token each; two each would fit as well."""
    return max(1, min((config.max_model_len or 2 * LONGEST_PROMPT_TOKENS) // 2, LONGEST_PROMPT_TOKENS) - 64)


@dataclass(frozen=True)
class _Work:
    config: EngineConfig
    what: str
    content: str


def _work(config: EngineConfig) -> tuple[list[_Work], list[_Work]]:
    """A short prompt, then a longer one beside another short one: prefill, and a batch, have then been run for real.

    The short one goes first and alone, for the first request compiles kernels, and a client that asks at that moment
    waits for that and not for a long prefill as well.
    """
    long = " ".join(["on"] * words_for(config))
    return (
        [_Work(config, "a short prompt", "Name a colour.")],
        [_Work(config, "a longer prompt", long), _Work(config, "a short prompt", "Name a number.")],
    )


def warm_up(
    configs: Sequence[EngineConfig],
    limits: Limits,
    *,
    ask: Ask = request,
    clock: Callable[[], float],
) -> Done:
    """First work of new engines, side by side: what it allocates is there when memory is measured."""
    began = clock()

    def problem_of(work: _Work) -> str | None:
        config = work.config
        answer = ask(
            config.url,
            "/v1/chat/completions",
            limits.canary_timeout_s,
            method="POST",
            payload={
                "model": config.served_names[0],
                "messages": [{"role": "user", "content": work.content}],
                "max_tokens": WARM_UP_TOKENS,
                "temperature": 0,
            },
        )
        if answer.ok:
            return None
        why = answer.error if answer.status is None else f"HTTP {answer.status}: {error_text(answer)}"
        return f"Engine {config.engine} does not answer {work.what} at {config.url}: {why}"

    def ask_one(config: EngineConfig) -> str | None:
        for beside in _work(config):
            found = [problem for problem in side_by_side(problem_of, beside) if problem]
            if found:
                return found[0]
        return None

    problems = {
        config.engine: problem
        for config, problem in zip(configs, side_by_side(ask_one, configs), strict=True)
        if problem
    }
    if problems:
        units = " ".join(f"-u vllm-{name}" for name in problems)
        raise PhaseFailed(
            f"{'. '.join(text.rstrip('.') for text in problems.values())}. 'journalctl {units}' has vLLM's own words.",
            engines=problems,
        )
    names = ", ".join(config.engine for config in configs)
    if not names:
        return Done("no engine is new")
    return Done(
        f"{names}: 3 requests each, the longest of {max(map(words_for, configs))} words; {clock() - began:.1f} s"
    )


# -- canary


def run_canary(
    wanted: Generation,
    paths: HostPaths,
    docker: FindsContainers,
    *,
    ask: Ask = request,
    clock: Callable[[], float],
) -> Done:
    """Every served name of every engine, the engines side by side; which run of each has passed is recorded."""
    began = clock()
    configs = [engine.config for engine in wanted.engines.values()]

    def ask_one(config: EngineConfig) -> list[Result]:
        return full_canary(config, paths, docker, wanted.limits.canary_timeout_s, ask)

    results = [result for group in side_by_side(ask_one, configs) for result in group]
    rows: list[Mapping[str, Any]] = [asdict(result) for result in results]
    failed = [result for result in results if not result.ok]
    if failed:
        raise PhaseFailed(
            " ".join(canary_failures(failed)), engines=dict.fromkeys(r.engine for r in failed), data={"canary": rows}
        )
    return Done(f"{len(results)} served names answer; {clock() - began:.1f} s", data={"canary": rows})


def canary_failures(failed: Sequence[Result]) -> list[str]:
    """Role, check and what was seen; names that failed alike are told together."""
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
