# SPDX-License-Identifier: Apache-2.0
"""The role serving_gateway on this machine: its own directories, with programs of ours in place of the host's."""

from __future__ import annotations

import grp
import json
import os
import re
import socket
from collections.abc import Generator
from pathlib import Path
from typing import Any

from helpers import write_program
from role_cases import Cases, Played, Run, Steps

SYSTEMCTL = """
echo "$@" >> "$STATE/asked"
case "$1" in
show)
    up=$(cat "$STATE/up-$2" 2>/dev/null || echo inactive)
    printf 'Id=%s\\nLoadState=loaded\\nActiveState=%s\\n' "$2" "$up"
    ;;
is-enabled)
    [ -L "$STATE/units/$2" ] && echo masked && exit 1
    [ -e "$STATE/on-$2" ] && echo enabled || { echo disabled; exit 1; }
    ;;
enable) touch "$STATE/on-$2" ;;
disable) rm -f "$STATE/on-$2" ;;
start | reload) echo active > "$STATE/up-$2" ;;
stop) rm -f "$STATE/up-$2" ;;
unmask) rm -f "$STATE/units/haproxy.service" ;;
esac
"""
SYNC = 'echo "$@" >> "$STATE/asked"; echo \'{"changed": false}\''
HAPROXY = """
echo "haproxy $* $(ls "$STATE"/etc/gateway/*.map | wc -l) maps" >> "$STATE/asked"
exit "$(cat "$STATE/refuse" || echo 0)"
"""
APT_GET = """
[ -L "$STATE/units/haproxy.service" ] && echo masked >> "$STATE/apt"
echo "apt-get $*" >> "$STATE/apt"
"""


