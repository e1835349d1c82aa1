# SPDX-License-Identifier: Apache-2.0
"""The role serving_gateway on this machine: its own directories, with programs of ours in place of the host's."""

from __future__ import annotations

import grp
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from role_cases import ROOT

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
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, program: Callable[[str, str], None]) -> Run:
    """run(entry points, *options, **variables): one play; returns what it printed, and fails if it failed."""
    program("systemctl", SYSTEMCTL)
    program("systemd-analyze", "exit 0")
    count = '$(ls "$STATE"/etc/gateway/*.map | wc -l)'
    program("haproxy", f'echo "haproxy $* {count} maps" >> "$STATE/asked"; exit "$(cat "$STATE/refuse" || echo 0)"')
    program("vllm-edge", SYNC)
    program("dpkg-query", 'cat "$STATE/packages"')
    program(
        "apt-get",
        '[ -L "$STATE/units/haproxy.service" ] && echo masked >> "$STATE/apt"; echo "apt-get $*" >> "$STATE/apt"',
    )
    (tmp_path / "packages").write_text("haproxy installed\nopenssl installed\n")
    for name in ("etc", "state", "units"):
        (tmp_path / name).mkdir()
    variables = {
        "serving_gateway_configuration_directory": str(tmp_path / "etc"),
        "serving_gateway_state_directory": str(tmp_path / "state"),
        "serving_gateway_program": str(tmp_path / "bin/vllm-edge"),
        "serving_gateway_clients_directory": str(tmp_path / "clients"),
        "serving_gateway_listen": [{"address": "127.0.0.1", "port": 61999, "tls": True}],
        "serving_gateway_names": ["sentry", "worker"],
        "serving_gateway_replicas": {"worker": 2},
        "serving_gateway_roles": ["sentry"],
        "__serving_gateway_units_directory": str(tmp_path / "units"),
        "__serving_gateway_group": grp.getgrgid(os.getgid()).gr_name,
        "ansible_python_interpreter": sys.executable,
    }

    def play(points: list[str], *options: str, succeeds: bool = True, **more: Any) -> str:
        include = [
            {"ansible.builtin.include_role": {"name": "serving_gateway", "tasks_from": point}} for point in points
        ]
        (tmp_path / "play.yml").write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": include}]))
        (tmp_path / "vars.json").write_text(json.dumps(variables | more))
        done = subprocess.run(
            [
                "ansible-playbook",
                "-i",
                "box,",
                "-c",
                "local",
                "-e",
                f"@{tmp_path}/vars.json",
                *options,
                tmp_path / "play.yml",
            ],
            cwd=tmp_path,
            env=os.environ
            | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_DISPLAY_OK_HOSTS": "true", "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
        return done.stdout + done.stderr

    return play


def asked(tmp_path: Path) -> list[str]:
    """What systemctl, haproxy and the program were asked since the last call; not what only looks."""
    file = tmp_path / "asked"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return [line for line in lines if not line.startswith(("show", "is-enabled", "is-active"))]


def test_the_gateway_comes_once(tmp_path: Path, run: Run) -> None:
    printed = run(["main"])
    key = re.search(r"vllm-[\w-]{43}", (tmp_path / "clients/box-default.env").read_text())
    assert key and key[0] not in printed and "BEGIN" not in printed
    text = (tmp_path / "clients/box-default.env").read_text()
    assert f"SSL_CERT_FILE={tmp_path}/clients/box-ca.pem\n" in text
    assert "OPENAI_BASE_URL=https://127.0.0.1:61999/v1\n" in text
    assert (tmp_path / "clients/box-default.env").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "clients").stat().st_mode & 0o777 == 0o700
    on_host = (tmp_path / "etc/gateway/clients.json").read_text()
    assert list(json.loads(on_host)) == ["default"] and key[0] not in on_host
    servers = re.findall(r"server (engine\S*) unix@\S+/(\S+)\.sock", (tmp_path / "etc/gateway/haproxy.cfg").read_text())
    assert servers == [("engine", "sentry"), ("engine", "worker"), ("engine-1", "worker+1")]
    begun = asked(tmp_path)
    assert "start vllm-edge-gateway.service" in begun and "start vllm-edge-gateway-sync.timer" in begun
    assert not [line for line in begun if line.startswith(("restart", "reload"))]
    checked = next(line for line in begun if line.startswith("haproxy -c"))
    assert checked.endswith(" 6 maps"), "HAProxy accepts no configuration without them"
    assert begun[-1] == "gateway sync --format json", "at last, when the gateway runs"

    assert "changed=0" in run(["main"])
    assert not [line for line in asked(tmp_path) if line.split()[0] in ("start", "reload", "restart", "daemon-reload")]


@pytest.mark.thorough
def test_the_gateway_changes_by_a_reload_and_goes(tmp_path: Path, run: Run) -> None:
    run(["main"])
    checked = run(["main"], "--check", serving_gateway_listen=[{"address": "127.0.0.1", "port": 61998, "tls": True}])
    assert "changed=0" not in checked and "gateway sync --format json --check" in asked(tmp_path)
    (tmp_path / "etc/gateway/haproxy.cfg").write_text("other\n")
    asked(tmp_path)
    run(["main"])
    assert [line for line in asked(tmp_path) if line.startswith("re")] == ["reload vllm-edge-gateway.service"]

    run(["uninstall"])
    assert not (tmp_path / "etc/gateway").exists() and list((tmp_path / "units").iterdir()) == []
    assert "changed=0" in run(["uninstall"])
    assert (tmp_path / "clients/box-default.env").exists()


@pytest.mark.thorough
def test_a_configuration_that_haproxy_refuses_is_not_installed(tmp_path: Path, run: Run) -> None:
    run(["main"])
    before = (tmp_path / "etc/gateway/haproxy.cfg").read_text()
    asked(tmp_path)
    (tmp_path / "refuse").write_text("1")
    (tmp_path / "etc/gateway/haproxy.cfg").write_text("works\n")
    run(["main"], succeeds=False)
    assert (tmp_path / "etc/gateway/haproxy.cfg").read_text() == "works\n" != before
    assert not [line for line in asked(tmp_path) if line.startswith("re")]


@pytest.mark.thorough
@pytest.mark.parametrize("installed", [False, True])
def test_the_packages_own_service_is_masked_only_where_it_was_not(tmp_path: Path, run: Run, installed: bool) -> None:
    (tmp_path / "packages").write_text("haproxy installed\n" if installed else "openssl installed\n")
    assert "would install" in run(["install"], "--check")
    assert not (tmp_path / "apt").exists() and not (tmp_path / "units/haproxy.service").is_symlink()
    run(["install"])
    calls = (tmp_path / "apt").read_text()
    assert ("haproxy" in calls.replace("haproxy.service", "")) != installed
    assert calls.startswith("masked") != installed
    asked(tmp_path)
    run(["uninstall"])
    words = {line.split()[0] for line in asked(tmp_path)}
    assert ("unmask" in words) != installed
    assert not (tmp_path / "state/haproxy-masked").exists()


def test_a_taken_port_is_refused_with_its_owner(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        printed = " ".join(
            run(["ports"], succeeds=False, serving_gateway_ports=[port], serving_gateway_listen=[]).split()
        )
    assert f"port {port} of 127.0.0.1 is taken: pid {os.getpid()} (" in printed
    assert "The gateway was not changed." in printed
