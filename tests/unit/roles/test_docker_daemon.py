# SPDX-License-Identifier: Apache-2.0
"""daemon.json is merged, the daemon is disturbed no more than needed, and file and daemon change together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.facts import docker_daemon as daemon
from helpers import write_program
from role_cases import Cases, Played, Run, Steps, platform


@pytest.mark.parametrize(
    ("current", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"l": ["x"]}, {"l": ["y", "x"]}, {"l": ["x", "y"]}),
        ({"f": {"x": True}}, {"f": {"cdi": True}}, {"f": {"x": True, "cdi": True}}),
        ({"f": "text"}, {"f": {"cdi": True}}, {"f": {"cdi": True}}),
    ],
)
def test_merge(current: Any, wanted: Any, expected: Any) -> None:
    before = json.dumps(current)
    assert daemon.merge(current, wanted) == expected
    assert json.dumps(current) == before
    assert daemon.merge(expected, wanted) == expected


@pytest.mark.parametrize(
    ("version", "config", "written"),
    [
        ("26.1.5", {}, True),
        ("28.1.1", {}, True),
        ("28.2.2", {}, False),
        ("29.0.0", {"features": {"cdi": False}}, True),
        ("26.1.5", {"features": {"cdi": True}}, False),
    ],
)
def test_cdi_is_written_only_where_it_would_be_off(version: str, config: dict[str, Any], written: bool) -> None:
    plan = daemon.plan_docker_daemon(json.dumps(config), {}, version)
    assert plan["differs"] == (["features"] if written else [])
    if written:
        assert json.loads(plan["content"])["features"]["cdi"] is True


ON = {"CDISpecDirs": ["/etc/cdi"], "LiveRestoreEnabled": True}


@pytest.mark.parametrize(
    ("changed", "live_restore", "info", "expected"),
    [
        ((), True, ON, []),
        (("insecure-registries",), True, ON, ["reloaded"]),
        (("log-level",), True, ON, ["restarted"]),
        # Containers survive the restart that switches CDI on, because live-restore is taken over first.
        (("live-restore",), True, {"CDISpecDirs": [], "LiveRestoreEnabled": False}, ["reloaded", "restarted"]),
        # The file is right, the daemon has not read it: an earlier run was cut off.
        ((), True, {**ON, "LiveRestoreEnabled": False}, ["reloaded"]),
        ((), True, {**ON, "CDISpecDirs": None}, ["restarted"]),
    ],
)
def test_the_daemon_is_disturbed_no_more_than_needed(
    changed: tuple[str, ...], live_restore: bool, info: dict[str, Any], expected: list[str]
) -> None:
    assert daemon.list_actions({*changed}, live_restore, info) == expected


@pytest.mark.parametrize(("like", "indent"), [('{\n    "a": 1\n}', "    "), ('{\n\t"a": 1\n}', "\t"), ("{}", "  ")])
def test_indentation_is_kept(like: str, indent: str) -> None:
    assert f'\n{indent}"b": 1' in daemon.plan_docker_daemon(like, {"b": 1}, "29.0.0")["content"]


# -- the role, over programs that keep the daemon's state in files: config (what the daemon runs with), ps, down.

DOCKERD = '[ "$1" = --version ] && { echo "Docker version 26.1.5, build 1"; exit; }; '
DOCKERD += 'text=$(cat); case "$text" in *nonsense*) echo "unknown option nonsense in $3" >&2; exit 1;; esac'
DOCKER = """
live=false; grep -q '"live-restore": true' "$STATE/config" && live=true
dirs=null; grep -q '"cdi": true' "$STATE/started" && dirs='["/etc/cdi"]'
if [ "$1" = ps ]; then cat "$STATE/ps"; exit; fi
[ -e "$STATE/down" ] && exit 1
case "$3" in
*LiveRestore*) echo $live;;
*) printf '{"ServerVersion":"26.1.5","LiveRestoreEnabled":%s,"CDISpecDirs":%s,%s}' $live $dirs "$(cat "$STATE/swarm")";;
esac
"""
SYSTEMCTL = """
file="$STATE/etc/docker/daemon.json"
[ "$1" = show ] || echo "$1" >> "$STATE/asked"
case "$1" in
show) up=active; [ -e "$STATE/down" ] && up=failed
    printf 'Id=docker.service\\nLoadState=loaded\\nActiveState=%s\\n' $up;;