class Host:
    """The role's directories below one of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.configuration = root / "etc/gateway/haproxy.cfg"
        self.client = root / f"clients/{root.name}-default.env"
        for name in ("etc", "state", "units"):
            (root / name).mkdir()
        for name, script in {
            "systemctl": SYSTEMCTL,
            "systemd-analyze": "exit 0",
            "haproxy": HAPROXY,
            "vllm-edge": SYNC,
            "dpkg-query": 'cat "$STATE/packages"',
            "apt-get": APT_GET,
        }.items():
            write_program(root / "bin" / name, script)
        (root / "packages").write_text("haproxy installed\nopenssl installed\n")

    def run(self, point: str, check: bool = False, **more: Any) -> Run:
        variables = {
            "serving_gateway_configuration_directory": str(self.root / "etc"),
            "serving_gateway_state_directory": str(self.root / "state"),
            "serving_gateway_program": str(self.root / "bin/vllm-edge"),
            "serving_gateway_clients_directory": str(self.root / "clients"),
            "serving_gateway_listen": [{"address": "127.0.0.1", "port": 61999, "tls": True}],
            # Names with _ are usual in inventories. The role refuses a name that its certificate lacks.
            "serving_gateway_url": "https://gpu_01:61999",
            "serving_gateway_names": ["sentry", "worker"],
            "serving_gateway_replicas": {"worker": 2},
            "serving_gateway_roles": ["sentry"],
            "__serving_gateway_units_directory": str(self.root / "units"),
            "__serving_gateway_group": grp.getgrgid(os.getgid()).gr_name,
        }
        return Run([point], check, variables | more)

    def converge(self, point: str, check: bool = False, **more: Any) -> Generator[Run, Played, Played]:
        played = yield self.run(point, check, **more)
        assert not played.failed, played.text
        return played

    def asked(self) -> list[str]:
        """What systemctl, haproxy and the program were asked since the last call; not what only looks."""
        file = self.root / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return [line for line in lines if not line.startswith(("show", "is-enabled", "is-active"))]


CASES = Cases("serving_gateway", make=Host, result="serving_gateway_uninstalled")


@CASES.add
def the_gateway_comes_once_changes_by_a_reload_and_goes(host: Host) -> Steps:
    played = yield from host.converge("main")
    text = host.client.read_text()
    key = re.search(r"vllm-[\w-]{43}", text)
    assert key and key[0] not in played.text and "PRIVATE" not in played.text
    assert f"SSL_CERT_FILE={host.root}/clients/{host.root.name}-ca.pem\n" in text
    assert "OPENAI_BASE_URL=https://gpu_01:61999/v1\n" in text
    assert host.client.stat().st_mode & 0o777 == 0o600
    assert host.client.parent.stat().st_mode & 0o777 == 0o700
    on_host = (host.root / "etc/gateway/clients.json").read_text()
    assert list(json.loads(on_host)) == ["default"] and key[0] not in on_host
    before = host.configuration.read_text()
    servers = re.findall(r"server (engine\S*) unix@\S+/(\S+)\.sock", before)
    assert servers == [("engine", "sentry"), ("engine", "worker"), ("engine-1", "worker+1")]
    begun = host.asked()
    assert "start vllm-edge-gateway.service" in begun and "start vllm-edge-gateway-sync.timer" in begun
    assert not [line for line in begun if line.startswith(("restart", "reload"))]
    checked = next(line for line in begun if line.startswith("haproxy -c"))
    assert checked.endswith(" 6 maps"), "HAProxy accepts no configuration without them"
    assert begun[-1] == "gateway sync --format json", "at last, when the gateway runs"

    assert (yield from host.converge("main")).changed == []
    assert not [line for line in host.asked() if line.split()[0] in ("start", "reload", "restart", "daemon-reload")]

    other = [{"address": "127.0.0.1", "port": 61998, "tls": True}]
    foreseen = yield from host.converge("main", check=True, serving_gateway_listen=other)
    assert foreseen.changed != [] and "gateway sync --format json --check" in host.asked()

    # A configuration that HAProxy refuses is not installed.
    host.configuration.write_text("works\n")
    (host.root / "refuse").write_text("1")
    assert (yield host.run("main")).failed
    assert host.configuration.read_text() == "works\n"
    assert not [line for line in host.asked() if line.startswith("re")]
    (host.root / "refuse").unlink()
    yield from host.converge("main")
    assert host.configuration.read_text() == before
    assert [line for line in host.asked() if line.startswith("re")] == ["reload vllm-edge-gateway.service"]

    other = f"{host.root.name}-2"
    (host.client.parent / f"{other}-default.env").write_text(text.replace(f"host {host.root.name}.", f"host {other}."))
    removed = yield from host.converge("uninstall")
    assert removed.result["kept"] == [f"{host.client} on this machine, whose key is void now"]
    assert not (host.root / "etc/gateway").exists() and list((host.root / "units").iterdir()) == []
    assert (yield from host.converge("uninstall")).changed == []
    assert host.client.exists()


@CASES.add
def a_host_knows_of_its_fleet_whom_the_controller_knows(host: Host) -> Steps:
    """The certificate for the others is there without TLS for clients, and goes with the fleet."""
    plain = {"serving_gateway_listen": [{"address": "127.0.0.1", "port": 61999, "tls": False}]}
    plain["serving_gateway_url"] = "http://127.0.0.1:61999"
    peers = [
        {"name": name, "server": f"host-{name}", "address": f"127.0.0.{number}", "port": 61997}
        for number, name in enumerate("bc", 2)
    ]
    files = {peer["name"]: host.root / f"clients/{peer['name']}-ca.pem" for peer in peers}
    fleet: dict[str, Any] = {"fleet": "site", "host": "a", "server": "host-a", "address": "127.0.0.1", "port": 61997}
    given = plain | {"serving_gateway_fleet": fleet | {"peers": peers}}
    files["b"].parent.mkdir(mode=0o700)
    files["b"].write_text("CA of b\n")
    played = yield from host.converge("main", **given)
    assert "leaves c out of the fleet," in played.text and "PRIVATE" not in played.text
    place = host.root / "etc/gateway"
    assert json.loads((place / "fleet.json").read_text()) == fleet | {"peers": peers[:1]}
    assert (place / "tls/fleet-ca.pem").read_text() == "CA of b\n"
    assert (place / "tls/fleet.pem").stat().st_mode & 0o777 == 0o640 and not (place / "tls/server.pem").exists()
    assert (host.root / f"clients/{host.root.name}-ca.pem").read_text() == (place / "tls/ca.pem").read_text()
    assert (yield from host.converge("main", **given)).changed == []
    host.asked()

    files["c"].write_text("CA of c")
    foreseen = yield from host.converge("main", check=True, **given)
    written = ["Write what the host knows of its fleet", "Reload the gateway"]
    assert [name for name in foreseen.changed if name in written] == written and "leave c out" not in foreseen.text
    yield from host.converge("main", **given)
    assert (place / "tls/fleet-ca.pem").read_text() == "CA of b\nCA of c\n"
    assert "reload vllm-edge-gateway.service" in host.asked()

    foreseen = yield from host.converge("main", check=True, **plain)
    assert "Remove the files of a fleet that the host has left" in foreseen.changed and (place / "fleet.json").exists()
    yield from host.converge("main", **plain)
    assert not [*place.rglob("fleet*")]
    assert (yield from host.converge("main", **plain)).changed == []


def the_packages_own_service_is_masked_only_where_it_was_not(host: Host, installed: bool) -> Steps:
    (host.root / "packages").write_text("haproxy installed\n" if installed else "openssl installed\n")
    foreseen = yield from host.converge("install", check=True)
    assert "would install" in foreseen.text
    assert not (host.root / "apt").exists() and not (host.root / "units/haproxy.service").is_symlink()
    yield from host.converge("install")
    calls = (host.root / "apt").read_text()
    assert ("haproxy" in calls.replace("haproxy.service", "")) != installed
    assert calls.startswith("masked") != installed
    host.asked()
    yield from host.converge("uninstall")
    words = {line.split()[0] for line in host.asked()}
    assert ("unmask" in words) != installed
    assert not (host.root / "state/haproxy-masked").exists()


CASES.add(the_packages_own_service_is_masked_only_where_it_was_not, "haproxy_is_there", installed=True)
CASES.add(the_packages_own_service_is_masked_only_where_it_was_not, "haproxy_is_not_there", installed=False)


def clients_reach_the_host_from_elsewhere(host: Host, given: dict[str, str], wanted: str = "") -> Steps:
    """This machine has no address for Ansible: that of its default route, or its name, is what clients get."""
    (host.root / "packages").write_text("openssl installed\n")
    everywhere = [{"address": "::", "port": 61999, "tls": True}]
    played = yield from host.converge("main", True, serving_gateway_url="", serving_gateway_listen=everywhere, **given)
    found = re.search(r"gateway on https://(.*):61999", played.text)
    assert found and (found[1] == wanted if wanted else found[1] not in (host.root.name, *given.values())), played.text


CASES.add(clients_reach_the_host_from_elsewhere, "no_address", given={})
CASES.add(clients_reach_the_host_from_elsewhere, "loopback", given={"ansible_host": "127.0.0.1"})
CASES.add(clients_reach_the_host_from_elsewhere, "address", given={"ansible_host": "llm.test"}, wanted="llm.test")


@CASES.add
def a_taken_port_is_refused_with_its_owner(host: Host) -> Steps:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = {"serving_gateway_listen": [], "serving_gateway_fleet": {"address": "192.0.2.9", "port": 1}}
        refused = yield host.run("ports", serving_gateway_ports=[port], **given)
    assert refused.failed and f"port {port} of 127.0.0.1 is taken: pid {os.getpid()} (" in refused.text
    assert "the host has no address 192.0.2.9" in refused.text and "The gateway was not changed." in refused.text


test_case = CASES.make_test()
