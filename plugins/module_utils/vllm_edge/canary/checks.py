# SPDX-License-Identifier: Apache-2.0
"""The five questions of the canary. Each takes one served name, asks with few tokens, and judges the answer.

An outcome is a verdict on the engine, not on the model's wits: what an engine has to do whatever its model (take the
system prompt, hold a schema, parse a tool call) passes or fails; what only a model with sense can show is `not_shown`
where it does not.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from ..engine.config import EngineConfig
from ..system.http import Answer, side_by_side

Ask = Callable[..., Answer]
Verdict = tuple["Outcome", str]

QUESTION = "In one short sentence: what is a serving host?"
# Only one next token is likely at each step, so that rounding has little to decide.
COUNTING = "Count from 1 to 9, digits and commas only."
ANSWER_TOKENS = 24
COUNTING_TOKENS = 12
STRUCTURED_TOKENS = 64
THINKING_TOKENS = 512
"""For a model that cannot be asked not to think: at 5 tokens a second within the default canary timeout of 120 s."""

LAMP_KEYS = ("on", "colour", "level")
COLOURS = ("red", "green", "blue")
LAMP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "colour": {"enum": list(COLOURS)},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": list(LAMP_KEYS),
    "additionalProperties": False,
}
# Two whole answers to choose from: a grammar of literals has no place for whitespace.
LAMP_LITERALS: dict[str, Any] = {
    "enum": [{"on": True, "colour": "green", "level": 3}, {"on": False, "colour": "red", "level": 0}]
}
DESCRIBE = "A lamp is on, it is green, its level is 3. Describe it as JSON with the keys on, colour, level."
TOOL_NAME = "set_lamp"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": TOOL_NAME, "description": "Set the lamp.", "parameters": LAMP_SCHEMA},
}
USE_TOOL = "Set the lamp with the tool: on, green, level 3."
# Parsers for which vLLM does not enforce a named tool_choice (vllm-project/vllm#50477: the model may answer in words),
# and a call in their own syntax, which can be enforced as structured output instead.
NATIVE_CALLS = {"gemma4": f'<|tool_call>call:{TOOL_NAME}{{on:true,colour:<|"|>green<|"|>,level:3}}<tool_call|>'}

# A step of bf16 is 1/8 for logits from 16 to 32. Tokens that are rated further apart than this (a factor of 2.7 in
# probability) do not change places by rounding.
ROUNDING_NATS = 1.0
TOP_LOGPROBS = 5


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_SHOWN = "not_shown"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One question and its outcome."""

    check: str
    outcome: Outcome
    seconds: float
    detail: str


class CheckFailedError(Exception):
    """The engine answered, but not as it has to; the text says how."""


class StillThinkingError(Exception):
    """The model spent all its tokens on thinking, which shows nothing of what was asked."""


class EngineSilentError(Exception):
    """No HTTP answer: whatever else would be asked, would wait in vain."""


def error_text(answer: Answer) -> str:
    """The message of an OpenAI-style error, else the beginning of the body."""
    try:
        data: Any = answer.json()
        error = data.get("error", data)
        text = error.get("message") if isinstance(error, Mapping) else error
    except (ValueError, AttributeError):
        text = None
    return str(text or answer.body[:300].decode("utf-8", "replace")).strip()


def shown(text: str, limit: int = 100) -> str:
    """A model's text for one line of a terminal."""
    line = " ".join(text.split())
    return repr(line if len(line) <= limit else line[: limit - 1] + "…")


@dataclass(frozen=True)
class Reply:
    """What a chat completion says."""

    text: str
    only_thought: bool
    """The text is what the model thought; it has said nothing."""
    tokens: int | None
    prompt_tokens: int | None
    finish: str
    calls: tuple[tuple[str, str], ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]


def _logprobs(choice: Mapping[str, Any]) -> tuple[Mapping[int, float], ...]:
    """Per position the likeliest tokens, where `return_tokens_as_token_ids` made their names numbers."""
    rows: list[Mapping[int, float]] = []
    for position in (choice.get("logprobs") or {}).get("content") or []:
        top = [position, *position["top_logprobs"]]
        rows.append({int(item["token"].removeprefix("token_id:")): float(item["logprob"]) for item in top})
    return tuple(rows)