reload) grep -qs flagged "$file" || cat "$file" > "$STATE/config" 2>/dev/null;;
restart | start) grep -qs conflict "$file" && { touch "$STATE/down"; exit 1; }
    rm -f "$STATE/down"; : > "$STATE/config"
    cat "$file" > "$STATE/config" 2>/dev/null; cp "$STATE/config" "$STATE/started";;
esac
exit 0
"""


class Host:
    """A host with Docker 26, which has CDI switched off and runs without a daemon.json."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.path = place / "etc/docker/daemon.json"
        programs = {"dockerd": DOCKERD, "docker": DOCKER, "systemctl": SYSTEMCTL, "sync": 'echo "$@" > "$STATE/synced"'}
        programs["journalctl"] = "echo starting; echo 'failed to start daemon: flag and file both set conflict'"
        for name, script in programs.items():
            write_program(place / "bin" / name, script)
        for name in ("ps", "config", "started", "asked"):
            (place / name).touch()
        (place / "swarm").write_text('"Swarm":{"LocalNodeState":"inactive"}')

    def write(self, text: str) -> str:
        self.path.parent.mkdir(parents=True)
        self.path.write_text(text)
        return text

    def read(self) -> str | None:
        return self.path.read_text() if self.path.exists() else None

    def asked(self) -> list[str]:
        return (self.place / "asked").read_text().split()

    def run(self, check: bool = False, options: Any = (), **more: Any) -> Steps:
        given = {"__container_runtime_daemon_file": str(self.path), "__container_runtime_answer_s": 1}
        given |= {"ansible_facts": platform("Debian", "13.1"), "container_runtime_allow_restart": False}
        given |= {"container_runtime_daemon_options": dict(options), "root_of_case": str(self.place), **more}
        return (yield Run(["gather_state", "assert", "daemon"], check, given))


CASES = Cases("container_runtime", make=Host, validated=False)
CASES.defaults = {"edge.vllm_edge.host_facts": {"root": "{{ root_of_case }}"}}


@CASES.add
def fresh_docker_gets_the_file_and_a_restart_once(host: Host) -> Steps:
    foreseen: Played = yield from host.run(check=True)
    assert foreseen.changed[-3:] == ["Write daemon.json", "Reload Docker", "Restart Docker"]
    assert '"live-restore": true' in foreseen.text
    assert not host.path.exists() and host.asked() == []
    yield from host.run()
    assert json.loads(host.path.read_text()) == {"live-restore": True, "features": {"cdi": True}}
    assert (host.place / "synced").read_text().split() == [str(host.path), str(host.path.parent)]
    for check in (True, False):
        again: Played = yield from host.run(check)
        assert not again.failed and again.changed == []
    assert host.asked() == ["reload", "restart"]


@CASES.add
def what_others_wrote_stays_and_nothing_lies_beside_it(host: Host) -> Steps:
    host.write('{"log-driver": "local", "features": {"containerd-snapshotter": true}}')
    yield from host.run()
    config = json.loads(host.path.read_text())
    assert config["log-driver"] == "local"
    assert config["features"] == {"containerd-snapshotter": True, "cdi": True}
    assert [*host.path.parent.iterdir()] == [host.path]


@CASES.add
def a_restart_under_containers_needs_leave(host: Host) -> Steps:
    (host.place / "ps").write_text("web\ndatabase\n")
    refused: Played = yield from host.run()
    assert refused.failed and "database, web" in refused.message
    assert "container_runtime_allow_restart" in refused.message and "live-restore keeps them" in refused.message
    assert not host.path.exists() and host.asked() == []
    # A check tells it and goes on.
    foreseen: Played = yield from host.run(check=True)
    assert not foreseen.failed and "database, web" in foreseen.text
    permitted: Played = yield from host.run(container_runtime_allow_restart=True)
    assert not permitted.failed and host.asked() == ["reload", "restart"]
    # A reload needs none.
    reloaded: Played = yield from host.run(options={"insecure-registries": ["r:5000"]})
    assert not reloaded.failed and host.asked() == ["reload", "restart", "reload"]


