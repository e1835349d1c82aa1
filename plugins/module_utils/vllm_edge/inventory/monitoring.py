# SPDX-License-Identifier: Apache-2.0
"""What the operator's Prometheus needs to know of a host: the file of its client with `metrics: true` says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..weights.access import is_loopback

ADD = "Add serving_clients: {prometheus: {metrics: true}} to the inventory, and run playbooks/clients.yml."


def find_own_url(variables: Mapping[str, Any]) -> str:
    """Return the URL of the gateway of one host of a fleet: the file of its client has that of the whole fleet."""
    entries = variables.get("serving_gateway_listen") or [{"address": "127.0.0.1", "port": 8000}]
    entry = next((it for it in entries if not is_loopback(it["address"])), entries[0])
    everywhere = entry["address"] in ("0.0.0.0", "::")  # noqa: S104 compared
    address = variables["serving_fleet_listen"]["address"] if everywhere else entry["address"]
    return (
        f"{'https' if entry.get('tls') else 'http'}://{f'[{address}]' if ':' in address else address}:{entry['port']}"
    )


def describe_host(host: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return address, CA, targets and the file with the key, or only `fault`: why Prometheus cannot be let in.

    `note` is what the operator has to know, or "". The key itself is not returned: variables are shown.
    """
    clients = variables.get("serving_clients") or {}
    client = next((name for name, it in clients.items() if isinstance(it, Mapping) and it.get("metrics") is True), "")
    if not client:
        return {"fault": f"{host}: no client in serving_clients has metrics: true. {ADD}"}
    owner = variables.get("serving_fleet") or host
    file = Path(variables["serving_gateway_clients_directory"]) / f"{owner}-{client}.env"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    found = dict(re.findall(r"^(\w+)='?([^'\n]*)", text, re.MULTILINE))
    ca = found.get("SSL_CERT_FILE", "")
    if missing := next((path for path in (str(file), ca) if path and not Path(path).exists()), ""):
        return {"fault": f"{host}: {missing} does not exist. Run playbooks/clients.yml, which writes it."}
    if absent := {"OPENAI_BASE_URL", "OPENAI_API_KEY"} - found.keys():
        why = f"{file} has no {' and no '.join(sorted(absent))}"
        return {"fault": f"{host}: {why}. Move it away, and run playbooks/clients.yml -e rotate={client}."}
    shared = urlsplit(found["OPENAI_BASE_URL"])
    url = urlsplit(find_own_url(variables)) if variables.get("serving_fleet") else shared
    # A certificate of the operator has the name that clients use.
    server_name = shared.hostname if variables.get("serving_fleet") and url.scheme == "https" and not ca else ""
    name = url.hostname or ""
    port = url.port or (443 if url.scheme == "https" else 80)
    note = (
        f"{host}: its gateway is {url.scheme}://{url.netloc}, which no Prometheus on another machine reaches. Let it "
        "listen on an address of the host (serving_gateway_listen, with tls: true), or, where it does, set "
        "serving_gateway_url to that address. Then run playbooks/gateway.yml, and this playbook again."
    )
    return {
        "host": host,
        "scheme": url.scheme,
        "address": f"[{name}]:{port}" if ":" in name else f"{name}:{port}",
        "ca": ca,
        "server_name": server_name,
        "client_file": str(file),
        "targets": variables.get("serving_targets") or {},
        "note": note if is_loopback(name) else "",
        "fault": "",
    }
