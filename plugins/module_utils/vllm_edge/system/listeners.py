# SPDX-License-Identifier: Apache-2.0
"""Listening TCP sockets of this host, from /proc/net/tcp and /proc/net/tcp6, and the processes that hold them."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from .process import PROC, command_of

ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 addresses to compare with, nothing is bound


def parse_listeners(text: str, port: int) -> list[tuple[str, str]]:
    """Return the sockets of /proc/net/tcp or /proc/net/tcp6 that listen on a port: address, and inode of the socket."""
    found = []
    for words in (line.split() for line in text.splitlines()[1:]):
        if len(words) < 10 or words[3] != "0A":
            continue
        digits, _, number = words[1].partition(":")
        if int(number, 16) != port:
            continue
        # The kernel prints 32-bit words in the byte order of this machine.
        packed = b"".join(int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8))
        address = ipaddress.ip_address(packed)
        found.append((str(getattr(address, "ipv4_mapped", None) or address), words[9]))
    return found


def process_of(inode: str, proc: Path = PROC) -> int | None:
    """Return the pid of a process that has the socket open; None if none is visible."""
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            for descriptor in (entry / "fd").iterdir():
                if os.readlink(descriptor) == f"socket:[{inode}]":
                    return int(entry.name)
        except OSError:
            continue  # the process has ended since
    return None


def _is_foreign(address: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False


def find_port_users(wanted: Iterable[tuple[str, int]], own_unit: str, proc: Path = PROC) -> list[str]:
    """Return a sentence for each address that is none of the host, or port that others than `own_unit` listen on."""
    found = []
    files = [path for path in (proc / "net/tcp", proc / "net/tcp6") if path.exists()]  # a kernel may have no IPv6
    texts = [path.read_text(encoding="ascii") for path in files]
    for address, port in dict.fromkeys(wanted):
        if _is_foreign(address):
            found.append(f"the host has no address {address}")
        for listens, inode in [listener for text in texts for listener in parse_listeners(text, port)]:
            if listens != address and not {listens, address} & {*ALL_ADDRESSES}:
                continue
            pid = process_of(inode, proc)
            directory = proc / str(pid)
            try:
                if pid is not None and own_unit in (directory / "cgroup").read_text(encoding="utf-8"):
                    continue
            except OSError:
                continue  # the process has ended since
            holder = "a process that is not visible from here" if pid is None else f"pid {pid} ({command_of(pid)})"
            found.append(f"port {port} of {address} is taken: {holder} listens on {listens}")
    return found
