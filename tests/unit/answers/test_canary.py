# SPDX-License-Identifier: Apache-2.0
"""The canary against a real HTTP server that answers well, badly, or not at all."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.answers.canary_command import canary, run_canary
from ansible.module_utils.vllm_edge.answers.checks import NAMES, Outcome
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.system.http import Answer, get_health, request
from engine_files import CONFIG, written
from fake_engine import FAILED, LAMP, NOT_SHOWN, PASSED, Server, called, chat, kind, models, rated, refuse, serve

server = pytest.fixture(serve)


def test_every_served_name_is_asked_and_the_first_one_everything(server: Server) -> None:
    results = canary(server.config("sentry", "auditor"), 5)
    assert [(r.served_name, r.ok, r.completion, r.tokens, r.error) for r in results] == [
        ("sentry", True, "Ready.", 3, None),
        ("auditor", True, "Ready.", 3, None),
    ]
    first, second = ([(check.check, check.outcome) for check in result.checks] for result in results)
    assert first == [(name, PASSED) for name in NAMES]
    assert second == [("completion", PASSED)]
    assert all(result.seconds >= max(check.seconds for check in result.checks) > 0 for result in results)
    assert Counter(asked["model"] for asked in server.asked) == {"sentry": len(server.asked) - 1, "auditor": 1}
    questions = [asked for asked in server.asked if "messages" in asked and "max_tokens" in asked]
    assert all(asked["temperature"] == 0 and asked["seed"] == 0 for asked in questions)
    assert sum(asked["max_tokens"] for asked in questions) < 270
    # The system prompt is a text: of parts Gemma 3 takes the first alone.
    prompts = [asked["messages"][0]["content"] for asked in server.asked if "messages" in asked]
    assert len({prompt for prompt in prompts if prompt.startswith("The canary of")}) == 1


def test_names_and_checks_are_asked_side_by_side_but_for_what_wants_the_engine_alone(server: Server) -> None:
    names = ("architect", "worker", "auditor", "sentry")
    config = server.config(*names)
    server.answers["v1/models"] = models(*names)
    together = threading.Barrier(len(names) + len(("parts", "schema", "enforced", "free")), timeout=60)
    alone = threading.Lock()

    def ask(url: str, path: str, timeout_s: float, **more: Any) -> Answer:
        payload = more.get("payload") or {}
        if payload.get("return_token_ids"):
            assert alone.acquire(blocking=False), "somebody else is asked as well"
            time.sleep(0.02)
            alone.release()
        elif "max_tokens" in payload:
            together.wait()
        return request(url, path, timeout_s, **more)

    assert [(result.served_name, result.ok) for result in canary(config, 5, ask)] == [(name, True) for name in names]


ONE, TWO, OTHER = (chat(text, token_ids=ids) for text, ids in (("a b", [1, 2]), ("a c", [1, 3]), ("a", [1])))
FIRST, NEAR, FAR = {1: -0.1}, {2: -0.70, 3: -0.95}, {2: -0.01, 3: -4.61}
BLANK, BLANK_ON = (chat("{" + " \n" * 40 + end, finish="length") for end in ("", '"on'))
CUT = chat('{"on": true, "a": "wo', finish="length")


@pytest.mark.parametrize(
    ("name", "answers", "outcome", "message"),
    [
        ("completion", {"v1/models": models("worker")}, FAILED, "does not list 'sentry', but worker"),
        ("completion", {"v1/models": (200, {"models": []})}, FAILED, "has no list `data`"),
        ("completion", {"v1/models": refuse(401, "Unauthorized")}, FAILED, "HTTP 401: Unauthorized"),
        ("completion", {"v1/models": None}, FAILED, "connection closed without an answer"),
        ("completion", {"completion": refuse(500, "EngineDeadError")}, FAILED, "HTTP 500: EngineDeadError"),
        ("completion", {"completion": (200, {"choices": []})}, FAILED, "is no chat completion (IndexError"),
        ("completion", {"completion": chat("  \n", tokens=9)}, FAILED, "(9 tokens)"),
        ("system_prompt", {"tokenize": refuse(404, "Not Found")}, FAILED, "HTTP 404: Not Found"),
        ("system_prompt", {"tokenize": (200, {"count": 0, "tokens": []})}, FAILED, "answered no tokens"),
        ("system_prompt", {"detokenize": (200, {"text": "x"})}, FAILED, "answered no prompt"),
        ("system_prompt", {"detokenize": (200, {"prompt": "<system>The canary of"})}, FAILED, "not reach 'sentry'"),
        ("system_prompt", {"parts": 1}, FAILED, "a message of two parts does not reach 'sentry'"),
        ("system_prompt", {"system": chat("R")}, FAILED, "a prompt of 7 tokens where the chat template renders"),
        ("json_schema", {"schema": chat("{" + " \n" * 40, finish="stop")}, FAILED, "is not JSON"),
        ("json_schema", {"schema": CUT, "literals": chat(LAMP)}, FAILED, "JSON"),
        ("json_schema", {"schema": BLANK, "literals": chat("words")}, FAILED, "is not JSON"),
        # A model that fills its tokens with whitespace, also where they end in the middle of the word after it.
        ("json_schema", {"schema": BLANK, "literals": chat(LAMP)}, PASSED, "disable_any_whitespace"),
        ("json_schema", {"schema": BLANK_ON, "literals": chat(LAMP)}, PASSED, "disable_any_whitespace"),
        ("deterministic", {"repeated": [ONE, ONE]}, PASSED, "the same 2 tokens: 'a b'"),
        *(
            ("deterministic", {"repeated": [ONE, second] * 3, "logprobs": third}, outcome, message)
            for second, third, outcome, message in [
                (TWO, rated([1, 2], FIRST, NEAR), NOT_SHOWN, "token 2, between tokens 0.25 nats apart: rounding"),
                (TWO, rated([1, 2], FIRST, FAR), FAILED, "token 2, between tokens 4.60 nats apart"),
                # The third answer leaves earlier than the other two part: what counts is where it leaves.
                (TWO, rated([4, 2], {4: -0.2, 1: -3.0}, NEAR), FAILED, "token 1, between tokens 2.80 nats"),
                (TWO, rated([1, 2], FIRST, {2: -0.01}), FAILED, "beyond its 5 likeliest"),
                (OTHER, rated([1, 2], FIRST, NEAR), FAILED, "beyond its 5 likeliest"),
                (TWO, chat("1", token_ids=[1, 2]), FAILED, "beyond its 5 likeliest"),
            ]
        ),
        *(
            # A large difference counts only if the same tokens differ at the same position again.
            ("deterministic", {"repeated": [ONE, TWO, *later], "logprobs": third}, outcome, message)
            for later, third, outcome, message in [
                ([ONE] * 4, rated([1, 2], FIRST, FAR), NOT_SHOWN, "4.60 nats apart; asked twice more, they did not"),
                ([ONE, ONE, ONE, TWO], rated([1, 2], FIRST, FAR), FAILED, "and did so again"),
                ([ONE, ONE, TWO, ONE], rated([1, 2], FIRST, FAR), FAILED, "and did so again"),
                ([ONE, OTHER] * 2, rated([1, 2], FIRST, FAR), NOT_SHOWN, "asked twice more"),
                ([TWO, ONE, ONE, ONE], [rated([1, 2], FIRST, x) for x in (FAR, NEAR)], NOT_SHOWN, "asked twice more"),
            ]
        ),
        ("deterministic", {"repeated": [chat("a"), chat("a")]}, PASSED, "the same 3 tokens"),
        ("deterministic", {"repeated": [chat("a"), chat("b")] * 2}, FAILED, "no token ids by which that could be ju"),
        ("tool_call", {}, PASSED, "called freely"),
        ("tool_call", {"free": chat("I cannot.")}, NOT_SHOWN, "no tool call but 'I cannot.'"),
        ("tool_call", {"free": called('{"on": tr')}, FAILED, "a free tool call of 'sentry' gave a call with arguments"),
        ("tool_call", {"enforced": chat("<|tool_call>c:")}, FAILED, "gave no tool call but '<|tool_call>c:'"),
        ("tool_call", {"enforced": called('{"on": true}')}, FAILED, "must contain"),
        ("tool_call", {"enforced": called("[1]")}, FAILED, "must be object"),
        ("tool_call", {"enforced": called(LAMP.replace("green", "pink"))}, FAILED, "data.colour must be one of"),
        ("tool_call", {"enforced": called(LAMP.replace("3", "true"))}, FAILED, "data.level must be integer"),
        ("tool_call", {"enforced": called(LAMP, "other")}, FAILED, "a call of 'other'"),
        ("tool_call", {"enforced": chat(None, calls=[("set_lamp", None)])}, FAILED, "not JSON"),
    ],
)
def test_one_check(server: Server, name: str, answers: dict[str, Any], outcome: Outcome, message: str) -> None:
    server.answers |= answers
    check = server.check(name)
    assert check.outcome is outcome and message in check.detail, check
    repeated = [asked["messages"] for asked in server.asked if asked.get("return_token_ids")]
    assert all(messages == repeated[0] for messages in repeated)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_is_text_as_well(server: Server, key: str) -> None:
    server.answers["completion"] = (200, {"choices": [{"message": {"content": None, key: "Hm."}}]})
    result = server.result()
    assert result.ok and result.completion == "Hm." and result.tokens is None


@pytest.mark.parametrize(("parser", "sent"), [("gemma4", {"enable_thinking": False}), (None, None)])
def test_thinking_is_off_where_a_schema_has_to_hold(server: Server, parser: str | None, sent: Any) -> None:
    server.result(reasoning_parser=parser)
    guided = [asked for asked in server.asked if "response_format" in asked or "tools" in asked]
    assert [asked.get("chat_template_kwargs") for asked in guided] == [sent] * 3


THINKS = chat(None, tokens=64, finish="length")
THINKS[1]["choices"][0]["message"]["reasoning"] = "Okay, the user wants a lamp described as JSON"


def test_a_broken_parser_is_told_whatever_becomes_of_the_free_call(server: Server) -> None:
    server.answers |= {"enforced": chat("garbage"), "free": [THINKS, THINKS]}
    check = server.check("tool_call", reasoning_parser="deepseek_r1")
    assert check.outcome is FAILED and "an enforced tool call of 'sentry' gave no tool call" in check.detail


@pytest.mark.parametrize(("question", "name"), [("schema", "json_schema"), ("free", "tool_call")])
@pytest.mark.parametrize(
    ("then", "outcome", "told"),
    [
        (None, PASSED, "green"),
        (THINKS, NOT_SHOWN, "did not come: the model thought for all its 64 tokens"),
        (chat("No."), None, ""),
    ],
)
def test_a_model_that_cannot_be_asked_not_to_think_gets_more_tokens(
    server: Server, question: str, name: str, then: Any, outcome: Outcome | None, told: str
) -> None:
    """It passes when it comes to an end in time, else nothing is shown; what it says at its end is judged as always."""
    good = server.answers[question]
    server.answers[question] = [THINKS, then or good]
    check = server.check(name, reasoning_parser="deepseek_r1")
    assert check.outcome is (outcome or {"schema": FAILED, "free": NOT_SHOWN}[question])
    assert told in check.detail
    guided = [
        asked for asked in server.asked if "max_tokens" in asked and ("response_format" in asked or "tools" in asked)
    ]
    tokens = [asked["max_tokens"] for asked in guided if kind("/v1/chat/completions", asked) == question]
    assert tokens == [64, 576]


def test_a_call_is_enforced_by_name_or_in_the_parsers_own_syntax(server: Server) -> None:
    for parser in ("gemma4", "hermes"):
        assert server.check("tool_call", tool_call_parser=parser).outcome is PASSED
    (native,) = (asked for asked in server.asked if "structured_outputs" in asked)
    (named,) = (asked for asked in server.asked if "tools" in asked and asked["tool_choice"] != "auto")
    assert native["tool_choice"] == "auto"  # vLLM refuses a named choice together with structured outputs
    (call,) = native["structured_outputs"]["choice"]
    assert re.fullmatch(r'<\|tool_call>call:set_lamp\{on:true,colour:<\|"\|>green<\|"\|>,level:3\}<tool_call\|>', call)
    assert named["tool_choice"] == {"type": "function", "function": {"name": "set_lamp"}}
    assert "structured_outputs" not in named


def test_no_parser_no_tools(server: Server) -> None:
    check = server.check("tool_call", tool_call_parser=None)
    assert check.outcome is Outcome.SKIPPED and check.detail == "e2b has no tool_call_parser"
    assert not [asked for asked in server.asked if "tools" in asked]


@pytest.mark.parametrize(
    ("health", "message"),
    [
        (None, "/health does not answer either: the engine died in the middle"),
        ((503, b""), "/health answers HTTP 503: the engine died in the middle"),
    ],
)
def test_an_engine_that_dies_in_the_middle(server: Server, health: Any, message: str) -> None:
    server.answers |= {"schema": None, "health": health}
    result, _ = canary(server.config("sentry", "auditor"), 5)
    assert [check.outcome.value for check in result.checks] == ["passed", "passed", "failed", "skipped", "passed"]
    assert result.completion == "Ready." and not result.ok and result.error is not None
    for told in ("the answer by JSON schema of 'sentry'", message, "vllm-edge explain e2b"):
        assert told in result.error
    assert result.checks[3].detail.startswith("not asked")
    assert not any("return_token_ids" in asked for asked in server.asked), "nobody asks a silent engine any more"


def test_an_engine_that_is_not_well_too_slow_or_away(server: Server) -> None:
    server.answers["health"] = (503, {})
    answer = get_health(f"http://127.0.0.1:{server.port}", 2)
    assert not answer.ok and answer.words() == "HTTP 503"
    server.http.shutdown()  # the kernel still takes connections, nobody answers them
    (result,) = canary(server.config(), 0.2)
    assert result.error is not None and "no answer within 0.2 s" in result.error
    server.http.server_close()
    (result,) = canary(server.config(), 5)
    for told in ("connection refused", "systemctl status vllm-e2b.service", "vllm-edge explain e2b"):
        assert told in (result.error or "")


def test_one_bad_name_is_a_bad_engine(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{server.port}"
    paths = written(tmp_path, config={**CONFIG, "url": url, "served_names": ["sentry", "nobody"]})
    assert run_canary("e2b", paths, output="text", timeout_s=5) == 1
    headings = [line.split(" (")[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert headings == ["sentry: ok", "nobody: FAILED"]


def test_for_programs_and_for_people(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "url": f"http://127.0.0.1:{server.port}", "tool_call_parser": "gemma4"}
    paths = written(tmp_path, config=config)
    places = ["--etc", str(paths.etc), "--state", str(paths.state)]
    assert run_canary("e2b", paths, output="json", timeout_s=5) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True
    (result,) = answer["results"]
    keys = {"engine", "served_name", "ok", "seconds", "completion", "tokens", "error", "checks", "passed_at", "token_s"}
    assert set(result) == keys and result["token_s"] is None
    assert [list(check) for check in result["checks"]] == [["check", "outcome", "seconds", "detail"]] * 5
    assert {check["outcome"] for check in result["checks"]} == {"passed"}

    server.answers |= {"completion": (500, {}), "free": chat("I\ncannot.")}
    assert main([*places, "canary", "e2b"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sentry: FAILED (") and len(lines) == 6
    rows = [re.split(r" {2,}", line.strip(), maxsplit=3) for line in lines[1:]]
    assert [row[:2] for row in rows] == [
        ["completion", "failed"],
        ["system_prompt", "passed"],
        ["json_schema", "passed"],
        ["deterministic", "passed"],
        ["tool_call", "not shown"],
    ]
    assert rows[0][3].startswith("the completion of 'sentry' answered HTTP 500")

    server.answers["completion"] = chat()
    assert main([*places, "canary", "e2b"]) == 0
    assert capsys.readouterr().out.startswith("sentry: ok (")
    assert main([*places, "canary", "nobody"]) == 1
    assert "does not exist" in capsys.readouterr().err
