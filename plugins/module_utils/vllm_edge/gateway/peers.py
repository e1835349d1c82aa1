# SPDX-License-Identifier: Apache-2.0
"""The other hosts of the fleet: what HAProxy reaches of them, and what their gateways say when they are asked."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from ..paths import HostPaths
from ..system.records import parse_json
from ..text import shown, wrapped
from .admin import Check, GatewayDown, HAProxy
from .clients import GatewayError
from .fleet import Fleet, Peer, read_fleet
from .names import PREFIX, backend_name
from .sync import open_proxy, read_map
from .view import MODELS, STATE

PEERS = "peers_"
"""Precedes `backend_name` in the backends of haproxy.cfg that check the other hosts."""
ASK_S, MOST_BYTES = 3.0, 64 * 1024
SAID = ("fleet", "profile", "switch", "digest", "release")
"""Keys of an answer to `GET /fleet`, and of state.map, by which hosts are compared."""
REASONS = {
    "IN": "not checked yet",
    "L4": "is not reached",
    "L6": "has a certificate that is refused here, or does not answer in TLS",
    "L7": "does not answer its check",
    "SO": "ends the connection, as one does that refuses this host's certificate",
}
"""By the beginning of a failed check's result. In TLS 1.3 a client's certificate is judged after the handshake."""
Fault = Literal["", "silent", "refuses", "foreign", "strange"]


@dataclass(frozen=True)
class Seen:
    """What the gateway of another host answers to `GET /fleet`; with a fault it does not."""

    name: str
    fault: Fault = ""
    why: str = ""
    ends: datetime | None = None
    """End of its certificate, where that counts."""
    ahead_s: float = 0.0
    """How far its clock is ahead of this host's."""
    said: Mapping[str, Any] = field(default_factory=dict)


def ask_peers(paths: HostPaths, fleet: Fleet) -> tuple[Seen, ...]:
    """Ask the gateways of all other hosts at once, as this host, for ASK_S each time that one is silent.

    Raises OSError: the own certificate, or those of the CAs, cannot be used.
    """
    if not fleet.peers:
        return ()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls = paths.gateway / "tls"
    for name, load in (("fleet.pem", context.load_cert_chain), ("fleet-ca.pem", context.load_verify_locations)):
        try:
            load(tls / name)
        except OSError as error:  # of ssl, too
            raise OSError(f"{tls / name}: {error.strerror or error}") from error
    with ThreadPoolExecutor(32) as pool:
        return tuple(pool.map(partial(_ask, context), fleet.peers))


def _ask(context: ssl.SSLContext, peer: Peer) -> Seen:
    began, ends, answer = time.time(), None, bytearray()
    try:
        with (
            socket.create_connection((peer.address, peer.port), ASK_S) as plain,
            context.wrap_socket(plain, server_hostname=peer.server) as connection,
        ):
            until = (connection.getpeercert() or {})["notAfter"]
            ends = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(until)), UTC)
            connection.sendall(b"GET /fleet HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while len(answer) <= MOST_BYTES and time.time() < began + 3 * ASK_S and (part := connection.recv(4096)):
                answer += part
            if not answer:
                raise ConnectionError("the connection is ended")
    except ssl.SSLCertVerificationError as error:
        return Seen(peer.name, "foreign", error.verify_message)
    except (OSError, UnicodeError) as error:
        refused = "alert" in str(error).lower() or (ends is not None and not isinstance(error, TimeoutError))
        why = str(getattr(error, "reason", "") or getattr(error, "strerror", "") or error)
        return Seen(peer.name, "refuses" if refused else "silent", why.replace("_", " ").lower(), ends)
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    try:
        status = head.partition(b"\r\n")[0].decode("latin-1")
        if status.split(" ")[1:2] != ["200"]:
            raise ValueError(f"it answers {shown(status)} to GET /fleet")
        said = parse_json(body)
        return Seen(peer.name, "", "", ends, float(said["now"]) - (began + time.time()) / 2, said)
    except (ValueError, TypeError, KeyError) as error:
        return Seen(peer.name, "strange", str(error), ends)


def describe_peers(paths: HostPaths, proxy: HAProxy | None = None) -> dict[str, Any] | None:
    """Return the fleet as `status --format json` shows it; None where the host is in none, or this cannot be read.

    `digest` is of what serves here (`sync.hash_service`), the same on hosts that serve alike. `roles` has for each
    served name whether HAProxy reaches it at that host, and `reason` why the host is not reached.
    """
    try:
        fleet = read_fleet(paths)
        served = {f"{PEERS}{backend_name(name)}": name for name in sorted(read_map(paths, MODELS))}
        digest = json.loads(read_map(paths, STATE).get("digest", "null"))
    except (GatewayError, OSError, ValueError):  # the status of the gateway says it
        return None
    if fleet is None:
        return None
    checks: Mapping[tuple[str, str], Check] = {}
    silent = None
    try:
        checks = (proxy or open_proxy(paths)).list_workers()[0].read_checks(PEERS)
    except GatewayDown as error:
        silent = f"HAProxy does not say what it reaches: {str(error).rstrip('.')}"
    peers = []
    for peer in fleet.peers:
        mine = {served[backend]: checks[backend, peer.server] for backend in served if (backend, peer.server) in checks}
        roles = {name: check.up for name, check in mine.items()}
        reason = silent or _find_reason([check for (_, server), check in checks.items() if server == peer.server])
        peers.append({"name": peer.name, "address": peer.address, "port": peer.port, "roles": roles, "reason": reason})
    return {"fleet": fleet.fleet, "host": fleet.host, "digest": digest, "peers": peers}


def _find_reason(checks: list[Check]) -> str | None:
    """Return why a host is not reached, in words; None where it is, and roles are at most away there."""
    if not checks:
        return "HAProxy does not know it: run playbooks/gateway.yml"
    wrong = (check.result for check in checks if not check.up and not check.result.startswith("L7STS"))
    return next((REASONS.get(result[:2], f"its check says {result}") for result in wrong), None)


def list_unserved(paths: HostPaths, proxy: HAProxy) -> tuple[str, ...]:
    """Return the served names for which HAProxy reaches no engine here, and no other host. Raises GatewayDown."""
    checks = proxy.list_workers()[0].read_checks(PREFIX)
    # The servers with which requests wait are not checked, so they are never up.
    down = {backend for backend, _ in checks} - {backend for (backend, _), check in checks.items() if check.up}
    return tuple(name for name in read_map(paths, MODELS) if f"{PREFIX}{backend_name(name)}" in down)


def render_fleet(fleet: Mapping[str, Any]) -> list[str]:
    """Return the fleet as one sentence: what each other host serves, and why one is not reached."""
    told = []
    for peer in fleet["peers"]:
        up = [name for name, reached in peer["roles"].items() if reached]
        what = "all served names" if up and len(up) == len(peer["roles"]) else ", ".join(up) or "nothing"
        told.append(f"{peer['name']} serves {what}" + (f" ({peer['reason']})" if peer["reason"] else ""))
    return wrapped("; ".join([f"fleet {fleet['fleet']}, here {fleet['host']}", *told]))
