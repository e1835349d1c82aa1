# SPDX-License-Identifier: Apache-2.0
"""Checks of what an operator wrote of the gateway: its addresses, clients, and engines that stand in for others."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..names import ENGINE_NAME, TEMPORARY_CLIENT
from ..text import nearest, shown
from .engine_inputs import (
    Spec,
    find_key_errors,
    find_owners,
    find_unknown_keys,
    parse_text,
    select_mappings,
    select_texts,
)

VARIABLES = (
    *("serving_gateway_listen", "serving_gateway_certificate", "serving_gateway_private_key"),
    *("serving_clients", "serving_metrics", "serving_targets"),
)
"""Variables of the gateway that are no plain setting, or that others of it need."""


def find_stand_in_errors(engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield names in `stands_in_for` that the engine serves itself, or that no other engine serves."""
    for name, engine in engines.items():
        where = f"serving_engines.{name}.stands_in_for"
        others = {
            served
            for other in engines.values()
            if other is not engine
            for served in select_texts(other.get("served_names"))
        }
        for wanted in select_texts(engine.get("stands_in_for")):
            if wanted in select_texts(engine.get("served_names")):
                yield f"{where}: the engine serves {shown(wanted)} itself (served_names); name roles of other engines."
            elif wanted not in others:
                yield f"{where}: no other engine serves {shown(wanted)}; {nearest(wanted, others)}"


def find_shared_stand_ins(where: str, engines: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield names for which two engines of one profile stand in."""
    owners = find_owners(
        (wanted, name)
        for name, engine in engines.items()
        for wanted in dict.fromkeys(select_texts(engine.get("stands_in_for")))
    )
    for wanted, names in owners.items():
        if len(names) > 1:
            yield f"{where}: {' and '.join(names)} stand in for {shown(wanted)}; leave it in stands_in_for of one."


def find_gateway_errors(
    variables: Mapping[str, Any], engines: Mapping[str, Mapping[str, Any]], certificate_fault: str, specs: Spec
) -> Iterator[str]:
    """Yield what is wrong with the variables of the gateway.

    `variables` has the values of VARIABLES that are set; `certificate_fault` is what is wrong with the files of the
    operator's certificate, or "". `specs` are the argument specs of the variables.
    """
    if "serving_gateway_listen" in variables:
        yield from _find_listen_errors(variables["serving_gateway_listen"], engines, specs)
    yield from _find_certificate_errors(variables, certificate_fault)
    known = {served for engine in engines.values() for served in select_texts(engine.get("served_names"))}
    if "serving_targets" in variables:
        yield from _find_target_errors(variables["serving_targets"], known, specs)
    if "serving_clients" in variables:
        yield from _find_client_errors(variables["serving_clients"], known, specs)
        if parse_text(variables.get("serving_metrics", True), {"type": "bool"}) is False:
            for name, client in select_mappings(variables["serving_clients"]).items():
                if client.get("metrics") is True:
                    yield (
                        f"serving_clients.{name}.metrics: is true, and nothing serves metrics, as serving_metrics is "
                        "false; remove serving_metrics from the inventory, or metrics from this client."
                    )


def _find_keys(where: str, given: Mapping[str, Any], specs: Spec, variable: str) -> Iterator[str]:
    keys = specs[variable]["options"]
    yield from find_unknown_keys(where, given, keys)
    yield from find_key_errors(where, given, keys, variable)


def _find_listen_errors(value: Any, engines: Mapping[str, Mapping[str, Any]], specs: Spec) -> Iterator[str]:
    where = "serving_gateway_listen"
    if not isinstance(value, list) or not value:
        yield f"{where}: {shown(value)} is no list; write [{{address: 127.0.0.1, port: 8000, tls: false}}]."
        return
    ports = {engine["port"]: name for name, engine in engines.items() if isinstance(engine.get("port"), int)}
    taken: list[tuple[str, int]] = []
    for position, entry in enumerate(value):
        at = f"{where}[{position}]"
        if not isinstance(entry, dict):
            yield f"{at}: {shown(entry)} is not a mapping; write {{address: 127.0.0.1, port: 8000, tls: false}}."
            continue
        if errors := list(_find_keys(at, entry, specs, where)):
            yield from errors
            continue
        address, port = entry["address"], entry["port"]
        try:
            ipaddress.ip_address(address)
        except ValueError:
            yield f"{at}.address: {shown(address)} is no IP address; write 127.0.0.1, one of the host, or :: for all."
            continue
        if not ipaddress.ip_address(address).is_loopback and entry.get("tls") is not True:
            yield (
                f"{at}: keys and prompts would be readable on the way to {shown(address)}, as tls is not true; write "
                f"tls: true, or the address 127.0.0.1."
            )
        if port in ports:
            yield f"{at}.port: {port} is the port of the engine {ports[port]}; give the gateway another one."
        if any(port == other and (address == place or _is_all(address) or _is_all(place)) for place, other in taken):
            yield f"{at}.port: {port} is the port of another entry, whose address overlaps; give each entry its own."
        taken.append((address, port))


def _is_all(address: str) -> bool:
    return ipaddress.ip_address(address).is_unspecified


def _find_certificate_errors(variables: Mapping[str, Any], fault: str) -> Iterator[str]:
    names = ("serving_gateway_certificate", "serving_gateway_private_key")
    for name in names:
        value = variables.get(name, "")
        if not isinstance(value, str) or not re.match(r"/|$", value):
            yield f"{name}: {shown(value)} is no absolute path; write that of a PEM file on this machine."
            return
    given = [name for name in names if variables.get(name)]
    if len(given) == 1:
        (other,) = set(names) - set(given)
        yield f"{other}: is not set, and {given[0]} is; set both, or neither for a certificate of the host's own CA."
    elif given and fault:
        yield fault


def _find_client_errors(value: Any, served: set[str], specs: Spec) -> Iterator[str]:
    where = "serving_clients"
    if not isinstance(value, dict):
        yield f"{where}: {shown(value)} is not a mapping; write clients by name: {{ci: {{served_names: [sentry]}}}}."
        return
    for name, client in value.items():
        if not isinstance(name, str) or not ENGINE_NAME.fullmatch(name):
            yield (
                f"{where}: {shown(name)} cannot be the name of a client; write up to 63 small letters, digits and -, "
                f"the first one a letter or digit."
            )
        elif name == TEMPORARY_CLIENT:
            yield (
                f"{where}: {shown(name)} is the client that playbooks/bench.yml makes for a run and revokes after it; "
                f"give yours another name, for example my-{name}."
            )
        elif not isinstance(client, dict):
            yield f"{where}.{name}: {shown(client)} is not a mapping; write {{}} for a client that may use every name."
        else:
            yield from _find_keys(f"{where}.{name}", client, specs, where)
            for wanted in select_texts(client.get("served_names")):
                if wanted not in served:
                    yield f"{where}.{name}.served_names: no engine serves {shown(wanted)}; {nearest(wanted, served)}"


def _find_target_errors(value: Any, served: set[str], specs: Spec) -> Iterator[str]:
    where = "serving_targets"
    if not isinstance(value, dict):
        yield f"{where}: {shown(value)} is not a mapping; write targets by role: {{architect: {{ttft_p95_s: 1.5}}}}."
        return
    for role, target in value.items():
        if role not in served:
            yield f"{where}: no engine serves {shown(role)}; {nearest(str(role), served)}"
        elif not isinstance(target, dict):
            yield f"{where}.{role}: {shown(target)} is not a mapping; write {{ttft_p95_s: 1.5, itl_p95_s: 0.08}}."
        else:
            yield from _find_keys(f"{where}.{role}", target, specs, where)
