# SPDX-License-Identifier: Apache-2.0
"""A host of a fleet asks the gateway of another one, over TLS: each fault there is found by its check."""

from __future__ import annotations

import contextlib
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ansible.module_utils.vllm_edge.doctor.registry import CHECKS, FLEET
from ansible.module_utils.vllm_edge.gateway.admin import Check, HAProxy, Worker
from ansible.module_utils.vllm_edge.gateway.command import synchronize
from ansible.module_utils.vllm_edge.gateway.describe import describe_gateway
from ansible.module_utils.vllm_edge.gateway.peers import SAID, describe_peers, render_fleet
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import FakeHost
from faults import Change, parse_states, removed, set_to

GATEWAY = "etc/vllm-edge/gateway"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts `a` and `b`, each with a CA, certificates of `b` that do not count, and a stranger of the name `b`."""
    place = tmp_path_factory.mktemp("tls")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=place, check=True, capture_output=True)

    for ca in ("a", "b", "stranger"):
        openssl("req", "-x509", *new, "-subj", f"/CN=CA {ca}", "-keyout", f"{ca}-ca.key", "-out", f"{ca}-ca.pem")
    for name, ca, server, days in (
        ("a", "a", "host-a", 90),
        ("b", "b", "host-b", 90),
        ("b-soon", "b", "host-b", 20),
        ("b-ended", "b", "host-b", -1),
        ("b-other", "b", "host-c", 90),
        ("stranger", "stranger", "host-b", 90),
    ):
        (place / "names").write_text(f"subjectAltName=DNS:{server}")
        openssl("req", *new, "-subj", "/CN=x", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", f"{ca}-ca.pem", "-CAkey", f"{ca}-ca.key", "-set_serial", "1", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-days", str(days), "-out", f"{name}.crt")
        (place / f"{name}.pem").write_text((place / f"{name}.key").read_text() + (place / f"{name}.crt").read_text())
    return place


@contextlib.contextmanager
def serve(tls: Path, said: dict[str, Any], certificate: str, trusts: str, status: int) -> Iterator[int]:
    """Answer what `said` has at the time as the gateway of `b`; gives the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"now": int(time.time())} | said).encode()
            self.send_response(status if self.path == "/fleet" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls / f"{certificate}.pem")
    context.load_verify_locations(tls / f"{trusts}-ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def join(host: FakeHost, tls: Path, port: int) -> dict[str, Any]:
    """Put the host into a fleet with `b`, and return what state.map says of it."""
    peer = {"name": "b", "server": "host-b", "address": "127.0.0.1", "port": port}
    fleet = {"fleet": "edge", "host": "a", "server": "host-a", "address": "10.0.0.11", "port": 8444, "peers": [peer]}
    host.write(f"{GATEWAY}/fleet.json", json.dumps(fleet))
    host.write(f"{GATEWAY}/tls/fleet.pem", (tls / "a.pem").read_bytes())
    host.write(f"{GATEWAY}/tls/fleet-ca.pem", (tls / "b-ca.pem").read_bytes())
    synchronize(host.reader.paths, lambda paths: None, proxy=host.proxy(host.reader.paths))
    host.checked = dict.fromkeys((("role_sentry", "engine"), ("role_sentry", "host-b")), Check(True, "L7OK"))
    state = host.read_map(host.root / GATEWAY / "state.map")
    return {key: json.loads(state[key]) for key in ("host", *SAID)}


def nothing(host: FakeHost) -> None:
    pass


def ends_soon(host: FakeHost) -> None:
    text = host.answers["openssl x509"].out
    soon = f"notAfter={datetime.now(UTC) + timedelta(days=20):%b %d %H:%M:%S %Y} GMT"
    lines = [soon if line.startswith("notAfter") else line for line in text.splitlines()]
    host.answers[f"openssl x509 -in {host.root / GATEWAY}/tls/fleet.pem"] = Ran(0, "\n".join(lines))


DOWN = dict.fromkeys((("role_sentry", "engine"), ("role_sentry", "host-b")), Check(False, "L7STS"))
AWAY = set_to(checked={**DOWN, ("role_sentry", "link"): Check(False, "")})
SILENT = "unknown fleet.clocks fleet.generations"
GONE = "unknown fleet.peers fleet.clocks fleet.generations"
CASES: tuple[tuple[dict[str, Any], Change, str, str, str], ...] = (
    ({"certificate": "stranger"}, nothing, f"fail fleet.peers; {SILENT}", "that does not count here", "gateway.yml"),
    ({"certificate": "b-other"}, nothing, f"fail fleet.peers; {SILENT}", "not valid for 'host-b'", "another machine"),
    ({"certificate": "b-ended"}, nothing, f"fail fleet.peers; {SILENT}", "certificate has expired", "timedatectl"),
    ({"certificate": "b-soon"}, nothing, "warn fleet.peers", "b has a certificate that ends soon", "gateway.yml"),
    ({"trusts": "b"}, nothing, f"fail fleet.peers; {SILENT}", "refuses this host's certificate", "this host's CA"),
    ({"port": 1}, nothing, f"warn fleet.peers; {SILENT}", "b is not reached (connection refused)", "packet filter"),
    ({"status": 404}, nothing, f"warn fleet.peers; {SILENT}", "'HTTP/1.0 404 Not Found' to GET /fleet", "site.yml"),
    ({"now": None}, nothing, f"warn fleet.peers; {SILENT}", "does not say what it serves", "site.yml"),
    ({"now": 1e9}, nothing, "warn fleet.clocks", "that of b by -", "timedatectl"),
    ({"digest": "0" * 12}, nothing, "warn fleet.generations", "b serves p with other models", "site.yml"),
    ({"release": "9.9"}, nothing, "warn fleet.generations", "b has vllm-edge '9.9'", "site.yml"),
    ({"fleet": "other"}, nothing, "warn fleet.generations", "b is of the fleet 'other'", "site.yml"),
    ({}, ends_soon, "warn fleet.certificate", "for the other hosts ends on", "gateway.yml"),
    ({}, removed(f"{GATEWAY}/tls/fleet.pem"), f"fail fleet.certificate; {GONE}", "fleet.pem is missing", "gateway.yml"),
    ({}, removed(f"{GATEWAY}/tls/fleet-ca.pem"), f"fail fleet.certificate; {GONE}", "fleet-ca.pem: No", "gateway.yml"),
    ({}, AWAY, "fail fleet.roles", "no host of the fleet serves sentry", "vllm-edge status"),
)


@pytest.mark.parametrize(("peer", "change", "states", "evidence", "remedy"), CASES, ids=[case[3] for case in CASES])
def test_each_fault_of_a_fleet_is_named(
    host: FakeHost, tls: Path, peer: dict[str, Any], change: Change, states: str, evidence: str, remedy: str
) -> None:
    given = {"certificate": "b", "trusts": "a", "status": 200, **peer}
    server, said = {key: given.pop(key) for key in ("certificate", "trusts", "status")}, dict[str, Any]()
    with serve(tls, said, **server) as port:
        said.update(join(host, tls, given.pop("port", port)) | given)
        assert said["host"] == "a"
        change(host)
        checks = host.checks()
    assert {name: check["state"] for name, check in checks.items() if check["state"] != "ok"} == parse_states(states)
    wrong = [check for check in checks.values() if check["state"] in ("warn", "fail")]
    assert [evidence in check["evidence"] and remedy in check["remedy"] for check in wrong] == [True], wrong


def test_a_fleet_without_a_fault_and_what_is_none(host: FakeHost, tls: Path) -> None:
    """What a switch moves is not judged, and a profile of its own is no fault; every check was seen to fail above."""
    said: dict[str, Any] = {}
    with serve(tls, said, "b", "a", 200) as port:
        said.update(join(host, tls, port))
        assert host.not_ok() == {} and host.examine()["summary"]["ok"] == len(CHECKS) + len(FLEET)
        host.checked[("role_sentry", "engine")] = Check(False, "L4CON")
        said |= {"profile": "other", "digest": "0" * 12}
        assert host.not_ok() == {}
        said |= {"profile": "p", "switch": "away"}
        assert host.not_ok() == {"fleet.generations": "unknown"}
    told = {name for *_, states, _, _ in CASES for name, state in parse_states(states).items() if state != "unknown"}
    assert told == set(FLEET)


def test_a_damaged_fleet_json_is_a_problem(host: FakeHost, tls: Path) -> None:
    join(host, tls, 1)
    host.write(f"{GATEWAY}/fleet.json", '{"fleet": "edge"}')
    host.remove(f"{GATEWAY}/tls/server.pem")
    checks = host.checks()
    assert not FLEET.keys() & checks.keys() and checks["gateway.maps"]["state"] == "fail"
    assert "the record has no host" in checks["gateway.maps"]["evidence"]
    assert describe_peers(host.reader.paths) is None
    told = describe_gateway(host.reader.paths, {})
    assert told and "playbooks/gateway.yml, which writes it anew" in told["problem"]


@pytest.mark.parametrize(
    ("rows", "up", "words"),
    [
        ("peers_sentry,host-b,UP,L7OK\n", True, "b serves all served names"),
        ("peers_sentry,host-b,DOWN,* L7STS\n", False, "b serves nothing"),
        ("peers_x,host-b,DOWN,L7STS\npeers_sentry,host-b,DOWN,L4TOUT\n", False, "b serves nothing (is not reached)"),
        ("peers_sentry,host-b,DOWN,SOCKERR\n", False, "b serves nothing (ends the connection, as one does"),
        ("peers_sentry,host-b,DOWN,PROCERR\n", False, "b serves nothing (its check says PROCERR)"),
        ("role_sentry,host-b,UP,\npeers_sentry,host-b\n", None, "(HAProxy does not know it: run playbooks/gat"),
    ],
)
def test_the_status_of_a_fleet(
    host: FakeHost, tls: Path, monkeypatch: pytest.MonkeyPatch, rows: str, up: bool | None, words: str
) -> None:
    join(host, tls, 8444)
    worker = Worker(Path("none"), 1)
    monkeypatch.setattr(Worker, "ask", lambda self, command: f"# pxname,svname,status,check_status\n{rows}")
    fleet = describe_peers(host.reader.paths, cast(HAProxy, SimpleNamespace(list_workers=lambda: [worker])))
    assert fleet is not None and (fleet["fleet"], fleet["host"]) == ("edge", "a")
    (peer,) = fleet["peers"]
    assert peer["roles"] == ({} if up is None else {"sentry": up})
    line = " ".join(" ".join(render_fleet(fleet)).split())
    assert line.startswith("fleet edge, here a; b serves ") and words in line
    assert (peer["reason"] is None) == ("(" not in words)
