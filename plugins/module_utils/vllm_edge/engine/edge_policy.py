# SPDX-License-Identifier: Apache-2.0
"""Judges what a request may ask, inside the engine, before vLLM reads it.

vLLM runs the class Policy as the outermost part of its API server (`--middleware=edge_policy.Policy`). The file is
mounted into the containers of the engines, so it imports nothing but the standard library, of Python 3.10 on.

The gateway states in two headers what a request may ask. A request without both is one of root's own programs, since
nobody else but the gateway can open the engine's socket; it is bounded in size and depth alone. Keys are judged where
vLLM 0.19 to 0.33 reads them, and the last of several equal keys counts, as for vLLM.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MODELS = b"x-vllm-edge-models"
"""The served names that a request may use, separated by blanks."""
LIMITS = b"x-vllm-edge-limits"
"""What it may ask, such as `n=8,logprobs=20,tokens=32768,prompts=16,schema=262144`: all of these names."""
PASSED = (b"host", b"content-type", b"accept", b"user-agent", b"x-request-id")
"""Headers of the gateway's requests that vLLM gets. It reads others, which a client can send as trailers."""
MOST_BYTES = 20 * 1048576
MOST_OPENED = 500_000
"""Brackets and braces in a body. Python takes seconds for several millions of empty lists."""
MOST_DEPTH = 128
MOST_INPUTS = 2048
"""Texts to embed, score or classify in one request: OpenAI's own limit for embeddings."""
READ_S = 300.0
"""Seconds in which the body has to arrive."""

_LIMITED = {
    **dict.fromkeys(("n", "best_of"), "n"),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), "logprobs"),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"), "tokens"),
    "budget_tokens": "tokens",
}
"""The limit of each key. With `use_beam_search` the width is `n`."""
_HOLDERS = ("sampling_params", "thinking")
"""Objects at the top level in which vLLM reads such keys, too (/inference/v1/generate, /v1/messages)."""
_INPUTS = (
    *("input", "inputs", "texts", "images", "documents", "queries", "items"),
    *("text_1", "text_2", "data_1", "data_2"),
)
_SCHEMAS = ("response_format", "structured_outputs", "text", "tools", "functions", "input_schema", "output_config")
"""With `guided_*`: what vLLM compiles, or writes into the prompt by a template."""
_DATA = ("arguments", "parameters", "input_schema", "annotations")
"""Where keys mean nothing to vLLM: arguments of tool calls, JSON schemas, sources that a former answer named."""
_DATA_OF_BODY = ("response_format", "structured_outputs", "text", "output_config", "metadata", "chat_template_kwargs")
_OTHER_HOSTS = ("kv_transfer_params", "ec_transfer_params")
"""Addresses of other engines, from which vLLM would take its cache."""


class Refusal(Exception):
    """A request that vLLM does not get."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Policy:
    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers: list[tuple[bytes, bytes]] = list(scope.get("headers") or ())
        ours = [name for name, _ in headers if name in (MODELS, LIMITS)]
        if scope["type"] == "websocket" and ours:
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        first = dict(reversed(headers))
        try:
            grant = _read_grant(ours, first)
            body = await _read_body(first, receive)
            if body is None:
                return
            body = judge(body, grant, scope["path"])
        except Refusal as refusal:
            await _refuse(refusal, first.get(b"x-request-id", b""), send)
            return
        if grant:
            headers = [(name, first[name]) for name in PASSED if name in first]
        framing = (b"content-length", b"transfer-encoding")
        headers = [item for item in headers if item[0] not in framing] + [(b"content-length", b"%d" % len(body))]
        handed_on = False

        async def receive_whole() -> Message:
            nonlocal handed_on
            if handed_on:
                return await receive()  # a client that leaves ends its request
            handed_on = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app({**scope, "headers": headers}, receive_whole, send)


Grant = tuple[list[str], dict[str, int]]
"""The names that a request may use, and its limits."""


def _read_grant(ours: list[bytes], first: Mapping[bytes, bytes]) -> Grant | None:
    """Return what the gateway grants; None for a request that is not the gateway's. Raises Refusal."""
    if not ours:
        return None
    # Trailers become headers, too: a client can send these names once more.
    wrong = Refusal(403, "forbidden", "The gateway's headers of this request are not those that the engine expects.")
    if sorted(ours) != [LIMITS, MODELS]:
        raise wrong
    try:
        names = first[MODELS].decode().split(" ")
        pairs = [item.split("=") for item in first[LIMITS].decode("ascii").split(",")]
        limits = {name: int(number) for name, number in pairs if number.isdigit()}
    except ValueError:
        raise wrong from None
    if len(pairs) != len(limits) or limits.keys() != {*_LIMITED.values(), "prompts", "schema"}:
        raise wrong
    return [name for name in names if name], limits


