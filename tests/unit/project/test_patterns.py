# SPDX-License-Identifier: Apache-2.0
"""Every regular expression of the package and of the modules, on long hostile lines: none may take quadratic time.

The patterns are collected from the sources, so a new one is tested without being named here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re
import time
from collections.abc import Iterator, Mapping
from re._parser import parse  # type: ignore[import-not-found]
from typing import Any

import ansible.module_utils.vllm_edge as package
import pytest
from ansible.module_utils.vllm_edge.engine.diagnosis import Death, explain
from ansible.module_utils.vllm_edge.engine.journal import OWN_PROBE
from ansible.module_utils.vllm_edge.system.docker import LINE_CHARS, split_records
from helpers import ROOT

LENGTH = 16_000
LIMIT_S = 0.1
"""CPU seconds of one search on LENGTH characters. A pattern of linear time needs less than a hundredth of it."""
PIECES = (
    " ", "0", "a", "a/", '"', "'", "(", "[", "{", "1.", "a b ", "GET /health?a", ": ", "a: ", "\t \t", "/models/",
    "Error: ", "Tried to allocate ", "x=1,", "\x1b[0m", "(a) ", "-a", "layers.", "No such file or directory: '/",
    "user://", "nccl", "KEY", "File \"", "\n", " \n", "a\n", "é", "::", "0,", "NVLink ", "model.layers.1.",
)  # fmt: skip
TEXTS = [(piece * LENGTH)[:LENGTH] for piece in PIECES] + [
    f"{lead}{(piece * LENGTH)[:LENGTH]}{end}"
    for lead, piece, end in (
        ("To serve at least one request with the model's max seq len (1)", "(1.1 GiB KV", "!"),
        ("vllm:cache_config_info{", "a,", "!"),
        ("Capturing CUDA graphs", "a", "!"),
        ("unable to mmap", "torch_", "\n"),
        ('"GET /', "a?by=vllm-edge", '"'),
        ("Worker proc ", "Process a ", "!"),
    )
]


def walk(value: object, seen: set[int]) -> Iterator[re.Pattern[Any]]:
    """The patterns in a value of a module: also those in its tuples, mappings and records."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, Mapping | list | tuple | set | frozenset):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from walk(item, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if isinstance(item, str) and field.name in ("pattern", "raised_in"):
                yield re.compile(item)
            else:
                yield from walk(item, seen)


def name_flags(node: ast.Call) -> int:
    """The flags that a call of `re` names."""
    names = [part.attr for argument in node.args[1:] for part in ast.walk(argument) if isinstance(part, ast.Attribute)]
    names += [part.attr for word in node.keywords for part in ast.walk(word.value) if isinstance(part, ast.Attribute)]
    return sum(getattr(re, name) for name in {*names} if isinstance(getattr(re, name, None), re.RegexFlag))


def collect() -> dict[str, tuple[str, re.Pattern[Any]]]:
    """Every pattern by where it stands, with the function that uses it: `search` if that is not known."""
    found: dict[str, tuple[str, re.Pattern[Any]]] = {}
    seen: set[int] = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith(("__main__", "container_probe")):
            for name, value in vars(importlib.import_module(module.name)).items():
                for number, pattern in enumerate(walk(value, seen)):
                    found[f"{module.name.removeprefix(package.__name__)}.{name}[{number}]"] = ("search", pattern)
    for path in sorted((ROOT / "plugins").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="re"), attr=how), args=[ast.Constant(text), *_]):
                    if isinstance(text, str | bytes) and how not in ("compile", "escape"):
                        how = how if how in ("match", "fullmatch") else "search"
                        found[f"{path.name}:{node.lineno}:{node.col_offset}"] = how, re.compile(text, name_flags(node))
    return found


SAMPLES = {"category_digit": "1", "category_space": " ", "category_word": "a"}


def make_samples(tokens: Any) -> list[str]:
    """Texts that a pattern matches, one for each branch: hostile ones begin like that and do not go on."""
    texts = [""]
    for kind, value in tokens:
        match str(kind).lower():
            case "literal":
                more = [chr(value)]
            case "in":
                first, what = value[0]
                begin = what[0] if isinstance(what, tuple) else what
                # A category is a number, too, with a name of its own.
                text = chr(begin) if type(begin) is int else SAMPLES.get(str(what).lower(), "-")
                more = ["a" if str(first).lower() == "negate" else text]
            case "any" | "not_literal":
                more = ["a"]
            case "max_repeat" | "min_repeat" | "possessive_repeat":
                more = [text * max(1, min(value[0], 64)) for text in make_samples(value[2])]
            case "subpattern":
                more = make_samples(value[3])
            case "branch":
                more = [text for branch in value[1] for text in make_samples(branch)]
            case _:
                more = [""]
        texts = [text + part for text in texts for part in more][:12]
    return texts


def make_texts(pattern: re.Pattern[Any]) -> list[str]:
    """The common hostile texts, and those that look like the pattern until shortly before its end."""
    given = pattern.pattern.decode("latin-1") if isinstance(pattern.pattern, bytes) else pattern.pattern
    samples = {text[: len(text) * part // 4] for text in make_samples(parse(given)) for part in (1, 2, 3)}
    samples |= {text[:-1] for text in make_samples(parse(given))}
    return TEXTS + [(sample * LENGTH)[:LENGTH] for sample in samples if sample]


def measure(how: str, pattern: re.Pattern[Any], text: str) -> float:
    """The least CPU seconds of three searches; one that is far too long is not repeated."""
    least = float("inf")
    given: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
    for _ in range(3):
        began = time.process_time()
        getattr(pattern, how)(given)
        least = min(least, time.process_time() - began)
        if least < LIMIT_S or least > 10 * LIMIT_S:
            break
    return least


@pytest.mark.slow
def test_no_pattern_is_slow_on_a_long_line() -> None:
    patterns = collect()
    assert len(patterns) > 200
    assert sum("SIGNATURES" in place for place in patterns) >= 40
    slow = []
    for place, (how, pattern) in patterns.items():
        for text in make_texts(pattern):
            if (seconds := measure(how, pattern, text)) > LIMIT_S:
                slow.append(f"{place}: {pattern.pattern!r}: {seconds:.2f} s of CPU on {LENGTH} of {text[:60]!r}")
                break
    assert slow == []


@pytest.mark.parametrize("was_serving", [False, True])
def test_a_log_that_a_client_filled_is_explained_at_once(was_serving: bool) -> None:
    text = "".join(
        f'2026-11-21T03:00:00.000000001Z INFO: "GET /health?{(piece * LENGTH)[:LENGTH]} HTTP/1.1" 404\n'
        for piece in PIECES * 13
        if "\n" not in piece
    )
    began = time.process_time()
    lines = [record.line for record in split_records(text)][-400:]
    assert [OWN_PROBE.search(line) for line in lines] == [None] * 400
    assert max(map(len, lines)) == LINE_CHARS
    assert explain(Death(lines=lines, exit_code=137, was_serving=was_serving)).cause
    assert time.process_time() - began < 2.0
