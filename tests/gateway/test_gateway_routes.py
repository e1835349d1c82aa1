# SPDX-License-Identifier: Apache-2.0
"""Which engine a request reaches, what the gateway answers by itself, and what it logs."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from gateway_host import ENGINES, H2, KEYS, PATHS, Gateway, name_backend, write_request

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("served", "engine"), [(name, engine) for engine, names in ENGINES.items() for name in names])
def test_a_request_reaches_the_engine_of_its_model(gateway: Gateway, served: str, engine: str) -> None:
    for path in PATHS:
        answer = gateway.ask(write_request({"input": "x" * 10000, "model": served}, path))
        assert (answer.status, answer.json, answer.headers["x-served-by"]) == (200, {"engine": engine}, engine), path
        assert "x-stand-in" not in answer.headers and "server" not in answer.headers


def test_the_engine_gets_no_header_that_it_does_not_need(gateway: Gateway) -> None:
    secrets = "X-Request-Id: mine\r\nX-Api-Key: k\r\nCookie: c\r\nX-Vllm-Edge-Models: architect\r\n"
    gateway.ask(write_request({"model": "worker"}, PATHS[0] + "?key=1", headers=secrets))
    seen = gateway.engines["mid"].seen[-1]
    own = seen.headers.pop("x-request-id")
    assert len(own) == 36 and seen.target == PATHS[0]
    limits = "n=8,logprobs=20,tokens=32768,prompts=16,schema=262144"
    assert seen.headers == {"host": "localhost", "content-length": "19", "connection": "close"} | {
        "x-vllm-edge-models": "worker",
        "x-vllm-edge-limits": limits,
    }


def test_a_port_answers_for_its_engine_only(gateway: Gateway) -> None:
    for ports, status in ((gateway.map("ports"), 200), ({}, 404)):
        gateway.commit("ports", ports)
        served = ("architect", "worker", "sentry")
        asked = [gateway.ask(write_request({"model": name}), gateway.ports["big"]).status for name in served]
        assert asked == [status, 404, 404]
    gateway.commit("ports")


@pytest.mark.parametrize(
    ("key", "names"), [("all", ["architect", "auditor", "sentry", "worker"]), ("part", ["sentry"])]
)
def test_a_client_sees_the_models_that_it_may_use(gateway: Gateway, key: str, names: list[str]) -> None:
    answer = gateway.ask(write_request(path="/v1/models", key=key))
    assert sorted(one["id"] for one in answer.json["data"]) == names
    gateway.commit("lists", {})
    assert gateway.ask(write_request(path="/v1/models", key=key)).json == {"object": "list", "data": []}
    gateway.commit("lists", gateway.map("lists") | {f"{key}@big": '{"data":[1]}'})
    assert gateway.ask(write_request(path="/v1/models", key=key), gateway.ports["big"]).json == {"data": [1]}
    gateway.commit("lists")


def test_status_says_what_the_host_serves(gateway: Gateway) -> None:
    answer = gateway.ask(write_request(path="/status", key="part"))
    role = {"state": "up", "back_in_s": None, "waiting": 0}
    sentry = {"sentry": role | {"engine": "small"}}
    about = {"host": "h1", "profile": 'p"1', "generation": 7, "switch": None}
    assert answer.json == about | {"roles": sentry}, "a key sees the roles that it may use"
    assert sorted(gateway.ask(write_request(path="/status")).json["roles"]) == sorted(gateway.names)
    gateway.set_servers("sentry", 0)
    down = {"state": "down", "back_in_s": 55}
    assert gateway.ask(write_request(path="/status", key="part")).json["roles"]["sentry"] == sentry["sentry"] | down
    gateway.set_servers("sentry", 1)
    gateway.commit("models", {})
    assert gateway.ask(write_request(path="/status")).json["roles"] == {}
    gateway.commit("models")


def ask_probe(gateway: Gateway, path: str) -> int:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(gateway.run / "probe.sock"))
        probe.sendall(write_request(path=path, key=None))
        return int(probe.recv(4096).split()[1])


def test_ready_is_true_while_the_role_is_served(gateway: Gateway) -> None:
    def ask(name: str) -> tuple[int, int, bytes]:
        answer = gateway.ask(write_request(path="/ready/" + name))
        return answer.status, ask_probe(gateway, "/ready/" + name), answer.body if answer.status != 404 else b""

    assert (gateway.run / "probe.sock").stat().st_mode & 0o777 == 0o600
    assert ask("sentry") == (200, 200, b"") and ask("idle") == (404, 404, b"")
    assert gateway.ask(write_request(path="/ready/worker", key="part")).status == 404, "not a role of this key"
    gateway.set_servers("sentry", 0)
    assert ask("sentry") == (503, 503, b"")
    gateway.set_servers("sentry", 1)
    gateway.states["sentry"] = "away"
    gateway.commit("models")
    assert ask("sentry") == (503, 503, b"")
    for state in ("stand-in", "provisional"):
        gateway.states["sentry"] = state
        gateway.commit("models")
        assert ask("sentry") == (200, 200, b"")
    role = gateway.ask(write_request(path="/status", key="part")).json["roles"]["sentry"]
    assert (role["state"], role["back_in_s"]) == ("provisional", None)
    gateway.states["sentry"] = "up"
    gateway.commit("models")
    assert ask_probe(gateway, PATHS[0]) == ask_probe(gateway, "/status") == 404


def test_a_stand_in_says_so(gateway: Gateway) -> None:
    gateway.bring_back("architect", "small", "stand-in")
    answer = gateway.ask(write_request({"model": "architect"}))
    gateway.bring_back("architect", "big")
    assert answer.json == {"engine": "small"}
    assert (answer.headers["x-served-by"], answer.headers["x-stand-in"]) == ("small", "architect")


def test_an_error_has_the_request_id_of_its_header_and_of_the_log(gateway: Gateway) -> None:
    answer = gateway.ask(write_request({"model": "nobody"}, headers="X-Request-Id: mine\r\n"))
    error = answer.json["error"]
    assert answer.headers["x-request-id"] == error["request_id"]
    assert (answer.status, error["type"], error["code"]) == (404, "invalid_request_error", "model_not_found")
    line = gateway.get_log(error["request_id"])
    assert (line["client"], line["status"], line["role"]) == ("all", 404, "-")


HOSTILE = '"\\\x01\x7f\xff\xe2\x28%00%n'


def test_the_log_is_json_without_keys_and_prompts(gateway: Gateway) -> None:
    key = KEYS["all"]
    good = {"model": "worker", "prompt": "my prompt"}
    raws = [
        write_request(good, f"{PATHS[1]}?key={key}", headers=f"X-A: {HOSTILE}\r\n"),
        write_request({"model": HOSTILE}),
        write_request(path=f"/{key}/{HOSTILE.replace(chr(1), '')}"),
        write_request(path=f"/ready/{key}{HOSTILE[:2]}%ff"),
        write_request(path="/v1/models", method=HOSTILE[:2]),
        write_request(path="/v1/models", key=HOSTILE),
        b"\x00\xff\r\n\r\n",
    ]
    answers = [gateway.ask(raw) for raw in raws]
    client = H2(gateway.port)
    client.ask(1, _method=f'A{HOSTILE[:1]}"')
    client.read(lambda: client.status.get(1) or client.reset or client.away)
    client.close()
    line = gateway.get_log(answers[0].headers["x-request-id"])
    names = ("client", "role", "engine", "method", "path", "status")
    assert [line[name] for name in names] == ["all", "worker", "mid", "POST", PATHS[1], 200]
    assert line["time"].endswith("Z") and line["bytes_in"] > 19 and line["bytes_out"] > 10
    assert min(line["queue_ms"], line["first_byte_ms"], line["total_ms"]) >= 0
    text = gateway.log.read_text(errors="strict")
    assert len([one for one in text.splitlines() if one.startswith("{")]) == len(gateway.read_log())
    assert "my prompt" not in text and key not in text


def test_the_path_may_name_the_role(gateway: Gateway) -> None:
    text = {"messages": [{"role": "user", "content": "x" * 2_000_000}], "model": "architect"}
    late = gateway.ask(write_request(text))
    assert late.json["error"]["code"] == "model_missing" and "/roles/architect/v1" in late.json["error"]["message"]
    for path in PATHS:
        for body in (text, {"prompt": "no model"}):
            answer = gateway.ask(write_request(body, "/roles/architect" + path))
            seen = gateway.engines["big"].seen[-1]
            assert (answer.status, answer.headers["x-served-by"], seen.target) == (200, "big", path)
            assert seen.headers["x-vllm-edge-models"] == "architect"
    assert gateway.get_log(answer.headers["x-request-id"])["path"] == "/roles/ROLE" + PATHS[-1]
    unknown = gateway.ask(write_request(text, "/roles/nobody/v1/completions", key="part"))
    assert (unknown.status, unknown.json["error"]["message"][-17:]) == (404, " /roles/sentry/v1")
    assert gateway.ask(write_request(text, "/roles/architect/v1/completions", key="part")).status == 403
    models = gateway.ask(write_request(path="/roles/worker/v1/models")).json
    assert [one["id"] for one in models["data"]] == ["worker"]
    assert gateway.ask(write_request(path="/roles/worker/v1/models", key="part")).json["data"] == []


def test_the_role_in_the_path_is_the_name_of_its_backend(make_gateway: Callable[..., Gateway]) -> None:
    gateway = make_gateway(names={"google/gemma-4-E2B-it": "mid"})
    answer = gateway.ask(write_request({"prompt": "x"}, f"/roles/{name_backend('google/gemma-4-E2B-it')}{PATHS[0]}"))
    assert answer.status == 200
    assert gateway.engines["mid"].seen[-1].headers["x-vllm-edge-models"] == "google/gemma-4-E2B-it"
    assert gateway.ask(write_request({"prompt": "x"}, "/roles/google/gemma-4-E2B-it" + PATHS[0])).status == 404
