# SPDX-License-Identifier: Apache-2.0
"""The quality suite: questions with the answers that are expected, and whether an answer is one of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..engine.config import EngineConfig
from ..names import ENGINE_NAME
from ..system.records import RecordError, read_record
from ..text import nearest, shown
from .checks import Reply, find_json_problem, quote

MAX_TOKENS = 256
MOST_TOKENS = 32768
EXPECTATIONS = ("exact", "regex", "json_schema", "points", "tool_call")
"""A case has one of these keys."""
FILLER = "Entry {number}: pump {pump} in hall {hall} ran at {load} percent and needed no attention."
FILLER_TOKENS = 24
"""More tokens than a sentence of FILLER has with the tokenizers of Gemma, Llama and Qwen."""


@dataclass(frozen=True)
class Point:
    """Something that an answer must name."""

    point: str
    """What it is, for people."""
    patterns: tuple[str, ...]
    """Regular expressions, without regard to case, that must all be found."""


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class LongContext:
    """A sentence among many others in front of the question."""

    fact: str
    share: float = 0.5
    """Part of the engine's context that the sentences fill."""
    most_tokens: int = 8192
    """Tokens that they have at most."""


@dataclass(frozen=True)
class Case:
    """One question and what is expected of the answer."""

    name: str
    prompt: str
    source: str = "operator"
    """Where it comes from: `reference host`, `own` (of this project) or `operator`."""
    system: str | None = None
    max_tokens: int = MAX_TOKENS
    served_names: tuple[str, ...] = ()
    """Names that are asked; none means the first one of every engine."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """As in a chat request."""
    context: LongContext | None = None
    exact: str | None = None
    """The whole answer, without blanks around it."""
    regex: str | None = None
    """Regular expression that is found in the answer."""
    json_schema: Mapping[str, Any] | None = None
    """JSON schema of the answer, which is not sent: the model keeps to it by itself."""
    points: tuple[Point, ...] = ()
    tool_call: ToolCall | None = None

    @property
    def expectation(self) -> str:
        return next(kind for kind in EXPECTATIONS if getattr(self, kind))


def find_mistakes(cases: Any, variable: str) -> list[str]:
    """Return every mistake in a list of cases as one sentence; empty if there is none."""
    if not isinstance(cases, list | tuple):
        return [f"{variable}: {shown(cases)} is no list; write one entry for each case."]
    found: list[str] = []
    for number, data in enumerate(cases):
        place = f"{variable}[{number}]"
        name = data.get("name") if isinstance(data, Mapping) else None
        if isinstance(name, str):
            place = f"{variable}, case {shown(name)}"
        found += [f"{place}: {text}" for text in _find_mistakes_of(data)]
    names = [data.get("name") for data in cases if isinstance(data, Mapping)]
    twice = sorted({str(name) for name in names if name is not None and names.count(name) > 1})
    return found + [f"{variable}: two cases have the name {name}; give one another name." for name in twice]


def _find_mistakes_of(data: Any) -> Iterator[str]:
    known = [item.name for item in fields(Case)]
    for key in data if isinstance(data, Mapping) else ():
        if key not in known:
            yield f"{shown(key)} is no key of a case; {nearest(str(key), known)}"
    try:
        case = read_record(Case, data)
    except RecordError as error:
        yield f"{error}."
        return
    if not ENGINE_NAME.fullmatch(case.name):
        yield f"the name {shown(case.name)} is none: small letters, digits and '-', at most 63, such as my-case."
    if not case.prompt.strip():
        yield "the prompt is empty; write the question."
    if not 1 <= case.max_tokens <= MOST_TOKENS:
        yield f"max_tokens is {case.max_tokens}; write a number from 1 to {MOST_TOKENS}, such as {MAX_TOKENS}."
    given = [kind for kind in EXPECTATIONS if getattr(case, kind)]
    if len(given) != 1:
        yield f"it expects {' and '.join(given) or 'nothing'}; write exactly one of {', '.join(EXPECTATIONS)}."
    if case.tool_call and not case.tools:
        yield "tool_call is expected, and tools is empty; describe the tool as in a chat request."
    if case.context and not (0 < case.context.share <= 0.9 and case.context.most_tokens > 0):
        yield f"context.share is {case.context.share}; write a part of the context above 0 and up to 0.9, such as 0.5."
    for pattern in [case.regex, *(text for point in case.points for text in point.patterns)]:
        try:
            re.compile(pattern or "")
        except re.error as error:
            yield f"{shown(pattern)} is no regular expression ({error}); escape what is meant literally with '\\\\'."


def read_cases(cases: Sequence[Mapping[str, Any]]) -> tuple[Case, ...]:
    """Return the cases. Raises RecordError if one is malformed; `find_mistakes` says more."""
    return tuple(read_record(Case, data, f"case {number}") for number, data in enumerate(cases, 1))


def build_prompt(case: Case, config: EngineConfig) -> str:
    """Return the text of a case for an engine: a long context is as long as the engine's allows."""
    if case.context is None:
        return case.prompt
    tokens = min(case.context.share * (config.max_model_len or MOST_TOKENS), case.context.most_tokens)
    count = max(2, int((tokens - case.max_tokens) / FILLER_TOKENS))
    lines = [
        FILLER.format(number=number, pump=1 + number * 7 % 90, hall=1 + number * 3 % 8, load=20 + number * 11 % 70)
        for number in range(1, count + 1)
    ]
    lines.insert(count // 2, case.context.fact)
    return "\n".join([*lines, "", case.prompt])


def judge(case: Case, reply: Reply) -> str:
    """Return why an answer is not the expected one; empty if it is."""
    text = "" if reply.only_thought else reply.text.strip()
    cut = " It was cut off at max_tokens." if reply.finish == "length" else ""
    if case.exact is not None:
        return "" if text == case.exact.strip() else f"it is {quote(text)}, expected is {quote(case.exact)}.{cut}"
    if case.regex is not None:
        return "" if re.search(case.regex, text) else f"nothing in {quote(text)} matches {quote(case.regex)}.{cut}"
    if case.json_schema is not None:
        problem = find_json_problem(text, case.json_schema)
        return f"{quote(text)} is {problem}.{cut}" if problem else ""
    if case.tool_call is not None:
        return _judge_call(case.tool_call, reply)
    flags = re.IGNORECASE | re.DOTALL
    missing = [point.point for point in case.points if not all(re.search(one, text, flags) for one in point.patterns)]
    return f"it does not name {'; '.join(missing)}.{cut}" if missing else ""


def _judge_call(wanted: ToolCall, reply: Reply) -> str:
    if not reply.calls:
        return f"no tool was called; the answer is {quote(reply.text)}."
    name, arguments = reply.calls[0]
    try:
        given = json.loads(arguments)
    except ValueError:
        given = None
    if (name, given) == (wanted.name, dict(wanted.arguments)):
        return ""
    return f"it calls {name}({quote(arguments)}), expected is {wanted.name}({json.dumps(wanted.arguments)})."