async def _read_body(first: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
    """Return the body; None if the client left. Raises Refusal."""
    too_large = Refusal(413, "request_too_large", "A body may have at most 20 MiB.")
    announced = first.get(b"content-length", b"0")
    if not announced.isdigit() or int(announced) > MOST_BYTES:
        raise too_large
    body = bytearray()

    async def read() -> bool:
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return False
            body.extend(message.get("body", b""))
            if len(body) > MOST_BYTES:
                raise too_large
            if not message.get("more_body"):
                return True

    try:
        return bytes(body) if await asyncio.wait_for(read(), READ_S) else None
    except asyncio.TimeoutError:  # noqa: UP041 - Python 3.10 has two classes of this name
        raise Refusal(408, "request_timeout", "The request did not arrive in time. Send it again.") from None


def judge(body: bytes, grant: Grant | None, path: str) -> bytes:
    """Return the body as vLLM gets it. Raises Refusal."""
    if body.count(b"[") + body.count(b"{") > MOST_OPENED:
        raise Refusal(400, "limit_exceeded", f"The body has more than {MOST_OPENED} brackets and braces.")
    try:
        document = json.loads(body.decode())
        if isinstance(document, dict):
            _check_content(document, grant)
    except RecursionError:
        raise _make_depth_refusal() from None
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Refusal(400, "invalid_json", "The body is no JSON object in UTF-8 without a byte order mark.")
    if grant is None:
        return body
    names, limits = grant
    model = document.get("model")
    if not names or (isinstance(model, str) and model not in names):
        message = "This key may not use this model. GET /v1/models lists what it may use."
        raise Refusal(403, "model_forbidden", message)
    if not isinstance(model, str) and (model is not None or len(names) > 1):
        message = "The body has no string under the key model at its top level. GET /v1/models lists the names."
        raise Refusal(400, "model_missing", message)
    _check_numbers(document, limits, path)
    if model is None:
        # At the end: a null before it does not count then.
        comma = b", " if document else b""
        body = body[: body.rindex(b"}")] + comma + b'"model": ' + json.dumps(names[0]).encode() + b"}"
    return body


def _check_numbers(document: Mapping[str, Any], limits: Mapping[str, int], path: str) -> None:
    """Refuse numbers above their limits, and too many prompts."""
    holders = [document, *(document[key] for key in _HOLDERS if isinstance(document.get(key), dict))]
    sequences = 1
    for holder in holders:
        for key in _LIMITED.keys() & holder.keys():
            value, limit = holder[key], limits[_LIMITED[key]]
            if value is None or (key == "logprobs" and isinstance(value, bool)):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
                raise Refusal(400, "limit_exceeded", f"{key} has to be a plain number from 0 to {limit}.")
            if _LIMITED[key] == "n":
                sequences = max(sequences, value)
    prompts = _count(document.get("prompt")) + _count(document.get("prompt_embeds"))
    messages = document.get("messages")
    if isinstance(messages, list):
        prompts += sum(isinstance(item, list) for item in messages)
    if max(prompts, 1) * sequences > limits["prompts"]:
        message = f"A request may ask for {limits['prompts']} texts at most: its prompts, each times n. Send several."
        raise Refusal(400, "limit_exceeded", message)
    # The list `input` of /v1/responses is one conversation.
    for key in () if path.endswith("/responses") else _INPUTS:
        if _count(document.get(key)) > MOST_INPUTS:
            raise Refusal(400, "limit_exceeded", f"{key} has more than {MOST_INPUTS} entries. Send several requests.")


def _count(value: object) -> int:
    """Return how many texts this is; a list of token ids is one."""
    if isinstance(value, list):
        return 1 if value and isinstance(value[0], int) else len(value)
    return 0 if value is None else 1


def _check_content(document: dict[str, Any], grant: Grant | None) -> None:
    """Refuse what is nested too deeply and, for the gateway's requests, addresses and large schemas.

    Without recursion, so that only the parser can run out of stack.
    """
    if grant and any(document.get(key) for key in _OTHER_HOSTS):
        raise _make_address_refusal()
    schemas = 0
    # A value, its depth, whether it is an address, whether its keys mean nothing, and whether it is counted already.
    waiting: list[tuple[Any, int, bool, bool, bool]] = [(document, 1, False, grant is None, grant is None)]
    while waiting:
        value, depth, address, data, counted = waiting.pop()
        if isinstance(value, str):
            if address and value and not value.startswith("data:"):
                raise _make_address_refusal()
        elif isinstance(value, list):
            if depth > MOST_DEPTH:
                raise _make_depth_refusal()
            waiting += [
                (item, depth + 1, address, data, counted) for item in value if isinstance(item, (dict, list, str))
            ]
        else:
            if depth > MOST_DEPTH:
                raise _make_depth_refusal()
            for key, item in value.items():
                if not isinstance(item, (dict, list, str)):
                    continue
                is_schema = not counted and not data and (key in _SCHEMAS or key.startswith("guided_"))
                # A text under `text` is no schema.
                if grant and is_schema and not (key == "text" and isinstance(item, str)):
                    schemas += _measure(item)
                    if schemas > grant[1]["schema"]:
                        message = f"The schemas and tools of the request have more than {grant[1]['schema']} bytes."
                        raise Refusal(400, "schema_too_large", message)
                means_nothing = (
                    key in _DATA
                    or (depth == 1 and (key in _DATA_OF_BODY or key.startswith("guided_")))
                    or (depth > 1 and key == "input" and value.get("type") == "tool_use")
                )
                is_address = not data and (key in ("url", "images") or key.endswith("_url"))
                waiting.append((item, depth + 1, is_address, data or means_nothing, counted or is_schema))


def _measure(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass"))


def _make_depth_refusal() -> Refusal:
    return Refusal(400, "limit_exceeded", f"The body is nested deeper than {MOST_DEPTH} levels.")


def _make_address_refusal() -> Refusal:
    return Refusal(400, "media_address", "The engines fetch no addresses. Send media as a data: URL.")


async def _refuse(refusal: Refusal, request_id: bytes, send: Send) -> None:
    """Answer in OpenAI's format, and end the connection: the rest of the body may be unread."""
    error = {
        "message": str(refusal),
        "type": "permission_error" if refusal.status == 403 else "invalid_request_error",
        "code": refusal.code,
        "request_id": request_id.decode("latin-1"),
    }
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
