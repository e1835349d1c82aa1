# SPDX-License-Identifier: Apache-2.0
"""The canary against a real HTTP server that answers well, badly, or not at all."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.canary.checks import NAMES, Check, Outcome, find_lamp_problem
from ansible.module_utils.vllm_edge.canary.command import (
    TOKEN_DEADLINE_S,
    Result,
    canary,
    canary_unless_passed,
    full_canary,
    run_canary,
)
from ansible.module_utils.vllm_edge.cli import main
from ansible.module_utils.vllm_edge.engine.config import EngineConfig, EngineConfigError, parse_engine
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system.docker import Container, DockerAway
from ansible.module_utils.vllm_edge.system.http import Answer, get_health, request
from test_host_engine_config import CONFIG, written

LAMP = '{"on": true, "colour": "green", "level": 3}'


def chat(
    content: str | None = "Ready.", *, tokens: int = 3, finish: str = "stop", calls: Any = (), **choice: Any
) -> Any:
    """A chat completion as vLLM answers it."""
    tool_calls = [{"id": "c", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "reasoning": None}
    return (
        200,
        {
            "choices": [{"message": message, "finish_reason": finish, **choice}],
            "usage": {"completion_tokens": tokens, "prompt_tokens": 7},
        },
    )


def called(arguments: str = LAMP, name: str = "set_lamp") -> Any:
    return chat(None, calls=[(name, arguments)])


def rated(ids: list[int], *tops: Mapping[int, float]) -> Any:
    """A completion with the log probabilities of each position."""
    rows = [
        {
            "token": f"token_id:{token}",
            "logprob": top[token],
            "top_logprobs": [{"token": f"token_id:{key}", "logprob": value} for key, value in top.items()],
        }
        for token, top in zip(ids, tops, strict=True)
    ]
    return chat("1", token_ids=ids, logprobs={"content": rows})


def kind(path: str, asked: Mapping[str, Any]) -> str:
    """Which of the canary's questions a request is."""
    if path != "/v1/chat/completions":
        return path.strip("/")
    if asked.get("tools"):
        return "free" if asked["tool_choice"] == "auto" and "structured_outputs" not in asked else "enforced"
    if "response_format" in asked:
        return "literals" if "enum" in asked["response_format"]["json_schema"]["schema"] else "schema"
    if asked["messages"][0]["role"] == "system":
        return "system"
    if asked.get("logprobs"):
        return "logprobs"
    return "repeated" if asked.get("return_token_ids") else "completion"


