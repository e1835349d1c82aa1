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
from conftest import ENGINES, INVENTORY_HOST, LAB, PROFILE, ROLES, ROOT, Controller, Machine, Served

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


def test_unit_runs_and_the_packages_own_service_does_not(machine: Machine) -> None:
    assert machine.unit("ActiveState", "UnitFileState", unit="vllm-edge-gateway.service") == {
        "ActiveState": "active",
        "UnitFileState": "enabled",
    }
    assert machine.unit("LoadState", unit="haproxy.service") == {"LoadState": "masked"}


def test_models_are_those_of_the_profile(client: openai.OpenAI) -> None:
    assert sorted(model.id for model in client.models.list()) == sorted(ROLES)


@pytest.mark.parametrize("role", ROLES)
def test_role_answers(client: openai.OpenAI, role: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=role, messages=QUESTION, max_tokens=8)
    assert raw.headers["X-Served-By"] == ROLES[role].name
    assert "X-Stand-In" not in raw.headers
    assert raw.parse().usage.completion_tokens > 0


def test_stream_comes_in_chunks(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="sentry", messages=QUESTION, max_tokens=32, stream=True)
    chunks = list(stream)
    assert len(chunks) > 8
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


def test_other_endpoints(client: openai.OpenAI) -> None:
    assert client.completions.create(model="auditor", prompt="one, two,", max_tokens=4).choices[0].text
    assert client.responses.create(model="sentry", input="Count.", max_output_tokens=16).id


def test_errors_have_the_form_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.body["request_id"] == unknown.value.response.headers["X-Request-Id"]  # type: ignore[index]
    wrong = read_environment("default") | {"OPENAI_API_KEY": "vllm-" + "x" * 43}
    with connect(wrong) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_request_id_is_in_the_log_without_prompt_and_key(client: openai.OpenAI, machine: Machine) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="sentry", messages=[{"role": "user", "content": "planted-prompt-51"}], max_tokens=2
    )
    machine.wait("the request is in the log", lambda: raw.headers["X-Request-Id"] in log(machine), 60)
    line = next(line for line in log(machine).splitlines() if raw.headers["X-Request-Id"] in line)
    entry = json.loads(line)
    assert (entry["client"], entry["role"], entry["engine"], entry["status"]) == ("default", "sentry", "e2b", 200)
    assert "planted-prompt-51" not in log(machine)
    assert read_environment("default")["OPENAI_API_KEY"] not in log(machine)


def log(machine: Machine) -> str:
    return machine.run("journalctl", "--quiet", "--output=cat", "--unit=vllm-edge-gateway.service", "--lines=400")


def ask_status(environment: dict[str, str]) -> dict[str, Any]:
    address = environment["OPENAI_BASE_URL"].removesuffix("/v1")
    bearer = {"Authorization": f"Bearer {environment['OPENAI_API_KEY']}"}
    return dict(
        httpx2.get(
            f"{address}/status", headers=bearer, verify=ssl.create_default_context(cafile=environment["SSL_CERT_FILE"])
        ).json()
    )


def test_status_names_profile_and_roles() -> None:
    status = ask_status(read_environment("default"))
    assert (status["profile"], status["switch"], set(status["roles"])) == (PROFILE, None, set(ROLES))
    assert {name: (role["state"], role["engine"], role["waiting"]) for name, role in status["roles"].items()} == {
        name: ("up", engine.name, 0) for name, engine in ROLES.items()
    }


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_port_of_an_engine_answers_for_it_alone_and_with_a_key(machine: Machine, engine: Served) -> None:
    machine.put("/run/header", f"Authorization: Bearer {read_environment('default')['OPENAI_API_KEY']}", "0600")
    machine.put("/run/no-header", "X-None: none", "0600")
    program = (
        "import json,sys,urllib.request,urllib.error\n"
        "header=dict([open(sys.argv[2]).read().split(': ')])\n"
        "try:\n"
        " r=urllib.request.urlopen(urllib.request.Request(sys.argv[1],headers=header))\n"
        " print(json.dumps([r.status,json.load(r)]))\n"
        "except urllib.error.HTTPError as e:\n"
        " print(json.dumps([e.code,json.load(e)]))"
    )
    url = f"http://127.0.0.1:{engine.port}/v1/models"
    status, listed = json.loads(machine.run("python3", "-c", program, url, "/run/header"))
    assert (status, sorted(model["id"] for model in listed["data"])) == (200, sorted(engine.served_names))
    assert json.loads(machine.run("python3", "-c", program, url, "/run/no-header"))[0] == 401
    machine.run("rm", "/run/header", "/run/no-header")


