# SPDX-License-Identifier: Apache-2.0
"""The gateway as clients see it: the official `openai` client, on the machine that runs the lab."""

from __future__ import annotations

import errno
import json
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from conftest import ASK, ENGINES, INVENTORY_HOST, LAB, ROLES, ROOT, Controller, Machine, Served

CLIENT_FILES = ROOT / "lab" / "generated" / LAB / "clients"
QUESTION: Any = [{"role": "user", "content": "Count to three."}]


def read_environment(client: str) -> dict[str, str]:
    text = (CLIENT_FILES / f"{INVENTORY_HOST}-{client}.env").read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def connect(environment: dict[str, str], **options: Any) -> openai.OpenAI:
    verified = openai.DefaultHttpxClient(
        verify=ssl.create_default_context(cafile=environment["SSL_CERT_FILE"]), timeout=180
    )
    return openai.OpenAI(
        base_url=environment["OPENAI_BASE_URL"],
        api_key=environment["OPENAI_API_KEY"],
        http_client=verified,
        max_retries=0,
        **options,
    )


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with connect(read_environment("default")) as client:
        yield client


def test_key_is_for_its_owner_only(machine: Machine) -> None:
    file = CLIENT_FILES / f"{INVENTORY_HOST}-default.env"
    key = read_environment("default")["OPENAI_API_KEY"]
    assert (oct(file.stat().st_mode & 0o777), len(key)) == ("0o600", len("vllm-") + 43)
    # sudo writes command lines into the journal, this one too: the pattern does not find itself.
    places = "/etc /var/lib/vllm-edge /var/log /run"
    assert machine.host.run(f"grep -rl '[{key[0]}]{key[1:]}' {places} 2>/dev/null").stdout == ""


@pytest.mark.parametrize("role", ROLES)
def test_role_answers(client: openai.OpenAI, role: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=role, messages=QUESTION, max_tokens=8)
    assert raw.headers["X-Served-By"] == ROLES[role].name
    assert "X-Stand-In" not in raw.headers
    assert raw.parse().usage.completion_tokens > 0


def test_other_endpoints_and_a_stream(client: openai.OpenAI) -> None:
    assert client.completions.create(model="auditor", prompt="one, two,", max_tokens=4).choices[0].text
    assert client.responses.create(model="sentry", input="Count.", max_output_tokens=16).id
    chunks = list(client.chat.completions.create(model="sentry", messages=QUESTION, max_tokens=32, stream=True))
    assert len(chunks) > 8 and chunks[-1].choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_port_of_an_engine_wants_a_key(machine: Machine, engine: Served) -> None:
    url = f"http://127.0.0.1:{engine.port}/v1/models"
    assert json.loads(machine.run("python3", "-c", ASK, url, "", "60"))[0] == 401


# ---- everybody else ---------------------------------------------------------------------------------------------

FROM_A_NEIGHBOUR = """
import json, socket, struct, sys
route = next(line.split() for line in open("/proc/net/route") if line.split()[1] == "00000000")
host = socket.inet_ntoa(struct.pack("<L", int(route[2], 16)))
def connect(port):
    with socket.socket() as tried:
        tried.settimeout(3)
        return tried.connect_ex((host, port))
print(json.dumps({port: connect(port) for port in json.loads(sys.argv[1])}))
"""
"""Runs in a container of somebody else."""


def test_a_neighbouring_container_reaches_no_engine(machine: Machine) -> None:
    image = json.loads(machine.host.file("/var/lib/vllm-edge/image.json").content_string)["base"]
    ports = [8000, *(engine.port for engine in ENGINES)]
    container = ["docker", "run", "--rm", "--user=0", "--entrypoint=python3", image, "-c", FROM_A_NEIGHBOUR]
    seen = json.loads(machine.run(*container, json.dumps([22, *ports])))
    assert seen == {"22": 0, **dict.fromkeys(map(str, ports), errno.ECONNREFUSED)}
    # Nor does it by a frame for 127.0.0.1 that it sends to the host's network card: the kernel drops that.
    assert set(machine.shell("cat /proc/sys/net/ipv4/conf/*/route_localnet").split()) == {"0"}


# ---- clients ----------------------------------------------------------------------------------------------------


def declare(controller: Controller, *options: str) -> str:
    """What the play printed."""
    clients = {
        "default": {},
        "ci": {"served_names": ["sentry"], "requests_per_minute": 5},
        "partial": {"served_names": ["worker"]},
    }
    done = controller.play("playbooks/clients.yml", "-e", json.dumps({"serving_clients": clients}), *options)
    assert done.rc == 0, done.output[-3000:]
    for name in clients:
        file = CLIENT_FILES / f"{INVENTORY_HOST}-{name}.env"
        assert not file.exists() or read_environment(name)["OPENAI_API_KEY"] not in done.output
    return done.output


def test_clients_are_declared_limited_rotated_and_revoked(controller: Controller) -> None:
    declare(controller)
    first = read_environment("ci")
    with connect(first) as ci, connect(read_environment("partial")) as partial:
        assert [model.id for model in ci.models.list()] == ["sentry"]
        with pytest.raises(openai.PermissionDeniedError):
            ci.chat.completions.create(model="architect", messages=QUESTION, max_tokens=2)
        with pytest.raises(openai.RateLimitError) as limited:
            for _ in range(8):
                ci.models.list()
        assert int(limited.value.response.headers["Retry-After"]) > 0
        # worker's engine has another name, architect, which the engine would take from a second key.
        with pytest.raises(openai.PermissionDeniedError) as twice:
            partial.post(
                "/chat/completions",
                cast_to=httpx2.Response,
                content=b'{"model":"worker","messages":[{"role":"user","content":"x"}],"max_tokens":2,"model":"architect"}',
                options={"headers": {"Content-Type": "application/json"}},
            )
        assert twice.value.code == "model_forbidden"
    printed = declare(controller, "-e", "rotate=partial", "-e", "revoke=ci")
    with connect(first) as gone, pytest.raises(openai.AuthenticationError):
        gone.models.list()
    assert not (CLIENT_FILES / f"{INVENTORY_HOST}-ci.env").exists()
    models = (CLIENT_FILES / f"{INVENTORY_HOST}-models.yaml").read_text()
    assert all(role in models for role in ROLES)
    assert re.search(r"^architect:\n +endpoint: https://127\.0\.0\.1:\d+/v1\n", models, re.MULTILINE)
    # The line that asks the gateway works as pasted.
    (line,) = [line for line in printed.splitlines() if line.startswith("(. ")]
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, timeout=120)
    assert json.loads(done.stdout)["choices"], done.stdout + done.stderr


# ---- what breaks -------------------------------------------------------------------------------------------------


def log(machine: Machine) -> str:
    return machine.run("journalctl", "--quiet", "--output=cat", "--unit=vllm-edge-gateway.service", "--lines=400")


def test_a_gateway_that_is_killed_comes_back(machine: Machine, client: openai.OpenAI) -> None:
    machine.shell("kill -9 $(systemctl show -p MainPID --value vllm-edge-gateway.service)")
    begin = time.monotonic()
    seen: list[str] = []
    while time.monotonic() - begin < 120:
        try:
            client.models.list()
            break
        except openai.APIConnectionError as error:
            seen.append(type(error).__name__)
            time.sleep(0.2)
    else:
        pytest.fail(f"no answer within 120 s: {log(machine)[-2000:]}")
    test_role_answers(client, "sentry")
