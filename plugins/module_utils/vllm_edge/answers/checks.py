# SPDX-License-Identifier: Apache-2.0
"""The five checks of the canary. Each sends requests with few tokens to one served name and evaluates the answers.

The outcome is about the engine and not about how clever the model is. What an engine must do with any model (use the
system prompt, keep to a schema, parse a tool call) passes or fails. What only a capable model can show is `not_shown`
if the model does not show it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import Any, TypeVar

from ..engine.config import EngineConfig
from ..system.http import Answer
from ..system.records import parse_json
from ..system.threads import call_in_parallel

Ask = Callable[..., Answer]
"""Sends a request; `system.http.request` or a substitute."""
Verdict = tuple["Outcome", str]
"""Outcome and detail of a check."""
Content = str | list[dict[str, str]]
"""Content of a message: a text, or a list of parts."""
T = TypeVar("T")

QUESTION = "In one short sentence: what is a serving host?"
# At each step only one next token is likely, so rounding rarely decides.
COUNTING = "Count from 1 to 9, digits and commas only."
ANSWER_TOKENS = 24
"""Upper limit of the tokens in an answer. The next three constants are such limits, too."""
COUNTING_TOKENS = 12
STRUCTURED_TOKENS = 64
THINKING_TOKENS = 512
"""For a model that cannot be told not to think: fits the default canary timeout of 120 s at 5 tokens a second."""

LAMP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "colour": {"enum": ["red", "green", "blue"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["on", "colour", "level"],
    "additionalProperties": False,
}
# Two complete answers to choose from: a grammar of literals allows no whitespace.
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

# bf16 has steps of 1/8 for logits from 16 to 32. Rounding does not swap tokens whose ratings differ by more than this
# (a factor of 2.7 in probability).
ROUNDING_NATS = 1.0
TOP_LOGPROBS = 5
"""Number of likeliest tokens to request per position."""


class Outcome(StrEnum):
    """Outcome of a check; see the top of this file."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SHOWN = "not_shown"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    check: str
    outcome: Outcome
    seconds: float
    detail: str


class CheckFailedError(Exception):
    """The engine answered incorrectly; the text says how."""


class StillThinkingError(Exception):
    """The model used all its tokens for thinking, so the check has no result."""


class EngineSilentError(Exception):
    """There was no HTTP response, so further requests would wait in vain."""


def error_text(answer: Answer) -> str:
    """Return the message of an OpenAI-style error, else the beginning of the body."""
    try:
        data: Any = answer.json()
        error = data.get("error", data)
        text = error.get("message") if isinstance(error, Mapping) else error
    except (ValueError, AttributeError):
        text = None
    return str(text or answer.body[:300].decode("utf-8", "replace")).strip()


def quote(text: str, limit: int = 100) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= limit else line[: limit - 1] + "…")


@dataclass(frozen=True)
class Reply:
    text: str
    """If a reasoning model used all its tokens for thinking, that counts as its text."""
    only_thought: bool
    """Whether `text` is the model's thinking because it said nothing else."""
    tokens: int | None
    prompt_tokens: int | None
    finish: str
    calls: tuple[tuple[str, str], ...]
    """Tool calls, as (name, arguments as JSON text)."""
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """For each position, the log probabilities of the likeliest tokens by token id. The request must have asked for
    `return_tokens_as_token_ids`."""


NO_REPLY = (ValueError, KeyError, IndexError, TypeError, AttributeError)
"""Exceptions of `parse_reply` if the data are no chat completion."""


def _parse_logprobs(choice: Mapping[str, Any]) -> Iterator[Mapping[int, float]]:
    for position in (choice.get("logprobs") or {}).get("content") or []:
        top = [position, *position["top_logprobs"]]
        yield {int(item["token"].removeprefix("token_id:")): float(item["logprob"]) for item in top}