@CASES.add
def settings_that_dockerd_refuses_never_reach_the_file(host: Host) -> Steps:
    old = host.write('{"debug": false}')
    for check in (True, False):
        refused: Played = yield from host.run(check, {"nonsense": 1})
        assert refused.failed and f"unknown option nonsense in {host.path}" in refused.message
        assert "Correct container_runtime_daemon_options" in refused.message
    assert host.read() == old and host.asked() == []


def docker_that_does_not_come_back_gets_the_old_file(host: Host, existed: bool) -> Steps:
    old = host.write('{"debug": false}') if existed else None
    failed: Played = yield from host.run(options={"bip": "conflict"})
    assert failed.failed and "did not come back with" in failed.message, failed.message
    assert "both set conflict" in failed.message and "Docker runs with it" in failed.message, failed.message
    assert host.read() == old
    assert not (host.place / "down").exists()


CASES.add(docker_that_does_not_come_back_gets_the_old_file, "does_not_come_back_with_a_changed_file", existed=True)
CASES.add(docker_that_does_not_come_back_gets_the_old_file, "does_not_come_back_with_a_new_file", existed=False)


@CASES.add
def a_reload_that_is_not_taken_over_is_undone_by_another(host: Host) -> Steps:
    """live-restore is an option of dockerd's command line, too: it refuses the reload and runs on, as do containers."""
    old = host.write('{"features": {"cdi": true}}')
    (host.place / "started").write_text(old)
    (host.place / "ps").write_text("web\n")
    failed: Played = yield from host.run(options={"labels": ["flagged"]})
    assert failed.failed and "did not take over" in failed.message and "Docker runs with it" in failed.message
    assert host.read() == old and host.asked() == ["reload", "reset-failed", "reload"]


def a_node_of_a_swarm_has_no_live_restore(host: Host, state: str) -> Steps:
    """Docker takes it by a reload, and starts never again. A host that got it from a former run loses it."""
    kept = {"data-root": "/images", "features": {"cdi": True}}
    (host.place / "started").write_text(host.write(json.dumps({**kept, "live-restore": True}, indent=0)))
    (host.place / "config").write_text(host.path.read_text())
    if state == "stopped":
        (host.place / "down").touch()
        (host.place / "images/swarm").mkdir(parents=True)
        (host.place / "images/swarm/docker-state.json").touch()
    else:
        (host.place / "swarm").write_text(f'"Swarm":{{"LocalNodeState":"{state}"}}')
    played: Played = yield from host.run()
    assert not played.failed and json.loads(host.path.read_text()) == kept
    assert "node of a swarm" in played.text
    assert host.asked() == ([] if state == "stopped" else ["reload"])
    again: Played = yield from host.run()
    assert again.changed == []


for state in ("active", "locked", "stopped"):
    CASES.add(a_node_of_a_swarm_has_no_live_restore, f"node_of_a_swarm_{state}", state=state)


@CASES.add
def stopped_docker_only_gets_the_file(host: Host) -> Steps:
    (host.place / "down").touch()
    played: Played = yield from host.run()
    assert not played.failed and host.path.exists() and host.asked() == []


def a_file_that_is_not_valid_is_left_alone(host: Host, text: str) -> Steps:
    host.write(text)
    refused: Played = yield from host.run()
    assert refused.failed and "/etc/docker/daemon.json on the host is not valid" in refused.message
    assert host.read() == text


CASES.add(a_file_that_is_not_valid_is_left_alone, "file_that_is_cut", text='{"a": ')
CASES.add(a_file_that_is_not_valid_is_left_alone, "file_without_settings", text="[]")

test_case = CASES.make_test()
