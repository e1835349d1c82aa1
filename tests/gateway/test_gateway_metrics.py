# SPDX-License-Identifier: Apache-2.0
"""Metrics through the gateway: who may see them, where each page comes from, and the targets through a switch."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.journal import OWN_MARK
from ansible.module_utils.vllm_edge.facts.reader import list_places
from ansible.module_utils.vllm_edge.gateway import sync
from ansible.module_utils.vllm_edge.gateway.command import synchronize
from ansible.module_utils.vllm_edge.gateway.view import SwitchProgress
from ansible.module_utils.vllm_edge.generation import store
from ansible.module_utils.vllm_edge.generation.model import Generation
from ansible.module_utils.vllm_edge.paths import HostPaths
from ansible.module_utils.vllm_edge.switch.history import read_switch_progress
from gateway_host import ENGINES, KEYS, ROOT, Answer, Engine, Gateway, write_request
from generations import activate, engine, put, rendered

pytestmark = pytest.mark.slow

PAGES = ["host", "gateway", "targets", "engine/mid"]
HASHES = {name: hashlib.sha256(key.encode()).hexdigest() for name, key in KEYS.items()}
RIGHTS: dict[str, dict[str, Any]] = {
    "all": {},
    "solo": {"metrics": True},
    "part": {"metrics": True, "served_names": ["sentry"]},
    "slow": {"metrics": True, "requests_per_minute": 2},
}


@dataclass
class Host:
    """A gateway whose maps the host's program writes, with an exporter, and the generation that comes next."""

    gateway: Gateway
    paths: HostPaths
    live: Generation
    coming: Generation

    def get(self, page: str, key: str | None = "solo", **more: Any) -> Answer:
        return self.gateway.ask(write_request(path=f"/metrics/{page}", key=key, **more))

    def allow(self, clients: Mapping[str, Any]) -> None:
        written = {name: {"keys": [{"sha256": HASHES[name]}], **entry} for name, entry in clients.items()}
        (self.gateway.etc / "clients.json").write_text(json.dumps(written))
        synchronize(self.paths, read_switch_progress)

    def list_targets(self) -> dict[str, list[str]]:
        answer = self.get("targets")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert {target for group in answer.json for target in group["targets"]} <= {"[fd00::1]:8443"}
        return {
            group["labels"].pop("__metrics_path__").removeprefix("/metrics/engine/"): [*group["labels"].values()]
            for group in answer.json
        }


@pytest.fixture(scope="module")
def host(make_gateway_of_the_file: Callable[..., Gateway]) -> Iterator[Host]:
    gateway = make_gateway_of_the_file()
    paths = HostPaths(gateway.root, gateway.root / "state", gateway.root / "units", gateway.vllm, gateway.run)
    files = {name: engine(name, served_names=served, model="a b") for name, served in ENGINES.items()}
    files["big-1"] = engine("big-1", served_names=["architect"])
    live = activate(paths, rendered(*(files[name] for name in ("big", "mid", "small"))))
    coming = put(paths, rendered(files["big"], files["big-1"], files["mid"], profile="later"))
    exporter = Engine("exporter", gateway.root / "exporter/exporter.sock", gateway.loop)
    exporter.start()
    yield Host(gateway, paths, store.load(paths, live), store.load(paths, coming))
    exporter.stop()


@pytest.fixture(autouse=True)
def clients(host: Host) -> None:
    host.allow(RIGHTS)