# ---- everybody else ---------------------------------------------------------------------------------------------

FROM_A_NEIGHBOUR = """
import json, socket, struct, sys, time

ports = json.loads(sys.argv[1])
route = next(line.split() for line in open("/proc/net/route") if line.split()[1] == "00000000")
host = socket.inet_ntoa(struct.pack("<L", int(route[2], 16)))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
    asked.connect((host, 9))
    own = asked.getsockname()[0]


def connect(port):
    with socket.socket() as tried:
        tried.settimeout(3)
        return tried.connect_ex((host, port))


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def is_answered(address, port):
    # A frame to the host's own network card for an address of its choice, as a machine of the same segment sends it.
    theirs = next(line.split()[3] for line in open("/proc/net/arp") if line.split()[0] == host)
    ours = open(f"/sys/class/net/{route[0]}/address").read().strip()
    source, target = socket.inet_aton(own), socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as wire:
        wire.bind((route[0], 0))
        begin = 20000 + port % 20000
        tcp = struct.pack("!HHLLBBHHH", begin, port, 1, 0, 5 << 4, 2, 65535, 0, 0)
        whole = source + target + struct.pack("!BBH", 0, 6, len(tcp)) + tcp
        tcp = tcp[:16] + struct.pack("!H", checksum(whole)) + tcp[18:]
        ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(tcp), 1, 0, 64, 6, 0, source, target)
        ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
        wire.send(bytes.fromhex((theirs + ours).replace(":", "")) + b"\\x08\\x00" + ip + tcp)
        end = time.monotonic() + 3
        while (left := end - time.monotonic()) > 0:
            wire.settimeout(left)
            try:
                frame = wire.recv(65535)
            except TimeoutError:
                break
            if frame[23] == 6 and frame[26:30] == target and struct.unpack("!HH", frame[34:38]) == (port, begin):
                return frame[47] & 0x12 == 0x12
    return False


ssh = connect(22)
print(json.dumps({
    "ssh": [ssh, is_answered(host, 22)],
    "refused": {port: connect(port) for port in ports},
    "forged": {port: is_answered("127.0.0.1", port) for port in ports},
}))
"""
"""Runs in a container of somebody else. That sshd answers shows that the frames are right."""


def test_a_neighbouring_container_reaches_no_engine(machine: Machine) -> None:
    image = json.loads(machine.host.file("/var/lib/vllm-edge/image.json").content_string)["base"]
    ports = [8000, *(engine.port for engine in ENGINES)]
    container = ["docker", "run", "--rm", "--user=0", "--entrypoint=python3", image, "-c", FROM_A_NEIGHBOUR]
    seen = json.loads(machine.run(*container, json.dumps(ports)))
    assert seen["ssh"] == [0, True]
    assert seen["refused"] == dict.fromkeys(map(str, ports), errno.ECONNREFUSED)
    assert seen["forged"] == dict.fromkeys(map(str, ports), False)


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


def find_gateway_checks(machine: Machine) -> dict[str, str]:
    found = json.loads(machine.host.run("vllm-edge doctor --format json").stdout)
    return {row["check"]: row["state"] for row in found["checks"] if row["check"].startswith("gateway.")}


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


def test_a_damaged_map_is_found_and_mended(machine: Machine, client: openai.OpenAI) -> None:
    # Who else would mend it: the timer, a run that it has begun, and the gateway's own start or reload.
    machine.run("systemctl", "stop", "vllm-edge-gateway-sync.timer", "vllm-edge-gateway-sync.service")
    try:
        unit = "vllm-edge-gateway.service"
        machine.wait("it runs", lambda: machine.unit("ActiveState", unit=unit)["ActiveState"] == "active", 120)
        machine.shell("echo 'nonsense' > /etc/vllm-edge/gateway/models.map")
        assert find_gateway_checks(machine)["gateway.maps"] == "fail"
        test_role_answers(client, "sentry")  # the running gateway has the former one
        machine.run("vllm-edge", "gateway", "sync")
    finally:
        machine.run("systemctl", "start", "vllm-edge-gateway-sync.timer")
    assert find_gateway_checks(machine)["gateway.maps"] == "ok"
