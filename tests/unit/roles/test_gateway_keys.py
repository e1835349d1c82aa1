# SPDX-License-Identifier: GPL-3.0-or-later
"""Keys of the gateway's clients on the controller, the certificate on the host, and who listens on its ports."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from ansible.errors import AnsibleActionFail
from ansible.module_utils.vllm_edge.gateway.clients import Client
from ansible.module_utils.vllm_edge.system import listeners
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from helpers import ROOT

Act = Callable[..., dict[str, Any]]


@pytest.fixture
def act(tmp_path: Path, load_module: Callable[..., Any]) -> Act:
    """act(clients.json, check=False, cut=False, **options): the action plugin's result, with its files in `clients`.

    With `cut` the run ends before the host has clients.json.
    """
    plugin = load_module("gateway_clients", "action")

    def run(
        on_host: str = "", *, check: bool = False, cut: bool = False, host: str = "box", **options: Any
    ) -> dict[str, Any]:
        given = {"directory": str(tmp_path / "clients"), "environment": {"OPENAI_BASE_URL": "http://x/v1", "A": ""}}
        task = MagicMock(async_val=0, check_mode=check, args={**given, "host_clients": on_host, **options})
        action = plugin.ActionModule(task, MagicMock(), MagicMock(), MagicMock(), MagicMock(), MagicMock())
        result: dict[str, Any] = action.run(None, {"inventory_hostname": host})
        if not (cut or check or options.get("settle")):
            run(result["content"], host=host, settle=True)
        return result

    return run


def read_key(file: str) -> str:
    found = re.search(r"^OPENAI_API_KEY=(.*)$", Path(file).read_text(), re.MULTILINE)
    assert found and re.fullmatch(r"vllm-[A-Za-z0-9_-]{43}", found[1])
    return found[1]


def list_hashes(result: dict[str, Any], client: str, *, ended: bool = False) -> list[str]:
    return [key["sha256"] for key in json.loads(result["content"])[client]["keys"] if bool(key["until"]) == ended]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def test_a_client_gets_a_key_once_and_a_lost_one_is_told_with_a_way_out(act: Act) -> None:
    foreseen = act(check=True)
    assert foreseen["changed"] and foreseen["made"] == ["default"] and not Path(foreseen["files"]["default"]).exists()
    first = act()
    file = first["files"]["default"]
    assert list_hashes(first, "default") == [sha256(read_key(file))]
    assert read_key(file) not in json.dumps(first)
    assert Path(file).stat().st_mode & 0o777 == 0o600 and Path(file).parent.stat().st_mode & 0o777 == 0o700
    again = act(first["content"])
    assert (again["changed"], again["made"], again["notes"]) == (False, [], [])
    assert again["content"] == first["content"]
    Path(file).unlink()
    again = act(first["content"])
    assert again["changed"] is False and "`-e rotate=default` makes a new one" in again["notes"][0]


def test_a_key_of_another_host_is_not_overwritten(act: Act) -> None:
    first = act(environment={"OPENAI_BASE_URL": "https://prod:8443/v1"})
    file = Path(first["files"]["default"])
    with pytest.raises(AnsibleActionFail, match=r"a key for prod that box \(staging\) does not know: .* Set another"):
        act(environment={"OPENAI_BASE_URL": "https://staging:8443/v1"})
    key = read_key(str(file))
    assert list_hashes(first, "default") == [sha256(key)]
    moved = act(first["content"], environment={"OPENAI_BASE_URL": "https://prod.example:8443/v1"})
    assert moved["changed"] and read_key(str(file)) == key


def test_the_file_of_a_client_is_read_by_a_shell(act: Act) -> None:
    place = "/My Project/$(id) ca.pem"
    file = act(environment={"OPENAI_BASE_URL": "http://[::1]:8000/v1", "SSL_CERT_FILE": place})["files"]["default"]
    shell = ["sh", "-ec", f'set -a; . "{file}"; env']
    seen = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {f"SSL_CERT_FILE={place}", "OPENAI_BASE_URL=http://[::1]:8000/v1"} <= set(seen)
    with pytest.raises(AnsibleActionFail, match=r"SSL_CERT_FILE is .* Choose another serving_gateway_url or serving_r"):
        act(environment={"SSL_CERT_FILE": "/o'brien/ca.pem"})


def test_declared_clients_have_their_limits_and_default_comes_only_to_a_new_host(act: Act) -> None:
    first = act(declared={"ci": {"served_names": ["sentry"], "streams": 2, "metrics": True}})
    ((name, client),) = json.loads(first["content"]).items()
    limits = (client["requests_per_minute"], client["streams"], client["metrics"])
    assert (name, client["served_names"], limits) == ("ci", ["sentry"], (600, 2, True))
    changed = act(first["content"], declared={"ci": {}})
    assert json.loads(changed["content"])["ci"]["served_names"] == [] and changed["made"] == []
    assert act("{}\n")["made"] == []


def test_a_client_for_metrics_uses_no_role_whatever_the_program_of_the_host(act: Act) -> None:
    """A program of before `metrics` reads the names alone, where none is all. Another client gets the models."""
    first = act(declared={"prometheus": {"metrics": True}})
    told = json.loads(first["content"])
    assert not Client((), served_names=tuple(told["prometheus"]["served_names"])).may(("sentry",))
    assert first["asks"] == first["files"]["default"]
    declared = {"ci": {"metrics": True}, "ui": {"metrics": True, "served_names": ["sentry"]}}
    second = act(declared=declared)
    assert (second["made"], second["asks"]) == (["ci", "ui"], second["files"]["ui"])
    assert act(second["content"], declared={"ci": {"metrics": True}})["made"] == []


def test_a_rotated_key_stays_valid_until_a_mark_of_the_timer(act: Act) -> None:
    first = act()
    old = read_key(first["files"]["default"])
    second = act(first["content"], rotate="default", rotation_hours=2)
    assert read_key(second["files"]["default"]) != old
    assert list_hashes(second, "default") == [sha256(read_key(second["files"]["default"]))]
    assert list_hashes(second, "default", ended=True) == [sha256(old)]
    until = datetime.fromisoformat(json.loads(second["content"])["default"]["keys"][0]["until"])
    assert until.timestamp() % 300 == 0
    assert timedelta(hours=2) <= until - datetime.now(UTC) + timedelta(minutes=1) <= timedelta(hours=2, minutes=6)
    ended = second["content"].replace(until.strftime("%Y"), "2001")
    assert list_hashes(act(ended), "default", ended=True) == []


@pytest.mark.parametrize("known", [False, True], ids=["before the host knows the key", "before the file has it"])
def test_a_rotation_that_was_cut_loses_no_key(act: Act, tmp_path: Path, known: bool) -> None:
    first = act()
    file = first["files"]["default"]
    old = read_key(file)
    second = act(first["content"], cut=True, rotate="default")
    assert read_key(file) == old
    new = read_key(f"{file}.new")
    third = act((second if known else first)["content"])
    assert read_key(file) == (new if known else old) and third["changed"] is known and third["notes"] == []
    assert [path.name for path in (tmp_path / "clients").iterdir()] == ["box-default.env"]


def test_a_revoked_client_is_gone_with_its_file(act: Act) -> None:
    first = act(declared={"ci": {}, "ui": {}})
    file = Path(first["files"]["ci"])
    act(first["content"], check=True, revoke="ci", declared={"ci": {}, "ui": {}})
    assert file.exists()
    second = act(first["content"], revoke="ci", declared={"ci": {}, "ui": {}})
    assert list(json.loads(second["content"])) == ["ui"] and not file.exists()
    assert "still in serving_clients" in second["notes"][0]
    again = act(second["content"], revoke="ci", declared={"ui": {}})
    assert (again["content"], again["changed"]) == (second["content"], False), "one of several hosts was down before"
    assert "ci is no client of box, so nothing was revoked" in again["notes"][0]
    third = act(second["content"], declared={"ci": {}, "ui": {}})
    assert third["made"] == ["ci"] and list_hashes(third, "ci") != list_hashes(first, "ci"), "another key"


def test_a_host_that_lost_its_clients_keeps_the_keys_of_its_gateway(act: Act) -> None:
    first = act(declared={"ci": {"served_names": ["sentry"]}, "ui": {}})
    (ci,), (ui,), file = list_hashes(first, "ci"), list_hashes(first, "ui"), Path(first["files"]["ci"])
    before = file.read_text()
    keys = f"{ci} ci 600 64\n{ui} ui 1 2 2126-01-01T00:00:00Z\n0 ui 1 2 2001-01-01T00:00:00Z\n1 bench 0 0\n"
    again = act(host_keys=keys, declared={"ci": {"served_names": ["sentry"]}, "ui": {}})
    assert list_hashes(again, "ci") == [ci] and list_hashes(again, "ui", ended=True) == [ui]
    assert json.loads(again["content"])["ci"]["served_names"] == ["sentry"] and file.read_text() == before
    assert (again["made"], again["notes"]) == (
        [],
        ["clients.json of box was gone. It has the keys of the gateway's clients.map again."],
    )
    with pytest.raises(AnsibleActionFail, match=r"not known which names ui may use.* state them in serving_clients"):
        act(host_keys=keys, declared={"ci": {}})
    assert list(json.loads(act(host_keys=keys, declared={"ci": {}}, revoke="ui")["content"])) == ["ci"]
    assert "box did not know the key in" in act(declared={"ci": {}})["notes"][0], "a new host"


@pytest.mark.parametrize(
    ("on_host", "options", "words"),
    [
        ("", {"rotate": "defualt", "declared": {"default": {}}}, "rotate is 'defualt', which is no client of box"),
        ("", {"host_keys": "0 default six\n"}, "its clients.map is damaged"),
        ("{", {}, "clients.json of box is damaged"),
        ('{"ci": {"keys": [{}]}}', {}, "clients.json of box is damaged"),
    ],
)
def test_what_cannot_be_is_refused(act: Act, tmp_path: Path, on_host: str, options: Any, words: str) -> None:
    with pytest.raises(AnsibleActionFail, match=re.escape(words)):
        act(on_host, **options)
    assert not (tmp_path / "clients").exists()


def test_a_file_of_another_host_is_neither_overwritten_nor_removed(act: Act) -> None:
    file = act(host="box", declared={"a-b": {}})["files"]["a-b"]
    act(host="box-a", declared={"ci": {}}, revoke="b")
    assert read_key(file)
    with pytest.raises(AnsibleActionFail, match="does not belong to the client b of box-a"):
        act(host="box-a", declared={"b": {}})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_certificate_is_made_once_and_again_when_it_has_to(tmp_path: Path) -> None:
    script = ROOT / "roles/serving_gateway/files/certificate.sh"
    names = ["Llm.example.org", "192.0.2.5", "::1"]

    def run(names: list[str], what: str = "make", days: int = 397, file: str = "server.pem") -> tuple[str, str]:
        usage = "serverAuth, clientAuth" if file == "fleet.pem" else "serverAuth"
        about = [tmp_path, file, usage, grp.getgrgid(os.getgid()).gr_name, "30", str(days)]
        words = ["sh", script, what, *about, *names]
        why, _, authority = subprocess.run(words, capture_output=True, text=True, check=True).stdout.partition("\n")
        return why, authority

    assert run(names, "look") == ("there is no CA on the host", "") and not list(tmp_path.iterdir())
    _, first = run(names)
    assert "BEGIN CERTIFICATE" in first and "PRIVATE" not in first
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644, "server.pem": 0o640}
    assert run(names) == run(["0:0:0:0:0:0:0:1", *names[:1]]) == ("", first)
    assert run([*names, "other", "gpu_01"]) == ("the certificate lacks other, gpu_01", first)
    assert run([*names, "more"], days=20)[0] and run(names) == ("the certificate ends within 30 days", first)
    authority, server = tmp_path / "ca.pem", tmp_path / "server.pem"
    for name in (names[0].lower(), "other"):
        verify = ["openssl", "verify", "-CAfile", authority, "-verify_hostname", name, server]
        assert (subprocess.run(verify, capture_output=True, check=False).returncode == 0) == (name != "other")
    of_fleet = ["host-gpu_01", "192.0.2.5"]
    assert run(of_fleet, file="fleet.pem") == ("there is no certificate", first)
    assert run(of_fleet, file="fleet.pem") == ("", first) and run(names) == ("", first)
    # As a gateway shows it to another one; what clients see is no certificate of a gateway.
    for file, purpose, fits in (("fleet", "client", 1), ("fleet", "server", 1), ("server", "client", 0)):
        verify = ["openssl", "verify", "-CAfile", authority, "-purpose", f"ssl{purpose}", tmp_path / f"{file}.pem"]
        assert (subprocess.run(verify, capture_output=True, check=False).returncode == 0) == bool(fits)
    server.write_text("damaged")
    assert "ends within" in run(names, "look")[0]
    assert server.read_text() == "damaged"
    authority.unlink()
    assert run(names)[0] == "there is no CA on the host"
    assert run(of_fleet, file="fleet.pem")[0] == "the certificate is not one of the host's CA"


def make_certificate(directory: Path, name: str, days: int) -> None:
    """A certificate that ends in so many days, and its key, in NAME.pem and NAME.key."""
    key = ec.generate_private_key(ec.SECP256R1())
    issued = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(issued, issued, key.public_key(), x509.random_serial_number())
    signed = builder.not_valid_before(now - timedelta(9)).not_valid_after(now + timedelta(days)).sign(key, SHA256())
    (directory / f"{name}.pem").write_bytes(signed.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (directory / f"{name}.key").write_bytes(private)


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("good.pem", "good.key", ""),
        ("good.pem", "other.key", "serving_gateway_private_key: 'other.key' is not the key of 'good.pem'"),
        ("ended.pem", "ended.key", "serving_gateway_certificate: 'ended.pem' ended on"),
        ("good.key", "good.key", "serving_gateway_certificate: 'good.key': holds nothing that can be read"),
        ("good.pem", "none.key", "serving_gateway_private_key: 'none.key': No such file or directory"),
        ("", "good.key", ""),
    ],
)
def test_an_unfit_certificate_is_refused_on_the_controller(
    load_module: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, certificate: str, key: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, days in (("good", 2), ("other", 2), ("ended", -2)):
        make_certificate(tmp_path, name, days)
    given = {"serving_gateway_certificate": certificate, "serving_gateway_private_key": key}
    found = load_module("serving_check", "action").find_certificate_fault(given)
    assert found.startswith(words) and bool(found) == bool(words)


def test_the_gateways_own_process_does_not_take_a_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (found,) = listeners.find_port_users([("0.0.0.0", port)], "no.service")
        assert f"pid {os.getpid()} (" in found
        assert listeners.find_port_users([("127.0.0.2", port)], "no.service") == []
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("/")[2] or "/"
        assert listeners.find_port_users([("127.0.0.1", port)], group) == []
    wanted = [(address, port) for address in ("127.0.0.9", "192.0.2.9", "2001:db8::9")]
    found = listeners.find_port_users(wanted, "no.service")
    assert found == [f"the host has no address {address}" for address in ("192.0.2.9", "2001:db8::9")]


def test_hosts_of_a_fleet_have_one_key_of_each_client(act: Act, tmp_path: Path) -> None:
    """Also after a rotation, on a host that was not there for it, and where a host had a key of its own."""
    fleet = {"fleet": "lab", "hosts": ["a", "b", "c"]}
    own = {host: act(host=host) for host in "ab"}
    joined = {host: act(own[host]["content"], host=host, **fleet) for host in "ab"}
    file = joined["a"]["files"]["default"]
    key = read_key(file)
    assert (Path(file).name, key) == ("lab-default.env", read_key(own["a"]["files"]["default"]))
    assert all(list_hashes(it, "default") == [sha256(key)] and not it["made"] for it in joined.values())
    assert "is valid until" in joined["b"]["notes"][0] and not joined["a"]["notes"]
    again = act(joined["b"]["content"], host="b", **fleet)
    assert (again["changed"], again["content"]) == (False, joined["b"]["content"])
    told = {"rotate": "default", "absent": ["c"], "cut": True, **fleet}
    turned = {host: act(joined[host]["content"], host=host, **told) for host in "ab"}
    assert "--limit c, without rotate" in turned["a"]["notes"][-1] and read_key(file) == key
    for host in "ab":
        act(turned[host]["content"], host=host, settle=True, **fleet)
    late = act(host="c", **fleet)
    assert read_key(file) != key and not list(tmp_path.rglob("*.new"))
    assert [list_hashes(it, "default") for it in (*turned.values(), late)] == [[sha256(read_key(file))]] * 3
    revoked = act(late["content"], host="c", revoke="default", **fleet | {"absent": ["a"]})
    assert "-e revoke=default --limit a" in revoked["notes"][-1]
    assert not list(tmp_path.rglob("*-default.env")), "a key of before the fleet would be taken for the fleet's"


@pytest.mark.parametrize("end", ["revoke", "rotate"])
def test_a_key_that_was_ended_does_not_come_back_from_a_file_of_before_the_fleet(
    act: Act, tmp_path: Path, end: str
) -> None:
    """Also from that of a host that was not in the run, or where the file of the fleet is lost."""
    fleet = {"fleet": "lab", "hosts": ["a", "b"], "declared": {"ci": {}}}
    own = {host: act(host=host, declared={"ci": {}}) for host in "ab"}
    former = {sha256(read_key(it["files"]["ci"])) for it in own.values()}
    joined = act(own["a"]["content"], host="a", **fleet)
    ended = act(joined["content"], host="a", **{end: "ci"}, **fleet)
    act(ended["content"], host="a", settle=True, **fleet)
    (tmp_path / "clients/lab-ci.env").unlink(missing_ok=True)
    again = act(ended["content"], host="a", **fleet)
    assert not former & {*list_hashes(again, "ci")}
    assert end == "revoke" or "rotate=ci" in again["notes"][0]
