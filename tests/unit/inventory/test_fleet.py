# SPDX-License-Identifier: Apache-2.0
"""Hosts of one fleet: what a host learns of the others, and what is refused before any of them is touched."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.inventory import fleet
from ansible.module_utils.vllm_edge.inventory.variables import load
from helpers import ROOT

KEYS = load(ROOT).variables[fleet.LISTEN]["options"]
ENGINES = {"small": {"port": 8060}}


def member(number: int, **more: Any) -> dict[str, Any]:
    return {
        "serving_fleet": "site",
        fleet.LISTEN: {"address": f"192.0.2.{number}", "port": 8444},
        "serving_gateway_listen": [{"address": "::1", "port": 8444}, {"address": "::", "port": 8443}],
        "serving_reports_directory": "/reports/",
        "roles": frozenset({"worker", "sentry"}),
        **more,
    }


def test_a_host_knows_the_others_of_its_fleet() -> None:
    mapped = {"address": "192.0.2.3", "port": "8445"}
    hosts = {"a": member(1), "gpu 2": member(2), "b": member(3, serving_fleet_listen=mapped)}
    hosts |= {"c": member(4, serving_fleet="other"), "d": {"serving_fleet": ""}}
    found = fleet.describe_host("a", hosts, hosts, "host-{}".format)
    peers = found.pop("peers")
    assert found == {"fleet": "site", "host": "a", "server": "host-a", "address": "192.0.2.1", "port": 8444}
    assert [peer["name"] for peer in peers] == ["b", "gpu 2"]
    assert peers[0] == {"name": "b", "server": "host-b", "address": "192.0.2.3", "port": 8445}
    assert fleet.describe_host("d", hosts, hosts, str) == {}


LISTEN = "serving_fleet_listen"
OTHER = {"b": member(2)}


def at(address: Any, port: Any = 8444) -> dict[str, Any]:
    return {LISTEN: {"address": address, "port": port}}


@pytest.mark.parametrize(
    ("own", "others", "sentences"),
    [
        ({}, OTHER, []),
        ({}, {}, ["serving_fleet: 'site' has no other host in the group gpu_hosts, which has 'sites'; set it"]),
        ({LISTEN: None}, OTHER, [f"{LISTEN}: has no value that is known before the run; write {{address: "]),
        ({LISTEN: "::1"}, OTHER, [f"{LISTEN}: '::1' is not a mapping; write {{address: "]),
        (
            {LISTEN: {"adress": "192.0.2.1", "port": 0}},
            OTHER,
            [f"{LISTEN}.adress: nothing reads this key", f"{LISTEN}.address: is missing", f"{LISTEN}.port: 0 is too"],
        ),
        (at("llm.example.org"), OTHER, [f"{LISTEN}.address: 'llm.example.org' is no IP address; write the IP"]),
        (at("127.0.0.2"), OTHER, [f"{LISTEN}.address: '127.0.0.2' is reached by the host itself alone"]),
        (at("0.0.0.0", 8446), OTHER, [f"{LISTEN}.address: '0.0.0.0' does not tell the others"]),
        (at("fe80::1"), OTHER, [f"{LISTEN}.address: 'fe80::1' means another host on each link"]),
        (at("192.0.2.1", 8060), OTHER, [f"{LISTEN}.port: 8060 is also the port of the engine small; write"]),
        (
            at("192.0.2.1", 8443),
            OTHER,
            [f"{LISTEN}.port: 8443 is also the port of an entry of serving_gateway_listen; "],
        ),
        (at("192.0.2.2"), OTHER, [f"{LISTEN}.port: 8444 is also the port of the host b, whose address is the same"]),
        ({"serving_gateway": "false"}, OTHER, ["serving_gateway: is false, and hosts of a fleet reach"]),
        ({}, {"site": member(2)}, ["serving_fleet: 'site' is also the name of a host"]),
        (
            {},
            {"b": member(2, serving_reports_directory="/else"), "c": member(3)},
            ["serving_fleet: 'site' is also that of b, whose serving_reports_directory is '/else' and not '/repo"],
        ),
        (
            {},
            {"b": member(2, roles=frozenset({"worker", "architect"})), "c": member(3, roles=frozenset({"sentry"}))},
            [
                "with b of the fleet 'site' the host lacks architect and has sentry,",
                "with c of the fleet 'site' the ho",
            ],
        ),
    ],
)
def test_what_cannot_be_a_fleet_is_refused(own: Any, others: Any, sentences: list[str]) -> None:
    members = {"a": member(1) | own, **others}
    fleets = {name: "site" for name in members} | {"z": "sites", "y": ""}
    found = list(fleet.find_fleet_mistakes("a", fleets, members, ENGINES, KEYS))
    assert len(found) == len(sentences), found
    for sentence, words in zip(found, sentences, strict=True):
        assert words in sentence and re.search(r"; .*[.?]$", sentence), sentence