def strip(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """An answer without its request id."""
    own = answer.headers.pop("x-request-id")
    return answer.status, answer.headers, answer.body.replace(own.encode(), b"")


STRANGE: list[dict[str, Any]] = [{"key": "all"}, {"method": "POST"}, {"method": "GET", "body": b"x"}]
STRANGE += [{"method": "GET", "body": b"x", "trailers": ""}]
ODD = ["", "engine/", "engine", "engine/no", "engine/../engine/mid", "engine/%6did", "engine/mid/", "engine/mid%2e"]
ODD += ["engine/MID", "%2e/host", "host/", "_host", "engine/_host", "/host", "host;x", "role_worker", "engine/mid\\"]


def test_for_all_others_the_paths_do_not_exist(host: Host) -> None:
    unknown = strip(host.get("nothing", key="all"))
    assert unknown[0] == 404 and b"unknown_path" in unknown[2]
    for page in PAGES:
        assert host.get(page).status == 200
        assert host.get(page, key=None).status == host.get(page, key="revoked").status == 401
        for odd in STRANGE:
            assert strip(host.get(page, **odd)) == unknown, (page, odd)
        assert host.get(page, method="HEAD", headers="Connection: close\r\n").status == 404
    for page in ODD:
        assert strip(host.get(page)) == unknown, page


def test_each_page_comes_from_its_own_server_or_from_nobody(host: Host) -> None:
    engines = host.gateway.engines
    for name in engines:
        answer = host.get(f"engine/{name}?name[]=x", headers="Accept-Encoding: gzip\r\nX-Vllm-Edge-Models: x\r\n")
        assert answer.json == {"engine": name} and "server" not in answer.headers
        seen = engines[name].seen[-1]
        own = {seen.headers.pop("x-request-id"): seen.headers.pop("connection")}
        assert (seen.target, seen.headers, len(own)) == (
            f"/metrics{OWN_MARK}",
            {"host": "localhost", "accept-encoding": "gzip"},
            1,
        )
        host.gateway.command(f"set server metrics/{name} state maint")
        assert host.get(f"engine/{name}").json == {"engine": name}, "nobody answers for it"
        host.gateway.command(f"set server metrics/{name} state ready")
    assert host.get("host").json == {"engine": "exporter"}
    engines["mid"].stop()  # the file of its socket is left
    for name in ("mid", "absent"):
        begun = time.monotonic()
        assert [host.get(f"engine/{name}").status for _ in range(4)] == [503] * 4, name
        assert time.monotonic() - begun < 1
    engines["mid"].start()
    assert host.get("engine/mid").json == {"engine": "mid"}
    last = host.get("nothing").headers["x-request-id"]
    assert host.gateway.get_log(last)["status"] == 404
    assert not {one["status"] for one in host.gateway.read_log() if one["client"] == "solo"} & {200, 503}
    assert not {place for place in list_places((host.gateway.etc / "haproxy.cfg").read_text()) if "mid" in place}


def test_targets_are_the_engines_that_serve_now(host: Host) -> None:
    def apply(generation: Generation, *keep: str) -> list[str]:
        progress = SwitchProgress("away", keep, host.coming) if generation is host.live else None
        sync.apply(host.paths, lambda: sync.view_host(host.paths, generation, progress))
        return sorted(host.list_targets())

    assert host.list_targets() == {
        "big": ["big", "p", "architect", "a b", "bf16"],
        "mid": ["mid", "p", "worker", "a b", "bf16"],
        "small": ["small", "p", "auditor,sentry", "a b", "bf16"],
    }
    assert " " not in (host.gateway.etc / "state.map").read_text().split("targets ")[1].splitlines()[0]
    assert apply(host.live, "big", "mid") == ["big", "mid"] and apply(host.live) == []
    assert apply(host.coming) == ["big", "big-1", "mid"] and host.list_targets()["big"][1] == "later"
    host.gateway.commit("state", {})
    assert host.list_targets() == {}


def test_the_right_goes_with_the_client_also_without_a_generation(host: Host) -> None:
    before = host.paths.active_profile.read_text()
    try:
        host.paths.active_profile.write_text("{")
        host.allow(RIGHTS)
        assert host.get("host").status == host.get("host", key="part").status == 200
        host.allow({name: entry for name, entry in RIGHTS.items() if name != "part"} | {"solo": {}})
        assert (host.get("host").status, host.get("host", key="part").status) == (404, 401)
    finally:
        host.paths.active_profile.write_text(before)


def test_such_a_client_uses_no_role_that_it_does_not_name(host: Host) -> None:
    def ask(key: str, model: str) -> int:
        return host.gateway.ask(write_request({"model": model}, key=key)).status

    assert [ask(key, "sentry") for key in ("all", "solo", "part")] == [200, 403, 200]
    assert [ask(key, "worker") for key in ("all", "solo", "part")] == [200, 403, 403]
    assert host.gateway.ask(write_request(path="/v1/models", key="solo")).json["data"] == []
    assert host.gateway.ask(write_request(path="/status", key="solo")).json["roles"] == {}
    assert [host.get("host", key="slow").status for _ in range(3)] == [200, 200, 429], "its limits hold"


def test_the_page_of_the_gateway_names_no_client(host: Host) -> None:
    text = host.get("gateway?scope=global").body.decode()
    assert 'haproxy_frontend_http_responses_total{proxy="api",code="2xx"}' in text
    assert 'haproxy_backend_http_responses_total{proxy="role_worker",code="5xx"}' in text
    assert 'haproxy_server_current_sessions{proxy="role_worker",server="hold"} 0' in text
    assert "haproxy_process_" not in text, "the query is ours"
    assert not [word for word in (*KEYS.values(), *HASHES.values()) if word in text]
    assert not [name for name in RIGHTS if f'"{name}"' in text]
    # What rules and dashboard name is there.
    files = [path.read_text() for path in (ROOT / "roles/serving_metrics/files").glob("*") if "test" not in path.name]
    names = {name for file in files for name in re.findall(r"\bhaproxy_[a-z_]+", file)}
    assert names and names <= set(re.findall(r"^(haproxy_[a-z_]+)\{", text, re.MULTILINE))