class Server:
    """A good engine with a trained model; `answers` says otherwise by the question: (status, JSON or bytes), None
    closes the connection, a list is used up one by one."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {
            "v1/models": (200, {"data": [{"id": "sentry"}, {"id": "auditor"}]}),
            "health": (200, b""),
            "completion": chat(),
            "schema": chat(LAMP),
            "repeated": chat("1, 2", token_ids=[1, 2]),
            "enforced": called(),
            "free": called(),
        }
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, what: Any) -> None:
                if what is None:
                    self.connection.close()
                    return
                body = what[1] if isinstance(what[1], bytes) else json.dumps(what[1]).encode()
                self.send_response(what[0])
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                self.answer(outer.answers[self.path.strip("/")])

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(asked)
                self.answer(outer.reply(kind(self.path, asked), asked))

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]

    def reply(self, question: str, asked: Mapping[str, Any]) -> Any:
        if question in self.answers:
            answer = self.answers[question]
            return answer.pop(0) if isinstance(answer, list) else answer
        if question == "detokenize":
            return (200, {"prompt": "".join(map(chr, asked["tokens"]))})
        rendered = "".join(f"<{message['role']}>{message['content']}\n" for message in asked["messages"])
        if question == "tokenize":
            return (200, {"tokens": list(map(ord, rendered)), "count": len(rendered)})
        status, data = chat("R", tokens=1)
        data["usage"]["prompt_tokens"] = len(rendered)
        return (status, data)

    def config(self, *names: str, **changes: Any) -> EngineConfig:
        url = f"http://127.0.0.1:{self.port}"
        data = {**CONFIG, "served_names": list(names or ("sentry",)), "url": url, "tool_call_parser": "gemma4"}
        return parse_engine(json.dumps({**data, **changes}), "x")

    def result(self, **changes: Any) -> Result:
        (result,) = canary(self.config(**changes), 5)
        return result

    def check(self, name: str, **changes: Any) -> Check:
        """One check, where all others are well."""
        result = self.result(**changes)
        assert [check.check for check in result.checks] == list(NAMES)
        others = [check for check in result.checks if check.check != name]
        assert not [check for check in others if check.outcome in (Outcome.FAILED, Outcome.NOT_SHOWN)], others
        (found,) = [check for check in result.checks if check.check == name]
        assert result.ok == (found.outcome is not Outcome.FAILED)
        assert result.error == (None if result.ok else found.detail)
        return found


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.http.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_every_served_name_gets_every_check(server: Server) -> None:
    results = canary(server.config("sentry", "auditor"), 5)
    assert [(r.served_name, r.ok, r.completion, r.tokens, r.error) for r in results] == [
        ("sentry", True, "Ready.", 3, None),
        ("auditor", True, "Ready.", 3, None),
    ]
    for result in results:
        assert [(check.check, check.outcome) for check in result.checks] == [
            (name, Outcome.PASSED) for name in NAMES
        ], result.checks
        assert result.seconds == pytest.approx(sum(check.seconds for check in result.checks), abs=0.001)
    assert Counter(asked["model"] for asked in server.asked) == dict.fromkeys(
        ("sentry", "auditor"), len(server.asked) // 2
    )
    questions = [asked for asked in server.asked if "messages" in asked and "max_tokens" in asked]
    assert all(asked["temperature"] == 0 and asked["seed"] == 0 for asked in questions)
    assert sum(asked["max_tokens"] for asked in questions) < 2 * 250  # 17 s at 15 tokens a second


def test_names_are_asked_side_by_side_but_for_what_wants_the_engine_alone(server: Server) -> None:
    names = ("architect", "worker", "auditor", "sentry")
    config = server.config(*names)
    server.answers["v1/models"] = (200, {"data": [{"id": name} for name in names]})
    together = threading.Barrier(len(names), timeout=60)
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


@pytest.mark.parametrize(
    ("models", "completion", "told"),
    [
        ((200, {"data": [{"id": "worker"}]}), chat(), "does not list 'sentry', but worker"),
        ((200, {"data": []}), chat(), "but nothing"),
        ((200, b"<html>"), chat(), "something else than a list of models"),
        ((200, {"models": []}), chat(), "has no list `data`"),
        ((401, {"error": {"message": "Unauthorized"}}), chat(), "HTTP 401: Unauthorized"),
        (None, chat(), "connection closed without an answer"),
        ("same", (500, {"error": {"message": "EngineDeadError"}}), "HTTP 500: EngineDeadError"),
        ("same", (500, b"Internal Server Error"), "HTTP 500: Internal Server Error"),
        ("same", (200, {"choices": []}), "is no chat completion (IndexError"),
        ("same", (200, b"{"), "is not JSON"),
        ("same", chat("  \n", tokens=9), "(9 tokens)"),
        ("same", None, "connection closed without an answer"),
    ],
)
def test_what_is_no_good_completion(server: Server, models: Any, completion: Any, told: str) -> None:
    server.answers["completion"] = completion
    if models != "same":
        server.answers["v1/models"] = models
    assert told in server.check("completion").detail
    assert server.result().completion == ""


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thinking_is_text_as_well(server: Server, key: str) -> None:
    server.answers["completion"] = (200, {"choices": [{"message": {"content": None, key: "Hm."}}]})
    result = server.result()
    assert result.ok and result.completion == "Hm." and result.tokens is None


@pytest.mark.parametrize(
    ("question", "answer", "told"),
    [
        ("tokenize", (404, {"error": {"message": "Not Found"}}), "HTTP 404: Not Found"),
        ("tokenize", (200, {"count": 0, "tokens": []}), "answered no tokens"),
        ("detokenize", (200, {"text": "x"}), "answered no prompt"),
        ("detokenize", (200, {"prompt": "<user>In one short sentence"}), "does not reach 'sentry'"),
        ("detokenize", (200, {"prompt": "<system>The canary of today is called"}), "does not reach 'sentry'"),
        ("system", (400, {"error": {"message": "System role not supported"}}), "HTTP 400: System role not supported"),
        ("system", chat("R"), "a prompt of 7 tokens where the chat template renders"),
    ],
)
def test_a_system_prompt_that_is_lost(server: Server, question: str, answer: Any, told: str) -> None:
    server.answers[question] = answer
    assert told in server.check("system_prompt").detail


def test_each_system_prompt_is_another(server: Server) -> None:
    canary(server.config("sentry", "auditor"), 5)
    prompts = [
        asked["messages"][0]["content"] for asked in server.asked if "messages" in asked and "max_tokens" not in asked
    ]
    assert len(prompts) == len(set(prompts)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (LAMP, None),
        ('{"level":0,"colour":"red","on":false}', None),
        ("The lamp is on.", "not JSON"),
        ('{"on": true', "not JSON"),
        ("[1]", "a JSON list"),
        ("null", "a JSON NoneType"),
        ('{"on": true, "colour": "green"}', "keys colour, on where"),
        ('{"on": true, "colour": "green", "level": 3, "more": 1}', "keys colour, level, more, on where"),
        ('{"on": 1, "colour": "green", "level": 3}', "on is 1"),
        ('{"on": true, "colour": "pink", "level": 3}', "colour is 'pink'"),
        ('{"on": true, "colour": ["red"], "level": 3}', "colour is ['red']"),
        ('{"on": true, "colour": "green", "level": "3"}', "level is '3'"),
        ('{"on": true, "colour": "green", "level": true}', "level is True"),
        ('{"on": true, "colour": "green", "level": 10}', "level is 10"),
        ('{"on": true, "colour": "green", "level": -1}', "level is -1"),
    ],
)
def test_what_validates(text: str, problem: str | None) -> None:
    told = find_lamp_problem(text)
    assert told is None if problem is None else told is not None and problem in told


@pytest.mark.parametrize(
    ("schema", "literals", "told"),
    [
        (chat("A green lamp."), None, "is not JSON"),
        (chat('{"on": true}'), None, "is keys on where"),
        (chat("{" + " \n" * 40, finish="stop"), None, "is not JSON"),
        (chat("words " * 40, finish="length"), None, "is not JSON"),
        (chat('{"on": true, "more": "words', finish="length"), chat(LAMP), "is not JSON"),
        (chat("{" + " \n" * 40, finish="length"), chat("words"), "is not JSON"),
        ((400, {"error": {"message": "xgrammar is not installed"}}), None, "HTTP 400: xgrammar is not installed"),
    ],
)
def test_a_schema_that_does_not_hold(server: Server, schema: Any, literals: Any, told: str) -> None:
    server.answers |= {"schema": schema, "literals": literals}
    assert told in server.check("json_schema").detail


@pytest.mark.parametrize("end", ["", '"on'])
def test_a_model_that_fills_its_tokens_with_whitespace(server: Server, end: str) -> None:
    """Also where the tokens end in the middle of the word after it."""
    server.answers |= {"schema": chat("{" + " \n" * 40 + end, finish="length"), "literals": chat(LAMP)}
    check = server.check("json_schema")
    assert check.outcome is Outcome.PASSED
    assert "disable_any_whitespace" in check.detail


@pytest.mark.parametrize(("parser", "sent"), [("gemma4", {"enable_thinking": False}), (None, None)])
def test_thinking_is_off_where_a_schema_has_to_hold(server: Server, parser: str | None, sent: Any) -> None:
    server.result(reasoning_parser=parser)
    guided = [asked for asked in server.asked if "response_format" in asked or "tools" in asked]
    assert [asked.get("chat_template_kwargs") for asked in guided] == [sent] * 3


THINKS = chat(None, tokens=64, finish="length")
THINKS[1]["choices"][0]["message"]["reasoning"] = "Okay, the user wants a lamp described as JSON"


@pytest.mark.parametrize(("question", "name"), [("schema", "json_schema"), ("free", "tool_call")])
@pytest.mark.parametrize(
    ("then", "outcome", "told"),
    [
        (None, Outcome.PASSED, "green"),
        (THINKS, Outcome.NOT_SHOWN, "did not come: the model thought for all its 64 tokens"),
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
    assert check.outcome is (outcome or {"schema": Outcome.FAILED, "free": Outcome.NOT_SHOWN}[question])
    assert told in check.detail
    guided = [
        asked for asked in server.asked if "max_tokens" in asked and ("response_format" in asked or "tools" in asked)
    ]
    tokens = [asked["max_tokens"] for asked in guided if kind("/v1/chat/completions", asked) == question]
    assert tokens == [64, 512]


ONE, TWO, OTHER = (chat(text, token_ids=ids) for text, ids in (("a b", [1, 2]), ("a c", [1, 3]), ("a", [1])))
NEAR = {2: -0.70, 3: -0.95}
FAR = {2: -0.01, 3: -4.61}


@pytest.mark.parametrize(
    ("repeated", "third", "outcome", "told"),
    [
        ([ONE, ONE], None, Outcome.PASSED, "the same 2 tokens: 'a b'"),
        ([ONE, TWO], rated([1, 2], {1: -0.1}, NEAR), Outcome.NOT_SHOWN, "token 2, between tokens only 0.25 nats apart"),
        ([ONE, TWO], rated([1, 2], {1: -0.1}, FAR), Outcome.FAILED, "token 2, between tokens 4.60 nats apart"),
        # The third answer leaves earlier than the other two part: what counts is where it leaves.
        ([ONE, TWO], rated([4, 2], {4: -0.2, 1: -3.0}, NEAR), Outcome.FAILED, "token 1, between tokens 2.80 nats"),
        ([ONE, TWO], rated([1, 2], {1: -0.1}, {2: -0.01}), Outcome.FAILED, "beyond its 5 likeliest"),
        ([ONE, OTHER], rated([1, 2], {1: -0.1}, NEAR), Outcome.FAILED, "beyond its 5 likeliest"),
        ([ONE, TWO], chat("1", token_ids=[1, 2]), Outcome.FAILED, "beyond its 5 likeliest"),
        ([ONE, TWO], (400, {"error": {"message": "no logprobs"}}), Outcome.FAILED, "HTTP 400: no logprobs"),
        ([chat("a"), chat("a")], None, Outcome.PASSED, "the same 3 tokens"),
        ([chat("a"), chat("b")], None, Outcome.FAILED, "no token ids by which that could be judged"),
    ],
)
def test_the_same_question_twice(server: Server, repeated: Any, third: Any, outcome: Outcome, told: str) -> None:
    server.answers |= {"repeated": repeated, "logprobs": third}
    check = server.check("deterministic")
    assert check.outcome is outcome and told in check.detail, check
    asked = [each for each in server.asked if each.get("return_token_ids")]
    assert {json.dumps(each["messages"]) for each in asked} == {json.dumps(asked[0]["messages"])}


@pytest.mark.parametrize(
    ("enforced", "free", "outcome", "told"),
    [
        (called(), called(), Outcome.PASSED, "called freely"),
        (called(), chat("I cannot."), Outcome.NOT_SHOWN, "no tool call but 'I cannot.'"),
        (called(), called('{"on": true}'), Outcome.NOT_SHOWN, "keys on where"),
        (called(), called("{}", "other"), Outcome.NOT_SHOWN, "a call of 'other'"),
        (called(), called('{"on": tr'), Outcome.FAILED, "a free tool call of 'sentry' gave a call with arguments"),
        (called(), (400, {"error": {"message": "auto requires"}}), Outcome.FAILED, "HTTP 400: auto requires"),
        (chat("<|tool_call>call:"), called(), Outcome.FAILED, "gave no tool call but '<|tool_call>call:'"),
        (called("{on:true}"), called(), Outcome.FAILED, "not JSON"),
        (called('{"on": true}'), called(), Outcome.FAILED, "keys on where"),
        (called(LAMP, "other"), called(), Outcome.FAILED, "a call of 'other'"),
        ((500, b"boom"), called(), Outcome.FAILED, "HTTP 500: boom"),
        (chat(None, calls=[("set_lamp", None)]), called(), Outcome.FAILED, "not JSON"),
    ],
)
def test_tool_calls(server: Server, enforced: Any, free: Any, outcome: Outcome, told: str) -> None:
    server.answers |= {"enforced": enforced, "free": free}
    check = server.check("tool_call")
    assert check.outcome is outcome and told in check.detail, check


def test_a_call_is_enforced_by_name_or_in_the_parsers_own_syntax(server: Server) -> None:
    for parser in ("gemma4", "hermes"):
        assert server.check("tool_call", tool_call_parser=parser).outcome is Outcome.PASSED
    native, _, named, _ = (asked for asked in server.asked if "tools" in asked)
    assert native["tool_choice"] == "auto"  # vLLM refuses a named choice together with structured outputs
    (call,) = native["structured_outputs"]["choice"]
    assert re.fullmatch(r'<\|tool_call>call:set_lamp\{on:true,colour:<\|"\|>green<\|"\|>,level:3\}<tool_call\|>', call)
    assert named["tool_choice"] == {"type": "function", "function": {"name": "set_lamp"}}
    assert "structured_outputs" not in named


def test_no_parser_no_tools(server: Server) -> None:
    check = server.check("tool_call", tool_call_parser=None)
    assert check.outcome is Outcome.SKIPPED and check.detail == "e2b has no tool_call_parser"
    assert not [asked for asked in server.asked if "tools" in asked]


def test_an_engine_that_dies_in_the_middle(server: Server) -> None:
    server.answers |= {"schema": None, "health": None}
    for result in canary(server.config("sentry", "auditor"), 5):
        assert [check.outcome.value for check in result.checks] == ["passed", "passed", "failed", "skipped", "skipped"]
        assert result.completion == "Ready." and not result.ok and result.error is not None
        name = f"the answer by JSON schema of '{result.served_name}'"
        for told in (name, "the engine died in the middle", "vllm-edge explain e2b"):
            assert told in result.error
        assert result.checks[3].detail.startswith("not asked")


def test_nobody_is_asked_once_the_engine_is_silent(server: Server) -> None:
    server.answers |= {"repeated": None}
    _, second = canary(server.config("sentry", "auditor"), 5)
    assert [check.outcome.value for check in second.checks] == ["passed"] * 3 + ["failed", "skipped"]
    assert second.error == "not asked, because the engine stopped answering at 'sentry', check deterministic"
    assert {asked["model"] for asked in server.asked if "return_token_ids" in asked} == {"sentry"}


@pytest.mark.parametrize(("health", "told"), [(None, "does not answer either"), ((503, b""), "answers HTTP 503")])
def test_how_a_death_is_told(server: Server, health: Any, told: str) -> None:
    server.answers |= {"completion": None, "health": health}
    error = server.result().error
    assert error is not None and f"/health {told}: the engine died in the middle of the canary" in error


def test_a_request_that_hangs_is_no_death(server: Server) -> None:
    server.answers["free"] = None
    assert "/health still answers: the engine lives" in server.check("tool_call").detail


def test_nobody_listens(server: Server) -> None:
    config = server.config()
    server.http.shutdown()
    server.http.server_close()
    (result,) = canary(config, 5)
    assert result.error is not None
    for told in ("connection refused", "systemctl status vllm-e2b.service", "vllm-edge explain e2b"):
        assert told in result.error


def test_too_slow(server: Server) -> None:
    server.http.shutdown()  # the kernel still takes connections, nobody answers them
    (result,) = canary(server.config(), 0.2)
    assert result.error is not None and "no answer within 0.2 s" in result.error


def test_health_other_than_200(server: Server) -> None:
    server.answers["health"] = (503, {})
    answer = get_health(f"http://127.0.0.1:{server.port}", 2)
    assert not answer.ok and answer.words() == "HTTP 503"


def test_parsers_in_engine_json(server: Server) -> None:
    assert server.config(reasoning_parser="gemma4").reasoning_parser == "gemma4"
    bare = parse_engine(json.dumps(CONFIG), "x")
    assert bare.tool_call_parser is None and bare.reasoning_parser is None
    with pytest.raises(EngineConfigError, match=r"tool_call_parser is '': .*reasoning_parser is 1: a text"):
        server.config(tool_call_parser="", reasoning_parser=1)


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


# -- the run that has passed


class Docker:
    """One container, or the reason why nothing is known of it."""

    def __init__(self) -> None:
        labels = {"vllm-edge.input-hash": CONFIG["input_hash"]}
        self.container: Container | None = Container("c" * 64, "vllm-e2b", "running", labels, started_at="03:00")
        self.away = ""

    def find(self, name: str) -> Container | None:
        if self.away:
            raise DockerAway(self.away)
        return self.container


class Passed:
    """An engine that has passed the full canary."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.docker = server, Docker()
        self.config = server.config()
        self.paths = HostPaths(root / "etc", root / "state")
        self.first = full_canary(self.config, self.paths, self.docker, 5)
        server.asked.clear()

    def again(self) -> list[Result]:
        return canary_unless_passed(self.config, self.paths, self.docker, 5)

    @property
    def tokens_asked(self) -> list[int]:
        return [asked["max_tokens"] for asked in self.server.asked if "max_tokens" in asked]


