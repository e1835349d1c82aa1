# SPDX-License-Identifier: Apache-2.0
"""Maps, links and the running HAProxy fit what serves; a fault loses nothing."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import shutil
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from ansible.module_utils.vllm_edge import __version__
from ansible.module_utils.vllm_edge.engine.loads import Load, remember_load
from ansible.module_utils.vllm_edge.gateway import sync
from ansible.module_utils.vllm_edge.gateway.admin import GatewayDown, HAProxy, Server, ask_master, split_entries
from ansible.module_utils.vllm_edge.gateway.clients import GatewayError, read_clients
from ansible.module_utils.vllm_edge.gateway.command import run_status, run_sync, synchronize
from ansible.module_utils.vllm_edge.gateway.describe import describe_gateway, list_places, render_gateway
from ansible.module_utils.vllm_edge.gateway.names import backend_name, find_link, name_link, name_server
from ansible.module_utils.vllm_edge.gateway.sync import Report, publish_phase, view_host
from ansible.module_utils.vllm_edge.gateway.view import (
    SwitchProgress,
    View,
    build_view,
    parse_text,
    render_keys,
    render_models,
)
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.system.files import is_locked
from fake_machine import BIG, GPUS, SMALL
from generations import activate, engine, put, rendered

OPTIONS: dict[str, Any] = {"stands_in_for": ["architect"], "gpus": GPUS[2:3], "max_model_len": 32768}
STANDING = engine("e4b", 8060, served_names=["auditor"], **OPTIONS)
LIVE, COMING = rendered(BIG, STANDING, profile="nvfp4-tp2"), rendered(SMALL, STANDING, profile="w4a16-tp2")
KEY, OLD_KEY = (hashlib.sha256(text).hexdigest() for text in (b"key", b"former"))
CLIENTS: dict[str, Any] = {
    "default": {"keys": [{"sha256": KEY}], "requests_per_minute": 600, "streams": 64},
    "robot": {"keys": [{"sha256": OLD_KEY, "until": "2026-11-01T00:00:00Z"}], "served_names": ["auditor"]},
}


def no_switch(paths: HostPaths) -> None:
    return None


@dataclass
class Host:
    """LIVE is committed, COMING lies there; nothing runs but, where a test wants it, HAProxy."""

    paths: HostPaths

    def __post_init__(self) -> None:
        self.paths.gateway.mkdir(parents=True)
        (self.paths.gateway / "haproxy.cfg").write_text("")
        self.clients(CLIENTS)
        self.live = store.load(self.paths, activate(self.paths, LIVE))
        self.coming = store.load(self.paths, put(self.paths, COMING))
        self.paths.engine_state("e4b").parent.mkdir(parents=True, exist_ok=True)
        self.loaded("31b-w4a16", 54.2)

    def loaded(self, name: str, seconds: float) -> None:
        record = {"engine": name, "phase": "serving", "since": "", "load_seconds": seconds}
        self.paths.engine_state(name).write_text(json.dumps(record))

    def clients(self, value: object) -> None:
        (self.paths.gateway / "clients.json").write_text(json.dumps(value))

    def sync(self, **options: Any) -> Report:
        return synchronize(self.paths, no_switch, **options)

    def away(self, *keep: str) -> Report:
        return sync.apply(
            self.paths, lambda: view_host(self.paths, self.live, SwitchProgress("away", keep, self.coming))
        )

    def map(self, name: str) -> dict[str, str]:
        return parse_text((self.paths.gateway / f"{name}.map").read_text())

    @property
    def links(self) -> dict[str, str]:
        roles = self.paths.run / "roles"
        return {path.name: os.readlink(path) for path in roles.iterdir()} if roles.is_dir() else {}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(HAProxy, "is_stopped", lambda self: True)
    names = ("etc", "state", "units", "run", "gateway_run")
    return Host(HostPaths(**{name: tmp_path / name for name in names}))


# ---- what the maps say ------------------------------------------------------------------------------------------


def test_backends_are_named_by_what_is_served() -> None:
    assert [backend_name(name) for name in ("architect", "a" * 60)] == ["architect", "a" * 60]
    assert backend_name("google/gemma:1") == f"google_gemma_1-{hashlib.sha256(b'google/gemma:1').hexdigest()[:8]}"
    assert len(backend_name("a" * 61)) == 49


def test_an_engine_that_was_loaded_again_is_no_difference(host: Host) -> None:
    host.sync()
    host.loaded("e4b", 301.0)
    assert host.sync(check=True).changes == ()
    host.away("31b-nvfp4")
    assert host.map("models")["auditor"].split()[2:5] == ["away", "-", "301"], "what is away has the new time"


def test_without_a_load_the_plan_says_when_to_come_again(host: Host) -> None:
    plan = {"gpus": [], "load_s": {"low": 40, "mid": 99.2, "high": 700}}
    standing = engine("e4b", 8060, served_names=["auditor"], plan=plan, **OPTIONS)
    host.coming = store.load(host.paths, put(host.paths, rendered(SMALL, standing, profile="planned")))
    host.away("31b-nvfp4")
    assert host.map("models")["auditor"].split()[2:5] == ["away", "-", "100"]
    config = host.coming.engines["e4b"].config
    load = Load("2026-11-25T02:00:00Z", config.input_hash, config.image_id, "e4b", "main", 70.5)
    remember_load(host.paths.engine_loads("e4b"), load)
    host.away("31b-nvfp4")
    assert host.map("models")["auditor"].split()[2:5] == ["away", "-", "70"], "while it loads, its record has no time"


def test_maps_and_links_of_a_host_that_serves(host: Host) -> None:
    assert host.sync().changes and host.sync().changes == (), "a second run changes nothing"
    assert host.map("models") == {
        "architect": "architect 31b-nvfp4 up - 120 8050",
        "worker": "worker 31b-nvfp4 up - 120 8050",
        "auditor": "auditor e4b up - 120 8060",
    }
    assert host.map("ports") == {"8050": "31b-nvfp4", "8060": "e4b"}
    assert host.map("clients") == {KEY: "default 600 64"}, "a key that has ended is left out"
    rights = host.map("rights")
    assert {name for name in rights if name.startswith("robot")} == {"robot:auditor"}, "e4b answers to architect, too"
    listed = json.loads(host.map("lists")["robot"])
    assert [(model["id"], model["max_model_len"]) for model in listed["data"]] == [("auditor", 32768)]
    by_port = json.loads(host.map("lists")["default@31b-nvfp4"])
    assert [model["id"] for model in by_port["data"]] == ["architect", "worker"]
    assert json.loads(host.map("lists")[":auditor"]) == listed and host.map("lists")["robot:"] == "/roles/auditor/v1"
    state = host.map("state")
    assert json.loads(f"{{{state['role:auditor']}}}") == {"engine": "e4b", "engines": ["e4b"]}
    assert (state["profile"], state["generation"], state["switch"]) == ('"nvfp4-tp2"', "1", "null")
    assert host.links == {
        f"{name}.sock": f"../engines/{one}/api.sock"
        for name, one in (("architect", "31b-nvfp4"), ("worker", "31b-nvfp4"), ("auditor", "e4b"))
    }
    modes = {path.stat().st_mode & 0o777 for path in host.paths.gateway.glob("*.map")}
    assert modes == {0o640} and not list(host.paths.gateway.glob(".*.new"))


def test_nobody_else_changes_the_files_while_they_are_compared_and_written(host: Host) -> None:
    held: list[bool] = []

    def look() -> View:
        held.append(is_locked(host.paths.gateway_lock))
        return view_host(host.paths, host.live, None)

    sync.apply(host.paths, look)
    sync.apply(host.paths, look, check=True)
    assert held == [True, False] and not is_locked(host.paths.gateway_lock)
    assert host.paths.gateway_lock.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("standing", [True, False], ids=["stays", "leaves too"])
def test_names_of_an_engine_that_leaves_are_away_unless_another_stands_in(host: Host, standing: bool) -> None:
    host.sync()
    report = host.away(*(["e4b"] if standing else []))
    models = host.map("models")
    assert models["worker"] == "worker 31b-w4a16 away - 55 8050", "of the last load of the engine that comes"
    if standing:
        assert models["architect"] == "architect e4b stand-in architect 55 8050"
        assert models["auditor"] == "auditor e4b up - 120 8060"
        assert host.links == dict.fromkeys(["architect.sock", "auditor.sock"], "../engines/e4b/api.sock")
        assert report.away == ("worker",)
    else:
        assert models["architect"] == "architect 31b-w4a16 away - 55 8050" and host.links == {}
    assert host.map("ports")["8050"] == "31b-w4a16", "where requests wait that came by the port"
    host.sync()
    assert len(host.links) == 3 and "up" in host.map("models")["architect"]


# ---- several engines of a name ----------------------------------------------------------------------------------


PARTS = tuple(
    engine(f"e4b-{k}", cast(Any, None), served_names=["auditor"], stands_in_for=["architect"], gpus=[GPUS[k + 2]])
    for k in range(2)
)


@dataclass
class Servers:
    """The only worker of a gateway with three servers for `auditor` and two for `architect`."""

    away: dict[str, bool]
    keys: dict[str, str] | None = None
    pid = 1

    @property
    def proxy(self) -> HAProxy:
        return cast(HAProxy, self)

    def list_workers(self) -> list[Servers]:
        return [self]

    def read_map(self, path: Path) -> dict[str, str] | None:
        return self.keys if path.name == "clients.map" else None

    def replace_map(self, path: Path, entries: dict[str, str]) -> None:
        self.keys = entries

    def read_servers(self) -> dict[str, Server]:
        return {link: Server(away, not away) for link, away in self.away.items()}

    def set_away(self, link: str, away: bool) -> None:
        self.away[link] = away


SERVERS = ("architect", "architect+1", "auditor", "auditor+1", "auditor+2", "idle")


@pytest.fixture
def pooled(host: Host) -> Host:
    """A host where two engines serve `auditor`."""
    host.live = store.load(host.paths, activate(host.paths, rendered(BIG, *PARTS, profile="two")))
    host.loaded("e4b-0", 20.0)
    host.loaded("e4b-1", 30.5)
    return host


UP = "auditor e4b-0,e4b-1 up - 20 -"


@pytest.mark.parametrize(
    ("keep", "auditor", "links", "architect"),
    [
        (None, UP, ["e4b-0", "e4b-1"], "architect 31b-nvfp4 up - 120 8050"),
        (["e4b-0", "e4b-1"], UP, ["e4b-0", "e4b-1"], "architect e4b-0,e4b-1 stand-in architect 55 8050"),
        (["e4b-1"], "auditor e4b-1 up - 31 -", ["e4b-1"], "architect e4b-1 stand-in architect 55 8050"),
        (["31b-nvfp4"], "auditor e4b away - 120 8060", [], "architect 31b-nvfp4 up - 120 8050"),
    ],
    ids=["serve", "both stay", "one stays", "none stays"],
)
def test_a_name_is_away_only_if_none_of_its_engines_stays(
    pooled: Host, keep: list[str] | None, auditor: str, links: list[str], architect: str
) -> None:
    servers = Servers(dict.fromkeys(SERVERS, False))
    progress = None if keep is None else SwitchProgress("away", keep, pooled.coming)

    def apply() -> Report:
        look = functools.partial(view_host, pooled.paths, pooled.live, progress)
        return sync.apply(pooled.paths, look, proxy=servers.proxy)

    report = apply()
    models, state = pooled.map("models"), json.loads(f"{{{pooled.map('state')['role:auditor']}}}")
    assert (models["auditor"], models["architect"]) == (auditor, architect)
    assert state["engines"] == auditor.split()[1].split(",") and state["engine"] == state["engines"][0]
    found = {name: target for name, target in pooled.links.items() if name.startswith("auditor")}
    places = [f"auditor{place}.sock" for place in ("", "+1", "+2")]
    assert found == {
        place: f"../engines/{name}/api.sock" for place, name in zip(places[: len(links)], links, strict=True)
    }
    assert [servers.away[f"auditor{place}"] for place in ("", "+1", "+2")] == [
        len(links) <= place for place in range(3)
    ]
    assert not servers.away["idle"] and "server 2 of auditor away" in report.changes
    assert apply().changes == ()


def test_status_names_every_engine(pooled: Host, capsys: pytest.CaptureFixture[str]) -> None:
    pooled.sync()
    gateway = describe_gateway(pooled.paths, {})
    assert gateway and gateway["roles"]["auditor"]["engines"] == ["e4b-0", "e4b-1"]
    assert run_status(pooled.paths, output="text") == 0
    assert "auditor      e4b-0, e4b-1  unknown" in capsys.readouterr().out
    assert pooled.live.roles["auditor"] == ("e4b-0", "e4b-1")


def test_links_servers_and_places_have_the_same_names() -> None:
    for served in ("a", "a+1", "engine", "x/y"):
        for place in range(3):
            link = name_link(served, place)
            assert find_link(*name_server(link).split("/")) == link
    assert len({name_link(served, place) for served in ("a", "a+1", "a-1", "a.1") for place in range(3)}) == 12
    assert [find_link("role_a", server) for server in ("engine-0", "link", "hold", "engine-x")] == [None] * 4
    text = "backend clients\n server engine-1 x\nbackend role_a\n server engine x\n server engine-1 x\n server hold x"
    assert list_places(text) == {"a", "a+1"}


def test_without_a_gateway_or_a_generation_nothing_is_served(host: Host) -> None:
    host.paths.active_profile.unlink()
    for place in (host.paths.etc / "engines", host.paths.units):
        shutil.rmtree(place)
    host.sync()
    assert host.map("models") == {} == host.map("ports") and host.links == {}
    (host.paths.gateway / "haproxy.cfg").unlink()
    assert host.sync() == Report(False)


# ---- faults -----------------------------------------------------------------------------------------------------


def test_without_a_readable_generation_only_keys_and_rights_follow_the_clients(host: Host) -> None:
    host.sync()
    before = (host.map("models"), host.map("state"), host.map("ports"), host.links)
    host.clients({"robot": {**CLIENTS["default"], "served_names": ["auditor"]}, "late": CLIENTS["robot"]})
    unit = next((host.paths.generation_dir(1) / "units").glob("vllm-*.service"))
    for spoil in (
        lambda: unit.write_text(f"{unit.read_text()}# a comment of somebody\n"),
        lambda: host.paths.active_profile.write_text("{"),
        host.paths.active_profile.unlink,
        lambda: shutil.rmtree(host.paths.state),
        lambda: [shutil.rmtree(place) for place in (host.paths.etc / "engines", host.paths.units)],
    ):
        spoil()
        report = host.sync()
        assert len(report.warnings) == 1 and "site.yml" in report.warnings[0]
        assert (host.map("models"), host.map("state"), host.map("ports"), host.links) == before
        assert host.map("clients") == {KEY: "robot 600 64"}
        assert host.map("rights") == {"robot:auditor": "1"}, "no new right, and none that it no longer has"
        assert run_sync(host.paths, no_switch, check=False, output="text") == 1
    # The first switch of a host has not committed yet.
    assert synchronize(host.paths, lambda paths: SwitchProgress("start")).warnings == ()


def test_a_key_ends_also_while_the_clients_cannot_be_read(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    robot = {**CLIENTS["robot"], "keys": [{"sha256": OLD_KEY, "until": "2126-11-01T00:00:00Z"}]}
    host.clients({**CLIENTS, "robot": robot})
    host.sync()
    host.clients([])
    host.sync()
    assert host.map("clients").keys() == {KEY, OLD_KEY}
    monkeypatch.setattr(sync, "stamp", lambda: "2126-11-01T00:00:00Z")
    assert host.sync().changes == ("clients.map",) and host.map("clients").keys() == {KEY}


class Silent(Servers):
    """A gateway whose workers do not answer, or only the former ones do not; a reload may help."""

    def __init__(self, pids: list[int], state: str = "active", helps: bool = False) -> None:
        super().__init__({})
        self.pids, self.state, self.helps, self.calls = pids, state, helps, list[object]()
        self.unit = "vllm-edge-gateway.service"

    def list_workers(self) -> list[Any]:
        deaf = MagicMock(side_effect=GatewayDown("timed out."))
        deeds = {pid: MagicMock(return_value=None) if pid == 1 else deaf for pid in self.pids}
        return [SimpleNamespace(pid=pid, read_map=read, read_servers=dict) for pid, read in deeds.items()]

    def is_stopped(self) -> bool:
        return self.state == "inactive"

    def reload(self) -> bool:
        self.calls.append("reload")
        if self.helps:
            self.pids = [1, *self.pids]
        return self.state == "active"

    def end(self, pid: int) -> bool:
        self.calls.append(pid)
        self.pids.remove(pid)
        return True


@pytest.mark.parametrize(
    ("silent", "calls", "words"),
    [
        (Silent([2], "inactive"), [], None),
        (Silent([2], "reloading"), ["reload"], "systemctl restart"),
        (Silent([2]), ["reload"], "systemctl restart"),
        (Silent([2], helps=True), ["reload", 2], None),
        (Silent([1, 3]), [3], None),
    ],
    ids=["stopped", "in a reload", "for ever", "until a reload", "a former worker"],
)
def test_a_gateway_that_runs_and_does_not_answer_is_no_success(
    host: Host, monkeypatch: pytest.MonkeyPatch, silent: Silent, calls: list[object], words: str | None
) -> None:
    monkeypatch.setattr(sync, "PATIENCE_S", 0)
    monkeypatch.setattr(sync, "end_worker", silent.end)
    report = host.sync(proxy=silent.proxy)
    assert silent.calls == calls
    assert ("ended with its streams" in str(report.changes)) is bool({2, 3}.intersection(calls))
    assert report.warnings == () if words is None else words in report.warnings[0]
    assert report.answers is (words is None and silent.state == "active")


def test_a_full_disk_does_not_keep_a_revoked_key_valid(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, dict[str, str]]()
    monkeypatch.setattr(Servers, "read_map", lambda self, path: {"former": "x 0 0"})
    monkeypatch.setattr(Servers, "replace_map", lambda self, path, new: told.update({path.name: new}), raising=False)
    monkeypatch.setattr(sync, "write_fresh", MagicMock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(GatewayError, match="full"):
        host.sync(proxy=Servers({}).proxy)
    assert told == {"clients.map": {KEY: "default 600 64"}}


CLIENT = CLIENTS["default"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "No such file or directory. Restore it from a backup"),
        ([], "a JSON object is expected"),
        ({"Robot": CLIENT}, "a name is of small letters"),
        ({"a": {}}, "has no keys"),
        ({"a": {"keys": [{"sha256": f"{KEY}\n"}]}}, "is no SHA-256"),
        ({"a": CLIENT, "b": CLIENT}, "have the same key"),
        ({"a": {**CLIENT, "streams": -1}}, "a number from 0"),
        ({"a": {"keys": [{"sha256": KEY, "until": "2026-11-01"}]}}, "write 2026-11-23T09:30:00Z"),
        ({"a": {"keys": [{"sha256": KEY, "until": "x" * 2_000_000}]}}, "longer than"),
    ],
)
def test_clients_that_cannot_be_read_leave_their_maps_and_are_said(host: Host, value: object, words: str) -> None:
    host.sync()
    before = {name: host.map(name) for name in ("clients", "rights", "lists")}
    host.clients(value) if value is not None else (host.paths.gateway / "clients.json").unlink()
    told = describe_gateway(host.paths, {})
    assert told and words in told["problem"], "the status says it, too"
    (host.paths.gateway / "models.map").write_text("damaged")
    report = host.sync()
    assert words in report.warnings[0] and len(report.warnings[0]) < 1000
    assert {name: host.map(name) for name in before} == before and "auditor" in host.map("models")
    assert run_sync(host.paths, no_switch, check=True, output="json") == 1


def test_figures_that_nobody_writes_any_more_are_a_problem_of_the_gateway(host: Host) -> None:
    host.sync()
    host.paths.units.mkdir(exist_ok=True)
    host.paths.unit_file("vllm-edge-facts.service").touch()
    told = describe_gateway(host.paths, {})
    assert told and told["problem"].endswith(
        "gets no figures of this host: " + f"{host.paths.facts}: No such file or directory"
    )


def test_keys_are_taken_from_the_running_gateway_where_their_files_are_lost(host: Host) -> None:
    for name in ("clients.json", "clients.map"):
        (host.paths.gateway / name).unlink(missing_ok=True)
    assert host.sync().warnings == () and host.map("clients") == {}, "a host that never had clients is no error"
    (host.paths.gateway / "clients.map").unlink()
    running = Servers({}, {KEY: "default 600 64", OLD_KEY: "robot 0 0 2026-11-01T00:00:00Z"})
    assert "clients.json" in host.sync(proxy=running.proxy).warnings[0]
    assert host.map("clients") == running.keys == {KEY: "default 600 64"}


@pytest.mark.parametrize("step", ["write_fresh", "symlink"])
def test_a_full_file_system_changes_nothing(host: Host, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    host.sync()
    before = (host.map("models"), host.links)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(sync, "write_fresh", full) if step == "write_fresh" else patch.setattr(os, "symlink", full)
        with pytest.raises(GatewayError, match=r"No space left.*vllm-edge gateway sync"):
            host.away("e4b")
    assert (host.map("models"), host.links) == before
    assert not [path for path in host.paths.gateway.iterdir() if path.name.endswith(".new")]


def test_what_somebody_put_there_is_replaced_and_never_followed(host: Host, tmp_path: Path) -> None:
    host.sync()
    outside = tmp_path / "outside"
    outside.write_text("precious")
    roles = host.paths.run / "roles"
    for path in (roles / "auditor.sock", host.paths.gateway / "models.map", host.paths.gateway / ".models.map.new"):
        path.unlink(missing_ok=True)
        path.symlink_to(outside)
    (roles / "stray.sock").symlink_to(outside)
    (roles / "file").write_text("of somebody")
    assert host.sync(check=True).changes == ("models.map", "link auditor.sock", "link stray.sock")
    assert os.readlink(roles / "auditor.sock") == str(outside), "a check changes nothing"
    host.sync()
    assert outside.read_text() == "precious" and not (host.paths.gateway / "models.map").is_symlink()
    assert os.readlink(roles / "auditor.sock") == "../engines/e4b/api.sock"
    assert sorted(path.name for path in roles.iterdir()) == ["architect.sock", "auditor.sock", "file", "worker.sock"]
    shutil.rmtree(roles)
    roles.symlink_to(tmp_path)
    with pytest.raises(GatewayError):
        host.sync()
    assert outside.exists()


def test_the_phase_of_a_switch_is_published(host: Host) -> None:
    publish_phase(host.paths, "drain")
    assert not (host.paths.gateway / "state.map").exists(), "what was never written is left to sync"
    host.sync()
    publish_phase(host.paths, "drain")
    assert host.map("state")["switch"] == '"drain"' and host.map("state")["host"]
    publish_phase(host.paths, None)
    assert host.map("state")["switch"] == "null"


@pytest.mark.parametrize("size", [1, 9_000])
def test_commands_fit_into_the_buffer_of_haproxy(size: int) -> None:
    entries = {f"k{number}": "x" * size for number in range(5)}
    parts = list(split_entries(entries))
    assert parse_text("".join(parts)) == entries
    assert max(map(len, parts)) <= max(8_000, size + 4) and (len(parts) == 1) is (size == 1)


def test_an_admin_socket_that_is_none_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "docker.sock")
    (tmp_path / "file").write_text("")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "docker.sock"))
        other.listen()
        other.settimeout(0)
        for name in ("none", "link", "file"):
            with pytest.raises(GatewayDown):
                ask_master(tmp_path / name, "show info")
        with pytest.raises(BlockingIOError):
            other.accept()


# ---- a fleet ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"gpus": GPUS[3:4], "port": 9000, "vram_budget_mib": 1, "image_id": "sha256:22"}, True),
        ({"note": "--gpu-memory-utilization=0.5"}, True),
        ({"note": "--enforce-eager"}, False),
        ({"chat": "{{ messages }}"}, False),
        *(({key: "other"}, False) for key in ("model", "revision", "precision", "image")),
        *(({key: ["other"]}, False) for key in ("served_names", "stands_in_for")),
        ({"max_model_len": 4096}, False),
    ],
    ids=str,
)
def test_hosts_that_serve_alike_have_one_digest(host: Host, change: dict[str, Any], same: bool) -> None:
    fleet = {"fleet": "edge", "host": "edge-1", "server": "host-edge-1", "address": "10.0.0.1", "port": 1, "peers": []}
    host.sync()
    assert "digest" not in host.map("state"), "a host of no fleet tells nothing"
    (host.paths.gateway / "fleet.json").write_text(json.dumps(fleet))
    found = []
    for options in ({}, change):
        activate(host.paths, rendered(engine("e4b", **options)))
        host.sync()
        state = host.map("state")
        assert (state["host"], state["fleet"], state["release"]) == ('"edge-1"', '"edge"', f'"{__version__}"')
        found.append(json.loads(state["digest"]))
    assert len(found[0]) == 12 and (found[0] == found[1]) is same


# ---- status -----------------------------------------------------------------------------------------------------


def test_the_status_of_a_gateway(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "frontend api\n  bind 127.0.0.1:8000\n  bind 10.0.0.1:8443 ssl crt x\n  bind unix@/run/x/probe.sock mode 600\n"
    )
    (host.paths.gateway / "haproxy.cfg").write_text(text)
    host.sync()
    host.away("e4b")
    servers = Servers({"architect": False, "worker": True})  # haproxy.cfg is from before the name auditor
    gateway = describe_gateway(host.paths, {"ActiveState": "active"}, servers.proxy)
    assert gateway is not None
    assert gateway["addresses"] == ["http://127.0.0.1:8000", "https://10.0.0.1:8443"]
    assert gateway["roles"]["worker"] == {
        **{"engine": "31b-w4a16", "engines": ["31b-w4a16"], "state": "away", "retry_after_s": 55}
    }
    line = " ".join(" ".join(render_gateway(gateway)).split())
    assert line.startswith("gateway active; http://127.0.0.1:8000")
    assert "architect stand-in, auditor unknown, worker away" in line
    assert run_status(host.paths, output="text") == 0
    assert ["architect", "e4b", "unknown"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    (host.paths.gateway / "haproxy.cfg").unlink()
    assert describe_gateway(host.paths, {}) is None and run_status(host.paths, output="json") == 1


@pytest.mark.parametrize("early", [True, False])
def test_an_engine_that_is_back_before_the_commit_is_provisional(host: Host, early: bool) -> None:
    """Its names lead to it, and those that it stands in for; Prometheus finds it with its own profile."""
    coming = replace(host.coming, early=early)
    loads = {"31b-w4a16": 54.2, "e4b": 20.0}
    progress = functools.partial(SwitchProgress, "healthy", (), coming)
    away, back = (build_view("edge", host.live, progress(engines), loads.get) for engines in ((), ("e4b",)))
    states = {role.name: (role.state, role.engines, role.retry_after_s) for role in back.roles}
    assert {role.name: role.retry_after_s for role in away.roles}["auditor"] == (20 if early else 55)
    assert states["auditor"][:2] == ("provisional", ("e4b",)) and states["worker"] == ("away", ("31b-w4a16",), 55)
    assert states["architect"][0] == "stand-in"
    assert back.links.keys() == {"auditor.sock", "architect.sock"} and away.links == {}
    assert [(config.engine, profile) for config, profile in back.engines] == [("e4b", coming.profile)]
    again = build_view("edge", coming, progress(("e4b",)), loads.get)
    assert {role.name: role.state for role in again.roles}["auditor"] == "up", "a repair has nothing to roll back"
    fewer = engine("e4b", 8060, served_names=["other"], gpus=GPUS[2:3])
    less = store.load(host.paths, put(host.paths, rendered(SMALL, fewer, profile="less")))
    former = build_view("edge", host.live, SwitchProgress("healthy", (), less, ("e4b",)), loads.get)
    assert {role.name: role.state for role in former.roles}["auditor"] == "away", (
        "the new engine does not know the name"
    )


def test_views_are_pure(host: Host) -> None:
    """An engine whose arguments change keeps its name; it is away, with the context that comes."""
    longer = replace(host.live, engines={**host.live.engines, "e4b": host.coming.engines["e4b"]})
    seen = build_view("edge", longer, SwitchProgress("away", (), host.coming), lambda name: 0.2)
    assert {role.state for role in seen.roles} == {"away"} and {role.retry_after_s for role in seen.roles} == {1}
    assert render_models(seen)["ports.map"] == {"8050": "31b-w4a16", "8060": "e4b"}
    clients = read_clients(host.paths.gateway / "clients.json")
    assert render_keys(clients, "2026-10-01T00:00:00Z").keys() == {KEY, OLD_KEY}
