# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge canary`: a real chat completion for each served name. /health says that processes live; only a completion
says that the engine serves (the first one compiles kernels, and can kill it)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .engine_config import EngineConfig, EngineConfigError, load_config
from .health import Answer, request
from .host_paths import HostPaths

PROMPT = "In one short sentence: what is a serving host?"
MAX_TOKENS = 24

Ask = Callable[..., Answer]


@dataclass(frozen=True)
class Completion:
    """What one served name answered."""

    engine: str
    served_name: str
    ok: bool
    seconds: float
    completion: str = ""
    tokens: int | None = None
    error: str | None = None


def models_of(answer: Answer) -> list[str]:
    """Names that /v1/models lists; an answer of another shape is told as a ValueError."""
    data = answer.json()
    if not isinstance(data, Mapping) or not isinstance(data.get("data"), list):
        raise ValueError("the answer has no list `data`")
    return [str(item["id"]) for item in data["data"] if isinstance(item, Mapping) and "id" in item]


def error_text(answer: Answer) -> str:
    """The message of an OpenAI-style error, else the beginning of the body."""
    try:
        data: Any = answer.json()
        error = data.get("error", data)
        text = error.get("message") if isinstance(error, Mapping) else error
    except (ValueError, AttributeError):
        text = None
    return str(text or answer.body[:300].decode("utf-8", "replace")).strip()


def completion_of(answer: Answer) -> tuple[str, int | None]:
    """Text and number of tokens. A reasoning model may spend all its tokens on thinking: that is text as well."""
    data = answer.json()
    message = data["choices"][0]["message"]
    text = message.get("content") or message.get("reasoning_content") or message.get("reasoning") or ""
    tokens = (data.get("usage") or {}).get("completion_tokens")
    return str(text), tokens if isinstance(tokens, int) else None


def unreachable(config: EngineConfig, what: str, answer: Answer) -> str:
    """No HTTP answer at all, in words that name the next step."""
    return (
        f"{what} at {config.url}: {answer.error}. `systemctl status {config.unit}` and `vllm-edge explain "
        f"{config.engine}` tell how the engine does"
    )


def ask_models(config: EngineConfig, timeout_s: float, ask: Ask = request) -> tuple[list[str], str | None]:
    """What the engine serves, or why that is not known."""
    answer = ask(config.url, "/v1/models", timeout_s)
    if answer.status is None:
        return [], unreachable(config, "no answer to GET /v1/models", answer)
    if not answer.ok:
        return [], f"GET /v1/models answered HTTP {answer.status}: {error_text(answer)}"
    try:
        return models_of(answer), None
    except ValueError as error:
        return [], f"GET /v1/models answered something else than a list of models: {error}"


def ask_completion(config: EngineConfig, name: str, timeout_s: float, ask: Ask = request) -> Completion:
    """One completion, judged."""
    payload = {
        "model": name,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }
    begin = time.monotonic()
    answer = ask(config.url, "/v1/chat/completions", timeout_s, method="POST", payload=payload)
    seconds = round(time.monotonic() - begin, 3)

    def failed(error: str) -> Completion:
        return Completion(config.engine, name, False, seconds, error=error)

    if answer.status is None:
        return failed(unreachable(config, f"no completion from {name!r}", answer))
    if not answer.ok:
        return failed(f"the completion of {name!r} answered HTTP {answer.status}: {error_text(answer)}")
    try:
        text, tokens = completion_of(answer)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        return failed(f"the completion of {name!r} is no chat completion ({type(error).__name__}: {error})")
    if text.strip() == "":
        return failed(
            f"the completion of {name!r} is empty ({tokens} tokens): the chat template or the weights are wrong"
        )
    return Completion(config.engine, name, True, seconds, text, tokens)


def canary(config: EngineConfig, timeout_s: float, ask: Ask = request) -> list[Completion]:
    """All served names, in order."""
    listed, problem = ask_models(config, timeout_s, ask)
    results: list[Completion] = []
    for name in config.served_names:
        if problem is not None:
            results.append(Completion(config.engine, name, False, 0.0, error=problem))
        elif name not in listed:
            told = f"/v1/models does not list {name!r}, but {', '.join(listed) or 'nothing'}"
            remedy = (
                f"something else than {config.unit} answers at {config.url}, or it runs with an older configuration"
            )
            results.append(Completion(config.engine, name, False, 0.0, error=f"{told}: {remedy}"))
        else:
            results.append(ask_completion(config, name, timeout_s, ask))
    return results


def run_canary(engine: str, paths: HostPaths, *, output: str, timeout_s: float) -> int:
    """Entry of `vllm-edge canary`: 0 when every served name completed."""
    try:
        config = load_config(engine, paths)
    except EngineConfigError as error:
        print(error, file=sys.stderr)
        return 1
    results = canary(config, timeout_s)
    good = all(result.ok for result in results)
    if output == "json":
        answer = {"engine": engine, "ok": good, "results": [asdict(result) for result in results]}
        print(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        for result in results:
            if result.ok:
                tokens = "" if result.tokens is None else f", {result.tokens} tokens"
                print(f"{result.served_name}: {' '.join(result.completion.split())!r} ({result.seconds:.2f} s{tokens})")
            else:
                print(f"{result.served_name}: FAILED: {result.error}")
    return 0 if good else 1