@pytest.fixture
def passed(server: Server, tmp_path: Path) -> Passed:
    return Passed(server, tmp_path)


def test_a_run_that_has_passed_is_asked_for_one_token(passed: Passed) -> None:
    (first,), (again,) = passed.first, passed.again()
    assert passed.tokens_asked == [1]
    assert again.token_s is not None and again.passed_at == first.passed_at is not None
    assert replace(again, token_s=None) == first


def other_id(passed: Passed) -> None:
    assert passed.docker.container is not None
    passed.docker.container = replace(passed.docker.container, id="d" * 64)


def other_start(passed: Passed) -> None:
    assert passed.docker.container is not None
    passed.docker.container = replace(passed.docker.container, started_at="04:00")


def other_inputs(passed: Passed) -> None:
    assert passed.docker.container is not None
    passed.docker.container = replace(passed.docker.container, labels={"vllm-edge.input-hash": "other"})


def stopped(passed: Passed) -> None:
    assert passed.docker.container is not None
    passed.docker.container = replace(passed.docker.container, status="exited")


def docker_away(passed: Passed) -> None:
    passed.docker.away = "connection refused"


def other_names(passed: Passed) -> None:
    passed.config = passed.server.config("sentry", "auditor")


def damaged(passed: Passed) -> None:
    passed.paths.engine_canary("e2b").write_text("{", encoding="utf-8")


