# SPDX-License-Identifier: Apache-2.0
"""Listening TCP ports of this host, out of /proc/net/tcp and tcp6, and the processes that have them open."""

from __future__ import annotations

import ipaddress
import os
import sys
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


def parse_listeners(text: str) -> dict[int, list[str]]:
    """Addresses that somebody listens on, by port, out of /proc/net/tcp or tcp6."""
    found: dict[int, list[str]] = {}
    for line in text.splitlines()[1:]:
        words = line.split()
        if len(words) < 4 or words[3] != "0A":
            continue
        digits, _, port = words[1].partition(":")
        # Words of 32 bits, each as this machine keeps it.
        packed = b"".join(int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
        address = ipaddress.ip_address(packed)
        found.setdefault(int(port, 16), []).append(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def is_loopback(address: str) -> bool:
    """Whether only this host reaches it."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return False  # no address stands for all of them


@dataclass(frozen=True)
class Listener:
    """Somebody who listens on a port of this host."""

    address: str
    inode: str


def listeners(port: int, proc: Path = PROC) -> list[Listener]:
    """Out of /proc/net/tcp and tcp6."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            lines = (proc / "net" / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # a kernel without IPv6
        for line in lines[1:]:
            addresses = parse_listeners(f"\n{line}").get(port)
            if addresses:
                found.append(Listener(addresses[0], line.split()[9]))
    return found


def process_of(inode: str, proc: Path = PROC) -> int | None:
    """The process that has a socket open."""
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            for descriptor in (entry / "fd").iterdir():
                if os.readlink(descriptor) == f"socket:[{inode}]":
                    return int(entry.name)
        except OSError:
            continue  # it ended meanwhile
    return None