def reply_of(data: Any) -> Reply:
    """A reasoning model may spend all its tokens on thinking: that is text as well."""
    choice = data["choices"][0]
    message = choice["message"]
    usage = data.get("usage") or {}
    counts = [usage.get(key) for key in ("completion_tokens", "prompt_tokens")]
    tokens, prompt_tokens = (count if isinstance(count, int) else None for count in counts)
    thought = message.get("reasoning_content") or message.get("reasoning")
    return Reply(
        text=str(message.get("content") or thought or ""),
        only_thought=bool(thought) and not message.get("content") and not message.get("tool_calls"),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish=str(choice.get("finish_reason")),
        calls=tuple(
            (str(call["function"]["name"]), str(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        ),
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=_logprobs(choice),
    )


@dataclass(frozen=True)
class Client:
    """One served name of one engine."""

    config: EngineConfig
    name: str
    timeout_s: float
    ask: Ask

    def post(self, path: str, what: str, **payload: Any) -> Any:
        answer = self.ask(self.config.url, path, self.timeout_s, method="POST", payload={"model": self.name, **payload})
        if answer.status is None:
            raise EngineSilentError(f"{what} of {self.name!r}: {answer.error}")
        if not answer.ok:
            raise CheckFailedError(f"{what} of {self.name!r} answered HTTP {answer.status}: {error_text(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise CheckFailedError(f"{what} of {self.name!r} is not JSON: {error}") from error

    def chat(self, what: str, user: str, max_tokens: int, *, system: str | None = None, **payload: Any) -> Reply:
        """One chat completion at temperature 0."""
        data = self.post(
            "/v1/chat/completions",
            what,
            messages=messages_of(user, system),
            max_tokens=max_tokens,
            temperature=0,
            seed=0,
            **payload,
        )
        try:
            return reply_of(data)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise CheckFailedError(
                f"{what} of {self.name!r} is no chat completion ({type(error).__name__}: {error})"
            ) from error

    def chat_structured(self, what: str, user: str, **payload: Any) -> Reply:
        """A completion that vLLM holds to a structure, which it does only once thinking has ended.

        Some models can be asked not to think. The templates of others (Qwen3-Thinking, DeepSeek-R1, gpt-oss) have no
        such switch or another name for it: they get tokens enough to come to an end.
        """
        if self.config.reasoning_parser:
            payload["chat_template_kwargs"] = {"enable_thinking": False}
        reply = self.chat(what, user, STRUCTURED_TOKENS, **payload)
        if reply.only_thought and reply.finish == "length":
            reply = self.chat(what, user, THINKING_TOKENS, **payload)
        if reply.only_thought and reply.finish == "length":
            raise StillThinkingError(
                f"{what} of {self.name!r} did not come: the model thought for all its {reply.tokens} tokens"
            )
        return reply


def messages_of(user: str, system: str | None = None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": user}]


def completion(client: Client) -> Reply:
    """Words come out. The first completion compiles kernels, and can kill an engine whose /health is 200."""
    reply = client.chat("the completion", QUESTION, ANSWER_TOKENS)
    if reply.text.strip() == "":
        raise CheckFailedError(
            f"the completion of {client.name!r} is empty ({reply.tokens} tokens): the chat template or the weights "
            "are wrong"
        )
    return reply


def system_prompt(client: Client) -> Verdict:
    """The prompt that the chat template renders holds the system prompt, and a completion gets that very prompt.

    A template may drop the system role without a word. /tokenize renders as /v1/chat/completions does; that both see
    as many tokens ties what was looked at to what the model gets.
    """
    sentence = f"The canary of today is called {secrets.token_hex(4)}."
    question = {"messages": messages_of(QUESTION, sentence)}
    tokenized = client.post("/tokenize", "the tokenized prompt", **question)
    tokens = tokenized.get("tokens") if isinstance(tokenized, Mapping) else None
    if not isinstance(tokens, list) or not tokens:
        raise CheckFailedError(f"POST /tokenize of {client.name!r} answered no tokens")
    rendered = client.post("/detokenize", "the rendered prompt", tokens=tokens)
    prompt = rendered.get("prompt") if isinstance(rendered, Mapping) else None
    if not isinstance(prompt, str):
        raise CheckFailedError(f"POST /detokenize of {client.name!r} answered no prompt")
    if " ".join(sentence.split()) not in " ".join(prompt.split()):
        raise CheckFailedError(
            f"the system prompt does not reach {client.name!r}: the chat template renders {shown(prompt, 200)} without "
            f"{sentence!r}; another chat template is needed"
        )
    reply = client.chat("the completion with a system prompt", QUESTION, 1, system=sentence)
    if reply.prompt_tokens != len(tokens):
        raise CheckFailedError(
            f"a completion of {client.name!r} gets a prompt of {reply.prompt_tokens} tokens where the chat template "
            f"renders {len(tokens)}: completions do not go through the template that /tokenize shows"
        )
    return Outcome.PASSED, f"the rendered prompt of {len(tokens)} tokens holds the system prompt"


def lamp_problem(text: str) -> str | None:
    """Why a text is no JSON by LAMP_SCHEMA. Written out, since one fixed schema is not worth a package on the host."""
    try:
        lamp: Any = json.loads(text)
    except ValueError as error:
        return f"not JSON ({error})"
    if not isinstance(lamp, dict):
        return f"a JSON {type(lamp).__name__} where an object is asked"
    if sorted(lamp) != sorted(LAMP_KEYS):
        return f"keys {', '.join(sorted(lamp)) or 'none'} where {', '.join(LAMP_KEYS)} are asked"
    if not isinstance(lamp["on"], bool):
        return f"on is {lamp['on']!r}, no boolean"
    if lamp["colour"] not in COLOURS:
        return f"colour is {lamp['colour']!r}, none of {', '.join(COLOURS)}"
    level = lamp["level"]
    if not isinstance(level, int) or isinstance(level, bool) or not 0 <= level <= 9:
        return f"level is {level!r}, no whole number from 0 to 9"
    return None


def json_schema(client: Client) -> Verdict:
    """`response_format` with a JSON schema holds: the answer parses and validates.

    JSON allows whitespace without end between its parts, and so does vLLM's grammar: a model without sense, and now
    and then Gemma 4 (vllm-project/vllm#40080), fills all its tokens with it. The grammar is then asked once more,
    with literals, which have no such place.
    """

    def ask(schema: Mapping[str, Any]) -> Reply:
        schema_format = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema, "strict": True}}
        return client.chat_structured("the answer by JSON schema", DESCRIBE, response_format=schema_format)

    reply = ask(LAMP_SCHEMA)
    problem = lamp_problem(reply.text)
    if problem is None:
        return Outcome.PASSED, f"{shown(reply.text)} validates"
    # The tokens ran out in the whitespace, or in the middle of a word after a lot of it.
    blank = sum(character.isspace() for character in reply.text)
    padded = reply.text != reply.text.rstrip() or 2 * blank > len(reply.text)
    padded = padded and reply.finish == "length" and reply.text.startswith("{")
    if padded:
        reply = ask(LAMP_LITERALS)
        problem = lamp_problem(reply.text)
        if problem is None:
            return Outcome.PASSED, (
                f"{shown(reply.text)} validates, by a schema of literals: by one of types this model filled its tokens "
                "with whitespace, which disable_any_whitespace in --structured-outputs-config forbids"
            )
    raise CheckFailedError(
        f"the answer of {client.name!r} by a JSON schema is {problem}: {shown(reply.text)}; structured output does not "
        "hold"
    )


def _first_difference(answers: Sequence[Sequence[int]]) -> int | None:
    """The first position at which the answers are not all the same; an answer that ended earlier differs there."""
    for position in range(max(len(answer) for answer in answers)):
        if len({tuple(answer[position : position + 1]) for answer in answers}) > 1:
            return position
    return None


def _spread(third: Reply, answers: Sequence[Sequence[int]], position: int) -> float | None:
    """How far apart the model rates the tokens in question, in nats; None where it does not list them all."""
    if position >= len(third.logprobs):
        return None
    rated = [third.logprobs[position].get(answer[position]) for answer in answers if position < len(answer)]
    known = [value for value in rated if value is not None]
    return max(known) - min(known) if len(known) == len(answers) else None


def deterministic(client: Client) -> Verdict:
    """The same question twice, at temperature 0 and with the same seed, gets the same tokens.

    vLLM does not promise that by default (docs.vllm.ai/en/latest/usage/reproducibility): other requests in the batch,
    or a prompt that is now in the prefix cache, change the order of sums, and two tokens that are rated almost the
    same may change places. That is no defect of an engine. Broken memory, a broken kernel or a broken copy between
    GPUs looks otherwise: tokens that are far apart change places. So a difference is judged by a third answer with
    log probabilities: within ROUNDING_NATS it is `not_shown`, beyond it `failed`.
    """
    replies = [client.chat("the repeated completion", COUNTING, COUNTING_TOKENS, return_token_ids=True) for _ in "12"]
    first, second = replies
    if first.token_ids == second.token_ids and first.text == second.text:
        count = len(first.token_ids) or first.tokens
        return Outcome.PASSED, f"asked twice, the same {count} tokens: {shown(first.text)}"
    difference = f"asked twice at temperature 0, {client.name!r} answers {shown(first.text)} and {shown(second.text)}"
    if not first.token_ids or not second.token_ids:
        raise CheckFailedError(f"{difference}, and tells no token ids by which that could be judged")
    third = client.chat(
        "the completion with log probabilities",
        COUNTING,
        COUNTING_TOKENS,
        return_token_ids=True,
        logprobs=True,
        top_logprobs=TOP_LOGPROBS,
        return_tokens_as_token_ids=True,
    )
    answers = [first.token_ids, second.token_ids, third.token_ids]
    position = _first_difference(answers)
    assert position is not None  # the first two differ
    spread = _spread(third, answers, position)
    at = f"{difference}; they part at token {position + 1}"
    if spread is not None and spread <= ROUNDING_NATS:
        return Outcome.NOT_SHOWN, (
            f"{at}, between tokens only {spread:.2f} nats apart: rounding, which VLLM_BATCH_INVARIANT=1 would rule out"
        )
    far = f"beyond its {TOP_LOGPROBS} likeliest" if spread is None else f"{spread:.2f} nats apart"
    raise CheckFailedError(
        f"{at}, between tokens {far}, which rounding does not do: suspect the GPU's memory, the copies between GPUs "
        "(NCCL_P2P_DISABLE=1, --disable-custom-all-reduce) or the kernels"
    )


def _call_problem(reply: Reply) -> str | None:
    """Why a reply is no call of the tool with valid arguments."""
    if not reply.calls:
        return f"no tool call but {shown(reply.text)}"
    name, arguments = reply.calls[0]
    if name != TOOL_NAME:
        return f"a call of {name!r}, which is not the tool"
    problem = lamp_problem(arguments)
    return None if problem is None else f"a call with arguments {shown(arguments)}: {problem}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def tool_call(client: Client) -> Verdict:
    """The tool call parser makes calls with valid JSON of what the model writes.

    First with a call that the engine enforces, which works with any model: by a named tool_choice, or, for parsers
    without that, by the parser's own syntax as structured output. Then with tool_choice auto, where the model itself
    has to choose the call: a random model never does, and shows nothing then.
    """
    parser = client.config.tool_call_parser
    if parser is None:
        return Outcome.SKIPPED, f"{client.config.engine} has no tool_call_parser"
    native = NATIVE_CALLS.get(parser)
    forced: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": TOOL_NAME}}}
    if native is not None:
        forced = {"tool_choice": "auto", "structured_outputs": {"choice": [native]}}

    def ask(what: str, **payload: Any) -> Reply:
        return client.chat_structured(what, USE_TOOL, tools=[TOOL], **payload)

    problem = _call_problem(ask("the enforced tool call", **forced))
    if problem is not None:
        raise CheckFailedError(f"an enforced tool call of {client.name!r} gave {problem}; tool_call_parser is {parser}")
    free = ask("the free tool call", tool_choice="auto")
    problem = _call_problem(free)
    if problem is None:
        return Outcome.PASSED, f"{TOOL_NAME}({free.calls[0][1]}), called freely"
    if any(not _is_json(arguments) for _, arguments in free.calls):
        raise CheckFailedError(f"a free tool call of {client.name!r} gave {problem}; tool_call_parser is {parser}")
    return Outcome.NOT_SHOWN, (
        f"an enforced call has valid arguments; asked freely the model gave {problem}. A random model cannot choose "
        "a tool, a trained one should"
    )


CHECKS: Mapping[str, Callable[[Client], Verdict]] = {
    "system_prompt": system_prompt,
    "json_schema": json_schema,
    "deterministic": deterministic,
    "tool_call": tool_call,
}
NAMES = ("completion", *CHECKS)


ALONE = "deterministic"
"""Asked of one name after the other: a batch with other requests may change what two equal requests are answered."""


@dataclass
class Checked:
    """The checks of one served name, as far as the engine answered."""

    client: Client
    checks: list[Check] = field(default_factory=list)
    completion: Reply | None = None
    silent: bool = False


def run_checks(clients: Sequence[Client]) -> list[Checked]:
    """All checks of the served names of one engine, in order, up to the first that gets no answer.

    The names are asked side by side, as clients would, which takes little longer than to ask one of them.
    """
    names = [Checked(client) for client in clients]

    def ask(name: Checked, check: str) -> None:
        begin = time.monotonic()
        try:
            if check == NAMES[0]:
                reply = name.completion = completion(name.client)
                outcome = Outcome.PASSED
                detail = shown(reply.text) + ("" if reply.tokens is None else f", {reply.tokens} tokens")
            else:
                outcome, detail = CHECKS[check](name.client)
        except StillThinkingError as error:
            outcome, detail = Outcome.NOT_SHOWN, str(error)
        except (CheckFailedError, EngineSilentError) as error:
            outcome, detail, name.silent = Outcome.FAILED, str(error), isinstance(error, EngineSilentError)
        name.checks.append(Check(check, outcome, round(time.monotonic() - begin, 3), detail))

    for check in NAMES:
        for beside in [[name] for name in names] if check == ALONE else [names]:
            side_by_side(partial(ask, check=check), beside)
            if any(name.silent for name in beside):
                return names
    return names