def fewer_checks(passed: Passed) -> None:
    """As an older program recorded it."""
    place = passed.paths.engine_canary("e2b")
    record = json.loads(place.read_text(encoding="utf-8"))
    record["results"][0]["checks"].pop()
    place.write_text(json.dumps(record), encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [other_id, other_start, other_inputs, stopped, docker_away, other_names, damaged, fewer_checks],
    ids=lambda change: change.__name__,
)
def test_another_run_is_asked_everything(passed: Passed, change: Callable[[Passed], None]) -> None:
    change(passed)
    results = passed.again()
    assert all(result.ok and result.token_s is None for result in results)
    assert len(passed.tokens_asked) > 5


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (chat(None, tokens=0), "was answered with none"),
        ((500, {"error": {"message": "EngineDeadError"}}), "HTTP 500: EngineDeadError"),
        (None, "/health still answers: the engine lives, and the request hangs"),
    ],
)
def test_an_engine_that_gives_no_token_fails_and_is_asked_everything_next(
    passed: Passed, answer: Any, told: str
) -> None:
    passed.server.answers["completion"] = answer
    (result,) = passed.again()
    assert not result.ok and result.error is not None and told in result.error
    assert ("hangs" in result.error) is (answer is None), "an answer is no silence"
    assert passed.tokens_asked == [1]
    assert not passed.paths.engine_canary("e2b").exists()
    passed.server.answers["completion"] = chat()
    passed.again()
    assert len(passed.tokens_asked) > 5


