# SPDX-License-Identifier: Apache-2.0
"""Hosts that serve the same roles together (`serving_fleet`): who they are, and what is wrong with one of them."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..text import shown
from .engine_inputs import Spec, find_key_errors, find_owners, find_unknown_keys, parse_text, select_mappings

LISTEN = "serving_fleet_listen"
VARIABLES = ("serving_fleet", LISTEN, "serving_gateway", "serving_gateway_listen", "serving_reports_directory")
"""What validation compares of the hosts of a fleet, beside their roles."""
_UNFIT = {
    "is_loopback": "is reached by the host itself alone",
    "is_unspecified": "does not tell the others where the host is",
    "is_link_local": "means another host on each link",
}
Values = Mapping[str, Any]


def describe_host(
    host: str, hosts: Iterable[str], hostvars: Mapping[str, Values], name_server: Callable[[str], str]
) -> dict[str, Any]:
    """Return what a host of a fleet has to know of itself and of its peers, the others by name; empty without a fleet.

    `hosts` are those of gpu_hosts.
    """
    fleet = hostvars[host].get("serving_fleet")
    members = {}
    for name in sorted(map(str, hosts)) if fleet else ():
        if hostvars[name].get("serving_fleet") == fleet:
            listen = hostvars[name][LISTEN]
            place = {"address": str(listen["address"]), "port": int(listen["port"])}
            members[name] = {"server": name_server(name), **place}
    peers = [{"name": name, **place} for name, place in members.items() if name != host]
    return {"fleet": str(fleet), "host": str(host), **members[host], "peers": peers} if host in members else {}


def find_fleet_mistakes(
    host: str, fleets: Values, members: Mapping[str, Values], engines: Any, keys: Spec
) -> Iterator[str]:
    """Yield what is wrong with a host of a fleet.

    `fleets` are serving_fleet of each host of gpu_hosts, `members` VARIABLES that have a value, and the set `roles`, of
    this host and the others of its fleet. `engines` are serving_engines of this host, `keys` those of LISTEN.
    """
    own, fleet = members[host], shown(fleets[host])
    others = {name: it for name, it in members.items() if name != host}
    yield from _find_listen_errors(own, others, engines, keys)
    if parse_text(own.get("serving_gateway", True), {"type": "bool"}) is False:
        yield "serving_gateway: is false, and hosts of a fleet reach each other by it; remove it, or serving_fleet."
    if fleets[host] in {name.casefold() for name in fleets}:
        yield f"serving_fleet: {fleet} is also the name of a host, and both would have the same files; write another."
    if not others:
        found = sorted({shown(it) for it in fleets.values() if it and it != fleets[host]})
        yield (
            f"serving_fleet: {fleet} has no other host in the group gpu_hosts{', which has ' if found else ''}"
            f"{' and '.join(found)}; set it for the others too, or remove it from a host that serves by itself."
        )
    places = {name: str(it.get("serving_reports_directory")).rstrip("/") for name, it in members.items()}
    for place, names in find_owners((places[name], name) for name in others).items():
        if place != places[host]:
            yield (
                f"serving_fleet: {fleet} is also that of {' and '.join(names)}, whose serving_reports_directory is "
                f"{place!r} and not {places[host]!r}, so that a client would have two keys; give one of two fleets "
                "another name, or all hosts of one fleet the same directory."
            )
    roles = own.get("roles")
    for theirs, names in find_owners((it.get("roles"), name) for name, it in others.items()).items():
        if theirs and roles and theirs != roles:
            told = (("lacks", theirs - roles), ("has", roles - theirs))
            words = [f"{verb} {', '.join(sorted(some))}" for verb, some in told if some]
            yield (
                f"serving_roles: compared with {' and '.join(names)} of the fleet {fleet} the host "
                f"{' and '.join(words)}, and any host may get a request for each role; write the same for all of them."
            )


def _find_listen_errors(own: Values, others: Mapping[str, Values], engines: Any, keys: Spec) -> Iterator[str]:
    listen = own.get(LISTEN)
    if not isinstance(listen, dict):
        told = "has no value that is known before the run" if listen is None else f"{shown(listen)} is not a mapping"
        yield f"{LISTEN}: {told}; write {{address: 192.0.2.11, port: 8444}} with an address of this host."
        return
    if errors := [*find_unknown_keys(LISTEN, listen, keys), *find_key_errors(LISTEN, listen, keys, LISTEN)]:
        yield from errors
        return
    address, port = listen["address"], listen["port"]
    try:
        place = ipaddress.ip_address(address)
        fault = next((why for kind, why in _UNFIT.items() if getattr(place, kind)), "")
    except ValueError:
        fault = "is no IP address"
    if fault:
        yield f"{LISTEN}.address: {shown(address)} {fault}; write the IP address by which the others reach this host."
    owners = [f"the engine {name}" for name, it in select_mappings(engines).items() if it.get("port") == port]
    entries = own.get("serving_gateway_listen")
    for entry in select_mappings(dict(enumerate(entries)) if isinstance(entries, list) else {}).values():
        if entry.get("port") == port and entry.get("address") in (address, "0.0.0.0", "::"):  # noqa: S104 compared
            owners.append("an entry of serving_gateway_listen")
    owners += [f"the host {name}, whose address is the same" for name, it in others.items() if it.get(LISTEN) == listen]
    if owners:
        yield f"{LISTEN}.port: {port} is also the port of {' and of '.join(owners)}; write one that is free."