def parse_reply(data: Any) -> Reply:
    """Parse a chat completion. Raises NO_REPLY."""
    choice = data["choices"][0]
    message = choice["message"]
    usage = data.get("usage") or {}
    counts = [usage.get(key) for key in ("completion_tokens", "prompt_tokens")]
    tokens, prompt_tokens = (count if isinstance(count, int) else None for count in counts)
    thought = message.get("reasoning_content") or message.get("reasoning")
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return Reply(
        text=str(message.get("content") or thought or ""),
        only_thought=bool(thought) and not message.get("content") and not functions,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        finish=str(choice.get("finish_reason")),
        calls=tuple((str(function["name"]), str(function["arguments"])) for function in functions),
        token_ids=tuple(choice.get("token_ids") or ()),
        logprobs=tuple(_parse_logprobs(choice)),
    )


@dataclass(frozen=True)
class Client:
    """Sends requests to one served name of one engine.

    `what` names what is requested, for messages. Every request raises EngineSilentError if there is no response, and
    CheckFailedError if the response is an error or not what was requested.
    """

    config: EngineConfig
    name: str
    timeout_s: float
    ask: Ask

    def post(self, path: str, what: str, **payload: Any) -> Any:
        """Send a POST request and return the parsed JSON; `payload` is the request without `model`."""
        answer = self.ask(self.config.url, path, self.timeout_s, method="POST", payload={"model": self.name, **payload})
        if answer.status is None:
            raise EngineSilentError(f"{what} of {self.name!r}: {answer.error}")
        if not answer.ok:
            raise CheckFailedError(f"{what} of {self.name!r} answered HTTP {answer.status}: {error_text(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise CheckFailedError(f"{what} of {self.name!r} is not JSON: {error}") from error

    def post_for(self, path: str, what: str, key: str, kind: type[T], **payload: Any) -> T:
        """Send a POST request and return the value of a key of the answer, which must be of this type and not empty."""
        answer = self.post(path, what, **payload)
        value = answer.get(key) if isinstance(answer, Mapping) else None
        if not isinstance(value, kind) or not value:
            raise CheckFailedError(f"POST {path} of {self.name!r} answered no {key}")
        return value

    def chat(self, what: str, user: Content, max_tokens: int, *, system: str | None = None, **payload: Any) -> Reply:
        """Request one chat completion at temperature 0; `payload` has further fields of the request."""
        fixed = {"messages": build_messages(user, system), "max_tokens": max_tokens, "temperature": 0, "seed": 0}
        data = self.post("/v1/chat/completions", what, **fixed, **payload)
        try:
            return parse_reply(data)
        except NO_REPLY as error:
            raise CheckFailedError(
                f"{what} of {self.name!r} is no chat completion ({type(error).__name__}: {error})"
            ) from error

    def chat_patiently(self, what: str, user: str, max_tokens: int, **payload: Any) -> Reply:
        """Request a completion, or a structure that vLLM enforces only after the model has stopped thinking.

        Some models can be told not to think. The templates of others (Qwen3-Thinking, DeepSeek-R1, gpt-oss) have no
        such switch or name it differently, so these models get enough tokens to finish thinking.

        Raises StillThinkingError: the model was still thinking when its tokens ended.
        """
        if self.config.reasoning_parser:
            payload["chat_template_kwargs"] = {"enable_thinking": False}
        for most in (max_tokens, max_tokens + THINKING_TOKENS):
            reply = self.chat(what, user, most, **payload)
            if not (reply.only_thought and reply.finish == "length"):
                return reply
        raise StillThinkingError(
            f"{what} of {self.name!r} did not come: the model thought for all its {reply.tokens} tokens"
        )


def build_messages(user: Content, system: str | None = None) -> list[dict[str, Content]]:
    first: list[dict[str, Content]] = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": user}]


def check_completion(client: Client) -> Reply:
    """Check that the engine answers with text. Raises CheckFailedError, EngineSilentError.

    The first completion compiles kernels and can crash an engine whose /health is 200.
    """
    reply = client.chat("the completion", QUESTION, ANSWER_TOKENS)
    if reply.text.strip() == "":
        raise CheckFailedError(
            f"the completion of {client.name!r} is empty ({reply.tokens} tokens): the chat template or the weights "
            "are wrong"
        )
    return reply


def check_system_prompt(client: Client) -> Verdict:
    """Check that the chat template renders the system prompt, and content in parts, and that a completion gets both.

    A template may silently drop the system role, or all parts of a user's list but the first. The system prompt is not
    sent in parts, of which Gemma 3 takes the first alone. /tokenize renders messages as /v1/chat/completions does;
    equal numbers of tokens show that the prompt that was inspected is what the model gets.
    """
    sentences = [f"The canary of today is called {secrets.token_hex(4)}.", f"It sings {secrets.token_hex(4)}."]
    parts: Content = [{"type": "text", "text": sentence} for sentence in sentences]
    messages: list[tuple[str, str, Content]] = [
        ("the system prompt", " ".join(sentences), QUESTION),
        ("a message of two parts", QUESTION, parts),
    ]
    for what, system, user in messages:
        question = {"messages": build_messages(user, system)}
        tokens = client.post_for("/tokenize", "the tokenized prompt", "tokens", list, **question)
        prompt = client.post_for("/detokenize", "the rendered prompt", "prompt", str, tokens=tokens)
        if missing := [sentence for sentence in sentences if sentence not in " ".join(prompt.split())]:
            raise CheckFailedError(
                f"{what} does not reach {client.name!r}: the chat template renders {quote(prompt, 200)} without "
                f"{missing[0]!r}; another chat template is needed"
            )
    reply = client.chat("the completion with a system prompt", parts, 1, system=QUESTION)
    if reply.prompt_tokens != len(tokens):
        raise CheckFailedError(
            f"a completion of {client.name!r} gets a prompt of {reply.prompt_tokens} tokens where the chat template "
            f"renders {len(tokens)}: completions do not go through the template that /tokenize shows"
        )
    return Outcome.PASSED, f"the rendered prompt of {len(tokens)} tokens holds the system prompt"


def find_json_problem(text: str, schema: Mapping[str, Any] = LAMP_SCHEMA) -> str | None:
    """Return why a text is no JSON according to a schema; None if it is."""
    import fastjsonschema  # without dependencies; jsonschema needs a package that is compiled for each Python

    try:
        fastjsonschema.validate(dict(schema), parse_json(text))
    except fastjsonschema.JsonSchemaValueException as error:
        return f"not of the schema: {error.message}"
    except ValueError as error:
        return f"not JSON ({error})"
    return None


def check_json_schema(client: Client) -> Verdict:
    """Check that the engine enforces `response_format` with a JSON schema: the answer parses and validates.

    JSON and vLLM's grammar allow any amount of whitespace between tokens. A random model, and sometimes Gemma 4
    (vllm-project/vllm#40080), fills all its tokens with whitespace. The grammar is then tested once more with a schema
    of literals, which leaves no room for whitespace.
    """

    def ask(schema: Mapping[str, Any]) -> Reply:
        schema_format = {"type": "json_schema", "json_schema": {"name": "lamp", "schema": schema, "strict": True}}
        return client.chat_patiently(
            "the answer by JSON schema", DESCRIBE, STRUCTURED_TOKENS, response_format=schema_format
        )

    reply = ask(LAMP_SCHEMA)
    problem = find_json_problem(reply.text)
    if problem is None:
        return Outcome.PASSED, f"{quote(reply.text)} validates"
    # The tokens ran out within whitespace, or within a word after much whitespace.
    blank = sum(character.isspace() for character in reply.text)
    padded = reply.text != reply.text.rstrip() or 2 * blank > len(reply.text)
    padded = padded and reply.finish == "length" and reply.text.startswith("{")
    if padded:
        reply = ask(LAMP_LITERALS)
        problem = find_json_problem(reply.text)
        if problem is None:
            return Outcome.PASSED, (
                f"{quote(reply.text)} validates, by a schema of literals: by one of types this model filled its tokens "
                "with whitespace, which disable_any_whitespace in --structured-outputs-config forbids"
            )
    raise CheckFailedError(
        f"the answer of {client.name!r} by a JSON schema is {problem}: {quote(reply.text)}; structured output does not "
        "hold"
    )


def measure_spread(logprobs: Sequence[Mapping[int, float]], position: int, tokens: Sequence[int]) -> float | None:
    """Return how far apart, in nats, a position rates some tokens; None if it does not list all of them."""
    rated = [logprobs[position].get(token) for token in tokens] if position < len(logprobs) else [None]
    known = [value for value in rated if value is not None]
    return max(known) - min(known) if len(known) == len(rated) else None


@dataclass(frozen=True)
class Difference:
    place: tuple[int, frozenset[object]]
    """The position at which they part and the tokens there; position 0 and both texts if no token ids are known."""
    text: str
    is_rounding: bool


def _ask_twice(client: Client) -> Reply | Difference:
    """Send the same question twice at temperature 0, and return the answer if both have the same tokens. Otherwise a
    third answer with log probabilities says how far apart the model rates the tokens."""
    replies = [client.chat("the repeated completion", COUNTING, COUNTING_TOKENS, return_token_ids=True) for _ in "12"]
    first, second = replies
    if first.token_ids == second.token_ids and first.text == second.text:
        return first
    difference = f"asked twice at temperature 0, {client.name!r} answers {quote(first.text)} and {quote(second.text)}"
    if not first.token_ids or not second.token_ids:
        texts = frozenset({first.text, second.text})
        return Difference((0, texts), f"{difference}, and tells no token ids by which that could be judged", False)
    listed: dict[str, Any] = {"logprobs": True, "top_logprobs": TOP_LOGPROBS, "return_tokens_as_token_ids": True}
    what = "the completion with log probabilities"
    third = client.chat(what, COUNTING, COUNTING_TOKENS, return_token_ids=True, **listed)
    answers = [first.token_ids, second.token_ids, third.token_ids]
    # The first position at which they differ; an answer that has ended differs.
    sets = (frozenset(tokens) for tokens in zip_longest(*answers))
    position, tokens = next((at, tokens) for at, tokens in enumerate(sets) if len(tokens) > 1)
    listed_tokens = [answer[position] for answer in answers if position < len(answer)]
    # An answer that has ended is not rated.
    spread = measure_spread(third.logprobs, position, listed_tokens) if len(listed_tokens) == len(answers) else None
    far = f"beyond its {TOP_LOGPROBS} likeliest" if spread is None else f"{spread:.2f} nats apart"
    text = f"{difference}; they part at token {position + 1}, between tokens {far}"
    return Difference((position, tokens), text, spread is not None and spread <= ROUNDING_NATS)


def check_deterministic(client: Client) -> Verdict:
    """Check that the same question, asked twice at temperature 0 with the same seed, gets the same tokens.

    vLLM does not promise that by default (docs.vllm.ai/en/latest/usage/reproducibility): other requests in the batch,
    or a prompt that is in the prefix cache by now, change the order of summation, and two tokens with almost equal
    ratings may swap. That is no defect. Broken memory, a broken kernel or broken copies between GPUs have another
    effect: tokens with very different ratings swap. A difference within ROUNDING_NATS is `not_shown`. After a larger
    one the engine is asked twice more, and fails if the same tokens differ at the same position again: the ratings are
    those of another answer, whose batch and cache may differ as well.
    """
    found = _ask_twice(client)
    if isinstance(found, Reply):
        count = len(found.token_ids) or found.tokens
        return Outcome.PASSED, f"asked twice, the same {count} tokens: {quote(found.text)}"
    if found.is_rounding:
        return Outcome.NOT_SHOWN, f"{found.text}: rounding, which VLLM_BATCH_INVARIANT=1 would rule out"
    for _ in "12":
        again = _ask_twice(client)
        if isinstance(again, Difference) and again.place == found.place and not again.is_rounding:
            raise CheckFailedError(
                f"{found.text}, and did so again, which rounding does not do: suspect the GPU's memory, the copies "
                "between GPUs (NCCL_P2P_DISABLE=1, --disable-custom-all-reduce) or the kernels"
            )
    later = "asked twice more, they did not part there again. If later runs say this often, suspect the GPU's memory"
    return Outcome.NOT_SHOWN, f"{found.text}; {later}"


def _find_call_problem(reply: Reply) -> str | None:
    """Return why a reply is no call of the tool with valid arguments; None if it is."""
    if not reply.calls:
        return f"no tool call but {quote(reply.text)}"
    name, arguments = reply.calls[0]
    if name != TOOL_NAME:
        return f"a call of {name!r}, which is not the tool"
    problem = find_json_problem(arguments)
    return None if problem is None else f"a call with arguments {quote(arguments)}: {problem}"


def check_tool_call(client: Client) -> Verdict:
    """Check that the tool call parser converts the model's output to calls with valid JSON.

    One call is enforced, which works with any model: by a named tool_choice or, for parsers that do not support it, by
    structured output in the parser's own syntax. In the other one tool_choice is auto, and the model itself has to
    choose the call. A random model never does that, and the outcome is then `not_shown`.
    """
    parser = client.config.tool_call_parser
    if parser is None:
        return Outcome.SKIPPED, f"{client.config.engine} has no tool_call_parser"
    forced: dict[str, Any] = {"tool_choice": {"type": "function", "function": {"name": TOOL_NAME}}}
    if parser in NATIVE_CALLS:
        forced = {"tool_choice": "auto", "structured_outputs": {"choice": [NATIVE_CALLS[parser]]}}

    def ask(kind: str) -> Reply:
        choice = forced if kind == "enforced" else {"tool_choice": "auto"}
        reply = client.chat_patiently(f"the {kind} tool call", USE_TOOL, STRUCTURED_TOKENS, tools=[TOOL], **choice)
        if kind == "enforced" and (problem := _find_call_problem(reply)) is not None:
            raise CheckFailedError(
                f"an enforced tool call of {client.name!r} gave {problem}; tool_call_parser is {parser}"
            )
        return reply

    # Of both, what is wrong with the enforced one is raised.
    _, free = call_in_parallel(ask, ("enforced", "free"))
    problem = _find_call_problem(free)
    if problem is None:
        return Outcome.PASSED, f"{TOOL_NAME}({free.calls[0][1]}), called freely"
    if any((find_json_problem(arguments) or "").startswith("not JSON") for _, arguments in free.calls):
        raise CheckFailedError(f"a free tool call of {client.name!r} gave {problem}; tool_call_parser is {parser}")
    return Outcome.NOT_SHOWN, (
        f"an enforced call has valid arguments; asked freely the model gave {problem}. A random model cannot choose "
        "a tool, a trained one should"
    )


CHECKS: Mapping[str, Callable[[Client], Verdict]] = {
    "system_prompt": check_system_prompt,
    "json_schema": check_json_schema,
    "deterministic": check_deterministic,
    "tool_call": check_tool_call,
}
"""The checks after `completion`, by name."""
NAMES = ("completion", *CHECKS)
ALONE = "deterministic"
"""This check runs after the others: other requests in a batch may change the answers to two equal requests."""


@dataclass
class Checked:
    """Results of one served name, as far as the engine answered."""

    client: Client
    checks: list[Check] = field(default_factory=list)
    completion: Reply | None = None
    silent: list[str] = field(default_factory=list)
    """Checks that got no response."""
    seconds: float = 0.0
    """From the first question to the last answer; checks run side by side."""


def run_checks(clients: Sequence[Client]) -> list[Checked]:
    """Run the checks for the served names of one engine, side by side but for ALONE, which follows them.

    Every name is asked for a completion, and the first one for the rest: vLLM compares a name with its list, and has
    one model and one chat template for all of them. Once the engine is silent, nothing more is requested.
    """
    names = [Checked(client) for client in clients]
    began = time.monotonic()

    def ask(name: Checked, check: str) -> None:
        begin = time.monotonic()
        try:
            if check == NAMES[0]:
                reply = name.completion = check_completion(name.client)
                outcome = Outcome.PASSED
                detail = quote(reply.text) + ("" if reply.tokens is None else f", {reply.tokens} tokens")
            else:
                outcome, detail = CHECKS[check](name.client)
        except StillThinkingError as error:
            outcome, detail = Outcome.NOT_SHOWN, str(error)
        except (CheckFailedError, EngineSilentError) as error:
            outcome, detail = Outcome.FAILED, str(error)
            name.silent += [check] if isinstance(error, EngineSilentError) else []
        now = time.monotonic()
        name.checks.append(Check(check, outcome, round(now - begin, 3), detail))
        name.seconds = round(now - began, 3)

    beside = [(name, NAMES[0]) for name in names]
    beside += [(name, check) for name in names[:1] for check in CHECKS if check != ALONE]
    call_in_parallel(lambda one: ask(*one), beside)
    if names and not any(name.silent for name in names):
        ask(names[0], ALONE)
    return names