def test_one_token_has_a_deadline_of_its_own(passed: Passed) -> None:
    waited: list[float] = []

    def ask(url: str, path: str, timeout_s: float, **_: Any) -> Answer:
        waited.append(timeout_s)
        return Answer(None, error=f"no answer within {timeout_s:g} s")

    (result,) = canary_unless_passed(passed.config, passed.paths, passed.docker, 300, ask)
    assert waited[0] == TOKEN_DEADLINE_S == 20
    assert result.error is not None and "no answer within 20 s" in result.error


def test_what_failed_is_not_recorded(passed: Passed) -> None:
    passed.server.answers["schema"] = chat("A green lamp.")
    (result,) = full_canary(passed.config, passed.paths, passed.docker, 5)
    assert not result.ok and result.passed_at is None
    assert not passed.paths.engine_canary("e2b").exists()


def test_a_container_that_is_replaced_meanwhile_is_not_recorded(server: Server, tmp_path: Path) -> None:
    paths, docker = HostPaths(tmp_path / "etc", tmp_path / "state"), Docker()
    runs = [docker.container, Container("d" * 64, "vllm-e2b", "running")]
    docker.find = lambda name: runs.pop(0)  # type: ignore[method-assign]
    assert all(result.ok for result in full_canary(server.config(), paths, docker, 5))
    assert runs == [] and not paths.engine_canary("e2b").exists()


def test_a_state_directory_that_cannot_be_written_fails_nothing(server: Server, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no directory")
    results = full_canary(server.config(), HostPaths(tmp_path / "etc", tmp_path / "state"), Docker(), 5)
    assert all(result.ok for result in results)
