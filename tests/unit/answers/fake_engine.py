# SPDX-License-Identifier: Apache-2.0
"""An engine that the canary asks: a real HTTP server that answers well, badly, or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ansible.module_utils.vllm_edge.answers.canary_command import Result, canary
from ansible.module_utils.vllm_edge.answers.checks import NAMES, Check, Outcome
from ansible.module_utils.vllm_edge.engine.config import EngineConfig, parse_engine
from engine_files import CONFIG

FAILED, NOT_SHOWN, PASSED = Outcome.FAILED, Outcome.NOT_SHOWN, Outcome.PASSED
LAMP = '{"on": true, "colour": "green", "level": 3}'


def chat(
    content: str | None = "Ready.", *, tokens: int = 3, finish: str = "stop", calls: Any = (), **choice: Any
) -> Any:
    """A chat completion as vLLM answers it."""
    tool_calls = [{"id": "c", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls, "reasoning": None}
    usage = {"completion_tokens": tokens, "prompt_tokens": 7}
    return 200, {"choices": [{"message": message, "finish_reason": finish, **choice}], "usage": usage}


def refuse(status: int, message: str) -> Any:
    """An error as vLLM answers it."""
    return status, {"error": {"message": message}}


def models(*names: str) -> Any:
    return 200, {"data": [{"id": name} for name in names]}


def called(arguments: str = LAMP, name: str = "set_lamp") -> Any:
    return chat(None, calls=[(name, arguments)])


def rated(ids: list[int], *tops: Mapping[int, float]) -> Any:
    """A completion with the log probabilities of each position."""
    tokens = [[{"token": f"token_id:{key}", "logprob": value} for key, value in top.items()] for top in tops]
    rows = [
        {"token": f"token_id:{token}", "logprob": top[token], "top_logprobs": listed}
        for token, top, listed in zip(ids, tops, tokens, strict=True)
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
            "v1/models": models("sentry", "auditor"),
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
        rendered = "".join(f"<{message['role']}>{self.render(message['content'])}\n" for message in asked["messages"])
        if question == "tokenize":
            return (200, {"tokens": list(map(ord, rendered)), "count": len(rendered)})
        status, data = chat("R", tokens=1)
        data["usage"]["prompt_tokens"] = len(rendered)
        return (status, data)

    def render(self, content: str | list[dict[str, str]]) -> str:
        """What a template makes of it; of parts it may take fewer."""
        if isinstance(content, str):
            return content
        return "".join(part["text"] for part in content[: self.answers.get("parts")])

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
        assert not [check for check in others if check.outcome in (FAILED, NOT_SHOWN)], others
        (found,) = [check for check in result.checks if check.check == name]
        assert result.ok == (found.outcome is not FAILED)
        assert (result.completion == "") == (name == NAMES[0] and not result.ok)
        assert result.error == (None if result.ok else found.detail)
        return found


def serve() -> Iterator[Server]:
    """A fixture: `server = pytest.fixture(serve)`."""
    made = Server()
    threading.Thread(target=made.http.serve_forever, args=(0.02,), daemon=True).start()
    yield made
    made.http.shutdown()
    made.http.server_close()
