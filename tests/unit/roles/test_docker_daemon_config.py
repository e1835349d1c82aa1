# SPDX-License-Identifier: Apache-2.0
"""daemon.json is merged, the daemon is disturbed no more than needed, and file and daemon change together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def module(load_module: Callable[[str], ModuleType]) -> ModuleType:
    return load_module("docker_daemon_config")


@pytest.mark.parametrize(
    ("current", "wanted", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
        ({"l": ["x"]}, {"l": ["y", "x"]}, {"l": ["x", "y"]}),
        ({"f": {"x": True}}, {"f": {"cdi": True}}, {"f": {"x": True, "cdi": True}}),
        ({"f": "text"}, {"f": {"cdi": True}}, {"f": {"cdi": True}}),
    ],
)
def test_merge(module: ModuleType, current: Any, wanted: Any, expected: Any) -> None:
    before = json.dumps(current)
    assert module.merge(current, wanted) == expected
    assert json.dumps(current) == before
    assert module.merge(expected, wanted) == expected


@pytest.mark.parametrize(
    ("version", "config", "written"),
    [
        ((26, 1), {}, True),
        ((28, 1), {}, True),
        ((28, 2), {}, False),
        ((29, 0), {"features": {"cdi": False}}, True),
        ((26, 1), {"features": {"cdi": True}}, False),
    ],
)
def test_cdi_is_written_only_where_it_would_be_off(
    module: ModuleType, version: tuple[int, int], config: dict[str, Any], written: bool
) -> None:
    after = module.with_cdi(config, version)
    assert (after != config) is written
    if written:
        assert after["features"]["cdi"] is True


ON = {"CDISpecDirs": ["/etc/cdi"], "LiveRestoreEnabled": True}


@pytest.mark.parametrize(
    ("before", "after", "info", "expected"),
    [
        ({"live-restore": True}, {"live-restore": True}, ON, []),
        ({"live-restore": True}, {"live-restore": True, "insecure-registries": ["r"]}, ON, ["reload"]),
        ({"live-restore": True}, {"live-restore": True, "log-level": "warn"}, ON, ["restart"]),
        # Containers survive the restart that switches CDI on, because live-restore is taken over first.
        ({}, {"live-restore": True}, {"CDISpecDirs": [], "LiveRestoreEnabled": False}, ["reload", "restart"]),
        # The file is right, the daemon has not read it: an earlier run was cut off.
        ({"live-restore": True}, {"live-restore": True}, {**ON, "LiveRestoreEnabled": False}, ["reload"]),
        ({"live-restore": True}, {"live-restore": True}, {**ON, "CDISpecDirs": None}, ["restart"]),
    ],
)
def test_the_daemon_is_disturbed_no_more_than_needed(
    module: ModuleType, before: dict[str, Any], after: dict[str, Any], info: dict[str, Any], expected: list[str]
) -> None:
    assert module.actions(before, after, info) == expected


@pytest.mark.parametrize(("like", "indent"), [('{\n    "a": 1\n}', "    "), ('{\n\t"a": 1\n}', "\t"), ("{}", "  ")])
def test_indentation_is_kept(module: ModuleType, like: str, indent: str) -> None:
    assert module.render({"b": 1}, like) == f'{{\n{indent}"b": 1\n}}\n'


# -- the module, over programs that keep the daemon's state in files: config (what the daemon runs with), ps, broken.

DOCKERD = """
case "$1" in
--version) echo "Docker version 26.1.5+dfsg1, build a72d7cd";;
--validate) grep -q nonsense "$3" && { echo "unknown option nonsense in $3" >&2; exit 1; }; exit 0;;
esac
"""
DOCKER = """
case "$1" in
ps) cat "$STATE/ps";;
info) [ -e "$STATE/down" ] && { echo '{"ServerVersion":""}'; exit 1; }
    live=false; grep -q '"live-restore": true' "$STATE/config" && live=true
    dirs=null; grep -q '"cdi": true' "$STATE/started" && dirs='["/etc/cdi"]'
    swarm=$(cat "$STATE/swarm")
    echo "{\\"ServerVersion\\":\\"26.1.5\\",\\"LiveRestoreEnabled\\":$live,\\"CDISpecDirs\\":$dirs,$swarm}";;
esac
"""
SYSTEMCTL = """
echo "$1" >> "$STATE/systemctl.log"
file="$STATE/docker/daemon.json"
case "$1" in
reload) grep -qs flagged "$file" || cat "$file" > "$STATE/config" 2>/dev/null;;
restart) grep -qs conflict "$file" && { touch "$STATE/down"; exit 1; }
    rm -f "$STATE/down"; : > "$STATE/config"
    cat "$file" > "$STATE/config" 2>/dev/null; cp "$STATE/config" "$STATE/started";;
esac
exit 0
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "docker/daemon.json"


@pytest.fixture
def run(run_module: Run, program: Callable[[str, str], None], tmp_path: Path, path: Path) -> Run:
    program("dockerd", DOCKERD)
    program("docker", DOCKER)
    program("systemctl", SYSTEMCTL)
    program("journalctl", "echo 'failed to start daemon: flag and file both set conflict'")
    for name in ("ps", "config", "started"):
        (tmp_path / name).touch()
    (tmp_path / "swarm").write_text('"Swarm":{"LocalNodeState":"inactive"}')
    given = {"path": str(path), "settings": {"live-restore": True}, "timeout": 2}
    return lambda check=False, **more: run_module("docker_daemon_config", given | more, check=check)


