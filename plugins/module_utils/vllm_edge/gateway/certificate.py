# SPDX-License-Identifier: Apache-2.0
"""The gateway's certificate: when it counts, and whether its key fits, as the program openssl tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ..paths import HostPaths
from ..system.host import run_in_english
from ..system.systemd import Run, SystemdError

OPENSSL_S = 10.0


@dataclass(frozen=True)
class Certificate:
    begins: datetime
    ends: datetime
    key_fits: bool


def server_pem(paths: HostPaths) -> Path:
    return paths.gateway / "tls" / "server.pem"


def _parse_time(text: str, name: str) -> datetime:
    found = re.search(rf"^{name}=(.+) GMT$", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"openssl says no {name}")
    return datetime.strptime(found[1], "%b %d %H:%M:%S %Y").replace(tzinfo=UTC)


def read_certificate(path: Path, run: Run = run_in_english) -> Certificate:
    """Read a file with a certificate and its key. Raises ValueError: it is none, or cannot be read."""
    try:
        shown = run(["openssl", "x509", "-in", str(path), "-noout", "-startdate", "-enddate", "-pubkey"], OPENSSL_S)
        key = run(["openssl", "pkey", "-in", str(path), "-passin", "pass:", "-pubout"], OPENSSL_S)
    except SystemdError as error:
        raise ValueError(str(error)) from error
    if shown.status != 0:
        raise ValueError(f"openssl cannot read it: {(shown.err.splitlines() or ['no reason given'])[0]}")
    public = shown.out[shown.out.find("-----BEGIN PUBLIC KEY-----") :].strip()
    fits = key.status == 0 and key.out.strip() == public
    return Certificate(_parse_time(shown.out, "notBefore"), _parse_time(shown.out, "notAfter"), fits)
