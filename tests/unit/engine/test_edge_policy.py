# SPDX-License-Identifier: Apache-2.0
"""The class that judges requests in the engine, run as ASGI without a server."""

from __future__ import annotations

import ast
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine import edge_policy

LIMITS = (b"x-vllm-edge-limits", b"n=8,logprobs=20,tokens=32768,prompts=16,schema=262144")
MODELS = (b"x-vllm-edge-models", b"worker")
GATEWAY = (MODELS, LIMITS)
CHAT: dict[str, Any] = {"model": "worker", "messages": [{"role": "user", "content": "Hello"}]}
AWAY = "http://169.254.169.254/"
DEEP = b'{"model":"worker","x":' + b"[" * 128 + b"]" * 128 + b"}"


class Engine:
    """An application behind the class, and the server in front of it."""

    def __init__(self) -> None:
        self.scope: dict[str, Any] | None = None
        self.body = b""
        self.after: dict[str, Any] = {}
        self.sent: list[dict[str, Any]] = []

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        if scope["type"] == "http" and scope["method"] == "POST":
            self.body = (await receive())["body"]
            self.after = await receive()
        await send({"type": "http.response.start", "status": 200})

    def ask(
        self,
        body: bytes | dict[str, Any] = b"",
        headers: tuple[tuple[bytes, bytes], ...] = GATEWAY,
        parts: list[dict[str, Any]] | None = None,
        **scope: Any,
    ) -> str:
        """Send a request; return `passed`, `left` or status and code of the refusal."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        coming = parts or [
            {"type": "http.request", "body": raw[:5], "more_body": True},
            {"type": "http.request", "body": raw[5:]},
        ]
        messages = iter([*coming, {"type": "http.disconnect"}])

        async def receive() -> dict[str, Any]:
            message = next(messages)
            await asyncio.sleep(message.get("wait", 0))
            return message

        async def send(message: dict[str, Any]) -> None:
            self.sent.append(message)

        line = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": list(headers), **scope}
        asyncio.run(edge_policy.Policy(self.app)(line, receive, send))
        if self.scope is not None:
            return "passed"
        if not self.sent:
            return "left"
        if self.sent[0]["type"] == "websocket.close":
            return "closed"
        return f"{self.sent[0]['status']} {json.loads(self.sent[1]['body'])['error']['code']}"


def chat(**keys: Any) -> dict[str, Any]:
    return {**CHAT, **keys}


def said(content: Any, **keys: Any) -> dict[str, Any]:
    return {"model": "worker", "messages": [{"role": "user", "content": content, **keys}]}


USED = {"type": "tool_use", "input": {"n": 50, "max_tokens": 10**6, "image_url": AWAY}}
CALLED = [{"function": {"name": "f", "arguments": {"url": AWAY, "n": 99}}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"url": {"url": AWAY}}}}}


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (CHAT, "passed"),
        (b'\xef\xbb\xbf{"model": "worker"}', "400 invalid_json"),
        (b'{"model": "worker", "x": "\xff"}', "400 invalid_json"),
        (b'{"model": "worker", "x": "\0"}', "400 invalid_json"),
        (json.dumps(CHAT).encode("utf-16"), "400 invalid_json"),
        (b'["model", "worker"]', "400 invalid_json"),
        (DEEP, "400 limit_exceeded"),
        (DEEP.replace(b"[" * 128 + b"]" * 128, b"[" * 127 + b"]" * 127), "passed"),
        (b'{"a":' * 100_000, "400 limit_exceeded"),
        (b'{"model": "worker", "x": [' + b"[]," * 500_000 + b"0]}", "400 limit_exceeded"),
        # The name: the last one counts, and only a string.
        (b'{"model": "worker", "model": "other"}', "403 model_forbidden"),
        (b'{"model": "other", "mod\\u0065l": "worker"}', "passed"),
        (chat(model=["worker"]), "400 model_missing"),
        # Numbers at the top level.
        (chat(n=8, top_logprobs=20, max_tokens=32768, logprobs=True, best_of=None), "passed"),
        (chat(n=9), "400 limit_exceeded"),
        (chat(n="8"), "400 limit_exceeded"),
        (chat(n=1.0), "400 limit_exceeded"),
        (chat(n=True), "400 limit_exceeded"),
        (b'{"model": "worker", "\\u006e" \n:\t 9}', "400 limit_exceeded"),
        (b'{"model": "worker", "n": 1e3}', "400 limit_exceeded"),
        (chat(prompt='"n": 100'), "passed"),
        (chat(best_of=9), "400 limit_exceeded"),
        (chat(logprobs=21), "400 limit_exceeded"),
        (chat(min_tokens=32769), "400 limit_exceeded"),
        (chat(max_output_tokens=32769), "400 limit_exceeded"),
        (chat(prompt_logprobs=-1), "400 limit_exceeded"),
        (chat(max_completion_tokens=32769), "400 limit_exceeded"),
        (chat(thinking={"type": "enabled", "budget_tokens": 32769}), "400 limit_exceeded"),
        (chat(sampling_params={"n": 9}), "400 limit_exceeded"),
        # Prompts, each times n.
        ({"model": "worker", "prompt": ["a"] * 16}, "passed"),
        ({"model": "worker", "prompt": ["a"] * 3, "n": 6}, "400 limit_exceeded"),
        ({"model": "worker", "prompt": [[1, 2]] * 17}, "400 limit_exceeded"),
        ({"model": "worker", "prompt": list(range(5000)), "n": 8}, "passed"),
        ({"model": "worker", "messages": [CHAT["messages"]] * 17}, "400 limit_exceeded"),
        # Addresses.
        (said([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]), "passed"),
        (said([{"type": "image_url", "image_url": {"detail": {"a": 1}, "url": AWAY}}]), "400 media_address"),
        (said([{"image_url": {"url": "HTTPS:\\/\\/a"}}]), "400 media_address"),
        (said([{"audio_url": AWAY}]), "400 media_address"),
        (said([{"video_url": [AWAY]}]), "400 media_address"),
        (said([{"type": "tool_result", "content": [{"source": {"type": "url", "url": AWAY}}]}]), "400 media_address"),
        (chat(tools=[{"type": "mcp", "server_url": AWAY}]), "400 media_address"),
        (chat(kv_transfer_params={"remote_host": "10.0.0.1"}), "400 media_address"),
        # At the top level `type` does not make data of a conversation.
        ({"model": "worker", "type": "tool_use", "input": [{"image_url": AWAY}]}, "400 media_address"),
        # Data, whatever its keys are.
        (said([USED]), "passed"),
        (said(None, tool_calls=CALLED), "passed"),
        (chat(tools=[TOOL], metadata={"url": AWAY}), "passed"),
        (chat(response_format={"json_schema": {"schema": {"properties": {"url": AWAY}}}}), "passed"),
        # Schemas and tools, together.
        (chat(tools=["a" * 130_000], response_format=["a" * 130_000]), "passed"),
        (chat(tools=["a" * 132_000], response_format=["a" * 132_000]), "400 schema_too_large"),
        *(
            (chat(**{key: ["a" * 263_000]}), "400 schema_too_large")
            for key in ("structured_outputs", "functions", "text")
        ),
        (chat(tools=[{"input_schema": "a" * 200_000}]), "passed"),
        (chat(guided_regex="a" * 262_143), "400 schema_too_large"),
        (said([{"type": "text", "text": "a" * 300_000}]), "passed"),
        (said([{"tool": {"definition": {"input_schema": {"a": "b" * 262_144}}}}]), "400 schema_too_large"),
    ],
)
def test_what_a_body_may_ask(body: bytes | dict[str, Any], answer: str) -> None:
    assert Engine().ask(body) == answer


@pytest.mark.parametrize(
    ("path", "keys", "answer"),
    [
        ("/v1/embeddings", {"input": ["a"] * 2048}, "passed"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "400 limit_exceeded"),
        ("/v1/embeddings", {"input": list(range(3000))}, "passed"),
        ("/v1/responses", {"input": [{"type": "message", "content": "a"}] * 2049}, "passed"),
    ],
)
def test_many_inputs(path: str, keys: dict[str, Any], answer: str) -> None:
    assert Engine().ask({"model": "worker", **keys}, path=path) == answer


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        ((), "passed"),
        ((MODELS,), "403 forbidden"),
        ((LIMITS,), "403 forbidden"),
        ((*GATEWAY, MODELS), "403 forbidden"),
        ((*GATEWAY, LIMITS), "403 forbidden"),
        ((MODELS, (LIMITS[0], b"n=8,logprobs=20,tokens=9,prompts=1")), "403 forbidden"),
        ((MODELS, (LIMITS[0], LIMITS[1] + b",n=9")), "403 forbidden"),
        ((MODELS, (LIMITS[0], LIMITS[1].replace(b"=8", b"=x"))), "403 forbidden"),
        (((MODELS[0], "größe".encode()), LIMITS), "403 model_forbidden"),
        (((b"content-length", b"20971521"), *GATEWAY), "413 request_too_large"),
        (((b"content-length", b"9223372036854775813"), *GATEWAY), "413 request_too_large"),
    ],
)
def test_what_the_headers_grant(headers: tuple[tuple[bytes, bytes], ...], answer: str) -> None:
    assert Engine().ask(CHAT, headers) == answer


def test_roots_own_requests_have_no_limits_but_size_and_depth() -> None:
    assert Engine().ask({"n": 99, "messages": [{"image_url": AWAY}]}, ()) == "passed"
    assert Engine().ask(DEEP, ()) == "400 limit_exceeded"
    assert (
        Engine().ask(parts=[{"type": "http.request", "body": b" " * 20971521}], headers=()) == "413 request_too_large"
    )


@pytest.mark.parametrize("body", [b'{"messages": [{"role": "user"}]}', b'{"model": null, "messages": []} ', b"{ }"])
def test_a_missing_model_is_the_only_one_that_is_allowed(body: bytes) -> None:
    engine = Engine()
    assert engine.ask(body) == "passed"
    assert json.loads(engine.body)["model"] == "worker"
    assert dict((engine.scope or {})["headers"])[b"content-length"] == b"%d" % len(engine.body)
    assert Engine().ask(body, ((MODELS[0], b"worker auditor"), LIMITS)) == "400 model_missing"
    assert Engine().ask(body, ((MODELS[0], b""), LIMITS)) == "403 model_forbidden"


def test_a_name_may_have_any_letter_and_several_may_be_allowed() -> None:
    assert Engine().ask(chat(model="größe"), ((MODELS[0], "worker größe".encode()), LIMITS)) == "passed"


def test_trailers_do_not_reach_vllm_and_a_client_that_leaves_does() -> None:
    engine = Engine()
    kept = ((b"host", b"localhost"), (b"x-request-id", b"1"))
    trailers = ((b"x-data-parallel-rank", b"9"), (b"authorization", b"x"), (b"x-request-id", b"2"))
    assert engine.ask(CHAT, (*kept, (b"transfer-encoding", b"chunked"), *GATEWAY, *trailers)) == "passed"
    assert engine.body == json.dumps(CHAT).encode()
    assert (engine.scope or {})["headers"] == [*kept, (b"content-length", b"%d" % len(engine.body))]
    assert engine.after == {"type": "http.disconnect"}


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "http.request", "body": b"{", "more_body": True}
    assert Engine().ask(parts=[part, {"type": "http.disconnect"}]) == "left"
    monkeypatch.setattr(edge_policy, "READ_S", 0.01)
    assert Engine().ask(parts=[part, {**part, "wait": 5}]) == "408 request_timeout"


def test_a_refusal_has_the_format_of_openai() -> None:
    engine = Engine()
    engine.ask(chat(model="other"), ((b"x-request-id", b"7"), *GATEWAY))
    error = json.loads(engine.sent[1]["body"])["error"]
    assert error == {
        "message": "This key may not use this model. GET /v1/models lists what it may use.",
        "type": "permission_error",
        "code": "model_forbidden",
        "request_id": "7",
    }


def test_other_requests_pass_untouched() -> None:
    for scope in ({"type": "http", "method": "GET"}, {"type": "lifespan"}, {"type": "websocket"}):
        engine = Engine()
        assert engine.ask(headers=(), **scope) == "passed"
    assert Engine().ask(type="websocket") == "closed"


def test_the_file_needs_the_standard_library_alone() -> None:
    tree = ast.parse(Path(edge_policy.__file__).read_text(encoding="utf-8"), feature_version=(3, 10))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