def calls(tmp_path: Path) -> list[str]:
    log = tmp_path / "systemctl.log"
    return log.read_text().split() if log.exists() else []


def write(path: Path, text: str) -> str:
    path.parent.mkdir()
    path.write_text(text)
    return text


def test_fresh_docker_gets_the_file_and_a_restart_once(
    run: Run, path: Path, tmp_path: Path, on_the_disk: Callable[[Path], bool]
) -> None:
    foreseen = run(check=True)
    assert (foreseen["changed"], foreseen["action"]) == (True, "reload,restart")
    assert not path.exists() and calls(tmp_path) == []
    result = run()
    assert (result["changed"], result["action"]) == (True, "reload,restart")
    assert json.loads(path.read_text()) == {"live-restore": True, "features": {"cdi": True}}
    assert on_the_disk(path)
    for check in (True, False):
        assert run(check)["changed"] is False
    assert calls(tmp_path) == ["reload", "restart"]


def test_what_others_wrote_stays_and_is_backed_up(run: Run, path: Path) -> None:
    old = write(path, '{"log-driver": "local", "features": {"containerd-snapshotter": true}}')
    result = run()
    config = json.loads(path.read_text())
    assert config["log-driver"] == "local"
    assert config["features"] == {"containerd-snapshotter": True, "cdi": True}
    assert Path(result["backup_file"]).read_text() == old


def test_restart_under_containers_needs_leave(run: Run, path: Path, tmp_path: Path) -> None:
    (tmp_path / "ps").write_text("web\ndatabase\n")
    result = run()
    assert result["rc"] == 1
    assert "database, web" in result["msg"] and "container_runtime_allow_restart" in result["msg"]
    assert not path.exists() and calls(tmp_path) == []
    # A check tells it and goes on.
    assert run(check=True)["rc"] == 0
    assert run(allow_restart=True)["rc"] == 0
    assert calls(tmp_path) == ["reload", "restart"]


def test_reload_under_containers_needs_none(run: Run, tmp_path: Path) -> None:
    run()
    (tmp_path / "ps").write_text("web\n")
    result = run(settings={"live-restore": True, "insecure-registries": ["r:5000"]})
    assert (result["rc"], result["action"]) == (0, "reload")
    assert calls(tmp_path) == ["reload", "restart", "reload"]


def test_settings_that_dockerd_refuses_never_reach_the_file(run: Run, path: Path, tmp_path: Path) -> None:
    old = write(path, '{"debug": false}')
    for check in (True, False):
        result = run(check, settings={"nonsense": 1})
        assert result["rc"] == 1 and "unknown option nonsense" in result["msg"]
    assert path.read_text() == old and calls(tmp_path) == []


@pytest.mark.parametrize("existed", [True, False])
def test_docker_that_does_not_come_back_gets_the_old_file(run: Run, path: Path, tmp_path: Path, existed: bool) -> None:
    old = write(path, '{"debug": false}') if existed else None
    result = run(settings={"bip": "conflict"})
    assert result["rc"] == 1
    assert "both set conflict" in result["msg"] and "Docker runs with it" in result["msg"]
    assert (path.read_text() if path.exists() else None) == old
    assert not (tmp_path / "down").exists()


def test_a_reload_that_is_not_taken_over_is_undone_by_another(run: Run, path: Path, tmp_path: Path) -> None:
    """live-restore is an option of dockerd's command line, too: it refuses the reload and runs on, as do containers."""
    old = write(path, '{"features": {"cdi": true}}')
    (tmp_path / "started").write_text(old)
    (tmp_path / "ps").write_text("web\n")
    result = run(settings={"live-restore": True, "labels": ["flagged"]})
    assert result["rc"] == 1 and "did not take over" in result["msg"] and "Docker runs with it" in result["msg"]
    assert path.read_text() == old and calls(tmp_path) == ["reload", "reset-failed", "reload"]


@pytest.mark.parametrize("state", ["active", "locked", "stopped"])
def test_a_node_of_a_swarm_has_no_live_restore(run: Run, path: Path, tmp_path: Path, state: str) -> None:
    """Docker takes it by a reload, and starts never again. A host that got it from a former run loses it."""
    kept = {"data-root": str(tmp_path / "images"), "features": {"cdi": True}}
    (tmp_path / "started").write_text(write(path, json.dumps({**kept, "live-restore": True}, indent=0)))
    (tmp_path / "config").write_text(path.read_text())
    if state == "stopped":
        (tmp_path / "down").touch()
        (tmp_path / "images/swarm").mkdir(parents=True)
        (tmp_path / "images/swarm/docker-state.json").touch()
    else:
        (tmp_path / "swarm").write_text(f'"Swarm":{{"LocalNodeState":"{state}"}}')
    result = run()
    assert (result["rc"], json.loads(path.read_text())) == (0, kept)
    assert "node of a swarm" in str(result["warnings"])
    assert calls(tmp_path) == ([] if state == "stopped" else ["reload"])
    assert run()["changed"] is False


def test_stopped_docker_only_gets_the_file(run: Run, path: Path, tmp_path: Path) -> None:
    (tmp_path / "down").touch()
    result = run()
    assert (result["changed"], result["action"]) == (True, "none")
    assert path.exists() and calls(tmp_path) == []


@pytest.mark.parametrize("text", ['{"a": ', "[]"])
def test_file_that_is_not_valid_is_left_alone(run: Run, path: Path, text: str) -> None:
    write(path, text)
    result = run()
    assert result["rc"] == 1 and str(path) in result["msg"]
    assert path.read_text() == text
